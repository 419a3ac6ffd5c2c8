"""Normalization over neighboring channels (LRN) of pixels as machine code.

Of a pixel the squares of all channels are written between zeros, so that the sum around each channel is that of some
vectors that begin one number apart. A pixel's bytes depend on the pixel alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.native import NativeStep
from dagexec.ops.kernels import elementary
from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import in_pieces, shares
from dagexec.platform.addresses import address_of
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_PIXELS, _CHANNELS, _SQUARES = range(3)
"""Places of the 64-bit numbers that a kernel gets: how many pixels and channels, and where the squares are written."""


@dataclass(frozen=True)
class Neighbors:
    """Y = X * (bias + alpha / size * the sum of squares of `size` channels around each) ** -beta."""

    size: int
    alpha: float
    beta: float
    bias: float


def neighbors_step(machine: Machine, how: Neighbors, x: Array, y: Array, label: str) -> NativeStep | None:
    """The step that normalizes `x` to `y`, packed float32 with channels last; None where no kernel runs."""
    is_plain = all(array.dtype == np.float32 and array.flags.c_contiguous for array in (x, y))
    kernel = _normalizing(machine.lanes, how) if machine.can_run and is_plain else None
    if kernel is None:
        return None
    channels, half = x.shape[-1], how.size // 2
    pixel, tables, kept = BYTES * channels, [], list[Array]()
    for part in shares(x.size // channels, pieces_of_bytes(2 * x.nbytes)):
        squares = np.zeros(channels + 2 * half + machine.lanes, np.float32)
        numbers = np.array([len(part), channels, address_of(squares[half:])], np.int64)
        kept += [squares, numbers]
        before = part.start * pixel
        tables.append([(kernel, address_of(numbers), address_of(x) + before, address_of(y) + before, 0)])
    return in_pieces(tables, (x, y, kept), label)


@lru_cache
def _normalizing(lanes: int, how: Neighbors) -> int | None:
    """The address of a function of numbers, and of where the first pixel is read and written."""
    build = Builder(lanes)
    numbers, x, y = build.arguments(3)
    squares, half = build.number(numbers, 8 * _SQUARES), how.size // 2
    channels = build.number(numbers, 8 * _CHANNELS)

    def square(place: Scalar, mask: Mask | None) -> None:
        value = build.load(x, place, mask=mask)
        build.store(value * value, squares, place, mask=mask)

    def normalize(place: Scalar, mask: Mask | None) -> None:
        total = build.load(squares, place, -half * BYTES)
        for number in range(1 - half, half + 1):
            total = total + build.load(squares, place, number * BYTES)
        scale = build.fma(total, build.constant(how.alpha / how.size), how.bias)
        build.store(_divided(build, build.load(x, place, mask=mask), scale, how.beta), y, place, mask=mask)

    with build.repeat(build.number(numbers, 8 * _PIXELS)):
        build.each(channels, square)
        build.each(channels, normalize)
        x.set(x + (channels << 2))
        y.set(y + (channels << 2))
    return build.function()


def _divided(build: Builder, value: Vector, scale: Vector, beta: float) -> Vector:
    """value / scale ** beta."""
    if beta == 1:
        return value / scale
    if beta in (0.5, 0.75):
        root = build.square_root(scale)
        return value / (root if beta == 0.5 else root * build.square_root(root))
    return value * elementary.exp(build, elementary.log(build, scale) * -beta)
