"""Steps of NumPy as native calls: the same code and the same bytes, without Python and its lock, in pieces.

A step of NumPy for arrays that exist already - a `partial` of a function of elements with `out`, of its `reduce` or
`accumulate`, or of a copy - can be made of calls of NumPy's inner loops (`numpy_loops`). Other steps stay what they
are: functions that allocate, conversions, operands that overlap, objects, and arrays of so many short rows that a
table of calls would be long.

The calls depend on the form of the steps: their functions, numbers, and the layouts of their arrays. They are found
once per form (`NativeCalls`); other steps of the form have the same tables with their own addresses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import accumulate, groupby, pairwise
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.core.native import Array, NativeStep, can_run, native_rows, phases_of, pieces_of, table_piece
from dagexec.core.native_tables import merged
from dagexec.core.numpy_loops import Loop, loop_of
from dagexec.core.operator import Prepared, Step, in_sequence, parts_of
from dagexec.platform.addresses import address_of

_Table = npt.NDArray[np.int64]
_Index = tuple[slice | EllipsisType, ...]

_NO_CALLS: _Table = np.empty((0, 5), np.int64)

_MOST_CALLS = 1 << 12
"""Calls of a step, at most."""

_FEW_CALLS, _CALL_BYTES = 256, 80
"""A table takes so many bytes for each call: more than a few calls must move more memory than that."""

_MOST_WORK = 1000
"""NumPy's effort to find out whether arrays overlap."""

_ALIGNED = 64
"""Elements: parts of rows begin at multiples of it, so that threads do not write to one line of a cache in turns."""

_BYTES_PER_SECOND, _SECONDS_AN_ELEMENT = 10e9, 2e-9
"""Of one core: the bandwidth of simple functions, and the time of others."""

_SIMPLE = frozenset(
    (
        np.absolute, np.add, np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.ceil, np.equal, np.floor, np.greater,
        np.greater_equal, np.invert, np.isfinite, np.isinf, np.isnan, np.less, np.less_equal, np.logical_and,
        np.logical_not, np.logical_or, np.logical_xor, np.maximum, np.minimum, np.multiply, np.negative, np.not_equal,
        np.positive, np.rint, np.square, np.subtract,
    )
)  # fmt: skip
"""Functions as fast as memory."""

_SUMS = (np.add, np.multiply)
"""Reductions that start from the identity."""

_EXTREMES = (np.maximum, np.minimum, np.logical_and, np.logical_or, np.bitwise_and, np.bitwise_or)
"""Reductions that start from the first element, which may count twice."""


class _Unsupported(Exception):  # noqa: N818 - not an error
    """The call remains Python's."""


def natively(prepared: Prepared, label: str) -> Prepared:
    """`prepared`, with NumPy's calls in its step made native where possible."""
    if not can_run() or prepared.parts:
        return prepared
    parts = parts_of(prepared.step)
    numbered: _Numbered = {}
    forms = [_step_form(part, numbered) for part in parts]
    if not any(forms):
        return prepared
    arrays = [array for _, array in numbered.values()]
    addresses = list(map(address_of, arrays))
    layouts = tuple([(array.dtype, array.shape, array.strides) for array in arrays])
    spans = [_span(shape, strides, dtype.itemsize) for dtype, shape, strides in layouts]
    form = tuple(forms), layouts, _common_memory(addresses, spans)
    native = _known.get(form)
    if native is None:
        native = _native(parts, forms, addresses, spans)
        if len(native.rows) <= _MOST_ROWS_KNOWN:
            if len(_known) >= _MOST_KNOWN:
                _known.clear()
            _known[form] = native
    if not any(native.steps):
        return prepared
    steps = native.made(parts, arrays, addresses, label)
    nbytes = prepared.nbytes + 2 * native.rows.nbytes
    if len(steps) > 1:
        return replace(prepared, step=in_sequence(merged(steps)), nbytes=nbytes)
    keeps = NumpyCalls(native, arrays) if prepared.keeps is None else prepared.keeps
    return replace(prepared, step=steps[0], nbytes=nbytes, keeps=keeps)


_MOST_KNOWN, _MOST_ROWS_KNOWN = 1 << 10, 1 << 8
_MOST_ROWS = 1 << 16
"""Of a table, which takes 3 MiB then: with more rows, of a few elements each, NumPy calls its loops itself."""

_Numbered = dict[int, tuple[int, Array]]
"""The arrays of some steps, and their numbers, by `id`."""

_Span = tuple[int, int]
"""The offsets of the first byte of an array and of the end, from its address."""


def _step_form(step: Step, arrays: _Numbered) -> Hashable | None:
    """The form of a call of NumPy but for its arrays, which are put into `arrays`; None for something else."""
    if not isinstance(step, partial) or phases_of(step) is not None:
        return None
    function = step.func
    owner = getattr(function, "__self__", None)
    name: Hashable = function
    if isinstance(owner, np.ufunc):
        name = owner, function.__name__
    elif isinstance(owner, np.ndarray):
        name = function.__name__, _value_form(owner, arrays)
    elif not isinstance(function, np.ufunc) and function is not np.copyto and function is not np.concatenate:
        return None
    values = (*step.args, *step.keywords.values())
    try:
        return name, len(step.args), tuple(step.keywords), tuple([_value_form(value, arrays) for value in values])
    except _Unsupported:
        return None


def _value_form(value: Any, arrays: _Numbered) -> Hashable:
    """An argument of a step in its form: for an array, its number among `arrays`.

    Raises _Unsupported for other types of values.
    """
    if isinstance(value, np.ndarray):
        return np.ndarray, arrays.setdefault(id(value), (len(arrays), value))[0]
    if isinstance(value, np.generic):
        return value.dtype, value.tobytes()
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, list | tuple):
        return tuple([_value_form(item, arrays) for item in value])
    if value is None or isinstance(value, int | str | type | np.dtype):
        return type(value), value
    raise _Unsupported


@lru_cache(1 << 12)
def _span(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> _Span:
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    if 0 in shape:
        return 0, 0
    return sum(step for step in reach if step < 0), sum(step for step in reach if step > 0) + itemsize


def _common_memory(addresses: Sequence[int], spans: Sequence[_Span]) -> Hashable:
    """Which arrays overlap, and where: calls depend on that besides layouts."""
    bounds = [(address + low, address + high) for address, (low, high) in zip(addresses, spans, strict=True)]
    lying = sorted(range(len(bounds)), key=bounds.__getitem__)
    first = [0] * len(bounds)
    end = leader = 0
    for place in lying:
        if bounds[place][0] >= end:
            leader = place
        first[place] = leader
        end = max(end, bounds[place][1])
    if len(set(first)) == len(first):
        return None
    return tuple([(leader, address - addresses[leader]) for leader, address in zip(first, addresses, strict=True)])


class NativeCalls(NamedTuple):
    """The calls of steps of a form.

    Attributes:
        rows: of `native_rows`, with places among the addresses that calls read in place of where these are.
        steps: of each step, the rows of each piece, from the first to behind the last; None for one that stays.
        arrays: of each of the addresses that calls read, the array that it lies in, or behind them all for a constant.
        offsets: where it lies there.
        written: the arrays that calls write.
        keeps: whatever has to live as long as the rows.
    """

    rows: npt.NDArray[np.uint64]
    steps: Sequence[Sequence[tuple[int, int]] | None]
    arrays: npt.NDArray[np.intp]
    offsets: npt.NDArray[np.int64]
    written: frozenset[int]
    keeps: object

    def made(self, parts: Sequence[Step], arrays: object, addresses: Sequence[int], label: str) -> list[Step]:
        """The steps for these arrays, with `parts` for those that stay Python's; native neighbors are merged."""
        read = np.array((*addresses, 0), np.int64)[self.arrays] + self.offsets
        rows = self.rows.copy()
        rows[:, 1] += np.uint64(address_of(read))
        keeps = read, arrays, self.keeps
        steps: list[Step] = []
        for stays, group in groupby(zip(parts, self.steps, strict=True), lambda one: one[1] is None):
            if stays:
                steps += [part for part, _ in group]
                continue
            phases = [tuple([table_piece(rows[a:b], keeps, label) for a, b in pieces or ()]) for _, pieces in group]
            steps.append(NativeStep(tuple(filter(None, phases))))
        return steps


class NumpyCalls(NamedTuple):
    """All that a prepared operator does: calls of a form, and the arrays that they are about."""

    calls: NativeCalls
    arrays: Sequence[Array]


_known: dict[Hashable, NativeCalls] = {}
"""By form."""


def _native(
    parts: Sequence[Step], forms: Sequence[Hashable | None], addresses: Sequence[int], spans: Sequence[_Span]
) -> NativeCalls:
    """The calls of `parts`, of these `forms`, whose arrays are at these addresses."""
    calls, rows = _Calls(), list[npt.NDArray[np.int64]]()
    steps: list[Sequence[tuple[int, int]] | None] = []
    count = 0
    for part, form in zip(parts, forms, strict=True):
        try:
            tables = None if form is None or not isinstance(part, partial) else _tables_of(calls, part)
        except _Unsupported:
            tables = None
        steps.append(None)
        if tables is not None:
            ends = list(accumulate(map(len, tables), initial=count))
            steps[-1], count = list(pairwise(ends)), ends[-1]
            rows += tables
        if count > _MOST_ROWS:
            return _native((), (), addresses, spans)._replace(steps=[None] * len(parts))
    read = np.concatenate([np.empty(0, np.int64), *calls.read])
    arrays = np.full(len(read), len(addresses))
    for place, (address, (low, high)) in enumerate(zip(addresses, spans, strict=True)):
        arrays[(read >= address + low) & (read < address + high)] = place
    offsets = read - np.array((*addresses, 0), np.int64)[arrays]
    written = frozenset(arrays[calls.written].tolist())
    return NativeCalls(native_rows(np.concatenate([_NO_CALLS, *rows])), steps, arrays, offsets, written, calls.fields)


def _tables_of(calls: _Calls, step: partial[object]) -> list[_Table]:
    """Those of `_tables` that have calls. Raises _Unsupported."""
    return [table for table in _tables(calls, step.func, step.args, step.keywords) if len(table)]


def _tables(
    calls: _Calls, function: Callable[..., Any], args: Sequence[Any], keywords: dict[str, Any]
) -> Iterator[_Table]:
    """The calls of each piece of what `function` does."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(function, np.ufunc) and _is_about(args, function.nin, keywords, "out", "dtype", "casting"):
        return _elements(calls, function, args, **keywords)
    with_axis = _is_about(args, 1, keywords, "out", "axis", "dtype", "keepdims")
    if isinstance(owner, np.ufunc) and name == "reduce" and with_axis:
        return _reduction(calls, owner, *args, **keywords)
    if isinstance(owner, np.ufunc) and name == "accumulate" and with_axis:
        return _accumulation(calls, owner, *args, **keywords)
    if isinstance(owner, np.ndarray) and name == "clip" and _is_about(args, 2, keywords, "out"):
        return _elements(calls, np._core.umath.clip, (owner, *args), **keywords)  # type: ignore[attr-defined]
    if isinstance(owner, np.ndarray) and name == "fill" and not keywords:
        if isinstance(args[0], np.ndarray) and args[0].dtype != owner.dtype:
            raise _Unsupported
        return _copies(calls, [(calls.array(args[0], owner.dtype), owner)])
    if function is np.copyto and set(keywords) <= {"casting"}:
        return _conversion(calls, *args, **keywords)
    if function is np.concatenate and len(args) == 3:
        sources, axis, target = args
        ends = np.cumsum([source.shape[axis] for source in sources])[:-1]
        return _copies(calls, list(zip(sources, np.split(target, ends, axis), strict=True)))
    raise _Unsupported


def _is_about(args: Sequence[Any], count: int, keywords: dict[str, Any], first: str, *others: str) -> bool:
    """True for so many arguments, keyword `first`, and perhaps some of the others."""
    return len(args) == count and first in keywords and set(keywords) <= {first, *others}


class _Calls:
    """Calls of loops as rows of tables.

    Attributes:
        read: the addresses of the arguments of each call, which it reads.
        written: the places among these of what they write.
        fields: the numbers that calls read beside them, and constants.
    """

    def __init__(self) -> None:
        self.read: list[npt.NDArray[np.int64]] = []
        self.written: list[int] = []
        self.fields: list[Array] = []
        self._count = 0

    def array(self, value: Any, dtype: Any = None) -> Array:
        """`value` as an array: itself if it is one, else a constant."""
        if isinstance(value, np.ndarray):
            return value
        self.fields.append(np.asarray(value, dtype))
        return self.fields[-1]

    def rows(self, loop: Loop, views: Sequence[Array], order: Array) -> _Table:
        """The calls for all elements of `views`, the loop's arguments, of one shape; in the order of memory of `order`.

        A call goes along the axis that is last in memory. Raises _Unsupported for too many calls.
        """
        strides = list(zip(*(view.strides for view in views), strict=True))  # an axis a row
        sizes: list[int] = [1]
        steps: list[tuple[int, ...]] = [tuple([view.itemsize for view in views])]
        for axis in sorted(range(order.ndim), key=lambda axis: -abs(order.strides[axis])):
            size, own = order.shape[axis], strides[axis]
            if size == 1:
                continue
            if sizes[-1] == 1:
                sizes[-1], steps[-1] = size, own
            elif steps[-1] == tuple([size * step for step in own]):
                sizes[-1], steps[-1] = sizes[-1] * size, own
            else:
                sizes.append(size)
                steps.append(own)
        *outer, length = sizes
        count = math.prod(outer)
        if count > _MOST_CALLS or (count > _FEW_CALLS and count * _CALL_BYTES > order.nbytes):
            raise _Unsupported
        starts = np.array([[address_of(view) for view in views]], np.int64)
        for size, step in zip(outer, steps, strict=False):
            starts = (starts[:, None] + np.arange(size)[:, None] * np.array(step)).reshape(-1, len(views))
        fields = np.array([length, *steps[-1]], np.int64)
        self.read.append(starts.reshape(-1))
        self.fields.append(fields)
        first = address_of(fields)
        call = loop.function, self._count * starts.itemsize, first, first + fields.itemsize, loop.data
        table = np.array([call] * count, np.int64)
        if count > 1:
            table[:, 1] += np.arange(count) * starts.strides[0]
        self._count += starts.size
        self.written.append(self._count - 1)
        return table


def _elements(
    calls: _Calls, ufunc: np.ufunc, args: Sequence[Any], *, out: Array, dtype: Any = None, casting: str = "same_kind"
) -> Iterator[_Table]:
    """A function of elements; `casting` says nothing where no element is converted."""
    arrays = [_operand(calls, value, [*args, out]) for value in args]
    loop = loop_of(ufunc, [*(array.dtype for array in arrays), out.dtype])
    if loop is None or ufunc.nout != 1 or (dtype is not None and any(x.dtype != dtype for x in (*arrays, out))):
        raise _Unsupported
    _require_apart(out, arrays)
    views = [_stretched(array, out.shape) for array in arrays]
    for index in _parts(out.shape, range(out.ndim), _seconds(ufunc, views, out)):
        yield calls.rows(loop, [*(view[index] for view in views), out[index]], out[index])


def _stretched(array: Array, shape: tuple[int, ...]) -> Array:
    return array if array.shape == shape else np.broadcast_to(array, shape)


def _operand(calls: _Calls, value: Any, others: Sequence[Any]) -> Array:
    """`value` as an array; a plain number has the type of the first array, where that can hold it."""
    if isinstance(value, np.ndarray | np.generic):
        return calls.array(value)
    array = next(other for other in others if isinstance(other, np.ndarray))
    if not isinstance(value, int | float) or np.result_type(array, value) != array.dtype:
        raise _Unsupported
    return calls.array(value, array.dtype)


def _reduction(
    calls: _Calls, ufunc: np.ufunc, x: Array, *, out: Array, axis: Any = 0, dtype: Any = None, keepdims: bool = False
) -> Iterator[_Table]:
    """Elements of `axis` joined one after another, in the order in which NumPy does it."""
    loop = loop_of(ufunc, [x.dtype] * 3)
    axes = {dim % x.ndim for dim in (axis if isinstance(axis, tuple) else (axis,))} if x.ndim else set()
    if loop is None or not keepdims or out.dtype != x.dtype or dtype not in (None, x.dtype) or not x.size:
        raise _Unsupported
    if not axes or (ufunc not in _SUMS and ufunc not in _EXTREMES):
        raise _Unsupported
    _require_apart(out, [x])
    first = x[(*(slice(1) if dim in axes else slice(None) for dim in range(x.ndim)), ...)]
    start = np.broadcast_to(calls.array(ufunc.identity, x.dtype), out.shape) if ufunc in _SUMS else first
    kept = [dim for dim in range(x.ndim) if dim not in axes]
    for index in _parts(x.shape, kept, _seconds(ufunc, [x], out)):
        part, total = x[index], out[index]
        totals = _stretched(total, part.shape)
        yield np.concatenate([_copied(calls, start[index], total), calls.rows(loop, [totals, part, totals], part)])


def _accumulation(
    calls: _Calls, ufunc: np.ufunc, x: Array, *, out: Array, axis: int = 0, dtype: Any = None
) -> Iterator[_Table]:
    """Each element along `axis` joined with the result before it."""
    loop = loop_of(ufunc, [x.dtype] * 3)
    if loop is None or out.dtype != x.dtype or dtype not in (None, x.dtype) or not x.size:
        raise _Unsupported
    if np.may_share_memory(x, out):
        raise _Unsupported
    axis %= x.ndim
    others = [dim for dim in range(x.ndim) if dim != axis]
    for index in _parts(x.shape, others, _seconds(ufunc, [x, x], out)):
        part, total = (np.moveaxis(array[index], axis, 0) for array in (x, out))
        rows = [_copied(calls, part[:1], total[:1])]
        if all(size == 1 for size in x.shape[axis + 1 :]):  # each row by one call, which sees what it wrote
            before, behind = (np.moveaxis(array, 0, -1) for array in (total[:-1], total[1:]))
            rows.append(calls.rows(loop, [before, np.moveaxis(part[1:], 0, -1), behind], behind))
        elif len(part) > _MOST_CALLS:
            raise _Unsupported
        else:
            rows += [
                calls.rows(loop, [total[row - 1], part[row], total[row]], total[row]) for row in range(1, len(part))
            ]
        table = np.concatenate(rows)
        if len(table) > _MOST_CALLS:
            raise _Unsupported
        yield table


def _conversion(calls: _Calls, target: Array, source: Any, *, casting: str = "same_kind") -> Iterator[_Table]:
    """A copy, or whether numbers are not 0."""
    source = calls.array(source)
    if source.dtype == target.dtype:
        return _copies(calls, [(source, target)])
    if target.dtype != np.bool_ or casting != "unsafe":
        raise _Unsupported
    return _elements(calls, np.not_equal, (source, calls.array(0, source.dtype)), out=target)


def _copies(calls: _Calls, pairs: Sequence[tuple[Array, Array]]) -> Iterator[_Table]:
    """The first array of each pair copied to the second; what is too little for pieces in one of them."""
    small = [_NO_CALLS]
    for source, target in pairs:
        _require_apart(target, [source])
        source = _stretched(source, target.shape)
        parts = _parts(target.shape, range(target.ndim), _seconds(np.positive, [source], target))
        tables = [_copied(calls, source[index], target[index]) for index in parts]
        if len(tables) == 1:
            small += tables
        else:
            yield from tables
    yield np.concatenate(small)


def _copied(calls: _Calls, source: Array, target: Array) -> _Table:
    """The calls that copy elements of any type as they are."""
    word = np.dtype(f"i{target.itemsize}") if target.itemsize in (1, 2, 4, 8) and not target.dtype.hasobject else None
    loop = None if word is None else loop_of(np.positive, [word, word])
    if word is None or loop is None or source.dtype != target.dtype:
        raise _Unsupported
    if not target.size:
        return _NO_CALLS
    return calls.rows(loop, [source.view(word), target.view(word)], target)


def _seconds(ufunc: np.ufunc, views: Sequence[Array], out: Array) -> float:
    """An estimate on one core."""
    size = max(out.size, *(view.size for view in views))
    work = 0.0 if ufunc in _SIMPLE else size * _SECONDS_AN_ELEMENT
    return work + sum(view.nbytes for view in (*views, out)) / _BYTES_PER_SECOND


def _parts(shape: tuple[int, ...], axes: Sequence[int], seconds: float) -> list[_Index]:
    """What each piece has of arrays of `shape`: a range of the first of `axes` that has as many places, or the longest.

    Pieces are the same whatever computes them, and no element depends on where they end.
    """
    count, long = pieces_of(seconds), [axis for axis in axes if shape[axis] > 1]
    if 0 in shape:
        return []
    if count == 1 or not long:
        return [(...,)]
    axis = next((dim for dim in long if shape[dim] >= count), max(long, key=lambda dim: shape[dim]))
    unit = _ALIGNED if axis == max(dim for dim, size in enumerate(shape) if size > 1) else 1
    units = -(-shape[axis] // unit)
    ends = [min(shape[axis], units * number // count * unit) for number in range(count)] + [shape[axis]]
    before = (slice(None),) * axis
    return [(*before, slice(*pair), ...) for pair in pairwise(ends) if pair[0] < pair[1]]


def _require_apart(out: Array, arrays: Sequence[Array]) -> None:
    """Raise _Unsupported where writing an element would change one that is still to be read, except in place."""
    for array in arrays:
        is_same = array.shape == out.shape and array.strides == out.strides and address_of(array) == address_of(out)
        if is_same or not np.may_share_memory(array, out):
            continue
        try:
            if np.shares_memory(array, out, max_work=_MOST_WORK):  # type: ignore[arg-type]  # NumPy takes any number
                raise _Unsupported
        except np.exceptions.TooHardError:
            raise _Unsupported from None
