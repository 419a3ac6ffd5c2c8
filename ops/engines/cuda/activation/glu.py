"""Glu on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.activation.glu import Glu, halves


@on_cuda(Glu)
class _CudaGlu(CudaOperator):
    """Values and gates in one tensor."""

    def prepare(self) -> Step:
        values, gates = halves(self.call(), self.x(0))
        inputs = {"values": values, "gates": gates}
        return elementwise(self, "glu", inputs, {"y": self.y(0).reshape(gates.shape)}, "y = values * logistic(gates);")
