"""An observer that names the slowest operator of each run."""

from __future__ import annotations

import sys
import threading

from dagexec.tracing import ObservedRun, Observer


class Slowest(Observer):
    """Prints a line to standard error at the end of each run: the operator that took longest, and how long."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # several workers call at once
        self._longest: dict[ObservedRun, tuple[int, str]] = {}

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        """Keep the operator if none before it took longer."""
        with self._lock:
            self._longest[run] = max(self._longest.get(run, (0, "")), (end - start, run.graph.label(operator)))

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """Print the line."""
        with self._lock:
            nanoseconds, operator = self._longest.pop(run, (0, "none"))
        sys.stderr.write(f"{run.graph.name}: slowest: {operator}, {nanoseconds / 1e6:.3f} ms\n")
