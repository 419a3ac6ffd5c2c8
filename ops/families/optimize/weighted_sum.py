"""WeightedSum, the update of plain gradient descent, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import Gradient, GradientOperators, GradientRequest, gradient_of, not_differentiable
from dagexec.core.operator import Array, Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType, first_to_first, memory_cost
from dagexec.ops.families.optimize.scalars import require_rate
from dagexec.ops.families.optimize.update import PIECE


def _require_terms(call: OperatorCall, first: int) -> None:
    """Check inputs `first` and up, which must be pairs of a tensor and its weight. Raises ShapeError."""
    terms = call.inputs[first:]
    if len(terms) % 2:
        raise call.fail("expected pairs of a tensor and its weight, found an odd number of inputs")
    call.require_types(first, FLOAT32, FLOAT64)
    call.require_same_type(*range(first, len(call.inputs), 2))
    for index in range(first, len(call.inputs), 2):
        call.require_shape(index, call.inputs[first].shape, "that of the first tensor")
        require_rate(call, index + 1, "a weight")


def infer_weighted_sum(call: OperatorCall) -> list[TensorType]:
    """The type of the first tensor."""
    _require_terms(call, 0)
    return [call.inputs[0]]


@new_operator(
    "WeightedSum",
    inputs=(2, UNBOUNDED),
    infer=infer_weighted_sum,
    doc="Y = w_0 X_0 + w_1 X_1 + ..., added in that order; may overwrite X_0. The weights are blobs of one float. "
    "With w_0 = 1 and w_1 = -rate this is a step of gradient descent.",
    input_names=("X_0", "w_0", "X_1", "w_1"),
    output_names=("Y",),
    args={"grad_on_w": "1: there are gradients of the weights, too (default 0)"},
    inplace=first_to_first,
    cost=lambda call, outputs: memory_cost(call, outputs, len(call.inputs)),
)
class WeightedSum(Operator):
    """A sum of tensors with weights."""

    def prepare(self) -> Step:
        """Piece by piece; a first weight of 1 costs nothing where the sum is in place."""
        y, count = self.y(0).reshape(-1), len(self.input_blobs) // 2
        tensors = [self.x(2 * k).reshape(-1) for k in range(count)]
        sources = [self.x(2 * k + 1).reshape(-1) for k in range(count)]
        weights = [np.zeros((), y.dtype) for _ in range(count)]
        inplace = self.definition.input[0] == self.definition.output[0]
        work = self.scratch((min(y.size, PIECE),), y.dtype)
        pieces: list[tuple[Array, Array, list[tuple[Array, Array]], Array]] = []
        for start in range(0, y.size, PIECE):
            cut = slice(start, min(start + PIECE, y.size))
            rest = [(x[cut], weight) for x, weight in zip(tensors[1:], weights[1:], strict=True)]
            pieces.append((y[cut], tensors[0][cut], rest, work[: cut.stop - start]))

        def add_up() -> None:
            for weight, source in zip(weights, sources, strict=True):
                weight[...] = source[0]
            as_is = inplace and weights[0] == 1
            for total, first, rest, term in pieces:
                if not as_is:
                    np.multiply(first, weights[0], out=total)
                for x, weight in rest:
                    np.multiply(x, weight, out=term)
                    np.add(total, term, out=total)

        return add_up


def _gradient_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return memory_cost(call, outputs, 2 if call.arguments.bool("grad_on_w") else 1)


def infer_weighted_sum_gradient(call: OperatorCall) -> list[TensorType]:
    """A gradient for each tensor, and with `grad_on_w` for each weight behind it."""
    _require_terms(call, 1)
    call.require_same_type(0, 1)
    call.require_shape(0, call.inputs[1].shape, "that of the tensors")
    count, on_weights = len(call.inputs) // 2, call.arguments.bool("grad_on_w")
    expected = 2 * count if on_weights else count
    if len(call.definition.output) != expected:
        raise call.fail(f"expected {expected} outputs, found {len(call.definition.output)}")
    return [*call.inputs[1::2], *call.inputs[2::2]] if on_weights else list(call.inputs[1::2])


@new_operator(
    "WeightedSumGradient",
    inputs=(3, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_weighted_sum_gradient,
    doc="The gradients of WeightedSum: dX_i = w_i dY, and with grad_on_w dw_i, the sum of X_i dY.",
    input_names=("dY", "X_0", "w_0", "X_1", "w_1"),
    output_names=("dX_0", "dX_1"),
    args={"grad_on_w": "1: behind the dX_i there are dw_0, dw_1, ... (default 0)"},
    inplace=first_to_first,
    cost=_gradient_cost,
)
class WeightedSumGradient(Operator):
    """Gradients of WeightedSum; the first tensor's may overwrite that of the sum, so it comes last."""

    def prepare(self) -> Step:
        """A product for each tensor, a dot product for each weight."""
        dy, on_weights = self.x(0), self.arguments.bool("grad_on_w")
        weights = [np.zeros((), dy.dtype) for _ in range(len(self.input_blobs) // 2)]
        sources = [self.x(2 * k + 2).reshape(-1) for k in range(len(weights))]
        steps: list[Step] = []
        for k, weight in enumerate(weights):
            steps.insert(0, partial(np.multiply, dy, weight, out=self.y(k)))
        if on_weights:
            flat = dy.reshape(-1)
            for k in range(len(weights)):
                target = self.y(len(weights) + k).reshape(-1)
                steps.insert(0, partial(_dot, flat, self.x(2 * k + 1).reshape(-1), target))

        def differentiate() -> None:
            for weight, source in zip(weights, sources, strict=True):
                weight[...] = source[0]
            for step in steps:
                step()

        return differentiate


def _dot(a: Array, b: Array, target: Array) -> None:
    target[0] = np.einsum("i,i->", a, b)


@gradient_of("WeightedSum")
def weighted_sum_gradient(request: GradientRequest) -> GradientOperators:
    """WeightedSumGradient; the weights have gradients when `grad_on_w` is 1."""
    count, on_weights = len(request.definition.input), request.arguments.bool("grad_on_w")
    inputs = [request.dy(0), *request.definition.input]
    of_inputs = [*range(0, count, 2), *(range(1, count, 2) if on_weights else ())]
    outputs = [request.dx(index) for index in of_inputs]
    gradients: dict[int, Gradient] = dict(zip(of_inputs, outputs, strict=True))
    return request.result([request.operator("WeightedSumGradient", inputs, outputs)], gradients)


not_differentiable("it is a gradient operator already", "WeightedSumGradient")
