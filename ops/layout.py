"""Where the channels of an image tensor are: argument `order`, NCHW (second axis) or NHWC (last axis)."""

from __future__ import annotations

from dagexec.core.errors import ArgumentError
from dagexec.core.schema import OperatorCall

ORDER_HELP = "NCHW or NHWC: whether channels are the second or the last axis (default NCHW)"


def channels_last(call: OperatorCall) -> bool:
    """True for NHWC, in either case of letters. Raises ArgumentError for an order other than the two."""
    order = call.arguments.string("order", "NCHW").upper()
    if order not in ("NCHW", "NHWC"):
        raise ArgumentError(f"{call.label}: argument 'order' must be NCHW or NHWC, found {order!r}")
    return order == "NHWC"


def channel_axis(call: OperatorCall) -> int:
    """The axis of channels of input 0, whatever its rank; a tensor of one axis has its channels there."""
    rank = len(call.inputs[0].shape)
    return rank - 1 if channels_last(call) else min(1, rank - 1)
