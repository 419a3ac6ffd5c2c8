"""LpNorm on CUDA, and its gradient."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.constants import zero_step
from dagexec.ops.engines.cuda.base.expression import computed_scalar, elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.reduction.axes import total_step
from dagexec.ops.families.reduction.lp_norm import LpNorm, LpNormGradient, divisor, norm_power


@on_cuda(LpNorm)
class _CudaLpNorm(CudaOperator):
    """Sum of powers."""

    def prepare(self) -> Step:
        x, y = self.x(0), self.y(0)
        if not x.size:
            return zero_step(y)
        term = "x < A(0) ? -x : x" if norm_power(self.call()) == 1 else "x * x"
        average = divisor(self, x.size) != 1
        last = "y = (A)(total0.total / (W)w.length);" if average else "y = (A)total0.total;"
        name = f"lp_norm_{norm_power(self.call())}{'_average' if average else ''}"
        return total_step(self, name, x, y, f"s.add((W)({term}));", last)


@on_cuda(LpNormGradient)
class _CudaLpNormGradient(CudaOperator):
    """Gradient of LpNorm."""

    def prepare(self) -> Step:
        x, dx = self.x(0).reshape(-1), self.y(0).reshape(-1)
        power = norm_power(self.call())
        inputs = {"x": x, "dz": self.x(1).reshape(1)}
        scalars = {"factor": computed_scalar(x, power / divisor(self, int(x.size)))}
        code = f"dx = {'sign_of(x)' if power == 1 else 'x'} * dz * factor;"
        return elementwise(self, f"lp_norm_gradient_{power}", inputs, {"dx": dx}, code, scalars)
