"""Integer products that leave the scaling to others: ConvInteger, MatMulInteger, DynamicQuantizeLinear of ONNX."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32, UINT8
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import across, matrix_product
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.core.traits import ImageRole
from dagexec.ops.base.blocks import BLOCK, row_pieces
from dagexec.ops.base.broadcasting import broadcast_shape
from dagexec.ops.base.geometry import WINDOW_ARGS
from dagexec.ops.base.layout import NHWC, ImageOperator
from dagexec.ops.families.conv.choice import default_algorithm
from dagexec.ops.families.conv.problem import DEFAULT_LIMIT, ConvProblem
from dagexec.ops.families.quantized.accumulation import Operand, exact_for
from dagexec.ops.families.quantized.by_range import ByRange
from dagexec.ops.families.quantized.convolution import FILTER, integer_conv_shape, quant_window
from dagexec.ops.families.quantized.scales import BYTES, Array, along

X_ZERO_POINT, FILTER_ZERO_POINT = 2, 3
"""The inputs of ConvInteger that have the zero points."""


def infer_conv_integer(call: OperatorCall) -> list[TensorType]:
    """int32 sums."""
    shape = integer_conv_shape(call, BYTES)
    _check_zero_point(call, X_ZERO_POINT, ((), (1,)))
    _check_zero_point(call, FILTER_ZERO_POINT, ((), (1,), call.inputs[FILTER].shape[:1]))
    return [TensorType(shape, INT32)]


def _check_zero_point(call: OperatorCall, index: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raise ShapeError unless input `index`, if given, has 8 bits and one of `shapes`."""
    if index >= len(call.inputs):
        return
    call.require_types(index, *BYTES)
    if call.inputs[index].shape not in shapes:
        expected = " or ".join(str(shape) for shape in dict.fromkeys(shapes))
        raise call.fail(f"a zero point must have shape {expected}, found {call.inputs[index].shape}")


@new_operator(
    "ConvInteger",
    inputs=(2, 4),
    infer=infer_conv_integer,
    doc="Y = (X - x_zero_point) * (filter - filter_zero_point) as int32, where padding counts as x_zero_point. X "
    "and filter are uint8 or int8, of shapes as Conv's; X has one zero point, the filter one or one for each of "
    "its M.",
    input_names=("X", "filter", "x_zero_point", "filter_zero_point"),
    output_names=("Y",),
    args=WINDOW_ARGS | {"group": "groups of channels and filters (default 1)"},
    image_role=ImageRole.QUANTIZED_CONVOLUTION,
)
class ConvInteger(ImageOperator):
    """Convolution of 8-bit integers into 32-bit ones."""

    def prepare(self) -> Step:
        """Both operands less their zero points, their convolution in floats that hold every sum, its conversion."""
        window, axes = quant_window(self.call())
        y = self.y(0)
        if not y.size:
            return nothing_to_do
        x, filters = conv_operands(self)
        terms = self.x(FILTER)[0].size
        if not terms:
            return partial(y.fill, 0)
        work = exact_for(terms * x.largest() * filters.largest())
        sums = self.scratch(y.shape, work)
        (wide, center), (weights, center_weights) = x.differences(work), filters.differences(work)
        problem = ConvProblem(
            x=wide,
            weights=weights,
            bias=None,
            y=sums,
            axes=axes,
            group=self.arguments.int("group", 1),
            channels_last=window.order == NHWC,
            work=work,
            limit=DEFAULT_LIMIT,
        )
        add_up = default_algorithm(problem, self.label).steps(problem, self.scratch)
        store = partial(np.copyto, y, sums, casting="unsafe")
        return in_sequence([center, center_weights, *add_up, store])


def conv_operands(owner: Operator) -> tuple[Operand, Operand]:
    """X and the filter of a ConvInteger."""
    given = len(owner.input_blobs)
    x = Operand(owner, 0, X_ZERO_POINT if given > X_ZERO_POINT else None, along(0, 1))
    filter_zero = FILTER_ZERO_POINT if given > FILTER_ZERO_POINT else None
    return x, Operand(owner, FILTER, filter_zero, along(0, owner.x(FILTER).ndim))


def infer_matmul_integer(call: OperatorCall) -> list[TensorType]:
    """int32 products of the matrices in the last two axes; the others broadcast."""
    call.require_types(0, *BYTES)
    call.require_types(1, *BYTES)
    a, b = call.inputs[0].shape, call.inputs[1].shape
    if min(len(a), len(b)) < 1:
        raise call.fail("A and B must have at least 1 axis")
    rows, columns = a[-2:-1], b[-1:] if len(b) > 1 else ()
    if a[-1] != (b[-2] if len(b) > 1 else b[0]):
        raise call.fail(f"matrices of shapes {a} and {b} cannot be multiplied")
    _check_zero_point(call, 2, ((), (1,), rows, (*a[:-1], 1)))
    _check_zero_point(call, 3, ((), (1,), columns, (*b[:-2], 1, *columns)))
    return [TensorType((*broadcast_shape(call, [a[:-2], b[:-2]]), *rows, *columns), INT32)]


def _matmul_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    inner = call.inputs[0].shape[-1]
    return Cost(2 * outputs[0].elements * inner, sum(kind.nbytes for kind in call.inputs), outputs[0].nbytes)


@new_operator(
    "MatMulInteger",
    inputs=(2, 4),
    infer=infer_matmul_integer,
    doc="Y = (A - a_zero_point)(B - b_zero_point) as int32, for stacks of matrices and for vectors as in "
    "numpy.matmul. A and B are uint8 or int8; a zero point has one entry, or one for each row of A or column of B, "
    "of all matrices together or of each.",
    input_names=("A", "B", "a_zero_point", "b_zero_point"),
    output_names=("Y",),
    cost=_matmul_cost,
    rows=matrix_product,
)
class MatMulInteger(Operator):
    """Product of 8-bit integers into 32-bit ones."""

    def prepare(self) -> Step:
        """Both operands less their zero points, their product in floats that hold every sum, and its conversion."""
        y, inner = self.y(0), self.x(0).shape[-1]
        if not y.size:
            return nothing_to_do
        operands = product_operands(self)
        work = exact_for(inner * math.prod(operand.largest() for operand in operands))
        (a, center_a), (b, center_b) = (operand.differences(work) for operand in operands)
        sums = self.scratch(y.shape, work)
        multiply = partial(np.matmul, a, b, out=sums)
        return in_sequence([center_a, center_b, multiply, partial(np.copyto, y, sums, casting="unsafe")])


def product_operands(owner: Operator) -> tuple[Operand, Operand]:
    """A and B of a MatMulInteger."""
    given = len(owner.input_blobs)
    return (
        Operand(owner, 0, 2 if given > 2 else None, _of_rows),
        Operand(owner, 1, 3 if given > 3 else None, lambda zero: zero),
    )


def _of_rows(zero: Array) -> Array:
    """The zero points of A's rows, which broadcast along its columns."""
    return zero.reshape(-1, 1) if zero.ndim == 1 and zero.size > 1 else zero


def infer_dynamic(call: OperatorCall) -> list[TensorType]:
    """X's integers, one scale, one zero point."""
    call.require_types(0, FLOAT32)
    if not call.inputs[0].elements:
        raise call.fail("X has no elements and therefore no range")
    return [TensorType(call.inputs[0].shape, UINT8), TensorType((), FLOAT32), TensorType((), UINT8)]


@new_operator(
    "DynamicQuantizeLinear",
    infer=infer_dynamic,
    doc="Y = X quantized to uint8 by its own range, 0 included: scale = (max - min) / 255, zero_point = "
    "round(-min / scale). As ONNX's DynamicQuantizeLinear; where X is 0 everywhere the scale is 1.",
    input_names=("X",),
    output_names=("Y", "scale", "zero_point"),
    onnx=(OnnxName("DynamicQuantizeLinear", 11),),
    image_role=ImageRole.ON_INTEGERS,
    rows=across("takes its scale from the range of all rows"),
)
class DynamicQuantizeLinear(Operator):
    """Floats to integers, by the range that they have."""

    def prepare(self) -> Step:
        """The range, the parameters it gives, and the integers, block by block."""
        found, integers = ByRange.of(self, self.x(0)), self.y(0).reshape(-1)
        values = self.scratch((min(integers.size, BLOCK),), np.float32)
        steps: list[Step] = [
            found.measure,
            partial(np.copyto, self.y(1), found.scale),
            partial(np.copyto, self.y(2), found.zero, casting="unsafe"),
        ]
        for piece in row_pieces(integers.size, BLOCK):
            part = values[: piece.stop - piece.start]
            steps += [*found.passes(part, piece), partial(np.copyto, integers[piece], part, casting="unsafe")]
        return in_sequence(steps)
