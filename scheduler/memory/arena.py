"""Arena: the memory of a plan on one device, and the working memory that operators ask for while they are prepared.

The buffers lie in the first block, at their offsets. Working memory comes after them, operator by operator: into the
smallest gap between the buffers that are alive while the operator runs and the working memory of those that may run
beside it; then behind the end, where the host's block has addresses that cost nothing until they are touched; and,
where those are used up, into further blocks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.runtime import DeviceRuntime
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.arena_memory import ArenaMemory, Placement, WorkingMemory
from dagexec.scheduler.memory.lifetime import Lifetimes
from dagexec.scheduler.memory.offsets import Integers, aligned, best_fit

Array = npt.NDArray[Any]

_OPERATOR, _BLOCK, _OFFSET, _SIZE = range(4)


class Arena:
    """Blocks of memory of one device, of those that the arenas of a net have in common.

    Attributes:
        offsets, sizes: of the buffers, in block 0.
        working: what operators were given, in the order they asked.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        offsets: Integers,
        sizes: Sequence[int],
        memory: ArenaMemory,
        lifetimes: Lifetimes | None = None,
        members: Sequence[int] = (),
        before: Placement | None = None,
    ) -> None:
        """`members` are the numbers of the buffers in `lifetimes`, `before` the placement that `offsets` are of.

        Raises ResourceError when there is no memory.
        """
        self.offsets = offsets
        self.sizes = np.array([aligned(size) for size in sizes], np.int64)
        self.working: list[WorkingMemory] = []
        self._given = np.zeros((0, 4), np.int64)
        self._noted = 0  # rows of these
        self._reserved: defaultdict[int, list[WorkingMemory]] = defaultdict(list)  # the next one last
        self._runtime = runtime
        self._memory = memory
        self._lifetimes = lifetimes
        self._members = np.array(members, np.intp)
        self._extents: list[int] = []
        extent = int((offsets + self.sizes).max(initial=0))
        self._blocks: list[Array] = []
        self._add_block(extent)
        self._grow(0, extent, "the arena of a memory plan")
        for given in () if before is None else before.working:
            self._reserved[given.operator].insert(0, given)
            self._search_beside(given)

    @property
    def extent(self) -> int:
        """Bytes that are used at one time or another."""
        return sum(self._extents)

    @property
    def address(self) -> int:
        """Where, on the host, the buffers begin."""
        return address_of(self._blocks[0])

    def bytes_at(self, offset: int, nbytes: int) -> Array:
        """Bytes of the block of the buffers."""
        return self._blocks[0][offset : offset + nbytes]

    def working_memory(self, operator: int, nbytes: int) -> Array:
        """`nbytes` bytes that nothing else uses while `operator` runs. Raises ResourceError when there are none."""
        if nbytes == 0:
            return self._blocks[0][:0]
        size = aligned(nbytes)
        reserved = self._take_reserved(operator, size)
        block, offset = self._find_room(operator, size) if reserved is None else reserved
        while block >= len(self._blocks):
            self._add_block(offset + size)
        grown = max(self._extents[block], offset + size) - self._extents[block]
        self._grow(block, grown, f"working memory of {nbytes:,} bytes in the arena of a memory plan")
        given = WorkingMemory(operator, block, offset, nbytes)
        self.working.append(given)
        if reserved is None:
            self._search_beside(given)
        return self._runtime.host_view(self._blocks[block][offset : offset + nbytes])

    def _grow(self, block: int, nbytes: int, what: str) -> None:
        """Use `nbytes` more bytes behind those that are used of a block."""
        if not nbytes:
            return
        extent = self._extents[block] + nbytes
        self._memory.use(self._runtime.device, block, self._blocks[block], extent, what)
        self._extents[block] = extent

    def _take_reserved(self, operator: int, size: int) -> tuple[int, int] | None:
        """The place that the operator's next piece has in the placement before, if it is large enough."""
        left = self._reserved.get(operator)
        if not left:
            return None
        found = left.pop()
        if not left:
            del self._reserved[operator]
        return None if aligned(found.nbytes) < size else (found.block, found.offset)

    def _search_beside(self, given: WorkingMemory) -> None:
        """Have `_gap` go round what is given."""
        if self._noted == len(self._given):
            self._given = np.concatenate((self._given, np.zeros((len(self._given) + 16, 4), np.int64)))
        self._given[self._noted] = given.operator, given.block, given.offset, aligned(given.nbytes)
        self._noted += 1

    def _find_room(self, operator: int, size: int) -> tuple[int, int]:
        """A block and an offset: where no block grows if that can be, else where one has room behind its end."""
        found = [(block, self._gap(operator, block, size)) for block in range(len(self._blocks))]
        for block, offset in found:
            if offset + size <= self._extents[block]:
                return block, offset
        for block, offset in found:
            if offset + size <= self._blocks[block].nbytes:
                return block, offset
        return len(self._blocks), 0

    def _gap(self, operator: int, block: int, size: int) -> int:
        """The smallest gap of a block that takes `size` bytes while `operator` runs, if only behind its end."""
        assert self._lifetimes is not None
        starts, room = np.zeros(0, np.int64), np.zeros(0, np.int64)
        if block == 0:
            alive = self._lifetimes.live_at(operator)[self._members]
            starts, room = self.offsets[alive], self.sizes[alive]
        given = self._given[: self._noted]
        mine = given[given[:, _BLOCK] == block]
        beside = mine[self._lifetimes.together(mine[:, _OPERATOR], operator)]
        starts = np.concatenate((starts, beside[:, _OFFSET]))
        room = np.concatenate((room, beside[:, _SIZE]))
        return best_fit(starts, room, size)

    def _add_block(self, nbytes: int) -> None:
        """One more block with room for `nbytes`, none of them used yet."""
        self._blocks.append(self._memory.block(self._runtime, len(self._blocks), nbytes))
        self._extents.append(0)


@dataclass(slots=True)
class _Region:
    """Bytes of a strip, and the operator that was given them last."""

    block: int
    offset: int
    size: int
    operator: int


class StripArena(Arena):
    """An arena where working memory is behind the buffers, in strips that operators pass on (`list_order_offsets`)."""

    def __init__(
        self,
        runtime: DeviceRuntime,
        offsets: Integers,
        sizes: Sequence[int],
        memory: ArenaMemory,
        strips: Sequence[int],
    ) -> None:
        """`strips` are those of the operators. Raises ResourceError when there is no memory."""
        super().__init__(runtime, offsets, sizes, memory)
        self._strips = strips
        self._regions: dict[int, list[_Region]] = {}

    def _find_room(self, operator: int, size: int) -> tuple[int, int]:
        """What the operator's strip has, if it is not the operator's already; else more, at the end."""
        regions = self._regions.setdefault(self._strips[operator], [])
        for region in regions:
            if region.size >= size and region.operator != operator:
                region.operator = operator
                return region.block, region.offset
        block = len(self._blocks) - 1
        offset = self._extents[block]
        if offset + size > self._blocks[block].nbytes:
            block, offset = len(self._blocks), 0
        regions.append(_Region(block, offset, size, operator))
        return block, offset
