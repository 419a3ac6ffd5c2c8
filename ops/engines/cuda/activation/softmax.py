"""Softmax and LogSoftmax on CUDA: maximum, sum of exponentials and quotient in one kernel; and their gradients."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.activation.softmax import LogSoftmax, Softmax, grouping
from dagexec.ops.families.activation.softmax_gradient import LogSoftmaxGradient, SoftmaxGradient

MAXIMUM = Phase("max_of<A>", "s.add(x);", "const A top = total0.value;")
"""Phase 0 of what normalizes exponentials: `top`, which is subtracted."""

EXPONENTIALS = Phase("sum_of<W>", "s.add((W)exp(A(x - top)));", "const A sum = (A)total1.total;")
"""Phase 1: `sum`."""


@on_cuda(Softmax, LogSoftmax)
class _CudaSoftmax(CudaOperator):
    """Softmax, or its logarithm."""

    def prepare(self) -> Step:
        shape = grouping(self.call())
        name, each = "softmax", "y = exp(A(x - top)) / sum;"
        if isinstance(self, LogSoftmax):
            name, each = "log_softmax", "y = A(x - top) - log(sum);"
        groups = Groups([MAXIMUM, EXPONENTIALS], each=each)
        inputs, outputs = {"x": self.x(0).reshape(shape)}, {"y": self.y(0).reshape(shape)}
        return by_groups(self, name, shape, (1,), groups, inputs, outputs)


@on_cuda(SoftmaxGradient, LogSoftmaxGradient)
class _CudaSoftmaxGradient(CudaOperator):
    """The gradient of either."""

    def prepare(self) -> Step:
        shape = grouping(self.call())
        if isinstance(self, LogSoftmaxGradient):
            name, absorb, each = "log_softmax", "s.add((W)dy);", "dx = dy - exp(y) * (A)total0.total;"
        else:
            name, absorb, each = "softmax", "s.add((W)A(y * dy));", "dx = (dy - (A)total0.total) * y;"
        groups = Groups([Phase("sum_of<W>", absorb)], each=each)
        inputs = {"y": self.x(0).reshape(shape), "dy": self.x(1).reshape(shape)}
        return by_groups(self, f"{name}_gradient", shape, (1,), groups, inputs, {"dx": self.y(0).reshape(shape)})
