"""Threads that call `run` of a net whose chains or pieces are shared: they compute, and idle workers help them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, OperatorError
from dagexec.scheduler.nets import dag
from dagexec.scheduler.run.overhead import WORTH_SHARING
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.work import Work
from tests.held import PATIENCE, Held, rows
from tests.interrupts import InterruptedAtPoints
from tests.nets import temporary_operator
from tests.ops.running import operator_def


def wide_model(first: str, branches: str, width: int = 2) -> Model:
    """An operator of type `first`, of whose result as many operators as `width` make one each, and these are joined."""
    names = [f"branch{number}" for number in range(width)]
    net = NetDef(name="wide", external_input=["x"], external_output=["y"])
    net.op.append(operator_def(first, ["x"], ["h"]))
    net.op.extend(operator_def(branches, ["h"], [name]) for name in names)
    net.op.append(operator_def("Sum", names, ["y"]))
    return Model("wide", net, inputs={"x": InputInfo(dtypes.FLOAT32, (None, 3))}, outputs=("y",))


class Noted:
    """An operator that copies its input, and notes the thread that it is in; with others, once `meeting` is full."""

    def __init__(self, meeting: threading.Barrier | None = None) -> None:
        self.threads: dict[float, set[int]] = {}
        self.meeting = meeting

    def __call__(self, operator: Operator) -> None:
        value = float(operator.x(0).flat[0])
        self.threads.setdefault(value, set()).add(threading.get_ident())
        if self.meeting is not None:
            self.meeting.wait(PATIENCE)
        np.copyto(operator.y(0), operator.x(0))


@contextmanager
def compiled(model: Model, **options: object) -> Iterator[dagexec.Executor]:
    """An executor of workers of its own, as many as replicas; its replicas are prepared for two rows."""
    settings = {"optimize": False, "net_type": "dag", "num_workers": 2, "pool": "own", **options}
    with dagexec.compile(model, **settings) as executor:  # type: ignore[arg-type]
        for replica in executor._replicas.members:
            replica.feed({"x": rows(0)})
        yield executor


def test_a_lone_request_is_computed_by_its_caller_and_a_worker() -> None:
    noted = Noted(threading.Barrier(2))
    with temporary_operator("Noted", noted, row_by_row=True), compiled(wide_model("Copy", "Noted")) as executor:
        for value in (1.0, 2.0):
            np.testing.assert_array_equal(executor.run({"x": rows(value)})["y"], rows(2 * value))
            here = threading.get_ident()
            assert here in noted.threads[value]
            assert noted.threads[value] - {here} < executor._pool.workers
        statistics = executor.statistics()
        assert (statistics.completed, statistics.running, statistics.failed) == (2, 0, 0)
        assert sum(statistics.runs_per_replica) == 2


def test_pieces_of_one_operator_are_computed_by_its_caller_and_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(0)
    net = NetDef(name="product", external_input=["x", "w", "b"], external_output=["y"])
    net.op.append(operator_def("FC", ["x", "w", "b"], ["y"]))
    parameters = {"w": generator.standard_normal((1024, 512), np.float32), "b": np.zeros(1024, np.float32)}
    model = Model(
        "product", net, parameters=parameters, inputs={"x": InputInfo(dtypes.FLOAT32, (64, 512))}, outputs=("y",)
    )
    x = generator.standard_normal((64, 512), np.float32)
    with dagexec.compile(model, net_type="dag", num_workers=2, pool="own") as executor:
        expected = executor.run({"x": x})["y"]
        replica = executor._replicas.members[0]
        work = replica.net._host_work(replica.net.prepared(), None)
        if work.native is None or max(work.graph.pieces) < 2:
            pytest.skip("no native pieces here")
        native, runs = work.native, []

        def traced(self: Work, **_options: object) -> object:
            runs.append(new_run(native, traced=True))
            return runs[-1]

        new_run = type(native).new_run
        monkeypatch.setattr(type(native), "new_run", traced)
        who: set[int] = set()
        for _ in range(1000):
            assert executor.run({"x": x})["y"].tobytes() == expected.tobytes()
            who = {worker for _, _, worker, *_ in runs.pop().records()}
            if len(who) > 1:
                break
        assert -1 in who, "the caller"
        assert who & {0, 1}, "a worker"


@pytest.mark.parametrize(("seconds", "is_shared"), [
    ([*[2] * 8, 0.5], True), ([2, 0.5], False), ([None] * 8, True),
])  # fmt: skip
def test_whether_runs_are_worth_sharing_is_found_out_from_the_first_few(
    seconds: list[float | None], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In units of what is worth it; None where an operator may wait for anything."""
    found = iter(seconds)

    def measured(_run: Run) -> float | None:
        took = next(found)
        return None if took is None else took * WORTH_SHARING

    monkeypatch.setattr(dag, "WORTH_SHARING", 0.0)  # by estimate it is, as if it were large
    monkeypatch.setattr(Run, "native_seconds", measured)
    with compiled(wide_model("Copy", "Relu")) as executor:
        binding = executor._replicas.members[0].io_binding
        assert binding is not None
        assert binding.is_shared
        for _ in range(10):
            np.testing.assert_array_equal(executor.run({"x": rows(2)})["y"], rows(4))
        assert executor._replicas.members[0].io_binding is binding
        assert binding.is_shared is is_shared


def test_what_is_little_by_estimate_is_never_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Run, "native_seconds", lambda _run: 2 * WORTH_SHARING)
    with compiled(wide_model("Relu", "Relu")) as executor:
        executor.run({"x": rows(2)})
        small = executor._replicas.members[0].io_binding
        assert small is not None
        assert not small.is_shared
        executor.run({"x": np.zeros((1 << 20, 3), np.float32)})
        large = executor._replicas.members[0].io_binding
        assert large is not None
        assert large.is_shared


def test_callers_of_which_there_are_as_many_as_cores_compute_their_own_requests_and_wait_for_nobody() -> None:
    noted = Noted()
    meeting = threading.Barrier(2)

    def meet(operator: Operator) -> None:
        meeting.wait(PATIENCE)
        np.copyto(operator.y(0), operator.x(0))

    model = wide_model("Meet", "Noted", width=8)
    model.net.op.append(operator_def("Meet", ["y"], ["z"]))  # a worker that one of them left idle would help the other
    with (
        temporary_operator("Noted", noted, row_by_row=True),
        temporary_operator("Meet", meet, row_by_row=True),
        compiled(model, replicas=2) as executor,
        ThreadPoolExecutor(2) as callers,
    ):

        def call(value: float) -> bool:
            found = executor.run({"x": rows(value)})["y"]
            return found[0, 0] == 8 * value and noted.threads[value] == {threading.get_ident()}

        calls = [callers.submit(call, float(value)) for value in (1, 2)]
        assert all(one.result(PATIENCE) for one in calls)
        assert executor.statistics().completed == 2


@pytest.mark.parametrize("stop", [lambda executor: executor.drain(0)], ids=["drained"])
def test_a_callers_run_is_stopped_before_its_next_operator(
    held: Held, stop: Callable[[dagexec.Executor], object]
) -> None:
    after = Noted()
    model = wide_model("Copy", "Held")
    model.net.op.append(operator_def("Noted", ["y"], ["z"]))
    with (
        temporary_operator("Noted", after),
        compiled(model) as executor,
        ThreadPoolExecutor(2) as threads,
    ):
        running = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside(2)
        stopping = threads.submit(stop, executor)
        (request,) = executor._dispatcher.state.running.values()
        while request.cancelled is None:
            pass
        held.go_on.release(2)
        with pytest.raises(ClosedError):
            running.result(PATIENCE)
        assert stopping.result(PATIENCE) is False
        assert not after.threads
        assert executor.statistics().cancelled == 1


def test_a_run_that_fails_on_a_worker_fails_for_its_caller_and_the_next_one_does_not(held: Held) -> None:
    held.failing.add(1)
    with compiled(wide_model("Copy", "Held")) as executor:
        held.go_on.release(4)
        with pytest.raises(OperatorError, match=r"Held 'branch\d' .*told to fail at 1"):
            executor.run({"x": rows(1)})
        held.seen.clear()
        while held.go_on.acquire(blocking=False):
            pass
        held.go_on.release(2)
        executor.run({"x": rows(2)})
        assert held.seen == [2, 2]
        assert (executor.statistics().failed, executor.statistics().completed) == (1, 1)


def test_an_operator_of_a_shared_run_cannot_use_the_executor_that_runs_it_on_either_thread() -> None:
    meeting = threading.Barrier(2)

    def body(operator: Operator) -> None:
        meeting.wait(PATIENCE)
        executor.run({"x": rows(1)})

    with temporary_operator("Calling", body), compiled(wide_model("Copy", "Calling"), replicas=2) as executor:
        with pytest.raises(OperatorError, match="the executor that runs it; it would wait for itself") as told:
            executor.run({"x": rows(1)})
        assert len([note for note in told.value.__notes__ if "it would wait for itself" in note]) == 1
        assert executor.statistics().running == 0


@pytest.mark.slow
def test_ctrl_c_at_any_point_of_a_shared_run_loses_neither_a_replica_nor_a_worker() -> None:
    noted = Noted()
    with (
        temporary_operator("Noted", noted, row_by_row=True),
        compiled(wide_model("Copy", "Noted"), replicas=2) as executor,
    ):
        state, pool = executor._dispatcher.state, executor._pool

        def checked() -> None:
            try:
                interrupted.look(lambda: executor.run({"x": rows(1)}))
            finally:
                assert state.running == {}, f"point {interrupted.point}"
                assert sorted(replica.number for replica in state.idle) == [0, 1], f"point {interrupted.point}"
                np.testing.assert_array_equal(executor.run({"x": rows(2)})["y"], rows(4))
                while pool.statistics().idle < 2:
                    pass
                assert pool._roster.is_empty, f"point {interrupted.point}"

        interrupted = InterruptedAtPoints("dagexec/")
        interrupted(checked, fewest=100)
        assert executor.statistics().busy_workers == 0
