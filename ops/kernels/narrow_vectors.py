"""Vectors of float32 read from elements of other types in memory, and written as those.

Each function reads or writes as many elements as a vector has, `lanes`, at an address, and nothing else.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from dagexec.ops.kernels.builder import Builder, Scalar, Vector
from dagexec.platform.assembler import AND, PERMUTE_HALVES

_WIDEN = {
    np.dtype(np.uint8): (2, 1, 0x31),
    np.dtype(np.bool_): (2, 1, 0x31),
    np.dtype(np.int8): (2, 1, 0x21),
    np.dtype(ml_dtypes.bfloat16): (2, 1, 0x33),
}
"""Instructions that read elements of 8 and 16 bits as integers of 32."""

_TO_WORDS, _TO_BYTES = (2, 2, 0x33), (2, 2, 0x31)  # the low 16 and 8 bits of integers, to memory, with AVX-512
_PACK_WORDS, _PACK_BYTES = (1, 1, 0x6B), (1, 1, 0x67)  # two vectors in half the bits, four or eight at a time
_STORE_HALF, _STORE_QUARTER, _STORE_BYTE = (1, 0, 0x11), (1, 0, 0x13), (3, 1, 0x14)  # with AVX2, of the first 16 bytes


def load_as_floats(build: Builder, base: Scalar, kind: np.dtype[Any]) -> Vector:
    """The elements at `base` as float32, rounded as float32 is: of float32, bfloat16, int32, int8, uint8 or bool."""
    if kind == np.float32:
        return build.load(base)
    if kind == np.int32:
        return build.from_integer(build.load(base))
    integers = build.load_by(_WIDEN[kind], base)
    return build.shift(integers, 16) if kind == ml_dtypes.bfloat16 else build.from_integer(integers)


def store_bfloat16(build: Builder, value: Vector, base: Scalar) -> None:
    """Rounded to the nearest, of two the even one; of NaN its sign is kept."""
    last = build.compute(AND, build.shift(value, -16), build.integer(1))
    rounded = build.add_integers(build.add_integers(value, last), build.integer(0x7FFF))
    nan = build.either(build.sign_of(value), build.integer(0x7FC00000))
    words = build.shift(build.select(build.is_nan(value), nan, rounded), -16)
    if build.lanes == 16:
        build.store_by(_TO_WORDS, words, base)
    else:
        build.store_by(_STORE_HALF, _in_words(build, words), base, is_short=True)


def store_uint8(build: Builder, value: Vector, base: Scalar) -> None:
    """Whole numbers from 0 to 255."""
    integers = build.to_integer(value)
    if build.lanes == 16:
        build.store_by(_TO_BYTES, integers, base)
    else:
        words = _in_words(build, integers)
        build.store_by(_STORE_QUARTER, build.compute(_PACK_BYTES, words, words), base, is_short=True)


def store_first_uint8(build: Builder, value: Vector, base: Scalar) -> None:
    """The first number, from 0 to 255 and whole, as one byte."""
    integers = build.to_integer(value)
    if build.lanes == 16:
        build.store_by(_TO_BYTES, integers, base, mask=build.first(build.zero() + 1))
    else:
        build.store_by(_STORE_BYTE, integers, base, number=0, is_short=True)


def _in_words(build: Builder, integers: Vector) -> Vector:
    """Eight integers of 16 bits as the first half of a vector."""
    upper = build.compute(PERMUTE_HALVES, integers, integers, 1)
    return build.compute(_PACK_WORDS, integers, upper)
