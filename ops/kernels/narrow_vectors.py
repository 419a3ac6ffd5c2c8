"""Vectors of float32 read from elements of other types in memory, and written as those.

Each function reads or writes as many elements as a vector has, `lanes`, at an address, and nothing else.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from dagexec.ops.kernels.builder import Builder, Scalar, Vector
from dagexec.platform.assembly.instructions import AND


def load_as_floats(build: Builder, base: Scalar, kind: np.dtype[Any]) -> Vector:
    """The elements at `base` as float32, rounded as float32 is: of float32, bfloat16, int32, int8, uint8 or bool."""
    if kind == np.float32:
        return build.load(base)
    if kind == np.int32:
        return build.from_integer(build.load(base))
    integers = build.load_widened(base, kind.itemsize, has_sign=kind == np.int8)
    return build.shift(integers, 16) if kind == ml_dtypes.bfloat16 else build.from_integer(integers)


def store_bfloat16(build: Builder, value: Vector, base: Scalar) -> None:
    """Rounded to the nearest, of two the even one; of NaN its sign is kept."""
    last = build.compute(AND, build.shift(value, -16), build.integer(1))
    rounded = build.add_integers(build.add_integers(value, last), build.integer(0x7FFF))
    nan = build.either(build.sign_of(value), build.integer(0x7FC00000))
    words = build.shift(build.select(build.is_nan(value), nan, rounded), -16)
    build.store_narrowed(words, base, 2)


def store_uint8(build: Builder, value: Vector, base: Scalar) -> None:
    """Whole numbers from 0 to 255."""
    build.store_narrowed(build.to_integer(value), base, 1)


def store_first_uint8(build: Builder, value: Vector, base: Scalar) -> None:
    """The first number, from 0 to 255 and whole, as one byte."""
    build.append(lambda code, vector, to: code.store_first_byte(vector, to), build.to_integer(value), base)
