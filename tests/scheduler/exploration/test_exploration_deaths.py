"""A worker that dies right after it took or let go of the pool's lock, at any time, costs one run at most."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType

import pytest

from dagexec.errors import WorkerLostError
from dagexec.platform.locks import Mutex
from dagexec.platform.threads import Threads, threads
from dagexec.scheduler.exploration import explore
from dagexec.scheduler.run.pool import WorkerPool
from tests.scheduler.scenarios import DIAMOND, Done, run_of


class KilledError(BaseException):
    """What is raised in the worker."""


class DeadlyLock:
    """A lock that raises in the worker that makes the `at`-th bare call to it, after the call has been done."""

    def __init__(self, lock: Mutex, at: int) -> None:
        self.calls = 0
        self._lock = lock
        self._at = at

    def _called(self) -> None:
        if threading.current_thread().name.startswith("dagexec"):
            self.calls += 1
            if self.calls == self._at:
                raise KilledError

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it, and maybe die with it."""
        taken = self._lock.acquire(blocking, timeout)
        self._called()
        return taken

    def release(self) -> None:
        """Let it go, and maybe die."""
        self._lock.release()
        self._called()

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self._lock.release()


def deadly_scenario(at: int, priority: int) -> Callable[[], int]:
    """Three runs on two workers, one of which dies; then one more. Gives how many workers were replaced."""

    def scenario() -> int:
        source: Threads = threads()
        locks: list[DeadlyLock] = []
        plain = source.owned_lock

        def deadly() -> DeadlyLock:
            locks.append(DeadlyLock(plain(), at))
            return locks[-1]

        source.owned_lock = deadly  # type: ignore[method-assign]
        done = [Done() for _ in range(4)]
        lost = 0
        with WorkerPool(2) as pool:
            runs = [run_of(DIAMOND, [lambda: None] * 4, told) for told in done]
            runs[1].priority = priority
            for first in (runs[:3], runs[3:]):
                for run in first:
                    pool.submit(run)
                for run in first:
                    done[runs.index(run)].wait()
            for run in runs:
                try:
                    run.check_complete()
                    run.raise_error()
                except WorkerLostError:
                    lost += 1
        statistics = pool.statistics()
        assert (statistics.busy, statistics.runs_waiting) == (0, 0)
        assert lost <= statistics.replaced <= 1
        assert [told.told for told in done] == [1, 1, 1, 1]
        return statistics.replaced

    return scenario


@pytest.mark.slow
def test_a_worker_may_die_at_any_use_of_the_lock(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "dagexec")
    replaced = 0
    for seed in range(400):
        schedule = explore(deadly_scenario(1 + seed % 40, seed % 3), seed)
        schedule.raise_failure()
        assert not schedule.left
        replaced += schedule.result or 0
    assert replaced > 300
