"""ScatterWeightedSum and ScatterAssign on CUDA.

Indices are sorted first; then one thread has all that goes to one element, in the order of the indices.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, c_type_of
from dagexec.ops.engines.cuda.base.strided_copy import item_type
from dagexec.ops.engines.cuda.index.sorted_indices import sorted_indices
from dagexec.ops.families.optimize.scatter import ScatterAssign, ScatterWeightedSum

_ADD = r"""
extern "C" __global__ void scatter_scale(
    const i64* keys, const int* numbers, T* table, const W* weight, i64 rows, i64 count, i64 width
) {
    const T factor = (T)weight[0];
    FOR_EACH(i, count * width) {
        const i64 p = i / width, column = i - p * width;
        const i64 row = keys[p];
        if (row >= rows || (p > 0 && keys[p - 1] == row)) continue;
        T* place = table + row * width + column;
        T value = *place;
        for (i64 q = p; q < count && keys[q] == row; ++q) value = value * factor;
        *place = value;
    }
}
extern "C" __global__ void scatter_add(
    const i64* keys, const int* numbers, T* table, const T* values, const W* weight, i64 rows, i64 count, i64 width
) {
    const T factor = (T)weight[0];
    FOR_EACH(i, count * width) {
        const i64 p = i / width, column = i - p * width;
        const i64 row = keys[p];
        if (row >= rows || (p > 0 && keys[p - 1] == row)) continue;
        T* place = table + row * width + column;
        T sum = *place;
        for (i64 q = p; q < count && keys[q] == row; ++q)
            sum = sum + values[(i64)numbers[q] * width + column] * factor;
        *place = sum;
    }
}
"""

_ASSIGN = r"""
extern "C" __global__ void scatter_assign(
    const i64* keys, const int* numbers, T* table, const T* values, i64 rows, i64 count, i64 width
) {
    FOR_EACH(i, count * width) {
        const i64 p = i / width, column = i - p * width;
        const i64 row = keys[p];
        if (row >= rows || (p + 1 < count && keys[p + 1] == row)) continue;
        table[row * width + column] = values[(i64)numbers[p] * width + column];
    }
}
"""


@on_cuda(ScatterWeightedSum)
class CudaScatterWeightedSum(CheckedOperator):
    """Weighted sums into rows."""

    inputs_checked = (2,)

    def prepare(self) -> Step:
        """Sort the indices, scale the rows, then add each tensor."""
        table, indices = self.y(0), self.x(2).reshape(-1)
        height, count = table.shape[0], int(indices.size)
        if table.size == 0 or count == 0:
            return self.index_check(indices, 0, height)
        width = table.size // height
        order = sorted_indices(self, indices, height, self.index_fault_word(indices, 0, height))
        sizes = [np.int64(height), np.int64(count), np.int64(width)]
        steps = [order.sort]
        for value in (None, *range(3, len(self.input_blobs), 2)):
            weight: Array = self.x(1 if value is None else value + 1)
            name = "scatter_scale" if value is None else "scatter_add"
            values = [] if value is None else [self.x(value)]
            arguments = [order.keys, order.numbers, table, *values, weight, *sizes]
            steps.append(
                self.launch(name, _ADD, arguments, elements=count * width, T=c_type_of(table), W=c_type_of(weight))
            )
        return in_sequence(steps)


@on_cuda(ScatterAssign)
class CudaScatterAssign(CheckedOperator):
    """Rows replaced by index."""

    inputs_checked = (1,)

    def prepare(self) -> Step:
        """Sort the indices; the last of equal ones writes."""
        table, indices = self.y(0), self.x(1).reshape(-1)
        height, count = table.shape[0], int(indices.size)
        if table.size == 0 or count == 0:
            return self.index_check(indices, 0, height)
        width = table.size // height
        order = sorted_indices(self, indices, height, self.index_fault_word(indices, 0, height))
        sizes = [np.int64(height), np.int64(count), np.int64(width)]
        arguments = [order.keys, order.numbers, table, self.x(2), *sizes]
        assign = self.launch("scatter_assign", _ASSIGN, arguments, elements=count * width, T=item_type(table.itemsize))
        return in_sequence([order.sort, assign])
