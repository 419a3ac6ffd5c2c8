"""AveragedLoss on CUDA, and its gradient."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.loss.averaged import AveragedLoss, AveragedLossGradient


@on_cuda(AveragedLoss)
class _CudaAveragedLoss(CudaOperator):
    """The mean of all elements."""

    def prepare(self) -> Step:
        x = self.x(0).reshape(-1)
        last = "y = w.length ? (A)(total0.total / (W)w.length) : A(0);"
        groups = Groups([Phase("sum_of<W>", "s.add((W)x);")], last=last)
        return by_groups(self, "averaged_loss", x.shape, (0,), groups, {"x": x}, {"y": self.y(0).reshape(1)})


@on_cuda(AveragedLossGradient)
class _CudaAveragedLossGradient(CudaOperator):
    """The gradient of the mean of all elements."""

    def prepare(self) -> Step:
        dx = self.y(0).reshape(-1)
        return elementwise(
            self,
            "averaged_loss_gradient",
            {"dy": self.x(1).reshape(1)},
            {"dx": dx},
            "dx = A((double)dy / count);",
            {"count": np.float64(max(1, dx.size))},
        )
