"""Where the channels of an image tensor are: argument `order`, NCHW (second axis), NHWC (last axis) or NCHW16c.

NCHW16c is N, C/16, spatial, 16: channels in blocks of 16, which oneDNN's kernels for AVX-512 read and write whole. It
is a physical shape like the others, so C is a multiple of 16. NumPy's operators compute in NCHW and NHWC only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from dagexec.core.errors import ArgumentError, UnsupportedFeatureError
from dagexec.core.extras import install_command
from dagexec.core.operator import Operator
from dagexec.core.proto import OperatorDef
from dagexec.core.schema import OperatorCall

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace

ORDER_HELP = (
    "NCHW or NHWC: whether channels are the second or the last axis (default NCHW); or NCHW16c, N, C/16, spatial, 16, "
    "where oneDNN computes"
)

NCHW, NHWC, NCHW16C = "NCHW", "NHWC", "NCHW16c"
ORDERS = (NCHW, NHWC, NCHW16C)
BLOCK_CHANNELS = 16
"""Channels of a block of NCHW16c."""


def image_order(call: OperatorCall, argument: str = "order", default: str = NCHW) -> str:
    """The order that `argument` names, in either case of letters, as ORDERS spells it. Raises ArgumentError."""
    given = call.arguments.string(argument, default)
    for order in ORDERS:
        if given.upper() == order.upper():
            return order
    raise ArgumentError(f"{call.label}: argument {argument!r} must be NCHW, NHWC or NCHW16c, found {given.upper()!r}")


def channels_last(call: OperatorCall) -> bool:
    """True for NHWC, in either case of letters. Raises ArgumentError for an order other than NCHW and NHWC."""
    order = call.arguments.string("order", NCHW).upper()
    if order not in (NCHW, NHWC):
        raise ArgumentError(f"{call.label}: argument 'order' must be NCHW or NHWC, found {order!r}")
    return order == NHWC


def channel_axis(call: OperatorCall) -> int:
    """The axis of channels of input 0, whatever its rank; a tensor of one axis has its channels there.

    For NCHW16c it is the axis of blocks.
    """
    rank = len(call.inputs[0].shape)
    return rank - 1 if image_order(call) == NHWC else min(1, rank - 1)


def require_image(call: OperatorCall, index: int, spatial_axes: Sequence[int] = (1, 2, 3)) -> tuple[int, ...]:
    """The shape of input `index`, an image tensor in the order of the call with one of those numbers of spatial axes.

    Raises ShapeError for another rank, and ArgumentError when NCHW16c does not have blocks of 16 channels.
    """
    if image_order(call) != NCHW16C:
        return call.require_rank(index, *(rank + 2 for rank in spatial_axes))
    shape = call.require_rank(index, *(rank + 3 for rank in spatial_axes))
    check_blocks(call, index)
    return shape


def check_blocks(call: OperatorCall, index: int) -> None:
    """Raise ArgumentError unless input `index`, an image tensor, has the blocks that its order asks for."""
    shape = call.inputs[index].shape
    if image_order(call) == NCHW16C and (len(shape) < 3 or shape[-1] != BLOCK_CHANNELS):
        raise ArgumentError(
            f"{call.label}: with order NCHW16c input {call.definition.input[index]!r} must be N, C/16, spatial, 16; "
            f"found shape {shape}"
        )


def spatial_sizes(order: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The spatial sizes of an image tensor's shape."""
    return {NCHW: shape[2:], NHWC: shape[1:-1], NCHW16C: shape[2:-1]}[order]


def channel_count(order: str, shape: tuple[int, ...]) -> int:
    """The number of channels of an image tensor's shape."""
    if order == NCHW16C:
        return shape[1] * shape[-1]
    return shape[-1] if order == NHWC else shape[1]


def logical_shape(order: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """N, C, spatial of an image tensor's shape."""
    return (shape[0], channel_count(order, shape), *spatial_sizes(order, shape))


def image_shape(order: str, batch: int, channels: int, sizes: Sequence[int], label: str) -> tuple[int, ...]:
    """The shape of an image tensor. Raises ArgumentError, naming `label`, when the channels are no blocks of 16."""
    if order == NHWC:
        return (batch, *sizes, channels)
    if order == NCHW:
        return (batch, channels, *sizes)
    if channels % BLOCK_CHANNELS:
        raise ArgumentError(f"{label}: order NCHW16c needs a multiple of 16 channels, found {channels}")
    return (batch, channels // BLOCK_CHANNELS, *sizes, BLOCK_CHANNELS)


class ImageOperator(Operator):
    """An operator on image tensors.

    Attributes:
        orders: those that the class computes in.
    """

    orders: ClassVar[tuple[str, ...]] = (NCHW, NHWC)

    def __init__(self, definition: OperatorDef, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises UnsupportedFeatureError for NCHW16c where the class does not compute in it."""
        super().__init__(definition, workspace, index=index, net=net)
        blocked = NCHW16C.upper()
        asked = {self.arguments.string(name, NCHW).upper() for name in ("order", "output_order")}
        if NCHW16C not in self.orders and blocked in asked:
            raise UnsupportedFeatureError(
                f"{self.label}: NumPy does not compute in order NCHW16c, oneDNN is needed: "
                f"{install_command('onednn')}, and engine ONEDNN"
            )
