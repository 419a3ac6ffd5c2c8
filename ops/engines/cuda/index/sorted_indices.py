"""Indices sorted on the device, equal ones in the order they came in, so that each place is summed by one thread.

Additions at places that may occur more than once would need atomics, and then their order would be chance. Instead the
numbers of the indices are sorted by index and every run of equal ones is added up in order, as the host does. Up to
a few thousand indices each counts those before it; more are sorted by digits of 4 bits, the lowest first, by threads
with an equal share each, in order (Knuth, "The Art of Computer Programming", volume 3, 5.2.5: radix list sorting).
"""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.platform.records import dataclass

COUNTED = 4096
"""Up to so many indices each is compared with all others; more are sorted by digits."""

_SHARE = 32  # indices of a thread that sorts by digits
_DIGITS = 16
_SCAN_THREADS = 1024

_PLACES = r"""
// The row an index means; after the last one for those out of range.
__device__ inline i64 row_of(i64 index, i64 rows, i64 wrap) {
    if (wrap && index < 0) index += rows;
    return index < 0 || index >= rows ? rows : index;
}
"""

_COUNT = (
    _PLACES
    + r"""
extern "C" __global__ void rank_indices(
    const J* indices, int* numbers, i64* keys, int* fault, i64 rows, i64 wrap, i64 n
) {
    FOR_EACH(i, n) {
        i64 own = row_of(indices[i], rows, wrap), rank = 0;
        if (own == rows) atomicExch(fault, 1);
        for (i64 j = 0; j < n; ++j) {
            i64 other = row_of(indices[j], rows, wrap);
            rank += other < own || (other == own && j < i);
        }
        numbers[rank] = (int)i;
        keys[rank] = own;
    }
}
"""
)

_BEGIN = (
    _PLACES
    + r"""
extern "C" __global__ void begin_sort(
    const J* indices, int* numbers, i64* keys, int* fault, i64 rows, i64 wrap, i64 n
) {
    FOR_EACH(i, n) {
        numbers[i] = (int)i;
        keys[i] = row_of(indices[i], rows, wrap);
        if (keys[i] == rows) atomicExch(fault, 1);
    }
}
"""
)

_DIGIT_COUNTS = r"""
extern "C" __global__ void count_digits(const i64* keys, int* counts, int shift, int share, i64 threads, i64 n) {
    FOR_EACH(t, threads) {
        int own[16];
        for (int d = 0; d < 16; ++d) own[d] = 0;
        for (i64 i = t * share; i < n && i < (t + 1) * share; ++i) {
            int digit = (int)((keys[i] >> shift) & 15);
            for (int d = 0; d < 16; ++d) own[d] += d == digit;
        }
        for (int d = 0; d < 16; ++d) counts[d * threads + t] = own[d];
    }
}
"""

_SCAN = r"""
// What comes before each count, in place; one block.
extern "C" __global__ void sum_before(int* counts, i64 n) {
    __shared__ int totals[1024];
    i64 share = (n + blockDim.x - 1) / blockDim.x, first = threadIdx.x * share;
    int own = 0;
    for (i64 i = first; i < n && i < first + share; ++i) own += counts[i];
    totals[threadIdx.x] = own;
    __syncthreads();
    for (u32 step = 1; step < blockDim.x; step *= 2) {
        int before = threadIdx.x >= step ? totals[threadIdx.x - step] : 0;
        __syncthreads();
        totals[threadIdx.x] += before;
        __syncthreads();
    }
    int sum = totals[threadIdx.x] - own;
    for (i64 i = first; i < n && i < first + share; ++i) {
        int count = counts[i];
        counts[i] = sum;
        sum += count;
    }
}
"""

_MOVE = r"""
extern "C" __global__ void move_by_digit(
    const i64* keys, const int* numbers, i64* next_keys, int* next_numbers, int* counts, int shift, int share,
    i64 threads, i64 n
) {
    FOR_EACH(t, threads) {
        for (i64 i = t * share; i < n && i < (t + 1) * share; ++i) {
            i64 key = keys[i];
            int place = counts[((key >> shift) & 15) * threads + t]++;
            next_keys[place] = key;
            next_numbers[place] = numbers[i];
        }
    }
}
"""


@dataclass(frozen=True, slots=True)
class SortedIndices:
    """Sorted indices on a device.

    Attributes:
        keys: the rows, in ascending order; the number of rows for an index out of range.
        numbers: which index each was.
        sort: the step that sorts what the indices are now.
    """

    keys: Array
    numbers: Array
    sort: Step


def sorted_indices(
    operator: CudaOperator, indices: Array, rows: int, fault: Array, *, wrap: bool = False
) -> SortedIndices:
    """The indices, a packed array of int32 or int64, sorted by the row in [0, rows) that they mean.

    With `wrap` negative ones count from the end. `fault` is an int32 that becomes 1 for an index out of range. Raises
    ShapeError for 2**31 indices or more.
    """
    n = int(indices.size)
    if n >= 1 << 31:
        raise operator.call().fail(f"{n} indices are more than CUDA can sort, {(1 << 31) - 1}")
    keys, numbers = operator.scratch((n,), np.int64), operator.scratch((n,), np.int32)
    if not n:
        return SortedIndices(keys, numbers, nothing_to_do)
    arguments = [indices, numbers, keys, fault, np.int64(rows), np.int64(wrap), np.int64(n)]
    kind = c_type_of(indices)
    if n <= COUNTED:
        return SortedIndices(keys, numbers, operator.launch("rank_indices", _COUNT, arguments, elements=n, J=kind))
    steps = [operator.launch("begin_sort", _BEGIN, arguments, elements=n, J=kind)]
    pairs = [(keys, numbers), (operator.scratch((n,), np.int64), operator.scratch((n,), np.int32))]
    threads = -(-n // _SHARE)
    counts = operator.scratch((_DIGITS * threads,), np.int32)
    many, share = np.int64(threads), np.int32(_SHARE)
    for shift in range(0, rows.bit_length(), 4):
        (keys, numbers), (next_keys, next_numbers) = pairs
        digit = np.int32(shift)
        counting = [keys, counts, digit, share, many, np.int64(n)]
        moving = [keys, numbers, next_keys, next_numbers, counts, digit, share, many, np.int64(n)]
        scanning = [counts, np.int64(counts.size)]
        steps += [
            operator.launch("count_digits", _DIGIT_COUNTS, counting, elements=threads),
            operator.launch("sum_before", _SCAN, scanning, blocks=1, threads=_SCAN_THREADS),
            operator.launch("move_by_digit", _MOVE, moving, elements=threads),
        ]
        pairs.reverse()
    return SortedIndices(*pairs[0], in_sequence(steps))
