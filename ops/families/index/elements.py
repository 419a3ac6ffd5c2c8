"""GatherElements and ScatterElements: elements picked from, or put to, places that indices name along an axis."""

from __future__ import annotations

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.core.traits import Rows
from dagexec.errors import GradientError
from dagexec.ops.families.index.places import element_places, picking, place_memory
from dagexec.ops.families.index.scattering import REDUCTION_HELP, Scattering, reduction_of
from dagexec.ops.families.shape.reshaping import copy_cost

AXIS_HELP = "the axis that indices count along; negative counts from the end (default 0)"


def indexed_axis(call: OperatorCall) -> int:
    """The axis. Raises ShapeError unless the indices have DATA's axes, none longer but the one they count along."""
    data, indices = call.inputs[0].shape, call.inputs[1].shape
    call.require_types(1, INT32, INT64)
    axis = call.axis("axis", 0, len(data))
    same_rank = len(data) == len(indices)
    if not same_rank or any(i > d for other, (i, d) in enumerate(zip(indices, data, strict=True)) if other != axis):
        raise call.fail(f"the indices must have the axes of DATA, at most of the sizes {data} but for axis {axis}")
    return axis


def infer_gather_elements(call: OperatorCall) -> list[TensorType]:
    """An element of DATA for each index."""
    indexed_axis(call)
    return [TensorType(call.inputs[1].shape, call.inputs[0].meta)]


def _picked_rows(asked: RowsCall) -> list[Rows | None]:
    """On one axis of DATA and INDICES, which indices do not count along."""
    rows = asked.only(0, 1)
    if rows.axis == indexed_axis(asked.call):
        raise asked.mixes(rows.axis)
    if None in asked.rows:
        raise asked.refuse("picks from each place by the index in that place, and one of its inputs has no rows")
    return [rows]


@new_operator(
    "GatherElements",
    infer=infer_gather_elements,
    doc="Y[i, j, k] = DATA[INDICES[i, j, k], j, k] for axis 0, and so for others. Negative indices count from the "
    "end. (dagexec's own, for ONNX.)",
    input_names=("DATA", "INDICES"),
    output_names=("Y",),
    args={"axis": AXIS_HELP},
    cost=copy_cost,
    onnx=(OnnxName("GatherElements", 13, {"axis": "axis"}),),
    rows=_picked_rows,
)
class GatherElements(Operator):
    """Elements picked along an axis."""

    def prepare(self) -> Step:
        """Indices to places, and what lies there."""
        data, indices, y = self.x(0), self.x(1), self.y(0)
        if not indices.size:
            return nothing_to_do
        places = place_memory(self, 1, indices.shape)
        steps = element_places(self, data.shape, indices, indexed_axis(self.call()), places)
        return picking(self, steps, data.reshape(-1), places, y)


def infer_scatter_elements(call: OperatorCall) -> list[TensorType]:
    """The type of DATA; the updates have a value for each index."""
    indexed_axis(call)
    call.require_same_type(0, 2)
    call.require_shape(2, call.inputs[1].shape, "a value for each index")
    reduction_of(call)
    return [call.inputs[0]]


@new_operator(
    "ScatterElements",
    infer=infer_scatter_elements,
    doc="Y = DATA, with UPDATES[i, j, k] at Y[INDICES[i, j, k], j, k] for axis 0, and so for others. Negative "
    "indices count from the end. Values are taken in order: of several for a place the last one stays, unless a "
    "reduction joins them. (dagexec's own, for ONNX.)",
    input_names=("DATA", "INDICES", "UPDATES"),
    output_names=("Y",),
    args={"axis": AXIS_HELP, "reduction": REDUCTION_HELP},
    inplace=first_to_first,
    cost=copy_cost,
    onnx=(
        OnnxName("ScatterElements", 18, {"axis": "axis", "reduction": "reduction"}),
        OnnxName("Scatter", 11, {"axis": "axis"}),
    ),
)
class ScatterElements(Scattering):
    """Elements put where indices say along an axis."""

    def prepare(self) -> Step:
        indices, shape = self.x(1), self.x(0).shape
        places = place_memory(self, 1, indices.shape)
        steps = element_places(self, shape, indices, indexed_axis(self.call()), places) if indices.size else []
        return self.scattered(steps, places, self.x(2))


def scattered_gradient(request: GradientRequest, scatter: str, gather: str) -> GradientOperators:
    """Of DATA, indices and updates: dUPDATES are picked from dY; dDATA is dY, with zeros where values were replaced.

    Where several values came to one place without a reduction, each gets that place's gradient, though but the last
    one is seen. Raises GradientError for a reduction other than a sum.
    """
    reduction = request.arguments.string("reduction", "none")
    if reduction not in ("none", "add"):
        raise GradientError(f"{request.label}: {scatter} has a gradient for reduction none or add, found {reduction!r}")
    own = {arg.name for arg in request.definition.arg} & {"axis", "batch_dims"}
    numbers = {name: request.arguments.int(name, 0) for name in own}
    operators, gradients = [], {}
    if 0 in request.wanted and reduction == "add":
        gradients[0] = request.dy(0)
    elif 0 in request.wanted:
        zeros = f"{request.dx(2)}_zeros"
        operators.append(request.plain_operator("ConstantFill", [request.x(2)], [zeros], value=0.0, input_type=1))
        inputs = [request.dy(0), request.x(1), zeros]
        operators.append(request.plain_operator(scatter, inputs, [request.dx(0)], **numbers))
        gradients[0] = request.dx(0)
    if 2 in request.wanted:
        operators.append(request.plain_operator(gather, [request.dy(0), request.x(1)], [request.dx(2)], **numbers))
        gradients[2] = request.dx(2)
    return request.result(operators, dict(gradients))


def gathered_gradient(request: GradientRequest, scatter: str) -> GradientOperators:
    """dDATA: dY added up, in zeros, where it was picked."""
    if 0 not in request.wanted:
        return request.result([], {})
    zeros = f"{request.dx(0)}_zeros"
    fill = request.plain_operator("ConstantFill", [request.x(0)], [zeros], value=0.0, input_type=1)
    add = request.operator(scatter, [zeros, request.x(1), request.dy(0)], [request.dx(0)], reduction="add")
    return request.result([fill, add], {0: request.dx(0)})


@gradient_of("GatherElements")
def gather_elements_gradient(request: GradientRequest) -> GradientOperators:
    """A sum of dY at the places that were picked."""
    return gathered_gradient(request, "ScatterElements")


@gradient_of("ScatterElements")
def scatter_elements_gradient(request: GradientRequest) -> GradientOperators:
    """See `scattered_gradient`."""
    return scattered_gradient(request, "ScatterElements", "GatherElements")
