"""What a convolution computes, as oneDNN is asked for it: the geometry of windows, arguments by number, how to ask.

Which implementation computes it is chosen in `convolution_family`, for the problem that follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from itertools import chain

import numpy as np

from dagexec.core.dtypes import TypeMeta, from_numpy
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.base.layout import logical_shape
from dagexec.ops.engines.onednn.descriptors import DIFF_WEIGHTS, WEIGHTS, Array, Descriptor
from dagexec.ops.engines.onednn.problem import DIRECT, WINOGRAD, Asked, Candidate
from dagexec.platform.records import dataclass

CONVOLUTION = {DIRECT: 1, WINOGRAD: 2}
"""dnnl_alg_kind_t of convolutions, by algorithm."""

Image = tuple[Array, str]
"""An image tensor and its order."""

Operands = Mapping[int, tuple[Descriptor, Array]]
"""Further arguments of an execution, as they are: by number, layout and array."""

Composed = Callable[[], Iterable[Candidate | Asked]]
"""Gives candidates."""

Request = Callable[[str, Mapping[int, Descriptor]], Sequence[object]]
"""What the library is asked with after the engine, for an algorithm and the layouts of the arguments."""


def tail_of(axis: Axis) -> int:
    """Padding at the end that the last window needs; negative where the windows do not reach the end."""
    return axis.covered - axis.head - axis.size


def geometry(axes: Sequence[Axis]) -> tuple[tuple[int, ...], ...]:
    """Strides, dilations less 1, heads and tails, as oneDNN takes them."""
    return (
        tuple([axis.stride for axis in axes]),
        tuple([axis.dilation - 1 for axis in axes]),
        tuple([axis.head for axis in axes]),
        tuple([tail_of(axis) for axis in axes]),
    )


def require_window(axes: Sequence[Axis], label: str) -> None:
    """Raise UnsupportedFeatureError for a window that starts behind the first pixel (SAME with a wide stride)."""
    for axis in axes:
        if axis.head < 0 or not axis.out:
            raise UnsupportedFeatureError(f"{label}: oneDNN has no convolution with negative padding {axis.head}")


def grouped(weights: Array, group: int, channels_last: bool) -> Array:
    """A view of the filter as M, C/G, kernel, or with groups as G, M/G, C/G, kernel."""
    logical = np.moveaxis(weights, -1, 1) if channels_last else weights
    return logical if group == 1 else logical.reshape(group, len(weights) // group, *logical.shape[1:])


def padding_of(function: str, columns: Axis) -> int:
    """Columns of padding in what a convolution reads; what goes backward reads the results' columns."""
    sides = columns.head, tail_of(columns)
    if function == "convolution_backward_weights":
        return 0
    return max(sides) if function == "convolution_forward" else columns.extent - 1 - min(sides)


def all_of(first: Composed | None, second: Composed) -> Composed:
    """The candidates of both."""
    return second if first is None else lambda: chain(first(), second())


def is_for_winograd(axes: Sequence[Axis], weights: Array) -> bool:
    """True for windows of 3 x 3 without strides and dilations, which alone Winograd's algorithms compute.

    They know no groups, with which `weights` have an axis more.
    """
    return (
        weights.ndim == 4
        and len(axes) == 2
        and all((axis.kernel, axis.stride, axis.dilation) == (3, 1, 1) for axis in axes)
    )


def is_ragged(weights: Array, axes: int, lanes: int) -> bool:
    """True when channels of a filter (M, C/G, kernel, with groups G, M/G, C/G, kernel) fill no vectors of `lanes`."""
    *groups, filters, channels = weights.shape[: weights.ndim - axes]
    if groups and filters == channels == 1:
        return bool(groups[0] % lanes)
    return bool(filters % lanes or channels % lanes)


@dataclass(frozen=True)
class Computation:
    """What a convolution computes by `dnnl_{function}`.

    Attributes:
        request: how the library is asked.
        axes: of the window.
        images: the image tensors by argument number.
        parameters: the filter (M, C/G, kernel, with groups G, M/G, C/G, kernel) and the bias, by argument number.
        inputs: the input number of each that is an input, by argument number.
        result: the argument that is computed.
        operands: of post-ops.
        key: what else the choice of an implementation depends on.
        attributes: what else the library is requested: convolutions that ask for the same share a primitive then.
        own_layouts: implementations may use layouts of their own.
        algorithms: those that may be requested.
        composed: further candidates.
        rows: pieces may be rows of an image.
        block: pieces may be blocks of so many channels of the result; 0: they may not.
    """

    function: str
    request: Request
    axes: Sequence[Axis]
    images: Mapping[int, Image]
    parameters: Mapping[int, Array]
    inputs: Mapping[int, int]
    result: int
    operands: Operands = field(default_factory=dict)
    key: str = ""
    attributes: Hashable | None = None
    own_layouts: bool = True
    algorithms: tuple[str, ...] = (DIRECT, WINOGRAD)
    composed: Composed | None = None
    rows: bool = False
    block: int = 0

    @property
    def batch(self) -> int:
        """Images."""
        return len(next(iter(self.images.values()))[0])

    @property
    def meta(self) -> TypeMeta:
        """The type of images and parameters."""
        return from_numpy(next(iter(self.images.values()))[0].dtype)

    @property
    def orders(self) -> set[str]:
        """Those of the images."""
        return {order for _, order in self.images.values()}

    @property
    def filters(self) -> int:
        """The argument that is the filter, or its gradient."""
        return WEIGHTS if WEIGHTS in self.parameters else DIFF_WEIGHTS

    @property
    def weights(self) -> Array:
        """The filter, or its gradient."""
        return self.parameters[self.filters]

    @property
    def groups(self) -> int:
        """Of the filter."""
        return len(self.weights) if self.weights.ndim == len(self.axes) + 3 else 1

    @property
    def arrays(self) -> dict[int, Array]:
        """All arguments by number."""
        found = {number: array for number, (array, _) in self.images.items()}
        return found | {**self.parameters} | {number: array for number, (_, array) in self.operands.items()}

    @property
    def geometry(self) -> Hashable:
        """What a problem follows from, among the parts of a convolution."""
        return tuple(self.axes), tuple((number, one.shape, one.strides) for number, one in self.arrays.items())


def key_of_choice(asked: Computation, window: str, constant: Collection[int]) -> str:
    """What the choice of an implementation depends on, as it is kept."""
    shapes = [f"{list(logical_shape(order, array.shape)[1:])} {order}" for array, order in asked.images.values()]
    fed = "" if asked.filters == asked.result else "constant " if asked.filters in constant else "fed "
    bias = "bias" if len(asked.parameters) > 1 else "no bias"
    filtered = f"{fed}filter {list(asked.weights.shape)}"
    parts = [f"{asked.function} {asked.meta}", *shapes, filtered, f"window {window}", bias, asked.key]
    return " | ".join([*parts, f"batch {asked.batch}"])
