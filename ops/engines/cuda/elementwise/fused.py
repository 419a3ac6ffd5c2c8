"""FusedElementwise on CUDA: the whole chain as one kernel."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.activation.post_ops import epilogue
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.activation.post_ops import SUM, read_post_ops
from dagexec.ops.families.elementwise.fused import FusedElementwise


@on_cuda(FusedElementwise)
class CudaFusedElementwise(CudaOperator):
    """A chain of element-wise operators."""

    def prepare(self) -> Step:
        """One kernel; what a `sum` adds is what the output holds, which the thread that overwrites it reads first."""
        y = self.y(0)
        post_ops = read_post_ops(self.call())
        operands = {
            post_op.input: y if post_op.kind == SUM else self.x(post_op.input)
            for post_op in post_ops
            if post_op.input >= 0
        }
        in_place = self.input_blobs[0] is self.output_blobs[0]
        return epilogue(self, y if in_place else self.x(0), y, post_ops=post_ops, operands=operands)
