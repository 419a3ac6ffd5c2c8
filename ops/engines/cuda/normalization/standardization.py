"""InstanceNorm, GroupNorm and LayerNorm on CUDA, and their gradients: mean, deviation and the map in one kernel."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.engines.cuda.base.constants import constant_step, zero_step
from dagexec.ops.engines.cuda.base.expression import computed_scalar
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.normalization.standardization import Grouping, _Standardize
from dagexec.ops.families.normalization.standardization_gradient import _StandardizeGradient, seen_from_x

_STATISTICS = (
    Phase("sum_of<W>", "s.add((W)x);", "const A mean = (A)(total0.total / (W)w.length);"),
    Phase(
        "sum_of<W>",
        "s.add((W)A(A(x - mean) * A(x - mean)));",
        "const A deviation = sqrt(A((A)(total1.total / (W)w.length) + epsilon)), inverse = A(1) / deviation;",
    ),
)
"""The phases that give `mean`, `deviation` and `inverse` of a group; scalar `epsilon` is added to the variance."""


@on_cuda(*registered_kinds(_Standardize))
class _CudaStandardize(CudaOperator):
    """Y = (X - mean) / sqrt(variance + epsilon) * scale + bias, a mean and variance a group."""

    def prepare(self) -> Step:
        assert isinstance(self, _Standardize)
        x, groups = self.x(0), self.grouping()
        statistics = [self.y(index) for index in range(1, len(self.output_blobs))]
        if x.size == 0:
            return in_sequence([constant_step(self, y, np.full(y.shape, np.nan, y.dtype)) for y in statistics])
        inputs, outputs = {"x": x.reshape(groups.view)}, {"y": self.y(0).reshape(groups.view)}
        affine = ""
        if len(self.input_blobs) == 3:
            inputs |= {"scale": self.x(1).reshape(groups.affine), "bias": self.x(2).reshape(groups.affine)}
            affine = " * A(scale) + A(bias)"
        last = ""
        found = "inverse" if self.inverse else "deviation"
        for name, value, array in zip(("kept_mean", "kept_deviation"), ("mean", found), statistics, strict=False):
            outputs[name] = array.reshape(groups.reduced)
            last += f"{name} = {value}; "
        computed = Groups(_STATISTICS, each=f"y = A(A(x - mean) * inverse){affine};", last=last)
        scalars = {"epsilon": computed_scalar(x, self.arguments.float("epsilon", 1e-5))}
        return by_groups(self, "standardize", groups.view, groups.axes, computed, inputs, outputs, scalars)


def affine_axes(groups: Grouping) -> tuple[int, ...]:
    """The axes of the view over which an element of scale and bias is used."""
    rank, own = len(groups.view), len(groups.affine)
    sizes = (1,) * (rank - own) + groups.affine
    return tuple(axis for axis in range(rank) if axis < rank - own or sizes[axis] != groups.view[axis])


@on_cuda(*registered_kinds(_StandardizeGradient))
class _CudaStandardizeGradient(CudaOperator):
    """dX = (g - sum(g) / m - x^ * sum(g * x^) / m) / deviation, and the sums dscale and dbias."""

    def prepare(self) -> Step:
        """The sums first, as dX may take the place of dY; before them mean and deviation, where they are not given."""
        assert isinstance(self, _StandardizeGradient)
        roles = self.roles()
        groups = self.grouping(seen_from_x(self.call(), roles.x))
        x, dy, dx = self.x(roles.x), self.x(roles.dy), self.y(0)
        affine = [self.y(index) for index in range(1, len(self.output_blobs))]
        if x.size == 0:
            return in_sequence([zero_step(array) for array in affine])
        inputs = {"x": x.reshape(groups.view), "dy": dy.reshape(groups.view)}
        epsilon = {"epsilon": computed_scalar(x, self.arguments.float("epsilon", 1e-5))}
        steps: list[Step] = []
        kept: dict[str, Array] = {}
        inverse = "A(given)" if self.inverse else "A(1) / A(given)"
        if roles.mean is not None and roles.deviation is not None:
            kept = {"center": self.x(roles.mean), "given": self.x(roles.deviation)}
        elif affine:
            kept = {name: self.scratch(groups.reduced, compute_dtype(x.dtype)) for name in ("center", "given")}
            found = Groups(_STATISTICS, last=f"center = mean; given = {'inverse' if self.inverse else 'deviation'};")
            given = {"x": inputs["x"]}
            steps.append(by_groups(self, "statistics", groups.view, groups.axes, found, given, kept, epsilon))
        inputs |= {name: array.reshape(groups.reduced) for name, array in kept.items()}
        known = f"const A mean = A(center), inverse = {inverse};" if kept else ""
        if affine:
            steps.append(self._affine_sums(groups, inputs, inverse, affine))
        if roles.scale is not None:
            inputs["scale"] = self.x(roles.scale).reshape(groups.affine)
        gradient = "A(dy * A(scale))" if roles.scale is not None else "dy"
        phases = [] if kept else list(_STATISTICS)
        own = f"total{len(phases)}"
        phases.append(
            Phase(
                "two_sums<W>",
                f"const A g = {gradient}; s.add((W)g, (W)A(g * A(A(x - mean) * inverse)));",
                f"const A middle = (A)({own}.one / (W)w.length), slope = (A)({own}.other / (W)w.length);",
            )
        )
        each = f"dx = A({gradient} - A(A(A(x - mean) * inverse) * slope + middle)) * inverse;"
        computed = Groups(phases, before=known, each=each)
        outputs = {"dx": dx.reshape(groups.view)}
        steps.append(
            by_groups(self, "standardize_gradient", groups.view, groups.axes, computed, inputs, outputs, epsilon)
        )
        return in_sequence(steps)

    def _affine_sums(self, groups: Grouping, inputs: dict[str, Array], inverse: str, affine: list[Array]) -> Step:
        """The step that writes dscale and dbias."""
        axes = affine_axes(groups)
        shape = tuple(1 if axis in axes else size for axis, size in enumerate(groups.view))
        computed = Groups(
            [Phase("two_sums<double>", f"s.add((double)A(dy * A(A(x - A(center)) * A({inverse}))), (double)dy);")],
            last="dscale = total0.one; dbias = total0.other;",
        )
        outputs = {name: array.reshape(shape) for name, array in zip(("dscale", "dbias"), affine, strict=True)}
        return by_groups(self, "affine_gradient", groups.view, axes, computed, inputs, outputs)
