"""Maps of one factor, and perhaps one summand, a channel: ElementwiseLinear, AffineChannel and RowMul.

A tensor is seen as outer, channels, inner; element (o, c, i) becomes x * scale[c] + bias[c]. `SpatialBN` computes scale
and bias itself; the operators here are given them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares
from dagexec.core.rows import before_axis, first_axis, gradient_and_sums
from dagexec.core.rows_call import RowsRule
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, first_to_first, memory_cost
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.broadcast_reduction import reduced
from dagexec.ops.base.layout import channels_last

View = tuple[int, int, int]
ViewReader = Callable[[OperatorCall], View]
"""Outer, channels and inner of input 0."""

ORDER_ARGS = {
    "order": "NCHW or NHWC: whether channels are the second or the last axis (default NCHW)",
    "is_learnable": "1: scale and bias get gradients, too (default 0)",
}
AXIS_ARGS = {"axis": "the first axis of the features, which scale and bias have one element of each (default 1)"}


def feature_view(call: OperatorCall) -> View:
    """Axes from `axis` on are the channels."""
    shape, axis = call.inputs[0].shape, _first_feature(call)
    return math.prod(shape[:axis]), math.prod(shape[axis:]), 1


def _first_feature(call: OperatorCall) -> int:
    return call.axis("axis", 1, len(call.inputs[0].shape), end=True)


def image_view(call: OperatorCall) -> View:
    """The axis of channels that `order` says."""
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail(f"an image tensor has at least 2 axes, found shape {shape}")
    if channels_last(call):
        return math.prod(shape[:-1]), shape[-1], 1
    return shape[0], shape[1], math.prod(shape[2:])


def row_view(call: OperatorCall) -> View:
    """Rows of the first axis are the channels."""
    shape = call.inputs[0].shape
    if not shape:
        raise call.fail("X must have at least 1 axis, found a scalar")
    return 1, shape[0], math.prod(shape[1:])


def check_parameters(call: OperatorCall, view: View, indices: tuple[int, ...]) -> None:
    """Raise ShapeError unless inputs `indices` have one element for each channel."""
    for index in indices:
        if call.inputs[index].elements != view[1]:
            raise call.fail(
                f"input {call.definition.input[index]!r} must have an element for each of {view[1]} channels"
            )


class ChannelAffine(Operator):
    """Base of the maps."""

    @staticmethod
    @abstractmethod
    def view(call: OperatorCall) -> View:
        """How the operator sees input 0."""

    def prepare(self) -> Step:
        """A product, and a sum where there is a bias."""
        view = type(self).view(self.call())
        parameters = [self.x(index).reshape(1, view[1], 1) for index in range(1, len(self.input_blobs))]
        return reduced(self, view, [self.x(0).reshape(view), *parameters], self.y(0).reshape(view), _affine_passes)


def _affine_passes(pieces: Sequence[Array], out: Array, _scratch: Scratch) -> list[Step]:
    x, scale, *bias = pieces
    return [partial(np.multiply, x, scale, out=out), *(partial(np.add, out, one, out=out) for one in bias)]


@declares
def affine_operator(
    name: str,
    view: ViewReader,
    names: tuple[str, ...],
    doc: str,
    args: dict[str, str],
    rows: RowsRule | None = None,
) -> OpSchema:
    """The schema of a map of X, a scale and perhaps a bias."""

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, *FLOAT_TYPES)
        call.require_same_type()
        check_parameters(call, view(call), tuple(range(1, len(names))))
        return [call.inputs[0]]

    return OpSchema(
        name,
        infer=infer,
        doc=doc,
        input_names=names,
        output_names=("Y",),
        args=args,
        inplace=first_to_first,
        cost=_two_operations,
        rows=rows,
    )


def _two_operations(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return memory_cost(call, outputs, 2.0)


@affine_operator(
    "ElementwiseLinear",
    feature_view,
    ("X", "w", "b"),
    "Y = X * w + b: w and b have an element for each feature, X's axes from `axis` on.",
    AXIS_ARGS,
    rows=before_axis(_first_feature),
)
class ElementwiseLinear(ChannelAffine):
    """A line for each feature."""

    view = staticmethod(feature_view)


@affine_operator(
    "AffineChannel",
    image_view,
    ("X", "scale", "bias"),
    "Y = X * scale + bias: a scale and a bias for each channel of an image tensor.",
    ORDER_ARGS,
    rows=first_axis,
)
class AffineChannel(ChannelAffine):
    """A line for each channel."""

    view = staticmethod(image_view)


@affine_operator("RowMul", row_view, ("X", "w"), "Row i of X, along its first axis, times w[i].", {})
class RowMul(ChannelAffine):
    """A factor for each row."""

    view = staticmethod(row_view)


class ChannelAffineGradient(Operator):
    """Base of the gradients of maps with scale and bias.

    The inputs are dY, X and the scale; without X, which dX does not need, dY and the scale.
    """

    @staticmethod
    @abstractmethod
    def view(call: OperatorCall) -> View:
        """How the operator sees dY."""

    def prepare(self) -> Step:
        """The sums dscale and dbias first, where they are outputs, as dX may overwrite dY."""
        view = type(self).view(self.call())
        dy = self.x(0).reshape(view)
        scale = self.x(len(self.input_blobs) - 1).reshape(1, view[1], 1)
        steps = self._sums(view, dy) if len(self.output_blobs) == 3 else []
        return in_sequence([*steps, reduced(self, view, [dy, scale], self.y(0).reshape(view), _product)])

    def _sums(self, view: View, dy: Array) -> list[Step]:
        dscale, dbias = (self.y(index).reshape(1, view[1], 1) for index in (1, 2))
        x = self.x(1).reshape(view)
        return [reduced(self, view, [dy, x], dscale, _product), reduced(self, view, [dy], dbias)]


def _product(pieces: Sequence[Array], out: Array, _scratch: Scratch) -> list[Step]:
    return [partial(np.multiply, pieces[0], pieces[1], out=out)]


@declares
def _gradient_operator(
    of: str,
    kind: type[ChannelAffineGradient],
    names: tuple[str, ...],
    least: int,
    args: dict[str, str],
    first: Callable[[OperatorCall], int],
) -> OpSchema:
    """Without X, dX is the only output; with it, dscale and dbias follow. Rows are before axis `first`."""

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, *FLOAT_TYPES)
        meta = call.require_same_type()
        view = kind.view(call)
        check_parameters(call, view, (len(call.inputs) - 1,))
        wanted = 3 if len(call.inputs) == 3 else 1
        if len(call.definition.output) != wanted:
            raise call.fail(f"expected {wanted} outputs with {len(call.inputs)} inputs")
        if wanted == 3:
            call.require_shape(1, call.inputs[0].shape, "that of dY")
        return [call.inputs[0], *[TensorType((view[1],), meta)] * (wanted - 1)]

    return OpSchema(
        f"{of}Gradient",
        inputs=(least, 3),
        outputs=(1, 3),
        infer=infer,
        doc=f"Gradient of {of}: dX = dY * scale; dscale and dbias are sums of dY * X and of dY over each channel.",
        input_names=names,
        output_names=("dX", "dscale", "dbias"),
        args=args,
        inplace=first_to_first,
        cost=_two_operations,
        rows=lambda asked: gradient_and_sums(before_axis(first, *range(len(asked.rows) - 1)))(asked),
    )


class ElementwiseLinearGradient(ChannelAffineGradient):
    """Gradient of ElementwiseLinear."""

    view = staticmethod(feature_view)


class AffineChannelGradient(ChannelAffineGradient):
    """Gradient of AffineChannel."""

    view = staticmethod(image_view)


_gradient_operator("ElementwiseLinear", ElementwiseLinearGradient, ("dY", "X", "w"), 3, AXIS_ARGS, _first_feature)(
    ElementwiseLinearGradient
)
_gradient_operator("AffineChannel", AffineChannelGradient, ("dY", "X", "scale"), 2, ORDER_ARGS, lambda _call: 1)(
    AffineChannelGradient
)


gradient_by("ElementwiseLinear", "ElementwiseLinearGradient", ("dY", "X0", "X1"), of_inputs=(0, 1, 2))


@gradient_of("AffineChannel")
def affine_channel_gradient(request: GradientRequest) -> GradientOperators:
    """dX alone, unless is_learnable."""
    if not request.arguments.bool("is_learnable"):
        return request.single("AffineChannelGradient", [request.dy(0), request.x(1)], [0])
    return request.single("AffineChannelGradient", [request.dy(0), request.x(0), request.x(1)], [0, 1, 2])


@gradient_of("RowMul")
def row_mul_gradient(request: GradientRequest) -> GradientOperators:
    """dX by the same map; dw is the sum over each row of dY * X."""
    products = f"{request.dx(1)}_before_sum"
    made = [
        request.operator("RowMul", [request.dy(0), request.x(1)], [request.dx(0)]),
        request.operator("Mul", [request.dy(0), request.x(0)], [products]),
        request.operator("ReduceTailSum", [products], [request.dx(1)]),
    ]
    return request.result(made, {0: request.dx(0), 1: request.dx(1)})
