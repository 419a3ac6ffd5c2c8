"""Where the channels of an image tensor are: argument `order`, NCHW (second axis), NHWC (last axis) or in blocks.

NCHW16c is N, C/16, spatial, 16: channels in blocks of 16, which oneDNN's kernels for AVX-512 read and write whole;
NCHW8c, in blocks of 8, is for AVX2. They are physical shapes like the others, so C is a multiple of the block. NumPy's
operators compute in NCHW and NHWC only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from dagexec.core.arguments import Arguments
from dagexec.core.node import Node
from dagexec.core.operator import Operator
from dagexec.core.schema import OperatorCall
from dagexec.errors import ArgumentError, UnsupportedFeatureError
from dagexec.platform.extras import install_command

if TYPE_CHECKING:
    from dagexec.core.workspace import Workspace

ORDER_HELP = (
    "NCHW or NHWC: whether channels are the second or the last axis (default NCHW); or, where oneDNN computes, in "
    "blocks: NCHW16c, which is N, C/16, spatial, 16, or NCHW8c"
)

NCHW, NHWC, NCHW8C, NCHW16C = "NCHW", "NHWC", "NCHW8c", "NCHW16c"
BLOCKS: Mapping[str, int] = {NCHW8C: 8, NCHW16C: 16}
"""By blocked order, the channels of a block."""

ORDERS = (NCHW, NHWC, *BLOCKS)

PADDED: Mapping[str, str] = {f"{order} padded": order for order in BLOCKS}
"""By layout of a net, the order of those that make channels more until they fill blocks."""

LAYOUTS = (NHWC, *BLOCKS, *PADDED, NCHW)
"""Of the images inside a net. In NHWC every engine computes."""

_ORDERS_AS_STORED: Mapping[bytes, str] = {order.encode(): order for order in ORDERS}

KNOWN_ORDERS = f"{', '.join(ORDERS[:-1])} or {ORDERS[-1]}"
"""For messages."""


def image_order(call: OperatorCall, argument: str = "order", default: str = NCHW) -> str:
    """The order that `argument` names, in either case of letters, as ORDERS spells it. Raises ArgumentError."""
    value = call.arguments.values.get(argument)
    if value is None:
        return default
    if type(value) is bytes and value in _ORDERS_AS_STORED:
        return _ORDERS_AS_STORED[value]
    given = call.arguments.string(argument, default)
    for order in ORDERS:
        if given.upper() == order.upper():
            return order
    raise ArgumentError(f"{call.label}: argument {argument!r} must be {KNOWN_ORDERS}, found {given.upper()!r}")


def channels_last(call: OperatorCall) -> bool:
    """True for NHWC, in either case of letters. Raises ArgumentError for an order other than NCHW and NHWC."""
    order = call.arguments.string("order", NCHW).upper()
    if order not in (NCHW, NHWC):
        raise ArgumentError(f"{call.label}: argument 'order' must be NCHW or NHWC, found {order!r}")
    return order == NHWC


def channel_axis(call: OperatorCall) -> int:
    """The axis of channels of input 0, whatever its rank; a tensor of one axis has its channels there.

    In a blocked order it is the axis of blocks.
    """
    rank = len(call.inputs[0].shape)
    return rank - 1 if image_order(call) == NHWC else min(1, rank - 1)


def require_image(call: OperatorCall, index: int, spatial_axes: Sequence[int] = (1, 2, 3)) -> tuple[int, ...]:
    """The shape of input `index`, an image tensor in the order of the call with one of those numbers of spatial axes.

    Raises ShapeError for another rank, and ArgumentError when the blocks are not those of the order.
    """
    is_blocked = image_order(call) in BLOCKS
    others = 3 if is_blocked else 2
    shape = call.inputs[index].shape
    if len(shape) - others not in spatial_axes:
        call.require_rank(index, *(rank + others for rank in spatial_axes))
    if is_blocked:
        check_blocks(call, index)
    return shape


def check_blocks(call: OperatorCall, index: int) -> None:
    """Raise ArgumentError unless input `index`, an image tensor, has the blocks that its order asks for."""
    shape, order = call.inputs[index].shape, image_order(call)
    block = BLOCKS.get(order)
    if block is not None and (len(shape) < 3 or shape[-1] != block):
        raise ArgumentError(
            f"{call.label}: with order {order} input {call.definition.input[index]!r} must be N, C/{block}, spatial, "
            f"{block}; found shape {shape}"
        )


def spatial_sizes(order: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The spatial sizes of an image tensor's shape."""
    if order in BLOCKS:
        return shape[2:-1]
    return shape[1:-1] if order == NHWC else shape[2:]


def channel_count(order: str, shape: tuple[int, ...]) -> int:
    """The number of channels of an image tensor's shape."""
    if order in BLOCKS:
        return shape[1] * shape[-1]
    return shape[-1] if order == NHWC else shape[1]


def logical_shape(order: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """N, C, spatial of an image tensor's shape."""
    return (shape[0], channel_count(order, shape), *spatial_sizes(order, shape))


def image_shape(order: str, batch: int, channels: int, sizes: Sequence[int], label: str) -> tuple[int, ...]:
    """The shape of an image tensor. Raises ArgumentError, naming `label`, when the channels fill no blocks."""
    if order == NHWC:
        return (batch, *sizes, channels)
    if order == NCHW:
        return (batch, channels, *sizes)
    block = BLOCKS[order]
    if channels % block:
        raise ArgumentError(f"{label}: order {order} needs a multiple of {block} channels, found {channels}")
    return (batch, channels // block, *sizes, block)


def blocked_orders(arguments: Arguments) -> list[str]:
    """The blocked orders that arguments `order` and `output_order` name."""
    asked = {arguments.string(name, NCHW).upper() for name in ("order", "output_order")}
    return [order for order in BLOCKS if order.upper() in asked]


class ImageOperator(Operator):
    """An operator on image tensors.

    Attributes:
        orders: those that the class computes in.
    """

    orders: ClassVar[tuple[str, ...]] = (NCHW, NHWC)

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises UnsupportedFeatureError for a blocked order where the class does not compute in it."""
        super().__init__(definition, workspace, index=index, net=net)
        for order in blocked_orders(self.arguments):
            if order not in self.orders:
                raise UnsupportedFeatureError(
                    f"{self.label}: NumPy does not support order {order}; oneDNN is needed: "
                    f"{install_command('onednn')}, and engine ONEDNN"
                )
