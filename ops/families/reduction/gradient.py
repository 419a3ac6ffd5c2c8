"""Gradients of the reductions: what each element contributed to the sum, mean, product, extreme or norm it went into.

The gradient of an extreme goes to every element that equals it, as Caffe2's; that of a norm is 0 where it has none.
16-bit floats are computed in float32.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import declares
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.traits import Rows
from dagexec.ops.base.blocks import Array, compute_dtype, convert, is_narrow
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.reduction.axes import (
    AVERAGE_ARGS,
    COUNT_ARGS,
    REDUCED_ARGS,
    Axes,
    AxesReader,
    all_axes,
    back_axes,
    check_lengths,
    front_axes,
    has_lengths,
    one_axis_of_three,
    output_shape,
    places_along,
    reduced_axes,
    require_lengths,
    tail_axes,
)

NAMES = ("X", "Y", "dY")


def _of_input(call: OperatorCall, names: Sequence[str]) -> OperatorCall:
    """The call as the reduction of X has it."""
    return replace(call, inputs=(call.inputs[names.index("X")],))


class ReductionGradient(Operator):
    """Base of the gradients of reductions.

    Attributes:
        axes: which axes of X the reduction is over.
        names: which of X, Y and dY the inputs are.
    """

    axes: ClassVar[AxesReader]
    names: ClassVar[tuple[str, ...]]

    def prepare(self) -> Step:
        """Compute dX in its own type, or in float32 when that has 16 bits."""
        dx = self.y(0)
        if not dx.size:
            return nothing_to_do
        axes, _ = type(self).axes(_of_input(self.call(), self.names))
        arrays = {name: self.x(index) for index, name in enumerate(self.names)}
        kept = output_shape(dx.shape, axes, True)
        steps: list[Step] = []
        for name in self.read():
            if is_narrow(dx.dtype):
                wide = self.scratch(arrays[name].shape, compute_dtype(dx.dtype))
                steps.append(convert(arrays[name], wide))
                arrays[name] = wide
            if name != "X":
                arrays[name] = arrays[name].reshape(kept)
        target = self.scratch(dx.shape, compute_dtype(dx.dtype)) if is_narrow(dx.dtype) else dx
        if len(self.input_blobs) > len(self.names):
            steps += self._of_prefixes(arrays, target, axes)
        else:
            steps += self.passes(arrays, target, axes, math.prod(dx.shape[axis] for axis in axes))
        return in_sequence(steps if target is dx else [*steps, convert(target, dx)])

    def _of_prefixes(self, arrays: dict[str, Array], dx: Array, axes: Axes) -> list[Step]:
        """The gradient as of all elements, divided by the lengths for a mean, and 0 behind them."""
        size, lengths = dx.shape[axes[0]], self.x(len(self.names)).reshape(output_shape(dx.shape, axes, True))
        places, behind = places_along(axes[0], dx.shape), self.scratch(dx.shape, np.bool_)
        divisors = self.scratch(lengths.shape, dx.dtype)
        mean: list[Step] = [
            partial(np.maximum, lengths, 1, out=divisors, casting="unsafe"),
            partial(np.divide, dx, divisors, out=dx),
        ]
        return [
            partial(check_lengths, lengths, size, self.label),
            *self.passes(arrays, dx, axes, 1),
            *(mean if isinstance(self, MeanGradient) else []),
            partial(np.greater_equal, places, lengths, out=behind),
            partial(np.copyto, dx, 0, where=behind),
        ]

    def read(self) -> tuple[str, ...]:
        """Which of the inputs are read; of the others only the shape matters."""
        return self.names

    @abstractmethod
    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        """The NumPy calls that compute dX. Y and dY have the reduced axes with size 1; `count` elements are reduced."""


class SumGradient(ReductionGradient):
    """dX = dY."""

    def read(self) -> tuple[str, ...]:
        return ("dY",)

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        return [partial(np.copyto, dx, arrays["dY"])]


class MeanGradient(SumGradient):
    """dX = dY / the number of elements."""

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        return [partial(np.divide, arrays["dY"], np.asarray(count, dx.dtype), out=dx)]


class ElementSumGradient(MeanGradient):
    """dX = dY, divided by the number of elements where argument `average` says so."""

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        return super().passes(arrays, dx, axes, count if self.arguments.bool("average") else 1)


class SquareSumGradient(ReductionGradient):
    """dX = 2 X dY, divided by the number of elements where argument `average` says so."""

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        """The factor, and one product."""
        factor = self.scratch((1,) * dx.ndim, dx.dtype)
        scale = 2 / count if self.arguments.bool("average") else 2.0
        return [
            scalar_pass(np.multiply, arrays["dY"], scale, factor),
            partial(np.multiply, arrays["X"], factor, out=dx),
        ]


class ExtremeGradient(ReductionGradient):
    """dX = dY where X equals Y, else 0; also where dY is infinite or not a number."""

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        """A comparison, and the copy of dY where it holds."""
        equal = self.scratch(dx.shape, np.bool_)
        return [
            partial(np.equal, arrays["X"], arrays["Y"], out=equal),
            partial(dx.fill, 0),
            partial(np.copyto, dx, arrays["dY"], where=equal),
        ]


class MagnitudeGradient(ReductionGradient):
    """dX = dY sign(X); 0 where X is 0."""

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        """The signs, and one product."""
        return [partial(np.sign, arrays["X"], out=dx), partial(np.multiply, dx, arrays["dY"], out=dx)]


class NormGradient(ReductionGradient):
    """dX = dY X / Y; 0 where Y is 0."""

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        """The quotients X / Y, which are at most 1, and one product."""
        nonzero = self.scratch(arrays["Y"].shape, np.bool_)
        return [
            partial(np.not_equal, arrays["Y"], 0, out=nonzero),
            partial(dx.fill, 0),
            partial(np.divide, arrays["X"], arrays["Y"], out=dx, where=nonzero),
            partial(np.multiply, dx, arrays["dY"], out=dx),
        ]


class ProductGradient(ReductionGradient):
    """dX = dY times the product of the other elements, which is right for zeros, too.

    That product is the one of all elements before, times the one of all behind.
    """

    def read(self) -> tuple[str, ...]:
        return ("X", "dY")

    def passes(self, arrays: dict[str, Array], dx: Array, axes: Axes, count: int) -> list[Step]:
        """Running products of rows, forwards and backwards; the reduced axes are moved to the end and folded."""
        last = tuple(range(dx.ndim - len(axes), dx.ndim))
        x, result = np.moveaxis(arrays["X"], axes, last), np.moveaxis(dx, axes, last)
        rows, before, behind = (self.scratch((dx.size // count, count), dx.dtype) for _ in range(3))
        others = result.shape
        backwards = behind[:, ::-1]
        return [
            partial(np.copyto, rows.reshape(others), x),
            partial(before.fill, 1),
            partial(behind.fill, 1),
            partial(np.multiply.accumulate, rows[:, :-1], axis=1, out=before[:, 1:]),
            partial(np.multiply.accumulate, rows[:, :0:-1], axis=1, out=backwards[:, 1:]),
            partial(np.multiply, before, behind, out=before),
            partial(np.multiply, before.reshape(others), np.moveaxis(arrays["dY"], axes, last), out=result),
        ]


@declares
def _operator(name: str, axes: AxesReader, args: dict[str, str], names: tuple[str, ...], doc: str) -> OpSchema:
    prefixes = args is COUNT_ARGS

    def infer(call: OperatorCall) -> list[TensorType]:
        kind = call.inputs[names.index("X")]
        call.require_types(names.index("X"), *FLOAT_TYPES)
        call.require_same_type(*range(len(names)))
        reduced, keep = axes(_of_input(call, names))
        call.arguments.bool("average")
        shape = output_shape(kind.shape, reduced, keep)
        for index, one in enumerate(names):
            if one != "X":
                call.require_shape(index, shape, f"{one}: what the reduction of X gives")
        if prefixes and has_lengths(replace(call, inputs=(kind, *call.inputs[len(names) :])), 1):
            require_lengths(call, len(names), shape)
        return [kind]

    def rows(asked: RowsCall) -> list[Rows | None]:
        own = asked.rows[names.index("X")]
        if own is None:
            raise asked.without_rows()
        gone, keep = axes(_of_input(asked.call, names))
        if own.axis in gone:
            raise asked.mixes(own.axis)
        left = own if keep else own.at(own.axis - sum(axis < own.axis for axis in gone))
        for index, one in enumerate(asked.rows):
            if one is not None and one != (own if names[index : index + 1] == ("X",) else left):
                raise asked.refuse(f"input {index} has rows {one}, expected {left}")
        return [own]

    return OpSchema(
        name,
        inputs=(len(names), len(names) + prefixes),
        infer=infer,
        doc=f"Gradient of {name.removesuffix('Gradient')}, whose arguments it takes: {doc}",
        input_names=(*names, "lengths") if prefixes else names,
        output_names=("dX",),
        args=args,
        rows=rows,
    )


def _define(
    of: str, base: type[ReductionGradient], axes: AxesReader, args: dict[str, str], names: tuple[str, ...]
) -> None:
    """Register the gradient of reduction `of`, computed by `base`, with the inputs `names`, and its maker."""
    name = f"{of}Gradient"
    doc = (base.__doc__ or "").partition("\n")[0]
    members = {"axes": staticmethod(axes), "names": names, "__doc__": doc, "__module__": __name__}
    _operator(name, axes, args, names, doc)(type(name, (base,), members))

    @gradient_of(of)
    def maker(request: GradientRequest) -> GradientOperators:
        blobs = {"X": request.x(0), "Y": request.y(0), "dY": request.dy(0)}
        lengths = request.definition.input[1:]
        return request.single(name, [*(blobs[one] for one in names), *lengths], [0])


_WHOLE = ("dY", "X", "Y")
_SHAPED = ("dY", "X")
_BY_NAME: dict[str, type[ReductionGradient]] = {
    "Sum": SumGradient,
    "Mean": MeanGradient,
    "Max": ExtremeGradient,
    "Min": ExtremeGradient,
    "Prod": ProductGradient,
    "L1": MagnitudeGradient,
    "L2": NormGradient,
}
for _name, _base in _BY_NAME.items():
    _define(f"Reduce{_name}", _base, reduced_axes, REDUCED_ARGS, _WHOLE)
for _side, _axes in (("Front", front_axes), ("Back", back_axes)):
    _define(f"Reduce{_side}Sum", SumGradient, _axes, COUNT_ARGS, _SHAPED)
    _define(f"Reduce{_side}Mean", MeanGradient, _axes, COUNT_ARGS, _SHAPED)
    _define(f"Reduce{_side}Max", ExtremeGradient, _axes, COUNT_ARGS, _WHOLE)
_define("ReduceTailSum", SumGradient, tail_axes, {}, _SHAPED)
_define("RowwiseMax", ExtremeGradient, one_axis_of_three(2), {}, NAMES)
_define("ColwiseMax", ExtremeGradient, one_axis_of_three(1), {}, NAMES)
_define("SumElements", ElementSumGradient, all_axes, AVERAGE_ARGS, ("X", "dY"))
_define("SumSqrElements", SquareSumGradient, all_axes, AVERAGE_ARGS, ("X", "dY"))
no_gradient("ArgMax", "ArgMin")
