"""SparseToDense, GatherGradient and BatchGatherGradient on CUDA: sums at the places that were picked.

One thread adds up what goes to a place, in the order of the indices: the same bytes in every run, and the host's.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.ops.engines.cuda.base.constants import uploaded, zero_step
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.indices import INDICES, by_value, divider, index_type
from dagexec.ops.engines.cuda.base.kinds import on_cuda, registered_kinds
from dagexec.ops.engines.cuda.base.operator import Array, c_type_of
from dagexec.ops.engines.cuda.index.sorted_indices import sorted_indices
from dagexec.ops.families.index.indexing import picks_nothing, wraps
from dagexec.ops.families.index.indexing_gradient import GatheringGradient, SparseToDense, gathered_axis

_ADD = (
    INDICES
    + r"""
struct places_t { i64 rows; divider count, inner; };
extern "C" __global__ void add_at(
    const T* values, const int* numbers, const i64* keys, T* result, places_t p, i64 n
) {
    FOR_EACH(i, n) {
        I rest = (I)i, within = split(rest, p.inner), first = split(rest, p.count);
        i64 row = keys[first];
        if (row >= p.rows || (first > 0 && keys[first - 1] == row)) continue;
        const T* own = values + (rest * (I)p.count.size * (I)p.inner.size + within);
        typename computed<T>::type sum = 0;
        for (I j = first; j < (I)p.count.size && keys[j] == row; ++j)
            sum += get(own, (I)numbers[j] * (I)p.inner.size);
        put(result, (rest * (I)p.rows + (I)row) * (I)p.inner.size + within, sum);
    }
}
"""
)


def adding_at(
    op: CheckedOperator,
    indices: Array,
    values: Array,
    result: Array,
    axis: int,
    *,
    wrap: bool = False,
    fault: Any = None,
) -> Step:
    """The step result = 0, then result[..., indices[i], ...] += values[..., i, ...] along `axis` for every i.

    With `wrap` negative indices count from the end. 16-bit floats are summed in float. `fault` is the word for a bad
    index, where the indices are made from those that are checked.
    """
    rows, inner = result.shape[axis], prod(result.shape[axis + 1 :])
    fault = op.index_fault_word(indices, -rows if wrap else 0, rows) if fault is None else fault
    found = sorted_indices(op, indices, rows, fault, wrap=wrap)
    n = int(values.size)
    layout = by_value([rows, *divider(indices.size), *divider(inner)])
    arguments = [values, found.numbers, found.keys, result, layout, np.int64(n)]
    types = (c_type_of(values), index_type(n, result.size))
    add = op.launch("add_at", _ADD, arguments, elements=n, T=types[0], I=types[1])
    return in_sequence([found.sort, zero_step(result), add])


@on_cuda(SparseToDense)
class _CudaSparseToDense(CheckedOperator):
    """Rows added up by index."""

    inputs_checked = (0,)

    def prepare(self) -> Step:
        return adding_at(self, self.x(0), self.x(1), self.y(0), 0)


@on_cuda(*registered_kinds(GatheringGradient))
class _CudaGatherGradient(CheckedOperator):
    """Each slice of the data gets the sum of dY over the places that show it. The values of the data are not read."""

    inputs_checked = (1,)

    def prepare(self) -> Step:
        call, indices, values, result = self.call(), self.x(1), self.x(2), self.y(0)
        axis = gathered_axis(call)
        size, wrap = result.shape[axis], wraps(call, axis)
        if picks_nothing(call, size):
            return nothing_to_do
        if not call.arguments.bool("match_outer"):
            return adding_at(self, indices, values, result, axis, wrap=wrap)
        outer, inner = prod(result.shape[:axis]), prod(result.shape[axis + 1 :])
        low = -size if wrap else 0
        rows = self.scratch((outer, indices.size // outer), np.int64)
        number = elementwise(
            self,
            "matched_row",
            {"picked": indices.reshape(rows.shape), "first": uploaded(self, np.arange(outer)[:, None] * size)},
            {"row": rows},
            "row = picked < low || picked >= size ? i64(-1) : first + picked + (picked < 0 ? size : i64(0));",
            {"low": np.int64(low), "size": np.int64(size)},
        )
        fault = self.index_fault_word(indices, low, size)
        flat = values.reshape(rows.size, inner), result.reshape(outer * size, inner)
        return in_sequence([number, adding_at(self, rows.reshape(-1), *flat, 0, fault=fault)])
