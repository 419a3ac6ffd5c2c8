"""Moments on CUDA, and their gradient."""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.engines.cuda.base.constants import constant_step
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.reduction.axes import named_axes, output_shape
from dagexec.ops.families.reduction.moments import Moments, MomentsGradient, seen_from_x

_PHASES = (
    Phase("sum_of<W>", "s.add((W)x);", "const A middle = (A)(total0.total / (W)w.length);"),
    Phase("sum_of<W>", "s.add((W)A(A(x - middle) * A(x - middle)));"),
)


@on_cuda(Moments)
class _CudaMoments(CudaOperator):
    """Mean and variance."""

    def prepare(self) -> Step:
        """Two passes over each group, in one kernel or few."""
        x = self.x(0)
        axes, _ = named_axes(self.call())
        kept = output_shape(x.shape, axes, True)
        outputs = {name: self.y(index).reshape(kept) for index, name in enumerate(("mean", "variance"))}
        if not x.size:
            nan = [constant_step(self, y, np.full(y.shape, np.nan, y.dtype)) for y in outputs.values()]
            return in_sequence(nan)
        groups = Groups(_PHASES, last="mean = middle; variance = (A)(total1.total / (W)w.length);")
        return by_groups(self, "moments", x.shape, axes, groups, {"x": x}, outputs)


@on_cuda(MomentsGradient)
class _CudaMomentsGradient(CudaOperator):
    """Gradient of Moments."""

    def prepare(self) -> Step:
        dx = self.y(0)
        if not dx.size:
            return nothing_to_do
        axes, _ = named_axes(seen_from_x(self.call()))
        kept = output_shape(dx.shape, axes, True)
        inputs = {"x": self.x(2)}
        inputs |= {name: self.x(index).reshape(kept) for name, index in (("dm", 0), ("dv", 1), ("mean", 3))}
        scalars = {"count": computed_scalar(dx, math.prod(dx.shape[axis] for axis in axes))}
        code = "dx = (dm + A(2) * (x - mean) * dv) / count;"
        return elementwise(self, "moments_gradient", inputs, {"dx": dx}, code, scalars)
