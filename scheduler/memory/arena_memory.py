"""ArenaMemory: the blocks that all arenas of a net lie in, as large as the largest of them needs.

One run of a net continues at a time, and it leaves nothing behind but what was fetched before the next one is
prepared. So preparations for different shapes use the same bytes: each has its own offsets (`arena`).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.runtime import DeviceRuntime
from dagexec.platform.host_memory import check_fits, commit, reserve
from dagexec.scheduler.memory.offsets import OrderHint

Array = npt.NDArray[Any]


@dataclass(slots=True)
class _Block:
    """Memory of a device; of host memory that is `reserved`, only `used` bytes have been taken from the system."""

    array: Array
    reserved: bool
    used: int = 0


class ArenaMemory:
    """Blocks by device and number.

    Attributes:
        hints: by device, in which order the buffers of the net are placed well.
        replaced: how many blocks gave way to larger ones. Arenas made before keep the old block alive.
    """

    def __init__(self) -> None:
        self.hints: defaultdict[Device, OrderHint] = defaultdict(OrderHint)
        self.replaced = 0
        self._blocks: dict[tuple[Device, int], _Block] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks, as far as some arena uses them."""
        return sum(block.used for block in tuple(self._blocks.values()))

    def block(self, runtime: DeviceRuntime, number: int, nbytes: int) -> Array:
        """Block `number` of a device, of at least `nbytes` bytes, or addresses. Raises ResourceError."""
        key = (runtime.device, number)
        known = self._blocks.get(key)
        if known is not None and known.array.nbytes >= nbytes:
            return known.array
        if known is not None:
            self.replaced += 1
            del self._blocks[key], known  # its memory may be needed
        reserved = reserve(nbytes) if runtime.device == CPU else None
        array = runtime.allocate(nbytes) if reserved is None else reserved
        self._blocks[key] = _Block(array, reserved is not None)
        return array

    def use(self, device: Device, number: int, array: Array, nbytes: int, what: str) -> None:
        """Have the first `nbytes` bytes of block `number` used. Raises ResourceError, saying `what` they are."""
        block = self._blocks.get((device, number))
        if block is None or block.array is not array or nbytes <= block.used:
            return
        if block.reserved:  # other memory was checked when it was allocated
            check_fits(nbytes - block.used, what)
            commit(array, nbytes - block.used, block.used)
        block.used = nbytes

    def used(self, device: Device) -> int:
        """Bytes of the first block of a device that some arena uses."""
        block = self._blocks.get((device, 0))
        return 0 if block is None else block.used

    def missing(self, device: Device, nbytes: int) -> int:
        """Bytes that the first block of a device has to be given, so that `nbytes` of it can be used."""
        block = self._blocks.get((device, 0))
        return nbytes if block is None or nbytes > block.array.nbytes else max(0, nbytes - block.used)

    def clear(self) -> None:
        """Let go of all blocks."""
        self._blocks.clear()
