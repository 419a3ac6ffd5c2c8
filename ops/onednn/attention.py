"""Attention by kernels of our own, some rows of queries at a time, so that their scores stay in the second cache.

A thread takes some rows of some heads. It transposes the keys of a head once, and then computes the scores of some rows
of queries, their softmax and the weighted sum of the values, which are read where they lie. 12 heads of 128 queries and
keys of 64 elements take 530 us on one core of an AMD EPYC (Zen 4), 95 GFLOP/s, with AVX2 570; by oneDNN's products and
softmax, with heads moved in between, 970.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise, product

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.attention import fused
from dagexec.ops.attention.fused import FusedSizes, read_fused_attention
from dagexec.ops.kernels import attention_kernels as kernels
from dagexec.ops.kernels.attention_kernels import GROUP
from dagexec.ops.kernels.machine import AVX2
from dagexec.ops.kernels.team import team_step
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import Array

_SCORES = 1 << 17
"""Bytes of scores that are computed before their softmax."""

_FLOAT = 4  # bytes
_LINE = 16  # elements of a cache line
_SAME_PLACE = 256  # elements: rows a multiple of this apart contend for few places of the first cache

_Call = tuple[int, int, int, int, int]


@operator(fused.FusedAttention.schema, engine="ONEDNN")
class FusedAttention(OneDNNOperator, fused.FusedAttention):
    """Attention in float32, whose elements are neighbors and whole vectors."""

    moved_inputs = 3  # a mask may be laid out anew before the calls

    def prepare_primitive(self) -> Step:
        """Calls of kernels; before them mask and bias are laid out as those read them."""
        sizes = read_fused_attention(self.call())
        self._require_kernels(sizes)
        self.answer(lambda: True)
        heads = _Heads(self, sizes)
        tables = heads.tables(self.threads)
        if any(call[0] == 0 for table in tables for call in table):
            raise UnsupportedFeatureError(f"{self.label}: no machine code runs here")
        computing = team_step(self.onednn.machine.team, self.threads, tables, heads, self.label)
        return in_sequence([*heads.before, computing])

    def _require_kernels(self, sizes: FusedSizes) -> None:
        """Raises UnsupportedFeatureError for what they do not compute."""
        arrays = [self.x(index) for index in range(3)]
        elements = [array.strides[axes[3]] for array, axes in zip(arrays, sizes.axes, strict=True)]
        if not self.onednn.machine.can_run or any(array.dtype != np.float32 for array in (*arrays, self.y(0))):
            raise UnsupportedFeatureError(f"{self.label}: there are kernels for float32 with AVX2")
        if sizes.width % GROUP or sizes.value_width % GROUP or sizes.keys < GROUP or 0 in sizes.scores:
            raise UnsupportedFeatureError(f"{self.label}: heads of {sizes.width} elements, {sizes.keys} keys")
        if elements != [_FLOAT] * 3 or self.y(0).strides[sizes.y_axes.index(3)] != _FLOAT:
            raise UnsupportedFeatureError(f"{self.label}: the elements of a head are no neighbors")
        if any(stride % _FLOAT for array in arrays for stride in array.strides):
            raise UnsupportedFeatureError(f"{self.label}: numbers at odd addresses")


class _Heads:
    """The calls of kernels for all heads; it holds what they read. `before` are steps that come first."""

    def __init__(self, owner: FusedAttention, sizes: FusedSizes) -> None:
        self._sizes = sizes
        self._owner = owner
        self.before: list[Step] = []
        self._kept: list[Array] = []
        self._known: dict[tuple[int, ...], int] = {}
        self._q, self._k, self._v = (sizes.by_head(owner.x(index), index) for index in range(3))
        self._y = owner.y(0).transpose(sizes.y_by_head)
        machine = owner.onednn.machine
        self._lanes = machine.lanes if sizes.value_width % machine.lanes == 0 else AVX2
        self._columns = -(-sizes.keys // self._lanes) * self._lanes
        self._row = self._columns + (_LINE if self._columns % _SAME_PLACE == 0 else 0)
        most = kernels.most_rows(self._lanes)
        blocks = max(1, _SCORES // (_FLOAT * self._row * most))
        self._rows = min(blocks * most, -(-sizes.queries // most) * most)
        arguments = owner.arguments
        self._nan_to_zero = arguments.bool("nan_to_zero")
        self._bias = self._laid_out(sizes.bias, np.float32)
        self._mask = self._laid_out(sizes.mask, np.int32, arguments.bool("shown", True))
        scale, hidden = arguments.float("scale", 1.0), arguments.float("hidden", -math.inf)
        self._numbers = self._keep(kernels.tail_numbers(sizes.keys, scale, hidden))

    def _keep(self, array: Array) -> int:
        """The address of an array that is kept."""
        self._kept.append(array)
        return int(array.ctypes.data)

    def _fields(self, *numbers: int) -> int:
        """The address of fields with these numbers, the same for all calls that have them."""
        if numbers not in self._known:
            self._known[numbers] = self._keep(np.array(numbers, np.int64))
        return self._known[numbers]

    def _laid_out(self, index: int | None, dtype: type, shown: bool | None = None) -> Array | None:
        """An input that broadcasts to the scores, with the keys next to each other; what is `shown` as all bits."""
        if index is None:
            return None
        array = self._owner.x(index)
        if dtype is not np.float32 or array.dtype != np.float32 or array.ndim == 0 or array.shape[-1] == 1:
            shape = (*array.shape[:-1], self._sizes.keys)
            laid = self._owner.working_memory(math.prod(shape) * _FLOAT).view(dtype).reshape(shape)
            show = partial(np.copyto, laid, array, casting="unsafe")
            self.before.append(show if shown is None else partial(_show, array, shown, laid))
            array = laid
        return np.broadcast_to(array, self._sizes.scores)

    def tables(self, threads: int) -> list[list[_Call]]:
        """The calls of each thread."""
        sizes = self._sizes
        starts = range(0, sizes.queries, self._rows)
        units = list(product(range(sizes.batch), range(sizes.heads), starts))
        ends = [len(units) * number // threads for number in range(threads + 1)]
        return [list(self._calls(units[start:stop])) for start, stop in pairwise(ends)]

    def _calls(self, units: Sequence[tuple[int, int, int]]) -> Iterator[_Call]:
        """Those for some rows of some heads, with memory of their own."""
        sizes, group = self._sizes, self._sizes.heads // self._sizes.key_heads
        packed = self._owner.working_memory(sizes.width * self._row * _FLOAT)
        scores = self._owner.working_memory(self._rows * self._row * _FLOAT)
        self._kept += packed, scores
        known: tuple[int, int] | None = None
        for image, head, start in units:
            key = image, head // group
            if known != key:
                yield from self._transposed(self._k[key], packed)
                known = key
            rows = slice(start, min(start + self._rows, sizes.queries))
            part = scores.view(np.float32).reshape(-1, self._row)[: rows.stop - rows.start]
            queries, targets = self._q[image, head, rows], self._y[image, head, rows]
            columns = packed.view(np.float32).reshape(-1, self._row)
            yield from self._products(queries, columns, part, self._columns)
            yield self._softmax(part, image, head, rows)
            yield from self._products(part[:, : sizes.keys], self._v[key], targets, sizes.value_width)

    def _transposed(self, keys: Array, packed: Array) -> Iterator[_Call]:
        """Keys [positions, elements] as columns; the last ones together, some of them twice."""
        kernel, row = kernels.transpose_kernel() or 0, keys.strides[0]
        whole = len(keys) // GROUP
        parts = [(0, whole), *([(len(keys) - GROUP, 1)] if len(keys) % GROUP else [])]
        for start, groups in parts:
            fields = self._fields(groups, keys.shape[1] // GROUP, row, GROUP * row, self._row * _FLOAT)
            yield kernel, keys.ctypes.data + start * row, packed.ctypes.data + start * _FLOAT, 0, fields

    def _products(self, x: Array, w: Array, y: Array, columns: int) -> Iterator[_Call]:
        """Y = X W in blocks of rows, those that are left as one, and panels of columns, likewise."""
        most = kernels.most_rows(self._lanes)
        whole = len(x) // most
        for start, count, blocks in ((0, most, whole), (whole * most, len(x) % most, 1)):
            if count and blocks:
                yield from self._panels(x[start:], w, y[start:], columns, count, blocks)

    def _panels(self, x: Array, w: Array, y: Array, columns: int, rows: int, blocks: int) -> Iterator[_Call]:
        most, inner = kernels.most_vectors(rows, self._lanes), x.shape[1]
        vectors = columns // self._lanes
        for start, count, panels in ((0, most, vectors // most), (vectors // most * most, vectors % most, 1)):
            if not count or not panels:
                continue
            kernel = kernels.product_kernel(rows, count, self._lanes, inner >= 4, inner % 4) or 0
            width = count * self._lanes * _FLOAT
            row = x.strides[0]
            source = (row, 3 * row, 5 * row, rows * row)
            fields = self._fields(
                panels, blocks, *source, w.strides[0], width, y.strides[0], width, inner // 4 * 4 * _FLOAT
            )
            offset = start * self._lanes * _FLOAT
            yield kernel, x.ctypes.data, w.ctypes.data + offset, y.ctypes.data + offset, fields

    def _softmax(self, scores: Array, image: int, head: int, rows: slice) -> _Call:
        keys = self._sizes.keys
        vectors, tail = divmod(keys, GROUP)
        options = self._bias is not None, self._mask is not None, self._nan_to_zero
        kernel = kernels.softmax_kernel(vectors >= 4, vectors % 4, tail > 0, *options) or 0
        (bias, bias_row), (mask, mask_row) = (
            (0, 0) if array is None else (array[image, head, rows].ctypes.data, array.strides[2])
            for array in (self._bias, self._mask)
        )
        whole = vectors // 4 * 4 * GROUP * _FLOAT
        fields = self._fields(len(scores), scores.strides[0], whole, bias_row, mask_row, self._numbers)
        return kernel, scores.ctypes.data, bias, mask, fields


def _show(mask: Array, shown: bool, target: Array) -> None:
    """Set all bits of `target` where the mask is `shown`, none elsewhere."""
    np.not_equal(mask, not shown, out=target, casting="unsafe")
    np.negative(target, out=target)
