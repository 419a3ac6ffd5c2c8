"""Gradients of poolings on CUDA: a thread for every pixel adds up what the windows over it give, in their order.

So no atomics are needed, and the bytes are the same in every run. With a window that is the image there is one window a
pixel, whatever the kernel's size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.engines.cuda.base.constants import zero_step
from dagexec.ops.engines.cuda.base.expression import computed_scalar
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.windows import WINDOWS, ImagesOperator
from dagexec.ops.engines.cuda.pool.pooling import COUNTS, POWERS, Images, index_numbers, launched
from dagexec.ops.families.pool.average import AveragePoolingGradient
from dagexec.ops.families.pool.maximum import MaxPoolingGradient
from dagexec.ops.families.pool.maximum_index import IndexedMaxPoolingGradient
from dagexec.ops.families.pool.norm import NormPoolingGradient, read_exponent


def _source(name: str, parameters: str, begin: str, each: str, before: str = "", otherwise: str = "") -> str:
    """A kernel with a thread for every pixel, which does `each` with every window that reads it, at `at` of dY.

    `otherwise` stands before that loop, which it may skip by an `if`.
    """
    return f"""{WINDOWS}{before}
typedef computed<T>::type A;
extern "C" __global__ void {name}(const T* dy, T* dx, windows_t w, image_t in, image_t to, {parameters}i64 n) {{
    FOR_EACH(i, n) {{
        place_t p = pixel_at(i, w);
        const I plane = plane_of(p, in), own = offset_of(p, to);
        range_t r0 = windows_over(p.at[0], w.axis[0]), r1 = windows_over(p.at[1], w.axis[1]);
        range_t r2 = windows_over(p.at[2], w.axis[2]);
        A sum = A(0);
        {begin}
        {otherwise}
        for (I o0 = r0.first; o0 < r0.stop; ++o0) {{
            if (tap_of(p.at[0], o0, w.axis[0]) < 0) continue;
            for (I o1 = r1.first; o1 < r1.stop; ++o1) {{
                if (tap_of(p.at[1], o1, w.axis[1]) < 0) continue;
                const I row = plane + o0 * (I)in.step[0] + o1 * (I)in.step[1];
                for (I o2 = r2.first; o2 < r2.stop; ++o2) {{
                    if (tap_of(p.at[2], o2, w.axis[2]) < 0) continue;
                    const I at = row + o2 * (I)in.step[2];
                    {each}
                }}
            }}
        }}
        put(dx, own, sum);
    }}
}}
"""


_MEAN = _source(
    "average_pool_gradient",
    "const int* counts, counts_t c, ",
    "",
    "sum += get(dy, at) / pixels_counted<A>(counts, c, o0, o1, o2);",
    COUNTS,
)
_MAXIMUM = _source(
    "max_pool_gradient",
    "const T* x, const T* y, ",
    "const A pixel = get(x, own);",
    "if (pixel == get(y, at)) sum += get(dy, at);",
)
_NORM = _source(
    "lp_pool_gradient",
    "const T* x, const T* y, A e, ",
    """const A pixel = get(x, own);
        A factor = e == A(2) ? pixel : pixel > A(0) ? A(1) : pixel < A(0) ? A(-1) : pixel;
        if (e != A(2) && e != A(1) && pixel != A(0)) factor *= pow(magnitude(pixel), e - A(1));""",
    """const A norm = get(y, at);
                    if (e == A(1)) sum += get(dy, at);
                    else if (norm != A(0)) sum += get(dy, at) / (e == A(2) ? norm : pow(norm, e - A(1)));""",
    POWERS,
).replace("put(dx, own, sum);", "put(dx, own, sum * factor);")

_NUMBERS = "struct numbers_t { i64 pitch[3], plane; };\n"
_INDEXED = _source(
    "max_pool_with_index_gradient",
    "const M* mask, const int* stray, numbers_t number, i64 windows, ",
    """const I owner = p.batch * (I)w.channels.size + p.channel;
        const i64 place = p.at[0] * number.pitch[0] + p.at[1] * number.pitch[1] + p.at[2] * number.pitch[2]
            + owner * number.plane;""",
    "if (mask[at] == place) sum += get(dy, at);",
    _NUMBERS,
    """if (*stray && number.plane) {
            for (i64 at = 0; at < windows; ++at) if (mask[at] == place) sum += get(dy, at);
            put(dx, own, sum);
            continue;
        }
        if (*stray) {
            r0.first = r1.first = r2.first = 0;
            r0.stop = (I)w.axis[0].out; r1.stop = (I)w.axis[1].out; r2.stop = (I)w.axis[2].out;
        }""",
).replace("if (tap_of(", "if (!*stray && tap_of(")

_STRAYS = (
    WINDOWS
    + _NUMBERS
    + r"""
extern "C" __global__ void find_strays(
    const M* mask, int* stray, int* fault, windows_t w, image_t in, numbers_t number, i64 limit, int reversed, i64 n
) {
    FOR_EACH(i, n) {
        place_t p = window_at(i, w);
        const i64 place = mask[offset_of(p, in)];
        if (place < -1 || place >= limit) atomicExch(fault, 1);
        if (place < 0 || place >= limit) continue;
        I rest = (I)place, pixel[3];
        for (int d = 0; d < 3; ++d) {
            int axis = reversed ? d : 2 - d;
            pixel[axis] = split(rest, w.axis[axis].by_size);
        }
        bool inside = !number.plane || rest == p.batch * (I)w.channels.size + p.channel;
        for (int d = 0; d < 3; ++d) {
            I tap = tap_of(pixel[d], p.at[d], w.axis[d]);
            inside = inside && pixel[d] + (I)w.axis[d].head >= p.at[d] * (I)w.axis[d].stride;
            inside = inside && tap >= 0 && tap < (I)w.axis[d].kernel;
        }
        if (!inside) atomicExch(stray, 1);
    }
}
"""
)
"""Sets `stray` when an index names a pixel that its window does not read, which no pooling gives but anybody may: then
all windows are searched for every pixel."""


def pixels_step(
    op: CudaOperator, name: str, source: str, images: Images, dy: int, extra: Sequence[Any], types: Mapping[str, str]
) -> Step:
    """The step of a kernel made by `_source`; `dy` is the number of the input."""
    given, dx = images.view(op.x(dy)), images.view(op.y(0))
    arguments = [given, dx, *images.geometry(given, dx), *extra, np.int64(dx.size)]
    chosen = {"T": c_type_of(dx), "I": images.index_type(given, dx), **types}
    return launched(op, name, source, arguments, int(dx.size), chosen)


@on_cuda(*registered_kinds(AveragePoolingGradient))
class _CudaAveragePoolingGradient(ImagesOperator):
    """Each pixel gets, of every window that it is in, dY divided by the number of pixels that the mean counts."""

    def prepare(self) -> Step:
        """One kernel. Neither X nor Y is read."""
        if not self.y(0).size:
            return nothing_to_do
        images = Images.of(self)
        return pixels_step(self, "average_pool_gradient", _MEAN, images, 2, images.counts(self), {})


@on_cuda(*registered_kinds(MaxPoolingGradient))
class _CudaMaxPoolingGradient(ImagesOperator):
    """Each pixel gets dY of every window whose maximum it equals, one of several or not, as Caffe2's."""

    def prepare(self) -> Step:
        if not self.y(0).size:
            return nothing_to_do
        extra = [self.x(0), self.x(1)]
        return pixels_step(self, "max_pool_gradient", _MAXIMUM, Images.of(self), 2, extra, {})


@on_cuda(*registered_kinds(NormPoolingGradient))
class _CudaNormPoolingGradient(ImagesOperator):
    """dX = sign(x) |x|^(p-1) * the sum over the pixel's windows of dY / Y^(p-1)."""

    def prepare(self) -> Step:
        if not self.y(0).size:
            return nothing_to_do
        exponent = computed_scalar(self.x(0), read_exponent(self.call()))
        extra = [self.x(0), self.x(1), exponent]
        return pixels_step(self, "lp_pool_gradient", _NORM, Images.of(self), 2, extra, {})


@on_cuda(*registered_kinds(IndexedMaxPoolingGradient))
class _CudaIndexedMaxPoolingGradient(CheckedOperator, ImagesOperator):
    """Each pixel gets dY of the windows whose index is its own, in the order of the windows.

    An index out of range gives nothing to any pixel, see `dagexec.ops.engines.cuda.base.faults`.
    """

    inputs_checked = (2,)

    def prepare(self) -> Step:
        """A kernel that checks the indices, and one that adds."""
        if not self.y(0).size:
            return nothing_to_do
        images, mask = Images.of(self), self.x(2)
        if not mask.size:
            return zero_step(self.y(0))
        flat = self.arguments.bool("flat_indices")
        limit = self.y(0).size if flat else prod(axis.size for axis in images.axes)
        fault, stray = self.index_fault_word(mask, -1, limit), self.scratch((1,), np.int32)
        view, numbers = images.view(mask), index_numbers(self, images)
        reversed_axes = np.int32(self.arguments.int("storage_order", 0))
        checked = [
            mask,
            stray,
            fault,
            *images.geometry(view),
            numbers,
            np.int64(limit),
            reversed_axes,
            np.int64(mask.size),
        ]
        types = {"M": c_type_of(mask)}
        kinds = {**types, "I": images.index_type(view, images.view(self.y(0)))}
        check = launched(self, "find_strays", _STRAYS, checked, int(mask.size), kinds)
        extra = [mask, stray, numbers, np.int64(mask.size)]
        add = pixels_step(self, "max_pool_with_index_gradient", _INDEXED, images, 1, extra, types)
        return in_sequence([zero_step(stray), check, add])
