"""Casts: the elements of a tensor in another element type."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT16, FLOAT32, FLOAT_TYPES, STRING, TypeMeta
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of, no_gradient
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares, new_operator
from dagexec.core.rows import keeps_axes
from dagexec.core.schema import ElementTypeError, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import convert
from dagexec.ops.families.elementwise.narrow_cast import ROUND_MODES, is_narrow, to_narrow


def type_argument(call: OperatorCall, name: str) -> TypeMeta:
    """Argument `name` as an element type: a `TensorProto.DataType` number, or a name in any case.

    Raises ArgumentError, naming the operator, when it is absent or no type.
    """
    return read_type(call.arguments, call.label, name)


def read_type(arguments: Arguments, label: str, name: str) -> TypeMeta:
    """See `type_argument`; `label` is how messages name the operator."""
    if name not in arguments:
        raise ArgumentError(f"{label}: argument {name!r} is required")
    try:
        if arguments.field(name, "s") is not None:
            return dtypes.from_name(arguments.string(name, ""))
        return dtypes.from_number(arguments.int(name, 0))
    except ArgumentError as error:
        message = str(error)
        if label not in message:
            message = f"{label}: argument {name!r}: {message}"
        raise ArgumentError(message) from None


def write_out(source: npt.NDArray[Any], target: npt.NDArray[Any]) -> None:
    """Numbers in decimal, as C++'s `std::to_string` writes them: floats with six digits behind the point."""
    form = "%f" if source.dtype.kind in "fV" else "%d"
    numbers = source.astype(np.float64) if source.dtype.kind == "V" else source
    target.reshape(-1)[:] = [(form % number).encode() for number in numbers.reshape(-1).tolist()]


def require_convertible(call: OperatorCall, target: TypeMeta) -> None:
    """Raise ShapeError where strings would have to be read as numbers."""
    if call.inputs[0].meta is STRING and target is not STRING:
        problem = call.fail(f"string cannot be cast to {target}: strings are not parsed as numbers")
        raise ElementTypeError(str(problem), str(problem))


def check_rounding(call: OperatorCall) -> None:
    """Raise ArgumentError for a `round_mode` that does not exist."""
    if (mode := call.arguments.string("round_mode", "up")) not in ROUND_MODES:
        raise ArgumentError(
            f"{call.label}: argument 'round_mode' must be one of {', '.join(ROUND_MODES)}, not {mode!r}"
        )


def infer_cast(call: OperatorCall) -> list[TensorType]:
    """The input's shape with the type `to`; strings are not read as numbers."""
    target = type_argument(call, "to")
    require_convertible(call, target)
    check_rounding(call)
    return [TensorType(call.inputs[0].shape, target)]


ROUNDING_ARGS = {
    "saturate": "0: what a float type of at most 8 bits cannot hold becomes infinite or NaN, not its largest",
    "round_mode": "to float8e8m0: up (default), down or nearest",
}


class Conversion(Operator):
    """The input's elements in the output's type."""

    def prepare(self) -> Step:
        """One converting copy; a plain one when the type stays.

        Floats become uint32 by way of int64: of those beyond it NumPy gives one in a row something else than one alone.
        """
        x, y = self.x(0), self.y(0)
        if x.dtype == y.dtype:
            return partial(np.copyto, y, x)
        if is_narrow(y.dtype):
            saturate, round_mode = self.arguments.bool("saturate", True), self.arguments.string("round_mode", "up")
            return partial(to_narrow, x, y, saturate=saturate, round_mode=round_mode)
        if y.dtype == np.uint32 and x.dtype.kind in "fV":
            whole = self.working_memory(8 * x.size).view(np.int64).reshape(x.shape)
            return in_sequence([convert(x, whole), convert(whole, y)])
        return partial(write_out, x, y) if y.dtype.kind == "O" else convert(x, y)


@new_operator(
    "Cast",
    infer=infer_cast,
    doc="X with its elements converted to the type `to`: floats are cut towards zero, non-zero becomes true, "
    "strings have the number in decimal, floats with six digits behind the point.",
    input_names=("X",),
    output_names=("Y",),
    args={
        "to": "the type, by `TensorProto.DataType` number or name",
        "from_type": "X's type, as `to`; read by gradients only, which need not have it",
        **ROUNDING_ARGS,
    },
    required_args=("to",),
    image_role=ImageRole.ON_INTEGERS,
    rows=keeps_axes,
)
class Cast(Conversion):
    """Elements converted to a given type."""


@declares
def half_operator(name: str, source: TypeMeta, target: TypeMeta, doc: str) -> OpSchema:
    """The schema of a conversion from `source` to `target`."""

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, source)
        return [TensorType(call.inputs[0].shape, target)]

    return OpSchema(name, infer=infer, doc=doc, input_names=("X",), output_names=("Y",))


@half_operator("FloatToHalf", FLOAT32, FLOAT16, "float32 rounded to float16; beyond 65504 becomes infinite.")
class FloatToHalf(Conversion):
    """float32 to float16."""


@half_operator("HalfToFloat", FLOAT16, FLOAT32, "float16 widened to float32, exactly.")
class HalfToFloat(Conversion):
    """float16 to float32."""


def infer_cast_like(call: OperatorCall) -> list[TensorType]:
    """X's shape with the type of `like`; strings are not read as numbers."""
    check_rounding(call)
    require_convertible(call, call.inputs[1].meta)
    return [TensorType(call.inputs[0].shape, call.inputs[1].meta)]


@new_operator(
    "CastLike",
    infer=infer_cast_like,
    doc="X with its elements converted to the type of `like`, as Cast does it.",
    input_names=("X", "like"),
    output_names=("Y",),
    args=ROUNDING_ARGS,
    onnx=(OnnxName("CastLike", 25, {name: name for name in ROUNDING_ARGS}),),
    rows=keeps_axes,
)
class CastLike(Conversion):
    """Elements converted to the type of another tensor."""


def infer_bit_cast(call: OperatorCall) -> list[TensorType]:
    """X's shape with the type `to`, whose elements must be as large."""
    target, source = type_argument(call, "to"), call.inputs[0].meta
    if STRING in (source, target) or source.itemsize != target.itemsize:
        raise call.fail(f"the bits of {source} are none of {target}: both must be numbers of the same size")
    return [TensorType(call.inputs[0].shape, target)]


@new_operator(
    "BitCast",
    infer=infer_bit_cast,
    doc="The bits of X as elements of another type of the same size. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args={"to": "the type, by `TensorProto.DataType` number or name"},
    required_args=("to",),
)
class BitCast(Operator):
    """The same bits as another type."""

    def prepare(self) -> Step:
        """A copy of bits, but that a boolean is true for all bits except 0."""
        x, y = self.x(0), self.y(0)
        if y.dtype == np.bool_:
            return partial(np.not_equal, x.view(np.uint8), 0, out=y)
        return partial(np.copyto, y.view(x.dtype), x)


@gradient_of("Cast")
def cast_maker(request: GradientRequest) -> GradientOperators:
    """The gradient cast back: to `from_type`, or, where that is not given, to the type of X.

    Nothing passes when an integer, a boolean or a string is on either side.
    """
    target = read_type(request.arguments, request.label, "to")
    if target not in FLOAT_TYPES:
        return request.result([], {})
    if "from_type" not in request.arguments:
        made = request.plain_operator("CastLike", [request.dy(0), request.x(0)], [request.dx(0)])
        return request.result([made], {0: request.dx(0)})
    source = read_type(request.arguments, request.label, "from_type")
    if source not in FLOAT_TYPES:
        return request.result([], {})
    names = {"to": source.name.lower(), "from_type": target.name.lower()}
    return request.single("Cast", [request.dy(0)], [0], **names)


@gradient_of("CastLike")
def cast_like_maker(request: GradientRequest) -> GradientOperators:
    """The gradient cast to the type of X; `like` has none."""
    if 0 not in request.wanted:
        return request.result([], {})
    return request.single("CastLike", [request.dy(0), request.x(0)], [0])


no_gradient("BitCast")
gradient_by("FloatToHalf", "HalfToFloat", ("dY",))
gradient_by("HalfToFloat", "FloatToHalf", ("dY",))
