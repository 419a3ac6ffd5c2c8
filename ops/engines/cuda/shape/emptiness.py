"""Whether tensors have elements, on CUDA: known from shapes, so the step copies the answer."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.constants import constant_step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.shape.emptiness import Emptiness, HasElements, IsEmpty


@on_cuda(IsEmpty, HasElements)
class _CudaEmptiness(CudaOperator):
    """The answer of the host's class."""

    reads_strided = True

    def prepare(self) -> Step:
        """The answer is known now; the step copies it."""
        assert isinstance(self, Emptiness)
        return constant_step(self, self.y(0), np.bool_(self.answer()))
