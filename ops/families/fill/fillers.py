"""Fillers: tensors made from arguments or from a random generator. `dagexec.ops.families.fill.fill_values` reads the
values.

The shape is the argument `shape`; or that of input 0, with `extra_shape` after it; or, with `input_as_shape`, what
input 0 holds. Random fillers draw from the operator's own generator, anew in every run; `device_option.random_seed`
makes the draws repeatable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import BOOL, FLOAT32, FLOAT64, INT16, INT32, INT64, STRING, UINT8, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import declares, operator
from dagexec.core.rows import made_from_sizes
from dagexec.core.rows_call import RowsRule
from dagexec.core.schema import Cost, OperatorCall, OpSchema, TensorType, first_to_first, memory_cost
from dagexec.core.shapes import element_count
from dagexec.errors import ArgumentError
from dagexec.ops.base.integers import integers_of
from dagexec.ops.families.fill.fill_values import fill_type, fill_value, given_count, given_type, given_values

Array = npt.NDArray[Any]
InferType = Callable[[OperatorCall], TypeMeta]

SHAPE_ARGS = {
    "shape": "the shape, when there is no input",
    "extra_shape": "sizes to append to the input's shape",
    "input_as_shape": "1: the input holds the shape, an integer vector (default 0: its own shape is used)",
}
_MAX_AXES = 64  # of a NumPy array


def fill_shape(call: OperatorCall) -> tuple[int, ...]:
    """The shape to fill. Raises ShapeError for a negative size, ArgumentError for arguments that contradict."""
    arguments = call.arguments
    if not call.inputs:
        for name in ("extra_shape", "input_as_shape"):
            if name in arguments and (arguments.ints(name) if name == "extra_shape" else arguments.bool(name)):
                raise ArgumentError(f"{call.label}: argument {name!r} requires an input that gives the shape")
        shape = tuple(arguments.ints("shape"))
    elif "shape" in arguments:
        raise ArgumentError(f"{call.label}: expected the shape either from the input or from 'shape', found both")
    else:
        shape = integers_of(call, 0) if arguments.bool("input_as_shape") else call.inputs[0].shape
        shape += tuple(arguments.ints("extra_shape"))
    if len(shape) > _MAX_AXES or any(size < 0 for size in shape):
        raise call.fail(f"the shape must have at most {_MAX_AXES} axes and no negative size, found {shape}")
    return shape


def filler_schema(
    name: str,
    meta: TypeMeta | InferType,
    doc: str,
    args: dict[str, str],
    *,
    check: Callable[[OperatorCall, tuple[int, ...]], None] | None = None,
    inputs: tuple[int, int] = (0, 1),
    random: bool = False,
    rows: RowsRule | None = None,
) -> OpSchema:
    """The schema of a filler of element type `meta`; `check(call, shape)` raises for arguments that do not fit.

    A filler passes on no gradient.
    """
    no_gradient(name)

    def infer(call: OperatorCall) -> list[TensorType]:
        kind = TensorType(fill_shape(call), meta if isinstance(meta, TypeMeta) else meta(call))
        if check is not None:
            check(call, kind.shape)
        if call.inputs and call.definition.input[0] == call.definition.output[0] and kind != call.inputs[0]:
            raise call.fail(f"in place the output must have the input's shape and type, found {kind}")
        return [kind]

    return OpSchema(
        name,
        inputs=inputs,
        infer=infer,
        doc=doc,
        input_names=("input",) if inputs[1] == 1 else ("shape", "min", "max"),
        output_names=("output",),
        args=args | SHAPE_ARGS,
        inplace=first_to_first,
        cost=_drawing_cost if random else _writing_cost,
        value_inputs=(0,),
        values_read_if="input_as_shape",
        reproducible=not random,
        rows=rows,
    )


def _writing_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return Cost(0, 0, memory_cost(call, outputs).bytes_written)


def _drawing_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    cost = memory_cost(call, outputs, 100.0)  # a random number takes some 2 to 10 ns
    return Cost(cost.flops, 0, cost.bytes_written)


@operator(
    filler_schema(
        "ConstantFill",
        fill_type,
        "Every element is `value`.",
        {
            "value": "the element: a number, or a string (default 0)",
            "dtype": "the element type, by `TensorProto.DataType` number or name (default: float32 for a float `value`,"
            " int64 for an integer, string for a string, float32 without `value`)",
            "input_type": "1: the element type is that of the input (default 0)",
        },
        check=lambda call, _shape: _discard(fill_value(call)),
        rows=made_from_sizes,
    )
)
class ConstantFill(Operator):
    """One value everywhere."""

    def prepare(self) -> Step:
        return partial(self.y(0).fill, fill_value(self.call()))


def _discard(_value: object) -> None:
    """Take a value that was computed for its errors."""


def _check_diagonal(call: OperatorCall, shape: tuple[int, ...]) -> None:
    fill_value(call)
    if len(shape) < 2 or (len(shape) > 2 and len(set(shape)) > 1):
        raise call.fail(f"the shape must have 2 axes, or more of equal size, found {shape}")


@operator(
    filler_schema(
        "DiagonalFill",
        fill_type,
        "`value` on the diagonal (where all indices are equal), 0 elsewhere. Of 2 axes, or of more with one size.",
        {"value": "the element of the diagonal (default 0)", "dtype": "the element type, as of ConstantFill"},
        check=_check_diagonal,
    )
)
class DiagonalFill(Operator):
    """A value on the diagonal."""

    def prepare(self) -> Step:
        """Clear, then fill a view of the diagonal."""
        y = self.y(0)
        length = min(y.shape)
        stride = sum(element_count(y.shape[axis + 1 :]) for axis in range(y.ndim))
        diagonal = y.reshape(-1)[: length * stride : stride]
        zero, value = (b"" if y.dtype == object else y.dtype.type(0)), fill_value(self.call())

        def fill() -> None:
            y.fill(zero)
            diagonal.fill(value)

        return fill


@operator(filler_schema("RangeFill", FLOAT32, "0, 1, 2, ... in the order of the elements (float32).", {}))
class RangeFill(Operator):
    """Consecutive numbers."""

    def prepare(self) -> Step:
        """The numbers are made once; the step copies them."""
        y = self.y(0)
        return partial(np.copyto, y, np.arange(y.size, dtype=np.float32).reshape(y.shape))


@declares
def given_operator(name: str, meta: TypeMeta) -> OpSchema:
    """The schema of a filler whose elements are listed in `values`."""

    def check(call: OperatorCall, shape: tuple[int, ...]) -> None:
        count = given_count(call, given_type(call, meta))
        if count != element_count(shape):
            wanted = element_count(shape)
            raise call.fail(f"argument 'values' must hold {wanted} values for shape {shape}, found {count}")

    return filler_schema(
        name,
        lambda call: given_type(call, meta),
        "The elements listed in `values`, in order.",
        {"values": "the elements", "dtype": f"the element type, by number or name (default {meta})"},
        check=check,
    )


class GivenTensor(Operator):
    """Elements listed in the def."""

    def prepare(self) -> Step:
        """One copy of the listed values."""
        y = self.y(0)
        return partial(np.copyto, y, given_values(self.call(), self.output(0).meta).reshape(y.shape))


@given_operator("GivenTensorFill", FLOAT32)
class GivenTensorFill(GivenTensor):
    """float32 values, unless `dtype` says otherwise."""


@given_operator("GivenTensorDoubleFill", FLOAT64)
class GivenTensorDoubleFill(GivenTensor):
    """float64 values; a NetDef stores them as float32."""


@given_operator("GivenTensorIntFill", INT32)
class GivenTensorIntFill(GivenTensor):
    """int32 values."""


@given_operator("GivenTensorInt64Fill", INT64)
class GivenTensorInt64Fill(GivenTensor):
    """int64 values."""


@given_operator("GivenTensorInt16Fill", INT16)
class GivenTensorInt16Fill(GivenTensor):
    """int16 values."""


@given_operator("GivenTensorUInt8Fill", UINT8)
class GivenTensorUInt8Fill(GivenTensor):
    """uint8 values."""


@given_operator("GivenTensorBoolFill", BOOL)
class GivenTensorBoolFill(GivenTensor):
    """Truth values."""


@given_operator("GivenTensorStringFill", STRING)
class GivenTensorStringFill(GivenTensor):
    """Strings of bytes."""


def fan_in(call: OperatorCall, shape: tuple[int, ...]) -> int:
    """Inputs of a unit of weights (M, ...): the elements of one row. Raises ShapeError without axes."""
    if not shape:
        raise call.fail("the shape must have at least 1 axis, found ()")
    return element_count(shape[1:])


def fan_out(call: OperatorCall, shape: tuple[int, ...]) -> int:
    """Outputs of a unit of weights (M, C, ...): elements without axis 1. Raises ShapeError with less than 2 axes."""
    if len(shape) < 2:
        raise call.fail(f"the shape must have at least 2 axes, found {shape}")
    return element_count((shape[0], *shape[2:]))


def _uniform(random: np.random.Generator, y: Array, low: float, high: float) -> None:
    random.random(out=y, dtype=y.dtype)
    np.multiply(y, y.dtype.type(high - low), out=y)
    np.add(y, y.dtype.type(low), out=y)


def _normal(random: np.random.Generator, y: Array, mean: float, std: float) -> None:
    random.standard_normal(out=y, dtype=y.dtype)
    np.multiply(y, y.dtype.type(std), out=y)
    np.add(y, y.dtype.type(mean), out=y)


@operator(
    filler_schema(
        "XavierFill",
        FLOAT32,
        "Uniform in ±sqrt(3 / fan_in), fan_in the elements of a row (Glorot and Bengio 2010, as Caffe scales it).",
        {},
        check=lambda call, shape: _discard(fan_in(call, shape)),
        random=True,
    )
)
class XavierFill(Operator):
    """Uniform weights scaled by the fan-in."""

    def prepare(self) -> Step:
        """Draw into the output and scale it there."""
        y = self.y(0)
        bound = math.sqrt(3.0 / max(1, fan_in(self.call(), y.shape)))
        return partial(_uniform, self.random, y, -bound, bound)


@operator(
    filler_schema(
        "MSRAFill",
        FLOAT32,
        "Normal with mean 0 and deviation sqrt(2 / fan_out), fan_out the elements without axis 1 (He et al. 2015).",
        {},
        check=lambda call, shape: _discard(fan_out(call, shape)),
        random=True,
    )
)
class MSRAFill(Operator):
    """Normal weights scaled by the fan-out."""

    def prepare(self) -> Step:
        """Draw into the output and scale it there."""
        y = self.y(0)
        std = math.sqrt(2.0 / max(1, fan_out(self.call(), y.shape)))
        return partial(_normal, self.random, y, 0.0, std)


def _check_gaussian(call: OperatorCall, _shape: tuple[int, ...]) -> None:
    mean, std = call.arguments.float("mean", 0.0), call.arguments.float("std", 1.0)
    if not (math.isfinite(mean) and 0 <= std < math.inf):
        raise ArgumentError(f"{call.label}: 'mean' must be finite and 'std' at least 0, found {mean} and {std}")


@operator(
    filler_schema(
        "GaussianFill",
        FLOAT32,
        "Normal with the given mean and deviation (float32).",
        {"mean": "the mean (default 0)", "std": "the standard deviation (default 1)"},
        check=_check_gaussian,
        random=True,
    )
)
class GaussianFill(Operator):
    """Normal numbers."""

    def prepare(self) -> Step:
        """Draw into the output, scale and shift it there."""
        mean, std = self.arguments.float("mean", 0.0), self.arguments.float("std", 1.0)
        return partial(_normal, self.random, self.y(0), mean, std)


def _check_uniform(meta: TypeMeta) -> Callable[[OperatorCall, tuple[int, ...]], None]:
    def check(call: OperatorCall, _shape: tuple[int, ...]) -> None:
        if len(call.inputs) == 2:
            raise call.fail("expected both 'min' and 'max' as inputs 1 and 2, found only one of them")
        if len(call.inputs) == 3:
            for index in (1, 2):
                call.require_types(index, meta)
                if call.inputs[index].elements != 1:
                    raise call.fail(f"input {call.definition.input[index]!r} must hold 1 element")
            return
        low, high = _bounds(call, meta)
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise ArgumentError(f"{call.label}: 'min' must not be above 'max', both finite; found {low} and {high}")

    return check


def _bounds(call: OperatorCall, meta: TypeMeta) -> tuple[float, float]:
    if meta is FLOAT32:
        return call.arguments.float("min", 0.0), call.arguments.float("max", 1.0)
    low, high = call.arguments.int("min", 0), call.arguments.int("max", 1)
    limits = np.iinfo(np.int32)
    if not limits.min <= low <= high <= limits.max:
        raise ArgumentError(f"{call.label}: 'min' and 'max' must be int32, in order; found {low} and {high}")
    return low, high


class UniformBetween(Operator):
    """Uniform numbers between bounds that are arguments, or that inputs 1 and 2 hold when the step runs."""

    def bounds(self) -> Callable[[], tuple[Any, Any]]:
        """A function that gives the bounds, those from inputs checked."""
        if len(self.input_blobs) < 3:
            fixed = _bounds(self.call(), self.output(0).meta)
            return lambda: fixed
        low, high, label = self.x(1).reshape(-1), self.x(2).reshape(-1), self.label

        def read() -> tuple[Any, Any]:
            if not (np.isfinite(low[0]) and np.isfinite(high[0]) and low[0] <= high[0]):
                raise ValueError(f"{label}: min must not be above max, both finite; found {low[0]} and {high[0]}")
            return low[0], high[0]

        return read


_RANGE_ARGS = {"min": "the lower bound (default 0)", "max": "the upper bound (default 1)"}


@operator(
    filler_schema(
        "UniformFill",
        FLOAT32,
        "Uniform between `min` and `max` (float32), which are arguments or inputs 1 and 2.",
        _RANGE_ARGS,
        check=_check_uniform(FLOAT32),
        inputs=(0, 3),
        random=True,
    )
)
class UniformFill(UniformBetween):
    """Uniform numbers."""

    def prepare(self) -> Step:
        """Draw into the output, scale and shift it there."""
        y, random, bounds = self.y(0), self.random, self.bounds()
        return lambda: _uniform(random, y, *bounds())


@operator(
    filler_schema(
        "UniformIntFill",
        INT32,
        "Uniform integers from `min` to `max`, both included (int32); the bounds are arguments or inputs 1 and 2.",
        _RANGE_ARGS,
        check=_check_uniform(INT32),
        inputs=(0, 3),
        random=True,
    )
)
class UniformIntFill(UniformBetween):
    """Uniform integers."""

    def prepare(self) -> Step:
        """Draw, which NumPy does into memory of its own, and copy."""
        y, random, bounds = self.y(0), self.random, self.bounds()

        def fill() -> None:
            low, high = bounds()
            np.copyto(y, random.integers(low, high, y.shape, np.int32, endpoint=True))

        return fill
