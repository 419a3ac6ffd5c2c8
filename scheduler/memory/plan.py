"""MemoryPlan: the buffers of a preparation, where they lie, and what that saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.core.operator import MemorySource, Operator
from dagexec.core.runtime import DeviceRuntime
from dagexec.core.schema import TensorType
from dagexec.core.tensor import Storage, array_on
from dagexec.errors import ResourceError
from dagexec.platform.addresses import address_of
from dagexec.platform.cached import cached_property
from dagexec.platform.host_memory import check_fits, fits
from dagexec.platform.lazy import LazyModule
from dagexec.scheduler.memory.arena import Arena, StripArena
from dagexec.scheduler.memory.arena_memory import ArenaMemory, Placement, WorkingMemory
from dagexec.scheduler.memory.buffers import Buffer, Buffers
from dagexec.scheduler.memory.lifetime import MAX_IN_PAIRS, Lifetimes, Numbers, Order
from dagexec.scheduler.memory.offsets import BufferOffsets, Integers, aligned, place

if not TYPE_CHECKING:
    list_order_offsets = LazyModule("dagexec.scheduler.memory.list_order_offsets")
    lower_bound = LazyModule("dagexec.scheduler.memory.lower_bound")
else:
    from dagexec.scheduler.memory import list_order_offsets, lower_bound


Array = npt.NDArray[Any]

_MAX_NAMED = 3

_HEADROOM = 16
"""One byte more for this many, for buffers that have grown: at 256 positions, room for the next 16."""


class Placed(NamedTuple):
    """The memory of a tensor, with its address if on the host."""

    array: Array
    storage: Storage
    type: TensorType
    address: int | None


class MemoryPlan:
    """Buffers in arenas, one for each device.

    Sizes are rounded up to cache lines: a buffer of 4 bytes takes 64.

    Attributes:
        buffers: those that were placed.
        lifetimes: of the buffers; None where only the graph gives the order.
        own_bytes: bytes of outputs that are not planned.
    """

    def __init__(self, name: str, buffers: Buffers, order: Order, memory: ArenaMemory | None = None) -> None:
        """Raises ResourceError, with what is needed and what for, when memory is lacking. `name` is the net's.

        `memory` holds the arenas of the net's other preparations.
        """
        self._memory = ArenaMemory() if memory is None else memory
        self.buffers = buffers.buffers
        self.own_bytes = buffers.own_bytes
        self._order = order
        self._users = tuple(row.users for row in self.buffers)
        self._kept = tuple(row.kept for row in self.buffers)
        self._before = self._placements_before()
        self.lifetimes = self._find_lifetimes()
        self._many = max(order.count, len(self.buffers)) > MAX_IN_PAIRS
        self._strips: dict[Device, tuple[int, ...]] = {}
        self._places = buffers.places
        self._members: dict[Device, list[int]] = {}
        for number, buffer in enumerate(self.buffers):
            self._members.setdefault(buffer.device, []).append(number)
        self._room: dict[Device, list[int]] = {}
        placed = {device: self._place(device, members) for device, members in self._members.items()}
        self.tensor_bytes = sum(placement.extent for placement in placed.values())
        self._offsets: dict[int, int] = {}
        self._bound: dict[tuple[int, int, int, bool], Placed] = {}
        self._arenas: dict[Device, Arena] = {}
        try:
            for device, members in self._members.items():
                self._offsets.update(zip(members, map(int, placed[device].offsets), strict=True))
                offsets = placed[device].offsets
                runtime = self.buffers[members[0]].runtime
                if runtime.in_host_memory:
                    needed = self._memory.missing(device, placed[device].extent) + self.own_bytes
                    if not fits(needed):
                        check_fits(needed, f"net {name!r}: {self._needs()}")
                sizes = self._room[device]
                self._arenas[device] = self._new_arena(runtime, offsets, sizes, members)
        except ResourceError as error:
            raise ResourceError(f"net {name!r}: {self._needs()}: {error}") from None

    def storage(self, blob: int) -> Placed | None:
        """The memory of the blob with this id; None when it is not planned. Equal tensors at one place share theirs."""
        place = self._places.get(blob)
        if place is None:
            return None
        buffer, kind = self.buffers[place.buffer], place.type
        offset = self._offsets[place.buffer] + place.offset
        key = id(buffer.runtime), offset, id(kind), buffer.kept
        placed = self._bound.get(key)
        if placed is None:
            memory = self._arenas[buffer.device].bytes_at(offset, kind.nbytes)
            storage = Storage(memory, kind.nbytes, writable=False, reused=not buffer.kept)
            array = array_on(memory, kind.shape, kind.meta)
            address = address_of(array) if buffer.device == CPU else None
            placed = self._bound[key] = Placed(array, storage, kind, address)
        return placed

    def passing(self) -> dict[int, int]:
        """The host addresses of tensors that nobody reads after a run, by the ids of their blobs."""
        arena = self._arenas.get(CPU)
        if arena is None:
            return {}
        start = arena.address
        return {
            key: start + self._offsets[place.buffer] + place.offset
            for key, place in self._places.items()
            if not (buffer := self.buffers[place.buffer]).kept and buffer.device == CPU
        }

    @property
    def storage_ids(self) -> set[int]:
        """The ids of the storages in the arenas."""
        return {id(placed.storage) for placed in self._bound.values()}

    def working_memory(self, index: int, operator: Operator) -> MemorySource:
        """The source of working memory for operator `index` during preparation."""
        return partial(self._arena(operator.runtime).working_memory, index)

    def _arena(self, runtime: DeviceRuntime) -> Arena:
        arena = self._arenas.get(runtime.device)
        if arena is None:
            arena = self._new_arena(runtime, np.zeros(0, np.int64), (), ())
            self._arenas[runtime.device] = arena
        return arena

    def _placements_before(self) -> dict[Device, list[Placement]]:
        """By device, earlier placements of buffers with the same lifetimes."""
        return {
            device: [placement for placement in placements if placement.is_for(self._users, self._kept, self._order)]
            for device, placements in self._memory.placements.items()
        }

    def _find_lifetimes(self) -> Lifetimes | None:
        if self._order.graph is not None:
            return None
        placement = next(chain.from_iterable(self._before.values()), None)
        return Lifetimes(self._users, self._kept, self._order) if placement is None else placement.lifetimes

    def _new_arena(
        self, runtime: DeviceRuntime, offsets: Integers, sizes: Sequence[int], members: Sequence[int]
    ) -> Arena:
        if not self._many:
            return self._new_pair_arena(runtime, offsets, sizes, members)
        if runtime.device not in self._strips:
            self._strips[runtime.device] = list_order_offsets.place_in_list_order((), (), (), self._order).strips
        return StripArena(runtime, offsets, sizes, self._memory, self._strips[runtime.device])

    def _new_pair_arena(
        self, runtime: DeviceRuntime, offsets: Integers, sizes: Sequence[int], members: Sequence[int]
    ) -> Arena:
        """An arena where working memory is compared with all else; noted for smaller sizes unless it is one itself."""
        earlier = self._before.get(runtime.device, ())
        before = next((placement for placement in earlier if placement.offsets is offsets), None)
        arena = Arena(runtime, offsets, sizes, self._memory, self.lifetimes, members, before)
        if before is None and self.lifetimes is not None:
            placement = Placement(
                self._users, self._kept, self._order, self.lifetimes, arena.sizes, offsets, arena.working
            )
            self._memory.note(runtime.device, placement)
        return arena

    def placed(self) -> Iterator[tuple[Buffer, int]]:
        """Each buffer, and where it begins in its device's arena."""
        for number, offset in sorted(self._offsets.items()):
            yield self.buffers[number], offset

    def placed_working_memory(self) -> Iterator[WorkingMemory]:
        """The working memory of operators, in all arenas."""
        for arena in self._arenas.values():
            yield from arena.working

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arenas, for buffers and working memory."""
        return sum(arena.extent for arena in self._arenas.values())

    @property
    def working_bytes(self) -> int:
        """Bytes that working memory adds to those of the buffers."""
        return self.peak_bytes - self.tensor_bytes

    @cached_property
    def unshared_bytes(self) -> int:
        """Bytes of all buffers if none shared memory."""
        return sum(aligned(buffer.nbytes) for buffer in self.buffers)

    @property
    def unshared_working_bytes(self) -> int:
        """Bytes of all working memory if none were shared."""
        return sum(aligned(memory.nbytes) for arena in self._arenas.values() for memory in arena.working)

    @cached_property
    def lower_bound(self) -> int:
        """The most bytes of buffers and working memory that may be in use at one time: no plan can need less.

        0 for a net that is too large to tell.
        """
        total = 0
        if self._many:
            return total
        for device, arena in self._arenas.items():
            members = self._members.get(device, [])
            users: list[Sequence[int]] = [self.buffers[number].users for number in members]
            users += [(memory.operator,) for memory in arena.working]
            kept = [self.buffers[number].kept for number in members] + [False] * len(arena.working)
            weights = [aligned(self.buffers[number].nbytes) for number in members]
            weights += [aligned(memory.nbytes) for memory in arena.working]
            total += lower_bound.heaviest_antichain(weights, Lifetimes(users, kept, self._order).precedes)
        return total

    def _place(self, device: Device, members: Sequence[int]) -> BufferOffsets:
        sizes = self._room[device] = [self.buffers[number].nbytes for number in members]
        if not self._many:
            offsets = self._placed_before(device, sizes)
            if offsets is None:
                sizes = self._room[device] = self._with_headroom(device, sizes)
            return offsets or self._place_in_pairs(members, sizes)
        rows = [self.buffers[number] for number in members]
        walked = list_order_offsets.place_in_list_order(
            sizes, [row.users for row in rows], [row.kept for row in rows], self._order
        )
        self._strips[device] = walked.strips
        placed = BufferOffsets(walked.offsets, walked.extent)
        if self.lifetimes is None or len(members) < len(self.buffers) or self.lifetimes.are_crowded():
            return placed
        other = self._place_in_pairs(members, sizes)
        return other if other.extent < placed.extent else placed

    def _placed_before(self, device: Device, sizes: Sequence[int]) -> BufferOffsets | None:
        """The places of larger buffers, if there were such before."""
        room = np.array([aligned(size) for size in sizes], np.int64)
        earlier = next((placement for placement in self._before.get(device, ()) if placement.takes(room)), None)
        if earlier is None:
            return None
        return BufferOffsets(earlier.offsets, int((earlier.offsets + room).max(initial=0)))

    def _with_headroom(self, device: Device, sizes: Sequence[int]) -> list[int]:
        """The sizes, with room to grow for buffers that have grown a little, as a decoder's do by a position each step.

        So the next steps find all their buffers in place.
        """
        latest = next(iter(self._before.get(device, ())), None)
        if latest is None:
            return list(sizes)
        room = [int(space) for space in latest.room]
        if any(
            not space - space // _HEADROOM <= aligned(size) <= space + space // _HEADROOM
            for size, space in zip(sizes, room, strict=True)
        ):
            return list(sizes)
        return [
            size + size // _HEADROOM if aligned(size) > space else space
            for size, space in zip(sizes, room, strict=True)
        ]

    def _place_in_pairs(self, members: Sequence[int], sizes: Sequence[int]) -> BufferOffsets:
        """The offsets of buffers that are compared with one another."""
        lifetimes = self.lifetimes
        assert lifetimes is not None
        if len(members) == len(self.buffers):
            bound = lifetimes.peak_live([aligned(size) for size in sizes])
            device = self.buffers[0].device
            hint, used = self._memory.hints[device], self._memory.used(device)
            return place(sizes, lifetimes.conflicting, bound, hint, used, lifetimes.crowds)
        place_of = np.full(len(self.buffers), -1, np.intp)
        place_of[members] = np.arange(len(members))

        def conflicting(member: int) -> Numbers:
            places = place_of[lifetimes.conflicting(members[member])]
            return places[places >= 0]

        return place(sizes, conflicting)

    def _needs(self) -> str:
        largest: list[Buffer] = sorted(self.buffers, key=lambda buffer: -buffer.nbytes)[:_MAX_NAMED]
        named = ", ".join(f"{buffer.name!r} {buffer.nbytes:,}" for buffer in largest)
        return (
            f"its memory plan takes {self.tensor_bytes:,} bytes for {len(self.buffers)} buffers "
            f"({self.unshared_bytes:,} without sharing; the largest: {named}), and {self.own_bytes:,} beside it"
        )
