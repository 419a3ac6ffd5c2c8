"""An executor whose callers are threads and tasks at once, timed out, cancelled or preferred, on devices that fail.

A seed decides the mixture too. Every call must end in the right bytes or in a documented exception, and afterwards the
executor must compute the right bytes and hold nothing.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import pytest

import dagexec
from dagexec.binding.io_binding import Outputs
from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.devices.sim import Fault, simulated
from dagexec.errors import ClosedError, DeviceError, OperatorError, RunCancelledError, RunTimeoutError
from dagexec.executor.executor import Executor
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import RandomStrategy, explore
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.exploration.event_loop import run
from tests.scheduler.scenarios import X, expected, sums

NET = sums([[], [], [0, 1], [0, 1], [2, 3]])
RIGHT = expected(NET)
DOCUMENTED = (RunTimeoutError, RunCancelledError, ClosedError, OperatorError, DeviceError)
WAYS = ("plain", "timeout", "cancel", "priority")


def checked(outputs: Outputs) -> str:
    """ "ok" for the right bytes."""
    assert {name: array.tobytes() for name, array in outputs.items()} == RIGHT, "wrong bytes"
    return "ok"


def call(executor: Executor, way: str, outcomes: list[str]) -> None:
    """A call from a thread."""
    try:
        outcomes.append(checked(executor.run({"x": X}, timeout=2 if way == "timeout" else None)))
    except DOCUMENTED as error:
        outcomes.append(type(error).__name__)


async def call_async(executor: Executor, way: str, outcomes: list[str]) -> None:
    """A call from a task; another thread cancels it, if that is the way."""
    loop = asyncio.get_running_loop()
    timeout, priority = (1 if way == "timeout" else None), (2 if way == "priority" else 0)
    task = asyncio.create_task(executor.run_async({"x": X}, timeout=timeout, priority=priority))
    if way == "cancel":
        threads().start(lambda: loop.call_soon_threadsafe(task.cancel), "canceller")
    try:
        outcomes.append(checked(await task))
    except asyncio.CancelledError:
        outcomes.append("cancelled")
    except DOCUMENTED as error:
        outcomes.append(type(error).__name__)


def mixture(seed: int, net_type: str, device: str, timeouts: bool) -> Callable[[], list[str]]:
    """A scenario of two threads and up to three tasks; their outcomes."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    if device != "cpu" and chance.random() < 0.6:
        faults.append(Fault(chance.choice(["kernel", "hang", "launch", "event"]), nth=chance.randrange(1, 12)))
    hangs = any(fault.kind == "hang" for fault in faults)  # then every call needs a deadline
    ways = ["timeout" if hangs else chance.choice(WAYS) for _ in range(chance.choice([2, 3, 4]))]
    workers, replicas = chance.choice([1, 2]), chance.choice([1, 2])
    closes = not hangs and chance.random() < 0.3

    def scenario() -> list[str]:
        outcomes: list[str] = []
        with ExitStack() as stack:
            if device != "cpu":
                stack.enter_context(simulated(device, driver=ControlledDriver(), faults=faults))
            executor = stack.enter_context(
                dagexec.compile(
                    NET, optimize=False, net_type=net_type, num_workers=workers, replicas=replicas, device=device
                )
            )
            started = [
                threads().start(partial(call, executor, way, outcomes), f"caller {number}")
                for number, way in enumerate(ways[:2])
            ]
            if closes:
                started.append(threads().start(executor.close, "closer"))

            async def tasks() -> None:
                await asyncio.gather(*(call_async(executor, way, outcomes) for way in ways[1:]))

            run(tasks)
            for thread in started:
                thread.join()
            if not closes and not (hangs and timeouts):
                assert _comes_back(executor, 5 if hangs else None), "the executor is of no use any more"
            executor.close()
            statistics = executor.statistics()
            assert (statistics.running, statistics.queued, statistics.pool.busy) == (0, 0, 0)
            if device != "cpu":
                held = runtime_of(Device.parse(device)).statistics()
                assert (held.leased, held.busy) == (0, 0)
        return outcomes

    return scenario


def _comes_back(executor: Executor, timeout: float | None) -> bool:
    """True when a run is right: the first that does not meet the one fault there may be."""
    for _ in range(3):
        try:
            return bool(checked(executor.run({"x": X}, timeout=timeout)))
        except (OperatorError, DeviceError, RunTimeoutError):
            continue
    return False


@pytest.mark.slow
@pytest.mark.parametrize("timeouts", [False, True])
@pytest.mark.parametrize(
    ("net_type", "device"), [("dag", "cpu"), ("async_dag", "cpu"), ("simple", "sim:0"), ("async_dag", "sim:0")]
)
def test_callers_of_all_kinds_end_as_documented_and_leave_nothing(net_type: str, device: str, timeouts: bool) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(60):
        schedule = explore(mixture(seed, net_type, device, timeouts), RandomStrategy(seed, timeouts=timeouts))
        schedule.raise_failure()
        assert set(schedule.left) <= {"canceller"}
        outcomes.update(schedule.result or ())
    assert outcomes["ok"] > 60
    assert {"cancelled", "ClosedError"} <= set(outcomes)


@pytest.mark.slow
def test_a_mixture_is_the_same_for_the_same_seed() -> None:
    for seed in range(8):
        schedules = [explore(mixture(seed, "async_dag", "sim:0", False), seed) for _ in range(2)]
        assert schedules[0].trace == schedules[1].trace
