"""MemoryPlan: the buffers of a preparation, where they lie, and what that saves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import Context, Device, array_on
from dagexec.core.errors import ResourceError
from dagexec.core.host_memory import check_fits
from dagexec.core.operator import Operator
from dagexec.core.tensor import Storage
from dagexec.scheduler.memory.arena import Arena
from dagexec.scheduler.memory.bound import heaviest_antichain
from dagexec.scheduler.memory.buffers import Buffer, Buffers
from dagexec.scheduler.memory.lifetime import Lifetimes, Numbers, Order
from dagexec.scheduler.memory.placement import Placed, aligned, place

Array = npt.NDArray[Any]
MemorySource = Callable[[int], Array]

_MOST_NAMED = 3


class MemoryPlan:
    """Buffers in arenas, one for each device.

    All sizes are those of cache lines: a buffer of 4 bytes takes 64.

    Attributes:
        buffers: what was placed.
        lifetimes: when each buffer is in use.
        own_bytes: bytes of outputs that are not planned.
    """

    def __init__(self, name: str, found: Buffers, order: Order) -> None:
        """Raises ResourceError, with what is needed and what for, when the memory is not there. `name` is the net's."""
        self.buffers = found.buffers
        self.own_bytes = found.own_bytes
        self.lifetimes = Lifetimes([row.users for row in self.buffers], [row.kept for row in self.buffers], order)
        self._places = found.places
        self._order = order
        self._members: dict[Device, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            self._members.setdefault(buffer.device, []).append(number)
        placed = {device: self._place(members) for device, members in self._members.items()}
        self.tensor_bytes = sum(one.extent for one in placed.values())
        self._offsets: dict[int, int] = {}
        self._bound: dict[int, tuple[Array, Storage]] = {}
        self._arenas: dict[Device, Arena] = {}
        try:
            for device, members in self._members.items():
                self._offsets.update(zip(members, map(int, placed[device].offsets), strict=True))
                offsets = placed[device].offsets
                if device.kind != "cuda":  # which has memory of its own
                    check_fits(placed[device].extent + self.own_bytes, f"net {name!r}: {self._needs()}")
                sizes = [self.buffers[number].nbytes for number in members]
                context = self.buffers[members[0]].context
                self._arenas[device] = Arena(context, offsets, sizes, self.lifetimes, members)
        except ResourceError as error:
            raise ResourceError(f"net {name!r}: {self._needs()}: {error}") from None

    def storage(self, blob: int) -> tuple[Array, Storage] | None:
        """The array and storage of the blob of this `id`; None when its memory is not planned."""
        place = self._places.get(blob)
        if place is None:
            return None
        if blob in self._bound:
            return self._bound[blob]
        buffer = self.buffers[place.buffer]
        kind = place.type
        offset = self._offsets[place.buffer] + place.offset
        memory = self._arenas[buffer.device].bytes_at(offset, kind.nbytes)
        storage = Storage(memory, kind.nbytes, writable=False, reused=not buffer.kept)
        self._bound[blob] = array_on(memory, kind.shape, kind.meta), storage
        return self._bound[blob]

    def working_memory(self, index: int, operator: Operator) -> MemorySource:
        """What gives working memory to operator `index`, while it is prepared."""
        return partial(self._arena(operator.context).working_memory, index)

    def _arena(self, context: Context) -> Arena:
        arena = self._arenas.get(context.device)
        if arena is None:
            arena = Arena(context, np.zeros(0, np.int64), (), self.lifetimes, ())
            self._arenas[context.device] = arena
        return arena

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arenas: of buffers and working memory."""
        return sum(arena.extent for arena in self._arenas.values())

    @property
    def working_bytes(self) -> int:
        """Bytes that working memory adds to those of the buffers."""
        return self.peak_bytes - self.tensor_bytes

    @cached_property
    def unshared_bytes(self) -> int:
        """Bytes if nothing shared memory: of all buffers."""
        return sum(aligned(buffer.nbytes) for buffer in self.buffers)

    @property
    def unshared_working_bytes(self) -> int:
        """Bytes of all working memory, if none were shared."""
        return sum(aligned(given.nbytes) for arena in self._arenas.values() for given in arena.working)

    @cached_property
    def lower_bound(self) -> int:
        """The most bytes of buffers and working memory that may be in use at one time: no plan can need less."""
        total = 0
        for device, arena in self._arenas.items():
            members = self._members.get(device, [])
            users: list[Sequence[int]] = [self.buffers[number].users for number in members]
            users += [(given.operator,) for given in arena.working]
            kept = [self.buffers[number].kept for number in members] + [False] * len(arena.working)
            weights = [aligned(self.buffers[number].nbytes) for number in members]
            weights += [aligned(given.nbytes) for given in arena.working]
            total += heaviest_antichain(weights, Lifetimes(users, kept, self._order).precedes)
        return total

    def _place(self, members: Sequence[int]) -> Placed:
        sizes = [self.buffers[number].nbytes for number in members]
        if len(members) == len(self.buffers):
            return place(sizes, self.lifetimes.rivals, self.lifetimes.most_alive([aligned(size) for size in sizes]))
        place_of = np.full(len(self.buffers), -1, np.intp)
        place_of[members] = np.arange(len(members))

        def rivals(member: int) -> Numbers:
            found = place_of[self.lifetimes.rivals(members[member])]
            return found[found >= 0]

        return place(sizes, rivals)

    def _needs(self) -> str:
        largest: list[Buffer] = sorted(self.buffers, key=lambda buffer: -buffer.nbytes)[:_MOST_NAMED]
        named = ", ".join(f"{buffer.name!r} {buffer.nbytes:,}" for buffer in largest)
        return (
            f"its memory plan takes {self.tensor_bytes:,} bytes for {len(self.buffers)} buffers "
            f"({self.unshared_bytes:,} without sharing; the largest: {named}), and {self.own_bytes:,} beside it"
        )
