"""Doing many cases: workers that are replaced when they die, hang or grow, and the counts of what came of the cases."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.fuzz.case import Cases
from tests.fuzz.worker import MEMORY_BYTES, Outcome, main_of_child

SECONDS = 10.0
"""Processor time that a case may take, and half of how long it may wait for something."""

_TICK = os.sysconf("SC_CLK_TCK")
_DUMPED = 0.5  # seconds that a worker has to write the stacks of its threads


@dataclass
class Summary:
    """Outcomes, counted.

    Attributes:
        cases: how many were done.
        counts: by kind of file, word and detail.
        failures: all of them.
        processor_seconds: of all workers.
        workers: how many there were, one after another.
    """

    cases: int = 0
    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)
    processor_seconds: float = 0.0
    workers: int = 0

    def add(self, outcome: Outcome) -> None:
        """One more case."""
        self.cases += 1
        detail = outcome.detail.partition(":")[0] if outcome.word == "ok" else outcome.detail
        self.counts[outcome.kind, outcome.word, detail] += 1
        if outcome.is_failure:
            self.failures.append(outcome)

    def words(self) -> dict[str, int]:
        """How often each word came."""
        found: Counter[str] = Counter()
        for (_, word, _), count in self.counts.items():
            found[word] += count
        return dict(found.most_common())

    def alike(self) -> dict[tuple[str, str, str], list[int]]:
        """The numbers of failing cases, by word, detail and place."""
        found: dict[tuple[str, str, str], list[int]] = {}
        for outcome in self.failures:
            found.setdefault((outcome.word, outcome.detail, outcome.place), []).append(outcome.number)
        return found

    def as_dict(self) -> dict[str, object]:
        """All of it for JSON."""
        kinds: dict[str, dict[str, int]] = {}
        for (kind, word, detail), count in sorted(self.counts.items()):
            kinds.setdefault(kind, {})[f"{word}: {detail}" if detail else word] = count
        return {
            "cases": self.cases,
            "outcomes": self.words(),
            "by_kind": kinds,
            "failures": [asdict(outcome) for outcome in self.failures],
            "processor_seconds": round(self.processor_seconds, 1),
            "workers": self.workers,
        }


def run_cases(
    cases: Cases,
    numbers: Sequence[int],
    *,
    seconds: float = SECONDS,
    memory_bytes: int = MEMORY_BYTES,
    seen: Callable[[Outcome], object] = lambda _outcome: None,
) -> Summary:
    """Do the cases of `numbers` one after another, each within `seconds` of processor time and `memory_bytes`.

    `seen` is called after each.
    """
    summary = Summary()
    memory = "/dev/shm"  # where there is none, files of cases take longer
    folder = Path(tempfile.mkdtemp(prefix="dagexec-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    try:
        left = list(numbers)
        while left:
            worker = _Worker(cases, left, folder / f"{summary.workers}", memory_bytes)
            summary.workers += 1
            done = 0
            try:
                for outcome in worker.outcomes(seconds):
                    done += 1
                    summary.add(outcome)
                    seen(outcome)
            finally:
                summary.processor_seconds += worker.end()
            if not done:
                raise RuntimeError(f"a worker did no case: {worker.error_text()}")
            left = left[done:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return summary


class _Worker:
    """A forked process, and what it says."""

    def __init__(self, cases: Cases, numbers: Sequence[int], place: Path, memory_bytes: int) -> None:
        self._errors = place.with_suffix(".err")
        self._read, write = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._read)
            main_of_child(cases, numbers, write, self._errors, memory_bytes)
        os.close(write)
        self._buffer = b""
        self._number, self._kind, self._phase = -1, "", ""

    def outcomes(self, seconds: float) -> Iterator[Outcome]:
        """An outcome for each case, until the process ends; the last one may be that it died, or was ended."""
        watch = _Watch(self.pid, seconds)
        while True:
            ready, _, _ = select.select([self._read], [], [], min(1.0, seconds))
            if not ready:
                if self._number >= 0 and watch.is_over():
                    yield self._ended("time", f"{seconds:g} s")
                    return
                continue
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                break
            *lines, self._buffer = (self._buffer + chunk).split(b"\n")
            for line in lines:
                outcome = self._take(line.decode())
                watch.restart()
                if outcome is not None:
                    yield outcome
        _, status, usage = os.wait4(self.pid, 0)
        self._usage = usage.ru_utime + usage.ru_stime
        self.pid = 0
        if self._number >= 0:
            number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
            name = signal.Signals(number).name if number else f"exit {os.waitstatus_to_exitcode(status)}"
            yield Outcome(self._number, self._kind, "signal", name, self._place(), self.error_text())

    def end(self) -> float:
        """End the process; the processor time it took."""
        os.close(self._read)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            _, _, usage = os.wait4(self.pid, 0)
            self._usage = usage.ru_utime + usage.ru_stime
        return self._usage

    def error_text(self) -> str:
        """The end of what it wrote on standard error."""
        try:
            return self._errors.read_text(errors="replace")[-6000:]
        except OSError:
            return ""

    def _take(self, line: str) -> Outcome | None:
        what, _, rest = line.partition(" ")
        if what == "B":
            number, self._kind = rest.split()
            self._number, self._phase = int(number), "damage"
        elif what == "P":
            self._phase = rest
        elif what == "E":
            self._number = -1
            return Outcome(**json.loads(rest))
        return None

    def _ended(self, word: str, detail: str) -> Outcome:
        os.kill(self.pid, signal.SIGUSR1)
        time.sleep(_DUMPED)
        return Outcome(self._number, self._kind, word, detail, self._place(), self.error_text())

    def _place(self) -> str:
        """The phase, and the innermost line of dagexec in the stacks on standard error."""
        lines = [line.strip() for line in self.error_text().splitlines() if line.startswith("  File ")]
        own = [line for line in lines if "/tests/" not in line and "/lib/python" not in line]
        return f"{self._phase}: {own[0].removeprefix('File ').replace(os.getcwd(), '')[-90:]}" if own else self._phase


class _Watch:
    """Whether a case takes too much processor time, or waits for too long without taking any."""

    def __init__(self, pid: int, seconds: float) -> None:
        self._pid, self._seconds = pid, seconds
        self.restart()

    def restart(self) -> None:
        """Something has happened."""
        self._start = self._last = _processor_seconds(self._pid)
        self._since = time.monotonic()

    def is_over(self) -> bool:
        """True when time is over."""
        now = _processor_seconds(self._pid)
        if now - self._last > 0.01 or _is_runnable(self._pid):
            self._last, self._since = now, time.monotonic()
        return now - self._start > self._seconds or time.monotonic() - self._since > 2 * self._seconds


def _processor_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICK


def _is_runnable(pid: int) -> bool:
    """True when one of its threads would go on if it had a core."""
    for task in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if task.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
        except OSError:
            continue
    return False
