"""Executors on a CUDA device: many requests, some that end early or fail, devices that are full or lost; nothing stays.

The device is emulated, with threads of its own. `Held` keeps its kernels under way until a test lets them go.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import NetDef
from dagexec.core.device import Device
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Kernel
from dagexec.errors import (
    ClosedError,
    DagexecError,
    DeviceError,
    OperatorError,
    ResourceError,
    RunCancelledError,
    RunTimeoutError,
)
from tests.cuda.emulated import emulated
from tests.cuda.emulated.machine import Fault, Machine
from tests.cuda.emulated.work import Capture, EmulatedEvent, EmulatedStream
from tests.held import PATIENCE, rows
from tests.ops.running import operator_def

CUDA = Device("cuda", 0)
SMALLEST_PINNED = 1 << 16
OPTIONS: dict[str, dict[str, Any]] = {
    "simple": {"net_type": "simple"},
    "dag": {"net_type": "dag"},
    "async_dag": {"net_type": "async_dag", "streams_per_worker": 2},
    "captured": {"capture": True},
}
every_kind = pytest.mark.parametrize("kind", OPTIONS)


def model() -> Model:
    """y = tanh(|x| * scale) + tanh(x), of any number of rows of 3."""
    net = NetDef(
        name="served",
        op=[
            operator_def("Abs", ["x"], ["a"]), operator_def("Mul", ["a", "scale"], ["m"]),
            operator_def("Tanh", ["m"], ["b"]), operator_def("Tanh", ["x"], ["c"]),
            operator_def("Sum", ["b", "c"], ["y"]),
        ],
        external_input=["x", "scale"],
    )  # fmt: skip
    return Model(
        "served", net, parameters={"scale": np.full(3, 2, np.float32)},
        inputs={"x": InputInfo(FLOAT32, (None, 3))}, outputs=("y",),
    )  # fmt: skip


def check(found: Any, x: np.ndarray[Any, Any]) -> None:
    np.testing.assert_allclose(found["y"], np.tanh(np.abs(x) * 2) + np.tanh(x), rtol=1e-5)


def compiled(kind: str, **options: Any) -> dagexec.Executor:
    return dagexec.compile(
        model(), device="cuda:0", **({"num_workers": 2, "optimize": False} | OPTIONS[kind] | options)
    )


class Held:
    """What a device asks how long a kernel takes: it holds those of one label, while it is told to."""

    def __init__(self, label: str = "tanh") -> None:
        self.label = label
        self.holding = False
        self.inside = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def __call__(self, kernel: Kernel) -> float:
        if self.holding and self.label in kernel.label.lower():
            self.inside.release()
            assert self.go_on.acquire(timeout=PATIENCE)
        return 1e-6

    def wait(self, count: int = 1) -> None:
        """Until so many kernels are under way."""
        for _ in range(count):
            assert self.inside.acquire(timeout=PATIENCE)

    def let_go(self) -> None:
        """Hold nothing any more."""
        self.holding = False
        self.go_on.release(1000)


@contextmanager
def device(held: Held | None = None, **options: Any) -> Iterator[Machine]:
    """An emulated device, whose threads do the work."""
    with emulated(asynchronous=True, record=False, kernel_seconds=held or 0.0, **options) as machine:
        try:
            yield machine
        finally:
            if held is not None:
                held.let_go()


def let_go_when_cancelled(executor: dagexec.Executor, held: Held) -> None:
    """Kernels go on once a request has been told to end early: it had to wait for them."""
    cancel = executor._dispatcher.cancel

    def cancel_and_let_go(*arguments: Any) -> bool:
        found = cancel(*arguments)
        held.let_go()
        return found

    executor._dispatcher.cancel = cancel_and_let_go  # type: ignore[method-assign]


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_four_replicas_have_four_runs_under_way_at_once(kind: str) -> None:
    held = Held()
    with device(held) as machine, compiled(kind, replicas=4, num_workers=4, warm_start={"x": (2, 3)}) as executor:
        for number in range(8):
            executor.run({"x": rows(number)})  # every replica has captured
        held.holding = True
        with ThreadPoolExecutor(4) as callers:
            futures = [callers.submit(executor.run, {"x": rows(number)}) for number in range(4)]
            held.wait(4)
            assert executor.statistics().running == 4
            held.let_go()
            for number, future in enumerate(futures):
                check(future.result(PATIENCE), rows(number))

        calls = (executor.run_async({"x": rows(number / 9)}) for number in range(20))
        for number, result in enumerate(await asyncio.gather(*calls)):
            check(result, rows(number / 9))
        assert machine.races == []


@pytest.mark.slow
@every_kind
def test_a_run_that_takes_too_long_ends_when_the_device_is_done_with_it(kind: str) -> None:
    held = Held()
    with device(held) as machine, compiled(kind) as executor:
        for number in range(3):
            check(executor.run({"x": rows(number)}), rows(number))
        held.holding = True
        let_go_when_cancelled(executor, held)
        with pytest.raises(RunTimeoutError, match=r"0\.05"):
            executor.run({"x": rows(1)}, timeout=0.05)
        check(executor.run({"x": rows(5)}, timeout=PATIENCE), rows(5))
        statistics = executor.statistics()
        assert (statistics.timed_out, statistics.running, statistics.queued) == (1, 0, 0)
        assert machine.races == []


@every_kind
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_task_that_is_cancelled_leaves_its_replica_to_the_next(kind: str) -> None:
    held = Held()
    with device(held) as machine, compiled(kind) as executor:
        for number in range(3):
            await executor.run_async({"x": rows(number)})
        held.holding = True
        let_go_when_cancelled(executor, held)
        run = asyncio.create_task(executor.run_async({"x": rows(1)}))
        await asyncio.to_thread(held.wait)
        waiting = asyncio.create_task(executor.run_async({"x": rows(2)}))
        await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        check(await waiting, rows(2))
        check(await executor.run_async({"x": rows(3)}, timeout=PATIENCE), rows(3))
        statistics = executor.statistics()
        assert (statistics.cancelled, statistics.running, statistics.completed) == (1, 0, 5)
        assert machine.races == []


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("optimize", [False, True])
def test_a_device_that_is_full_fails_the_run_with_the_numbers_and_has_room_for_the_next(
    kind: str, optimize: bool
) -> None:
    with device(memory_limit=1 << 20) as machine, compiled(kind, optimize=optimize) as executor:
        for number in range(4):
            check(executor.run({"x": rows(number)}), rows(number))
        runtime = runtime_of(CUDA)
        before, used = runtime.statistics().allocated_bytes, machine.devices[0].used
        large = np.ones((1 << 16, 3), np.float32)  # 786,432 bytes: one fits, three do not
        sizes = "786,432|1,572,864|2,359,296"
        numbers = rf"out of memory: an allocation of ({sizes}) bytes; of 1,048,576 bytes [\d,]+ are free"
        for _ in range(3):
            with pytest.raises(ResourceError, match=numbers):
                executor.run({"x": large})
            check(executor.run({"x": rows(7)}), rows(7))
            gc.collect()
            assert runtime.statistics().allocated_bytes <= before
        runtime.memory.trim()  # type: ignore[attr-defined]
        assert machine.devices[0].used <= used
        check(executor.run({"x": rows(1, 1000)}), rows(1, 1000))
        assert executor.statistics().failed == 3


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_launch_that_fails_fails_one_request(kind: str) -> None:
    with device() as machine, compiled(kind, replicas=2) as executor:
        for number in range(8):
            executor.run({"x": rows(number)})
        where = "copy" if kind == "captured" else ""  # a replay launches its copies alone
        machine.faults.append(Fault("launch", "memcpy" if where else "tanh", 1, 701))
        with pytest.raises(DagexecError, match="cuda:0") as caught:
            executor.run({"x": rows(1)})
        assert where or isinstance(caught.value, OperatorError)

        machine.faults[:] = [Fault("launch", "memcpy" if where else "tanh", 3, 701)]
        calls = (executor.run_async({"x": rows(number)}) for number in range(10))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(outcome, DagexecError) for outcome in outcomes) == 1
        for number, outcome in enumerate(outcomes):
            if not isinstance(outcome, DagexecError):
                check(outcome, rows(number))
        assert machine.races == []


@every_kind
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_device_that_is_lost_fails_all_its_requests(kind: str) -> None:
    with device() as machine, compiled(kind, replicas=2) as executor:
        for number in range(6):
            executor.run({"x": rows(number)})
        machine.faults.append(Fault("kernel", "tanh", 1, 719))
        calls = (executor.run_async({"x": rows(number)}) for number in range(10))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(outcome, DagexecError) for outcome in outcomes)
        for number, outcome in enumerate(outcomes):
            if not isinstance(outcome, DagexecError):
                check(outcome, rows(number))
        for _ in range(3):
            with pytest.raises(DagexecError, match="the process has to be restarted"):
                executor.run({"x": rows(1)}, timeout=PATIENCE)
        with pytest.raises(DeviceError, match="the process has to be restarted"):
            compiled(kind, warm_start={"x": (2, 3)})
        statistics = executor.statistics()
        assert (statistics.running, statistics.queued) == (0, 0)
        executor.close()
        with pytest.raises(ClosedError):
            executor.run({"x": rows(1)})


@pytest.mark.slow
@every_kind
def test_closing_waits_for_the_device_and_refuses_what_comes_later(kind: str) -> None:
    held = Held()
    with device(held), ThreadPoolExecutor(3) as callers:
        executor = compiled(kind)
        for number in range(3):
            executor.run({"x": rows(number)})
        held.holding = True
        under_way = callers.submit(executor.run, {"x": rows(1)})
        held.wait()
        let_go_when_cancelled(executor, held)
        closing = callers.submit(executor.close)
        held_long_enough = threading.Timer(0.05, held.let_go)
        held_long_enough.start()
        closing.result(PATIENCE)
        held_long_enough.join()
        with suppress(ClosedError, RunCancelledError):
            check(under_way.result(PATIENCE), rows(1))
        with pytest.raises(ClosedError):
            executor.run({"x": rows(1)})


# What stays


@dataclass(frozen=True)
class Level:
    """What there is of a device: as dagexec counts it, and as the device does."""

    leased: int
    allocated_bytes: int
    streams: int
    events: int
    graphs: int
    device_bytes: int
    pinned_bytes: int


def level(machine: Machine) -> Level:
    gc.collect()
    runtime = runtime_of(CUDA)
    statistics = runtime.statistics()
    handles = list(machine._handles.values())
    blocks = machine.memories.live()
    return Level(
        statistics.leased,
        statistics.allocated_bytes,
        statistics.streams,
        sum(isinstance(one, EmulatedEvent) for one in handles),
        sum(isinstance(one, Capture) for one in handles),
        machine.devices[0].used,
        sum(block.size for block in blocks if block.device is None),
    )


def trouble(executor: dagexec.Executor, machine: Machine, number: int) -> None:
    """A request that ends early or fails, or several at once."""
    match number % 5:
        case 0:
            with pytest.raises(RunTimeoutError):
                executor.run({"x": rows(number)}, timeout=0)
        case 1:
            machine.faults[:] = [Fault("launch", "", 2, 701)]
            with pytest.raises(DagexecError):
                executor.run({"x": rows(number)})
            machine.faults.clear()
        case 2:
            assert len([executor.run({"x": rows(number)}) for _ in range(3)]) == 3
        case _:

            async def several() -> None:
                calls = [asyncio.ensure_future(executor.run_async({"x": rows(value)})) for value in range(4)]
                await asyncio.sleep(0)
                calls[1].cancel()
                await asyncio.gather(*calls, return_exceptions=True)

            asyncio.run(several())


def steady(executor: dagexec.Executor, machine: Machine, troubled: bool) -> tuple[Level, Level]:
    """The level after 20 runs, and after 50 more."""
    levels = []
    for count in (20, 50):
        for number in range(count):
            if troubled:
                trouble(executor, machine, number)
            check(executor.run({"x": rows(number / 10)}), rows(number / 10))
        levels.append(level(machine))
    return levels[0], levels[1]


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("troubled", [False, True])
def test_fifty_runs_leave_nothing_behind(kind: str, troubled: bool) -> None:
    with device() as machine:
        outset = level(machine)
        with compiled(kind, replicas=2) as executor:
            before, after = steady(executor, machine, troubled)
            assert after.leased <= 2 * 2 * 2  # replicas, workers, streams: leased as they are first needed
            assert after.allocated_bytes == before.allocated_bytes
            assert after.streams <= 2 * 2 * 2 + 2  # one more for each thread that copies
            assert after.events <= before.events + 8 * (1 + troubled)
            assert after.graphs == before.graphs
            assert after.device_bytes == before.device_bytes
            assert after.pinned_bytes <= before.pinned_bytes + troubled * 2 * SMALLEST_PINNED  # for two at once
        del executor
        end = level(machine)
        assert (end.leased, end.allocated_bytes) == (outset.leased, outset.allocated_bytes) == (0, 0)
        runtime_of(CUDA).close()
        handles = [one for one in machine._handles.values() if isinstance(one, EmulatedEvent | Capture)]
        assert handles == []
        assert machine.memories.live() == []
        del handles
        assert all(not isinstance(one, EmulatedStream) or one.capture is None for one in machine._handles.values())
