"""GlobalNorm, ClipTensorByScaling and Lars on CUDA: what is one number is computed by one thread, in double."""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import CudaOperator
from dagexec.ops.families.optimize.clipping import ClipTensorByScaling, GlobalNorm, Lars

MAX_SQUARES = 16
"""Inputs of one kernel."""


@on_cuda(GlobalNorm)
class CudaGlobalNorm(CudaOperator):
    """The norm of several tensors from the sums of their squares."""

    def prepare(self) -> Step:
        """One kernel, or one for each `MAX_SQUARES` inputs."""
        squares = [self.x(index).reshape(1) for index in range(len(self.input_blobs))]
        norm, total = self.y(0).reshape(1), self.scratch((1,), np.float64)
        steps: list[Step] = []
        for start in range(0, len(squares), MAX_SQUARES):
            piece = squares[start : start + MAX_SQUARES]
            inputs = {f"x{index}": square for index, square in enumerate(piece)}
            added = " + ".join([*(["before"] if start else []), *(f"(double){name}" for name in inputs)])
            if start:
                inputs["before"] = total
            if start + MAX_SQUARES < len(squares):
                steps.append(elementwise(self, "squares", inputs, {"total": total}, f"total = {added};"))
            else:
                steps.append(elementwise(self, "norm", inputs, {"norm": norm}, f"norm = sqrt({added});"))
        return in_sequence(steps)


@on_cuda(ClipTensorByScaling)
class CudaClipTensorByScaling(CudaOperator):
    """A tensor scaled down when a norm is too large."""

    def prepare(self) -> Step:
        """The factor, which is 1 where nothing is clipped, and a product."""
        x, ratio = self.x(0), self.scratch((1,), self.y(0).dtype)
        inputs = {"norm": self.x(1).reshape(1)}
        if len(self.input_blobs) > 2:
            inputs["factor"] = self.x(2).reshape(1)
        limit = "threshold * (double)factor" if len(inputs) > 1 else "threshold"
        code = f"double limit = {limit}, found = (double)norm; ratio = found > limit ? limit / found : 1.0;"
        scalars = {"threshold": np.float64(self.arguments.float("threshold", 0.0))}
        scale = elementwise(self, "clip_ratio", inputs, {"ratio": ratio}, code, scalars)
        product = {"x": x, "ratio": ratio.reshape(())}
        return in_sequence([scale, elementwise(self, "clip_scale", product, {"y": self.y(0)}, "y = x * ratio;")])


_FACTOR = r"""
    double length = sqrt(squares), factor_found = 1.0;
    if (length > 0.0) {
        double divisor = sqrt(slopes) / length + (double)decay + offset;
        factor_found = divisor != 0.0 ? (double)trust / divisor : (double)float_of(0x7f800000u);
    }
    if (limits) {
        if (factor_found > (double)most) factor_found = (double)most;
        if (factor_found < least) factor_found = least;
    }
    factor = factor_found;
"""


@on_cuda(Lars)
class CudaLars(CudaOperator):
    """Layer-wise adaptive rate scaling."""

    def prepare(self) -> Step:
        """Two sums of squares and the formula."""
        sums = self.scratch((2,), np.float64)
        steps = [
            reduced(self, "square", (array.size,), {"x": array}, sums[k : k + 1], "value = (double)x * (double)x;")
            for k, array in enumerate(self.x(index).reshape(-1) for index in (0, 1))
        ]
        inputs = {"squares": sums[0:1], "slopes": sums[1:2]}
        given = len(self.input_blobs) - 2
        inputs |= {name: self.x(k + 2).reshape(1) for k, name in enumerate(("decay", "trust", "most")[:given])}
        scalars: dict[str, np.generic] = {
            name: np.float64(value)
            for name, value in (("decay", 0.0), ("trust", 1.0), ("most", np.inf))
            if name not in inputs
        }
        scalars["offset"] = np.float64(self.arguments.float("offset", 0.5))
        scalars["least"] = np.float64(self.arguments.float("lr_min", 0.02))
        scalars["limits"] = np.int32(given == 3)
        steps.append(elementwise(self, "lars", inputs, {"factor": self.y(0).reshape(1)}, _FACTOR, scalars))
        return in_sequence(steps)
