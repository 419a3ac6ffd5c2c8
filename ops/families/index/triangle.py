"""Trilu and EyeLike: matrices by their diagonals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import INT32, INT64, STRING, TypeMeta
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import apart_from
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.elementwise.cast import type_argument
from dagexec.ops.families.shape.reshaping import copy_cost


def _diagonal(call: OperatorCall) -> int:
    """Which diagonal: input 1, by default the main one, 0. Raises ShapeError unless it is one number."""
    if len(call.inputs) == 1:
        return 0
    call.require_types(1, INT32, INT64)
    if call.inputs[1].elements != 1:
        raise call.fail("the number of the diagonal must be one number")
    return int(call.known_value(1).reshape(-1)[0])


def infer_trilu(call: OperatorCall) -> list[TensorType]:
    """The type of X, whose last two axes are matrices."""
    if len(call.inputs[0].shape) < 2:
        raise call.fail("X must have at least 2 axes")
    call.arguments.bool("upper", True)
    if len(call.inputs) == 1 or call.values[1] is not None:
        _diagonal(call)
    return [call.inputs[0]]


def _within(rows: int, columns: int, diagonal: int, *, upper: bool) -> Array:
    """True on a diagonal and above it, or below it, in a matrix."""
    offset = np.arange(columns) - np.arange(rows)[:, np.newaxis]
    diagonal = max(-rows, min(columns, diagonal))
    return offset >= diagonal if upper else offset <= diagonal


@new_operator(
    "Trilu",
    inputs=(1, 2),
    infer=infer_trilu,
    doc="The matrices of X with zeros below diagonal k, or above it. Diagonal 0 is the main one, 1 the one above "
    "it. (dagexec's own, for ONNX.)",
    input_names=("X", "k"),
    output_names=("Y",),
    args={"upper": "1: what is above the diagonal stays (the default), 0: what is below"},
    inplace=first_to_first,
    cost=copy_cost,
    value_inputs=(1,),
    onnx=(OnnxName("Trilu", 14, {"upper": "upper"}),),
    rows=apart_from(lambda _: (-2, -1)),
)
class Trilu(Operator):
    """Triangular parts of matrices."""

    def prepare(self) -> Step:
        """One pass over bits, which keeps all or none of an element; else a copy, and zeros outside."""
        x, y, call = self.x(0), self.y(0), self.call()
        inside = _within(y.shape[-2], y.shape[-1], _diagonal(call), upper=self.arguments.bool("upper", True))
        if y.dtype.kind != "O" and y.itemsize <= 8:
            bits = np.dtype(f"u{y.itemsize}")
            kept = np.where(inside, np.invert(bits.type(0)), bits.type(0))
            return partial(np.bitwise_and, x.view(bits), kept, out=y.view(bits))
        zero = b"" if call.inputs[0].meta is STRING else y.dtype.type(0)
        copy: list[Step] = [] if np.may_share_memory(x, y) else [partial(np.copyto, y, x)]
        return in_sequence([*copy, partial(np.copyto, y, zero, where=np.logical_not(inside))])


@gradient_of("Trilu")
def trilu_gradient(request: GradientRequest) -> GradientOperators:
    """The same part of dY."""
    if 0 not in request.wanted:
        return request.result([], {})
    inputs = [request.dy(0), *([request.x(1)] if request.has_x(1) else [])]
    return request.single("Trilu", inputs, [0])


def _element_type(call: OperatorCall) -> TypeMeta:
    return type_argument(call, "dtype") if "dtype" in call.arguments else call.inputs[0].meta


def infer_eye_like(call: OperatorCall) -> list[TensorType]:
    """The shape of X, a matrix, of the type `dtype`."""
    call.require_rank(0, 2)
    meta = _element_type(call)
    if meta is STRING:
        raise call.fail("a matrix of strings has no ones")
    call.arguments.int("k", 0)
    return [TensorType(call.inputs[0].shape, meta)]


@array_function(
    "EyeLike",
    infer=infer_eye_like,
    doc="A matrix of the shape of X with ones on diagonal k and zeros elsewhere. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args={
        "dtype": "the element type, by `TensorProto.DataType` number or name (default: that of X)",
        "k": "which diagonal: 0 the main one (the default), 1 the one above it",
    },
)
def eye_like(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Where the distance to the main diagonal is k."""
    rows, columns = x.shape
    k = max(-rows, min(columns, call.arguments.int("k", 0)))
    return [np.arange(columns) - np.arange(rows)[:, np.newaxis] == k]


no_gradient("EyeLike")
