"""What compiler and scheduler ask an operator about itself; it answers beside its schema, as attributes of OpSchema.

So a pass keeps no list of operator types, and a new operator is fused, laid out and narrowed by what it says here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum, auto

from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import TypeMeta
from dagexec.platform.records import dataclass

PostOpsRule = Callable[[Arguments, TypeMeta, int], Sequence[str] | None]
"""What an operator does to its input 0, as entries of argument `post_ops` (`dagexec.ops.families.activation.post_ops`).

From the arguments, the element type, and the number of inputs, by which number entries name operands. An empty list
says that the operator gives its input back; None, that post-ops cannot say what it does.
"""


def gives_back(_arguments: Arguments, _meta: TypeMeta, _count: int) -> Sequence[str]:
    """The rule of an operator whose result is its input."""
    return ()


class LayerKind(Enum):
    """A layer y = W x + b with input x, weights W (input 1) and bias b (input 2, if it is given)."""

    CONVOLUTION = auto()
    TRANSPOSED_CONVOLUTION = auto()
    FULLY_CONNECTED = auto()


class ImageRole(Enum):
    """What an operator on images needs for another order of their axes than NCHW.

    Members:
        ELEMENTWISE: nothing: each element depends on those in its place, of operands that broadcast.
        CONVOLUTION, TRANSPOSED_CONVOLUTION, QUANTIZED_CONVOLUTION: argument `order`, and a filter in it.
        POOLING: argument `order`; each channel is computed from that of the input.
        SAME_CHANNELS: argument `order`; as many channels, computed from each other.
        PER_CHANNEL: argument `order`; element-wise, with vectors of an element a channel.
        JOINING, CUTTING, SLICING, PADDING, REDUCTION: the axes that the arguments name, in the other order.
        RESIZING: the axes that the arguments name, in the other order; where sizes change is known from the output.
        TURNING: a permutation, which is none in the order that it turns images into or from.
        ON_INTEGERS: nothing, for scales of one element: quantization, casts, and sums of what is quantized.
    """

    ELEMENTWISE = auto()
    CONVOLUTION = auto()
    TRANSPOSED_CONVOLUTION = auto()
    QUANTIZED_CONVOLUTION = auto()
    POOLING = auto()
    SAME_CHANNELS = auto()
    PER_CHANNEL = auto()
    JOINING = auto()
    CUTTING = auto()
    SLICING = auto()
    PADDING = auto()
    REDUCTION = auto()
    RESIZING = auto()
    TURNING = auto()
    ON_INTEGERS = auto()


class Crossing(Enum):
    """How an operator that is made for several devices reads and writes.

    Members:
        COPY: from whichever device a blob is on, to its own.
        FROM_HOST: from the host to its own device.
        TO_HOST: from its own device to the host.
        IN_PLACE: each blob on the device that it is on.
    """

    COPY = auto()
    FROM_HOST = auto()
    TO_HOST = auto()
    IN_PLACE = auto()


@dataclass(frozen=True, slots=True)
class Rows:
    """The axis of a tensor on which N examples are: it is seen as before x N x each.

    Attributes:
        axis: the axis, not negative.
        each: neighbors on it that belong to one example: T in (N * T, C), which (N, T, C) becomes when reshaped.
        before: how often all examples follow each other: T in (T * N, C), which (T, N, C) becomes.
    """

    axis: int
    each: int = 1
    before: int = 1

    def at(self, axis: int) -> Rows:
        """The same entries on another axis."""
        return replace(self, axis=axis)

    def size(self, examples: int) -> int:
        """The size of the axis for so many examples."""
        return self.before * examples * self.each


OF_ALL_ROWS = Rows(-1)
"""Of an output that is computed from all examples together, such as the gradient of weights: nothing may read it."""
