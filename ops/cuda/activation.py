"""Pointwise operators on CUDA: a table of expressions."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.core.registry import operator
from dagexec.ops.activation import Relu
from dagexec.ops.cuda.expression import elementwise
from dagexec.ops.cuda.operator import CudaOperator


class _CudaRelu(CudaOperator):
    """Relu."""

    def prepare(self) -> Step:
        """One kernel."""
        return elementwise(self, "relu", {"x": self.x(0)}, {"y": self.y(0)}, "y = larger(x, decltype(x)(0));")


operator(Relu.schema, device="cuda")(_CudaRelu)
