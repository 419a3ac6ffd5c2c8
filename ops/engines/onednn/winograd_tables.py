"""Tables of kernel calls for Winograd's algorithm (`winograd`), and the lines that each call goes along.

A convolution has thousands of calls, in a pattern that rows of tiles repeat: those of all rows are computed at once. Of
a row, one call reads the image or writes the result. The others are between working memory that all blocks of a piece
use, so a row has them in common with those at its place in other blocks: in a table of their own, which is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import native_rows, table_code
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import BIAS as BIAS_ARGUMENT
from dagexec.ops.engines.onednn.descriptors import DST, SRC, Array, aligned_empty
from dagexec.ops.engines.onednn.winograd_tiling import TAPS, Tiling
from dagexec.ops.families.conv.toom_cook import minimal_filter
from dagexec.ops.kernels import winograd_kernels as kernels
from dagexec.ops.kernels.post_ops import post_op_kernel
from dagexec.ops.kernels.tables import c_function, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

Integers = npt.NDArray[np.int64]

_FLOAT = 4  # bytes
_CALL = 5  # a function and four arguments
_ROW_BYTES = 48  # of a native call


@dataclass(frozen=True)
class Working:
    """The working memory of a piece, which its blocks use by turns: v and z, and the strips of a block's parts."""

    v: Array
    z: Array
    strips: Sequence[Array]


class Tables:
    """Writes tables of calls, [calls, 5], for blocks; the lines that they point at live as long as this.

    Attributes:
        nbytes: of all lines, of the calls of all rows, and of the tables that rows have in common.
    """

    def __init__(
        self, tiling: Tiling, arrays: Mapping[int, Array], pieces: Sequence[range], memory: Sequence[Working]
    ) -> None:
        """`pieces`: the numbers of the blocks of each, with its memory."""
        layer = tiling.layer
        self._tiling, self._memory = tiling, memory
        self._x, self._y = (address_of(arrays[number]) for number in (SRC, DST))
        self._bias = address_of(arrays[BIAS_ARGUMENT]) if layer.finish.bias else 0
        self._other = address_of(arrays[layer.other]) - self._y if layer.other else 0
        self._zeros = _zeros(layer.width * layer.channels * _FLOAT)
        self._arrays: list[npt.NDArray[Any]] = []
        self._piece = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
        self._strips = np.array([[address_of(strip) for strip in one.strips] for one in memory])
        self._strip = self._strips_of_rows()
        self._read, self._written = self._reading(), self._writing()
        self.nbytes = (
            sum(array.nbytes for array in self._arrays) + _ROW_BYTES * (self._read.size + self._written.size) // _CALL
        )

    def read(self, block: int) -> list[Integers]:
        """The calls from the image to v, of each part of a block."""
        zeroed = self._zeroed[self._piece[block]]
        return [
            np.concatenate((zeroed[number], self._read[part.start : part.stop].reshape(-1, _CALL)))
            for number, part in enumerate(self._parts(block))
        ]

    def write(self, block: int) -> list[Integers]:
        """The calls from z to the result, of each part of a block."""
        return [self._written[part.start : part.stop].reshape(-1, _CALL) for part in self._parts(block)]

    def _parts(self, block: int) -> list[range]:
        """The rows of each part of a block, which has a strip of its own."""
        rows = self._tiling.blocks[block]
        return [rows[part.start : part.stop] for part in shares(len(rows), self._strips.shape[1])]

    def _strips_of_rows(self) -> Integers:
        """The number of the strip of each row of tiles."""
        count = self._strips.shape[1]
        lengths = [[len(part) for part in shares(len(rows), count)] for rows in self._tiling.blocks]
        found: Integers = np.concatenate([np.repeat(np.arange(len(one)), one) for one in lengths])
        return found

    def _reading(self) -> Integers:
        """The calls from the image to v, [rows, calls, 5]; `_zeroed` gets those before a part: zeros beside lines."""
        layer, tile, pixel = self._tiling.layer, self._tiling.filter.tile, self._tiling.layer.channels * _FLOAT
        across, head = self._across(), layer.heads[1] * pixel
        inside = min(layer.width * pixel, across - head)
        rows, places = np.arange(self._tiling.rows), across * np.arange(tile)
        piece, place = self._piece[rows // self._tiling.block_rows], rows % self._tiling.block_rows
        calls = self._new_lines(len(rows), 1)
        calls[:, 0, kernels.READ : kernels.READ + tile] = self._image_lines(rows)
        strips = self._strips[piece, self._strip]
        calls[:, 0, kernels.WRITTEN : kernels.WRITTEN + tile] = (strips + head)[:, None] + places
        calls[:, 0, kernels.INNER : kernels.READ_STEP] = inside, 1
        outside = [(begin, size) for begin, size in ((0, head), (head + inside, across - head - inside)) if size]
        zeroed = np.zeros((*self._strips.shape, len(outside), tile, _CALL), np.int64)
        zeroed[..., 0] = c_function("memset")
        for number, (begin, size) in enumerate(outside):
            zeroed[:, :, number, :, 1] = (self._strips + begin)[..., None] + places
            zeroed[:, :, number, :, 3] = size
        self._zeroed = zeroed.reshape(*self._strips.shape, -1, _CALL)
        table = self._table(calls, _require(_line_kernel(self._tiling.outputs, "data")))
        common = self._common(self._to_v, piece, place)
        return np.stack((table, common), axis=1)

    def _writing(self) -> Integers:
        """The calls from z to the result, [rows, calls, 5]."""
        tiling, layer = self._tiling, self._tiling.layer
        pixel, tile = layer.filters * _FLOAT, tiling.filter.tile
        results = kernels.WRITTEN + tiling.outputs
        rows = np.arange(tiling.rows)
        piece, place = self._piece[rows // tiling.block_rows], rows % tiling.block_rows
        calls = self._new_lines(len(rows), 1)
        height, width = layer.result
        image, number = np.divmod(rows, tiling.image_rows)
        top = number * tiling.outputs
        written = (
            self._y + ((image * height + top) * width * pixel)[:, None] + width * pixel * np.arange(tiling.outputs)
        )
        lines = self._strips[piece, self._strip]
        apart = tiling.columns * tiling.outputs * pixel
        calls[:, 0, kernels.READ : kernels.READ + tile] = lines[:, None] + apart * np.arange(tile)
        calls[:, 0, kernels.WRITTEN : results] = written
        calls[:, 0, kernels.INNER : kernels.BIAS_LINE] = (pixel, width, pixel, pixel)
        counts = np.minimum(tiling.outputs, height - top)
        table = self._table(calls, 0)
        table[:, 0] = self._last_kernels(counts)
        steps = [self._common(self._from_z, piece, place), table]
        if layer.later:
            steps.append(self._later(written[:, 0], counts * width * layer.filters))
        return np.stack(steps, axis=1)

    def _later(self, written: Integers, elements: Integers) -> Integers:
        """The calls that do the last post-ops to so many elements of the result from these addresses on."""
        kernel = _require(post_op_kernel(self._tiling.layer.later, self._tiling.layer.lanes))
        zeros = np.zeros_like(written)
        return np.stack((zeros + kernel, written, elements, zeros, zeros), axis=1)

    def _common(
        self, write: Callable[[Integers, Integers, Integers], Integers], piece: Integers, place: Integers
    ) -> Integers:
        """For each row, the call of the table that it has in common with those at its place in the piece's blocks.

        The last block may have other parts, and so other strips.
        """
        sizes = len(self._memory), self._tiling.block_rows, self._strips.shape[1]
        found, inverse = np.unique(np.ravel_multi_index((piece, place, self._strip), sizes), return_inverse=True)
        pieces, places, strips = np.unravel_index(found, sizes)
        tile = self._tiling.filter.tile
        rows = native_rows(write(pieces, places, self._strips[pieces, strips]))
        self._arrays.append(rows)
        table = np.zeros((len(piece), _CALL), np.int64)
        table[:, 0] = _require(table_code())
        table[:, 1] = address_of(rows) + inverse * tile * rows.strides[0]
        table[:, 2] = tile
        return table

    def _to_v(self, pieces: Integers, places: Integers, strips: Integers) -> Integers:
        """The calls from strips to these rows of v."""
        tiling = self._tiling
        pixel, tile = tiling.layer.channels * _FLOAT, tiling.filter.tile
        lines = strips[:, None] + self._across() * np.arange(tile)
        calls = self._new_lines(len(places), tile)
        calls[..., kernels.READ : kernels.READ + tile] = lines[..., None] + pixel * np.arange(tile)
        starts = np.array([address_of(one.v) for one in self._memory])[pieces]
        calls[..., kernels.WRITTEN : kernels.WRITTEN + tile] = self._tiles(starts, places, pixel)
        steps = tiling.outputs * pixel, tiling.places_apart * pixel
        calls[..., kernels.INNER : kernels.BIAS_LINE] = (pixel, tiling.columns, *steps)
        return self._table(calls, _require(_line_kernel(tiling.outputs, "data")))

    def _from_z(self, pieces: Integers, places: Integers, strips: Integers) -> Integers:
        """The calls from these rows of z to strips."""
        tiling = self._tiling
        pixel, tile = tiling.layer.filters * _FLOAT, tiling.filter.tile
        lines = strips[:, None] + tiling.columns * tiling.outputs * pixel * np.arange(tile)
        calls = self._new_lines(len(places), tile)
        starts = np.array([address_of(one.z) for one in self._memory])[pieces]
        calls[..., kernels.READ : kernels.READ + tile] = self._tiles(starts, places, pixel)
        written = lines[..., None] + pixel * np.arange(tiling.outputs)
        calls[..., kernels.WRITTEN : kernels.WRITTEN + tiling.outputs] = written
        steps = tiling.places_apart * pixel, tiling.outputs * pixel
        calls[..., kernels.INNER : kernels.BIAS_LINE] = (pixel, tiling.columns, *steps)
        return self._table(calls, _require(_line_kernel(tiling.outputs, "output")))

    def _across(self) -> int:
        """Bytes of a line of a strip that is read."""
        tiling = self._tiling
        return (tiling.columns * tiling.outputs + TAPS - 1) * tiling.layer.channels * _FLOAT

    def _last_kernels(self, counts: Integers) -> Integers:
        """The kernels that end rows of tiles, of which so many rows of pixels are in the image."""
        outputs, finish = self._tiling.outputs, self._tiling.layer.finish
        found, inverse = np.unique(counts, return_inverse=True)
        made = [_require(_last_kernel(outputs, int(count), finish)) for count in found]
        return np.array(made, np.int64)[inverse]

    def _tiles(self, starts: Integers, places: Integers, pixel: int) -> Integers:
        """Where the places of the first tile of rows of blocks lie in v or z, which start there, [rows, t, t]."""
        tiling, tile, apart = self._tiling, self._tiling.filter.tile, self._tiling.places_apart
        row = starts + places * (tiling.columns * apart * pixel)
        product, place = np.divmod(np.arange(tile * tile), apart)
        of_product = tiling.block_rows * tiling.columns * apart * pixel
        found: Integers = row[:, None, None] + (product * of_product + place * pixel).reshape(tile, tile)
        return found

    def _image_lines(self, rows: Integers) -> Integers:
        """The rows of the image that each row of tiles reads, [rows, t]; zeros outside."""
        tiling, layer = self._tiling, self._tiling.layer
        image, number = np.divmod(rows, tiling.image_rows)
        at = (number * tiling.outputs - layer.heads[0])[:, None] + np.arange(tiling.filter.tile)
        across = layer.width * layer.channels * _FLOAT
        lines = self._x + (image[:, None] * layer.height + at) * across
        return np.where((at >= 0) & (at < layer.height), lines, address_of(self._zeros))

    def _new_lines(self, rows: int, calls: int) -> Integers:
        """The lines of so many calls for each of the rows, [rows, calls, fields]; bias and other are there."""
        lines = np.zeros((rows, calls, kernels.FIELDS), np.int64)
        lines[..., kernels.BIAS_LINE] = self._bias
        lines[..., kernels.OTHER] = self._other
        self._arrays.append(lines)
        return lines

    @staticmethod
    def _table(calls: Integers, kernel: int) -> Integers:
        """The table that calls `kernel` for all lines."""
        count = calls.shape[0] * calls.shape[1]
        table = np.zeros((count, _CALL), np.int64)
        table[:, 0] = kernel
        table[:, 1] = address_of(calls) + np.arange(count) * kernels.FIELDS * calls.itemsize
        return table


def _require(kernel: int | None) -> int:
    if kernel is None:
        raise UnsupportedFeatureError("code generated at run time is no longer allowed to run")
    return kernel


@lru_cache(maxsize=8)
def _line_kernel(outputs: int, matrix: str) -> int | None:
    """The kernel of a matrix of the minimal filter, whose fractions take long to hash."""
    return kernels.line_kernel(getattr(minimal_filter(outputs, TAPS), matrix))


@lru_cache(maxsize=64)
def _last_kernel(outputs: int, rows: int, finish: kernels.Epilogue) -> int | None:
    return kernels.line_kernel(minimal_filter(outputs, TAPS).output[:rows], finish)


@lru_cache(maxsize=64)
def _zeros(nbytes: int) -> Array:
    """Zeros that nothing writes to."""
    found = aligned_empty(nbytes)
    found[...] = 0
    return found
