"""Unmodified code of applications under a controlled schedule: what the standard library and trio make threads of."""

from __future__ import annotations

import asyncio
import queue
import random
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import numpy as np
import pytest
import trio

import dagexec
from dagexec.errors import DagexecError, DeadlockError
from dagexec.scheduler.exploration import ExploredSchedule, explore, systematic
from dagexec.scheduler.exploration.functions import Backend, controlled
from tests.scheduler.scenarios import X, expected, sums

MODULE_LOCK = Lock()
SEEDS = range(20)


def run(function: Callable[[], Any], seed: int = 0, backend: Backend = "asyncio") -> ExploredSchedule[Any]:
    return explore(controlled(function, backend=backend, seed=seed), seed)


def results(function: Callable[[], Any], backend: Backend = "asyncio") -> list[Any]:
    """What `function` returns under each of the seeds; the same again for the same seed, step by step."""
    found = []
    for seed in SEEDS:
        schedule = run(function, seed, backend)
        schedule.raise_failure()
        again = run(function, seed, backend)
        assert (again.decisions, again.trace, again.result) == (schedule.decisions, schedule.trace, schedule.result)
        found.append(schedule.result)
    return found


@dataclass
class Account:
    """Of an application that knows nothing of exploration."""

    balance: int = 0
    lock: threading.Lock = field(default_factory=lambda: threading.Lock())

    def add(self, amount: int) -> None:
        with self.lock:
            before = self.balance
        with self.lock:  # the bug
            self.balance = before + amount


class Depositor(threading.Thread):
    def __init__(self, account: Account) -> None:
        super().__init__()
        self.account = account

    def run(self) -> None:
        self.account.add(1)


def two_deposits() -> None:
    account = Account()
    depositors = [Depositor(account) for _ in range(2)]
    for depositor in depositors:
        depositor.start()
    for depositor in depositors:
        depositor.join()
    assert account.balance == 2


def test_a_lost_update_of_unmodified_threads_is_found_and_repeated() -> None:
    found = systematic(controlled(two_deposits), preemptions=1)
    assert found.failed is not None
    assert isinstance(found.failed.failure, AssertionError)
    assert isinstance(found.failed.replay(controlled(two_deposits)).failure, AssertionError)


def test_without_the_bug_all_schedules_are_right() -> None:
    def scenario() -> None:
        account = Account(lock=threading.RLock())  # type: ignore[arg-type]

        def add() -> None:
            with account.lock:
                account.add(1)

        threads = [threading.Thread(target=add) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert account.balance == 2

    found = systematic(controlled(scenario), preemptions=1)
    found.raise_failure()
    assert found.exhausted


def test_condition_event_semaphore_barrier_and_queue_wait_and_wake() -> None:
    def scenario() -> list[int]:
        jobs: queue.Queue[int] = queue.Queue(1)
        started, condition, seats, ready = (
            threading.Barrier(2), threading.Condition(), threading.Semaphore(1), threading.Event(),
        )  # fmt: skip
        done: list[int] = []

        def produce() -> None:
            started.wait()
            for job in range(3):
                jobs.put(job)
            ready.set()
            with condition, seats:
                done.append(-1)
                condition.notify_all()

        producer = threading.Thread(target=produce)
        producer.start()
        started.wait()
        done += [jobs.get() for _ in range(3)]
        assert ready.wait(timeout=10)
        with condition:
            condition.wait_for(lambda: -1 in done)
        producer.join()
        assert not producer.is_alive()
        return done

    assert {tuple(sorted(result)) for result in results(scenario)} == {(-1, 0, 1, 2)}


def test_time_is_virtual() -> None:
    def scenario() -> tuple[float, float, bool]:
        begin, date = time.monotonic(), time.time()
        threading.Timer(3600, ended.append, [1]).start()
        with pytest.raises(queue.Empty):
            queue.Queue[int]().get(timeout=86_400)
        return time.monotonic() - begin, round(time.time() - date, 3), ended == [1]

    ended: list[int] = []
    before = time.monotonic()
    assert run(scenario).result == (86_400, 86_400, True)
    assert time.monotonic() - before < 60


@pytest.mark.slow
def test_an_executor_calls_in_orders_that_the_seed_decides() -> None:
    def scenario() -> tuple[str, str]:
        called: list[str] = []
        together = threading.Barrier(3)

        def call(letter: str) -> None:
            together.wait()
            called.append(letter)

        with ThreadPoolExecutor(3) as executor:
            futures: list[Future[None]] = [executor.submit(call, letter) for letter in "abc"]
            done = [future.result() for future in as_completed(futures)]
            return "".join(called), str(len(done))

    found = results(scenario)
    assert {number for _, number in found} == {"3"}
    assert len({called for called, _ in found}) > 2


def test_asyncio_tasks_and_their_threads_are_the_schedules() -> None:
    def scenario() -> list[str]:
        order: list[str] = []

        async def step(name: str) -> None:
            await asyncio.sleep(3600)
            order.append(await asyncio.to_thread(str.upper, name))
            order.append(await anyio.to_thread.run_sync(str.lower, name))

        async def main() -> None:
            await asyncio.gather(step("a"), step("B"))

        asyncio.run(main())
        return order

    assert len({tuple(order) for order in results(scenario)}) > 1


@pytest.mark.slow
def test_trio_tasks_and_their_threads_are_the_schedules() -> None:
    async def main() -> tuple[str, float]:
        order = ""

        async def note(name: str) -> None:
            nonlocal order
            await trio.sleep(1)
            order += name

        async def step(name: str) -> None:
            await trio.to_thread.run_sync(trio.from_thread.run, note, name)
            await anyio.to_thread.run_sync(time.sleep, 1)

        async with trio.open_nursery() as nursery:
            for name in "abc":
                nursery.start_soon(step, name)
        with trio.move_on_after(200_000):  # longer than trio waits at a time
            await trio.sleep_forever()
        return order, trio.current_time()

    found = results(main, "trio")
    assert len({order for order, _ in found}) > 2
    assert {round(seconds, 6) for _, seconds in found} == {200_002}


def test_blocked_trio_tasks_can_be_waited_for() -> None:
    async def main() -> bool:
        event = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(event.wait)
            await trio.testing.wait_all_tasks_blocked()
            waiting = event.statistics().tasks_waiting == 1
            event.set()
        return waiting

    assert run(main, backend="trio").result is True


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_task_that_waits_in_vain_is_a_deadlock(backend: Backend) -> None:
    async def main() -> None:
        await anyio.Event().wait()

    assert isinstance(run(main, backend=backend).failure, DeadlockError)


def test_locks_in_opposite_order_are_a_deadlock_that_names_threads_and_locks() -> None:
    def scenario() -> None:
        one, other = threading.Lock(), threading.Lock()

        def both(first: threading.Lock, second: threading.Lock) -> None:
            with first, second:
                pass

        threads = [threading.Thread(target=both, args=pair) for pair in ((one, other), (other, one))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    found = systematic(controlled(scenario), preemptions=1)
    assert found.failed is not None
    assert "Thread-1 (both) waits for lock" in str(found.failed.failure)


def test_a_lock_of_a_module_is_the_schedules() -> None:
    def scenario() -> int:
        inside = most = 0

        def work() -> None:
            nonlocal inside, most
            with MODULE_LOCK:
                inside += 1
                most = max(most, inside)
                time.sleep(0)
                inside -= 1

        with ThreadPoolExecutor(3) as executor:
            for _ in range(3):
                executor.submit(work)
        return most

    assert set(results(scenario)) == {1}
    assert not MODULE_LOCK.locked()


def test_an_executor_of_dagexec_is_run_by_the_applications_threads_and_tasks() -> None:
    net = sums([[], [0], [0]])
    right = expected(net)

    def scenario() -> None:
        with dagexec.compile(net, net_type="dag", num_workers=2, optimize=False) as executor:

            async def ask() -> dict[str, Any]:
                return await executor.run_async({"x": X})

            async def main() -> list[dict[str, Any]]:
                return await asyncio.gather(ask(), asyncio.to_thread(executor.run, {"x": X}))

            for outputs in asyncio.run(main()):
                assert {name: array.tobytes() for name, array in outputs.items()} == right

    for seed in range(3):
        run(scenario, seed).raise_failure()


@pytest.mark.parametrize(
    ("use", "named"),
    [
        (partial(socket.create_connection, ("localhost", 80)), "socket.getaddrinfo"),
        (partial(subprocess.run, [sys.executable, "-V"]), "subprocess.Popen"),
        (lambda: selectors.DefaultSelector(), "a selector"),
    ],
    ids=["connection", "process", "selector"],
)
def test_what_no_schedule_controls_is_an_error_that_names_it(use: Callable[[], object], named: str) -> None:
    failure = run(use).failure
    assert isinstance(failure, DagexecError)
    assert named in str(failure)


def test_random_numbers_follow_from_the_seed_and_go_on_as_before_afterwards() -> None:
    def scenario() -> tuple[float, float]:
        return random.random(), float(np.random.random())

    random.seed(7)
    undisturbed = random.random()
    random.seed(7)
    drawn = results(scenario)
    assert len(set(drawn)) == len(SEEDS)
    assert random.random() == undisturbed


def test_afterwards_all_is_the_systems_again() -> None:
    names = {name: getattr(threading, name) for name in ("Lock", "RLock", "_CRLock", "_allocate_lock")}
    left: list[Any] = []

    def scenario() -> None:
        executor = ThreadPoolExecutor(1)
        executor.submit(int).result()
        left.extend((threading.Lock(), threading.Condition(), executor))  # and a worker that waits

    assert run(scenario).left == ("ThreadPoolExecutor-0_0",)
    assert {name: getattr(threading, name) for name in names} == names
    assert Lock is names["Lock"]
    lock, condition = left[:2]
    others: list[bool] = []
    with lock, condition:  # made in a schedule, used outside
        thread = threading.Thread(target=lambda: others.append(lock.acquire(blocking=False)))
        thread.start()
        thread.join()
    assert others == [False]


def test_a_controlled_function_needs_a_schedule_and_a_known_backend() -> None:
    with pytest.raises(DagexecError, match="scenario"):
        controlled(int)()
    with pytest.raises(ValueError, match="curio"):
        controlled(int, backend="curio")  # type: ignore[arg-type]
