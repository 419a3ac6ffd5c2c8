"""A request that is given up while its replica is prepared for it: it is over, and the replica is prepared on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.core import registry
from dagexec.core.operator import Operator, Step
from dagexec.errors import RunTimeoutError
from tests.held import PATIENCE, doubled_model, rows
from tests.nets import temporary_operator


class HeldPreparation:
    """Control over the operators of type Prepared: each waits while it is prepared until it is let go.

    Attributes:
        seen: what those that ran were fed with.
        prepared: how many were prepared to the end.
    """

    def __init__(self) -> None:
        self.inside = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.seen: list[float] = []
        self.prepared = 0

    def body(self, operator: Operator) -> None:
        self.seen.append(float(operator.x(0).flat[0]))
        operator.y(0)[...] = operator.x(0)

    def hold(self) -> None:
        self.inside.release()
        assert self.go_on.acquire(timeout=PATIENCE)
        self.prepared += 1

    def wait_inside(self) -> None:
        assert self.inside.acquire(timeout=PATIENCE)


@pytest.fixture
def held() -> Iterator[HeldPreparation]:
    control = HeldPreparation()
    with temporary_operator("Prepared", control.body, row_by_row=True), pytest.MonkeyPatch.context() as patch:
        kind = registry._operators["cpu", "Prepared", ""]
        prepare = kind.prepare

        def held_prepare(operator: Operator) -> Step:
            control.hold()
            return prepare(operator)

        patch.setattr(kind, "prepare", held_prepare)
        yield control


@pytest.fixture
def executor(held: HeldPreparation) -> Iterator[dagexec.Executor]:
    with dagexec.compile(doubled_model("Prepared"), optimize=False, num_workers=1, replicas=1) as executor:
        yield executor
        held.go_on.release(10)


async def test_a_cancelled_await_returns_while_its_replica_is_prepared_which_the_next_one_finds(
    held: HeldPreparation, executor: dagexec.Executor
) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.run_async, {"x": rows(1)})
        await anyio.to_thread.run_sync(held.wait_inside)
        tasks.cancel_scope.cancel()
    found = executor.statistics()  # nobody has let the preparation go on
    assert (held.prepared, found.running, found.cancelled) == (0, 0, 1)
    held.go_on.release()
    outputs = await executor.run_async({"x": rows(3)})
    np.testing.assert_array_equal(outputs["y"], rows(6))
    assert (held.prepared, held.seen) == (1, [3])
    assert executor.statistics().completed == 1


async def test_an_await_is_late_while_its_replica_is_prepared(
    held: HeldPreparation, executor: dagexec.Executor
) -> None:
    with pytest.raises(RunTimeoutError, match=r"not done within 0\.01 seconds"):
        await executor.run_async({"x": rows(1)}, timeout=0.01)
    assert (held.prepared, executor.statistics().timed_out) == (0, 1)


def test_so_is_a_thread(held: HeldPreparation, executor: dagexec.Executor) -> None:
    with pytest.raises(RunTimeoutError, match=r"not done within 0\.01 seconds"):
        executor.run({"x": rows(1)}, timeout=0.01)
    held.go_on.release()
    np.testing.assert_array_equal(executor.run({"x": rows(3)}, timeout=PATIENCE)["y"], rows(6))
    assert (held.prepared, held.seen, executor.statistics().timed_out) == (1, [3], 1)


async def test_with_arrays_for_its_results_it_returns_when_nothing_uses_them_any_more(
    held: HeldPreparation, executor: dagexec.Executor
) -> None:
    cancel = executor._dispatcher.cancel

    def cancel_and_let_go(*arguments: object) -> bool:
        found = cancel(*arguments)  # type: ignore[arg-type]
        held.go_on.release()
        return found

    executor._dispatcher.cancel = cancel_and_let_go  # type: ignore[method-assign]
    out = np.zeros((2, 3), np.float32)

    async def ask() -> None:
        await executor.run_async({"x": rows(1)}, out={"y": out})

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await anyio.to_thread.run_sync(held.wait_inside)
        tasks.cancel_scope.cancel()
    assert (held.prepared, held.seen) == (1, [])
    assert not out.any()


async def test_closing_waits_until_the_replica_is_prepared(held: HeldPreparation, executor: dagexec.Executor) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(executor.run_async, {"x": rows(1)})
        await anyio.to_thread.run_sync(held.wait_inside)
        tasks.cancel_scope.cancel()
    when_empty = executor._dispatcher.when_empty
    closing = threading.Event()

    def note(callback: object) -> None:
        when_empty(callback)  # type: ignore[arg-type]
        closing.set()

    executor._dispatcher.when_empty = note  # type: ignore[method-assign]
    with ThreadPoolExecutor(1) as threads:
        closed = threads.submit(executor.close)
        await anyio.to_thread.run_sync(closing.wait, PATIENCE)
        assert (closed.done(), held.prepared) == (False, 0)
        held.go_on.release()
        await anyio.to_thread.run_sync(closed.result, PATIENCE)
    assert (held.prepared, held.seen) == (1, [])


async def test_the_request_that_waits_for_the_replica_gets_it_then(
    held: HeldPreparation, executor: dagexec.Executor
) -> None:
    outputs: list[np.ndarray] = []

    async def second() -> None:
        outputs.append((await executor.run_async({"x": rows(5)}))["y"])

    scope = anyio.CancelScope()

    async def first() -> None:
        with scope:
            await executor.run_async({"x": rows(1)})

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(first)
        await anyio.to_thread.run_sync(held.wait_inside)
        tasks.start_soon(second)
        while executor.statistics().queued != 1:
            await anyio.lowlevel.checkpoint()
        scope.cancel()
        while executor.statistics().cancelled != 1:
            await anyio.lowlevel.checkpoint()
        held.go_on.release()
    np.testing.assert_array_equal(outputs[0], rows(10))
    assert (held.prepared, held.seen) == (1, [5])
