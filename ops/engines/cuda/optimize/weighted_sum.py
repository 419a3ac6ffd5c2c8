"""WeightedSum, the update of plain gradient descent, and its gradient, on CUDA."""

from __future__ import annotations

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.broadcast_reduction import reduced
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.families.optimize.weighted_sum import WeightedSum, WeightedSumGradient

MAX_TERMS = 8
"""Tensors of one kernel."""


@on_cuda(WeightedSum)
class CudaWeightedSum(CudaOperator):
    """A sum of tensors with weights."""

    def prepare(self) -> Step:
        """One kernel, or one for each `MAX_TERMS` tensors."""
        y, count = self.y(0), len(self.input_blobs) // 2
        steps: list[Step] = []
        for start in range(0, count, MAX_TERMS):
            inputs: dict[str, Array] = {} if start == 0 else {"total": y}
            terms = ["total"] if start else []
            for k in range(start, min(start + MAX_TERMS, count)):
                name, weight = f"x{k - start}", f"w{k - start}"
                inputs[name], inputs[weight] = self.x(2 * k), self.x(2 * k + 1).reshape(-1)
                terms.append(f"{name} * (A){weight}")
            steps.append(elementwise(self, "weighted_sum", _least_axes(inputs), {"y": y}, f"y = {' + '.join(terms)};"))
        return in_sequence(steps)


def _least_axes(inputs: dict[str, Array]) -> dict[str, Array]:
    """The arrays, of which those of one element have no axes, so that they fit a tensor of none."""
    return {key: array.reshape(()) if array.size == 1 else array for key, array in inputs.items()}


@on_cuda(WeightedSumGradient)
class CudaWeightedSumGradient(CudaOperator):
    """Gradients of WeightedSum; the first tensor's may overwrite that of the sum, so it comes last."""

    def prepare(self) -> Step:
        """A sum of products for each weight, then a product for each tensor."""
        dy, on_weights = self.x(0), self.arguments.bool("grad_on_w")
        steps: list[Step] = []
        count = len(self.input_blobs) // 2
        for k in range(count):
            inputs = _least_axes({"dy": dy, "weight": self.x(2 * k + 2)})
            dx = self.y(k)
            steps.insert(0, elementwise(self, "weighted", inputs, {"dx": dx}, "dx = dy * (A)weight;"))
        if on_weights:
            for k in range(count):
                inputs = {"dy": dy.reshape(-1), "x": self.x(2 * k + 1).reshape(-1)}
                target = self.y(count + k).reshape(1)
                steps.insert(0, reduced(self, "dot", (dy.size,), inputs, target, "value = x * dy;"))
        return in_sequence(steps)
