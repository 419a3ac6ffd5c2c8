"""ArenaMemory: the blocks that all arenas of a net lie in, each as large as the largest arena needs.

A net has one run at a time, and nothing in its arenas outlives what is fetched before the next run is prepared. So
preparations for different shapes use the same bytes: each has its own offsets (`arena`).
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.runtime import DeviceRuntime
from dagexec.platform.host_memory import check_fits, commit, decommit, reserve
from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.arena_budget import ArenaAccount
from dagexec.scheduler.memory.lifetime import Lifetimes, Order
from dagexec.scheduler.memory.offsets import Integers, OrderHint
from dagexec.scheduler.memory.pattern import BufferPatterns

Array = npt.NDArray[Any]


_MOST_PLACEMENTS = 4


@dataclass(frozen=True, slots=True)
class WorkingMemory:
    """Working memory of an operator: `nbytes` at `offset` of `block`."""

    operator: int
    block: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Placement:
    """Where a preparation has buffers and working memory, which serves smaller sizes too.

    Attributes:
        users, kept: the operators that touch each buffer; whether its content survives a run.
        order: which operators come after which.
        lifetimes: of the buffers.
        room: bytes of each buffer.
        offsets: where each buffer begins.
        working: working memory of operators, in the order of their requests; more may come.
    """

    users: tuple[tuple[int, ...], ...]
    kept: tuple[bool, ...]
    order: Order
    lifetimes: Lifetimes
    room: Integers
    offsets: Integers
    working: list[WorkingMemory]

    def is_for(self, users: tuple[tuple[int, ...], ...], kept: tuple[bool, ...], order: Order) -> bool:
        """True for buffers with the same lifetimes."""
        return self.users == users and self.kept == kept and self.order == order

    def takes(self, room: Integers) -> bool:
        """True for buffers of no more bytes."""
        return bool((room <= self.room).all())

    def covers(self, other: Placement) -> bool:
        """True if it serves wherever the other does."""
        return self.is_for(other.users, other.kept, other.order) and self.takes(other.room)


@dataclass(slots=True)
class _Block:
    """Memory of a device. Of host memory that is `reserved`, only `used` bytes have been taken from the system.

    `given_back` bytes of these are taken again by the next run.
    """

    array: Array
    reserved: bool
    used: int = 0
    given_back: int = 0


class ArenaMemory:
    """Blocks by device and number.

    Attributes:
        hints: by device, an order in which the buffers of the net are placed well.
        placements: by device, the placements so far, the latest first.
        patterns: how the buffers of the net follow from shapes.
        replaced: how many blocks gave way to larger ones. Older arenas keep the old block alive.
        account: what the bytes on the host are charged to; None without a limit.
    """

    def __init__(self) -> None:
        self.hints: defaultdict[Device, OrderHint] = defaultdict(OrderHint)
        self.placements: defaultdict[Device, list[Placement]] = defaultdict(list)
        self.patterns = BufferPatterns()
        self.replaced = 0
        self._blocks: dict[tuple[Device, int], _Block] = {}
        self.account: ArenaAccount | None = None

    def note(self, device: Device, new: Placement) -> None:
        """Add `new`, replacing those that it covers; a few are kept, as sizes may decide what is planned."""
        others = [placement for placement in self.placements[device] if not new.covers(placement)]
        self.placements[device] = [new, *others[: _MOST_PLACEMENTS - 1]]

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks that some arena uses."""
        return sum(block.used for block in self._blocks.copy().values())

    def block(self, runtime: DeviceRuntime, number: int, nbytes: int) -> Array:
        """Block `number` of a device, of at least `nbytes` bytes, or addresses. Raises ResourceError."""
        key = (runtime.device, number)
        block = self._blocks.get(key)
        if block is not None and block.array.nbytes >= nbytes:
            return block.array
        if block is not None:
            self.replaced += 1
            self.placements.pop(runtime.device, None)
            del self._blocks[key], block  # its memory may be needed
        reserved = reserve(nbytes) if runtime.device == CPU else None
        array = runtime.allocate(nbytes) if reserved is None else reserved
        self._blocks[key] = _Block(array, reserved is not None)
        return array

    def use(self, device: Device, number: int, array: Array, nbytes: int, what: str) -> None:
        """Use the first `nbytes` bytes of block `number`. Raises ResourceError, which names them as `what`."""
        block = self._blocks.get((device, number))
        if block is None or block.array is not array or nbytes <= block.used:
            return
        if self.account is not None and device == CPU:
            self.account.budget.charge(self.account, self._on_host() + nbytes - block.used)
        if block.reserved:  # other memory was checked when it was allocated
            check_fits(nbytes - block.used, what)
            commit(array, nbytes - block.used, block.used)
        block.used = nbytes

    def give_back(self) -> int:
        """Give back the host pages of the arenas, which must not be in a run. Returns the number of bytes."""
        total = 0
        for block in self._blocks.values():
            if block.reserved and block.used:
                decommit(block.array, block.used)
                total += block.used
                block.used, block.given_back = 0, block.used
        self._discharge()
        return total

    def take_again(self) -> None:
        """For a run: take again what was given back. Raises ResourceError."""
        for (device, number), block in self._blocks.items():
            if block.given_back:
                self.use(device, number, block.array, block.given_back, "the arena of a memory plan")
                block.given_back = 0

    def _discharge(self) -> None:
        if self.account is not None:
            self.account.budget.discharge(self.account, self._on_host())

    def _on_host(self) -> int:
        return sum(block.used for (device, _), block in self._blocks.items() if device == CPU)

    def used(self, device: Device) -> int:
        """Bytes of the first block of a device that some arena uses."""
        block = self._blocks.get((device, 0))
        return 0 if block is None else block.used

    def missing(self, device: Device, nbytes: int) -> int:
        """Bytes that the first block of a device lacks for `nbytes` to be usable."""
        block = self._blocks.get((device, 0))
        return nbytes if block is None or nbytes > block.array.nbytes else max(0, nbytes - block.used)

    def leave_budget(self) -> None:
        """Stop charging a budget."""
        self.clear()
        self.account = None  # it refers to the owner of the net

    def clear(self) -> None:
        """Release all blocks."""
        self._blocks.clear()
        self.placements.clear()
        self._discharge()
