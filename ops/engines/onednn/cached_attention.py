"""Attention over a session's cache by kernels of our own: one table of calls, in which a length is a few numbers.

The kernels are those of `attention`. Keys lie in the cache with positions next to each other, so they need not be
transposed. What depends on the length are the panels of scores, the softmax's vectors and the last products' inner
axis: fields and functions of the table, which are renewed when a run comes with another length.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from dagexec.core.native import ALL_BITS, call_rows
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.attention import shown_bits
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.attention import cached
from dagexec.ops.families.attention.cached import CachedSizes, read_cached_attention
from dagexec.ops.kernels import attention_kernels as kernels
from dagexec.ops.kernels.attention_kernels import GROUP
from dagexec.ops.kernels.machine import AVX2
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

_FLOAT = 4  # bytes
_LINE = 16  # elements of a cache line
_LEAST_COLUMNS = 64


@operator(cached.CachedAttention.schema, engine="ONEDNN")
class CachedAttention(OneDNNOperator, cached.CachedAttention):
    """CachedAttention by kernels."""

    def prepare_primitive(self) -> Step:
        """The table, behind steps that lay out Q and the mask as kernels read them, where they do not lie so."""
        sizes = read_cached_attention(self.call())
        if not self.onednn.machine.can_run or min(sizes.width, sizes.value_width) < GROUP or not self.y(0).size:
            raise UnsupportedFeatureError(f"{self.label}: there are kernels for heads of {GROUP} elements with AVX2")
        before, after = list[Step](), list[Step]()
        q, y = sizes.by_head(self.x(0), 0), self.y(0).transpose(sizes.y_by_head)
        if q.strides[3] != _FLOAT:
            q = self._packed(q, before)
        result = y
        if y.strides[3] != _FLOAT:
            result = np.empty(y.shape, np.float32)
            after.append(partial(np.copyto, y, result))
        mask = bias = None
        if sizes.mask is not None:
            given = self.x(sizes.mask)
            mask = np.empty(given.shape, np.int32)
            before.append(partial(shown_bits, given, self.arguments.bool("shown", True), mask))
        if sizes.bias is not None:
            bias = self.x(sizes.bias)
        if any(one is not None and one.shape[-1] == 1 for one in (mask, bias)):
            raise UnsupportedFeatureError(f"{self.label}: a mask has a column for each position")
        heads = _CachedHeads(self, sizes, q, result, mask, bias)
        return in_sequence([*before, heads, *after])

    def _packed(self, array: Array, before: list[Step]) -> Array:
        packed = np.empty(array.shape, array.dtype)
        before.append(partial(np.copyto, packed, array))
        return packed


@dataclass(frozen=True)
class _Geometry:
    """What the calls of a head follow from, beside the length; `*_row` are bytes from row to row."""

    queries: int
    width: int
    value_width: int
    lanes: int
    options: tuple[bool, bool, bool]
    scale: float
    hidden: float
    q_row: int
    y_row: int
    key_row: int
    score_row: int
    fed_row: int
    bias_row: int
    mask_row: int


@dataclass(frozen=True)
class _Calls:
    """The calls of a head for one length.

    Attributes:
        functions: of each.
        bases, offsets: where its three arrays begin: which of _BASES, and bytes.
        fields: the numbers that its last argument leads to.
        keeps: what these lead to.
    """

    functions: Array
    bases: Array
    offsets: Array
    fields: Array
    keeps: Array


_NOTHING, _Q, _K, _V, _Y, _SCORES, _BIAS, _MASK, _FED = range(9)
"""Where arrays of a head begin: the rows of `_CachedHeads._bases`."""

_FIELDS = 11


class _CachedHeads:
    """The step that computes all heads."""

    def __init__(
        self, owner: CachedAttention, sizes: CachedSizes, q: Array, y: Array, mask: Array | None, bias: Array | None
    ) -> None:
        self._append = owner.appending(sizes)
        self._sizes, self._kept = sizes, (q, y, mask, bias)
        arguments, machine = owner.arguments, owner.onednn.machine
        width, shape = sizes.value_width, (sizes.batch, sizes.heads, sizes.queries)
        self._bases = np.zeros((9, sizes.batch * sizes.heads), np.uint64)
        self._bases[_Q], self._bases[_Y] = _heads_of(q), _heads_of(y)
        rows = [0, 0]
        for place, (base, array) in enumerate(((_BIAS, bias), (_MASK, mask))):
            if array is not None:
                whole = np.broadcast_to(array, (*shape, array.shape[-1]))
                self._bases[base], rows[place] = _heads_of(whole), whole.strides[2]
        self._geometry = _Geometry(
            sizes.queries, sizes.width, width,
            machine.lanes if width % machine.lanes == 0 or width > 2 * machine.lanes else AVX2,
            (bias is not None, mask is not None, arguments.bool("nan_to_zero")),
            arguments.float("scale", 1.0), arguments.float("hidden", -math.inf),
            q.strides[2], y.strides[2], 0, 0, 0, *rows,
        )  # fmt: skip
        self._keys: Array | None = None
        self._length = 0
        self._table = np.zeros((0, 6), np.uint64)
        self._calls: _Calls | None = None

    def __call__(self) -> None:
        caches, keys, values, length = self._append()
        if caches.fed is not None:
            self._renew_fed(keys, values, length)
        elif keys is not self._keys or length != self._length:
            self._renew(keys, values, length)
        call_rows(self._table)

    def _renew(self, keys: Array, values: Array, length: int) -> None:
        """Make the table for caches and a length."""
        bases, sizes = self._bases, self._sizes
        if keys is not self._keys:
            row = keys.strides[2]
            self._scores = np.empty(sizes.queries * row // _FLOAT, np.float32)
            bases[_SCORES] = address_of(self._scores)
            for base, array in ((_K, keys), (_V, values)):
                bases[base] = np.repeat(_heads_of(array), sizes.heads // sizes.key_heads)
            self._geometry = replace(self._geometry, key_row=row, score_row=row, fed_row=0)
            self._keys = keys
        self._make_table(length)

    def _renew_fed(self, keys: Array, values: Array, length: int) -> None:
        """Make the table for keys with elements next to each other, which are transposed for each head."""
        bases, sizes = self._bases, self._sizes
        columns = max(_LEAST_COLUMNS, 1 << (length - 1).bit_length()) + _LINE
        if self._geometry.key_row != columns * _FLOAT or self._keys is not None:
            self._scores = np.empty((sizes.queries + sizes.width) * columns, np.float32)
            bases[_SCORES] = address_of(self._scores)
            bases[_K] = address_of(self._scores) + sizes.queries * columns * _FLOAT
            self._keys = None
        row = columns * _FLOAT
        self._geometry = replace(self._geometry, key_row=row, score_row=row, fed_row=keys.strides[3])
        for base, array in ((_FED, keys), (_V, values)):
            bases[base] = np.repeat(_heads_of(array), sizes.heads // sizes.key_heads)
        self._make_table(length)

    def _make_table(self, length: int) -> None:
        bases = self._bases
        calls = self._calls = _calls_of(self._geometry, length)
        table = np.empty((bases.shape[1], len(calls.functions), 6), np.uint64)
        table[..., 0] = calls.functions
        table[..., 1:4] = bases[calls.bases].transpose(2, 0, 1) + calls.offsets
        table[..., 4] = (
            np.uint64(address_of(calls.fields)) + np.arange(len(calls.functions), dtype=np.uint64) * _FIELD_BYTES
        )
        table[..., 5] = ALL_BITS
        self._table, self._length = table.reshape(-1, 6), length


_FIELD_BYTES = np.uint64(8 * _FIELDS)


def _heads_of(array: Array) -> Array:
    """Where each head begins of an array [batch, heads, ...]."""
    images, heads = (np.arange(count) * stride for count, stride in zip(array.shape[:2], array.strides, strict=False))
    starts: Array = address_of(array) + images[:, None] + heads
    return starts.reshape(-1).astype(np.uint64)


@lru_cache(maxsize=4096)
def _calls_of(geometry: _Geometry, length: int) -> _Calls:
    """The calls that a head of this geometry is, with so many positions in the cache."""
    g, lanes = geometry, geometry.lanes
    most = kernels.most_rows(lanes)
    whole, rest = divmod(g.queries, most)
    groups = [
        (start, rows, blocks) for start, rows, blocks in ((0, most, whole), (whole * most, rest, 1)) if rows * blocks
    ]
    numbers = kernels.tail_numbers(length, g.scale, g.hidden)
    made: list[tuple[int, tuple[int, int, int], tuple[int, int, int], tuple[int, ...]]] = []

    def multiply(bases: tuple[int, int, int], x_row: int, w_row: int, y_row: int, inner: int, columns: int) -> None:
        for start, rows, blocks in groups:
            for first, vectors, panels in _panels(columns, kernels.most_vectors(rows, lanes), lanes):
                kernel = kernels.product_kernel(rows, vectors, lanes, inner >= 4, inner % 4) or 0
                panel = vectors * lanes * _FLOAT
                fields = (
                    panels, blocks, x_row, 3 * x_row, 5 * x_row, rows * x_row, w_row, panel, y_row, panel,
                    inner // 4 * 4 * _FLOAT,
                )  # fmt: skip
                offsets = start * x_row, first * _FLOAT, start * y_row + first * _FLOAT
                made.append((kernel, bases, offsets, fields))

    if g.fed_row:
        transpose = kernels.transpose_kernel() or 0
        parts = [(0, length // GROUP), *([(length - GROUP, 1)] if length % GROUP else [])]
        tiles = [(0, g.width // GROUP), *([(g.width - GROUP, 1)] if g.width % GROUP else [])]
        for (start, bands), (first, count) in product(parts, tiles):
            if not bands or not count:
                continue
            offsets = start * g.fed_row + first * _FLOAT, first * g.key_row + start * _FLOAT, 0
            fields = (bands, count, g.fed_row, GROUP * g.fed_row, g.key_row, 0, 0, 0, 0, 0, 0)
            made.append((transpose, (_FED, _K, _NOTHING), offsets, fields))
    multiply((_Q, _K, _SCORES), g.q_row, g.key_row, g.score_row, g.width, -(-length // lanes) * lanes)
    vectors, tail = divmod(length, GROUP)
    kernel = kernels.softmax_kernel(vectors >= 4, vectors % 4, tail > 0, *g.options) or 0
    main = vectors // 4 * 4 * GROUP * _FLOAT
    fields = (g.queries, g.score_row, main, g.bias_row, g.mask_row, address_of(numbers), 0, 0, 0, 0, 0)
    made.append((kernel, (_SCORES, _BIAS, _MASK), (0, 0, 0), fields))
    multiply((_SCORES, _V, _Y), g.score_row, g.value_width * _FLOAT, g.y_row, length, g.value_width)
    functions, bases, offsets, all_fields = zip(*made, strict=True)
    return _Calls(
        np.array(functions, np.uint64), np.array(bases), np.array(offsets, np.uint64), np.array(all_fields, np.int64),
        numbers,
    )  # fmt: skip


def _panels(columns: int, most: int, lanes: int) -> Iterator[tuple[int, int, int]]:
    """Where panels of columns begin, of how many vectors each is, and how many of them follow one another.

    Columns that fill no vector are the last ones together, some of them twice.
    """
    whole, rest = divmod(columns // lanes, most)
    if whole:
        yield 0, most, whole
    if rest:
        yield whole * most * lanes, rest, 1
    if columns % lanes:
        yield columns - lanes, 1, 1
