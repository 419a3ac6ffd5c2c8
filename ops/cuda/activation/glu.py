"""Glu on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.activation.glu import Glu, halves
from dagexec.ops.cuda.base.expression import elementwise
from dagexec.ops.cuda.base.kinds import on_cuda
from dagexec.ops.cuda.base.operator import CudaOperator


@on_cuda(Glu)
class _CudaGlu(CudaOperator):
    """Values and gates in one tensor."""

    def prepare(self) -> Step:
        values, gates = halves(self.call(), self.x(0))
        inputs = {"values": values, "gates": gates}
        return elementwise(self, "glu", inputs, {"y": self.y(0).reshape(gates.shape)}, "y = values * logistic(gates);")
