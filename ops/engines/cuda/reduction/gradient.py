"""Gradients of reductions on CUDA: element-wise, but for the product, which needs that of the other elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.engines.cuda.base.constants import uploaded
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import Array
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.engines.cuda.reduction.axes import PrefixOperator
from dagexec.ops.families.reduction import gradient as reduction_gradient
from dagexec.ops.families.reduction.axes import AxesReader, output_shape, places_along
from dagexec.ops.families.reduction.gradient import ReductionGradient

_FORMS: dict[type[ReductionGradient], tuple[str, tuple[str, ...], str]] = {
    reduction_gradient.SumGradient: ("sum", ("dY",), "dX = dY;"),
    reduction_gradient.MeanGradient: ("mean", ("dY",), "dX = dY / count;"),
    reduction_gradient.ElementSumGradient: ("mean", ("dY",), "dX = dY / count;"),
    reduction_gradient.SquareSumGradient: ("squares", ("X", "dY"), "dX = X * (dY * scale);"),
    reduction_gradient.ExtremeGradient: ("extreme", ("X", "Y", "dY"), "dX = X == Y ? dY : A(0);"),
    reduction_gradient.MagnitudeGradient: ("magnitudes", ("X", "dY"), "dX = sign_of(X) * dY;"),
    reduction_gradient.NormGradient: ("length", ("X", "Y", "dY"), "dX = (Y != A(0) ? X / Y : A(0)) * dY;"),
}
"""By what a gradient computes: the name of its kernel, what it reads, and the expression."""

_PRODUCT = r"""
struct factors {
    double mantissa; i64 exponent; int zeros, infinities, negative, nans;
    __device__ void begin() { mantissa = 1.0; exponent = 0; zeros = 0; infinities = 0; negative = 0; nans = 0; }
    __device__ void normalize() {
        int power = 0;
        mantissa = frexp(mantissa, &power);
        exponent += power;
    }
    __device__ void add(double x) {
        if (x != x) { ++nans; return; }
        if (x == 0.0) { ++zeros; return; }
        if (x - x != 0.0) { ++infinities; negative += x < 0.0; return; }
        int power = 0;
        mantissa *= frexp(x, &power);
        exponent += power;
        normalize();
    }
    __device__ void join(const factors& other) {
        mantissa *= other.mantissa;
        exponent += other.exponent;
        zeros += other.zeros; infinities += other.infinities; negative += other.negative; nans += other.nans;
        normalize();
    }
    __device__ double without(double x) const {
        const double nan = (double)float_of(0x7fc00000u), infinity = (double)float_of(0x7f800000u);
        const bool is_infinite = x == x && x - x != 0.0;
        if (nans > (x != x ? 1 : 0)) return nan;
        const int zero = zeros - (x == 0.0 ? 1 : 0), infinite = infinities - (is_infinite ? 1 : 0);
        if (zero) return infinite ? nan : 0.0;
        int power = 0;
        const double own = x != x || x == 0.0 || is_infinite ? 1.0 : frexp(x, &power);
        const double rest = mantissa / own;
        if (infinite) {
            const int flips = negative - (is_infinite && x < 0.0 ? 1 : 0);
            return ((rest < 0.0) != (flips % 2 != 0)) ? -infinity : infinity;
        }
        const i64 scale = exponent - power;
        return ldexp(rest, scale > 4000 ? 4000 : scale < -4000 ? -4000 : (int)scale);
    }
};
"""
"""A product as mantissa and exponent, which neither overflows nor vanishes; zeros, infinities and NaN are counted."""


@on_cuda(*registered_kinds(ReductionGradient))
class _CudaReductionGradient(PrefixOperator):
    """The gradient of a reduction.

    Attributes:
        axes: which axes of X the reduction is over.
        names: which of X, Y and dY the inputs are.
    """

    axes: ClassVar[AxesReader]
    names: ClassVar[Sequence[str]]

    def prepare(self) -> Step:
        dx, call = self.y(0), self.call()
        if not dx.size:
            return nothing_to_do
        seen = replace(call, inputs=(call.inputs[self.names.index("X")],))
        axes, _ = type(self).axes(seen)
        kept = output_shape(dx.shape, axes, True)
        arrays = {name: self.x(index) for index, name in enumerate(self.names)}
        arrays = {name: array if name == "X" else array.reshape(kept) for name, array in arrays.items()}
        if isinstance(self, reduction_gradient.ProductGradient):
            groups = Groups(
                [Phase("factors", "s.add((double)X);", size=40)],
                each="dX = dY * (A)total0.without((double)X);",
                helpers=_PRODUCT,
            )
            given = {"X": arrays["X"], "dY": arrays["dY"]}
            return by_groups(self, "product_gradient", dx.shape, axes, groups, given, {"dX": dx})
        form = next(kind for kind in type(self).__mro__ if kind in _FORMS)
        average = self.arguments.bool("average")
        if form is reduction_gradient.ElementSumGradient and not average:
            form = reduction_gradient.SumGradient
        name, used, expression = _FORMS[form]
        count = math.prod(dx.shape[axis] for axis in axes)
        scalars = {
            reduction_gradient.MeanGradient: {"count": computed_scalar(dx, count)},
            reduction_gradient.ElementSumGradient: {"count": computed_scalar(dx, count)},
            reduction_gradient.SquareSumGradient: {"scale": computed_scalar(dx, 2 / count if average else 2.0)},
        }.get(form)
        given = {key: arrays[key] for key in used}
        if len(self.input_blobs) > len(self.names):
            return self._of_prefixes(form, given, dx, axes[0])
        return elementwise(self, f"{name}_gradient", given, {"dX": dx}, expression, scalars)

    def _of_prefixes(self, form: type[ReductionGradient], given: dict[str, Array], dx: Array, axis: int) -> Step:
        """A check of the lengths, and one kernel that gives 0 behind them."""
        name, _, expression = _FORMS[form]
        lengths = self.x(len(self.names)).reshape(output_shape(dx.shape, (axis,), True))
        places = uploaded(self, places_along(axis, dx.shape))
        inputs = {**given, "count": lengths, "place": places}
        code = f"{expression} if (place >= count) dX = A(0);"
        compute = elementwise(self, f"{name}_gradient_of_prefixes", inputs, {"dX": dx}, code)
        return in_sequence([self.lengths_check(lengths, dx.shape[axis]), compute])
