"""Blocks of emulated memory: who owns an address, what lies around a block, what was freed."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from typing import Any

import numpy as np

from tests.cuda.emulated.errors import EmulationError

GUARD = 512
"""Bytes before and behind every block that nobody may write."""
_GUARD_BYTE, _RUBBISH = 0xC3, 0xA5
_QUARANTINE = 64 << 20


class Block:
    """Memory of a device, or pinned memory of the host (`device` None).

    Attributes:
        ptr: where it begins.
        freed: nobody may use it any more.
        accesses: what has touched it; see `races`.
    """

    def __init__(self, size: int, device: int | None) -> None:
        self.size = size
        self.device = device
        self.freed = False
        self.accesses: list[Any] = []
        held = np.empty(size + 2 * GUARD + 256, np.uint8)
        begin = -(-(held.ctypes.data + GUARD) // 256) * 256 - held.ctypes.data
        held[:begin] = held[begin + size :] = _GUARD_BYTE
        held[begin : begin + size] = _RUBBISH
        self._held, self._begin = held, begin
        self.ptr = int(held.ctypes.data) + begin

    @property
    def end(self) -> int:
        """Behind its last byte."""
        return self.ptr + self.size

    @property
    def bytes(self) -> np.ndarray[Any, Any]:
        """What it holds."""
        return self._held[self._begin : self._begin + self.size]

    def check_guards(self) -> None:
        """Raises EmulationError when something wrote beside it."""
        for where, zone in (("before", self._held[: self._begin]), ("behind", self._held[self._begin + self.size :])):
            wrong = np.flatnonzero(zone != _GUARD_BYTE)
            if wrong.size:
                at = int(wrong[0]) - self._begin if where == "before" else int(wrong[0]) + self.size
                zone[...] = _GUARD_BYTE
                raise EmulationError(f"a write {where} a block of {self.size} bytes, at its byte {at}")

    def __repr__(self) -> str:
        return f"block of {self.size} bytes at {self.ptr:#x} of {'the host' if self.device is None else self.device}"


class Memories:
    """All blocks. Freed ones are kept for a while, so that whoever still uses one is noticed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._starts: list[int] = []
        self._blocks: list[Block] = []
        self._freed: deque[Block] = deque()
        self._freed_bytes = 0
        self._table: tuple[np.ndarray[Any, Any], list[Block]] | None = None

    def add(self, block: Block) -> None:
        """`block` is new."""
        with self._lock:
            at = bisect_right(self._starts, block.ptr)
            self._starts.insert(at, block.ptr)
            self._blocks.insert(at, block)
            self._table = None

    def free(self, block: Block) -> None:
        """`block` may not be used any more. Raises EmulationError for a second time, and for overwritten guards."""
        with self._lock:
            if block.freed:
                raise EmulationError(f"{block} is freed twice")
            block.freed = True
            self._table = None
            self._freed.append(block)
            self._freed_bytes += block.size
            while self._freed and (self._freed_bytes > _QUARANTINE or len(self._freed) > 256):
                oldest = self._freed.popleft()
                self._freed_bytes -= oldest.size
                at = bisect_right(self._starts, oldest.ptr) - 1
                del self._starts[at], self._blocks[at]
        block.check_guards()

    def find(self, pointer: int) -> Block | None:
        """The block that `pointer` is in, at its end, or in the guards around; None when it is in none."""
        with self._lock:
            at = bisect_right(self._starts, pointer + GUARD) - 1
            if at < 0:
                return None
            for place in (at, at - 1):
                if place >= 0:
                    block = self._blocks[place]
                    if block.ptr <= pointer <= block.end:
                        return block
            block = self._blocks[at]
            return block if pointer < block.end + GUARD else None

    def live(self) -> list[Block]:
        """Blocks that are not freed."""
        with self._lock:
            return [block for block in self._blocks if not block.freed]

    def table(self) -> tuple[np.ndarray[Any, Any], list[Block]]:
        """Begin and end of every block there is now, in order; and the blocks."""
        with self._lock:
            if self._table is None:
                blocks = [block for block in self._blocks if not block.freed and block.size]
                bounds = np.array([[block.ptr, block.end] for block in blocks], np.uint64).reshape(-1, 2)
                self._table = bounds, blocks
            return self._table
