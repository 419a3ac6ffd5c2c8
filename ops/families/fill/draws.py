"""RandomDropout and Multinomial: what is drawn at random for the values of inputs, by the operator's own generator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT32, INT64, from_number
from dagexec.core.gradient import no_gradient, not_differentiable
from dagexec.core.operator import Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import ArrayOperator
from dagexec.ops.base.blocks import Array, compute_dtype


class RandomFunction(ArrayOperator):
    """Base: a NumPy function that has a generator, too."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """One call, and the copies."""
        call, random = self.call(), self.random

        def step() -> None:
            for output, found in zip(outputs, self.draw(call, random, *inputs), strict=False):
                np.copyto(output, found, casting="unsafe")

        return step

    @staticmethod
    @abstractmethod
    def draw(call: OperatorCall, random: np.random.Generator, *inputs: Array) -> Sequence[Array]:
        """The outputs."""


def infer_random_dropout(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; the mask its shape, of bool."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_types(1, BOOL)
    if len(call.inputs) > 2:
        call.require_types(2, *FLOAT_TYPES)
    for index in range(1, len(call.inputs)):
        if call.inputs[index].elements != 1:
            raise call.fail(f"input {call.definition.input[index]!r} must have one element")
    return [call.inputs[0], TensorType(call.inputs[0].shape, BOOL)][: len(call.definition.output)]


@new_operator(
    "RandomDropout",
    inputs=(2, 3),
    outputs=(1, 2),
    infer=infer_random_dropout,
    doc="Y = X * mask / (1 - ratio) where training_mode is true, an element of the mask being true with "
    "probability 1 - ratio; else Y = X, and a mask that is all true. A run decides: Dropout has arguments instead.",
    input_names=("X", "training_mode", "ratio (default 0.5)"),
    output_names=("Y", "mask"),
    cost=lambda call, outputs: memory_cost(call, outputs, 4),
    reproducible=False,
    results=1,
)
class RandomDropout(RandomFunction):
    """Dropout by inputs."""

    @staticmethod
    def draw(call: OperatorCall, random: np.random.Generator, *inputs: Array) -> Sequence[Array]:
        """A mask and a product. Raises ShapeError for a ratio outside of [0, 1)."""
        x = inputs[0]
        ratio = float(inputs[2].reshape(-1)[0]) if len(inputs) > 2 else 0.5
        if not inputs[1].reshape(-1)[0] or ratio == 0:
            return [x, np.ones(x.shape, np.bool_)]
        if not 0 <= ratio < 1:
            raise ShapeError(f"{call.label}: the ratio must be in [0, 1), found {ratio:g}")
        mask = random.random(x.shape, np.float32) >= ratio
        return [np.where(mask, x / compute_dtype(x.dtype).type(1 - ratio), 0), mask]


def infer_multinomial(call: OperatorCall) -> list[TensorType]:
    """Batch x samples. Raises ArgumentError unless there is a class and a number of samples."""
    call.require_types(0, *FLOAT_TYPES)
    batch, classes = call.require_rank(0, 2)
    count, meta = call.arguments.int("sample_size", 1), from_number(call.arguments.int("dtype", INT32.number))
    if count < 0 or meta not in (INT32, INT64):
        raise ArgumentError(f"{call.label}: expected samples of int32 or int64, found {count} of {meta}")
    if batch * count and not classes:
        raise call.fail("there is no class to draw")
    return [TensorType((batch, count), meta)]


@new_operator(
    "Multinomial",
    infer=infer_multinomial,
    doc="Numbers of classes, drawn with probability softmax(X) for each row of X: batch x classes, logarithms of "
    "probabilities that need not be normalized. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("Y",),
    args={"sample_size": "numbers for each row (default 1)", "dtype": "of Y: int32 or int64 (default int32)"},
    reproducible=False,
)
class Multinomial(RandomFunction):
    """The inverse of the cumulative distribution at uniform places."""

    @staticmethod
    def draw(call: OperatorCall, random: np.random.Generator, *inputs: Array) -> Sequence[Array]:
        """A search for each row."""
        logits = inputs[0].astype(np.float64)
        count = call.arguments.int("sample_size", 1)
        found = np.empty((len(logits), count), np.int64)
        for row, target in zip(logits, found, strict=True):
            total = np.exp(row - row.max()).cumsum()
            target[:] = np.searchsorted(total, random.random(count) * total[-1], side="right")
        return [found.clip(0, max(0, logits.shape[1] - 1))]


not_differentiable("train with Dropout, which has arguments", "RandomDropout")
no_gradient("Multinomial")
