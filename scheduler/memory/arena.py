"""Arena: the memory of a plan on one device, and the working memory that operators ask for during preparation.

The buffers lie in the first block, at their offsets. Working memory is placed operator by operator: in the smallest gap
between the buffers that are alive while the operator runs and the working memory of operators that may run beside it;
otherwise at the end, where the host's block has addresses that cost nothing until they are used; and, where those are
used up, in further blocks.
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
    """Blocks of memory of one device, which the arenas of a net share.

    Attributes:
        offsets, sizes: of the buffers, in block 0.
        working: the working memory that operators were given, in the order of their requests.
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
        """`members` are the numbers of the buffers in `lifetimes`, `before` the placement that `offsets` belong to.

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
        for earlier in () if before is None else before.working:
            self._reserved[earlier.operator].insert(0, earlier)
            self._search_beside(earlier)

    @property
    def extent(self) -> int:
        """Bytes in use at one time or another."""
        return sum(self._extents)

    @property
    def address(self) -> int:
        """The host address at which the buffers begin."""
        return address_of(self._blocks[0])

    def bytes_at(self, offset: int, nbytes: int) -> Array:
        """A part of the block of the buffers."""
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
        memory = WorkingMemory(operator, block, offset, nbytes)
        self.working.append(memory)
        if reserved is None:
            self._search_beside(memory)
        return self._runtime.host_view(self._blocks[block][offset : offset + nbytes])

    def _grow(self, block: int, nbytes: int, what: str) -> None:
        """Use `nbytes` more bytes after the used part of a block."""
        if not nbytes:
            return
        extent = self._extents[block] + nbytes
        self._memory.use(self._runtime.device, block, self._blocks[block], extent, what)
        self._extents[block] = extent

    def _take_reserved(self, operator: int, size: int) -> tuple[int, int] | None:
        """The place of the operator's next piece in the placement before, if it is large enough."""
        queue = self._reserved.get(operator)
        if not queue:
            return None
        reserved = queue.pop()
        if not queue:
            del self._reserved[operator]
        return None if aligned(reserved.nbytes) < size else (reserved.block, reserved.offset)

    def _search_beside(self, memory: WorkingMemory) -> None:
        """Have `_gap` avoid `memory`."""
        if self._noted == len(self._given):
            self._given = np.concatenate((self._given, np.zeros((len(self._given) + 16, 4), np.int64)))
        self._given[self._noted] = memory.operator, memory.block, memory.offset, aligned(memory.nbytes)
        self._noted += 1

    def _find_room(self, operator: int, size: int) -> tuple[int, int]:
        """A block and an offset, in a gap of any block if there is one, else at the end of a block with room."""
        candidates = [(block, self._gap(operator, block, size)) for block in range(len(self._blocks))]
        for block, offset in candidates:
            if offset + size <= self._extents[block]:
                return block, offset
        for block, offset in candidates:
            if offset + size <= self._blocks[block].nbytes:
                return block, offset
        return len(self._blocks), 0

    def _gap(self, operator: int, block: int, size: int) -> int:
        """The smallest gap of a block that takes `size` bytes while `operator` runs, perhaps only at its end."""
        assert self._lifetimes is not None
        starts, room = np.zeros(0, np.int64), np.zeros(0, np.int64)
        if block == 0:
            alive = self._lifetimes.live_at(operator)[self._members]
            starts, room = self.offsets[alive], self.sizes[alive]
        rows = self._given[: self._noted]
        mine = rows[rows[:, _BLOCK] == block]
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
    """Bytes of a strip, and the operator that used them last."""

    block: int
    offset: int
    size: int
    operator: int


class StripArena(Arena):
    """An arena with working memory after the buffers, in strips that operators hand on (`list_order_offsets`)."""

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
        """Bytes of the operator's strip that it does not use yet; otherwise new ones, at the end."""
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
