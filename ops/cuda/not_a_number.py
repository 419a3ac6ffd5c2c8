"""IsNaN and ReplaceNaN on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops import not_a_number as host
from dagexec.ops.cuda.expression import elementwise
from dagexec.ops.cuda.kinds import on_cuda
from dagexec.ops.cuda.operator import CudaOperator
from dagexec.ops.cuda.pointwise import register_pointwise


@on_cuda(host.IsNaN)
class _CudaIsNaN(CudaOperator):
    """Where there are no numbers."""

    def prepare(self) -> Step:
        """One kernel."""
        return elementwise(self, "is_nan", {"x": self.x(0)}, {"y": self.y(0)}, "y = is_nan(x) ? 1 : 0;")


register_pointwise(host, {"ReplaceNaN": "is_nan(x) ? value : x"})
