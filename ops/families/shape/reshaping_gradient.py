"""ResizeLike, and the gradient makers of the shape operators, most of which undo one another.

The gradient of a copy to a device is a copy back. What a shape operator needs to know of the old shape comes from its
own outputs and arguments where it may work in place, since its input is gone then.
"""

from __future__ import annotations

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.ops.families.shape.reshaping import View, no_cost


def infer_resize_like(call: OperatorCall) -> list[TensorType]:
    """The shape of the second input, which must have as many elements."""
    data, like = call.inputs
    if data.elements != like.elements:
        raise call.fail(f"data of {data.elements} elements cannot take the shape {like.shape}, of {like.elements}")
    return [TensorType(like.shape, data.meta)]


@new_operator(
    "ResizeLike",
    infer=infer_resize_like,
    doc="The elements of the data, in order, in the shape of the second input, whose values are not read.",
    input_names=("data", "shape_tensor"),
    output_names=("output",),
    inplace=first_to_first,
    cost=no_cost,
    view=True,
)
class ResizeLike(View):
    """New shape, same elements."""


@gradient_of("Flatten", "FlattenToVec", "ResizeLike", "MergeDim")
def old_shape_gradient(request: GradientRequest) -> GradientOperators:
    """dX = dY in the shape of X."""
    if 0 not in request.wanted or not request.has_dy(0):
        return request.result([], {})
    made = request.plain_operator("ResizeLike", [request.dy(0), request.x(0)], [request.dx(0)])
    return request.result([made], {0: request.dx(0)})


@gradient_of("Reshape")
def reshape_gradient(request: GradientRequest) -> GradientOperators:
    """dX = dY in the shape of X; in place, where X is gone, in that of the second output, where a 0 is a size."""
    if request.x(0) not in request.definition.output or not request.has_y(1):
        return old_shape_gradient(request)
    if 0 not in request.wanted or not request.has_dy(0):
        return request.result([], {})
    inputs, outputs = [request.dy(0), request.y(1)], [request.dx(0)]
    return request.result([request.plain_operator("Reshape", inputs, outputs, allow_zero=1)], {0: request.dx(0)})


_OPPOSITES = {
    "Squeeze": "ExpandDims",
    "ExpandDims": "Squeeze",
    "NCHW2NHWC": "NHWC2NCHW",
    "NHWC2NCHW": "NCHW2NHWC",
    "PrependDim": "MergeDim",
    "Copy": "Copy",
    "CopyCPUToGPU": "CopyGPUToCPU",
    "CopyFromCPUInput": "CopyGPUToCPU",
    "CopyGPUToCPU": "CopyCPUToGPU",
    "EnsureCPUOutput": "CopyCPUToGPU",
}


@gradient_of(*_OPPOSITES)
def opposite_gradient(request: GradientRequest) -> GradientOperators:
    """dX = dY by the operator that undoes this one, with the same arguments and axes."""
    return request.single(_OPPOSITES[request.definition.type], [request.dy(0), *request.definition.input[1:]], [0])


@gradient_of("Transpose")
def transpose_gradient(request: GradientRequest) -> GradientOperators:
    """dX = dY transposed by the inverse permutation; the default, reversed, is its own."""
    axes = request.arguments.ints("axes")
    inverse = sorted(range(len(axes)), key=lambda position: axes[position])
    return request.single("Transpose", [request.dy(0)], [0], axes=inverse)


@gradient_of("Reorder")
def reorder_gradient(request: GradientRequest) -> GradientOperators:
    """dX = dY in the order that X had."""
    given = request.arguments
    orders = {"from_order": given.string("to_order", "NCHW"), "to_order": given.string("from_order", "NCHW")}
    return request.single("Reorder", [request.dy(0)], [0], **orders)


no_gradient("Shape", "Size", "StopGradient")
