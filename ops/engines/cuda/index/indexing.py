"""Gather, BatchGather and OneHot on CUDA. A bad index gives zeros; see `dagexec.ops.engines.cuda.base.faults` for how
it is found.

TopK is in `dagexec.ops.engines.cuda.index.top_k`, the gradients are in
`dagexec.ops.engines.cuda.index.indexing_gradient`.
"""

from __future__ import annotations

from math import prod

import numpy as np

from dagexec.core.operator import Step, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.indices import INDICES, by_value, divider, index_type
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import c_type_of
from dagexec.ops.engines.cuda.base.strided_copy import item_type
from dagexec.ops.families.index.indexing import BatchGather, Gather, OneHot, picks_nothing, wraps

_GATHER = (
    INDICES
    + r"""
struct gather_t { i64 size, wrap, matched; divider count, inner; };
extern "C" __global__ void gather(const T* data, const J* indices, T* y, int* fault, gather_t g, i64 n) {
    FOR_EACH(i, n) {
        I rest = (I)i, within = split(rest, g.inner), at = split(rest, g.count);
        i64 picked = indices[g.matched ? rest * (I)g.count.size + at : at];
        if (g.wrap && picked < 0) picked += g.size;
        T value = {};
        if (picked >= 0 && picked < g.size) value = data[(rest * (I)g.size + (I)picked) * (I)g.inner.size + within];
        else atomicExch(fault, 1);
        y[i] = value;
    }
}
"""
)

_ONE_HOT = (
    INDICES
    + r"""
extern "C" __global__ void one_hot(const J* indices, float* y, int* fault, divider size, i64 n) {
    FOR_EACH(i, n) {
        I row = (I)i, column = split(row, size);
        i64 index = indices[row];
        if (index < 0 || index >= size.size) atomicExch(fault, 1);
        y[i] = index == column ? 1.0f : 0.0f;
    }
}
"""
)


@on_cuda(Gather)
class _CudaGather(CheckedOperator):
    """Slices of the data along an axis, picked by index."""

    inputs_checked = (1,)

    def axis(self) -> int:
        """The axis of the data that indices count along."""
        return self.call().axis("axis", 0, self.x(0).ndim)

    def prepare(self) -> Step:
        """A thread for every item of the output."""
        data, indices, y = self.x(0), self.x(1), self.y(0)
        axis, call = self.axis(), self.call()
        wrap, matched = wraps(call, axis), call.arguments.bool("match_outer")
        size, inner, item = data.shape[axis], prod(data.shape[axis + 1 :]), int(data.itemsize)
        low = -size if wrap else 0
        if picks_nothing(call, size):
            return nothing_to_do
        if not y.size:
            return self.index_check(indices, low, size)
        while item < 16 and inner % 2 == 0 and not any(address(array) % (2 * item) for array in (data, y)):
            item, inner = 2 * item, inner // 2
        fault = self.index_fault_word(indices, low, size)
        outer = prod(data.shape[:axis])
        count = indices.size // outer if matched else indices.size
        n = outer * count * inner
        layout = by_value([size, int(wrap), int(matched), *divider(count), *divider(inner)])
        kind = index_type(n, data.size)
        arguments = [data, indices, y, fault, layout, np.int64(n)]
        types = (item_type(item), c_type_of(indices))
        return self.launch("gather", _GATHER, arguments, elements=n, T=types[0], J=types[1], I=kind)


@on_cuda(BatchGather)
class _CudaBatchGather(_CudaGather):
    """Slices picked by index from every batch element."""

    def axis(self) -> int:
        """The axis after the batch."""
        return 1


@on_cuda(OneHot)
class _CudaOneHot(CheckedOperator):
    """Indices as rows of zeros with a single one."""

    inputs_checked = (0,)

    def prepare(self) -> Step:
        """A thread for every place."""
        indices, y = self.x(0), self.y(0)
        size = y.shape[1]
        if not y.size:
            return self.index_check(indices, 0, size)
        arguments = [indices, y, self.index_fault_word(indices, 0, size), by_value(divider(size)), np.int64(y.size)]
        types = (c_type_of(indices), index_type(y.size))
        return self.launch("one_hot", _ONE_HOT, arguments, elements=y.size, J=types[0], I=types[1])
