"""The program of a contender's process (`cnn_process.py`): answers its parent until the pipe is closed."""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy.typing as npt
from cnn_peers import LOADERS, Loaded, Memory, Task, Turn
from load_generators import ClosedLoop, Latencies, closed_loop, open_loop

_PACKAGES = ("dagexec", "onnxruntime", "openvino", "torch")


class _Child:
    """What answers in the child."""

    def __init__(self) -> None:
        self._loaded: Loaded | None = None

    def load(self, peer: str, task: Task, options: Mapping[str, Any]) -> tuple[Mapping[str, Any], float]:
        """What was chosen, and the seconds from the import of the peer's package to the end of the first run."""
        if peer in _PACKAGES:
            importlib.import_module(peer)
        start = time.perf_counter()
        self._loaded = LOADERS[peer](task, options)
        self._loaded.run()
        seconds = time.perf_counter() - start
        gc.collect()
        gc.disable()
        return self._loaded.chosen, seconds

    def turn(self, seconds: float, least_runs: int) -> Turn:
        assert self._loaded is not None
        run, clock, times = self._loaded.run, time.perf_counter, list[float]()
        warm = clock() + seconds / 10
        run()
        run()
        while clock() < warm:
            run()
        end = clock() + seconds
        while len(times) < least_runs or clock() < end:
            start = clock()
            run()
            times.append(clock() - start)
        return Turn(statistics.median(times), min(times), len(times))

    def outputs(self) -> list[npt.NDArray[Any]]:
        assert self._loaded is not None
        return self._loaded.outputs()

    def memory(self) -> Memory:
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return Memory(*(int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM")))

    def serve(self, callers: int, seconds: float) -> float:
        assert self._loaded is not None
        if self._loaded.serve is None:
            raise NotImplementedError("it has no mode for concurrent requests here")
        return self._loaded.serve(callers, seconds)

    def closed_loop(self, callers: int, seconds: float) -> ClosedLoop:
        return closed_loop(self._request(), callers, seconds)

    def open_loop(self, moments: list[float], callers: int) -> Latencies:
        return open_loop(self._request(), moments, callers)

    def _request(self) -> Callable[[], object]:
        assert self._loaded is not None
        if self._loaded.request is None:
            raise NotImplementedError("it has no mode for requests from threads here")
        return self._loaded.request


def _answer(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer until the parent closes the pipe."""
    child = _Child()
    while True:
        try:
            name, *arguments = pickle.load(requests)
        except EOFError:
            return
        try:
            answer = ("done", getattr(child, name)(*arguments))
        except ImportError as error:
            answer = ("absent", str(error))
        except Exception as error:
            traceback.print_exc()
            answer = ("failed", f"{type(error).__name__}: {error}")
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "wb") as pipe:
        os.dup2(2, 1)  # what libraries print goes to standard error
        _answer(sys.stdin.buffer, pipe)
