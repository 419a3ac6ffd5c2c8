"""Bitwise logic, shifts and remainders: element-wise operators of integers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import BOOL, NUMBER_TYPES, TypeMeta
from dagexec.core.expressions import Expression, apply
from dagexec.core.gradient import no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import OperatorCall, TensorType, any_to_first, first_to_first
from dagexec.errors import ArgumentError
from dagexec.ops.base.broadcasting import broadcast_shape, require_inplace_fits
from dagexec.ops.base.elementwise_operator import elementwise_operator
from dagexec.ops.families.elementwise.arithmetic import BinaryOperator, binary_operator

INTEGER_TYPES = tuple(meta for meta in NUMBER_TYPES if meta.is_integer)
BIT_TYPES = (BOOL, *INTEGER_TYPES)


def _define(
    name: str, ufunc: Callable[..., Any], doc: str, metas: tuple[TypeMeta, ...], onnx: OnnxName | None
) -> type[BinaryOperator]:
    members = {"ufunc": staticmethod(ufunc), "__doc__": doc, "__module__": __name__}
    cls = type(name, (BinaryOperator,), members)
    return binary_operator(name, doc, metas, any_to_first, onnx, ufunc)(cls)


def _logic(name: str, ufunc: Callable[..., Any], doc: str) -> type[BinaryOperator]:
    return _define(name, ufunc, f"{doc} Of booleans, logic.", BIT_TYPES, OnnxName(name, 18))


BitwiseAnd = _logic("BitwiseAnd", np.bitwise_and, "C = A & B, bit by bit.")
BitwiseOr = _logic("BitwiseOr", np.bitwise_or, "C = A | B, bit by bit.")
BitwiseXor = _logic("BitwiseXor", np.bitwise_xor, "C = A ^ B, bit by bit.")
LeftShift = _define(
    "LeftShift",
    np.left_shift,
    "C = A << B; 0 where B is negative or the number of A's bits or more. (dagexec's own, for ONNX.)",
    INTEGER_TYPES,
    None,
)
RightShift = _define(
    "RightShift",
    np.right_shift,
    "C = A >> B, with copies of the sign; only these where B is negative or the number of A's bits or more. "
    "(dagexec's own, for ONNX.)",
    INTEGER_TYPES,
    None,
)


@elementwise_operator("BitwiseNot", metas=BIT_TYPES, onnx=OnnxName("BitwiseNot", 18))
def bitwise_not(x: Expression) -> Expression:
    """Y = ~X, bit by bit. Of booleans, logic."""
    return apply("invert", x)


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


@new_operator(
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
    onnx=(OnnxName("Mod", 28, {"fmod": "sign_follow_divisor"}, values={"fmod": {0: 1, 1: 0}}),),
    rows=elementwise,
)
class Mod(Operator):
    """Remainder."""

    def prepare(self) -> Step:
        x, follow = self.x(0), self.arguments.bool("sign_follow_divisor")
        divisor = self.x(1) if len(self.input_blobs) == 2 else np.asarray(self.arguments.int("divisor", 0), x.dtype)
        return partial(np.mod if follow else np.fmod, x, divisor, out=self.y(0))


no_gradient("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "LeftShift", "RightShift", "Mod")
