"""SparseToDense, GatherGradient and BatchGatherGradient on CUDA: sums at the places that were picked.

One thread adds up what goes to a place, in the order of the indices: the same bytes in every run, and the host's.
"""

from __future__ import annotations

from math import prod

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.cuda.constants import zero_step
from dagexec.ops.cuda.faults import CheckedOperator
from dagexec.ops.cuda.indices import INDICES, by_value, divider, index_type
from dagexec.ops.cuda.kinds import on_cuda, registered_kinds
from dagexec.ops.cuda.operator import Array, c_type_of
from dagexec.ops.cuda.sorted_indices import sorted_indices
from dagexec.ops.index_gradient import GatheringGradient, SparseToDense

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
    op: CheckedOperator, indices: Array, values: Array, result: Array, axis: int, *, wrap: bool = False
) -> Step:
    """The step result = 0, then result[..., indices[i], ...] += values[..., i, ...] along `axis` for every i.

    With `wrap` negative indices count from the end. 16-bit floats are summed in float.
    """
    rows, inner = result.shape[axis], prod(result.shape[axis + 1 :])
    fault = op.index_fault_word(indices, -rows if wrap else 0, rows)
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
        """See `adding_at`."""
        return adding_at(self, self.x(0), self.x(1), self.y(0), 0)


@on_cuda(*registered_kinds(GatheringGradient))
class _CudaGatherGradient(CheckedOperator):
    """Each slice of the data gets the sum of dY over the places that show it. The values of the data are not read."""

    inputs_checked = (1,)

    def axis(self) -> int:
        """The axis of the data that was picked along."""
        call = self.call()
        return 1 if call.definition.type.startswith("Batch") else call.axis("axis", 0, self.x(0).ndim)

    def prepare(self) -> Step:
        """See `adding_at`."""
        wrap = self.arguments.bool("wrap_indices")
        return adding_at(self, self.x(1), self.x(2), self.y(0), self.axis(), wrap=wrap)
