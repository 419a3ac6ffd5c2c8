"""Copies in flight: memory of the host that a device is about to write or read, kept till then and not read too early.

A device cannot write to memory of the host that may move. It writes to a staging block, and the host takes the bytes
from there to their place (`StagedDownloads`): whoever finds that something is done, an event or a stream, first lets
all that has arrived land. So what was copied is in its place for everybody who has waited, whatever he waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.devices.cuda.device import NativeEvent
from dagexec.devices.cuda.errors import NOT_READY, SUCCESS
from dagexec.devices.cuda.staging import Staging, StagingBlock
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]


class ArraysInFlight:
    """Arrays of the host that copies under way have to do with."""

    def __init__(self) -> None:
        self._under_way: list[tuple[Array, NativeEvent, bool]] = []
        self._forked()
        reset_after_fork(self, ArraysInFlight._forked)

    def _forked(self) -> None:
        self._lock = new_lock()

    def add(self, array: Array, native: NativeEvent, query: Callable[[int], int], *, writes: bool) -> None:
        """`array` is written to, or read, before `native`; it is kept until then."""
        with self._lock:
            self._forget_done(query)
            self._under_way.append((array, native, writes))

    def on(self, array: Array, query: Callable[[int], int]) -> list[NativeEvent]:
        """What to wait for before `array` is read."""
        with self._lock:
            self._forget_done(query)
            return [native for other, native, writes in self._under_way if writes and np.may_share_memory(other, array)]

    def _forget_done(self, query: Callable[[int], int]) -> None:
        self._under_way = [row for row in self._under_way if query(row[1].pointer) == NOT_READY]


@dataclass(eq=False, frozen=True, slots=True)
class _StagedDownload:
    """When `native` is done, `block` holds what is to be in `destination`."""

    staging: Staging
    native: NativeEvent
    block: StagingBlock
    destination: Array


class StagedDownloads:
    """What devices bring to staging blocks, and the host has yet to take from there, in the order of its launch.

    Those of all devices: an event of one may stand for a copy of another.
    """

    def __init__(self) -> None:
        self._forked()
        reset_after_fork(self, StagedDownloads._forked)

    def _forked(self) -> None:
        self._lock = new_lock()
        self._expected: list[_StagedDownload] = []

    def expect(self, staging: Staging, native: NativeEvent, block: StagingBlock, destination: Array) -> None:
        """When `native` is done, `block` has the bytes of `destination`, and is free once they are there."""
        with self._lock:
            self._expected = [*self._expected, _StagedDownload(staging, native, block, destination)]

    def land(self) -> None:
        """Take what has arrived to its place. A thread that comes meanwhile waits until it is there."""
        if not self._expected:
            return
        with self._lock:
            left = []
            for one in self._expected:
                status = one.staging.runtime.api.eventQuery(one.native.pointer)
                if status == NOT_READY:
                    left.append(one)
                    continue
                if status == SUCCESS:
                    target = one.destination
                    np.copyto(target, one.block.array[: target.nbytes].view(target.dtype).reshape(target.shape))
                one.staging.give(one.block)
            self._expected = left

    def forget(self, staging: Staging) -> None:
        """Nothing of that device's arrives any more."""
        with self._lock:
            self._expected = [one for one in self._expected if one.staging is not staging]


staged_downloads = StagedDownloads()
