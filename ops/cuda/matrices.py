"""Matrix products and sums over rows on CUDA, for the operators that are made of them.

Products of floats are cuBLAS's (`dagexec.core.cuda.cublas`); integers, and matrices without a unit stride, go through
a tiled kernel. All sums have a fixed order, so that results do not depend on the grid.
"""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.cuda.cublas import matrix_product, multiplies
from dagexec.core.operator import Step, nothing_to_do
from dagexec.ops.blocks import compute_dtype
from dagexec.ops.cuda.indices import require_axes
from dagexec.ops.cuda.operator import Array, CudaOperator, c_type_of
from dagexec.ops.cuda.post_ops import filled

TILE = 16
_MOST_AXES = 6
_MOST_IN_GRID = 65535

_TILED = r"""
struct stacks_t { i64 axes, size[6], a[6], b[6], c[6]; };
struct sizes_t { i64 m, n, k, count, a_row, a_column, b_row, b_column, c_row, c_column; };
extern "C" __global__ void tiled_product(
    const A* a, const B* b, C* c, const A* a_zero, const B* b_zero, i64 a_zero_step, i64 b_zero_step,
    i64 a_less_all,     sizes_t s, stacks_t stacks) {
    __shared__ SUM left[16][17];
    __shared__ SUM right[16][17];
    int x = threadIdx.x & 15, y = threadIdx.x >> 4;
    for (i64 stack = blockIdx.z; stack < s.count; stack += gridDim.z) {
        i64 rest = stack, a_at = 0, b_at = 0, c_at = 0;
        for (int d = (int)stacks.axes - 1; d >= 0; --d) {
            i64 at = rest % stacks.size[d];
            rest /= stacks.size[d];
            a_at += at * stacks.a[d]; b_at += at * stacks.b[d]; c_at += at * stacks.c[d];
        }
        for (i64 row_tile = blockIdx.y; row_tile * 16 < s.m; row_tile += gridDim.y)
        for (i64 column_tile = blockIdx.x; column_tile * 16 < s.n; column_tile += gridDim.x) {
            i64 row = row_tile * 16 + y, column = column_tile * 16 + x;
            SUM a_less = a_zero && row < s.m ? (SUM)get(a_zero, row * a_zero_step) : (SUM)a_less_all;
            SUM b_less = b_zero && column < s.n ? (SUM)get(b_zero, column * b_zero_step) : SUM(0);
            SUM sum = 0;
            for (i64 first = 0; first < s.k; first += 16) {
                i64 a_k = first + x, b_k = first + y;
                bool has_a = row < s.m && a_k < s.k, has_b = column < s.n && b_k < s.k;
                left[y][x] = has_a ? (SUM)get(a, a_at + row * s.a_row + a_k * s.a_column) - a_less : SUM(0);
                right[y][x] = has_b ? (SUM)get(b, b_at + b_k * s.b_row + column * s.b_column) - b_less : SUM(0);
                __syncthreads();
                for (int i = 0; i < 16 && first + i < s.k; ++i) sum += left[y][i] * right[i][x];
                __syncthreads();
            }
            if (row < s.m && column < s.n) put(c, c_at + row * s.c_row + column * s.c_column, sum);
        }
    }
}
"""

_SUMS = r"""
struct summed_t { i64 outer, count, inner, outer_step, step, inner_step; };
extern "C" __global__ void channel_sums(const T* x, S* y, summed_t s, i64 y_step) {
    typedef computed<T>::type A;
    __shared__ A part[256];
    for (i64 channel = blockIdx.x; channel < s.count; channel += gridDim.x) {
        A sum = 0;
        i64 total = s.outer * s.inner;
        for (i64 i = threadIdx.x; i < total; i += 256)
            sum += get(x, (i / s.inner) * s.outer_step + channel * s.step + (i % s.inner) * s.inner_step);
        part[threadIdx.x] = sum;
        __syncthreads();
        for (int half = 128; half; half >>= 1) {
            if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
            __syncthreads();
        }
        if (!threadIdx.x) put(y, channel * y_step, part[0]);
        __syncthreads();
    }
}
extern "C" __global__ void column_sums(const T* x, S* y, summed_t s, i64 y_step) {
    typedef computed<T>::type A;
    __shared__ A part[8][33];
    int lane = threadIdx.x & 31, row = threadIdx.x >> 5;
    for (i64 tile = blockIdx.x; tile * 32 < s.count; tile += gridDim.x) {
        i64 channel = tile * 32 + lane;
        A sum = 0;
        if (channel < s.count)
            for (i64 i = row; i < s.outer; i += 8) sum += get(x, i * s.outer_step + channel * s.step);
        part[row][lane] = sum;
        __syncthreads();
        if (!row && channel < s.count) {
            for (int i = 1; i < 8; ++i) sum += part[i][lane];
            put(y, channel * y_step, sum);
        }
        __syncthreads();
    }
}
"""
"""The first has a block for every channel, whose elements may lie apart; the second one for 32 that are neighbours."""


def _steps(array: Array) -> list[int]:
    return [stride // array.itemsize for stride in array.strides]


def _over(array: Array, batch: tuple[int, ...]) -> list[int]:
    """The strides with which the axes before the last two are walked over `batch`."""
    missing = len(batch) - (array.ndim - 2)
    own = _steps(array)
    return [
        0 if axis < missing or array.shape[axis - missing] == 1 else own[axis - missing] for axis in range(len(batch))
    ]


def product_of(
    owner: CudaOperator, a: Array, b: Array, c: Array, *, alpha: float = 1.0, beta: float = 0.0, tf32: bool = False
) -> Step:
    """The step C = alpha A B + beta C of stacks of matrices, views included, that broadcast to C as NumPy's do.

    Integers wrap around; their alpha is 1 and their beta 0.
    """
    if not c.size:
        return nothing_to_do
    if not a.shape[-1]:
        return filled(owner, c) if beta == 0 else nothing_to_do
    if multiplies(a, b, c):
        return matrix_product(a, b, c, alpha=alpha, beta=beta, allow_tf32=tf32, label=owner.label)
    if (alpha, beta) != (1.0, 0.0):
        raise ValueError(f"a product of {a.dtype} {a.shape} and {b.dtype} {b.shape} with alpha {alpha} and beta {beta}")
    return tiled_product(owner, a, b, c)


def tiled_product(
    owner: CudaOperator,
    a: Array,
    b: Array,
    c: Array,
    a_zero: Array | None = None,
    b_zero: Array | None = None,
    *,
    a_less: int = 0,
) -> Step:
    """The step C = (A - a_zero)(B - b_zero), stacks broadcast: a zero point has one entry, or one a row (a column).

    Without a_zero, `a_less` is that of all of A.

    Sums of bytes are exact; those of wider integers wrap around.
    """
    if not c.size:
        return nothing_to_do
    batch = tuple(c.shape[:-2])
    require_axes(len(batch), _MOST_AXES, f"{owner.label}: stacks of matrices")
    (m, k), n, count = a.shape[-2:], b.shape[-1], math.prod(batch)
    empty = [0] * (_MOST_AXES - len(batch))
    sizes = np.array([m, n, k, count, *_steps(a)[-2:], *_steps(b)[-2:], *_steps(c)[-2:]], np.int64)
    stacks = [len(batch), *batch, *empty]
    for array in (a, b, c):
        stacks += [*_over(array, batch), *empty]
    steps = [np.int64(0 if zero is None or zero.size == 1 else 1) for zero in (a_zero, b_zero)]
    grid = (
        min(-(-n // TILE), _MOST_IN_GRID),
        min(-(-m // TILE), _MOST_IN_GRID),
        min(count, _MOST_IN_GRID),
    )
    return owner.launch(
        "tiled_product",
        _TILED,
        [a, b, c, a_zero, b_zero, *steps, np.int64(a_less), sizes, np.array(stacks, np.int64)],
        blocks=grid,
        threads=TILE * TILE,
        A=c_type_of(a),
        B=c_type_of(b),
        C=c_type_of(c),
        SUM=_sum_type(a, c),
    )


def _sum_type(a: Array, c: Array) -> str:
    """The C type that terms are added up in."""
    if c.dtype.kind not in "iu":
        return c_type_of_work(c)
    if a.dtype.itemsize == 1:
        return "i64"
    return "u64" if c.dtype.itemsize == 8 else "u32"


def c_type_of_work(array: Array) -> str:
    """The C type that floats of `array` are computed in."""
    return "double" if compute_dtype(array.dtype) == np.float64 else "float"


def sums_of(owner: CudaOperator, x: Array, target: Array) -> Step:
    """The step that sums `x`, a view of outer, channels, inner, over the first and last axis: a number a channel.

    `target` has one axis, of any stride. Sums have a fixed order; those of 16-bit floats are in float.
    """
    (outer, count, inner), (outer_step, step, inner_step) = x.shape, _steps(x)
    if not count:
        return nothing_to_do
    if inner == 1 and outer and step == 1:
        name, blocks = "column_sums", -(-count // 32)
    else:
        name, blocks = "channel_sums", count
    sizes = np.array([outer, count, max(1, inner) if outer else 1, outer_step, step, inner_step], np.int64)
    if not inner:
        sizes[0] = 0
    arguments = [x, target, sizes, np.int64(_steps(target)[0])]
    return owner.launch(name, _SUMS, arguments, blocks=min(blocks, _MOST_IN_GRID), T=c_type_of(x), S=c_type_of(target))


_STRETCHED = r"""
struct axes_t { i64 axes, size[8], step[8]; };
__device__ inline i64 place_in(i64 rest, const axes_t& a) {
    i64 at = 0;
    for (int d = (int)a.axes - 1; d >= 0; --d) {
        at += (rest % a.size[d]) * a.step[d];
        rest /= a.size[d];
    }
    return at;
}
extern "C" __global__ void stretched_sums(const T* x, S* y, axes_t kept, axes_t summed, i64 terms, i64 n) {
    FOR_EACH(i, n) {
        i64 at = place_in(i, kept);
        computed<T>::type sum = 0;
        for (i64 j = 0; j < terms; ++j) sum += get(x, at + place_in(j, summed));
        put(y, i, sum);
    }
}
"""


def stretched_sums(owner: CudaOperator, x: Array, shape: tuple[int, ...], target: Array) -> Step:
    """The step that sums `x` over the axes where `shape`, of as many axes, has size 1, into the packed `target`."""
    require_axes(x.ndim, 8, f"{owner.label}: sums over stretched axes")
    steps = _steps(x)
    summed = [axis for axis, size in enumerate(x.shape) if size != shape[axis]]
    kept = [axis for axis in range(x.ndim) if axis not in summed]
    groups = []
    for axes in (kept, summed):
        empty = [0] * (8 - len(axes))
        sizes = [x.shape[axis] for axis in axes]
        groups.append(np.array([len(axes), *sizes, *empty, *(steps[axis] for axis in axes), *empty], np.int64))
    terms = math.prod(x.shape[axis] for axis in summed)
    arguments = [x, target, *groups, np.int64(terms), np.int64(target.size)]
    return owner.launch(
        "stretched_sums", _STRETCHED, arguments, elements=target.size, T=c_type_of(x), S=c_type_of(target)
    )
