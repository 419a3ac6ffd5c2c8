"""Matrix products and sums over rows on CUDA, for the operators that are made of them.

Products of floats are cuBLAS's (`dagexec.devices.cuda.cublas`); integers, and matrices without a unit stride, go
through a tiled kernel. All sums have a fixed order, so that results do not depend on the grid.
"""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.devices.cuda.cublas import matrix_product, multiplies
from dagexec.ops.base.blocks import compute_dtype
from dagexec.ops.engines.cuda.base.expression import zeroed
from dagexec.ops.engines.cuda.base.indices import require_axes
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups

TILE = 16
_MAX_AXES = 6
_MAX_IN_GRID = 65535

_TILED = r"""
struct stacks_t { i64 axes, size[6], a[6], b[6], c[6]; };
struct sizes_t { i64 m, n, k, count, a_row, a_column, b_row, b_column, c_row, c_column; };
extern "C" __global__ void tiled_product(
    const A* a, const B* b, C* c, i64 a_zero, sizes_t s, stacks_t stacks) {
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
            SUM sum = 0;
            for (i64 first = 0; first < s.k; first += 16) {
                i64 a_k = first + x, b_k = first + y;
                bool has_a = row < s.m && a_k < s.k, has_b = column < s.n && b_k < s.k;
                left[y][x] = has_a ? (SUM)get(a, a_at + row * s.a_row + a_k * s.a_column) - (SUM)a_zero : SUM(0);
                right[y][x] = has_b ? (SUM)get(b, b_at + b_k * s.b_row + column * s.b_column) : SUM(0);
                __syncthreads();
                for (int i = 0; i < 16 && first + i < s.k; ++i) sum += left[y][i] * right[i][x];
                __syncthreads();
            }
            if (row < s.m && column < s.n) put(c, c_at + row * s.c_row + column * s.c_column, sum);
        }
    }
}
"""


def _steps(array: Array) -> list[int]:
    return [stride // array.itemsize for stride in array.strides]


def _over(array: Array, batch: tuple[int, ...]) -> list[int]:
    """The strides with which the axes before the last two are walked over `batch`."""
    missing = len(batch) - (array.ndim - 2)
    own = _steps(array)
    return [
        0 if axis < missing or array.shape[axis - missing] == 1 else own[axis - missing] for axis in range(len(batch))
    ]


def product_of(owner: CudaOperator, a: Array, b: Array, c: Array, *, alpha: float = 1.0, beta: float = 0.0) -> Step:
    """The step C = alpha A B + beta C of stacks of matrices, views included, that broadcast to C as NumPy's do.

    Integers wrap around; their alpha is 1 and their beta 0.
    """
    if not c.size:
        return nothing_to_do
    if not a.shape[-1]:
        return zeroed(owner, c) if beta == 0 else nothing_to_do
    if multiplies(a, b, c):
        return matrix_product(a, b, c, alpha=alpha, beta=beta, label=owner.label)
    if (alpha, beta) != (1.0, 0.0):
        raise ValueError(f"a product of {a.dtype} {a.shape} and {b.dtype} {b.shape} with alpha {alpha} and beta {beta}")
    return tiled_product(owner, a, b, c)


def tiled_product(owner: CudaOperator, a: Array, b: Array, c: Array, *, a_zero: int = 0) -> Step:
    """The step C = (A - a_zero) B, stacks broadcast.

    Sums of bytes are exact; those of wider integers wrap around.
    """
    if not c.size:
        return nothing_to_do
    batch = tuple(c.shape[:-2])
    require_axes(len(batch), _MAX_AXES, f"{owner.label}: stacks of matrices")
    (m, k), n, count = a.shape[-2:], b.shape[-1], math.prod(batch)
    empty = [0] * (_MAX_AXES - len(batch))
    sizes = np.array([m, n, k, count, *_steps(a)[-2:], *_steps(b)[-2:], *_steps(c)[-2:]], np.int64)
    stacks = [len(batch), *batch, *empty]
    for array in (a, b, c):
        stacks += [*_over(array, batch), *empty]
    grid = (
        min(-(-n // TILE), _MAX_IN_GRID),
        min(-(-m // TILE), _MAX_IN_GRID),
        min(count, _MAX_IN_GRID),
    )
    return owner.launch(
        "tiled_product",
        _TILED,
        [a, b, c, np.int64(a_zero), sizes, np.array(stacks, np.int64)],
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

    `target` has one axis. Sums have a fixed order; those of 16-bit floats are in float.
    """
    return stretched_sums(owner, x, (1, x.shape[1], 1), target)


def stretched_sums(owner: CudaOperator, x: Array, shape: tuple[int, ...], target: Array) -> Step:
    """The step that sums `x` over the axes where `shape`, of as many axes, has size 1, into the packed `target`."""
    summed = [axis for axis, size in enumerate(x.shape) if size != shape[axis]]
    groups = Groups([Phase("sum_of<W>", "s.add((W)x);")], last="y = (A)total0.total;")
    return by_groups(owner, "sums", x.shape, summed, groups, {"x": x}, {"y": target.reshape(shape)})
