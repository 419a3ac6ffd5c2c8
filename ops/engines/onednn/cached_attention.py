"""Attention over sessions' caches by kernels of our own: tables of calls, in which a length is a few numbers.

The kernels are those of `attention`. Keys lie in the cache with positions next to each other, so they need not be
transposed. What depends on the length are the panels of scores, the softmax's vectors and the last products' inner
axis: numbers that the tables lead to, which are renewed when a run comes with another length. That is done by
OpenCaches, where the net has one, and computing is native calls alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache, partial
from itertools import product
from typing import NamedTuple

import numpy as np

from dagexec.core.caches import Found, found_caches
from dagexec.core.native import ALL_BITS, NativeStep, Piece, table_piece
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.attention import shown_bits
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.attention import cached
from dagexec.ops.families.attention.cached import CACHE, LENGTH, CachedSizes, Opened, read_cached_attention
from dagexec.ops.families.attention.opening import Layers, layers_of
from dagexec.ops.kernels import attention_kernels as kernels
from dagexec.ops.kernels.attention_kernels import GROUP
from dagexec.ops.kernels.copy_kernels import HEIGHT, SIDE, outline, row_kernel, transposing_kernel
from dagexec.ops.kernels.machine import AVX2
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of_bytes
from dagexec.ops.kernels.tables import shares
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

_FLOAT = 4  # bytes
_LINE = 16  # elements of a cache line
_LEAST_COLUMNS = 64

_POSITIONS = 256
"""In a cache, for which heads are cut into pieces: any number of them is computed by the same calls."""


@operator(cached.CachedAttention.schema, engine="ONEDNN")
class CachedAttention(OneDNNOperator, cached.CachedAttention):
    """CachedAttention by kernels."""

    def prepare_primitive(self) -> Step:
        """The table, behind steps that lay out Q and the mask as kernels read them, where they do not lie so."""
        sizes = read_cached_attention(self.call())
        if not self.onednn.machine.can_run or min(sizes.width, sizes.value_width) < GROUP or not self.y(0).size:
            raise UnsupportedFeatureError(f"{self.label}: there are kernels for heads of {GROUP} elements with AVX2")
        before, after = list[Step](), list[Step]()
        operands, y = [sizes.by_head(self.x(index), index) for index in range(3)], self.y(0).transpose(sizes.y_by_head)
        q, k, v = (one if one.strides[3] == _FLOAT else self._packed(one, before) for one in operands)
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
        layers = layers_of(self.input(LENGTH))
        heads = _CachedHeads(self, sizes, q, k, v, result, mask, bias, layers or Layers())
        computing = NativeStep((heads.adding(), heads.pieces()))
        if layers is not None:
            layers.layers.append(heads)
            return in_sequence([*before, computing, *after])
        numbers, lengths, label = self.x(CACHE), self.x(LENGTH), self.label

        def open_caches() -> None:
            heads.open(found_caches(numbers, lengths, label))

        return in_sequence([*before, open_caches, computing, heads.close, *after])

    def _packed(self, array: Array, before: list[Step]) -> Array:
        packed = np.empty(array.shape, array.dtype)
        before.append(partial(np.copyto, packed, array))
        return packed


@dataclass(frozen=True)
class _Geometry:
    """What the calls of a head follow from, beside its cache; `*_row` are bytes from row to row."""

    queries: int
    width: int
    value_width: int
    lanes: int
    options: tuple[bool, bool, bool, bool]
    scale: float
    softcap: float
    hidden: float
    q_row: int
    k_row: int
    v_row: int
    y_row: int
    bias_row: int
    mask_row: int


class _Cache(NamedTuple):
    """What calls follow from of a cache.

    Attributes:
        length: how many positions there are; 0 without one.
        key_row: bytes from row to row of keys as kernels read them.
        fed_row: the same where keys lie that are transposed for each head; 0 where they need not be.
    """

    length: int
    key_row: int
    fed_row: int


_NO_CACHE = _Cache(0, 0, 0)

_NOTHING, _Q, _K, _V, _Y, _SCORES, _BIAS, _MASK, _FED, _ZERO = range(10)
"""Where arrays of a head begin: the rows of `_CachedHeads._bases`."""

_SECTIONS = (
    ((_ZERO, _Y, _NOTHING), 1), ((_FED, _K, _NOTHING), 4), ((_Q, _K, _SCORES), 4), ((_SCORES, _BIAS, _MASK), 1),
    ((_SCORES, _V, _Y), 6),
)  # fmt: skip
"""The calls of a head: zeros where there is no cache; keys transposed, scores, the softmax, values. Where the three
arrays of each begin, and how many calls there are at most."""

_PLACES = np.array([bases for bases, count in _SECTIONS for _ in range(count)])
_ADDED = 2
"""Calls for each head of keys, before those of heads: of its new keys and values."""


class _CachedHeads:
    """The calls that compute all heads.

    A head is the same calls at every length, by way of `kernels.by_fields`: what depends on the length is in `_Fields`.
    """

    def __init__(
        self,
        owner: CachedAttention,
        sizes: CachedSizes,
        q: Array,
        k: Array,
        v: Array,
        y: Array,
        mask: Array | None,
        bias: Array | None,
        layers: Layers,
    ) -> None:
        """Q, K, V and Y are [batch, heads, queries, elements]."""
        arguments, machine, width = owner.arguments, owner.onednn.machine, sizes.value_width
        self._find_caches, self._label, self._sizes = owner.opening(sizes), owner.label, sizes
        zero = np.zeros(1, np.float32)
        self._kept = q, k, v, y, mask, bias, zero
        heads = sizes.batch * sizes.heads
        self._bases = np.zeros((10, heads), np.uint64)
        self._bases[_Q], self._bases[_Y], self._bases[_ZERO] = _heads_of(q), _heads_of(y), address_of(zero)
        rows = [0, 0]
        for place, (base, array) in enumerate(((_BIAS, bias), (_MASK, mask))):
            if array is not None:
                whole = np.broadcast_to(array, (*q.shape[:3], array.shape[-1]))
                self._bases[base], rows[place] = _heads_of(whole), whole.strides[2]
        softcap = arguments.float("softcap", 0.0)
        geometry = _Geometry(
            sizes.queries, sizes.width, width,
            machine.lanes if width % machine.lanes == 0 or width > 2 * machine.lanes else AVX2,
            (bias is not None, mask is not None, arguments.bool("nan_to_zero"), softcap > 0),
            arguments.float("scale", 1.0), softcap, arguments.float("hidden", -math.inf),
            q.strides[2], k.strides[2], v.strides[2], y.strides[2], *rows,
        )  # fmt: skip
        self._memory: list[tuple[int, int] | None] = []
        self._caches: list[_Cache] = []
        key = geometry, sizes.sessions
        self._fields: _Fields = layers.shared.setdefault(key, _Fields(*key))
        self._added = _table(self._fields.array[:, :_ADDED], sizes.rows * sizes.key_heads)
        self._added[..., 1], self._added[..., 3] = np.stack([_heads_of(k), _heads_of(v)], 1), self._added[..., 4]
        self._table = _table(self._fields.array[:, _ADDED:], sizes.rows * sizes.heads)
        read = heads * _POSITIONS * (sizes.width + width) * _FLOAT
        self._parts = shares(heads, pieces_of_bytes(read, MOST_OF_ONE))
        self._scratch = np.empty((len(self._parts), 0), np.float32)

    def adding(self) -> tuple[Piece, ...]:
        """The new keys and values are put into the caches that `open` has found."""
        return (table_piece(self._added.reshape(-1, 6), self, self._label),)

    def pieces(self) -> tuple[Piece, ...]:
        """Some heads each, after that."""
        tables = [self._table[part.start : part.stop].reshape(-1, 6) for part in self._parts]
        return tuple(table_piece(table, self, self._label) for table in tables)

    def open(self, found: Found) -> None:
        """Have the calls read the cache of each session; rows of none become zeros."""
        if found.memory != self._memory:
            opened = self._find_caches(found.held)
            self._caches = list(map(_sizes_of, opened))
            self._find([_places(*one) for one in zip(opened, self._caches, strict=True)], self._caches)
            self._memory = found.memory
        self._fields.open(found, self._caches, self._label)

    def close(self) -> None:
        """The calls do nothing, so that a session may let go of its cache."""
        self._fields.close()

    def _find(self, places: Sequence[tuple[int, ...]], caches: Sequence[_Cache]) -> None:
        """Have the calls read keys and values where they are, and have memory for the scores of each piece."""
        sizes, bases = self._sizes, self._bases
        needed = max((sizes.queries + sizes.width * (one.fed_row > 0)) * one.key_row for one in caches)
        if self._scratch[0].nbytes < needed:
            self._scratch = np.empty((len(self._parts), needed // _FLOAT), np.float32)
        first, by_row, by_head = np.array(places)[:, :6].reshape(-1, 2, 3, 1, 1).transpose(2, 1, 0, 3, 4)
        starts = first + by_row * np.arange(sizes.rows)[:, None] + by_head * np.arange(sizes.key_heads)
        self._added[..., 2] = starts.reshape(2, -1).T
        keys, bases[_V] = np.repeat(starts, sizes.heads // sizes.key_heads, -1).reshape(2, -1)
        bases[_K] = bases[_FED] = keys
        for part, memory in zip(self._parts, self._scratch, strict=True):
            bases[_SCORES, part.start : part.stop] = address_of(memory)
        is_fed = np.repeat([one.fed_row > 0 for one in caches], sizes.rows * sizes.heads)
        if is_fed.any():
            after_scores = np.repeat([one.key_row * sizes.queries for one in caches], sizes.rows * sizes.heads)
            bases[_K, is_fed] = bases[_SCORES, is_fed] + after_scores[is_fed].astype(np.uint64)
        self._table[..., 1:4] = bases[_PLACES].transpose(2, 0, 1)
        self._table[..., 0, 3] = self._table[..., 0, 4]


class _Fields:
    """The fields of the calls of a head, of each session; layers that are alike have them in common.

    Attributes:
        array: [sessions, calls, numbers].
    """

    def __init__(self, geometry: _Geometry, sessions: int) -> None:
        self._geometry = geometry
        self._calls: list[_Calls] = []
        self.array = np.empty((sessions, _ADDED + len(_PLACES), kernels.FIRST_OFFSET + 3), np.int64)
        self._found: Found | None = None
        self._caches: Sequence[_Cache] = ()
        self.array[:] = _idle()

    def open(self, found: Found, caches: Sequence[_Cache], label: str) -> None:
        """Have them for these caches, of the same sizes in all layers, and for as many positions as there are now."""
        if found is self._found:
            assert caches == self._caches, "keys lie alike in all layers"
            return
        self._found, self._caches = found, caches
        added = self._geometry.queries
        self._calls = []
        for fields, held, own in zip(self.array, found.held, caches, strict=True):
            length = 0
            if held is not None:
                held.check_room(added, label)
                length = held.length + added
            calls = _calls_of(self._geometry, own._replace(length=length))
            fields[:] = calls.fields
            self._calls.append(calls)

    def close(self) -> None:
        """They are of calls of nothing."""
        if self._found is not None:
            self._found = None
            self.array[:] = _idle()


def _table(fields: Array, heads: int) -> Array:
    """Of so many heads of each session, the calls with these fields, [sessions, calls, numbers]."""
    sessions, calls, _ = fields.shape
    table = np.zeros((sessions * heads, calls, 6), np.uint64)
    places = np.arange(sessions)[:, None, None] * fields.strides[0] + np.arange(calls) * fields.strides[1]
    table[..., 0], table[..., 5] = kernels.by_fields() or 0, ALL_BITS
    table[..., 4] = np.repeat(address_of(fields) + places, heads, 1).reshape(-1, calls)
    return table


def _sizes_of(opened: Opened | None) -> _Cache:
    if opened is None:
        return _NO_CACHE
    keys, _, length = opened
    if keys.strides[3] == _FLOAT:
        return _Cache(length, keys.strides[2], 0)
    columns = max(_LEAST_COLUMNS, 1 << (length - 1).bit_length()) + _LINE  # elements are next to each other
    return _Cache(length, columns * _FLOAT, keys.strides[3])


def _places(opened: Opened | None, cache: _Cache) -> tuple[int, ...]:
    """Where keys and values begin, and how far it is from row to row and from head to head; memory for keys."""
    if opened is None:
        return (0,) * 7
    keys, values, _ = opened
    transposed = cache.key_row if cache.fed_row else 0
    return address_of(keys), *keys.strides[:2], address_of(values), *values.strides[:2], transposed


def _heads_of(array: Array) -> Array:
    """Where each head begins of an array [batch, heads, ...]."""
    images, heads = (np.arange(count) * stride for count, stride in zip(array.shape[:2], array.strides, strict=False))
    starts: Array = address_of(array) + images[:, None] + heads
    return starts.reshape(-1).astype(np.uint64)


_Call = tuple[int, ...]
"""The fields of a call: 11 of its kernel's, and those that `kernels.by_fields` reads."""


@dataclass(frozen=True)
class _Calls:
    """The calls of a head, or of one of each session.

    Attributes:
        fields: of each.
        keeps: what these lead to.
    """

    fields: Array
    keeps: object


@lru_cache(maxsize=4096)
def _calls_of(geometry: _Geometry, cache: _Cache) -> _Calls:
    """The calls that a head of this geometry is, with this cache."""
    g, (length, key_row, fed_row) = geometry, cache
    if not length:
        zeros = _rows(g.lanes, g.value_width, g.queries, 0, g.y_row, 0, is_zero=True)
        return _Calls(np.array([_idle()] * _ADDED + [zeros] + [_idle()] * (len(_PLACES) - 1)), None)
    numbers = _tail_numbers((length - 1) % GROUP + 1, g.scale, g.hidden, g.softcap)
    sections: tuple[list[_Call], ...] = (
        [],
        _transposed(g, cache) if fed_row else [],
        _multiplied(g, g.q_row, key_row, key_row, g.width, -(-length // g.lanes) * g.lanes),
        [_weighted(g, cache, address_of(numbers))],
        _multiplied(g, key_row, g.value_width * _FLOAT, g.y_row, length, g.value_width),
    )
    calls, idle = _added(g, cache), _idle()
    for own, (_, most) in zip(sections, _SECTIONS, strict=True):
        calls += own + [idle] * (most - len(own))
    return _Calls(np.array(calls), numbers)


_tail_numbers = lru_cache(kernels.tail_numbers)


@cache
def _idle() -> _Call:
    """A call of nothing."""
    return (0,) * kernels.KERNEL + (kernels.nothing() or 0, 0, 0, 0)


def _added(g: _Geometry, cache: _Cache) -> list[_Call]:
    """New keys and values of a head, behind those that there are."""
    (length, key_row, fed_row), value_row = cache, g.value_width * _FLOAT
    start = length - g.queries
    values = _rows(g.lanes, g.value_width, g.queries, g.v_row, value_row, start * value_row)
    if fed_row:
        return [_rows(g.lanes, g.width, g.queries, g.k_row, fed_row, start * fed_row), values]
    rows, columns = outline(g.queries, HEIGHT), outline(g.width, SIDE)
    kernel = transposing_kernel(rows, columns, is_down_first=g.queries < g.width, is_packed=False) or 0
    strides = g.k_row, key_row, g.queries // HEIGHT, g.width // SIDE
    return [(*strides, 1, *(0,) * 6, kernel, 0, start * _FLOAT, 0), values]


def _rows(
    lanes: int, elements: int, rows: int, source_row: int, target_row: int, behind: int, *, is_zero: bool = False
) -> _Call:
    """Rows that are copied so many bytes behind where the target begins. Kernels of copies have fields third."""
    kernel = row_kernel(lanes, is_zero) or 0
    return (elements, rows, source_row, target_row, *(0,) * 7, kernel, 0, behind, 0)


def _transposed(g: _Geometry, cache: _Cache) -> list[_Call]:
    length, key_row, fed_row = cache
    kernel = kernels.transpose_kernel() or 0
    parts = [(0, length // GROUP), *([(length - GROUP, 1)] if length % GROUP else [])]
    tiles = [(0, g.width // GROUP), *([(g.width - GROUP, 1)] if g.width % GROUP else [])]
    return [
        (
            bands, count, fed_row, GROUP * fed_row, key_row, *(0,) * 6,
            kernel, start * fed_row + first * _FLOAT, first * key_row + start * _FLOAT, 0,
        )
        for (start, bands), (first, count) in product(parts, tiles)
        if bands and count
    ]  # fmt: skip


def _multiplied(g: _Geometry, x_row: int, w_row: int, y_row: int, inner: int, columns: int) -> list[_Call]:
    most = kernels.most_rows(g.lanes)
    whole, rest = divmod(g.queries, most)
    calls = list[_Call]()
    for start, rows, blocks in ((0, most, whole), (whole * most, rest, 1)):
        if not rows * blocks:
            continue
        for first, vectors, panels in _panels(columns, kernels.most_vectors(rows, g.lanes), g.lanes):
            kernel = kernels.product_kernel(rows, vectors, g.lanes, inner >= 4, inner % 4) or 0
            panel = vectors * g.lanes * _FLOAT
            calls.append((
                panels, blocks, x_row, 3 * x_row, 5 * x_row, rows * x_row, w_row, panel, y_row, panel,
                inner // 4 * 4 * _FLOAT, kernel, start * x_row, first * _FLOAT, start * y_row + first * _FLOAT,
            ))  # fmt: skip
    return calls


def _weighted(g: _Geometry, cache: _Cache, numbers: int) -> _Call:
    vectors, tail = divmod(cache.length, GROUP)
    kernel = kernels.softmax_kernel(vectors >= 4, vectors % 4, tail > 0, *g.options) or 0
    main = vectors // 4 * 4 * GROUP * _FLOAT
    return (g.queries, cache.key_row, main, g.bias_row, g.mask_row, numbers, *(0,) * 5, kernel, 0, 0, 0)


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
