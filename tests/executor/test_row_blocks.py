"""Runs of a number of rows that nothing is prepared for, made up of blocks that something is: nobody can tell."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.binding import block_sizes
from dagexec.binding.io_binding import Signature
from dagexec.binding.replicas import Replica
from dagexec.core import dtypes
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef
from dagexec.errors import (
    ClosedError,
    FeedError,
    OperatorError,
    ResourceError,
    RunCancelledError,
    RunTimeoutError,
    ShapeError,
    WorkerLostError,
)
from dagexec.executor.batching.row_blocks import RowBlocks
from dagexec.executor.executor import Executor
from dagexec.executor.requests.blocked_run import BlockedRun
from dagexec.executor.requests.request import Request
from dagexec.platform.threads import ThreadWait
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from dagexec.tracing import Trace
from tests.executor.held_executor import after_cancel
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.nets import temporary_operator
from tests.ops.running import operator_def

Array = np.ndarray[Any, Any]


@pytest.fixture(autouse=True)
def _blocks_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or runs of such small nets would never be made up of two."""
    monkeypatch.setattr(block_sizes, "BLOCK_SECONDS", 0.0)


def made(executor: Executor) -> int:
    return sum(one.made for one in executor.statistics().preparations)


@contextmanager
def counting_runs() -> Iterator[tuple[Model, list[int]]]:
    """y = relu(x) * scale, by an operator that keeps the number of its rows in a list; and that list."""
    counts: list[int] = []

    def count(operator: Any) -> None:
        counts.append(operator.x(0).shape[0])
        np.maximum(operator.x(0), 0, out=operator.y(0))

    with temporary_operator("Counted", count, row_by_row=True):
        yield doubled_model("Counted"), counts


def test_a_new_number_of_rows_runs_as_blocks_of_known_ones() -> None:
    x = np.random.default_rng(0).standard_normal((40, 3), np.float32)
    with counting_runs() as (model, counts), dagexec.compile(model, optimize=False) as executor:
        for count, blocks in ((32, [32]), (8, [8]), (40, [32, 8]), (37, [32, 8]), (7, [8]), (4, [4]), (19, [8, 8, 4])):
            counts.clear()
            found = executor.run({"x": x[:count]})["y"]
            assert counts == blocks
            np.testing.assert_array_equal(found, 2 * np.maximum(x[:count], 0))
        assert made(executor) == 3
        assert executor.statistics().completed == 7
        executor.run({"x": x[:19]})
        assert (counts[-1], made(executor)) == (19, 4), "it came back"


def test_a_block_of_more_rows_than_there_are_is_filled_up_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_sizes, "BLOCK_SECONDS", 1.0)  # so it does not matter how many rows a run has
    fed: list[Array] = []

    def keep(operator: Any) -> None:
        fed.append(operator.x(0).copy())
        np.maximum(operator.x(0), 0, out=operator.y(0))

    x = numbered(8)
    with (
        temporary_operator("Kept", keep, row_by_row=True),
        dagexec.compile(doubled_model("Kept"), optimize=False) as executor,
    ):
        for count in (8, 7, 4, 3, 2, 1):
            np.testing.assert_array_equal(executor.run({"x": x[:count]})["y"], 2 * x[:count])
            np.testing.assert_array_equal(fed.pop(), x[np.arange(8) % count])
        assert made(executor) == 1


def test_runs_of_no_rows_are_no_blocks() -> None:
    with dagexec.compile(doubled_model(), optimize=False) as executor:
        for count in (0, 8, 7, 0, 15):
            assert executor.run({"x": rows(1, count)})["y"].shape == (count, 3)
        assert made(executor) == 2


def test_what_somebody_watches_or_warms_up_is_one_run() -> None:
    with counting_runs() as (model, counts), dagexec.compile(model, optimize=False) as executor:
        for act in (
            lambda: executor.run({"x": rows(0, 8)}),
            lambda: executor.warm_up({"x": rows(0, 16)}),
            lambda: executor.run({"x": rows(0, 15)}, trace=Trace()),
        ):
            act()
        assert counts == [8, 16, 15]


def test_results_go_to_the_arrays_that_are_given_for_them() -> None:
    with counting_runs() as (model, counts), dagexec.compile(model, optimize=False) as executor:
        executor.run({"x": rows(1, 8)})
        out = np.empty((3, 20), np.float32).T
        assert executor.run({"x": rows(3, 20)}, out={"y": out})["y"] is out
        np.testing.assert_array_equal(out, rows(6, 20))
        assert counts == [8, 8, 8, 8]
        with pytest.raises(FeedError, match=r"out\['y'\] must be float32 of shape \(21, 3\), found .* \(20, 3\)"):
            executor.run({"x": rows(3, 21)}, out={"y": out})
        np.testing.assert_array_equal(executor.run({"x": rows(4, 22)})["y"], rows(8, 22))


def two_inputs() -> Model:
    """y = (a + b)^T * scale, z = scale * scale: rows on axis 1 of `a`, 0 of `b` and 1 of y, and none in z."""
    net = NetDef(
        name="two",
        op=[
            operator_def("Transpose", ["a"], ["t"], axes=[1, 0]),
            operator_def("Add", ["t", "b"], ["sum"]),
            operator_def("Mul", ["sum", "scale"], ["scaled"]),
            operator_def("Transpose", ["scaled"], ["y"], axes=[1, 0]),
            operator_def("Mul", ["scale", "scale"], ["z"]),
        ],
    )
    infos = {"a": InputInfo(dtypes.FLOAT32, (3, None)), "b": InputInfo(dtypes.FLOAT32, (None, 3)),
             "scale": InputInfo(dtypes.FLOAT32, (3,))}  # fmt: skip
    return Model("two", net, inputs=infos, outputs=("y", "z"))


def test_rows_lie_on_any_axes_and_inputs_without_are_for_all() -> None:
    scale = np.float32([1, 2, 3])
    with dagexec.compile(two_inputs(), optimize=False, batch_axes={"a": 1, "b": 0}) as executor:
        for count in (16, 6, 15, 21, 22):
            a, b = np.random.default_rng(count).standard_normal((2, count, 3), np.float32)
            found = executor.run({"a": a.T, "b": b, "scale": scale})
            np.testing.assert_array_equal(found["y"], ((a + b) * scale).T)
            np.testing.assert_array_equal(found["z"], scale * scale)
        assert made(executor) == 2
        with pytest.raises(ShapeError):
            executor.run({"a": rows(1, 5).T, "b": rows(1, 6), "scale": scale})


@pytest.mark.parametrize(
    "last",
    [
        operator_def("Softmax", ["h"], ["y"], axis=0),
        operator_def("ReduceMax", ["h"], ["y"], axes=[0]),
        operator_def("Counted", ["h"], ["y"]),
    ],
    ids=lambda one: one.type,
)
def test_a_net_whose_rows_are_not_apart_is_never_split(last: Any) -> None:
    model = doubled_model()
    net = NetDef(name="mixed", op=[operator_def("Mul", ["x", "scale"], ["h"]), last])
    model = Model("mixed", net, None, model.parameters, model.inputs, ("y",))
    with (
        temporary_operator("Counted", lambda operator: operator.y(0).fill(len(operator.x(0)))),
        dagexec.compile(model, optimize=False) as executor,
    ):
        for count in (8, 7, 16):
            executor.run({"x": rows(1, count)})
        assert made(executor) == 3


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        ("zoo:lenet", (1, 28, 28)),
        pytest.param("zoo:squeezenet", (3, 224, 224), marks=pytest.mark.slow),
    ],
)
def test_blocks_of_a_network_have_the_bytes_of_one_run(model: str, shape: tuple[int, ...]) -> None:
    with dagexec.compile(model) as blocks, dagexec.compile(model) as whole:
        (name,) = blocks.inputs
        x = np.random.default_rng(0).standard_normal((12, *shape), np.float32)
        blocks.run({name: x[:4]})
        for count in (3, 7, 10, 12):
            whole.warm_up({name: x[:count]})
            expected = whole.run({name: x[:count]})
            found = blocks.run({name: x[:count]})
            assert {key: array.tobytes() for key, array in found.items()} == {
                key: array.tobytes() for key, array in expected.items()
            }
        assert made(blocks) == 2, "12 rows are three blocks of 4, but 3 are not one"


def test_nets_whose_bytes_may_depend_on_the_batch_are_never_split() -> None:
    with dagexec.compile(doubled_model(), batch_invariant=False) as executor:
        for count in (8, 7, 16):
            executor.run({"x": rows(1, count)})
        assert made(executor) == 3


def numbered(count: int) -> Array:
    """Row i is i, i, i."""
    return np.repeat(np.arange(count, dtype=np.float32), 3).reshape(count, 3)


@contextmanager
def in_blocks_of_8(held: Held) -> Iterator[Executor]:
    """An executor that knows eight rows. Afterwards it must serve on its replica."""
    net = NetDef(name="held", op=[operator_def("HeldRows", ["x"], ["h"]), operator_def("Mul", ["h", "scale"], ["y"])])
    held.go_on.release(1)
    with dagexec.compile(dataclasses.replace(doubled_model(), net=net), optimize=False, num_workers=2) as executor:
        executor.run({"x": rows(0, 8)})
        held.wait_inside()
        held.seen.clear()
        yield executor
        if not executor._dispatcher.state.shut:
            assert len(executor._dispatcher.state.idle) == 1
            held.failing.clear()
            held.go_on.release(3)
            assert executor.run({"x": numbered(22)}, timeout=PATIENCE)["y"].shape == (22, 3)
            assert held.seen[-3:] == [0, 8, 14]
            assert made(executor) == 1


def test_a_run_that_is_over_its_time_starts_no_further_block(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = ThreadWait.wait

    def over_inside_the_second(self: ThreadWait, seconds: float = -1) -> bool:
        if seconds < 0 or threading.current_thread() is not threading.main_thread():
            return wait(self, seconds)
        held.go_on.release()
        held.wait_inside(2)
        return False

    with in_blocks_of_8(held) as executor:
        after_cancel(executor, held.go_on.release)
        with monkeypatch.context() as patched:
            patched.setattr(ThreadWait, "wait", over_inside_the_second)
            with pytest.raises(RunTimeoutError):
                executor.run({"x": numbered(23)}, timeout=PATIENCE)
        assert held.seen == [0, 8]
        assert executor.statistics().timed_out == 1


def test_a_run_that_is_cancelled_between_two_blocks_ends_there(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    end_block = Request.end_block

    with in_blocks_of_8(held) as executor, monkeypatch.context() as patched:

        def cancelled(self: Request) -> bool:
            more = end_block(self)
            executor._dispatcher.cancel(self, RunCancelledError("between two blocks"))
            return more

        patched.setattr(Request, "end_block", cancelled)
        held.go_on.release()
        with pytest.raises(RunCancelledError, match="between two blocks"):
            executor.run({"x": numbered(23)})
        assert held.seen == [0]
        assert executor.statistics().cancelled == 1
        patched.undo()


def test_a_block_that_fails_ends_the_run_with_its_error(held: Held) -> None:
    with in_blocks_of_8(held) as executor:
        held.failing = {8}
        held.go_on.release(2)
        with pytest.raises(OperatorError, match="told to fail at 8"):
            executor.run({"x": numbered(23)})
        assert held.seen == [0, 8]


def test_a_block_that_cannot_be_fed_ends_the_run(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    feed = BlockedRun.feed

    def refused(self: BlockedRun, replica: Replica, feeds: dict[str, Array], number: int) -> None:
        if number == 1:
            raise ResourceError("no memory for the second block")
        feed(self, replica, feeds, number)

    with in_blocks_of_8(held) as executor, monkeypatch.context() as patched, ThreadPoolExecutor(1) as caller:
        patched.setattr(BlockedRun, "feed", refused)
        held.go_on.release()
        with pytest.raises(ResourceError, match="the second block"):
            caller.submit(executor.run, {"x": numbered(23)}).result(PATIENCE)
        patched.undo()


def test_a_worker_that_is_ended_between_two_blocks_fails_the_run_alone(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, stop = WorkerPool.submit, WorkerPool.stop
    submitted: list[Run] = []

    def ended(self: WorkerPool, run: Run) -> None:
        submit(self, run)
        submitted.append(run)
        if len(submitted) == 3:  # after what feeds, and the first block
            raise SystemExit

    def stop_and_go_on(self: WorkerPool, run: Run, error: BaseException) -> None:
        assert run is submitted[2]
        stop(self, run, error)
        held.go_on.release()

    with in_blocks_of_8(held) as executor, monkeypatch.context() as patched:
        patched.setattr(WorkerPool, "submit", ended)
        patched.setattr(WorkerPool, "stop", stop_and_go_on)
        held.go_on.release()
        with pytest.raises(WorkerLostError):
            executor.run({"x": numbered(23)}, timeout=PATIENCE)
        assert 15 not in held.seen
        patched.undo()
        while held.go_on.acquire(blocking=False):
            pass


def test_closing_waits_for_all_blocks_and_draining_in_no_time_for_the_one_under_way(held: Held) -> None:
    with ThreadPoolExecutor(1) as caller:
        for act, seen in ((lambda one: one.close(), [0, 8, 15]), (lambda one: one.drain(0), [0])):
            with in_blocks_of_8(held) as executor:
                asked = caller.submit(executor.run, {"x": numbered(23)})
                held.wait_inside()
                with ThreadPoolExecutor(1) as closer:
                    closing = closer.submit(act, executor)
                    while not executor._dispatcher.state.shut:
                        pass
                    held.go_on.release(3)
                    closing.result(PATIENCE)
                if len(seen) == 3:
                    assert asked.result(PATIENCE)["y"].shape == (23, 3)
                else:
                    with pytest.raises(ClosedError):
                        asked.result(PATIENCE)
                assert held.seen == seen
                while held.go_on.acquire(blocking=False) or held.inside.acquire(blocking=False):
                    pass


def test_lengths_are_sorted_once_however_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run asks of preparations of its kind is found without a look at each of those for other lengths."""
    asked: list[object] = []
    kind_of = RowBlocks._kind_of

    def counted(self: RowBlocks, signature: Signature) -> object:
        asked.append(signature)
        return kind_of(self, signature)

    monkeypatch.setattr(RowBlocks, "_kind_of", counted)
    model = doubled_model()
    free = model.changed(
        inputs={"x": InputInfo(dtypes.FLOAT32, (None, None))}, parameters={"scale": np.full(1, 2.0, "f")}
    )
    with dagexec.compile(free) as executor:
        for _ in range(2):
            for length in range(1, 41):
                executor.run({"x": np.ones((1, length), np.float32)})
        assert made(executor) == 40
    assert 80 <= len(asked) <= 120
