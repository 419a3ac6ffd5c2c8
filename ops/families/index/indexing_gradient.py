"""Gradients of the operators that pick by index: sparse for Gather, else sums at the places that were picked.

Values are added up one after another, in the order of the indices, so that a place picked twice gets the same bytes in
every run. Indices are checked by every run, before anything is written.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, SparseGradient, gradient_of, no_gradient
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator, operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.families.index.indexing import GATHER_ARGS, check_indices, picked_shape, picks_nothing, wraps
from dagexec.ops.families.shape.reshaping import View, copy_cost, no_cost


def adding_at(
    owner: Operator,
    indices: Array,
    values: Array,
    result: Array,
    axis: int,
    *,
    wrap: bool = False,
    matched: bool = False,
) -> Step:
    """The step result = 0, then result[..., indices[i], ...] += values[..., i, ...] along `axis` for every i.

    `indices` is a vector; with `matched`, as many for each place of the axes before `axis`. With `wrap` negative ones
    count from the end. 16-bit floats are summed in float32.
    """
    size, label = result.shape[axis], owner.label
    outer, inner = math.prod(result.shape[:axis]), math.prod(result.shape[axis + 1 :])
    total = owner.scratch(result.shape, compute_dtype(result.dtype)) if is_narrow(result.dtype) else result
    check = partial(check_indices, indices, -size if wrap else 0, size, label)
    steps: list[Step] = [check, partial(total.fill, 0)]
    if values.size:
        rows = owner.scratch((len(indices),), np.int64)
        steps.append(partial(np.multiply, indices, inner, out=rows, dtype=np.int64))
        if wrap:
            steps.append(partial(np.remainder, rows, size * inner, out=rows))
        picks = rows.reshape(outer, -1, 1) if matched else rows.reshape(1, -1, 1)
        places = owner.scratch((outer, picks.shape[1], inner), np.int64)
        corners = (np.arange(outer) * (size * inner))[:, None, None] + np.arange(inner)
        steps.append(partial(np.add, corners, picks, out=places))
        weights = values
        if total is not result:
            weights = owner.scratch(values.shape, total.dtype)
            steps.append(convert(values, weights))
        steps.append(partial(np.add.at, total.reshape(-1), places.reshape(-1), weights.reshape(-1)))
    return in_sequence(steps if total is result else [*steps, convert(total, result)])


def _infer_sparse_to_dense(call: OperatorCall) -> list[TensorType]:
    """As many rows as the third input has, of the shape of a row of the values."""
    (count,) = call.require_rank(0, 1)
    call.require_types(0, INT32, INT64)
    meta = call.require_types(1, *NUMBER_TYPES)
    values, like = call.inputs[1].shape, call.inputs[2].shape
    if not values or values[0] != count:
        raise call.fail(f"the values must have a row for each of {count} indices, found shape {values}")
    if not like:
        raise call.fail("the third input must have at least 1 axis")
    return [TensorType((like[0], *values[1:]), meta)]


@new_operator(
    "SparseToDense",
    infer=_infer_sparse_to_dense,
    doc="Zeros, with row i of the values added to row indices[i]; an index may occur more than once. The output "
    "has as many rows as the third input, whose values are not read.",
    input_names=("indices", "values", "data_to_infer_dim"),
    output_names=("output",),
)
class SparseToDense(Operator):
    """Rows added up by index."""

    def prepare(self) -> Step:
        return adding_at(self, self.x(0), self.x(1), self.y(0), 0)


@gradient_of("SparseToDense")
def sparse_to_dense_gradient(request: GradientRequest) -> GradientOperators:
    """The gradient of the values is that of the rows they went to."""
    if 1 not in request.wanted:
        return request.result([], {})
    return request.single("Gather", [request.dy(0), request.x(0)], [1])


def gathered_axis(call: OperatorCall) -> int:
    """The axis that was picked along: argument `axis`, by default the first, or of a batch the second.

    Raises ShapeError for an axis that the data has not.
    """
    batch, rank = call.definition.type.startswith("Batch"), len(call.inputs[0].shape)
    if batch and rank < 2:
        raise call.fail("the data must have at least 2 axes, the first of them the batch")
    return call.axis("axis", 1 if batch else 0, rank)


def _infer_gather(call: OperatorCall) -> list[TensorType]:
    """The type of the data; dY must be what the forward operator gives."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 2)
    call.require_types(1, INT32, INT64)
    call.require_shape(2, picked_shape(call, gathered_axis(call)), "dY: what picking from the data gives")
    return [call.inputs[0]]


class GatheringGradient(Operator):
    """Each slice of the data gets the sum of dY over the places that show it. The values of the data are not read."""

    def prepare(self) -> Step:
        call, result = self.call(), self.y(0)
        axis = gathered_axis(call)
        if picks_nothing(call, result.shape[axis]):
            return nothing_to_do
        wrap, matched = wraps(call, axis), call.arguments.bool("match_outer")
        return adding_at(self, self.x(1).reshape(-1), self.x(2), result, axis, wrap=wrap, matched=matched)


for _name, _default in (("GatherGradient", 0), ("BatchGatherGradient", 1)):
    operator(
        OpSchema(
            _name,
            infer=_infer_gather,
            doc=f"The dense gradient of {_name.removesuffix('Gradient')}: for each slice of DATA the sum of dY over "
            "the indices that picked it.",
            input_names=("DATA", "INDICES", "dY"),
            output_names=("dDATA",),
            args=GATHER_ARGS | {"axis": f"the axis of DATA that was picked along (default {_default})"},
        )
    )(type(_name, (GatheringGradient,), {"__doc__": GatheringGradient.__doc__}))


def infer_index_rows(call: OperatorCall) -> list[TensorType]:
    """A row for each index: the axes of the indices, which the values begin with, become one.

    Of a table without rows nothing is picked, whatever the indices are, as in Caffe2.
    """
    values, indices = call.inputs[0], call.inputs[1].shape
    if values.shape[:1] == (0,):
        return [values]
    if values.shape[: len(indices)] != indices:
        raise call.fail(f"the values must begin with the axes {indices} of the indices, found shape {values.shape}")
    return [TensorType((math.prod(indices), *values.shape[len(indices) :]), values.meta)]


@new_operator(
    "IndexRows",
    infer=infer_index_rows,
    doc="The values, which begin with the axes of the indices, with one axis in their place: a row an index. "
    "(dagexec's own, for the sparse gradient of a Gather with indices of several axes.)",
    input_names=("values", "indices"),
    output_names=("rows",),
    cost=no_cost,
    view=True,
)
class IndexRows(View):
    """Leading axes folded into one."""


@gradient_of("IndexRows")
def index_rows_gradient(request: GradientRequest) -> GradientOperators:
    """dX = dY in the shape of the values."""
    if 0 not in request.wanted:
        return request.result([], {})
    return request.single("ResizeLike", [request.dy(0), request.x(0)], [0])


@gradient_of("Gather")
def gather_gradient(request: GradientRequest) -> GradientOperators:
    """A sparse gradient: the indices as a vector, and dY with a row for each.

    Dense where argument `dense_gradient` asks for it, and where indices do not count rows from the first on.
    """
    if 0 not in request.wanted:
        return request.result([], {})
    dense = request.dx(0)
    arguments = request.arguments
    if arguments.int("axis", 0) != 0 or arguments.bool("wrap_indices") or arguments.bool("match_outer"):
        return request.single("GatherGradient", [request.x(0), request.x(1), request.dy(0)], [0])
    sparse = SparseGradient(f"{dense}_indices", f"{dense}_values")
    operators = [
        request.plain_operator("FlattenToVec", [request.x(1)], [sparse.indices]),
        request.plain_operator("IndexRows", [request.dy(0), request.x(1)], [sparse.values]),
    ]
    if not request.arguments.bool("dense_gradient"):
        return request.result(operators, {0: sparse})
    inputs = [sparse.indices, sparse.values, request.x(0)]
    return request.result([*operators, request.plain_operator("SparseToDense", inputs, [dense])], {0: dense})


@gradient_of("BatchGather")
def batch_gather_gradient(request: GradientRequest) -> GradientOperators:
    """(DATA, INDICES, dY) -> dDATA, as Caffe2's."""
    if 0 not in request.wanted:
        return request.result([], {})
    return request.single("BatchGatherGradient", [request.x(0), request.x(1), request.dy(0)], [0])


def _infer_topk(call: OperatorCall) -> list[TensorType]:
    """The type of X; values and indices have its shape with k in place of the axis."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(0, 2)
    call.require_types(1, INT64)
    shape = call.inputs[2].shape
    axis = call.axis("axis", -1, len(shape))
    given = call.inputs[0].shape
    k = given[axis] if len(given) == len(shape) else -1
    if not 0 <= k <= shape[axis]:
        raise call.fail(f"dValues must have X's shape {shape} with 0 to {shape[axis]} on axis {axis}, found {given}")
    kept = (*shape[:axis], k, *shape[axis + 1 :])
    call.require_shape(0, kept, "dValues: X's, with k in place of the axis")
    call.require_shape(1, kept, "Indices: the shape of dValues")
    return [call.inputs[2]]


@new_operator(
    "TopKGradient",
    infer=_infer_topk,
    doc="Gradient of TopK: dX = dValues where the values were found, 0 elsewhere. The values of X are not read.",
    input_names=("dValues", "Indices", "X"),
    output_names=("dX",),
    args={"k": "as of TopK; not read", "axis": "along which axis (default -1)", "largest": "as of TopK; not read"},
    cost=copy_cost,
)
class TopKGradient(Operator):
    """dValues among zeros."""

    def prepare(self) -> Step:
        """The places from the indices, and one write at them; no place occurs twice."""
        values, indices, dx = self.x(0), self.x(1), self.y(0)
        axis = self.call().axis("axis", -1, dx.ndim)
        outer, inner, size = math.prod(dx.shape[:axis]), math.prod(dx.shape[axis + 1 :]), dx.shape[axis]
        steps: list[Step] = [partial(check_indices, indices, 0, size, self.label), partial(dx.fill, 0)]
        if values.size:
            places = self.scratch((outer, indices.shape[axis], inner), np.int64)
            corners = (np.arange(outer) * (size * inner))[:, None, None] + np.arange(inner)
            steps += [
                partial(np.multiply, indices.reshape(places.shape), inner, out=places),
                partial(np.add, places, corners, out=places),
                partial(np.put, dx.reshape(-1), places.reshape(-1), values.reshape(-1)),
            ]
        return in_sequence(steps)


@gradient_of("TopK")
def topk_gradient(request: GradientRequest) -> GradientOperators:
    """(dValues, Indices, X) -> dX, as Caffe2's; indices have no gradient."""
    if 0 not in request.wanted or not request.has_dy(0):
        return request.result([], {})
    return request.single("TopKGradient", [request.dy(0), request.y(1), request.x(0)], [0])


no_gradient("OneHot")
