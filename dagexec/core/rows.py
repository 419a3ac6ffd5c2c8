"""Rows: which axis of a tensor is the batch, and how an operator passes it on (`OpSchema.rows`).

A row is what belongs to one example: a slice along the batch axis. An operator's rows are independent when each row
of its outputs follows from the same row of its inputs alone. Its rule says on which axes of the outputs they are, or
refuses. `dagexec.core.row_axes` follows them through a net.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.rows_call import RowsCall, RowsRule
from dagexec.core.schema import OperatorCall
from dagexec.core.traits import OF_ALL_ROWS, Rows

Array = npt.NDArray[Any]

AxesReader = Callable[[OperatorCall], Collection[int]]


def elementwise(asked: RowsCall) -> list[Rows | None]:
    """Each element from those in its place; shapes broadcast by NumPy's rule, or with `broadcast=1` to that of A."""
    asked.require_uncounted()
    shape = asked.outputs[0].shape
    keeps_first = "broadcast" in asked.call.arguments and asked.call.arguments.bool("broadcast")
    found: dict[int, Rows] = {}
    for index, rows in enumerate(asked.rows):
        if rows is None:
            continue
        own = asked.call.inputs[index].shape
        if keeps_first and index > 0 and own != shape:
            raise asked.refuse(f"input {asked.call.definition.input[index]!r} has rows and is matched to a run of axes")
        found[index] = rows.at(rows.axis + len(shape) - len(own))
    return asked.all_outputs(asked.common(found))


def along_axis(axis: int, *inputs: int) -> RowsRule:
    """Every output has the rows of `inputs` (default: input 0), which must be on `axis`; others are shared."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        rows = asked.only(*(inputs or (0,)))
        if rows.axis != axis:
            raise asked.mixes(rows.axis)
        return asked.all_outputs(rows)

    return rule


first_axis = along_axis(0)


def across(reason: str) -> RowsRule:
    """The rule of an operator that takes all rows together, as `reason` says."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        raise asked.refuse(reason)

    return rule


def apart_from(axes: AxesReader, *inputs: int) -> RowsRule:
    """Everything is computed along `axes(call)`, which the rows of `inputs` (default: input 0) must not be on."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        rows = asked.only(*(inputs or (0,)))
        if rows.axis in {axis % asked.rank(0) for axis in axes(asked.call)}:
            raise asked.mixes(rows.axis)
        return asked.all_outputs(rows)

    return rule


def before_axis(first: Callable[[OperatorCall], int], *inputs: int) -> RowsRule:
    """Outputs have the axes before `first(call)` of `inputs` (default: input 0), on one of which rows must be."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        rows = asked.only(*(inputs or (0,)))
        if rows.axis >= first(asked.call):
            raise asked.mixes(rows.axis)
        return asked.all_outputs(rows)

    return rule


def reduced(axes: Callable[[OperatorCall], tuple[Collection[int], bool]]) -> RowsRule:
    """Axes of input 0 are reduced; `axes(call)` are those, and whether they stay with size 1."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        rows = asked.only(0)
        gone, keep = axes(asked.call)
        if rows.axis in gone:
            raise asked.mixes(rows.axis)
        return asked.all_outputs(rows.at(rows.axis - (0 if keep else sum(axis < rows.axis for axis in gone))))

    return rule


def summing(rule: RowsRule, axes: AxesReader) -> RowsRule:
    """`rule`, of an operator that sums input 0 along `axes(call)`: see `require_side_by_side`."""

    def checked(asked: RowsCall) -> list[Rows | None]:
        require_side_by_side(asked, 0, axes(asked.call))
        return list(rule(asked))

    return checked


def require_side_by_side(asked: RowsCall, index: int, axes: Collection[int]) -> None:
    """Raise RowsError if only rows are behind an axis of input `index` that is summed over, one number of each.

    A lone example is a run of numbers there, which NumPy and oneDNN sum pairwise or in vectors; several are runs side
    by side, which are added one number of each after the other.
    """
    rows, shape = asked.rows[index], asked.call.inputs[index].shape
    if rows is None:
        return
    summed = {axis % len(shape) for axis in axes}
    for axis in summed:
        behind = [size for place, size in enumerate(shape) if place > axis and place not in summed | {rows.axis}]
        if axis < rows.axis and rows.size(1) * math.prod(behind) == 1:
            raise asked.refuse(f"sums along axis {axis}, in another order where only one number is behind it")


def gradients(rule: RowsRule, names: Callable[[OperatorCall], Sequence[str]], own: str) -> RowsRule:
    """Outputs are gradients of what `names(call)` says: that of `own` has rows as `rule` says, others sum over all."""

    def all_of_them(asked: RowsCall) -> list[Rows | None]:
        found = rule(asked)
        return [rows if name == own else OF_ALL_ROWS for rows, name in zip(found, names(asked.call), strict=True)]

    return all_of_them


def gradient_and_sums(rule: RowsRule) -> RowsRule:
    """Output 0 is a gradient with rows as `rule` says; the others are sums over all."""
    return lambda asked: [rule(asked)[0], *[OF_ALL_ROWS] * (len(asked.outputs) - 1)]


def permuted(axes: Callable[[OperatorCall], Sequence[int]]) -> RowsRule:
    """Axis i of the output is axis `axes(call)[i]` of input 0."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        rows = asked.only(0)
        return asked.all_outputs(rows.at(list(axes(asked.call)).index(rows.axis)))

    return rule


def reshaped(asked: RowsCall) -> list[Rows | None]:
    """The elements of input 0 in their order, under another shape; further outputs do not depend on the rows.

    The elements are seen as before x N x after. An output axis holds the rows if it begins at or before the place where
    N begins in that, and ends at or behind the place where N ends.
    """
    rows = asked.rows[0]
    if rows is None:
        raise asked.without_rows()
    shape = asked.call.inputs[0].shape
    before = math.prod(shape[: rows.axis]) * rows.before
    after = math.prod(shape[rows.axis + 1 :]) * rows.each
    target = asked.outputs[0].shape
    for axis in asked.growing[0]:
        outer, inner = math.prod(target[:axis]), math.prod(target[axis + 1 :])
        if outer and inner and before % outer == 0 and after % inner == 0:
            found = Rows(axis, after // inner, before // outer)
            return [found, *[None] * (len(asked.outputs) - 1)]
    raise asked.refuse(f"takes the rows apart: {shape} with rows on axis {rows.axis} becomes {target}")


def joined(axis: AxesReader) -> RowsRule:
    """Inputs are joined along `axis(call)`, which is that of the output; all or none of them have rows."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        if None in asked.rows:
            raise asked.refuse("joins what has rows with what all rows share")
        rows = asked.only(*range(len(asked.rows)))
        [at] = axis(asked.call)
        if len(asked.outputs[0].shape) > asked.rank(0):
            rows = rows.at(rows.axis + (at <= rows.axis))
        elif rows.axis == at:
            raise asked.mixes(at)
        return [rows, *[None] * (len(asked.outputs) - 1)]

    return rule


def matrix_product(asked: RowsCall) -> list[Rows | None]:
    """Products of stacks of matrices, as `numpy.matmul` and arguments `trans_a` and `trans_b` have them.

    Rows are on an axis of the stacks, or they are those of A's matrices where B is a single one: engines compute such
    rows alike in any batch, but neither columns of B nor rows of A where each matrix of a stack has another B.
    """
    asked.require_uncounted()
    rank = len(asked.outputs[0].shape)
    turned, found = asked.call.arguments.bool("trans_a"), {}
    for index, rows in enumerate(asked.rows):
        if rows is None:
            continue
        own = asked.rank(index)
        from_end = own - rows.axis
        if from_end <= 2:
            kept = 1 if turned and own == 2 else 2
            if index > 0 or own < 2 or asked.rank(1) != 2 or from_end != kept or (turned and own > 2):
                raise asked.mixes(rows.axis)
            from_end = 2
        elif rank < max(map(asked.rank, (0, 1))):
            from_end -= 1  # the other operand is a vector, whose axis the output does not have
        found[index] = rows.at(rank - from_end)
    return asked.all_outputs(asked.common(found))


def made_from_sizes(asked: RowsCall) -> list[Rows | None]:
    """All elements of an output are equal, whatever input 0 holds: rows are on the axis that grows."""
    return [_growing(asked, index) for index in range(len(asked.outputs))]


def stretched(asked: RowsCall) -> list[Rows | None]:
    """Input 0 is broadcast to a shape: it has rows, or they are on the axis that grows."""
    asked.require_uncounted(1)
    rows = asked.rows[0]
    if rows is None:
        return [_growing(asked, 0)]
    return [rows.at(rows.axis + len(asked.outputs[0].shape) - asked.rank(0))]


def _growing(asked: RowsCall, output: int) -> Rows | None:
    axes = asked.growing[output]
    if len(axes) > 1:
        raise asked.refuse(f"axes {sorted(axes)} of output {output} all depend on the number of rows")
    for axis in axes:
        return Rows(axis, asked.outputs[output].shape[axis] // asked.examples)
    return None


def images(first_operand: Callable[[OperatorCall], int]) -> RowsRule:
    """Images on axis 0 of input 0 and of the operands of post-ops, from that number of input on."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        operands = range(first_operand(asked.call), len(asked.rows))
        rows = asked.only(0, *operands)
        if rows.axis != 0:
            raise asked.mixes(rows.axis)
        for index in operands:
            if asked.rows[index] is not None and asked.rank(index) != len(asked.outputs[0].shape):
                raise asked.mixes(len(asked.outputs[0].shape) - asked.rank(index))
        return asked.all_outputs(rows)

    return rule


image_rows = images(lambda _call: 3)
"""Images on axis 0 of input 0 and of the operands of post-ops, which are behind filter and bias."""


def keeps_axes(asked: RowsCall) -> list[Rows | None]:
    """Each element from that in its place of input 0, and from others that all rows share."""
    return asked.all_outputs(asked.only(0))


def own_places(asked: RowsCall, rows: Rows, places: Sequence[Array], shared: Sequence[Array] = ()) -> Rows:
    """The axis of `places` on which examples name entries of their own on the axis of `rows`.

    So masks are read that number their rows, as `mask[row, word]`. `places`, and `shared`, which must be the same for
    each example, are what they are for each of the numbers of examples. Raises RowsError where examples name others'.
    """
    for axis in range(places[0].ndim):
        own = [_of_examples(one, axis, number, rows.each) for one, number in zip(places, asked.numbers, strict=True)]
        others = [_of_examples(one, axis, number, 0) for one, number in zip(shared, asked.numbers, strict=False)]
        inside = all(one is not None and ((one >= 0) & (one < rows.each)).all() for one in own)
        if inside and rows.before == 1 and own[0] is not None and _are_alike(own) and _are_alike(others):
            return Rows(axis, own[0].shape[axis + 1])
    raise asked.mixes(rows.axis)


def _of_examples(array: Array, axis: int, number: int, each: int) -> Array | None:
    """`array` less `each` for every example before, with the examples, neighbors on `axis`, on a first axis.

    None where they do not divide it.
    """
    if array.shape[axis] % number:
        return None
    split = array.reshape(*array.shape[:axis], number, -1, *array.shape[axis + 1 :])
    before: Array = np.arange(number).reshape(-1, *[1] * (split.ndim - 1)) * each
    return np.moveaxis(split, axis, 0) - before


def _are_alike(arrays: Sequence[Array | None]) -> bool:
    """True when all examples of all arrays are known and the same."""
    known = [array for array in arrays if array is not None]
    alike = all(np.array_equal(example, known[0][0]) for array in known for example in array)
    return alike and len(known) == len(arrays)


def gathered(axis: Callable[[OperatorCall], int]) -> RowsRule:
    """Slices of input 0 along `axis(call)`, whose place the axes of the indices, input 1, take."""

    def rule(asked: RowsCall) -> list[Rows | None]:
        own = asked.rows[0]
        if own is not None and 1 in asked.counted and own.axis == axis(asked.call):
            found = own_places(asked, own, asked.known_contents(1))
            return asked.all_outputs(found.at(found.axis + own.axis))
        rows, at = asked.only(*((0,) if asked.rows[0] is not None else (1,))), axis(asked.call)
        if asked.rows[0] is None:
            return asked.all_outputs(rows.at(rows.axis + at))
        if rows.axis == at:
            raise asked.mixes(at)
        return asked.all_outputs(rows.at(rows.axis + (asked.rank(1) - 1 if rows.axis > at else 0)))

    return rule


def fully_connected(asked: RowsCall) -> list[Rows | None]:
    """Rows on an axis of X before `axis`, and on the same of the operands of post-ops (inputs 3 and up)."""
    rows = asked.only(0, *range(3, len(asked.rows)))
    rank = len(asked.outputs[0].shape)
    if rows.axis >= rank - 1:
        raise asked.mixes(rows.axis)
    for index in range(3, len(asked.rows)):
        if asked.rows[index] is not None and asked.rank(index) != rank:
            raise asked.mixes(rank - asked.rank(index))
    return asked.all_outputs(rows)


def folded_product(asked: RowsCall) -> list[Rows | None]:
    """A product of two matrices: rows are the first axis of A, or of what is added, and A is not transposed."""
    rows = asked.only(0, 2)
    arguments = asked.call.arguments
    if asked.rows[0] is None or rows.axis != 0 or arguments.bool("trans_a") or len(asked.outputs[0].shape) != 2:
        raise asked.mixes(rows.axis)
    shape = asked.call.inputs[0].shape
    return asked.all_outputs(Rows(0, rows.each * (asked.outputs[0].shape[0] // max(1, shape[0])), rows.before))
