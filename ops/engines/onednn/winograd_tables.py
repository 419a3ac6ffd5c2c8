"""Tables of kernel calls for Winograd's algorithm (`winograd`), and the lines that each call goes along.

A convolution has thousands of calls, in a pattern that rows of tiles repeat: all of a block are computed at once. Of a
row, one call reads the image or writes the result. The others are between working memory that all blocks use, so a row
has them in common with those at the same place in other blocks: in a table of their own, which is one call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain

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
from dagexec.ops.kernels.tables import c_function
from dagexec.platform.addresses import address_of

Integers = npt.NDArray[np.int64]

_FLOAT = 4  # bytes
_CALL = 5  # a function and four arguments
_ROW_BYTES = 48  # of a native call


class Tables:
    """Writes tables of calls, [calls, 5], for rows of tiles; the lines that they point at live as long as this."""

    def __init__(
        self, tiling: Tiling, arrays: Mapping[int, Array], v: Array, z: Array, strips: Sequence[Array]
    ) -> None:
        layer = tiling.layer
        self._tiling = tiling
        self._strips = [address_of(strip) for strip in strips]
        self._x, self._y, self._v, self._z = (address_of(array) for array in (arrays[SRC], arrays[DST], v, z))
        self._bias = address_of(arrays[BIAS_ARGUMENT]) if layer.finish.bias else 0
        self._other = address_of(arrays[layer.other]) - self._y if layer.other else 0
        self._zeros = _zeros(layer.width * layer.channels * _FLOAT)
        self._lines: list[Integers] = []
        self._calls = 0
        self._common: dict[tuple[str, range, int], npt.NDArray[np.uint64]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of all lines, of the calls of all rows, and of the tables that rows have in common."""
        arrays = chain(self._lines, self._common.values())
        return self._calls * _ROW_BYTES + sum(array.nbytes for array in arrays)

    def read(self, rows: range, first: int, strip: int) -> Integers:
        """The calls from the image to v, where row `first` is at the beginning."""
        layer, tile, pixel = self._tiling.layer, self._tiling.filter.tile, self._tiling.layer.channels * _FLOAT
        across, head = self._across(), layer.heads[1] * pixel
        inside = min(layer.width * pixel, across - head)
        strip_lines = self._strips[strip] + across * np.arange(tile)
        calls = self._new_lines(len(rows), 1)
        calls[:, 0, kernels.READ : kernels.READ + tile] = self._image_lines(rows)
        calls[:, 0, kernels.WRITTEN : kernels.WRITTEN + tile] = strip_lines + head
        calls[:, 0, kernels.INNER : kernels.READ_STEP] = inside, 1
        outside = ((0, head), (head + inside, across - head - inside))
        zeroed = [
            (c_function("memset"), line + begin, 0, size, 0) for line in strip_lines for begin, size in outside if size
        ]
        table = self._table(calls, _require(_line_kernel(self._tiling.outputs, "data")))
        places = range(rows.start - first, rows.stop - first)
        self._calls += 2 * len(rows)
        table = np.stack((table, self._calls_of("v", places, strip)), axis=1).reshape(-1, _CALL)
        return np.concatenate((np.array(zeroed, np.int64).reshape(-1, _CALL), table)) if rows else table

    def write(self, rows: range, first: int, strip: int) -> Integers:
        """The calls from z, which begins with row `first`, to the result."""
        tiling, layer, start = self._tiling, self._tiling.layer, self._strips[strip]
        pixel, tile = layer.filters * _FLOAT, tiling.filter.tile
        results = kernels.WRITTEN + tiling.outputs
        calls = self._new_lines(len(rows), 1)
        height, width = layer.result
        image, number = np.divmod(np.array(rows, np.int64), tiling.image_rows)
        top = number * tiling.outputs
        written = (
            self._y + ((image * height + top) * width * pixel)[:, None] + width * pixel * np.arange(tiling.outputs)
        )
        lines = start + tiling.columns * tiling.outputs * pixel * np.arange(tile)
        calls[:, 0, kernels.READ : kernels.READ + tile] = lines
        calls[:, 0, kernels.WRITTEN : results] = written
        calls[:, 0, kernels.INNER : kernels.BIAS_LINE] = (pixel, width, pixel, pixel)
        table = self._table(calls, 0)
        table[:, 0] = self._last_kernels(np.minimum(tiling.outputs, height - top))
        places = range(rows.start - first, rows.stop - first)
        steps = [self._calls_of("z", places, strip), table]
        if layer.later:
            steps.append(self._later(written[:, 0], np.minimum(tiling.outputs, height - top) * width * layer.filters))
        self._calls += len(steps) * len(rows)
        return np.stack(steps, axis=1).reshape(-1, _CALL)

    def _later(self, written: Integers, elements: Integers) -> Integers:
        """The calls that do the last post-ops to so many elements of the result from these addresses on."""
        kernel = _require(post_op_kernel(self._tiling.layer.later, self._tiling.layer.lanes))
        zeros = np.zeros_like(written)
        return np.stack((zeros + kernel, written, elements, zeros, zeros), axis=1)

    def _calls_of(self, what: str, places: range, strip: int) -> Integers:
        """For each of these rows of a block, the call of the table that it has in common with other blocks."""
        key = what, places, strip
        if key not in self._common:
            self._common[key] = native_rows(self._to_v(places, strip) if what == "v" else self._from_z(places, strip))
        tile = self._tiling.filter.tile
        table = np.zeros((len(places), _CALL), np.int64)
        table[:, 0] = _require(table_code())
        table[:, 1] = address_of(self._common[key]) + np.arange(len(places)) * tile * self._common[key].strides[0]
        table[:, 2] = tile
        return table

    def _to_v(self, places: range, strip: int) -> Integers:
        """The calls from a strip to these rows of v."""
        tiling = self._tiling
        pixel, tile = tiling.layer.channels * _FLOAT, tiling.filter.tile
        strip_lines = self._strips[strip] + self._across() * np.arange(tile)
        calls = self._new_lines(len(places), tile)
        calls[..., kernels.READ : kernels.READ + tile] = strip_lines[:, None] + pixel * np.arange(tile)
        calls[..., kernels.WRITTEN : kernels.WRITTEN + tile] = self._tiles(self._v, places, pixel)
        steps = tiling.outputs * pixel, tiling.places_apart * pixel
        calls[..., kernels.INNER : kernels.BIAS_LINE] = (pixel, tiling.columns, *steps)
        return self._table(calls, _require(_line_kernel(tiling.outputs, "data")))

    def _from_z(self, places: range, strip: int) -> Integers:
        """The calls from these rows of z to a strip."""
        tiling = self._tiling
        pixel, tile = tiling.layer.filters * _FLOAT, tiling.filter.tile
        lines = self._strips[strip] + tiling.columns * tiling.outputs * pixel * np.arange(tile)
        calls = self._new_lines(len(places), tile)
        calls[..., kernels.READ : kernels.READ + tile] = self._tiles(self._z, places, pixel)
        written = lines[:, None] + pixel * np.arange(tiling.outputs)
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

    def _tiles(self, start: int, rows: range, pixel: int) -> Integers:
        """Where the places of the first tile of each row of a block lie in v or z, [rows, t, t]."""
        tiling, tile, apart = self._tiling, self._tiling.filter.tile, self._tiling.places_apart
        row = start + np.array(rows, np.int64) * tiling.columns * apart * pixel
        product, place = np.divmod(np.arange(tile * tile), apart)
        of_product = tiling.block_rows * tiling.columns * apart * pixel
        found: Integers = row[:, None, None] + (product * of_product + place * pixel).reshape(tile, tile)
        return found

    def _image_lines(self, rows: range) -> Integers:
        """The rows of the image that each row of tiles reads, [rows, t]; zeros outside."""
        tiling, layer = self._tiling, self._tiling.layer
        image, number = np.divmod(np.array(rows, np.int64), tiling.image_rows)
        at = (number * tiling.outputs - layer.heads[0])[:, None] + np.arange(tiling.filter.tile)
        across = layer.width * layer.channels * _FLOAT
        lines = self._x + (image[:, None] * layer.height + at) * across
        return np.where((at >= 0) & (at < layer.height), lines, address_of(self._zeros))

    def _new_lines(self, rows: int, calls: int) -> Integers:
        """The lines of so many calls for each of the rows, [rows, calls, fields]; bias and other are there."""
        lines = np.zeros((rows, calls, kernels.FIELDS), np.int64)
        lines[..., kernels.BIAS_LINE] = self._bias
        lines[..., kernels.OTHER] = self._other
        self._lines.append(lines)
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
