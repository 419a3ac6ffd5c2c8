"""IsNaN on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.elementwise import not_a_number as host


@on_cuda(host.IsNaN)
class _CudaIsNaN(CudaOperator):
    """Where there are no numbers."""

    def prepare(self) -> Step:
        return elementwise(self, "is_nan", {"x": self.x(0)}, {"y": self.y(0)}, "y = is_nan(x) ? 1 : 0;")
