"""QuantizeLinear and DequantizeLinear as ONNX defines them: per tensor, per index of one axis, or per block of it.

https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html. Scales and zero points are inputs; they are nearly always
constant, and are checked once then, else in every run.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT16, INT32, NARROW_TYPES, UINT8, UINT16, TypeMeta
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import keeps_axes
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, Scratch, block_indices
from dagexec.ops.families.elementwise.narrow_cast import to_narrow
from dagexec.ops.families.quantized.scales import Array, along, checked_scales, integer_range, type_named

QUANTIZED = (
    *(UINT8, INT8, UINT16, INT16),
    *(meta for meta in NARROW_TYPES if meta.name in ("int4", "uint4", "int2", "uint2")),
)
"""The integers that stand for real numbers."""
QUANTIZED_FLOATS = tuple(meta for meta in NARROW_TYPES if meta.name.startswith(("float4", "float8e4", "float8e5")))
"""Floats of few bits, which have a scale and no zero point but 0."""
_REAL = (FLOAT32, FLOAT16, BFLOAT16)

_PLACEMENT_ARGS = {
    "axis": "the axis that scales with more than one entry belong to (default 1)",
    "block_size": "so many elements along `axis` share a scale, which then has all axes of X (default 0: no blocks)",
}


def block_size(call: OperatorCall) -> int:
    """How many elements share a scale; 0 without blocks. Raises ArgumentError."""
    size = call.arguments.int("block_size", 0)
    if size < 0:
        raise ArgumentError(f"{call.label}: argument 'block_size' must be at least 0, found {size}")
    return size


def _check_parameters(call: OperatorCall) -> None:
    """The scale is one number, a vector along `axis`, or one a block, and the zero point has its shape.

    Raises ArgumentError or ShapeError.
    """
    call.require_types(1, *_REAL)
    x, scale = call.inputs[0].shape, call.inputs[1].shape
    if size := block_size(call):
        axis = call.axis("axis", 1, len(x))
        blocks = (*x[:axis], -(-x[axis] // size), *x[axis + 1 :])
        if scale != blocks:
            raise call.fail(
                f"the scale must have shape {blocks}: one for {size} elements of axis {axis}; found {scale}"
            )
    elif scale not in ((), (1,)):
        axis = call.axis("axis", 1, len(x))
        if scale != (x[axis],):
            raise call.fail(f"the scale must be one number, or {x[axis]} for axis {axis}; found shape {scale}")
    if len(call.inputs) == 3 and call.inputs[2].elements != call.inputs[1].elements:
        raise call.fail(f"the zero point must have the scale's shape {scale}, found {call.inputs[2].shape}")


def infer_quantize(call: OperatorCall) -> list[TensorType]:
    """X's shape; the zero point's type, else the type `to`."""
    call.require_types(0, *_REAL, INT32)
    _check_parameters(call)
    meta = type_named(call, "to", UINT8, (*QUANTIZED, *QUANTIZED_FLOATS))
    if len(call.inputs) == 3:
        given = call.require_types(2, *QUANTIZED, *QUANTIZED_FLOATS)
        if "to" in call.arguments and meta is not given:
            raise call.fail(f"argument 'to' is {meta}, the zero point is {given}")
        meta = given
    return [TensorType(call.inputs[0].shape, meta)]


def infer_dequantize(call: OperatorCall) -> list[TensorType]:
    """X's shape; the scale's type."""
    meta = call.require_types(0, *QUANTIZED, *QUANTIZED_FLOATS, INT32)
    _check_parameters(call)
    if len(call.inputs) == 3:
        call.require_types(2, meta)
    return [TensorType(call.inputs[0].shape, call.inputs[1].meta)]


def saturate_passes(values: Array, zero: Array, meta: TypeMeta, target: Array) -> list[Step]:
    """Passes that write integers of `meta` to `target`: `values` (float32, overwritten) rounded to the nearest, ties
    to even, plus the zero point `zero` (float32, broadcast), cut to the type's range. NaN becomes the least integer.
    """
    least, most = (np.float32(bound) for bound in integer_range(meta))
    return [
        partial(np.rint, values, out=values),
        partial(np.add, values, zero, out=values),
        partial(np.fmax, values, least, out=values),
        partial(np.minimum, values, most, out=values),
        partial(np.copyto, target, values, casting="unsafe"),
    ]


class _Linear(Operator):
    """What both directions share: scale and zero point as float32 arrays that broadcast to X."""

    def parameters(self, x: Array) -> tuple[Array, Array, list[Step]]:
        """Scale, zero point, and the steps that check and convert them in a run."""
        call = self.call()
        axis = call.axis("axis", 1, x.ndim) if x.ndim and self.x(1).size > 1 else 0
        view, size = along(axis, x.ndim), block_size(call)
        steps = checked_scales(self, 1)
        scale = self.scratch(self.x(1).shape, np.float32)
        zero = self.scratch(self.x(1).shape, np.float32)
        steps.append(partial(np.copyto, scale, self.x(1)))
        zero.fill(0)
        if len(self.input_blobs) == 3:
            steps.append(partial(np.copyto, zero, self.x(2).reshape(zero.shape), casting="unsafe"))
        if not size:
            return np.broadcast_to(view(scale), x.shape), np.broadcast_to(view(zero), x.shape), steps
        each = [self.scratch(x.shape, np.float32) for _ in range(2)]
        block = np.arange(x.shape[axis]) // size
        for array, target in zip((scale, zero), each, strict=True):
            steps.append(partial(np.take, array, block, axis=axis, out=target, mode="clip"))
        return each[0], each[1], steps


@new_operator(
    "QuantizeLinear",
    inputs=(2, 3),
    infer=infer_quantize,
    doc="Y = saturate(round(X / scale) + zero_point), rounded to the nearest integer, ties to even; computed in "
    "float32. NaN becomes the least integer. Where Y's are floats of at most 8 bits, X / scale rounded to "
    "them. As ONNX's QuantizeLinear.",
    input_names=("X", "scale", "zero_point"),
    output_names=("Y",),
    args=_PLACEMENT_ARGS
    | {
        "to": "Y's type when there is no zero point, by number or name (default uint8)",
        "saturate": "0: floats beyond the range of a Y of floats become infinite or NaN, not its largest",
    },
    image_role=ImageRole.ON_INTEGERS,
    is_quantized=True,
    rows=keeps_axes,
)
class QuantizeLinear(_Linear):
    """Floats to integers."""

    def prepare(self) -> Step:
        """Block by block: divide, round, add the zero point, saturate, convert."""
        x, y, meta = self.x(0), self.y(0), self.output(0).meta
        scale, zero, steps = self.parameters(x)
        saturate = self.arguments.bool("saturate", True)
        scratch = Scratch(self, min(x.size, BLOCK), np.dtype(np.float32))
        for index in block_indices(x.shape):
            values = scratch(0, x[index].shape)
            if x.dtype == np.float32:
                steps.append(partial(np.divide, x[index], scale[index], out=values))
            else:
                steps.append(partial(np.copyto, values, x[index], casting="unsafe"))
                steps.append(partial(np.divide, values, scale[index], out=values))
            if meta in QUANTIZED_FLOATS:
                steps.append(partial(to_narrow, values, y[index], saturate=saturate, round_mode="nearest"))
            else:
                steps += saturate_passes(values, zero[index], meta, y[index])
        return in_sequence([*steps])


@new_operator(
    "DequantizeLinear",
    inputs=(2, 3),
    infer=infer_dequantize,
    doc="Y = (X - zero_point) * scale, in float32; Y has the scale's type. As ONNX's DequantizeLinear.",
    input_names=("X", "scale", "zero_point"),
    output_names=("Y",),
    args=_PLACEMENT_ARGS,
    image_role=ImageRole.ON_INTEGERS,
    is_quantized=True,
    rows=keeps_axes,
)
class DequantizeLinear(_Linear):
    """Integers to floats."""

    def prepare(self) -> Step:
        """Block by block: subtract the zero point, multiply; narrow where the output is."""
        x, y = self.x(0), self.y(0)
        scale, zero, steps = self.parameters(x)
        narrow = y.dtype != np.float32
        scratch = Scratch(self, min(x.size, BLOCK), np.dtype(np.float32))
        for index in block_indices(x.shape):
            values = scratch(0, x[index].shape) if narrow else y[index]
            # float64 holds every integer of 32 bits, so that the difference is rounded once
            wide = np.float64 if x.dtype.itemsize == 4 else np.float32
            steps.append(partial(np.subtract, x[index], zero[index], out=values, dtype=wide, casting="unsafe"))
            steps.append(partial(np.multiply, values, scale[index], out=values))
            if narrow:
                steps.append(partial(np.copyto, y[index], values, casting="unsafe"))
        return in_sequence([*steps])
