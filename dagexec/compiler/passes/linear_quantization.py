"""What passes ask about QuantizeLinear and DequantizeLinear in a draft: their constants, and what lies behind them."""

from __future__ import annotations

import numpy as np

from dagexec.compiler.passes.draft import Array, Draft
from dagexec.core.dtypes import INT8, UINT8, TypeMeta, from_numpy
from dagexec.core.node import Node, new_node
from dagexec.ops.families.quantized.linear import QUANTIZED
from dagexec.ops.families.quantized.scales import check_scales
from dagexec.platform.records import dataclass

QUANTIZE = "QuantizeLinear"
DEQUANTIZE = "DequantizeLinear"


@dataclass(frozen=True, slots=True)
class Linear:
    """One scale and zero point for a whole tensor, and its integer type."""

    scale: np.float32
    zero_point: int
    meta: TypeMeta

    @property
    def is_bytes(self) -> bool:
        """True for uint8 and int8."""
        return self.meta in (UINT8, INT8)


def linear_of(draft: Draft, number: int | None, op_type: str) -> Linear | None:
    """The constants of operator `number`, if it is free, of type `op_type`, and has one scale, of float32.

    Raises ArgumentError for a scale that is not finite or not above 0.
    """
    if number is None or draft[number].type != op_type or not draft.is_free(number):
        return None
    definition = draft[number]
    scale = draft.constant(definition.input[1])
    if scale is None or scale.size != 1 or scale.dtype != np.float32:
        return None
    check_scales(scale, draft.label(number), definition.input[1])
    zero: Array | None = np.zeros((), np.uint8)
    if len(definition.input) > 2:
        zero = draft.constant(definition.input[2])
    elif "to" in draft.arguments(number) or op_type == DEQUANTIZE:
        return None
    if zero is None or zero.size != 1 or from_numpy(zero.dtype) not in QUANTIZED:
        return None
    return Linear(np.float32(scale.reshape(-1)[0]), int(zero.reshape(-1)[0]), from_numpy(zero.dtype))


def dequantized(draft: Draft, name: str) -> tuple[str, Linear] | None:
    """The integers, and their scale, that blob `name` was dequantized from; None when it is no such blob."""
    number = draft.producer(name)
    found = linear_of(draft, number, DEQUANTIZE)
    return None if found is None or number is None else (draft[number].input[0], found)


@dataclass(frozen=True)
class Weights:
    """Constant int8 weights and float32 scales, one or one for each index of an axis."""

    integers: Array
    scales: Array
    axis: int


def dequantized_weights(draft: Draft, name: str) -> Weights | None:
    """The constants that `name` was dequantized from, the zero point subtracted; None when int8 does not hold them."""
    number = draft.producer(name)
    if number is None or draft[number].type != DEQUANTIZE:
        return None
    definition = draft[number]
    integers, scales = draft.constant(definition.input[0]), draft.constant(definition.input[1])
    if integers is None or scales is None or scales.dtype != np.float32 or integers.dtype.itemsize != 1:
        return None
    if from_numpy(integers.dtype) not in QUANTIZED or draft.arguments(number).int("block_size", 0):
        return None
    check_scales(scales, draft.label(number), definition.input[1])
    axis = draft.arguments(number).int("axis", 1) % max(1, integers.ndim)
    if len(definition.input) > 2:
        zero = draft.constant(definition.input[2])
        if zero is None:
            return None
        spread = [1] * integers.ndim
        if zero.size > 1:
            spread[axis] = zero.size
        integers = integers.astype(np.int16) - zero.astype(np.int16).reshape(spread)
        if integers.min(initial=0) < -128 or integers.max(initial=0) > 127:
            return None
    elif integers.dtype != np.int8:
        return None
    return Weights(integers.astype(np.int8), scales.reshape(-1), axis)


def quantize(x: str, y: str, scale: str, zero_point: str) -> Node:
    """A QuantizeLinear of the whole of `x`."""
    return new_node(QUANTIZE, [x, scale, zero_point], [y], name=f"{x} to 8 bits")


def dequantize(x: str, y: str, scale: str, zero_point: str) -> Node:
    """A DequantizeLinear of the whole of `x`."""
    return new_node(DEQUANTIZE, [x, scale, zero_point], [y], name=f"{y} from 8 bits")
