"""Reductions: sums, means, extremes and norms over some axes, or over leading or trailing axes.

16-bit floats are accumulated in float32. A sum over no elements is 0, a mean NaN; an extreme over none is the least or
greatest value of the type, where axes are named, else an error.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT32, INT64, NUMBER_TYPES, TypeMeta
from dagexec.core.expressions import (
    Expression,
    absolute,
    element,
    row_max,
    row_mean,
    row_min,
    row_sum,
    sqrt,
    square,
)
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.core.rows import reduced, summing
from dagexec.core.schema import Cost, ExpressionRule, OperatorCall, OpSchema, TensorType
from dagexec.core.traits import ImageRole
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.integers import given_axes
from dagexec.ops.base.passes import scalar_pass

Axes = tuple[int, ...]
AxesReader = Callable[[OperatorCall], tuple[Axes, bool]]
"""Says which axes of input 0 are reduced, and whether they stay with size 1."""


def reduction_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    """One operation an input element."""
    kind = call.inputs[0]
    return Cost(kind.elements, kind.nbytes, sum(output.nbytes for output in outputs))


def named_axes(call: OperatorCall) -> tuple[Axes, bool]:
    """Arguments `axes` (default all; negative from the end) and `keepdims`. Raises ShapeError or ArgumentError."""
    rank = len(call.inputs[0].shape)
    axes = call.arguments.ints("axes")
    for axis in axes:
        if not -rank <= axis < rank:
            raise call.fail(f"argument 'axes' must be in [{-rank}, {rank - 1}], found {axes}")
    found = sorted(axis % rank for axis in axes)
    if len(set(found)) != len(found):
        raise ArgumentError(f"{call.label}: argument 'axes' names an axis twice: {axes}")
    return tuple(found or range(rank)), call.arguments.bool("keepdims", True)


def reduced_axes(call: OperatorCall) -> tuple[Axes, bool]:
    """As `named_axes`, where input 1 may hold the axes; none of them are all, or none with `noop_with_empty_axes`."""
    keep = call.arguments.bool("keepdims", True)
    axes = given_axes(call, "axes")
    if not axes and call.arguments.bool("noop_with_empty_axes"):
        return (), keep
    if len(call.inputs) == 1:
        return named_axes(call)
    rank = len(call.inputs[0].shape)
    found = sorted({axis % rank for axis in axes or () if -rank <= axis < rank})
    if len(found) != len(axes or ()):
        raise call.fail(f"expected distinct axes in [{-rank}, {rank - 1}], found {list(axes or ())}")
    return tuple(found or range(rank)), keep


def _reduced_count(call: OperatorCall) -> int:
    rank, count = len(call.inputs[0].shape), call.arguments.int("num_reduce_dim", 1)
    if not 0 <= count <= rank:
        raise ArgumentError(f"{call.label}: argument 'num_reduce_dim' must be in [0, {rank}], found {count}")
    return count


def front_axes(call: OperatorCall) -> tuple[Axes, bool]:
    """The first `num_reduce_dim` axes. Raises ArgumentError."""
    return tuple(range(_reduced_count(call))), False


def back_axes(call: OperatorCall) -> tuple[Axes, bool]:
    """The last `num_reduce_dim` axes. Raises ArgumentError."""
    rank = len(call.inputs[0].shape)
    return tuple(range(rank - _reduced_count(call), rank)), False


def tail_axes(call: OperatorCall) -> tuple[Axes, bool]:
    """All axes but the first."""
    rank = len(call.inputs[0].shape)
    if not rank:
        raise call.fail("X must have at least 1 axis, found a scalar")
    return tuple(range(1, rank)), False


def has_lengths(call: OperatorCall, without: int) -> bool:
    """True with an input behind the first `without`: how many elements of X, from the first on, go into each of Y.

    Raises ShapeError or ArgumentError unless it has an integer for each element of Y, and one axis is reduced.
    """
    if len(call.inputs) == without:
        return False
    call.require_types(without, INT32, INT64)
    count = _reduced_count(call)
    if count != 1:
        raise ArgumentError(f"{call.label}: with lengths, argument 'num_reduce_dim' must be 1, found {count}")
    return True


def require_lengths(call: OperatorCall, index: int, output: tuple[int, ...]) -> None:
    """Raise ShapeError unless input `index` has as many elements as the output."""
    if call.inputs[index].elements != math.prod(output):
        shape = call.inputs[index].shape
        raise call.fail(f"expected a length for each of {math.prod(output)} elements of Y, found shape {shape}")


def check_lengths(lengths: Array, most: int, label: str) -> None:
    """Raise IndexError, naming the operator `label`, unless 0 <= lengths <= most."""
    bad = lengths[(lengths < 0) | (lengths > most)]
    if bad.size:
        raise IndexError(f"{label}: length {bad[0]} must be in [0, {most}]")


def one_axis_of_three(axis: int) -> AxesReader:
    """Axis `axis` of a tensor that must have three."""

    def read(call: OperatorCall) -> tuple[Axes, bool]:
        call.require_rank(0, 3)
        return (axis,), False

    return read


def output_shape(shape: tuple[int, ...], axes: Axes, keep: bool) -> tuple[int, ...]:
    """`shape` without `axes`, or with these of size 1 where they stay."""
    if keep:
        return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    return tuple(size for axis, size in enumerate(shape) if axis not in axes)


class Reduction(Operator):
    """Base of the reductions.

    Attributes:
        axes: which axes are reduced.
    """

    axes: ClassVar[AxesReader]

    def prepare(self) -> Step:
        """Reduce into the output, or into a float32 accumulator when that is of 16 bits."""
        x, y = self.x(0), self.y(0)
        axes, _ = type(self).axes(self.call())
        kept = y.reshape(output_shape(x.shape, axes, True))
        total = self.scratch(kept.shape, compute_dtype(y.dtype)) if is_narrow(y.dtype) else kept
        count = math.prod(x.shape[axis] for axis in axes)
        steps = self.passes(x, total, axes, count)
        return in_sequence(steps if total is kept else [*steps, convert(total, kept)])

    @abstractmethod
    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        """The NumPy calls that reduce `axes` of `x`, `count` elements each, into `total`, where they have size 1."""


def reduce_pass(ufunc: np.ufunc, x: Array, total: Array, axes: Axes) -> Step:
    """The pass that reduces `axes` of `x` with `ufunc` into `total`, in the dtype of `total`."""
    return partial(ufunc.reduce, x, axis=axes, dtype=total.dtype, keepdims=True, out=total)


class SumReduction(Reduction):
    """Sum."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        return [reduce_pass(np.add, x, total, axes)]


class MeanReduction(Reduction):
    """Mean."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        """The sum, divided by the number of elements."""
        if count == 0:
            return [partial(total.fill, math.nan)]
        return [reduce_pass(np.add, x, total, axes), scalar_pass(np.divide, total, count, total)]


class MaxReduction(Reduction):
    """Maximum; NaN where there is one."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        if count == 0:
            return [partial(total.fill, extremes_over_nothing(self.call(), total.dtype)[0])]
        return [reduce_pass(np.maximum, x, total, axes)]


class MinReduction(Reduction):
    """Minimum; NaN where there is one."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        if count == 0:
            return [partial(total.fill, extremes_over_nothing(self.call(), total.dtype)[1])]
        return [reduce_pass(np.minimum, x, total, axes)]


def extremes_of(dtype: np.dtype[Any]) -> tuple[float, float]:
    """The least and the greatest value of a type."""
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    return -math.inf, math.inf


def extremes_over_nothing(call: OperatorCall, dtype: np.dtype[Any]) -> tuple[float, float]:
    """A maximum and a minimum over no elements: the least and the greatest number, or with `infinite` infinities."""
    if dtype.kind in "biu" or call.arguments.bool("infinite"):
        return extremes_of(dtype)
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    return float(limits.min), float(limits.max)


class PrefixReduction(Reduction):
    """Base of the reductions of leading or trailing axes, which may be of the first elements only: see `has_lengths`.

    As in Caffe2 the first element of all counts even where the length is 0, and a mean is divided by the length.
    """

    def prepare(self) -> Step:
        """With lengths, what lies behind them is replaced by what changes no result."""
        if len(self.input_blobs) == 1:
            return super().prepare()
        x, y = self.x(0), self.y(0)
        axes, _ = type(self).axes(self.call())
        shape, work = output_shape(x.shape, axes, True), compute_dtype(y.dtype)
        size, lengths = x.shape[axes[0]], self.x(1).reshape(shape)
        prefix, inside = self.scratch(x.shape, work), self.scratch(x.shape, np.bool_)
        total = self.scratch(shape, work)
        first = np.moveaxis(inside, axes[0], 0)[:1]
        return in_sequence(
            [
                partial(check_lengths, lengths, size, self.label),
                partial(np.less, places_along(axes[0], x.shape), lengths, out=inside),
                partial(np.copyto, first, True),
                partial(prefix.fill, self.neutral(work)),
                partial(np.copyto, prefix, x, where=inside),
                *self.prefix_passes(prefix, total, axes, lengths),
                partial(np.copyto, y.reshape(shape), total, casting="same_kind"),
            ]
        )

    def neutral(self, dtype: np.dtype[Any]) -> float:
        """What changes no result."""
        return 0

    def prefix_passes(self, prefix: Array, total: Array, axes: Axes, lengths: Array) -> list[Step]:
        """The NumPy calls that reduce the first elements, the others being neutral."""
        return self.passes(prefix, total, axes, 1)


def places_along(axis: int, shape: tuple[int, ...]) -> Array:
    """0, 1, 2, ... along `axis` of a tensor of `shape`; the other axes have size 1."""
    return np.arange(shape[axis]).reshape([-1 if one == axis else 1 for one in range(len(shape))])


class PrefixSum(PrefixReduction, SumReduction):
    """Sum, also of the first elements only."""


class PrefixMean(PrefixReduction, MeanReduction):
    """Mean, also of the first elements only."""

    def prefix_passes(self, prefix: Array, total: Array, axes: Axes, lengths: Array) -> list[Step]:
        """The sum, divided by the lengths; by 0 it is infinite."""

        def divide() -> None:
            with np.errstate(divide="ignore", invalid="ignore"):
                np.divide(total, lengths, out=total, casting="same_kind")

        return [reduce_pass(np.add, prefix, total, axes), divide]


class PrefixMax(PrefixReduction, MaxReduction):
    """Maximum, also of the first elements only."""

    def neutral(self, dtype: np.dtype[Any]) -> float:
        return extremes_of(dtype)[0]


class ProductReduction(Reduction):
    """Product."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        return [reduce_pass(np.multiply, x, total, axes)]


class L1Reduction(Reduction):
    """Sum of magnitudes."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        """The magnitudes, and their sum."""
        magnitudes = self.scratch(x.shape, total.dtype)
        absolute = partial(np.absolute, x, out=magnitudes, dtype=total.dtype)
        return [absolute, reduce_pass(np.add, magnitudes, total, axes)]


class SquareReduction(Reduction):
    """Sum of squares; over all elements of a float32 or float64 tensor it is one BLAS dot product."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        """The squares, and their sum."""
        if len(axes) == x.ndim and x.dtype == total.dtype and x.dtype.kind == "f":
            flat = x.reshape(-1)
            return [partial(np.dot, flat, flat, out=total.reshape(()))]
        squares = self.scratch(x.shape, total.dtype)
        return [partial(np.square, x, out=squares, dtype=total.dtype), reduce_pass(np.add, squares, total, axes)]


class L2Reduction(SquareReduction):
    """Root of the sum of squares."""

    def passes(self, x: Array, total: Array, axes: Axes, count: int) -> list[Step]:
        """The sum of squares, and its root."""
        return [*super().passes(x, total, axes, count), partial(np.sqrt, total, out=total)]


AXES_ARGS = {
    "axes": "axes to reduce, negative ones counted from the end (default all)",
    "keepdims": "1: reduced axes stay, with size 1 (default 1)",
}
REDUCED_ARGS = AXES_ARGS | {
    "noop_with_empty_axes": "1: without axes none is reduced, so that each element is a result (default 0)"
}
EXTREME_ARGS = REDUCED_ARGS | {
    "infinite": "1: over no elements floats are infinite, as in ONNX; else the least or greatest number (default 0)"
}
COUNT_ARGS = {"num_reduce_dim": "how many axes are reduced (default 1)"}
UNREAD_COUNT = ("num_reduce_dims",)
"""Caffe2's doc strings call `num_reduce_dim` so; its code does not read it."""


def reduction_schema(
    name: str,
    doc: str,
    axes: AxesReader,
    args: dict[str, str],
    metas: tuple[TypeMeta, ...],
    *,
    extreme: bool,
    prefixes: bool,
    role: ImageRole | None = None,
    expression: ExpressionRule | None = None,
) -> OpSchema:
    """The schema of a reduction; an `extreme` has no value over no elements, `prefixes` may have lengths.

    One by `reduced_axes` may have its axes as input 1.
    """
    optional = ("lengths",) if prefixes else ("axes",) if axes is reduced_axes else ()

    def infer(call: OperatorCall) -> list[TensorType]:
        meta = call.require_types(0, *metas)
        reduced, keep = axes(call)
        shape = call.inputs[0].shape
        output = TensorType(output_shape(shape, reduced, keep), meta)
        if prefixes and has_lengths(call, 1):
            require_lengths(call, 1, output.shape)
        if extreme and output.elements and 0 in shape:
            raise call.fail("an axis without elements has no maximum or minimum")
        return [output]

    return OpSchema(
        name,
        inputs=(1, 1 + len(optional)),
        infer=infer,
        doc=doc + (" With lengths it is over the first so many elements only." if prefixes else ""),
        input_names=("X", *optional),
        output_names=("Y",),
        args=args,
        unread_args=UNREAD_COUNT if args is COUNT_ARGS else (),
        value_inputs=(1,) if axes is reduced_axes else (),
        cost=reduction_cost,
        image_role=role,
        expression=expression,
        rows=summing(reduced(axes), lambda call: axes(call)[0]),
    )


JOINED: Mapping[type[Reduction], Callable[[Expression], Expression]] = {
    SumReduction: row_sum,
    MeanReduction: row_mean,
    MaxReduction: row_max,
    MinReduction: row_min,
    L1Reduction: lambda x: row_sum(absolute(x)),
    L2Reduction: lambda x: sqrt(row_sum(square(x))),
}
"""What reductions are, over the last axis alone."""


def _define(
    name: str,
    base: type[Reduction],
    axes: AxesReader,
    doc: str,
    args: dict[str, str],
    metas: tuple[TypeMeta, ...] = NUMBER_TYPES,
) -> type[Reduction]:
    """Register reduction `name`: what `base` computes, over `axes`."""
    members = {"axes": staticmethod(axes), "__doc__": doc, "__module__": __name__}
    extreme = issubclass(base, MaxReduction | MinReduction) and axes is not reduced_axes
    prefixes = issubclass(base, PrefixReduction)
    role = ImageRole.REDUCTION if axes is reduced_axes else None

    def expression(call: OperatorCall) -> Expression | None:
        last = len(call.inputs[0].shape) - 1
        return JOINED[base](element(0)) if base in JOINED and axes(call) == ((last,), True) else None

    traits: dict[str, Any] = {"extreme": extreme, "prefixes": prefixes, "role": role, "expression": expression}
    schema = reduction_schema(name, doc, axes, args, metas, **traits)
    return operator(schema)(type(name, (base,), members))


ReduceSum = _define("ReduceSum", SumReduction, reduced_axes, "Sum over `axes`.", REDUCED_ARGS)
ReduceMean = _define("ReduceMean", MeanReduction, reduced_axes, "Mean over `axes`.", REDUCED_ARGS, FLOAT_TYPES)
ReduceMax = _define(
    "ReduceMax",
    MaxReduction,
    reduced_axes,
    "Maximum over `axes`; over no elements the least value of the type.",
    EXTREME_ARGS,
    (*NUMBER_TYPES, BOOL),
)
ReduceMin = _define(
    "ReduceMin",
    MinReduction,
    reduced_axes,
    "Minimum over `axes`; over no elements the greatest value of the type.",
    EXTREME_ARGS,
    (*NUMBER_TYPES, BOOL),
)
ReduceProd = _define("ReduceProd", ProductReduction, reduced_axes, "Product over `axes`.", REDUCED_ARGS)
ReduceL1 = _define("ReduceL1", L1Reduction, reduced_axes, "Sum of magnitudes over `axes`.", REDUCED_ARGS)
ReduceL2 = _define(
    "ReduceL2", L2Reduction, reduced_axes, "Root of the sum of squares over `axes`.", REDUCED_ARGS, FLOAT_TYPES
)
ReduceFrontSum = _define(
    "ReduceFrontSum", PrefixSum, front_axes, "Sum over the first `num_reduce_dim` axes.", COUNT_ARGS
)
ReduceFrontMean = _define(
    "ReduceFrontMean", PrefixMean, front_axes, "Mean over the first `num_reduce_dim` axes.", COUNT_ARGS, FLOAT_TYPES
)
ReduceFrontMax = _define(
    "ReduceFrontMax", PrefixMax, front_axes, "Maximum over the first `num_reduce_dim` axes.", COUNT_ARGS
)
ReduceBackSum = _define("ReduceBackSum", PrefixSum, back_axes, "Sum over the last `num_reduce_dim` axes.", COUNT_ARGS)
ReduceBackMean = _define(
    "ReduceBackMean", PrefixMean, back_axes, "Mean over the last `num_reduce_dim` axes.", COUNT_ARGS, FLOAT_TYPES
)
ReduceBackMax = _define(
    "ReduceBackMax", PrefixMax, back_axes, "Maximum over the last `num_reduce_dim` axes.", COUNT_ARGS
)
ReduceTailSum = _define("ReduceTailSum", SumReduction, tail_axes, "Sum over all axes but the first.", {})
RowwiseMax = _define(
    "RowwiseMax", MaxReduction, one_axis_of_three(2), "Maximum of each row: batch x M x N to batch x M.", {}
)
ColwiseMax = _define(
    "ColwiseMax", MaxReduction, one_axis_of_three(1), "Maximum of each column: batch x M x N to batch x N.", {}
)
