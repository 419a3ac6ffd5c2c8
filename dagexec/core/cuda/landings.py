"""Landings: memory of the host that a device is about to write or read, kept till then and not read too early."""

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
    """Arrays of the host that copies under way have to do with."""

    def __init__(self) -> None:
        self._under_way: list[tuple[npt.NDArray[Any], NativeEvent, bool]] = []
        self._forked()
        reset_after_fork(self, Landings._forked)

    def _forked(self) -> None:
        self._lock = threading.Lock()

    def add(self, array: npt.NDArray[Any], native: NativeEvent, query: Callable[[int], int], *, writes: bool) -> None:
        """`array` is written to, or read, before `native`; it is kept until then."""
        with self._lock:
            self._forget_done(query)
            self._under_way.append((array, native, writes))

    def on(self, array: npt.NDArray[Any], query: Callable[[int], int]) -> list[NativeEvent]:
        """What to wait for before `array` is read."""
        with self._lock:
            self._forget_done(query)
            return [native for other, native, writes in self._under_way if writes and np.may_share_memory(other, array)]

    def _forget_done(self, query: Callable[[int], int]) -> None:
        self._under_way = [row for row in self._under_way if query(row[1].pointer) == NOT_READY]
