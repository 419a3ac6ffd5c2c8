"""Bitwise logic and remainders: element-wise operators of integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import BOOL, INT8, INT16, INT32, INT64, NUMBER_TYPES, UINT8, UINT16
from dagexec.core.gradient import no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, any_to_first, first_to_first
from dagexec.errors import ArgumentError
from dagexec.ops.base.broadcasting import broadcast_shape, require_inplace_fits
from dagexec.ops.base.pointwise import UfuncOperator, pointwise
from dagexec.ops.elementwise.arithmetic import BinaryOperator, binary_schema, quiet

BIT_TYPES = (INT32, INT64, BOOL, INT8, UINT8, INT16, UINT16)


def _define(name: str, ufunc: Callable[..., Any], doc: str) -> type[BinaryOperator]:
    members = {"ufunc": staticmethod(ufunc), "__doc__": doc, "__module__": __name__}
    cls = type(name, (BinaryOperator,), members)
    doc = f"{doc} Of booleans, logic."
    return operator(binary_schema(name, doc, BIT_TYPES, any_to_first, OnnxName(name, 18), ufunc))(cls)


BitwiseAnd = _define("BitwiseAnd", np.bitwise_and, "C = A & B, bit by bit.")
BitwiseOr = _define("BitwiseOr", np.bitwise_or, "C = A | B, bit by bit.")
BitwiseXor = _define("BitwiseXor", np.bitwise_xor, "C = A ^ B, bit by bit.")


@pointwise(
    "BitwiseNot",
    "Y = ~X, bit by bit. Of booleans, logic.",
    metas=BIT_TYPES,
    onnx=OnnxName("BitwiseNot", 18),
    formula=np.invert,
)
class BitwiseNot(UfuncOperator):
    """Complement."""

    ufunc = np.invert
    reads_strided = writes_strided = True


def infer_mod(call: OperatorCall) -> list[TensorType]:
    """The type of X; with a second input, the shape both broadcast to. Raises ArgumentError for a divisor of 0."""
    meta = call.require_types(0, *NUMBER_TYPES)
    call.arguments.bool("sign_follow_divisor")
    if ("divisor" in call.arguments) == (len(call.inputs) == 2):
        raise ArgumentError(f"{call.label}: the divisor must be given once, as argument 'divisor' or as input 1")
    if len(call.inputs) == 1:
        divisor = call.arguments.int("divisor", 0)
        if not divisor or (meta.is_integer and not _fits(divisor, meta.numpy)):
            raise ArgumentError(f"{call.label}: argument 'divisor' must be a {meta} other than 0, found {divisor}")
        return [call.inputs[0]]
    call.require_same_type()
    output = TensorType(broadcast_shape(call, [kind.shape for kind in call.inputs]), meta)
    require_inplace_fits(call, output)
    return [output]


def _fits(value: int, dtype: np.dtype[Any]) -> bool:
    limits = np.iinfo(dtype)
    return bool(limits.min <= value <= limits.max)


@operator(
    OpSchema(
        "Mod",
        inputs=(1, 2),
        infer=infer_mod,
        doc=(
            "The remainder of X / divisor, an argument or an input that broadcasts as in NumPy. It has the sign of X "
            "or, with sign_follow_divisor, that of the divisor. Of integers and a divisor of 0 it is 0."
        ),
        input_names=("X", "divisor"),
        output_names=("Y",),
        args={
            "divisor": "the divisor, when there is no input for it; not 0",
            "sign_follow_divisor": "1: the result has the sign of the divisor, as Python's % (default 0)",
        },
        inplace=first_to_first,
        onnx=(OnnxName("Mod", 13, {"fmod": "sign_follow_divisor"}, values={"fmod": {0: 1, 1: 0}}),),
    )
)
class Mod(Operator):
    """Remainder."""

    def prepare(self) -> Step:
        x, follow = self.x(0), self.arguments.bool("sign_follow_divisor")
        divisor = self.x(1) if len(self.input_blobs) == 2 else np.asarray(self.arguments.int("divisor", 0), x.dtype)
        return partial(quiet, partial(np.mod if follow else np.fmod, x, divisor, out=self.y(0)))


no_gradient("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "Mod")
