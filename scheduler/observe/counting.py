"""Observers that count: runs and operators, and the mean times that they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads
from dagexec.scheduler.observe.observed_run import ObservedRun, RunsUnderWay
from dagexec.scheduler.observe.observers import Observer

if TYPE_CHECKING:
    from dagexec.core.stream import Kernel, Stream


@dataclass(frozen=True)
class RunCounts:
    """The counts of a `RunCountObserver`; `operators` counts those that returned, failed runs are in `stopped`, too."""

    started: int
    stopped: int
    failed: int
    operators: int


class RunCountObserver(Observer):
    """Counts runs and operators."""

    def __init__(self) -> None:
        self._lock = threads().lock()
        self._started = self._stopped = self._failed = self._operators = 0

    def counts(self) -> RunCounts:
        """The counts at this moment."""
        with self._lock:
            return RunCounts(self._started, self._stopped, self._failed, self._operators)

    def run_started(self, run: ObservedRun) -> None:
        with self._lock:
            self._started += 1

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        with self._lock:
            self._stopped += 1
            self._failed += error is not None

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """One more, if it returned."""
        if error is None:
            with self._lock:
                self._operators += 1


class TimeObserver(Observer):
    """Mean times of runs and of each operator; for an operator on a device, the time on its stream.

    Runs and operators that fail are left out. For the runs of one graph (any number of replicas of it).
    """

    def __init__(self) -> None:
        self._lock = threads().lock()
        self._run_times: _Sum = _Sum()
        self._host: dict[int, _Sum] = {}
        self._device: dict[int, _Sum] = {}
        self._under_way = RunsUnderWay()

    @property
    def mean_run_ms(self) -> float:
        """Milliseconds a run took, from when it was made; 0 before the first ended."""
        with self._lock:
            return self._run_times.mean * 1e3

    @property
    def mean_operator_ms(self) -> dict[int, float]:
        """Milliseconds that each operator took, by its index."""
        with self._lock:
            return {index: total.mean * 1e3 for index, total in sorted((self._host | self._device).items())}

    def run_started(self, run: ObservedRun) -> None:
        """Kernels may be of this run from now on."""
        self._under_way.add(run)

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """Add the time of the run."""
        self._under_way.remove(run)
        if error is None:
            with self._lock:
                self._run_times.add((end - run.started) / 1e9)

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """Add the time of the operator."""
        if error is None:
            with self._lock:
                self._host.setdefault(operator, _Sum()).add((end - start) / 1e9)

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        """Add the time of the operator's kernel."""
        owner = self._under_way.find(kernel)
        if owner is not None:
            with self._lock:
                self._device.setdefault(owner[1], _Sum()).add(end - start)


class _Sum:
    """A sum of seconds, and of how many times."""

    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.count = 0

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def add(self, seconds: float) -> None:
        self.total += seconds
        self.count += 1
