"""ResizeNearest and Resize: interpolation by kernels of our own, nearest pixels by oneDNN where its rule is the same,
or without it as copies and lookups.

oneDNN interpolates linearly, too, but each element alone: 21 planes of 28 x 28 pixels as 224 x 224 take 1.37 ms with
AVX-512 on one core of an Intel Xeon, by one axis after the other with `weighted_rows` 0.5. It serves where that cannot.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dagexec.core.operator import Prepared, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.layout import NCHW, NHWC, image_order, spatial_sizes
from dagexec.ops.engines.onednn.copies import copying
from dagexec.ops.engines.onednn.cutting import image_axes
from dagexec.ops.engines.onednn.descriptors import DST, FORWARD_INFERENCE, SRC
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.image import resize, spatial
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.gather_kernel import gather_step
from dagexec.ops.kernels.weighted_rows import weighted_rows_step
from dagexec.platform.addresses import address_of

_NEAREST = 0x2FFF0
_LINEAR = 0x2FFF1
_CACHE_LINE = 64
"""Bytes. A large result is stored past the caches, by instructions that end the process where it is not aligned."""


@operator(spatial.ResizeNearest.schema, engine="ONEDNN")
class ResizeNearest(OneDNNOperator, spatial.ResizeNearest):
    """Nearest-neighbor resizing."""

    def prepare_primitive(self) -> Step:
        """One resampling, or what moves pixels.

        Output pixel i is oneDNN's pixel round((i + 1/2) * in / out - 1/2) and the operator's int(i / scale): the same
        when the scale is a whole number, and not always when it is not.
        """
        x, y, order = self.x(0), self.y(0), image_order(self.call())
        scales = spatial.resize_scales(self.call())
        if not self.onednn.has_primitives:
            axes = range(*(1, 3) if order == NHWC else (2, 4))
            return _picked(
                self,
                {axis: spatial.nearest_pixels(y.shape[axis], scale) for axis, scale in zip(axes, scales, strict=True)},
            )
        sizes = zip(spatial_sizes(order, x.shape), spatial_sizes(order, y.shape), scales, strict=True)
        for size, out, scale in sizes:
            centers = (np.arange(out, dtype=np.float32) + np.float32(0.5)) * np.float32(size / out) - np.float32(0.5)
            if (np.floor(centers + np.float32(0.5)).astype(np.intp) != spatial.nearest_pixels(out, scale)).any():
                raise UnsupportedFeatureError(f"{self.label}: scale {scale:g} selects other pixels than oneDNN does")
        return resampled(self, x, y, order, _NEAREST)


@operator(resize.Resize.schema, engine="ONEDNN")
class Resize(OneDNNOperator, resize.Resize):
    """Images resized along their spatial axes, by the nearest pixels or linearly."""

    def prepare_primitive(self) -> Step:
        """One resampling, where every output pixel is made of the same pixels of X, with the same weights."""
        x, y, call = self.x(0), self.y(0), self.call()
        nearest = self.arguments.string("mode", "nearest") == "nearest"
        if nearest and not self.onednn.has_primitives:
            found = {axis.axis: resize.find_taps(call, axis) for axis in resize.resized_axes(call)}
            if all(taps.outside is None for taps in found.values()):
                return _picked(self, {axis: taps.places[0] for axis, taps in found.items()})
        order, channels = (NCHW, 1) if x.shape[:2] == y.shape[:2] else (NHWC, -1)
        if not 3 <= x.ndim <= 5 or not y.size or any(x.shape[axis] != y.shape[axis] for axis in (0, channels)):
            raise UnsupportedFeatureError(f"{self.label}: not an image of which only the spatial axes are resized")
        if not nearest and (step := _by_axes(self, x, y)) is not None:
            return step
        if self.arguments.string("mode", "nearest") == "cubic" or self.arguments.bool("antialias"):
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has no cubic and no antialiased resampling")
        for axis in resize.resized_axes(call):
            if not _same_pixels(resize.find_taps(call, axis), axis, nearest=nearest):
                raise UnsupportedFeatureError(f"{self.label}: axis {axis.axis} is read at other places than oneDNN's")
        return resampled(self, x, y, order, _NEAREST if nearest else _LINEAR)


def _picked(owner: OneDNNOperator, places: Mapping[int, Array]) -> Step:
    """Pixels at `places` along axes: a copy where each is there as often, else a lookup.

    Raises UnsupportedFeatureError where there is no kernel.
    """
    x, y = owner.x(0), owner.y(0)
    if all(resize.Taps(one[None], None, None).repeats(x.shape[axis]) for axis, one in places.items()):
        return copying(owner)
    moving = [axis for axis, one in places.items() if not np.array_equal(one, np.arange(x.shape[axis]))]
    axes = range(min(moving), max(moving) + 1)
    sizes = x.shape[axes.start : axes.stop]
    grid = np.ix_(*(places.get(axis, np.arange(x.shape[axis])) for axis in axes))
    pixels = np.ravel_multi_index(grid, sizes, mode="clip").reshape(-1)
    lead, tail = math.prod(x.shape[: axes.start]), math.prod(x.shape[axes.stop :])
    source, target = x.reshape(lead, -1, tail), y.reshape(lead, -1, tail)
    step = gather_step(source, pixels, target, 1, wraps=False, failure=AssertionError)
    if step is None:
        raise UnsupportedFeatureError(f"{owner.label}: no kernels run here")
    return step


def _by_axes(owner: Resize, x: Array, y: Array) -> Step | None:
    """One axis after the other, those that shrink most first; None where the kernels do not serve."""
    if x.dtype != np.float32 or not (x.flags.c_contiguous and y.flags.c_contiguous):
        return None
    call = owner.call()
    named = [(axis, resize.find_taps(call, axis)) for axis in resize.resized_axes(call)]
    if any(taps.weights is None or taps.outside is not None for _, taps in named):
        return None
    axes = [(axis, taps) for axis, taps in named if axis.out != axis.size or axis.scale != 1]
    if not axes:
        return None
    axes.sort(key=lambda one: (one[0].out / one[0].size, -one[0].axis))
    steps: list[Step | None] = []
    for number, (axis, taps) in enumerate(axes):
        shape = (*x.shape[: axis.axis], axis.out, *x.shape[axis.axis + 1 :])
        target = y if number == len(axes) - 1 else _memory(owner, shape)
        assert taps.weights is not None, f"{owner.label}: axis {axis.axis} is not interpolated"
        steps += _axis_steps(owner, x, target, axis.axis, taps.places, taps.weights)
        x = target
    made = [step for step in steps if step is not None]
    return in_sequence(made) if len(made) == len(steps) else None


def _axis_steps(owner: Resize, x: Array, y: Array, axis: int, places: Array, weights: Array) -> list[Step | None]:
    """Those for one axis; the last one is resized between two transposes."""
    machine, label = owner.onednn.machine, owner.label
    lead, tail = math.prod(x.shape[:axis]), math.prod(x.shape[axis + 1 :])
    if tail > 1:
        source, target = x.reshape(lead, -1, tail), y.reshape(lead, -1, tail)
        return [weighted_rows_step(machine, source, target, places, weights, label)]
    turned, resized = _memory(owner, (1, x.shape[axis], lead)), _memory(owner, (1, y.shape[axis], lead))
    return [
        copy_step(machine, [(x.reshape(lead, -1).T, turned[0])], label),
        weighted_rows_step(machine, turned, resized, places, weights, label),
        copy_step(machine, [(resized[0].T, y.reshape(lead, -1))], label),
    ]


def _memory(owner: Resize, shape: tuple[int, ...]) -> Array:
    memory: Array = owner.working_memory(4 * math.prod(shape)).view(np.float32).reshape(shape)
    return memory


def _same_pixels(taps: resize.Taps, axis: resize.ResizedAxis, *, nearest: bool) -> bool:
    """True where oneDNN computes an axis from the same pixels: those around (i + 1/2) * in / out - 1/2."""
    if taps.outside is not None and taps.outside.any():
        return False
    centers = (np.arange(axis.out, dtype=np.float32) + np.float32(0.5)) * np.float32(axis.size / axis.out)
    places = np.clip(centers - np.float32(0.5), 0, axis.size - 1)
    if nearest or taps.weights is None:
        return bool((np.floor(places + np.float32(0.5)) == taps.places[0]).all())
    return bool(np.allclose((taps.places * taps.weights).sum(0), places, rtol=1e-6, atol=1e-6))


def resampled(owner: OneDNNOperator, x: Array, y: Array, order: str, algorithm: int) -> Prepared:
    """The primitive from `x` to `y`. Raises UnsupportedFeatureError where oneDNN has none, or `y` is not aligned."""
    if address_of(y) % _CACHE_LINE:
        raise UnsupportedFeatureError(f"{owner.label}: its output does not start at a cache line")
    source, target, attributes = owner.image(x, order), owner.image(y, order), owner.attributes()
    tensors = (owner.onednn.ffi.NULL, source, target, attributes)
    found = owner.describe_fast("resampling_forward", owner.onednn.engine, FORWARD_INFERENCE, algorithm, *tensors)
    bound = owner.in_parts(found, {SRC: (source, x), DST: (target, y)}, *image_axes(order))
    return owner.rebindable(bound.step, bound, {0: SRC}, {})  # a caller's memory may begin anywhere
