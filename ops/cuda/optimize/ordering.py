"""Indices in order, and equal ones in the order they are in: a bitonic sort of pairs (index, place) on the device.

A pair is one number of 64 bits, so no two are equal and the result is the only one there is. Chunks are sorted in
shared memory; longer runs are merged by a pass over all pairs for each distance that reaches beyond a chunk, and in
chunks from there on. Batcher, "Sorting networks and their applications", 1968.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.errors import ResourceError
from dagexec.core.operator import Step, in_sequence
from dagexec.ops.cuda.faults import CheckedOperator
from dagexec.ops.cuda.operator import Array, c_type_of

_MOST_THREADS = 512

PAIRS = r"""
const u64 NO_PAIR = 0xffffffffffffffffull;
__device__ inline i64 row_of(u64 pair) { return (i64)(pair >> 32); }
__device__ inline i64 place_of(u64 pair) { return (i64)(pair & 0xffffffffull); }
"""
"""C++ that reads a pair. A pair of an index out of range is NO_PAIR, behind all others."""

_SORT = (
    PAIRS
    + r"""
__device__ inline void exchange(u64* pairs, i64 a, i64 b, bool rising) {
    u64 first = pairs[a], second = pairs[b];
    if ((first > second) == rising) { pairs[a] = second; pairs[b] = first; }
}
extern "C" __global__ void sort_chunks(const T* indices, u64* pairs, i64 n, i64 height, int* fault) {
    __shared__ u64 chunk[1024];
    const int threads = (int)blockDim.x, t = (int)threadIdx.x, length = 2 * threads;
    const i64 base = (i64)blockIdx.x * length;
    for (int k = t; k < length; k += threads) {
        u64 pair = NO_PAIR;
        if (base + k < n) {
            i64 index = (i64)indices[base + k];
            if (index < 0 || index >= height) *fault = 1;
            else pair = ((u64)index << 32) | (u64)(base + k);
        }
        chunk[k] = pair;
    }
    for (int size = 2; size <= length; size *= 2) {
        for (int distance = size / 2; distance > 0; distance /= 2) {
            __syncthreads();
            int a = 2 * distance * (t / distance) + t % distance;
            exchange(chunk, a, a + distance, ((base + a) & size) == 0);
        }
    }
    __syncthreads();
    for (int k = t; k < length; k += threads) pairs[base + k] = chunk[k];
}
extern "C" __global__ void merge_far(u64* pairs, i64 size, i64 distance, i64 n) {
    FOR_EACH(t, n) {
        i64 a = 2 * distance * (t / distance) + t % distance;
        exchange(pairs, a, a + distance, (a & size) == 0);
    }
}
extern "C" __global__ void merge_chunks(u64* pairs, i64 size) {
    __shared__ u64 chunk[1024];
    const int threads = (int)blockDim.x, t = (int)threadIdx.x, length = 2 * threads;
    const i64 base = (i64)blockIdx.x * length;
    for (int k = t; k < length; k += threads) chunk[k] = pairs[base + k];
    for (int distance = threads; distance > 0; distance /= 2) {
        __syncthreads();
        int a = 2 * distance * (t / distance) + t % distance;
        exchange(chunk, a, a + distance, ((base + a) & size) == 0);
    }
    __syncthreads();
    for (int k = t; k < length; k += threads) pairs[base + k] = chunk[k];
}
"""
)


def ordered(operator: CheckedOperator, indices: Array, height: int) -> tuple[Step, Array]:
    """The step that orders `indices` (1-D, not empty), and the pairs it leaves in device memory, one for each index.

    An index outside [0, height) sets the operator's fault word. Raises ResourceError for more than 2**31 rows or
    2**32 indices.
    """
    count = int(indices.size)
    if height >= 1 << 31 or count >= 1 << 32:
        raise ResourceError(f"{operator.label}: {height} rows and {count} indices; at most {1 << 31} and {1 << 32}")
    padded = max(2, 1 << (count - 1).bit_length())
    threads = min(_MOST_THREADS, padded // 2)
    chunk = 2 * threads
    pairs = operator.scratch((padded,), np.uint64)
    fault = operator.index_fault_word(indices, 0, height)
    types, blocks = {"T": c_type_of(indices)}, padded // chunk
    arguments = [indices, pairs, np.int64(count), np.int64(height), fault]
    steps: list[Step] = [operator.launch("sort_chunks", _SORT, arguments, blocks=blocks, threads=threads, **types)]
    size = 2 * chunk
    while size <= padded:
        distance = size // 2
        while distance >= chunk:
            numbers = [pairs, np.int64(size), np.int64(distance), np.int64(padded // 2)]
            steps.append(operator.launch("merge_far", _SORT, numbers, elements=padded // 2, **types))
            distance //= 2
        near = [pairs, np.int64(size)]
        steps.append(operator.launch("merge_chunks", _SORT, near, blocks=blocks, threads=threads, **types))
        size *= 2
    return in_sequence(steps), pairs[:count]
