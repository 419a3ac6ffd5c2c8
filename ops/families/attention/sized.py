"""SizedAttention: FusedAttention among the first positions of tensors that have room for more.

How many positions there are is an input, a number that a run reads, so that one preparation serves many lengths
(`dagexec.compiler.lengths`). Of the other positions nothing is read; what they get is undefined. OpenLength tells
kernels of the length, for all layers at once, when a run begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol
from weakref import WeakKeyDictionary

from dagexec.core.dtypes import INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator, schema_of
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.core.tensor import Tensor
from dagexec.errors import OperatorError
from dagexec.ops.base.array_function import ArrayOperator
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.attention.fused import (
    FUSED_ATTENTION,
    FusedSizes,
    attending,
    infer_fused_attention,
    read_fused_attention,
)

SIZED_ATTENTION, OPEN_LENGTH = "SizedAttention", "OpenLength"


def whole_call(call: OperatorCall) -> OperatorCall:
    """The call of FusedAttention on all positions: without the last input, their number."""
    return replace(call, inputs=call.inputs[:-1], values=call.values[:-1])


def read_sized_attention(call: OperatorCall) -> FusedSizes:
    """The sizes with all positions. Raises ArgumentError or ShapeError for what does not fit."""
    sizes = read_fused_attention(whole_call(call))
    if sizes.queries != sizes.keys:
        raise call.fail(f"expected as many queries as keys, found {sizes.queries} and {sizes.keys}")
    return sizes


def _infer(call: OperatorCall) -> list[TensorType]:
    call.require_types(len(call.inputs) - 1, INT64)
    call.require_shape(len(call.inputs) - 1, (1,), "how many positions there are")
    read_sized_attention(call)
    return infer_fused_attention(whole_call(call))


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    cost = schema_of(FUSED_ATTENTION).cost
    assert cost is not None
    return cost(whole_call(call), outputs)


def first_positions(sizes: FusedSizes, arrays: Sequence[Array], y: Array, length: int) -> tuple[list[Array], Array]:
    """Views of Q, K, V, mask and bias, and of Y, that have `length` positions."""
    views = []
    for index, array in enumerate(arrays):
        axes = (sizes.axes[index][2],) if index < 3 else (array.ndim - 2, array.ndim - 1)
        views.append(_first(array, axes, sizes.keys, length))
    return views, _first(y, (sizes.y_by_head[2],), sizes.queries, length)


def _first(array: Array, axes: Sequence[int], full: int, length: int) -> Array:
    return array[
        tuple(slice(length if axis in axes and size == full else None) for axis, size in enumerate(array.shape))
    ]


def checked_length(length: int, most: int, label: str, least: int = 1) -> int:
    """The number of positions. Raises OperatorError for one that there cannot be."""
    if not least <= length <= most:
        raise OperatorError(f"{label}: expected {least} to {most} positions, found {length}")
    return length


class SizedLayer(Protocol):
    """Attention whose length is told before it runs."""

    def resize(self, length: int) -> None:
        """Compute so many positions from now on."""


_layers: WeakKeyDictionary[Tensor, list[SizedLayer]] = WeakKeyDictionary()
"""By what OpenLength writes, the layers that read it."""


def sized_layers(opened: Tensor) -> list[SizedLayer] | None:
    """The layers that are told of the length before `opened` is written; None for what OpenLength does not write."""
    return _layers.get(opened)


def _infer_open(call: OperatorCall) -> list[TensorType]:
    call.require_types(0, INT64)
    call.require_shape(0, (1,), "how many positions there are")
    return [call.inputs[0]]


@new_operator(
    OPEN_LENGTH,
    inputs=(1, 1),
    outputs=(1, 1),
    infer=_infer_open,
    doc="Tells the SizedAttention operators of a net how many positions there are. (dagexec's own, for lengths that "
    "vary.)",
    input_names=("length",),
    output_names=("the length, for SizedAttention",),
    effects=True,
)
class OpenLength(Operator):
    """Resizes the layers that were prepared after it."""

    def prepare(self) -> Step:
        """A step that tells all of them."""
        length, opened, told = self.x(0), self.y(0), [0]
        layers = _layers[self.output(0)] = []

        def step() -> None:
            opened[0] = length[0]
            if told[0] != length[0]:
                told[0] = 0
                for layer in layers:
                    layer.resize(int(length[0]))
                told[0] = int(length[0])

        return step


@new_operator(
    SIZED_ATTENTION,
    inputs=(4, 6),
    outputs=(1, 1),
    infer=_infer,
    doc="FusedAttention among the first positions; what comes behind them in Y is undefined. (dagexec's own, for "
    "lengths that vary.)",
    input_names=(*schema_of(FUSED_ATTENTION).input_names, "length: how many positions there are, the last input"),
    output_names=("Y",),
    args=schema_of(FUSED_ATTENTION).args,
    cost=_cost,
)
class SizedAttention(ArrayOperator):
    """By NumPy, as FusedAttention."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """A step that reads the length when it runs, and makes anew what computes so many positions."""
        sizes, call = read_sized_attention(self.call()), whole_call(self.call())
        *arrays, lengths = inputs
        made: dict[int, Step] = {}

        def step() -> None:
            length = checked_length(int(lengths[0]), sizes.keys, call.label)
            if length not in made:
                made.clear()
                views, target = first_positions(sizes, arrays, outputs[0], length)
                made[length] = attending(call, replace(sizes, queries=length, keys=length), views, target)
            made[length]()

        return step


not_differentiable("train with FusedAttention", SIZED_ATTENTION, OPEN_LENGTH)
