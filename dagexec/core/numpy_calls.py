"""Steps that call NumPy, as native calls: the same code and the same bytes, without Python and its lock, in pieces.

A step of NumPy for arrays that exist already - a `partial` of a function of elements with `out`, of its `reduce` or
`accumulate`, or of a copy - can be made of calls of NumPy's inner loops (`numpy_loops`). Other steps stay what they
are: functions that allocate, conversions, operands that overlap, objects, and arrays of so many short rows that a
table of calls would be long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import EllipsisType
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import Array, NativeStep, can_run, native_rows, phases_of, pieces_of, table_piece
from dagexec.core.native_tables import merged
from dagexec.core.numpy_loops import Loop, loop_of
from dagexec.core.operator import Prepared, Step, in_sequence, parts_of
from dagexec.platform.addresses import address_of

_Table = npt.NDArray[np.int64]
_Index = tuple[slice | EllipsisType, ...]

_MOST_CALLS = 1 << 12
"""Of a step."""

_FEW_CALLS, _CALL_BYTES = 256, 80
"""A table takes so many bytes for each: more than a few calls have to be about more memory than that."""

_MOST_WORK = 1000
"""What NumPy may do to find out whether arrays overlap."""

_ALIGNED = 64
"""Elements: parts of rows begin at multiples of it, so that threads do not write to one line of a cache in turns."""

_BYTES_PER_SECOND, _SECONDS_AN_ELEMENT = 10e9, 2e-9
"""Of one core: what simple functions move, and what others take."""

_SIMPLE = frozenset(
    (
        np.absolute, np.add, np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.ceil, np.equal, np.floor, np.greater,
        np.greater_equal, np.invert, np.isfinite, np.isinf, np.isnan, np.less, np.less_equal, np.logical_and,
        np.logical_not, np.logical_or, np.logical_xor, np.maximum, np.minimum, np.multiply, np.negative, np.not_equal,
        np.positive, np.rint, np.square, np.subtract,
    )
)  # fmt: skip
"""What moves elements as fast as memory does."""

_SUMS = (np.add, np.multiply)
"""What starts from its identity when it reduces."""

_EXTREMES = (np.maximum, np.minimum, np.logical_and, np.logical_or, np.bitwise_and, np.bitwise_or)
"""What starts from the first element, which may be taken twice."""


class _Unsupported(Exception):  # noqa: N818 - not an error
    """A call stays one of Python."""


def natively(prepared: Prepared, label: str) -> Prepared:
    """`prepared`, what calls NumPy in its step made native calls, as far as that can be."""
    if not can_run() or prepared.parts:
        return prepared
    parts = parts_of(prepared.step)
    made = [_native(part, label) for part in parts]
    nbytes = sum(table.nbytes for step in made if step for table in step.native_tables)
    if not any(made):
        return prepared
    steps = merged([new or old for new, old in zip(made, parts, strict=True)])
    return replace(prepared, step=in_sequence(steps), nbytes=prepared.nbytes + 2 * nbytes)


def _native(step: Step, label: str) -> NativeStep | None:
    """The step of native calls that does what `step` does; None for what is no call of NumPy, or an unsupported one."""
    if not isinstance(step, partial) or phases_of(step) is not None:
        return None
    calls = _Calls()
    try:
        tables = list(_tables(calls, step.func, step.args, dict(step.keywords)))
    except _Unsupported:
        return None
    rows = [native_rows(table) for table in tables if len(table)]
    pieces = tuple(table_piece(table, calls, label) for table in rows)
    return NativeStep((pieces,) if pieces else (), rows)


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
        return _copies(calls, [(np.asarray(args[0], owner.dtype), owner)])
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
    """Calls of loops as rows of tables; it holds what they read."""

    def __init__(self) -> None:
        self._kept: list[Array] = []

    def rows(self, loop: Loop, views: Sequence[Array], order: Array) -> _Table:
        """The calls for all elements of `views`, the loop's arguments, of one shape; in the order of memory of `order`.

        A call goes along the axis that is last in memory. Raises _Unsupported for too many calls.
        """
        strides = np.array([view.strides for view in views], np.int64).T  # an axis a row
        by_size = sorted(range(order.ndim), key=lambda axis: -abs(order.strides[axis]))
        sizes: list[int] = [1]
        steps: list[npt.NDArray[np.int64]] = [np.array([view.itemsize for view in views], np.int64)]
        for axis in by_size:
            size = order.shape[axis]
            if size == 1:
                continue
            if sizes[-1] == 1:
                sizes[-1], steps[-1] = size, strides[axis]
            elif (steps[-1] == size * strides[axis]).all():
                sizes[-1], steps[-1] = sizes[-1] * size, strides[axis]
            else:
                sizes.append(size)
                steps.append(strides[axis])
        *outer, length = sizes
        count = math.prod(outer)
        if count > _MOST_CALLS or (count > _FEW_CALLS and count * _CALL_BYTES > order.nbytes):
            raise _Unsupported
        starts = np.array([[address_of(view) for view in views]], np.int64)
        for size, step in zip(outer, steps, strict=False):
            starts = (starts[:, None] + np.arange(size)[:, None] * step).reshape(-1, len(views))
        fields = np.array([length, *steps[-1]], np.int64)
        self._kept += [starts, fields, *views]
        table = np.empty((len(starts), 5), np.int64)
        table[:] = loop.function, 0, address_of(fields), address_of(fields) + fields.itemsize, loop.data
        table[:, 1] = address_of(starts) + np.arange(len(starts)) * starts.strides[0]
        return table


def _elements(
    calls: _Calls, ufunc: np.ufunc, args: Sequence[Any], *, out: Array, dtype: Any = None, casting: str = "same_kind"
) -> Iterator[_Table]:
    """A function of elements; `casting` says nothing where no element is converted."""
    arrays = [_operand(one, [*args, out]) for one in args]
    loop = loop_of(ufunc, [*(array.dtype for array in arrays), out.dtype])
    if loop is None or ufunc.nout != 1 or (dtype is not None and any(one.dtype != dtype for one in (*arrays, out))):
        raise _Unsupported
    _require_apart(out, arrays)
    views = [np.broadcast_to(array, out.shape) for array in arrays]
    for index in _parts(out.shape, range(out.ndim), _seconds(ufunc, views, out)):
        yield calls.rows(loop, [*(view[index] for view in views), out[index]], out[index])


def _operand(value: Any, others: Sequence[Any]) -> Array:
    """`value` as an array; a plain number has the type of the first array, where that can hold it."""
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    array = next(one for one in others if isinstance(one, np.ndarray))
    if not isinstance(value, int | float) or np.result_type(array, value) != array.dtype:
        raise _Unsupported
    return np.asarray(value, array.dtype)


def _reduction(
    calls: _Calls, ufunc: np.ufunc, x: Array, *, out: Array, axis: Any = 0, dtype: Any = None, keepdims: bool = False
) -> Iterator[_Table]:
    """Elements of `axis` joined one after another, in the order in which NumPy does it."""
    loop = loop_of(ufunc, [x.dtype] * 3)
    axes = {one % x.ndim for one in (axis if isinstance(axis, tuple) else (axis,))} if x.ndim else set()
    if loop is None or not keepdims or out.dtype != x.dtype or dtype not in (None, x.dtype) or not x.size:
        raise _Unsupported
    if not axes or (ufunc not in _SUMS and ufunc not in _EXTREMES):
        raise _Unsupported
    _require_apart(out, [x])
    first = x[(*(slice(1) if one in axes else slice(None) for one in range(x.ndim)), ...)]
    start = np.broadcast_to(np.asarray(ufunc.identity, x.dtype), out.shape) if ufunc in _SUMS else first
    kept = [one for one in range(x.ndim) if one not in axes]
    for index in _parts(x.shape, kept, _seconds(ufunc, [x], out)):
        part, total = x[index], out[index]
        totals = np.broadcast_to(total, part.shape)
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
    others = [one for one in range(x.ndim) if one != axis]
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
                calls.rows(loop, [total[one - 1], part[one], total[one]], total[one]) for one in range(1, len(part))
            ]
        table = np.concatenate(rows)
        if len(table) > _MOST_CALLS:
            raise _Unsupported
        yield table


def _conversion(calls: _Calls, target: Array, source: Any, *, casting: str = "same_kind") -> Iterator[_Table]:
    """A copy, or whether numbers are not 0."""
    source = np.asarray(source)
    if source.dtype == target.dtype:
        return _copies(calls, [(source, target)])
    if target.dtype != np.bool_ or casting != "unsafe":
        raise _Unsupported
    return _elements(calls, np.not_equal, (source, np.zeros((), source.dtype)), out=target)


def _copies(calls: _Calls, pairs: Sequence[tuple[Array, Array]]) -> Iterator[_Table]:
    """The first array of each pair copied to the second; what is too little for pieces in one of them."""
    small = [np.empty((0, 5), np.int64)]
    for source, target in pairs:
        _require_apart(target, [source])
        source = np.broadcast_to(source, target.shape)
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
        return np.empty((0, 5), np.int64)
    return calls.rows(loop, [source.view(word), target.view(word)], target)


def _seconds(ufunc: np.ufunc, views: Sequence[Array], out: Array) -> float:
    """About what it takes on one core."""
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
    axis = next((one for one in long if shape[one] >= count), max(long, key=lambda one: shape[one]))
    unit = _ALIGNED if axis == max(one for one, size in enumerate(shape) if size > 1) else 1
    units = -(-shape[axis] // unit)
    ends = [min(shape[axis], units * number // count * unit) for number in range(count)] + [shape[axis]]
    before = (slice(None),) * axis
    return [(*before, slice(*pair), ...) for pair in pairwise(ends) if pair[0] < pair[1]]


def _require_apart(out: Array, arrays: Sequence[Array]) -> None:
    """Raise _Unsupported where an element is written before another is read, but in its own place."""
    for array in arrays:
        is_same = array.shape == out.shape and array.strides == out.strides and address_of(array) == address_of(out)
        if is_same or not np.may_share_memory(array, out):
            continue
        try:
            if np.shares_memory(array, out, max_work=_MOST_WORK):  # type: ignore[arg-type]  # NumPy takes any number
                raise _Unsupported
        except np.exceptions.TooHardError:
            raise _Unsupported from None
