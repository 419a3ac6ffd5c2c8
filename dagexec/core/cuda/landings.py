"""Landings: where host functions of CUDA are about to write, so that nobody reads it as if they had."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.cuda.errors import NOT_READY
from dagexec.core.cuda.event import NativeEvent
from dagexec.core.threads import reset_after_fork


class Landings:
    """Arrays of the host that copies from a device have yet to reach."""

    def __init__(self) -> None:
        self._under_way: list[tuple[npt.NDArray[Any], NativeEvent]] = []
        self._forked()
        reset_after_fork(self, Landings._forked)

    def _forked(self) -> None:
        self._lock = threading.Lock()

    def add(self, array: npt.NDArray[Any], native: NativeEvent) -> None:
        """`array` is written to before `native`."""
        with self._lock:
            self._under_way.append((array, native))

    def on(self, array: npt.NDArray[Any], query: Callable[[int], int]) -> list[NativeEvent]:
        """What to wait for before `array` is read."""
        with self._lock:
            self._under_way = [row for row in self._under_way if query(row[1].pointer) == NOT_READY]
            return [native for other, native in self._under_way if np.may_share_memory(other, array)]
