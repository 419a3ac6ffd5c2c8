"""Pooling by oneDNN: MaxPool and AveragePool, windows of 1 to 3 axes and the whole image, in every order; gradients.

oneDNN's maximum of a window with a NaN is that of its other pixels, or NaN; see `keeping_nan`.

oneDNN's own gradient of a maximum goes to one pixel a window, Caffe2's to all that equal it: so what
compares and sums is a kernel of our own, or a primitive of oneDNN's in the default engine's passes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, INT8, INT32, UINT8
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator, schema_of
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis, tap_count
from dagexec.ops.base.layout import NCHW, NHWC
from dagexec.ops.engines.onednn.bound import BoundPrimitive
from dagexec.ops.engines.onednn.channels_last import channels_last_step
from dagexec.ops.engines.onednn.cutting import Arguments, image_axes, parts_of_whole
from dagexec.ops.engines.onednn.descriptors import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    FORWARD_INFERENCE,
    FORWARD_TRAINING,
    POST_OP,
    SRC,
    SRC_1,
    Array,
)
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.pieces import Part, Turns, rows_of_image, side_by_side
from dagexec.ops.engines.onednn.primitive import PrimitiveDescriptor
from dagexec.ops.families.pool.average import AveragePooling, AveragePoolingGradient
from dagexec.ops.families.pool.maximum import MaxPooling, MaxPoolingGradient, Tap
from dagexec.ops.families.pool.window import RANKS, pool_window
from dagexec.ops.kernels.builder import Builder, Vector
from dagexec.ops.kernels.copies import copy_step
from dagexec.ops.kernels.formulas import formula_step
from dagexec.ops.kernels.pool_kernels import MAXIMUM, MEAN, pool_step
from dagexec.ops.kernels.sharing import pieces_of_bytes
from dagexec.ops.kernels.tables import shares

_MAX, _MEAN_WITH_PADDING, _MEAN_OF_PIXELS = 0x1FF, 0x2FF, 0x3FF
_MULTIPLY, _EQUAL = 0x1FFF1, 0x1FFFA

_LINE = 16
"""Channels that are turned together, at least."""

_CACHED = 128 << 10
"""Bytes of an image that are turned before they are pooled, if those of so many channels are not more."""


class Pooling(OneDNNOperator):
    """What poolings share.

    oneDNN's windows have pads at the head and the tail; a last window that reaches over the end (ceil_mode, Caffe's
    rounding) needs a larger tail. Without oneDNN the kernel of our own of `kind` computes.
    """

    kind: ClassVar[str]

    def prepare_primitive(self) -> Step:
        window, axes = pool_window(self.call())
        require_pixels(axes, self.label)
        if not self.onednn.has_primitives:
            with_padding = self.arguments.bool("count_include_pad")
            make = partial(pool_step, self.onednn.machine, self.kind)
            return channels_last_step(self, window.order, lambda x, y: make(x, y, axes, with_padding, self.label))
        x, y = self.x(0), self.y(0)
        algorithm, factor = self.algorithm(axes)
        if window.order == NHWC and factor is None and len(x) < self.pieces and not self.asks:
            rows = rows_of_image(axes, -(-self.pieces // len(x)))
            parts = [replace(part, images=(image, image + 1)) for image in range(len(x)) for part in rows]
            asked = [self._described(part, algorithm, axes) for part in parts]
            if len({found.name for found, _ in asked}) == 1 < len(asked):
                cut = parts_of_whole(asked, {SRC: x, DST: y}, self.bound)
                return self.rebindable(cut.step, cut, {0: SRC}, {0: DST})
        source, target = self.image(x, window.order), self.image(y, window.order)
        arguments = {SRC: (source, x), DST: (target, y)}
        attributes = self.attributes()
        if factor is not None:
            layout = self.packed(factor)
            attributes.binary(_MULTIPLY, layout)
            arguments[POST_OP | SRC_1] = (layout, factor)
        found = self.describe_fast(
            "pooling_forward",
            self.onednn.engine,
            FORWARD_INFERENCE,
            algorithm,
            source,
            target,
            *pool_geometry(axes),
            attributes,
        )
        if window.order == NCHW and not found.is_generated and not self.asks:
            return self._turned(algorithm, factor, axes)
        bound = self.in_parts(found, arguments, *image_axes(window.order))
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})

    def _turned(self, algorithm: int, factor: Array | None, axes: Sequence[Axis]) -> Step:
        """Some channels after others, turned to be last, pooled, and turned back.

        With AVX2 oneDNN has plain loops for NCHW: windows of 3 x 3 on 64 x 56 x 56 take 3.4 ms on one core, so 0.13.
        """
        x, y = self.x(0), self.y(0)
        channels = max(_LINE, _CACHED // (x.itemsize * prod(x.shape[2:])) // _LINE * _LINE)
        chunks = [
            (slice(image, image + 1), slice(first, first + channels))
            for image in range(len(x))
            for first in range(0, x.shape[1], channels)
        ]
        pieces: list[list[Step]] = []
        for share in shares(len(chunks), min(len(chunks), self.pieces)):
            turns = Turns(self.working_memory)
            pieces.append([])
            for chunk in share:
                turns.next_part()
                pieces[-1] += self._chunk(x[chunks[chunk]], y[chunks[chunk]], (algorithm, factor), axes, turns)
        return in_sequence(side_by_side(pieces))

    def _chunk(
        self, x: Array, y: Array, mean: tuple[int, Array | None], axes: Sequence[Axis], turns: Turns
    ) -> list[Step]:
        """The steps from some channels of `x` to those of `y`."""
        algorithm, factor = mean
        (source, target), attributes = (_channels_last(array, turns) for array in (x, y)), self.attributes()
        arguments = {SRC: (self.packed(source), source), DST: (self.packed(target), target)}
        if factor is not None:
            arguments[POST_OP | SRC_1] = (self.packed(factor), factor)
            attributes.binary(_MULTIPLY, self.packed(factor))
        layouts = arguments[SRC][0], arguments[DST][0]
        geometry = *pool_geometry(axes), attributes
        found = self.describe_fast(
            "pooling_forward", self.onednn.engine, FORWARD_INFERENCE, algorithm, *layouts, *geometry
        )
        return [self._copied(x, source), self.bound(found, arguments).step, self._copied(target, y)]

    def _copied(self, source: Array, target: Array) -> Step:
        step = copy_step(self.onednn.machine, [(source, target)], self.label)
        return step or self.reorder(self.packed(source), self.packed(target), source, target).step

    def _described(self, part: Part, algorithm: int, axes: Sequence[Axis]) -> tuple[PrimitiveDescriptor, Arguments]:
        """The primitive for a part of images with channels last, and its arguments."""
        source, target, inner = part.source(self.x(0), axes), part.result(self.y(0)), part.axes(axes)
        layouts = self.image(source, NHWC), self.image(target, NHWC)
        geometry = *pool_geometry(inner), self.attributes()
        found = self.describe_fast(
            "pooling_forward", self.onednn.engine, FORWARD_INFERENCE, algorithm, *layouts, *geometry
        )
        return found, {SRC: (layouts[0], source), DST: (layouts[1], target)}

    @abstractmethod
    def algorithm(self, axes: Sequence[Axis]) -> tuple[int, Array | None]:
        """oneDNN's algorithm, and a factor for its result: 1, 1, output sizes."""


def _channels_last(image: Array, turns: Turns) -> Array:
    """Working memory for an image N, C, ..., in which channels are next to each other."""
    first, channels, *sizes = image.shape
    memory = turns.memory(image.nbytes).view(image.dtype).reshape(first, *sizes, channels)
    return np.moveaxis(memory, -1, 1)


def require_pixels(axes: Sequence[Axis], label: str) -> None:
    """Raise UnsupportedFeatureError when some window has no pixel."""
    if any(0 in axis.window_sizes(with_padding=False) for axis in axes):
        raise UnsupportedFeatureError(f"{label}: a window has no pixel, which oneDNN does not define")


def pool_geometry(axes: Sequence[Axis]) -> tuple[tuple[int, ...], ...]:
    """Strides, kernel, dilation, and padding at the head and the tail, as a primitive takes them."""
    return (
        tuple(axis.stride for axis in axes),
        tuple(axis.kernel for axis in axes),
        tuple(axis.dilation - 1 if axis.kernel > 1 else 0 for axis in axes),
        tuple(axis.head for axis in axes),
        tuple(_tail(axis) for axis in axes),
    )


def mean_algorithm(axes: Sequence[Axis], with_padding: bool) -> tuple[int, Array | None]:
    """oneDNN's algorithm for a mean of pixels, or with padding, and a factor for its result: 1, 1, output sizes.

    oneDNN divides by the taps of the window, also where it reaches over the padding; the factor corrects that.
    """
    if not with_padding:
        return _MEAN_OF_PIXELS, None
    sizes = np.ones((), np.float32)
    for axis in axes:
        sizes = sizes[..., None] * np.asarray(axis.window_sizes(with_padding=True), np.float32)
    taps = tap_count(axes)
    if (sizes == taps).all():
        return _MEAN_WITH_PADDING, None
    return _MEAN_WITH_PADDING, (taps / sizes)[None, None]


def _tail(axis: Axis) -> int:
    """The padding behind the image that the last window reads; negative when it ends before the last pixel."""
    return axis.covered - axis.head - axis.size


class MaximumPooling(Pooling, MaxPooling):
    """The maximum of each window."""

    metas = (FLOAT32, BFLOAT16, FLOAT16, INT8, UINT8, INT32)
    kind = MAXIMUM

    def drops_nan(self) -> bool:
        return self.onednn.has_primitives

    def algorithm(self, axes: Sequence[Axis]) -> tuple[int, None]:
        """The maximum of the pixels; padding never wins."""
        return _MAX, None


class MeanPooling(Pooling, AveragePooling):
    """The mean of each window."""

    kind = MEAN

    def algorithm(self, axes: Sequence[Axis]) -> tuple[int, Array | None]:
        return mean_algorithm(axes, self.arguments.bool("count_include_pad"))


def _added_where_equal(build: Builder, read: Callable[[int], Vector]) -> list[Vector]:
    """Of sums, X, Y and dY: dY added to the sums where X equals Y."""
    return [read(0) + build.select(build.equal(read(1), read(2)), read(3), 0.0)]


def _zeros(build: Builder, read: Callable[[int], Vector]) -> list[Vector]:
    return [build.constant(0.0)]


class MaximumPoolingGradient(OneDNNOperator, MaxPoolingGradient):
    """A kernel of our own for each tap, in pieces of images, where pixels are rows of memory.

    Elsewhere, in NCHW with strides, the default engine's passes over rows, with one primitive a tap:
    dX += dY * (X == Y). Taps come in the same order, so that a pixel's sum is the same.
    """

    orders = (NCHW, NHWC)

    def prepare_primitive(self) -> Step:
        pieces = self._pieces() if self.input(0).meta is FLOAT32 and self.y(0).size else None
        return MaxPoolingGradient.prepare(self) if pieces is None else in_sequence(side_by_side(pieces))

    def needs_onednn(self) -> bool:
        """Never: the rows are the default engine's."""
        return False

    def _pieces(self) -> list[list[Step]] | None:
        """Some images each, all taps in order; None where the kernel does not serve."""
        window, whole = pool_window(self.call())
        axes = [axis.trimmed() for axis in whole]
        dx, x, y, dy = self.y(0), self.x(0), self.x(1), self.x(2)
        before = (slice(None),) * (0 if window.channels_last else 1)
        taps = [
            [axis.tap(number) for axis, number in zip(axes, numbers, strict=True)]
            for numbers in product(*(range(axis.kernel) for axis in axes))
        ]
        count = min(len(x), pieces_of_bytes(3 * len(taps) * y.nbytes + x.nbytes))
        pieces: list[list[Step]] = []
        for share in shares(len(x), count):
            images = slice(share.start, share.stop)
            made = [formula_step(self.onednn.machine, _zeros, [], [dx[images]], self.label)]
            for tap in taps:
                of_windows, of_pixels = ((images, *before, *one) for one in zip(*tap, strict=True))
                if dx[of_pixels].size:
                    inputs = [dx[of_pixels], x[of_pixels], y[of_windows], dy[of_windows]]
                    made.append(formula_step(self.onednn.machine, _added_where_equal, inputs, inputs[:1], self.label))
                if made[-1] is None:
                    return None
            pieces.append([step for step in made if step is not None])
        return pieces

    def sums(self, taps: Sequence[Tap], equal: Array, chosen: Array) -> list[Step]:
        """A primitive a tap, and NumPy where dY is not finite or the type is not one of `metas`.

        There 0 times dY is not 0. The product of dY and zeros tells. Sums begin with 0, to which 0 times a negative dY,
        which may be that of another image, adds nothing.
        """
        exact = super().sums(taps, equal, chosen)
        if self.input(0).meta not in self.metas:
            return exact
        try:
            clear = [partial(tap.totals.fill, 0) for tap in taps if tap.first]
            fused = in_sequence([*clear, *(self._tap(tap).step for tap in taps)])
        except UnsupportedFeatureError:
            return exact
        weights = max((tap.weights for tap in taps), key=len)
        zeros, slow = np.zeros(len(weights), weights.dtype), in_sequence(exact)

        def add() -> None:
            if np.dot(weights, zeros) == 0:
                fused()
            else:
                slow()

        return [add]

    def _tap(self, tap: Tap) -> BoundPrimitive:
        layout = self.packed(tap.pixels)
        attributes = self.attributes()
        attributes.binary(_MULTIPLY, layout)
        attributes.add_to_destination()
        handles = (layout, layout, layout, attributes)
        found = self.describe_fast("binary", self.onednn.engine, _EQUAL, *handles)
        arrays = {SRC: tap.pixels, SRC_1: tap.maxima, DST: tap.totals, POST_OP | SRC_1: tap.weights}
        return self.bound(found, {number: (layout, array) for number, array in arrays.items()})


class MeanPoolingGradient(OneDNNOperator, AveragePoolingGradient):
    """Each pixel gets its share of dY of every window that it is in."""

    def prepare_primitive(self) -> Step:
        window, axes = pool_window(self.call())
        algorithm, factor = mean_algorithm(axes, self.arguments.bool("count_include_pad"))
        if factor is not None:
            raise UnsupportedFeatureError(
                f"{self.label}: a window reaches beyond the padding, which oneDNN would count"
            )
        require_pixels(axes, self.label)
        dy, dx = self.x(2), self.y(0)
        source, target = self.image(dy, window.order), self.image(dx, window.order)
        geometry = pool_geometry(axes)
        none = self.attributes()
        hint = self.describe(
            "pooling_forward",
            self.onednn.engine,
            FORWARD_TRAINING,
            algorithm,
            target,
            source,
            *geometry,
            none,
        )
        found = self.describe_fast(
            "pooling_backward",
            self.onednn.engine,
            algorithm,
            target,
            source,
            *geometry,
            hint,
            none,
        )
        bound = self.in_parts(found, {DIFF_DST: (source, dy), DIFF_SRC: (target, dx)}, *image_axes(window.order))
        return self.rebindable(bound.step, bound, {2: DIFF_DST}, {0: DIFF_SRC})


_CLASSES: dict[tuple[str, str], type[OneDNNOperator]] = {
    ("Max", ""): MaximumPooling,
    ("Average", ""): MeanPooling,
    ("Max", "Gradient"): MaximumPoolingGradient,
    ("Average", "Gradient"): MeanPoolingGradient,
}
for (_kind, _suffix), _base in _CLASSES.items():
    for _rank in RANKS:
        _name = f"{_kind}Pool{_rank}{_suffix}"
        operator(schema_of(_name), engine="ONEDNN")(type(_name, (_base,), {"__doc__": _base.__doc__}))
