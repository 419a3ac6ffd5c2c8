"""Casts: the elements of a tensor in another element type."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.dtypes import FLOAT16, FLOAT32, STRING, TypeMeta
from dagexec.core.errors import ArgumentError
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import operator
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, memory_cost


def type_argument(call: OperatorCall, name: str) -> TypeMeta:
    """Argument `name` as an element type: a `TensorProto.DataType` number, or a name in any case.

    Raises ArgumentError, naming the operator, when it is absent or no type.
    """
    argument = call.arguments.raw(name)
    if argument is None:
        raise ArgumentError(f"{call.label}: argument {name!r} is required")
    try:
        if argument.HasField("s"):
            return dtypes.from_name(call.arguments.string(name, ""))
        return dtypes.from_number(call.arguments.int(name, 0))
    except ArgumentError as error:
        message = str(error)
        if call.label not in message:
            message = f"{call.label}: argument {name!r}: {message}"
        raise ArgumentError(message) from None


def convert(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Copy with conversion as NumPy does it, overflow and NaN to integer included, without its warnings."""
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


def infer_cast(call: OperatorCall) -> list[TensorType]:
    """The input's shape with the type `to`; strings are not converted."""
    target = type_argument(call, "to")
    source = call.inputs[0].meta
    if (source is STRING) != (target is STRING):
        raise call.fail(f"{source} cannot be cast to {target}: strings and numbers do not convert")
    return [TensorType(call.inputs[0].shape, target)]


class Conversion(Operator):
    """The input's elements in the output's type."""

    def prepare(self) -> Step:
        """One converting copy; a plain one when the type stays."""
        x, y = self.x(0), self.y(0)
        return partial(np.copyto, y, x) if x.dtype == y.dtype else partial(convert, x, y)


@operator(
    OpSchema(
        "Cast",
        inputs=(1, 1),
        outputs=(1, 1),
        infer=infer_cast,
        doc="X with its elements converted to the type `to`: floats are cut towards zero, non-zero becomes true.",
        input_names=("X",),
        output_names=("Y",),
        args={
            "to": "the type, by `TensorProto.DataType` number or name",
            "from_type": "X's type; read by gradients only",
        },
        required_args=("to",),
        cost=memory_cost,
    )
)
class Cast(Conversion):
    """Elements converted to a given type."""


def half_schema(name: str, source: TypeMeta, target: TypeMeta, doc: str) -> OpSchema:
    """The schema of a conversion from `source` to `target`."""

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, source)
        return [TensorType(call.inputs[0].shape, target)]

    return OpSchema(name, inputs=(1, 1), outputs=(1, 1), infer=infer, doc=doc, input_names=("X",), output_names=("Y",))


@operator(half_schema("FloatToHalf", FLOAT32, FLOAT16, "float32 rounded to float16; beyond 65504 becomes infinite."))
class FloatToHalf(Conversion):
    """float32 to float16."""


@operator(half_schema("HalfToFloat", FLOAT16, FLOAT32, "float16 widened to float32, exactly."))
class HalfToFloat(Conversion):
    """float16 to float32."""
