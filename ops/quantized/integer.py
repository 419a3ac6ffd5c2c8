"""Integer products that leave the scaling to others: ConvInteger, MatMulInteger, DynamicQuantizeLinear of ONNX."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT8, INT32, UINT8
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType
from dagexec.ops.base.broadcasting import broadcast_shape
from dagexec.ops.base.geometry import WINDOW_ARGS
from dagexec.ops.base.layout import NHWC, ImageOperator
from dagexec.ops.quantized.convolution import convolution_sums, integer_conv_shape, quant_window
from dagexec.ops.quantized.linear import saturate_passes
from dagexec.ops.quantized.scales import BYTES, Array, zero_point_argument

_ZERO_POINT_ARGS = {"x_zero_point": "X's zero point (default 0)"}


def infer_conv_integer(call: OperatorCall) -> list[TensorType]:
    """int32 sums."""
    shape = integer_conv_shape(call, (INT8,))
    zero_point_argument(call, "x_zero_point", call.inputs[0].meta)
    return [TensorType(shape, INT32)]


@operator(
    OpSchema(
        "ConvInteger",
        infer=infer_conv_integer,
        doc="Y = (X - x_zero_point) * filter as int32, where padding counts as x_zero_point. X is uint8 or int8, the "
        "filter int8; shapes as Conv's.",
        input_names=("X", "filter"),
        output_names=("Y",),
        args=WINDOW_ARGS | {"group": "groups of channels and filters (default 1)"} | _ZERO_POINT_ARGS,
    )
)
class ConvInteger(ImageOperator):
    """Convolution of 8-bit integers into 32-bit ones."""

    def prepare(self) -> Step:
        call = self.call()
        window, axes = quant_window(call)
        if not self.y(0).size:
            return nothing_to_do
        sums, add_up = convolution_sums(self, call.arguments.int("x_zero_point", 0), axes, window.order == NHWC)
        return in_sequence([add_up, partial(np.copyto, self.y(0), sums, casting="unsafe")])


def infer_matmul_integer(call: OperatorCall) -> list[TensorType]:
    """int32 products of the matrices in the last two axes; the others broadcast."""
    call.require_types(0, *BYTES)
    call.require_types(1, *BYTES)
    a, b = call.inputs[0].shape, call.inputs[1].shape
    if min(len(a), len(b)) < 2:
        raise call.fail("A and B must have at least 2 axes")
    if a[-1] != b[-2]:
        raise call.fail(f"a {a[-2]} x {a[-1]} matrix cannot be multiplied by a {b[-2]} x {b[-1]} one")
    for index, size in ((2, a[-2]), (3, b[-1])):
        if index < len(call.inputs):
            call.require_types(index, call.inputs[index - 2].meta)
            entries = call.inputs[index].elements
            if entries not in (1, size) or len(call.inputs[index].shape) > 1:
                raise call.fail(f"a zero point must have 1 entry or {size}, found shape {call.inputs[index].shape}")
    return [TensorType((*broadcast_shape(call, [a[:-2], b[:-2]]), a[-2], b[-1]), INT32)]


def _matmul_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    inner = call.inputs[0].shape[-1]
    return Cost(2 * outputs[0].elements * inner, sum(kind.nbytes for kind in call.inputs), outputs[0].nbytes)


@operator(
    OpSchema(
        "MatMulInteger",
        inputs=(2, 4),
        infer=infer_matmul_integer,
        doc="Y = (A - a_zero_point)(B - b_zero_point) as int32, for stacks of matrices as in numpy.matmul. A and B are "
        "uint8 or int8; a zero point has one entry, or one for each row of A or column of B.",
        input_names=("A", "B", "a_zero_point", "b_zero_point"),
        output_names=("Y",),
        cost=_matmul_cost,
        onnx=(OnnxName("MatMulInteger", 10),),
    )
)
class MatMulInteger(Operator):
    """Product of 8-bit integers into 32-bit ones."""

    def prepare(self) -> Step:
        """Both operands in float64, which holds every sum, their product, and its conversion."""
        y = self.y(0)
        if not y.size:
            return nothing_to_do
        a, b = (self.scratch(self.x(index).shape, np.float64) for index in (0, 1))
        sums = self.scratch(y.shape, np.float64)
        zero_points: dict[int, Array] = {}
        if len(self.input_blobs) > 2:
            zero_points[0] = self.x(2).reshape(-1, 1)
        if len(self.input_blobs) > 3:
            zero_points[1] = self.x(3).reshape(1, -1)
        steps: list[Step] = []
        for index, wide in enumerate((a, b)):
            subtrahend = zero_points.get(index, np.zeros((), np.float64))
            steps.append(partial(np.subtract, self.x(index), subtrahend, out=wide, dtype=np.float64))
        steps.append(partial(np.matmul, a, b, out=sums))
        return in_sequence([*steps, partial(np.copyto, y, sums, casting="unsafe")])


def infer_dynamic(call: OperatorCall) -> list[TensorType]:
    """X's integers, one scale, one zero point."""
    call.require_types(0, FLOAT32)
    if not call.inputs[0].elements:
        raise call.fail("X has no elements and therefore no range")
    return [TensorType(call.inputs[0].shape, UINT8), TensorType((), FLOAT32), TensorType((), UINT8)]


@operator(
    OpSchema(
        "DynamicQuantizeLinear",
        infer=infer_dynamic,
        doc="Y = X quantized to uint8 by its own range, 0 included: scale = (max - min) / 255, zero_point = "
        "round(-min / scale). As ONNX's DynamicQuantizeLinear; where X is 0 everywhere the scale is 1.",
        input_names=("X",),
        output_names=("Y", "scale", "zero_point"),
        onnx=(OnnxName("DynamicQuantizeLinear", 11),),
    )
)
class DynamicQuantizeLinear(Operator):
    """Floats to integers, by the range that they have."""

    def prepare(self) -> Step:
        """The range, the parameters it gives, and the integers."""
        x, y, scale, zero_point = self.x(0), self.y(0), self.y(1), self.y(2)
        values = self.scratch(x.shape, np.float32)
        zero = self.scratch((), np.float32)

        def measure() -> None:
            low, high = min(np.float32(0), x.min()), max(np.float32(0), x.max())
            step = np.float32((high - low) / np.float32(255))
            scale[...] = step if step > 0 else np.float32(1)
            zero[...] = np.rint(np.clip(-low / scale[()], 0, 255))
            zero_point[...] = zero

        return in_sequence(
            [measure, partial(np.divide, x, scale, out=values), *saturate_passes(values, zero, UINT8, y)]
        )
