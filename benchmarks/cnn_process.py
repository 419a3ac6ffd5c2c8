"""A contender in a process of its own, which sleeps while another's turn is measured.

Thread pools that spin, buffers and allocators of one library cannot disturb another's turn: only one process computes
at a time, and the parent checks that by the processor time of the others. Requests and answers are pickles over
pipes; `cnn_child.py` is the child's program.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt
from cnn_peers import Memory, Task, Turn
from load_generators import ClosedLoop, Latencies

_PROGRAM = Path(__file__).parent / "cnn_child.py"


class AbsentError(Exception):
    """The peer is not installed."""


class ContenderError(Exception):
    """The peer cannot load or run the model; the text is its own."""


class Contender:
    """The parent's end. Use it as a context manager, or call `close`."""

    def __init__(self, peer: str, task: Task, options: Mapping[str, Any]) -> None:
        """Start the process on the first `task.threads` cores and load the model there.

        Raises AbsentError or ContenderError.
        """
        self.peer = peer
        self.options = dict(options)
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(task.threads))
        environment = os.environ | threads | dict(task.environment)
        with only_cores(task.threads):
            self._process = subprocess.Popen(
                [task.python, os.fspath(_PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
        try:
            start = time.perf_counter()
            self.chosen: Mapping[str, Any]
            self.compile_seconds: float
            self.chosen, self.compile_seconds = self._ask("load", peer, task, self.options)
            self.load_seconds = time.perf_counter() - start
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def turn(self, seconds: float, least_runs: int = 2) -> Turn:
        """Warm up, then run for so long and at least so many times."""
        turn: Turn = self._ask("turn", seconds, least_runs)
        return turn

    def outputs(self) -> list[npt.NDArray[Any]]:
        """The results of the last run."""
        arrays: list[npt.NDArray[Any]] = self._ask("outputs")
        return arrays

    def memory(self) -> Memory:
        """What the process has in memory."""
        memory: Memory = self._ask("memory")
        return memory

    def serve(self, callers: int, seconds: float) -> float:
        """Inferences a second with so many concurrent requests."""
        rate: float = self._ask("serve", callers, seconds)
        return rate

    def closed_loop(self, callers: int, seconds: float) -> ClosedLoop:
        """Requests of so many threads, each again as soon as it has its answer."""
        found: ClosedLoop = self._ask("closed_loop", callers, seconds)
        return found

    def open_loop(self, moments: Sequence[float], callers: int) -> Latencies:
        """Requests at these moments, from as many threads."""
        found: Latencies = self._ask("open_loop", list(moments), callers)
        return found

    def processor_seconds(self) -> float:
        """Processor time of all the process's threads so far (clock_getcpuclockid(3))."""
        return time.clock_gettime((~self._process.pid << 3) | 2)

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, *request: object) -> Any:
        """Send a request and wait for the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump(request, self._process.stdin)
            self._process.stdin.flush()
            kind, answer = pickle.load(self._process.stdout)
        except (EOFError, BrokenPipeError):
            raise ContenderError(f"{self.peer} {self.options}: its process died ({self._process.wait()})") from None
        if kind == "absent":
            raise AbsentError(answer)
        if kind == "failed":
            raise ContenderError(f"{self.peer} {self.options}: {answer}")
        return answer


@contextmanager
def only_cores(count: int) -> Iterator[None]:
    """A process started inside runs on the first `count` cores that this one may use."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:count])
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
