"""Poolings drawn by hypothesis, with loops over windows in float64 that say what they and their gradients compute.

A `PoolCase` prints as one line that makes it again; the checks put it in their messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from tests.ops.running import run_operator
from tests.ops.windows import SAMES, Array, Geometry, geometries, onnx_has, to_channels_first, to_channels_last

FLOATS = ["float32", "float32", "float64", "float16", "bfloat16"]
Pixel = tuple[int, ...]


def onnx_pools(geometry: Geometry) -> bool:
    """False where onnxruntime has no such pooling: it refuses SAME when the windows leave pixels over at the end."""
    ends = zip(geometry.windows(), geometry.size, strict=True)
    leaves_over = any(axis.taps[-1][-1] < size - 1 for axis, size in ends)
    return onnx_has(geometry) and not (geometry.legacy_pad in SAMES and leaves_over)


def starts_inside(geometry: Geometry) -> bool:
    """False when a window that Caffe's rounding adds lies wholly behind the image, which is refused."""
    return all(axis.taps[-1][0] < size for axis, size in zip(geometry.windows(), geometry.size, strict=True))


@dataclass(frozen=True)
class PoolCase:
    """A pooling; its arrays are made from `seed`. With `whole`, it is global and the geometry's window is the image."""

    op_type: str
    geometry: Geometry
    batch: int = 1
    channels: int = 2
    order: str = "NCHW"
    dtype: str = "float32"
    seed: int = 0
    whole: bool = False
    count_include_pad: bool = False
    p: float = 2.0
    flat_indices: bool = False
    storage_order: int = 0

    @property
    def out(self) -> Pixel:
        return tuple(len(axis.taps) for axis in self.geometry.windows())

    def arguments(self) -> dict[str, ArgumentValue]:
        found = {"global_pooling": 1} if self.whole else self.geometry.arguments()
        found["order"] = self.order
        if self.count_include_pad:
            found["count_include_pad"] = 1
        if self.p != 2 and self.op_type == "LpPool":
            found["p"] = self.p
        if self.flat_indices:
            found |= {"flat_indices": 1, "storage_order": self.storage_order}
        return found

    def integers(self) -> Array:
        """X as N, C, spatial: small integers, with many ties."""
        rng = np.random.default_rng(self.seed)
        low = 0 if self.dtype.startswith("uint") else -3
        return rng.integers(low, 4, (self.batch, self.channels, *self.geometry.size)).astype(self.dtype)

    def distinct(self) -> Array:
        """X as N, C, spatial: all different, a quarter apart, and none within a quarter of 0."""
        shape = (self.batch, self.channels, *self.geometry.size)
        count = int(np.prod(shape))
        values = np.random.default_rng(self.seed).permutation(count) - count // 2
        return ((values + (values >= 0)) / 4).reshape(shape).astype(self.dtype)

    def output_gradients(self) -> Array:
        """dY as N, C, spatial."""
        rng = np.random.default_rng(self.seed + 1)
        return rng.uniform(-1, 1, (self.batch, self.channels, *self.out)).astype(self.dtype)

    def fed(self, array: Array) -> Array:
        """N, C, spatial in the order of the case."""
        return to_channels_last(array) if self.order == "NHWC" else array

    def run(self, op_type: str, *inputs: Array, outputs: int = 1) -> list[Array]:
        """The outputs of an operator with the arguments of the case; all arrays are N, C, spatial here."""
        found = run_operator(op_type, [self.fed(array) for array in inputs], outputs, **self.arguments())
        return [to_channels_first(array) for array in found] if self.order == "NHWC" else found

    def gradient(self, x: Array, y: Array, dy: Array, mask: Array | None = None) -> Array:
        """dX of the gradient operator."""
        inputs = (x, y, dy) if mask is None else (x, dy, mask)
        (dx,) = self.run(f"{self.op_type}Gradient", *inputs)
        assert dx.dtype == np.dtype(self.dtype)
        assert dx.shape == x.shape
        return dx


def windows(geometry: Geometry) -> Iterator[tuple[Pixel, list[Pixel]]]:
    """The place of each window, and the pixels that its taps read in row-major order, those in the padding left out."""
    axes = geometry.windows()
    for place in product(*(range(len(axis.taps)) for axis in axes)):
        taps = product(*(axis.taps[index] for axis, index in zip(axes, place, strict=True)))
        yield place, [tap for tap in taps if all(0 <= p < n for p, n in zip(tap, geometry.size, strict=True))]


def counted_pixels(geometry: Geometry, place: Pixel, padded: bool) -> int:
    """How many pixels the mean of a window counts."""
    found = 1
    for axis, index, size in zip(geometry.windows(), place, geometry.size, strict=True):
        low, high = (axis.low, axis.high) if padded else (0, size)
        found *= sum(low <= tap < high for tap in axis.taps[index])
    return found


def first_maxima(x: Array, case: PoolCase) -> Array:
    """The mask of MaxPoolWithIndex: tap by tap, a later one wins when it is larger, or the first NaN."""
    size = case.geometry.size
    mask = np.full((*x.shape[:2], *case.out), -1, np.int64)
    for place, pixels in windows(case.geometry):
        best = np.full(x.shape[:2], -np.inf)
        found = np.full(x.shape[:2], -1)
        for pixel in pixels:
            value = x[(..., *pixel)].astype(np.float64)
            better = (found < 0) | (value > best) | (np.isnan(value) & ~np.isnan(best))
            number = np.ravel_multi_index(pixel, size, order="F" if case.storage_order else "C")
            best, found = np.where(better, value, best), np.where(better, number, found)
        mask[(..., *place)] = found
    if case.flat_indices:
        planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *(1 for _ in size)) * int(np.prod(size))
        mask = np.where(mask < 0, -1, mask + planes)
    return mask


def norms(x: Array, case: PoolCase) -> Array:
    """LpPool in float64, window by window."""
    y = np.zeros((*x.shape[:2], *case.out))
    for place, pixels in windows(case.geometry):
        total = sum((np.abs(x[(..., *pixel)].astype(np.float64)) ** case.p for pixel in pixels), np.zeros(x.shape[:2]))
        y[(..., *place)] = total ** (1 / case.p)
    return y


def spread_gradients(x: Array, y: Array, dy: Array, case: PoolCase) -> Array:
    """dX in float64, window by window and pixel by pixel, from the definition of each operator."""
    x, y, dy = (array.astype(np.float64) for array in (x, y, dy))
    dx = np.zeros(x.shape)
    mask = first_maxima(x, case) if case.op_type.startswith("MaxPoolWithIndex") else None
    for place, pixels in windows(case.geometry):
        given, top = dy[(..., *place)], y[(..., *place)]
        for pixel in pixels:
            value = x[(..., *pixel)]
            if mask is not None:
                share = (mask[(..., *place)] == numbered(pixel, case, x.shape)).astype(np.float64)
            elif case.op_type.startswith("MaxPool"):
                share = (value == top).astype(np.float64)
            elif case.op_type.startswith("AveragePool"):
                share = np.full(given.shape, 1 / counted_pixels(case.geometry, place, case.count_include_pad))
            else:
                defined = (value != 0) & (top != 0)
                ratio = np.where(defined, np.abs(value), 1) / np.where(defined, top, 1)
                share = np.where(defined, np.sign(value) * ratio ** (case.p - 1), 0)
            dx[(..., *pixel)] += given * share
    return dx


def numbered(pixel: Pixel, case: PoolCase, shape: tuple[int, ...]) -> Array:
    """The number that the mask has for a pixel, for each image and channel."""
    number = int(np.ravel_multi_index(pixel, case.geometry.size, order="F" if case.storage_order else "C"))
    if not case.flat_indices:
        return np.full(shape[:2], number)
    return np.arange(shape[0] * shape[1]).reshape(shape[:2]) * int(np.prod(case.geometry.size)) + number


@st.composite
def pool_cases(draw: st.DrawFn, op_type: str, dtypes: list[str], exponents: tuple[float, ...] = (2.0,)) -> PoolCase:
    """Cases of one operator, one in eight of them global."""
    geometry = draw(geometries(pooling=True).filter(starts_inside))
    whole = draw(st.integers(0, 7)) == 7
    if whole:
        rank = geometry.rank
        geometry = Geometry(geometry.size, geometry.size, (1,) * rank, (1,) * rank, (0,) * 2 * rank)
    flat = op_type == "MaxPoolWithIndex" and draw(st.booleans())
    return PoolCase(
        op_type,
        geometry,
        batch=draw(st.sampled_from([0, 1, 1, 2])),
        channels=draw(st.integers(1, 3)),
        order=draw(st.sampled_from(["NCHW", "NHWC"])),
        dtype=draw(st.sampled_from(dtypes)),
        seed=draw(st.integers(0, 99)),
        whole=whole,
        count_include_pad=op_type == "AveragePool" and draw(st.booleans()),
        p=draw(st.sampled_from(exponents)),
        flat_indices=flat,
        storage_order=draw(st.integers(0, 1)) if flat else 0,
    )
