"""GridSample and AffineGrid: images read at places that a grid gives, and the grid of an affine map.

Jaderberg et al., 2015, arXiv:1506.02025. A place is (x, y), or (x, y, z), from -1 to 1 over the image.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES, INT32, INT64, NUMBER_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.rows import along_axis
from dagexec.core.schema import Cost, OperatorCall, TensorType, memory_cost
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype, row_pieces

_MODES = ("linear", "nearest", "cubic")
_PADDINGS = ("zeros", "border", "reflection")
_CUBIC_A = -0.75
_PIECE = 1 << 18  # elements sampled at a time
_FAR = 1 << 30  # pixels: a place that is farther is as far as that


def infer_grid_sample(call: OperatorCall) -> list[TensorType]:
    """A pixel for each place of the grid."""
    meta = call.require_types(0, *NUMBER_TYPES)
    call.require_types(1, *FLOAT_TYPES)
    shape, grid = call.inputs[0].shape, call.inputs[1].shape
    dims = len(shape) - 2
    if dims < 1 or len(grid) != len(shape) or grid[-1] != dims or grid[0] != shape[0]:
        raise call.fail("X must be batch x channels x pixels, and the grid batch x places x as many coordinates")
    for name, choices in (("mode", _MODES), ("padding_mode", _PADDINGS)):
        if call.arguments.string(name, choices[0]) not in choices:
            raise ArgumentError(f"{call.label}: argument {name!r} must be one of {', '.join(choices)}")
    call.arguments.bool("align_corners")
    if math.prod(grid[1:-1]) and not math.prod(shape[2:]):
        raise call.fail("an image must have pixels")
    return [TensorType((*shape[:2], *grid[1:-1]), meta)]


def _sample_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[call.arguments.string("mode", "linear")]
    return memory_cost(call, outputs, 2.0 * taps ** (len(call.inputs[0].shape) - 2))


@array_function(
    "GridSample",
    infer=infer_grid_sample,
    doc="Y at each place of the grid is X there, interpolated. (dagexec's own, for ONNX.)",
    input_names=("X, batch x channels x pixels", "grid, batch x places x coordinates, the last axis' first"),
    output_names=("Y",),
    args={
        "mode": "linear, nearest or cubic (default linear)",
        "padding_mode": "outside of X are zeros, the pixels at its border, or its reflection (default zeros)",
        "align_corners": "1: -1 and 1 are the centers of first and last pixel; else their edges (default 0)",
    },
    cost=_sample_cost,
    rows=along_axis(0, 0, 1),
)
def grid_sample(call: OperatorCall, x: Array, grid: Array) -> Sequence[Array]:
    """Image by image, some places at a time."""
    sizes, dims = x.shape[2:], x.ndim - 2
    mode, padding = call.arguments.string("mode", "linear"), call.arguments.string("padding_mode", "zeros")
    aligned = call.arguments.bool("align_corners")
    work = np.dtype(np.float64 if x.dtype.itemsize == 8 else np.float32)
    y = np.empty((*x.shape[:2], math.prod(grid.shape[1:-1])), x.dtype)
    count = max(1, _PIECE // max(1, x.shape[1]))
    for image, target, places in zip(x, y, grid.reshape(len(x), y.shape[2], dims), strict=True):
        flat = image.reshape(len(image), -1)
        for piece in row_pieces(len(places), count):
            at = [
                _padded(
                    _pixels(places[piece, dims - 1 - axis].astype(work), size, aligned=aligned),
                    size,
                    mode,
                    padding,
                    aligned=aligned,
                )
                for axis, size in enumerate(sizes)
            ]
            target[:, piece] = _sampled(flat, at, sizes, mode, padding, aligned=aligned)
    return [y]


def _pixels(places: Array, size: int, *, aligned: bool) -> Array:
    """Places from -1 to 1 as numbers of pixels; what is no number is far outside."""
    pixels = (places + 1) / 2 * (size - 1) if aligned else ((places + 1) * size - 1) / 2
    return np.nan_to_num(pixels, nan=-_FAR, posinf=_FAR, neginf=-_FAR).clip(-_FAR, _FAR)


def _padded(pixels: Array, size: int, mode: str, padding: str, *, aligned: bool) -> Array:
    """The places inside of the image that stand for those outside."""
    if mode == "nearest":
        pixels = np.rint(pixels)
    if mode == "cubic":
        return pixels  # its taps are moved into the image one by one
    if padding == "border":
        return pixels.clip(0, size - 1)
    return _reflected(pixels, size, aligned=aligned) if padding == "reflection" else pixels


def _reflected(pixels: Array, size: int, *, aligned: bool) -> Array:
    """Reflection at the centers of first and last pixel, or at their outer edges."""
    low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
    span = high - low
    if span == 0:
        return np.zeros_like(pixels)
    behind = np.where(pixels < low, low - pixels, pixels - high)
    turns, rest = np.floor_divide(behind, span), np.mod(behind, span)
    from_low = (pixels < low) == (turns % 2 == 0)
    reflected = np.where(from_low, low + rest, high - rest)
    return np.where((pixels < low) | (pixels > high), reflected, pixels)


def _sampled(
    image: Array, at: Sequence[Array], sizes: Sequence[int], mode: str, padding: str, *, aligned: bool
) -> Array:
    """The sum over the taps along all axes; `image` is channels x pixels, `at` the place along each axis."""
    taps = [_taps(pixels, mode) for pixels in at]
    total = np.zeros((len(image), len(at[0])), at[0].dtype)
    for chosen in itertools.product(*taps):
        index = np.zeros(len(at[0]), np.intp)
        weight = np.ones(len(at[0]), at[0].dtype)
        for (place, part), size in zip(chosen, sizes, strict=True):
            inside = place.clip(0, size - 1)
            if padding == "reflection":
                inside = np.rint(_reflected(place, size, aligned=aligned)).clip(0, size - 1)
            index = index * size + inside.astype(np.intp)
            weight = weight * part
            if padding == "zeros":
                weight = np.where((place < 0) | (place >= size), 0, weight)
        part_of_image = image[:, index].astype(total.dtype)
        total += np.where(weight == 0, 0, part_of_image * weight)
    if image.dtype.kind in "iu":
        limits = np.iinfo(image.dtype)
        return np.rint(total).clip(limits.min, limits.max)
    return total


def _taps(pixels: Array, mode: str) -> list[tuple[Array, Array]]:
    """The pixels along an axis, and the weight of each."""
    if mode == "nearest":
        return [(pixels, np.ones_like(pixels))]
    first = np.floor(pixels)
    part = pixels - first
    if mode == "linear":
        return [(first, 1 - part), (first + 1, part)]
    return [(first + tap, _cubic(np.abs(part - tap))) for tap in range(-1, 3)]


def _cubic(distance: Array) -> Array:
    """The convolution kernel of Keys, 1981."""
    a = _CUBIC_A
    near = ((a + 2) * distance - (a + 3)) * distance * distance + 1
    far = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0)).astype(distance.dtype)


def infer_affine_grid(call: OperatorCall) -> list[TensorType]:
    """A place for each pixel of the size. Raises ArgumentError for a size that is none."""
    meta = call.require_types(0, *FLOAT_TYPES)
    call.require_types(1, INT32, INT64)
    size = [int(one) for one in call.known_value(1).reshape(-1)]
    dims = len(size) - 2
    if dims not in (2, 3) or min(size) < 0:
        raise ArgumentError(f"{call.label}: the size must be 4 or 5 numbers, found {size}")
    call.arguments.bool("align_corners")
    call.require_shape(0, (size[0], dims, dims + 1), "an affine map of 2 or 3 coordinates for each image")
    return [TensorType((size[0], *size[2:], dims), meta)]


@array_function(
    "AffineGrid",
    infer=infer_affine_grid,
    doc="For each pixel of an image of `size` (batch, channels, pixels), where an affine map has it: the grid that "
    "GridSample reads. (dagexec's own, for ONNX.)",
    input_names=("theta, batch x coordinates x (coordinates + 1)", "size"),
    output_names=("grid",),
    args={"align_corners": "1: -1 and 1 are the centers of first and last pixel; else their edges (default 0)"},
    value_inputs=(1,),
    onnx=(OnnxName("AffineGrid", 20, {"align_corners": "align_corners"}),),
)
def affine_grid(call: OperatorCall, theta: Array, size: Array) -> Sequence[Array]:
    """A product of the map with all places."""
    pixels = [int(one) for one in size.reshape(-1)[2:]]
    work = compute_dtype(theta.dtype)
    aligned = call.arguments.bool("align_corners")
    lines = [_line(count, work, aligned=aligned) for count in pixels]
    places = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(pixels, work)], -1)
    return [places.reshape(1, -1, len(pixels) + 1) @ theta.astype(work).swapaxes(1, 2)]


def _line(count: int, work: np.dtype, *, aligned: bool) -> Array:
    """The places of `count` pixels along an axis."""
    if aligned:
        return np.linspace(-1, 1, count, dtype=work) if count > 1 else np.zeros(count, work)
    return ((2 * np.arange(count) + 1) / max(1, count) - 1).astype(work)


not_differentiable("dagexec has them for inference alone", "GridSample", "AffineGrid")
