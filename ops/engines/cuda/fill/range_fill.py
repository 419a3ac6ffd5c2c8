"""Range and LengthsRangeFill on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step
from dagexec.ops.engines.cuda.base.constants import constant_step
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.fill.range_fill import LengthsRangeFill, Range, segment_positions


@on_cuda(Range)
class _CudaRange(CudaOperator):
    """An arithmetic progression."""

    def prepare(self) -> Step:
        """One kernel, which knows the number of each element."""
        names = ("first", "difference")[: len(self.input_blobs) - 1]
        inputs = {name: self.x(2 * index).reshape(1) for index, name in enumerate(names)}
        code = "y = (A)i" + " * difference" * ("difference" in inputs) + " + first" * ("first" in inputs) + ";"
        return elementwise(self, f"range_{len(inputs)}", inputs, {"y": self.y(0)}, code)


@on_cuda(LengthsRangeFill)
class _CudaLengthsRangeFill(CudaOperator):
    """Positions within segments."""

    def prepare(self) -> Step:
        """The lengths are known now; the step copies what follows from them."""
        return constant_step(self, self.y(0), segment_positions(self.host_value(0)))
