"""Poolings on CUDA: a thread for every window, or a reduction where the one window is the image.

Images of 1 to 3 spatial axes in any order, seen as N, C, spatial; see `dagexec.ops.engines.cuda.base.windows`. The
gradients are in `dagexec.ops.engines.cuda.pool.gradient`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.base.geometry import Axis, Window
from dagexec.ops.base.layout import BLOCKS
from dagexec.ops.engines.cuda.base.constants import uploaded
from dagexec.ops.engines.cuda.base.expression import computed_scalar
from dagexec.ops.engines.cuda.base.indices import by_value
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.engines.cuda.base.windows import (
    MAX_AXES,
    WINDOWS,
    ImagesOperator,
    channels_first_view,
    image_argument,
    window_index_type,
    windows_argument,
)
from dagexec.ops.families.pool.average import AveragePooling
from dagexec.ops.families.pool.maximum import MaxPooling
from dagexec.ops.families.pool.maximum_index import IndexedMaxPooling, pixel_pitches
from dagexec.ops.families.pool.norm import NormPooling, read_exponent
from dagexec.ops.families.pool.window import is_whole, pool_window
from dagexec.platform.records import dataclass

POWERS = r"""
template <class A> __device__ inline A magnitude(A x) { return x < A(0) ? -x : x; }
template <class A> __device__ inline A to_power(A x, A p) {
    return p == A(2) ? x * x : p == A(1) ? magnitude(x) : pow(magnitude(x), p);
}
template <class A> __device__ inline A root(A x, A p) {
    return p == A(2) ? sqrt(x) : p == A(1) ? x : pow(x, A(1) / p);
}
"""
"""C++ that stands before a kernel of p-norms."""

COUNTS = r"""
struct counts_t { i64 first[3]; };
template <class A> __device__ inline A pixels_counted(const int* counts, const counts_t& c, I o0, I o1, I o2) {
    A size = (A)counts[c.first[0] + o0] * (A)counts[c.first[1] + o1] * (A)counts[c.first[2] + o2];
    return size < A(1) ? A(1) : size;
}
"""
"""C++ that stands before a kernel of means, after WINDOWS: how many pixels a window's mean counts, 1 at least."""


@dataclass(frozen=True, slots=True)
class Images:
    """The images of a pooling operator as kernels see them.

    Attributes:
        window, axes: the window; its axes, without taps that never read a pixel.
        counted: the axes with all taps.
        whole: the one window is the image.
        channels_last: channels follow one another in memory.
    """

    window: Window
    axes: tuple[Axis, ...]
    counted: tuple[Axis, ...]
    whole: bool
    channels_last: bool

    @staticmethod
    def of(operator: CudaOperator) -> Images:
        """Those of a pooling operator, or of its gradient."""
        window, axes = pool_window(operator.call())
        trimmed = tuple(axis.trimmed() for axis in axes)
        blocked = window.order in BLOCKS
        return Images(window, trimmed, axes, is_whole(axes), window.channels_last or blocked)

    def view(self, array: Array) -> Array:
        """N, C, spatial; in blocks of k channels N * C / k, k, spatial."""
        if self.window.order in BLOCKS:
            array = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
        found: Array = channels_first_view(array, self.channels_last)
        return found

    def geometry(self, *views: Array) -> list[Any]:
        """The argument w of a kernel, and the strides of each view."""
        windows = windows_argument(self.axes, views[0].shape[1], self.channels_last)
        return [windows, *map(image_argument, views)]

    def index_type(self, *views: Array) -> str:
        """The type I."""
        return window_index_type(self.axes, *views)

    def counts(self, operator: CudaOperator) -> list[Any]:
        """The arguments of `pixels_counted`: a table of how many pixels windows have along each axis, and its parts."""
        with_padding = operator.arguments.bool("count_include_pad")
        missing = MAX_AXES - len(self.counted)
        rows = [[1]] * missing + [axis.window_sizes(with_padding=with_padding) for axis in self.counted]
        firsts = np.cumsum([0, *map(len, rows)])[:MAX_AXES]
        table = np.concatenate(rows).astype(np.int32)
        return [uploaded(operator, table), by_value(map(int, firsts))]


def lowest(array: Array) -> np.generic:
    """What a maximum over nothing is, in the type that elements are computed in."""
    if array.dtype.kind in "iu":
        least: np.generic = array.dtype.type(np.iinfo(array.dtype).min)
        return least
    return computed_scalar(array, -np.inf)


def _source(name: str, parameters: str, begin: str, each: str, finish: str, before: str = "") -> str:
    """A kernel with a thread for every window, which does `each` with every pixel x of it, at p0, p1, p2."""
    return f"""{WINDOWS}{before}
typedef computed<T>::type A;
extern "C" __global__ void {name}(const T* x_p, T* y_p, windows_t w, image_t in, image_t to, {parameters}i64 n) {{
    FOR_EACH(i, n) {{
        place_t p = window_at(i, w);
        const T* pixels = x_p + plane_of(p, in);
        range_t r0 = taps_inside(p.at[0], w.axis[0]), r1 = taps_inside(p.at[1], w.axis[1]);
        range_t r2 = taps_inside(p.at[2], w.axis[2]);
        {begin}
        for (I t0 = r0.first; t0 < r0.stop; ++t0) {{
            I p0 = pixel_of(p.at[0], t0, w.axis[0]);
            for (I t1 = r1.first; t1 < r1.stop; ++t1) {{
                I p1 = pixel_of(p.at[1], t1, w.axis[1]), row = p0 * (I)in.step[0] + p1 * (I)in.step[1];
                for (I t2 = r2.first; t2 < r2.stop; ++t2) {{
                    I p2 = pixel_of(p.at[2], t2, w.axis[2]);
                    const A x = get(pixels, row + p2 * (I)in.step[2]);
                    {each}
                }}
            }}
        }}
        {finish}
    }}
}}
"""


_PUT = "put(y_p, offset_of(p, to), {});"
_MAXIMUM = _source("max_pool", "A least, ", "A best = least;", "best = nan_max(best, x);", _PUT.format("best"))
_MEAN = _source(
    "average_pool",
    "const int* counts, counts_t c, ",
    "A sum = A(0);",
    "sum += x;",
    _PUT.format("sum / pixels_counted<A>(counts, c, p.at[0], p.at[1], p.at[2])"),
    COUNTS,
)
_NORM = _source("lp_pool", "A e, ", "A sum = A(0);", "sum += to_power(x, e);", _PUT.format("root(sum, e)"), POWERS)
_INDEXED = _source(
    "max_pool_with_index",
    "M* mask, numbers_t number, A least, ",
    "A best = least; i64 place = -1;",
    """if (place < 0 || x > best || (is_nan(x) && !is_nan(best))) {
                        best = x;
                        place = p0 * number.pitch[0] + p1 * number.pitch[1] + p2 * number.pitch[2];
                    }""",
    """if (place >= 0) place += (p.batch * (I)w.channels.size + p.channel) * number.plane;
        put(y_p, offset_of(p, to), best);
        mask[offset_of(p, to)] = (M)place;""",
    "struct numbers_t { i64 pitch[3], plane; };",
)


def windows_step(
    op: CudaOperator, name: str, source: str, images: Images, extra: Sequence[Any], types: Mapping[str, str]
) -> Step:
    """The step of a kernel made by `_source`."""
    x, y = images.view(op.x(0)), images.view(op.y(0))
    arguments = [x, y, *images.geometry(x, y), *extra, np.int64(y.size)]
    chosen = {"T": c_type_of(x), "I": images.index_type(x, y), **types}
    return launched(op, name, source, arguments, int(y.size), chosen)


def launched(
    op: CudaOperator, name: str, source: str, arguments: Sequence[Any], elements: int, types: Mapping[str, str]
) -> Step:
    """`op.launch` with the types in a mapping."""
    launch: Any = op.launch
    step: Step = launch(name, source, arguments, elements=elements, **types)
    return step


def whole_step(
    op: CudaOperator, name: str, images: Images, groups: Groups, scalars: Mapping[str, np.generic] | None = None
) -> Step:
    """The step of a reduction over the image."""
    x, y = images.view(op.x(0)), images.view(op.y(0))
    axes = tuple(range(2, x.ndim))
    return by_groups(op, name, x.shape, axes, groups, {"x": x}, {"y": y}, scalars)


@on_cuda(*(kind for kind in registered_kinds(MaxPooling) if not issubclass(kind, IndexedMaxPooling)))
class _CudaMaxPooling(ImagesOperator):
    """The maximum of each window; padding never wins."""

    def prepare(self) -> Step:
        if not self.y(0).size:
            return nothing_to_do
        images = Images.of(self)
        if images.whole:
            groups = Groups([Phase("max_of<A>", "s.add(x);")], last="y = total0.value;")
            return whole_step(self, "max_of", images, groups)
        return windows_step(self, "max_pool", _MAXIMUM, images, [lowest(self.x(0))], {})


@on_cuda(*registered_kinds(AveragePooling))
class _CudaAveragePooling(ImagesOperator):
    """The mean of each window, over the pixels inside the image or (count_include_pad=1) inside the padded image."""

    def prepare(self) -> Step:
        if not self.y(0).size:
            return nothing_to_do
        images = Images.of(self)
        if images.whole:
            groups = Groups([Phase("sum_of<W>", "s.add((W)x);")], last="y = (A)(total0.total / (W)w.length);")
            return whole_step(self, "mean", images, groups)
        return windows_step(self, "average_pool", _MEAN, images, images.counts(self), {})


@on_cuda(*registered_kinds(NormPooling))
class _CudaNormPooling(ImagesOperator):
    """The p-norm of each window; padding counts as zeros."""

    def prepare(self) -> Step:
        if not self.y(0).size:
            return nothing_to_do
        images = Images.of(self)
        exponent = computed_scalar(self.x(0), read_exponent(self.call()))
        if images.whole:
            phase = Phase("sum_of<W>", "s.add((W)to_power(x, (A)e));")
            groups = Groups([phase], last="y = root((A)total0.total, (A)e);", helpers=POWERS)
            return whole_step(self, "norm", images, groups, {"e": exponent})
        return windows_step(self, "lp_pool", _NORM, images, [exponent], {})


@on_cuda(*registered_kinds(IndexedMaxPooling))
class _CudaIndexedMaxPooling(ImagesOperator):
    """The maximum of each window, and where it is."""

    def prepare(self) -> Step:
        if not self.y(0).size:
            return nothing_to_do
        images, mask = Images.of(self), self.y(1)
        extra = [mask, index_numbers(self, images), lowest(self.x(0))]
        return windows_step(self, "max_pool_with_index", _INDEXED, images, extra, {"M": c_type_of(mask)})


def index_numbers(op: CudaOperator, images: Images) -> Any:
    """The argument numbers_t: how far apart neighbors along each axis are in the mask's numbers, and planes."""
    sizes = [axis.size for axis in images.axes]
    plane = prod(sizes) if op.arguments.bool("flat_indices") else 0
    pitches = pixel_pitches(op.call(), sizes)
    return by_value([*[0] * (MAX_AXES - len(sizes)), *pitches, plane])
