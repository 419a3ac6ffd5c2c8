"""TopK on CUDA, and its gradient. Of equal elements the one with the lower index is first, NaN before any number.

Of the smallest elements NaN is last, and counts as infinity.

Few elements are picked one after another, each the first that comes after the one before. Of vectors of some thousand
elements each element counts those that come before it, which is its place. Longer ones are sorted, bitonically:
Batcher, "Sorting networks and their applications", 1968.
"""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.engines.cuda.base.constants import zero_step
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.base.row_reduction import STATES, THREADS
from dagexec.ops.families.index.indexing import TopK, topk_plan
from dagexec.ops.families.index.indexing_gradient import TopKGradient

FEW = 16
"""Up to so many elements are picked one after another."""

COUNTED = 4096
"""Elements of vectors of up to this length count those before them."""

_VECTORS = (
    STATES
    + r"""
typedef computed<T>::type A;
struct vectors { i64 size, k, inner, padded; };
__device__ inline void put_place(
    const T* x, T* values, i64* indices, i64* places, const vectors& v, i64 vector, i64 rank, i64 index
) {
    const i64 outer = vector / v.inner, column = vector % v.inner;
    const i64 from = (outer * v.size + index) * v.inner + column, to = (outer * v.k + rank) * v.inner + column;
    values[to] = x[from];
    indices[to] = index;
    if (places) places[to] = from;
}
__device__ inline float turned(float x) { return is_nan(x) ? log(0.0f) : -x; }
__device__ inline double turned(double x) { return is_nan(x) ? log(0.0) : -x; }
template <class I> __device__ inline I turned(I x) { return ~x; }
__device__ inline A element(const T* x, const vectors& v, i64 vector, i64 index) {
    const A found = get(x, (vector / v.inner * v.size + index) * v.inner + vector % v.inner);
    return LARGEST ? found : turned(found);
}
"""
)

_PICK = (
    _VECTORS
    + r"""
extern "C" __global__ void pick(const T* x, T* values, i64* indices, i64* places, vectors v) {
    __shared__ argmax_of<A> found[THREADS];
    const i64 vector = blockIdx.x;
    const int t = (int)threadIdx.x;
    argmax_of<A> before;
    before.begin();
    for (i64 rank = 0; rank < v.k; ++rank) {
        argmax_of<A> s;
        s.begin();
        for (i64 i = t; i < v.size; i += THREADS) {
            const A one = element(x, v, vector, i);
            if (rank == 0 || comes_before(before.value, before.place, one, i)) s.add(one, i);
        }
        found[t] = s;
        __syncthreads();
        for (int half = THREADS / 2; half; half /= 2) {
            if (t < half) found[t].join(found[t + half]);
            __syncthreads();
        }
        before = found[0];
        __syncthreads();
        if (t == 0) put_place(x, values, indices, places, v, vector, rank, before.place);
    }
}
"""
)

_COUNT = (
    _VECTORS
    + r"""
extern "C" __global__ void count_before(const T* x, T* values, i64* indices, i64* places, vectors v, i64 n) {
    FOR_EACH(i, n) {
        const i64 vector = i / v.size, index = i % v.size;
        const A own = element(x, v, vector, index);
        i64 rank = 0;
        for (i64 j = 0; j < v.size; ++j) rank += comes_before(element(x, v, vector, j), j, own, index);
        if (rank < v.k) put_place(x, values, indices, places, v, vector, rank, index);
    }
}
"""
)

_SORT = (
    _VECTORS
    + r"""
struct item { A value; i64 index; };
__device__ inline bool precedes(const item& a, const item& b) {
    if (a.index < 0 || b.index < 0) return a.index >= 0 && b.index < 0;
    return comes_before(a.value, a.index, b.value, b.index);
}
extern "C" __global__ void sort_begin(const T* x, item* items, vectors v, i64 n) {
    FOR_EACH(i, n) {
        const i64 vector = i / v.padded, index = i % v.padded;
        item one;
        one.value = index < v.size ? element(x, v, vector, index) : A(0);
        one.index = index < v.size ? index : -1;
        items[i] = one;
    }
}
extern "C" __global__ void sort_step(item* items, i64 run, i64 stride, i64 padded, i64 n) {
    FOR_EACH(pair, n) {
        const i64 low = pair / stride * (2 * stride) + pair % stride, high = low + stride;
        const item a = items[low], b = items[high];
        const bool forwards = (low % padded & run) == 0;
        if (forwards ? precedes(b, a) : precedes(a, b)) {
            items[low] = b;
            items[high] = a;
        }
    }
}
extern "C" __global__ void sort_end(
    const T* x, const item* items, T* values, i64* indices, i64* places, vectors v, i64 n
) {
    FOR_EACH(i, n) {
        const i64 vector = i / v.k, rank = i % v.k;
        put_place(x, values, indices, places, v, vector, rank, items[vector * v.padded + rank].index);
    }
}
"""
)


@on_cuda(TopK)
class _CudaTopK(CudaOperator):
    """The largest elements along an axis, and their indices."""

    def prepare(self) -> Step:
        """The way that suits k and the length of the vectors."""
        x, values = self.x(0), self.y(0)
        if not values.size:
            return nothing_to_do
        k, axis = topk_plan(self.call())
        size, inner = x.shape[axis], math.prod(x.shape[axis + 1 :])
        vectors, padded = x.size // size, 1 << (size - 1).bit_length()
        sizes = np.array([size, k, inner, padded], np.int64)
        results = [values, self.y(1), self.y(2) if len(self.output_blobs) == 3 else None]
        kind = c_type_of(x)
        order = f"#define LARGEST {int(self.arguments.bool('largest', True))}\n"
        if k <= FEW:
            source = f"#define THREADS {THREADS}\n{order}{_PICK}"
            return self.launch("pick", source, [x, *results, sizes], blocks=vectors, threads=THREADS, T=kind)
        if size <= COUNTED:
            arguments = [x, *results, sizes, np.int64(x.size)]
            return self.launch("count_before", order + _COUNT, arguments, elements=x.size, T=kind)
        items, count = self.scratch((vectors * padded * 16,), np.uint8), vectors * padded
        begin = [x, items, sizes, np.int64(count)]
        steps = [self.launch("sort_begin", order + _SORT, begin, elements=count, T=kind)]
        run = 2
        while run <= padded:
            stride = run // 2
            while stride:
                numbers = (run if run < padded else 0, stride, padded, count // 2)
                arguments = [items, *map(np.int64, numbers)]
                steps.append(self.launch("sort_step", order + _SORT, arguments, elements=count // 2, T=kind))
                stride //= 2
            run *= 2
        end = [x, items, *results, sizes, np.int64(vectors * k)]
        return in_sequence([*steps, self.launch("sort_end", order + _SORT, end, elements=vectors * k, T=kind)])


_PLACE = r"""
struct vectors { i64 size, k, inner; };
extern "C" __global__ void place_values(
    const T* values, const i64* indices, T* dx, int* fault, vectors v, i64 n
) {
    FOR_EACH(i, n) {
        const i64 column = i % v.inner, outer = i / v.inner / v.k, index = indices[i];
        if (index >= 0 && index < v.size) dx[(outer * v.size + index) * v.inner + column] = values[i];
        else atomicExch(fault, 1);
    }
}
"""


@on_cuda(TopKGradient)
class _CudaTopKGradient(CheckedOperator):
    """dValues among zeros. What has a bad index goes nowhere."""

    inputs_checked = (1,)

    def prepare(self) -> Step:
        """Zeros, and one write for each value; no place occurs twice."""
        values, indices, dx = self.x(0), self.x(1), self.y(0)
        if not values.size:
            return zero_step(dx)
        axis = self.call().axis("axis", -1, dx.ndim)
        size, inner = dx.shape[axis], math.prod(dx.shape[axis + 1 :])
        fault: Array = self.index_fault_word(indices, 0, size)
        sizes = np.array([size, values.shape[axis], inner], np.int64)
        arguments = [values, indices, dx, fault, sizes, np.int64(values.size)]
        place = self.launch("place_values", _PLACE, arguments, elements=values.size, T=c_type_of(values))
        return in_sequence([zero_step(dx), place])
