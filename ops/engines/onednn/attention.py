"""Attention by kernels of our own, some rows of queries at a time, so that their scores stay in the second cache.

A piece is some rows of some heads. It transposes the keys of a head once, and then computes the scores of some rows
of queries, their softmax and the weighted sum of the values, which are read where they lie. 12 heads of 128 queries and
keys of 64 elements take 530 us on one core of an AMD EPYC (Zen 4), 95 GFLOP/s, with AVX2 570; by oneDNN's products and
softmax, with heads moved in between, 970.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.core.native import native_rows
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.problem import in_one
from dagexec.ops.families.attention import attention, fused
from dagexec.ops.families.attention.attention import AttentionSizes, read_attention
from dagexec.ops.families.attention.fused import FusedSizes, read_fused_attention
from dagexec.ops.kernels import attention_kernels as kernels
from dagexec.ops.kernels.attention_kernels import GROUP
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.machine import AVX2
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of_products
from dagexec.ops.kernels.tables import even_shares, step_of_rows
from dagexec.platform.addresses import address_of

_SCORES = 1 << 17
"""Bytes of scores that are computed before their softmax."""

_FLOAT = 4  # bytes
_WIDE = 2  # vectors: of wider values the last vector may have some elements twice
_BLOCKS = 4  # of rows of queries, at least, for which the keys of a head are transposed
_LINE = 16  # elements of a cache line
_SAME_PLACE = 256  # elements: rows a multiple of this apart contend for few places of the first cache

_MOST_CALLS = 17
"""For some rows of a head: of keys in two parts by two, two products of rows in two parts by panels of three kinds, and
a softmax."""

_APART = 1 << 44
"""Bytes from the beginning of one array to that of the next, where calls are written for arrays that are not there."""

_MEMORY = 7
"""The number of the first array of a piece, behind Q, K, V, Y, mask and bias."""

_ARGUMENTS = slice(1, 4)  # columns of a call that are addresses in arrays

_Call = tuple[int, int, int, int, int]


@operator(fused.FusedAttention.schema, engine="ONEDNN")
class FusedAttention(OneDNNOperator, fused.FusedAttention):
    """Attention in float32."""

    moved_inputs = 3  # a mask may be laid out anew before the calls

    def prepare_primitive(self) -> Step:
        """Calls of kernels; before them mask and bias are laid out as those read them."""
        sizes = read_fused_attention(self.call())
        q, k, v = (sizes.by_head(self.x(index), index) for index in range(3))
        y = self.y(0).transpose(sizes.y_by_head)
        require_kernels(self, (q, k, v), y, sizes.keys)
        self.answer(lambda: True)
        before = list[Step]()
        scores = scores_of(self, sizes, before)
        return in_sequence([*before, computing(self, (q, k, v), y, scores)])


def scores_of(owner: OneDNNOperator, sizes: FusedSizes, before: list[Step]) -> Scores:
    """What is done with the scores of a FusedAttention; steps that lay out mask and bias go to `before`."""
    arguments = owner.arguments
    mask = _laid_out(owner, sizes, sizes.mask, np.int32, before, arguments.bool("shown", True))
    bias = _laid_out(owner, sizes, sizes.bias, np.float32, before)
    scale, softcap = arguments.float("scale", 1.0), arguments.float("softcap", 0.0)
    how = How(scale, arguments.float("hidden", -math.inf), arguments.bool("nan_to_zero"), softcap)
    return Scores(how, mask, bias)


def _laid_out(
    owner: OneDNNOperator,
    sizes: FusedSizes,
    index: int | None,
    dtype: type,
    before: list[Step],
    shown: bool | None = None,
) -> Array | None:
    """An input that broadcasts to the scores, with the keys next to each other; what is `shown` as all bits.

    Steps that lay it out go to `before`.
    """
    if index is None:
        return None
    array = owner.x(index)
    if dtype is not np.float32 or array.dtype != np.float32 or array.ndim == 0 or array.shape[-1] == 1:
        shape = (*array.shape[:-1], sizes.keys)
        laid = owner.working_memory(math.prod(shape) * _FLOAT).view(dtype).reshape(shape)
        show = partial(np.copyto, laid, array, casting="unsafe")
        before.append(show if shown is None else partial(shown_bits, array, shown, laid))
        array = laid
    return np.broadcast_to(array, sizes.scores)


@operator(attention.Attention.schema, engine="ONEDNN")
class Attention(OneDNNOperator, attention.Attention):
    """ONNX's attention in float32, with caches, and masks of any kind as a bias; without its products as an output."""

    def prepare_primitive(self) -> Step:
        """The caches and the bias, calls of kernels, zeros for queries that see no key."""
        call = self.call()
        sizes = read_attention(call)
        if len(self.output_blobs) > 3:
            raise UnsupportedFeatureError(f"{self.label}: kernels do not put products out")
        q, y = (sizes.by_head(array, sizes.heads) for array in (self.x(0), self.y(0)))
        new = [sizes.by_head(self.x(1 + place), sizes.key_heads) for place in (0, 1)]
        past = [] if sizes.cache is None else [self.x(sizes.cache + place) for place in (0, 1)]
        require_kernels(self, (q, *new, *past), y, sizes.keys)
        self.answer(lambda: True)
        before = list[Step]()
        k, v = (self._with_past(place, new[place], past[place] if past else None, before) for place in (0, 1))
        bias, after = self._bias(sizes, y, before)
        scale = call.arguments.float("scale", 1 / math.sqrt(sizes.width))
        how = How(scale, softcap=call.arguments.float("softcap", 0.0))
        return in_sequence([*before, computing(self, (q, k, v), y, Scores(how, bias=bias)), *after])

    def _with_past(self, place: int, new: Array, past: Array | None, before: list[Step]) -> Array:
        """Keys (place 0) or values (1) by head, which are put behind those of the cache, and into the output."""
        present = self.y(1 + place) if len(self.output_blobs) > 1 + place else None
        if past is None:
            if present is not None:
                before.append(partial(np.copyto, present, new))
            return new
        if present is None:
            shape = (*past.shape[:2], past.shape[2] + new.shape[2], past.shape[3])
            present = self.working_memory(math.prod(shape) * _FLOAT).view(np.float32).reshape(shape)
        before.append(partial(np.concatenate, (past, new), 2, present))
        return present

    def _bias(self, sizes: AttentionSizes, y: Array, before: list[Step]) -> tuple[Array | None, list[Step]]:
        """What is added to the scores, and the steps that clear what comes out for queries that see no key."""
        call, scores = self.call(), (sizes.batch, sizes.heads, sizes.queries, sizes.keys)
        inputs = [self.x(index) for index in range(len(call.inputs))]
        biases = attention.biases_of(call, sizes, np.dtype(np.float32))
        if sizes.mask is None and sizes.lengths is None:
            always = biases(inputs)
            if always is None:
                return None, []
            blind = attention.sees_nothing(always)
            clear: list[Step] = [partial(np.copyto, y, 0, where=blind)] if blind.any() else []
            return np.broadcast_to(np.ascontiguousarray(always), scores), clear
        shape = attention.bias_shape(call, sizes)
        laid = self.working_memory(math.prod(shape) * _FLOAT).view(np.float32).reshape(shape)

        def lay() -> None:
            np.copyto(laid, biases(inputs))  # type: ignore[arg-type]  # a mask, or lengths: there is one

        before.append(lay)
        return np.broadcast_to(laid, scores), [lambda: np.copyto(y, 0, where=attention.sees_nothing(laid))]


def require_kernels(owner: OneDNNOperator, operands: Sequence[Array], y: Array, keys: int) -> None:
    """Raises UnsupportedFeatureError for arrays, by head, that they do not compute."""
    if not owner.onednn.machine.can_run or any(array.dtype != np.float32 for array in (*operands, y)):
        raise UnsupportedFeatureError(f"{owner.label}: there are kernels for float32 with AVX2")
    if keys < GROUP or not y.size or 0 in operands[0].shape:
        raise UnsupportedFeatureError(f"{owner.label}: {keys} keys")


def computing(
    owner: OneDNNOperator,
    operands: tuple[Array, Array, Array],
    y: Array,
    scores: Scores,
    calls_on: Callable[[OneDNNOperator, Sequence[Array | None], How], Step] | None = None,
) -> Step:
    """The step that computes Y of Q, K and V, all by head, which have to lie as kernels read them for `calls_on`."""
    before, after = list[Step](), list[Step]()
    q, k, v = (_readable(owner, array, before) for array in operands)
    result = y
    if not _is_readable(y):
        result = _memory(owner, y)
        after.append(_copying(owner, result[..., : y.shape[3]], y))
    step = (calls_on or _calls_on)(owner, (q, k, v, result, scores.mask, scores.bias), scores.how)
    return in_sequence([*before, step, *after])


def _calls_on(owner: OneDNNOperator, arrays: Sequence[Array | None], how: How) -> Step:
    """The step that makes the calls on Q, K, V and Y, by head, and mask and bias where they are."""
    lying = lying_of(arrays)
    calls = calls_for(lying, sizes_of(lying, owner.onednn.machine.lanes), how)
    if calls is None:
        raise UnsupportedFeatureError(f"{owner.label}: no machine code runs here")
    memory = [array for one in calls.memory for array in in_one(owner.working_memory, one)]
    return step_of_rows(calls.rows_on([*arrays, *memory]), calls.ends, (calls, arrays, memory), owner.label)


def _is_readable(array: Array) -> bool:
    """True where the elements of a head are neighbors and fill a group, and numbers lie at even addresses."""
    is_even = not any(stride % _FLOAT for stride in array.strides)
    return is_even and array.shape[3] >= GROUP and array.strides[3] == _FLOAT


def _memory(owner: OneDNNOperator, array: Array) -> Array:
    """Memory for `array`, packed, its elements at least a group."""
    shape = (*array.shape[:3], max(GROUP, array.shape[3]))
    return owner.working_memory(math.prod(shape) * _FLOAT).view(np.float32).reshape(shape)


def _readable(owner: OneDNNOperator, array: Array, before: list[Step]) -> Array:
    """`array` as kernels read it; steps that lay it out, with zeros for elements that it does not have, go to `before`.

    Zeros add nothing to products.
    """
    if _is_readable(array):
        return array
    laid, width = _memory(owner, array), array.shape[3]
    if laid.shape[3] > width:
        before.append(partial(laid.fill, 0))
    before.append(_copying(owner, array, laid[..., :width]))
    return laid


def _copying(owner: OneDNNOperator, source: Array, target: Array) -> Step:
    return copy_step(owner.onednn.machine, [(source, target)], owner.label) or partial(np.copyto, target, source)


class How(NamedTuple):
    """What becomes of products before their softmax, and of weights behind it.

    Attributes:
        scale: a factor.
        hidden: scores that a mask does not show.
        nan_to_zero: for weights.
        softcap: c, where scores become c tanh(scores / c) before that; 0 where they do not.
    """

    scale: float
    hidden: float = -math.inf
    nan_to_zero: bool = False
    softcap: float = 0.0


class Scores(NamedTuple):
    """The same, with what is read for it.

    Attributes:
        mask: int32, batch x heads x queries x keys, keys next to each other; all bits set where a score stays.
        bias: float32, likewise; added.
    """

    how: How
    mask: Array | None = None
    bias: Array | None = None


class Lying(NamedTuple):
    """How an array lies in memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def at(self, address: int) -> Array:
        """Such an array, for what computes addresses in it and never reads it: there need not be memory."""
        data = {"shape": self.shape, "strides": self.strides, "typestr": self.dtype.str, "data": (address, False)}
        return np.asarray(SimpleNamespace(__array_interface__={**data, "version": 3}))


def lying_of(arrays: Sequence[Array | None]) -> tuple[Lying | None, ...]:
    """How they lie."""
    return tuple([None if array is None else Lying(array.shape, array.strides, array.dtype) for array in arrays])


class Sizes(NamedTuple):
    """What decides the calls beside layouts.

    Attributes:
        lanes: of vectors.
        pieces_of_one, pieces: in how many the work of an example, and all of it, is cut.
    """

    lanes: int
    pieces_of_one: int
    pieces: int


def sizes_of(lying: Sequence[Lying | None], most_lanes: int) -> Sizes:
    """Those for Q, K, V and Y, by head."""
    q, k, v, *_ = (one.shape for one in lying if one is not None)
    width = v[3]
    lanes = most_lanes if width % most_lanes == 0 or width > _WIDE * most_lanes else AVX2
    products = q[1] * q[2] * k[2] * (q[3] + width)
    return Sizes(lanes, pieces_of_products(products, lanes, MOST_OF_ONE), pieces_of_products(q[0] * products, lanes))


class Calls(NamedTuple):
    """The calls of kernels for all attentions of the same layouts.

    Attributes:
        rows: of all pieces. Their arguments are addresses in arrays that lie where there is no memory.
        places: which array each of these arguments is in, 0 for none: those given, and memory of pieces.
        ends: where the rows of each piece end.
        memory: bytes of the two arrays of each piece.
        heads: what the calls read.
    """

    rows: npt.NDArray[np.uint64]
    places: npt.NDArray[np.int64]
    ends: tuple[int, ...]
    memory: Sequence[tuple[int, int]]
    heads: _Heads

    def rows_on(self, arrays: Sequence[Array | None]) -> npt.NDArray[np.uint64]:
        """The rows for those given, and the memory of all pieces."""
        begins = [0, *(0 if array is None else address_of(array) for array in arrays)]
        rows = self.rows.copy()
        rows[:, _ARGUMENTS] += (np.array(begins) - np.arange(len(begins)) * _APART).astype(np.uint64)[self.places]
        return rows


@lru_cache(maxsize=64)
def calls_for(lying: tuple[Lying | None, ...], sizes: Sizes, how: How) -> Calls | None:
    """Those for such layouts; None where the kernels cannot run."""
    heads = _Heads(
        [None if one is None else one.at(number * _APART) for number, one in enumerate(lying, 1)], sizes, how
    )
    calls, ends = heads.table()
    rows = native_rows(calls)
    if not rows[:, 0].all():
        return None
    return Calls(rows, _places(calls), ends, heads.memory, heads)


def _places(calls: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which array each argument of calls is in, 0 for none."""
    return (calls[:, _ARGUMENTS] + _APART // 2) // _APART


class _Heads:
    """The calls of kernels for all heads; it holds what they read.

    Attributes:
        memory: bytes of the two arrays of each piece.
    """

    def __init__(self, arrays: Sequence[Array | None], sizes: Sizes, how: How) -> None:
        """`arrays` are Q, K, V and Y, by head, mask and bias; they are not read."""
        self.memory: list[tuple[int, int]] = []
        q, k, v, y, self._mask, self._bias = arrays
        assert q is not None
        assert k is not None
        assert v is not None
        assert y is not None
        self._q, self._k, self._v, self._y = q, k, v, y
        self._how, self._sizes, self._lanes = how, sizes, sizes.lanes
        self._kept: list[Array] = []
        self._known: dict[tuple[int, ...], int] = {}
        self._keys = self._k.shape[2]
        self._queries, self._width, self._value_width = *self._q.shape[2:], self._v.shape[3]
        self._columns = -(-self._keys // self._lanes) * self._lanes
        self._row = self._columns + (_LINE if self._columns % _SAME_PLACE == 0 else 0)
        most = kernels.most_rows(self._lanes)
        self._rows = max(1, _SCORES // (_FLOAT * self._row * most)) * most
        self._blocks = self._blocks_of_head(most)
        self._numbers = self._keep(kernels.tail_numbers(self._keys, how.scale, how.hidden, how.softcap))

    def _keep(self, array: Array) -> int:
        """The address of an array that is kept."""
        self._kept.append(array)
        return address_of(array)

    def _fields(self, *numbers: int) -> int:
        """The address of fields with these numbers, the same for all calls that have them."""
        if numbers not in self._known:
            self._known[numbers] = self._keep(np.array(numbers, np.int64))
        return self._known[numbers]

    def _blocks_of_head(self, most: int) -> list[range]:
        """The queries of a head in parts that may be pieces, of so many rows or more of them.

        Each part transposes the keys again, so that there are only as many as an example is worth.
        """
        heads: int = self._y.shape[1]
        pieces = self._sizes.pieces_of_one
        count = max(1, pieces // heads)
        count += pieces > heads and heads * count % 2  # two threads share them
        rows = -(-self._queries // most)
        parts = even_shares(rows, min(count, max(1, rows // _BLOCKS)))
        return [range(part.start * most, min(part.stop * most, self._queries)) for part in parts]

    def table(self) -> tuple[npt.NDArray[np.int64], tuple[int, ...]]:
        """The calls of all pieces, [calls, 5], and where those of each end.

        They are written for the first head, once for each part of its rows. Others have them as far behind as a head
        lies behind the first.
        """
        group = self._y.shape[1] // self._k.shape[1]
        parts = [list(self._transposed(self._k[0, 0], self._packed)), *map(list, map(self._attended, self._blocks))]
        order: list[tuple[int, int, int, int]] = []  # part, image, head, piece
        steps = [0]
        for piece, units in enumerate(self._pieces()):
            most = min(self._rows, max(len(self._blocks[number]) for _, _, number in units))
            self.memory.append((self._width * self._row * _FLOAT, most * self._row * _FLOAT))
            known: tuple[int, int] | None = None
            for image, head, number in units:
                if known != (image, head // group):
                    known = image, head // group
                    order.append((0, image, head, piece))
                order.append((1 + number, image, head, piece))
            steps.append(len(order))
        part, image, head, piece = np.array(order, np.int64).T
        counts = np.array(list(map(len, parts)))
        ends = np.cumsum(counts[part])
        step = np.repeat(np.arange(len(order)), counts[part])  # of each call
        within = np.arange(len(step)) - (ends - counts[part])[step]
        calls = np.array([call for one in parts for call in one])[(np.cumsum(counts) - counts)[part[step]] + within]
        behind = np.zeros((len(order), _MEMORY + 2), np.int64)
        for place, array in enumerate((self._q, self._k, self._v, self._y, self._mask, self._bias), 1):
            if array is not None:
                own = head // group if place in (2, 3) else head
                behind[:, place] = image * array.strides[0] + own * array.strides[1]
        behind[:, _MEMORY:] = piece[:, None] * 2 * _APART
        calls[:, _ARGUMENTS] += behind[step[:, None], _places(calls)]
        return calls, tuple(ends[np.array(steps[1:]) - 1].tolist())

    def most_calls(self) -> list[int]:
        """More than which no piece has, with as many positions or fewer."""
        calls = [_MOST_CALLS * -(-len(block) // self._rows) for block in self._blocks]
        return [sum(calls[number] for *_, number in units) for units in self._pieces()]

    def most_memory(self) -> list[tuple[int, int]]:
        """Of each piece, with as many positions or fewer, the bytes of its two arrays."""
        row = (self._columns + _LINE) * _FLOAT
        return [(self._width * row, max(_SCORES, kernels.most_rows(self._lanes) * row))] * len(self.memory)

    def _pieces(self) -> list[Sequence[tuple[int, int, int]]]:
        """The rows of heads that each piece computes: image, head, number of the part of its rows."""
        batch, heads = self._y.shape[:2]
        units = list(product(range(batch), range(heads), range(len(self._blocks))))
        return [units[part.start : part.stop] for part in even_shares(len(units), self._sizes.pieces)]

    @property
    def _packed(self) -> Array:
        """Memory of the first piece for the keys of a head."""
        return self._rows_at(self._width, _MEMORY)

    def _rows_at(self, count: int, number: int) -> Array:
        return Lying((count, self._row), (self._row * _FLOAT, _FLOAT), np.dtype(np.float32)).at(number * _APART)

    def _attended(self, block: range) -> Iterator[_Call]:
        """Some rows of the first head."""
        for start in range(block.start, block.stop, self._rows):
            rows = slice(start, min(start + self._rows, block.stop))
            part = self._rows_at(rows.stop - rows.start, _MEMORY + 1)
            yield from self._multiplied(self._q[0, 0, rows], self._packed, part, self._columns)
            yield self._softmax(part, rows)
            yield from self._multiplied(part[:, : self._keys], self._v[0, 0], self._y[0, 0, rows], self._value_width)

    def _transposed(self, keys: Array, packed: Array) -> Iterator[_Call]:
        """Keys [positions, elements] as columns; the last ones, and elements, together, some of them twice."""
        kernel, row = kernels.transpose_kernel() or 0, keys.strides[0]
        whole = len(keys) // GROUP
        parts = [(0, whole), *([(len(keys) - GROUP, 1)] if len(keys) % GROUP else [])]
        width = keys.shape[1]
        elements = [(0, width // GROUP), *([(width - GROUP, 1)] if width % GROUP else [])]
        for (start, groups), (first, count) in product(parts, elements):
            fields = self._fields(groups, count, row, GROUP * row, self._row * _FLOAT)
            source, target = address_of(keys) + start * row, address_of(packed) + start * _FLOAT
            yield kernel, source + first * _FLOAT, target + first * self._row * _FLOAT, 0, fields

    def _multiplied(self, x: Array, w: Array, y: Array, columns: int) -> Iterator[_Call]:
        """Y = X W in blocks of rows, those that are left as one, and panels of columns, likewise."""
        most = kernels.most_rows(self._lanes)
        whole = len(x) // most
        for start, count, blocks in ((0, most, whole), (whole * most, len(x) % most, 1)):
            if count and blocks:
                yield from self._panels(x[start:], w, y[start:], columns, count, blocks)

    def _panels(self, x: Array, w: Array, y: Array, columns: int, rows: int, blocks: int) -> Iterator[_Call]:
        most, inner = kernels.most_vectors(rows, self._lanes), x.shape[1]
        vectors = columns // self._lanes
        parts = [(0, most, vectors // most), (vectors // most * most * self._lanes, vectors % most, 1)]
        if columns % self._lanes:  # the last ones together, some of them twice
            parts.append((columns - self._lanes, 1, 1))
        for start, count, panels in parts:
            if not count or not panels:
                continue
            kernel = kernels.product_kernel(rows, count, self._lanes, inner >= 4, inner % 4) or 0
            width = count * self._lanes * _FLOAT
            row = x.strides[0]
            source = (row, 3 * row, 5 * row, rows * row)
            fields = self._fields(
                panels, blocks, *source, w.strides[0], width, y.strides[0], width, inner // 4 * 4 * _FLOAT
            )
            offset = start * _FLOAT
            yield kernel, address_of(x), address_of(w) + offset, address_of(y) + offset, fields

    def _softmax(self, scores: Array, rows: slice) -> _Call:
        vectors, tail = divmod(self._keys, GROUP)
        options = self._bias is not None, self._mask is not None, self._how.nan_to_zero, self._how.softcap > 0
        kernel = kernels.softmax_kernel(vectors >= 4, vectors % 4, tail > 0, *options) or 0
        (bias, bias_row), (mask, mask_row) = (
            (0, 0) if array is None else (address_of(array[0, 0, rows]), array.strides[2])
            for array in (self._bias, self._mask)
        )
        whole = vectors // 4 * 4 * GROUP * _FLOAT
        fields = self._fields(len(scores), scores.strides[0], whole, bias_row, mask_row, self._numbers)
        return kernel, address_of(scores), bias, mask, fields


def shown_bits(mask: Array, shown: bool, target: Array) -> None:
    """Set all bits of `target` where the mask is `shown`, none elsewhere."""
    np.not_equal(mask, not shown, out=target, casting="unsafe")
    np.negative(target, out=target)
