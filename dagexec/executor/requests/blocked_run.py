"""A run of a number of rows as several runs of other numbers; `batching.row_blocks` decides which."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from dagexec.binding.io_binding import Array, Outputs, check_result, new_result
from dagexec.binding.replicas import Replica
from dagexec.core.traits import Rows
from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class Block:
    """The `size` rows from `start` on; places beyond the last row are filled with others."""

    start: int
    size: int


class BlockedRun:
    """A run as several runs, one for each of `blocks`.

    Attributes:
        blocks: in order.
        results: complete up to the last block that ran.
    """

    __slots__ = ("_axes", "_rows", "_where", "blocks", "results")

    def __init__(self, rows: int, sizes: list[int], axes: Mapping[str, int], where: Mapping[str, Rows | None]) -> None:
        """`axes` are those of the inputs that have rows, `where` says where the results have them."""
        self._rows = rows
        self._axes = axes
        self._where = where
        self.results: Outputs = {}
        self.blocks: list[Block] = []
        start = 0
        for size in sizes:
            self.blocks.append(Block(max(0, min(start, rows - size)), size))
            start += size

    def feed(self, replica: Replica, feeds: Mapping[str, Array], number: int) -> None:
        """Put the rows of block `number` where `replica` reads them. Raises what `Replica.feed` does."""
        block = self.blocks[number]
        if block.size <= self._rows:
            replica.feed({name: self._cut(name, array, block) for name, array in feeds.items()})
            return
        parts = [feeds]
        missing = block.size - self._rows
        while missing > 0:  # any valid rows will do
            parts.append({name: self._cut(name, array, Block(0, missing)) for name, array in feeds.items()})
            missing -= self._rows
        replica.feed_rows(parts, self._axes)

    def _cut(self, name: str, array: Array, block: Block) -> Array:
        axis = self._axes.get(name)
        return array if axis is None else array[_rows_at(axis, block.start, block.start + block.size)]

    def keep(self, replica: Replica, number: int, out: Mapping[str, Array] | None) -> None:
        """Put the results of block `number` into the arrays of `out`, or into new ones where it has none.

        Raises FeedError when an array of `out` does not fit, and ResourceError.
        """
        net = replica.net.name
        block = self.blocks[number]
        done = 0 if number == 0 else self.blocks[number - 1].start + self.blocks[number - 1].size
        end = min(self._rows, block.start + block.size)
        for name, array in replica.peek(tuple(self._where)).items():
            rows = self._where[name]
            if rows is not None and (array.ndim <= rows.axis or array.shape[rows.axis] != rows.size(block.size)):
                raise DagexecError(
                    f"net {net!r}: result {name!r} of {block.size} rows must have {rows.size(block.size)} along axis "
                    f"{rows.axis}, found shape {array.shape}"
                )
            if number == 0:
                self._begin(net, name, array, None if out is None else out.get(name))
            if rows is None:
                self.results[name][...] = array
                continue
            new = _rows_at(rows.axis, rows.size(done), rows.size(end))
            computed = _rows_at(rows.axis, rows.size(done - block.start), rows.size(end - block.start))
            self.results[name][new] = array[computed]

    def _begin(self, net: str, name: str, array: Array, target: Array | None) -> None:
        rows = self._where[name]
        shape = array.shape
        if rows is not None:
            shape = (*shape[: rows.axis], rows.size(self._rows), *shape[rows.axis + 1 :])
        whole = np.broadcast_to(np.empty((), array.dtype), shape)
        if target is None:
            target = new_result(net, name, whole)
        else:
            check_result(net, name, whole, target)
        self.results[name] = target


def _rows_at(axis: int, start: int, end: int) -> tuple[slice, ...]:
    return (slice(None),) * axis + (slice(start, end),)
