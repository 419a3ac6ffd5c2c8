"""Gradients of reductions on CUDA: element-wise, but for the product, which needs that of the other elements."""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.expressions import ROW_COUNT, inputs_of
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.engines.cuda.base.constants import uploaded
from dagexec.ops.engines.cuda.base.expressed import Statements
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.engines.cuda.reduction.axes import PrefixOperator
from dagexec.ops.families.reduction.axes import output_shape, places_along
from dagexec.ops.families.reduction.gradient import NAMES, ReductionGradient

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
    """The gradient of a reduction."""

    def prepare(self) -> Step:
        assert isinstance(self, ReductionGradient)
        dx, (arrays, axes) = self.y(0), self.operands()
        if not dx.size:
            return nothing_to_do
        if type(self).form is None:
            groups = Groups(
                [Phase("factors", "s.add((double)X);", size=40)],
                each="dX = dY * (A)total0.without((double)X);",
                helpers=_PRODUCT,
            )
            given = {"X": arrays["X"], "dY": arrays["dY"]}
            return by_groups(self, "product_gradient", dx.shape, axes, groups, given, {"dX": dx})
        expression = self.expression()
        statements = Statements(lambda position: NAMES[position], names={ROW_COUNT: "A(count > 1 ? count : 1)"})
        result = statements.of(expression)
        code = " ".join([*statements.lines, f"dX = {result};"])
        given = {NAMES[position]: arrays[NAMES[position]] for position in inputs_of(expression)}
        scalars = {key: computed_scalar(dx, value) for key, value in statements.scalars.items()}
        name = type(self).schema.type.lower()
        if len(self.input_blobs) == len(self.names):
            count = {"count": np.int64(math.prod(dx.shape[axis] for axis in axes))}
            return elementwise(self, name, given, {"dX": dx}, code, {**scalars, **count})
        lengths = self.x(len(self.names)).reshape(output_shape(dx.shape, axes, True))
        inputs = {**given, "count": lengths, "place": uploaded(self, places_along(axes[0], dx.shape))}
        code += " if (place >= count) dX = A(0);"
        compute = elementwise(self, f"{name}_of_prefixes", inputs, {"dX": dx}, code, scalars)
        return in_sequence([self.lengths_check(lengths, dx.shape[axes[0]]), compute])
