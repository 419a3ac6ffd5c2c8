"""Warm start: after it, no request prepares anything; and it changes nothing that a request could see."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, FeedError, OperatorError
from dagexec.scheduler.nets import net as net_module
from tests.held import PATIENCE, doubled_model, held_operators, rows
from tests.nets import temporary_operator
from tests.new_threads import new_threads
from tests.ops.running import operator_def

NET_TYPES = ["simple", "dag", "async_dag"]


@pytest.fixture
def preparations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One element for each preparation made of a net that has operators."""
    made: list[object] = []
    real = net_module.Preparation

    def counted(*arguments: object, **options: object) -> object:
        if arguments[0]:
            made.append(None)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(net_module, "Preparation", counted)
    return made


@pytest.mark.parametrize("net_type", NET_TYPES)
def test_after_a_warm_start_no_request_of_those_shapes_prepares_anything(
    net_type: str, preparations: list[object]
) -> None:
    with dagexec.compile(doubled_model(), optimize=False, net_type=net_type, replicas=3, warm_start=True) as executor:
        assert len(preparations) == 3
        statistics = executor.statistics()
        assert statistics.runs_per_replica == (1, 1, 1)
        assert (statistics.completed, statistics.median_latency) == (0, None)
        for value in range(6):
            np.testing.assert_array_equal(executor.run({"x": rows(value, 1)})["y"], rows(2 * value, 1))
        assert len(preparations) == 3


def test_a_warm_start_takes_the_shapes_it_is_given(preparations: list[object]) -> None:
    with dagexec.compile(doubled_model(), optimize=False, replicas=2, warm_start={"x": (5, 3)}) as executor:
        for value in range(4):
            executor.run({"x": rows(value, 5)})
        assert len(preparations) == 2


def test_warming_up_with_feeds_runs_them_on_every_replica() -> None:
    seen: list[float] = []
    with (
        temporary_operator("Note", lambda operator: seen.append(float(operator.x(0).flat[0]))),
        dagexec.compile(doubled_model("Note"), optimize=False, replicas=3) as executor,
    ):
        executor.warm_up({"x": rows(7)})
        assert seen == [7, 7, 7]
        executor.warm_up()
        assert seen == [7, 7, 7, 0, 0, 0]
        assert executor.statistics().runs_per_replica == (2, 2, 2)


def test_a_net_that_updates_its_parameters_is_prepared_but_not_run(preparations: list[object]) -> None:
    net = NetDef(name="counter", op=[operator_def("Add", ["count", "x"], ["count"])])
    start = np.full(1, 5, np.float32)
    inputs = {"x": InputInfo(dtypes.FLOAT32, (1,))}
    model = Model("counter", net, parameters={"count": start}, inputs=inputs, outputs=("count",))
    with dagexec.compile(model, optimize=False, replicas=2) as executor:
        executor.warm_up({"x": np.ones(1, np.float32)})
        assert len(preparations) == 2
        assert executor.run({"x": np.ones(1, np.float32)})["count"].tolist() == [6]


def test_replicas_that_are_busy_are_warmed_when_they_are_free() -> None:
    with (
        held_operators() as held,
        ThreadPoolExecutor(3) as threads,
        dagexec.compile(doubled_model("Held"), optimize=False, replicas=2, num_workers=2) as executor,
    ):
        running = [threads.submit(executor.run, {"x": rows(1)}) for _ in range(2)]
        held.wait_inside(2)
        warming = threads.submit(executor.warm_up)
        while not executor._dispatcher.state.pinned:
            pass
        held.go_on.release(4)
        for future in (*running, warming):
            future.result(PATIENCE)
        assert sorted(held.seen) == [0, 0, 1, 1]
        assert executor.statistics().runs_per_replica == (2, 2)
        assert executor.statistics().completed == 2


def test_text_inputs_are_warmed_up_with_empty_strings() -> None:
    net = NetDef(name="text", op=[operator_def("Copy", ["x"], ["y"])])
    model = Model(name="text", net=net, inputs={"x": InputInfo(dtypes.STRING, (2,))}, outputs=("y",))
    with dagexec.compile(model, optimize=False, warm_start=True) as executor:
        assert executor.run({"x": ["a", "b"]})["y"].tolist() == [b"a", b"b"]


def test_an_input_of_unknown_shape_needs_one() -> None:
    net = NetDef(name="plain", op=[operator_def("Relu", ["x"], ["y"])])
    model = Model(name="plain", net=net, inputs={"x": InputInfo()}, outputs=("y",))
    with pytest.raises(FeedError, match=r"does not say which shape input 'x' has; give it: warm_start="):
        dagexec.compile(model, optimize=False, warm_start=True)
    with pytest.raises(FeedError, match=r"\['z'\] are no inputs; the inputs are \['x'\]"):
        dagexec.compile(model, optimize=False, warm_start={"z": (1,)})
    with dagexec.compile(model, optimize=False, warm_start={"x": (2, 2)}) as executor:
        assert executor.run({"x": np.ones((2, 2), np.float32)})["y"].shape == (2, 2)


def test_a_net_that_does_not_like_zeros_says_that_they_were_ours_and_leaves_no_thread() -> None:
    def picky(operator: Operator) -> None:
        if not operator.x(0).any():
            raise ValueError("zeros")

    started = new_threads()
    with temporary_operator("Picky", picky):
        with pytest.raises(OperatorError, match="zeros") as caught:
            dagexec.compile(doubled_model("Picky"), optimize=False, warm_start=True)
        assert "warmed up with zeros; warm_up(feeds)" in caught.value.__notes__[0]
        assert started() == 0
        with dagexec.compile(doubled_model("Picky"), optimize=False) as executor:
            executor.warm_up({"x": rows(1)})


def test_a_closed_executor_cannot_be_warmed_up() -> None:
    executor = dagexec.compile(doubled_model(), optimize=False)
    executor.close()
    with pytest.raises(ClosedError):
        executor.warm_up()


@pytest.mark.parametrize("way", ["close", "drain"])
def test_a_warm_up_that_waits_for_a_busy_replica_ends_with_the_executor(way: str) -> None:
    with held_operators() as held, ThreadPoolExecutor(3) as threads:
        executor = dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1)
        running = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        warming = threads.submit(executor.warm_up)
        while not executor._dispatcher.state.pinned:
            pass
        closing = threads.submit(executor.close if way == "close" else lambda: executor.drain(0))
        with pytest.raises(ClosedError):
            warming.result(PATIENCE)
        held.go_on.release()
        closing.result(PATIENCE)
        assert held.seen == [1]
        assert isinstance(running.exception(PATIENCE), ClosedError if way == "drain" else type(None))


def test_a_replica_that_is_being_warmed_serves_nobody_else_meanwhile() -> None:
    with (
        held_operators() as held,
        ThreadPoolExecutor(2) as threads,
        dagexec.compile(doubled_model("Held"), optimize=False, num_workers=2) as executor,
    ):
        warming = threads.submit(executor.warm_up)
        held.wait_inside()
        running = threads.submit(executor.run, {"x": rows(1)})
        while not (moment := executor.statistics()).queued:
            assert moment.running < 2
        held.go_on.release(2)
        warming.result(PATIENCE)
        running.result(PATIENCE)
        assert len(executor._dispatcher.state.idle) == 1


def test_an_input_that_the_rewritten_net_no_longer_reads_is_warmed_up_with_too() -> None:
    model = doubled_model()
    model.net.op.append(operator_def("Relu", ["unread"], ["nobody reads it"]))
    model = replace(model, inputs={**model.inputs, "unread": InputInfo(dtypes.FLOAT32, (2,))})
    with dagexec.compile(model, warm_start=True) as executor:
        assert all("unread" not in definition.input for definition in executor.model.net.op)
        results = executor.run({"x": rows(3), "unread": np.ones(2, np.float32)})
        np.testing.assert_array_equal(results["y"], rows(6))
