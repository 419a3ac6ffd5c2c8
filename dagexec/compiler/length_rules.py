"""How operators pass on positions of a text: rules beside those of rows, for `dagexec.compiler.lengths`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from dagexec.compiler.length_contents import Array
from dagexec.compiler.positions import FIXED, LENGTH, Integers, Positions, joined, result_of
from dagexec.core.dtypes import from_numpy
from dagexec.core.inference import Probed
from dagexec.core.inferred_types import output_types
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.shape_values import results_of
from dagexec.core.traits import Rows
from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass

LEAST = 16
"""Positions that there are at least."""

_MOST_NUMBERS = 1 << 16
"""Of contents that are followed."""

_LINEAR = frozenset(("Gather", "Slice", "Reshape", "Cast", "ExpandDims", "Squeeze", "Transpose", "Copy"))
"""Operators that take each number of input 0 somewhere."""


class NotSizedError(Exception):
    """A net has no net for any length; the message says why."""


@dataclass(frozen=True)
class Known:
    """What is known of a blob.

    Attributes:
        probed: types, and contents where they follow from the types.
        rows: its axes that are as long as the length, or a multiple; what is at their first positions is right.
        is_counted: it depends on the length otherwise.
        positions: its numbers, where they follow from the length alone.
    """

    probed: Probed
    rows: tuple[Rows, ...] = ()
    is_counted: bool = False
    positions: Positions | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """With the first of the lengths."""
        return first_type(self.probed).shape

    @property
    def has_contents(self) -> bool:
        """What it holds is known at each of the lengths."""
        return all(content is not None for content in self.probed.contents)

    @property
    def axes(self) -> dict[int, Rows]:
        """`rows`, by axis."""
        return {one.axis: one for one in self.rows}


def first_type(probed: Probed) -> TensorType:
    """The type with the first of the lengths."""
    kind = probed.types[0]
    assert kind is not None, "types of unknown blobs are refused"
    return kind


def numbers(array: Array | None) -> Positions | None:
    """Numbers that are always the same, where they are few."""
    if array is None or array.dtype.kind not in "iub" or array.size > _MOST_NUMBERS:
        return None
    return Positions.of(np.asarray(array))


def growing_axes(probed: Probed) -> tuple[int, ...]:
    """The axes of several sizes. Raises NotSizedError for one with several numbers of axes."""
    shapes = [kind.shape for kind in probed.types if kind is not None]
    if len(set(map(len, shapes))) > 1:
        raise NotSizedError("how many axes there are depends on the length")
    return tuple(axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)


def linear(node: Node, inputs: Sequence[Known]) -> Positions | None:
    """The numbers that an operator makes of numbers that follow from the length, without axes as long as it."""
    all_positions = [one.positions for one in inputs]
    if None in all_positions:
        return None
    if node.type == "Concat" and not node.arguments(node.type).bool("add_axis"):
        axis = node.arguments(node.type).int("axis", 1) % len(inputs[0].shape)
        return joined([one for one in all_positions if one is not None], axis)
    if node.type in _LINEAR and all(one is not None and one.is_fixed for one in all_positions[1:]):
        return moved_positions(node, inputs[0], {}, [one.terms[FIXED] for one in all_positions[1:] if one is not None])
    return result_of(node, all_positions)


def moved_positions(
    node: Node, source: Known, moved: Mapping[int, int], others: Sequence[Array] = ()
) -> Positions | None:
    """What an operator that takes numbers somewhere makes of those of input 0; where its axes go, in `moved`."""
    if node.type not in _LINEAR or source.positions is None or len(others) < len(node.input) - 1:
        return None
    terms = {key: _result(node, [term, *others]) for key, term in source.positions.terms.items()}
    if any(term is None for term in terms.values()):
        return None
    return Positions({moved.get(key, key): term for key, term in terms.items() if term is not None})


def _result(node: Node, arrays: Sequence[Array]) -> Integers | None:
    """What an operator of one output makes of these inputs; None where it refuses them."""
    types = tuple(TensorType(array.shape, from_numpy(array.dtype)) for array in arrays)
    call, schema = OperatorCall(node, node.arguments(node.type), types, tuple(arrays), node.type), schema_of(node.type)
    try:
        results = results_of(call, schema, output_types(call, schema))
    except DagexecError:
        return None
    return None if results is None else np.asarray(results[0], np.int64)


def viewed(node: Node, source: Known, output: Probed) -> Known:
    """A view or a permutation of what has positions on several axes."""
    shape, kind = source.shape, first_type(output)
    growing = growing_axes(output)
    moved: dict[int, int] = {}
    order = tuple(node.arguments(node.type).ints("axes")) or tuple(range(len(shape)))[::-1]
    for axis, rows in source.axes.items():
        if node.type == "Transpose":
            moved[axis] = [place % len(shape) for place in order].index(axis)
            continue
        if rows != Rows(axis):
            raise NotSizedError(f"{node.type} mixes positions with others")
        before = math.prod(shape[:axis])
        places = [place for place in growing if math.prod(kind.shape[:place]) == before]
        if len(places) != 1:
            raise NotSizedError(f"{node.type} mixes positions with others")
        moved[axis] = places[0]
    kept = tuple(rows.at(moved[axis]) for axis, rows in source.axes.items())
    return Known(output, kept, positions=moved_positions(node, source, moved))


def _ranged(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """Range, from a number that is always the same."""
    start, step = inputs[0].positions, inputs[-1].positions
    if len(inputs) != 3 or start is None or step is None or not (start.is_fixed and step.is_fixed):
        return None
    terms = {FIXED: start.terms[FIXED].reshape(1), 0: step.terms[FIXED].reshape(1)}
    return Known(output, (Rows(0),), positions=Positions(terms))


def _filled(_node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """One number everywhere."""
    return None if any(one.rows for one in inputs) else Known(output, tuple(map(Rows, growing_axes(output))))


def _stretched(_node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """Expand: along axes of one element, or along positions that there are."""
    source, growing = inputs[0], growing_axes(output)
    if source.is_counted:
        return None
    behind = len(first_type(output).shape) - len(source.shape)
    axes = {axis + behind: rows.at(axis + behind) for axis, rows in source.axes.items()}
    if any(axis >= behind and axis not in axes and source.shape[axis - behind] != 1 for axis in growing):
        return None
    positions = source.positions
    if positions is not None:
        shape = tuple(1 if axis in growing else size for axis, size in enumerate(first_type(output).shape))
        positions = positions.changed(lambda term: np.broadcast_to(term, shape), lambda axis: axis + behind)
    return Known(output, tuple(axes.get(axis, Rows(axis)) for axis in growing), positions=positions)


def _cut(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """Slice: the first of what is always the same, or all positions."""
    if len(inputs) < 3:
        return None
    source, starts = inputs[0], inputs[1].positions
    steps = inputs[4].positions if len(inputs) > 4 else None
    told = node.arguments(node.type).ints("steps")
    is_plain = starts is not None and starts.is_fixed and not starts.terms[FIXED].any()
    is_plain &= set(told) <= {1} and (len(inputs) < 5 or (steps is not None and steps.is_fixed and
                                                          bool((steps.terms[FIXED] == 1).all())))  # fmt: skip
    if not is_plain or source.is_counted or not inputs[2].is_counted:
        return None
    growing = growing_axes(output)
    if not set(source.axes) <= set(growing):
        return None
    return Known(output, tuple(source.axes.get(axis, Rows(axis)) for axis in growing))


def _summed(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """CumSum: what comes before."""
    arguments = node.arguments(node.type)
    if arguments.bool("reverse") or inputs[0].is_counted or any(one.rows or one.is_counted for one in inputs[1:]):
        return None
    return Known(output, inputs[0].rows) if all(one == Rows(one.axis) for one in inputs[0].rows) else None


def _triangle(_node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """Trilu: each element stays or is cleared for its place."""
    if inputs[0].is_counted or any(one.rows or one.is_counted for one in inputs[1:]):
        return None
    return Known(output, inputs[0].rows) if all(one == Rows(one.axis) for one in inputs[0].rows) else None


def _gathered(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """Gather: at indices of positions, which lead to positions."""
    data, indices = inputs
    axis = node.arguments(node.type).int("axis", 0) % len(data.shape)
    if data.is_counted:
        return None
    axes = {one.axis + axis: one.at(one.axis + axis) for one in indices.rows}
    behind = len(indices.shape) - 1
    for one in data.rows:
        if one.axis != axis:
            place = one.axis + (behind if one.axis > axis else 0)
            axes[place] = one.at(place)
        elif not _leads_to_positions(indices.positions, one):
            return None
    if indices.is_counted and axis not in data.axes:
        return None
    return Known(output, tuple(axes.values()))


def _leads_to_positions(indices: Positions | None, rows: Rows) -> bool:
    """Indices lead, where they are of a position, to that, or to one that always is there."""
    if indices is None or rows.each != 1:
        return False
    fixed, lengths, axes = indices.terms[FIXED], indices.term(LENGTH), indices.axes
    if not axes:
        return rows.before == 1 and not lengths.any() and bool(((fixed >= 0) & (fixed < LEAST)).all())
    blocks = bool(((lengths >= 0) & (lengths < rows.before)).all())
    return len(axes) == 1 and not fixed.any() and blocks and bool((indices.term(axes[0]) == 1).all())


def _picked(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """GatherND: each number of an index leads to a position, or to what is always there."""
    data, indices = inputs
    last, positions = len(indices.shape) - 1, indices.positions
    if data.is_counted or last in indices.axes or node.arguments(node.type).int("batch_dims", 0):
        return None
    if indices.is_counted and positions is None:
        return None
    count = indices.shape[last]
    for number in range(count):
        part = None if positions is None else positions.changed(partial(_of_last, number=number))
        rows = data.axes.get(number)
        if rows is not None and (rows != Rows(number) or not _leads_to_positions(part, rows)):
            return None
        if rows is None and indices.is_counted and (part is None or part.is_of_length):
            return None
    kept = {one.axis - count + last: one.at(one.axis - count + last) for one in data.rows if one.axis >= count}
    return Known(output, (*indices.rows, *kept.values()))


def _of_last(term: Integers, number: int) -> Integers:
    """One number of the last axis."""
    return term[..., number]


def _picked_along(_node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """GatherElements: from what is always the same."""
    data, indices = inputs
    return None if data.rows or data.is_counted or indices.is_counted else Known(output, indices.rows)


def _beside(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """Concat along an axis that is not as long, or of something with nothing."""
    arguments = node.arguments(node.type)
    if arguments.bool("add_axis") or any(one.is_counted and one.positions is None for one in inputs):
        return None
    axis = arguments.int("axis", 1) % len(inputs[0].shape)
    inputs = [one for one in inputs if 0 not in one.shape] or inputs
    every = {frozenset(one.rows) for one in inputs}
    if len(inputs) == 1:
        return Known(output, inputs[0].rows, inputs[0].is_counted, inputs[0].positions)
    if len(every) != 1 or axis in inputs[0].axes:
        return None
    all_positions = [one.positions for one in inputs if one.positions is not None]
    positions = joined(all_positions, axis) if len(all_positions) == len(inputs) else None
    return Known(output, inputs[0].rows, any(one.is_counted for one in inputs), positions)


def _multiplied(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """BatchMatMul: rows of the first matrix, and columns of the second."""
    arguments, rank = node.arguments(node.type), len(first_type(output).shape)
    if any(one.is_counted for one in inputs):
        return None
    axes: dict[int, Rows] = {}
    for one, turned, kept in ((inputs[0], "trans_a", 2), (inputs[1], "trans_b", 1)):
        own = 3 - kept if arguments.bool(turned) else kept  # from the end
        for axis, rows in one.axes.items():
            if len(one.shape) < 2 or axis != len(one.shape) - own or rows != Rows(axis):
                return None
            place = rank - kept
            axes[place] = Rows(place)
    return Known(output, tuple(axes.values()))


def _pooled(node: Node, inputs: Sequence[Known], output: Probed) -> Known | None:
    """Pooling: each channel of each image alone."""
    if node.arguments(node.type).string("order", "NCHW") != "NCHW" or any(axis > 1 for axis in inputs[0].axes):
        return None
    return Known(output, inputs[0].rows)


OWN_RULES: Mapping[str, Callable[[Node, Sequence[Known], Probed], Known | None]] = {
    "Range": _ranged, "ConstantFill": _filled, "Expand": _stretched, "Slice": _cut, "CumSum": _summed,
    "Trilu": _triangle, "Gather": _gathered, "GatherND": _picked, "GatherElements": _picked_along, "Concat": _beside,
    "BatchMatMul": _multiplied, "AveragePool": _pooled, "MaxPool": _pooled,
}  # fmt: skip
