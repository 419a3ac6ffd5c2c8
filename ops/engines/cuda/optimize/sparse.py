"""Updates by sparse gradients on CUDA.

Indices are sorted first. Then one thread has all gradients of one element and applies them in the order of the
indices, or their sum with `deduplicate`; for rules that keep one number a row, a block has a row. So results are those
of one thread that goes through the indices, whatever the grid.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.engines.cuda.base.expression import c_type_of_scalar, computed_scalar
from dagexec.ops.engines.cuda.base.formulas import FORMULAS
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, c_type_of
from dagexec.ops.engines.cuda.index.sorted_indices import sorted_indices
from dagexec.ops.engines.cuda.optimize.rules import CudaRule, cuda_rule
from dagexec.ops.engines.cuda.optimize.update import CudaUpdate
from dagexec.ops.families.optimize.row_wise import RowWiseSparseAdagrad, RowWiseSparseAdam
from dagexec.ops.families.optimize.sparse import (
    SparseAdadelta,
    SparseAdagrad,
    SparseAdam,
    SparseFtrl,
    SparseMomentumSGDUpdate,
    SparseUpdate,
)

ROW_BLOCK = 128
"""Threads of a block that has a row, a power of two."""


class CudaSparseUpdate(CudaUpdate):
    """Base of the updates of rows, mixed into classes made of the host's."""

    def prepare(self) -> Step:
        """What is one number a run, the sorted indices, then the rule."""
        assert isinstance(self, SparseUpdate)
        parts = self.parts
        assert parts.indices is not None
        assert parts.param is not None
        param, indices = self.target(parts.param), self.x(parts.indices).reshape(-1)
        height, count = param.shape[0], int(indices.size)
        if param.size == 0 or count == 0:
            return self.index_check(indices, 0, height)
        width = param.size // height
        begin, settings = self.settings()
        order = sorted_indices(self, indices, height, self.index_fault_word(indices, 0, height))
        states = [self.target(source) for source in parts.state]
        extras = [self.y(index) if index < len(self.output_blobs) else None for index in parts.extras]
        paired = [state.ndim > param.ndim for state in states]
        rule = cuda_rule(self.make_rule(), len(states) + sum(paired), True)
        numbers = {key: computed_scalar(param, value) for key, value in rule.numbers.items()}
        c_type = c_type_of(param)
        tables: dict[str, Array | None] = {
            "grad": self.x(parts.grad),
            "params": param,
            **{f"table{k}": state for k, state in enumerate(states)},
            **{f"extra{k}": extra for k, extra in enumerate(extras)},
        }
        parameters = ["const i64* keys", "const int* numbers", *(f"{c_type}* {name}" for name in tables)]
        parameters += [f"const {c_type_of(array)}* {name}_p" for name, array in settings.items()]
        parameters += [f"{c_type_of_scalar(value)} {name}" for name, value in numbers.items()]
        parameters += ["int deduplicate", "i64 rows", "i64 count", "i64 width"]
        source = _source(type(self).schema.type, rule, parameters, list(settings), paired, len(extras))
        sizes = [np.int32(self.arguments.bool("deduplicate")), np.int64(height), np.int64(count), np.int64(width)]
        arguments = [order.keys, order.numbers, *tables.values(), *settings.values(), *numbers.values(), *sizes]
        name = f"sparse_{type(self).schema.type}"
        if rule.by_row:
            update = self.launch(name, source, arguments, blocks=min(count, 65535), threads=ROW_BLOCK, T=c_type)
        else:
            update = self.launch(name, source, arguments, elements=count * width, T=c_type)
        return in_sequence([begin, order.sort, update])


def _source(
    op_type: str, rule: CudaRule, parameters: list[str], settings: list[str], paired: list[bool], extras: int
) -> str:
    begin = " ".join(f"const A {name} = (A){name}_p[0];" for name in settings)
    body = _by_row(rule, extras) if rule.by_row else _by_element(rule, paired, extras)
    return f"""
{FORMULAS}
extern "C" __global__ void sparse_{op_type}({", ".join(parameters)}) {{
    typedef T A;
    {begin}
{body}
}}
"""


def _extras(rule: CudaRule, extras: int) -> tuple[str, str]:
    """C++ that declares the extra outputs, and that writes them to element `at`, 0 where `zero`."""
    declared = " ".join(f"A e{k} = A(0);" for k in range(2))
    given = " ".join(f"if (extra{k}) extra{k}[at] = e{k};" for k in range(extras))
    return declared, given


def _by_element(rule: CudaRule, paired: list[bool], extras: int) -> str:
    """A thread for each element of the rows; FTRL's state is in pairs."""
    declared, given = _extras(rule, extras)
    zero = " ".join(f"if (extra{k}) extra{k}[at] = A(0);" for k in range(extras))
    if any(paired):
        places = {"s0": "table0[2 * element]", "s1": "table0[2 * element + 1]"}
    else:
        places = {f"s{k}": f"table{k}[element]" for k in range(len(paired))}
    load = " ".join(f"A {state} = {place};" for state, place in places.items())
    store = " ".join(f"{place} = {state};" for state, place in places.items())
    return f"""
    FOR_EACH(i, count * width) {{
        const i64 p = i / width, column = i - p * width;
        const i64 row = keys[p];
        if (row >= rows || (p > 0 && keys[p - 1] == row)) continue;
        const i64 element = row * width + column;
        A param = params[element]; {load}
        {declared}
        i64 q = p;
        do {{
            i64 at = (i64)numbers[q] * width + column;
            A g = grad[at];
            ++q;
            if (deduplicate) {{
                for (; q < count && keys[q] == row; ++q) {{
                    const i64 first = at;
                    at = (i64)numbers[q] * width + column;
                    g = g + grad[at];
                    {zero}
                    at = first;
                }}
            }}
            {rule.code}
            {rule.takes}
            {given}
        }} while (q < count && keys[q] == row);
        params[element] = param; {store}
    }}"""


def _by_row(rule: CudaRule, extras: int) -> str:
    """A block for each row: the mean of the squares in a tree, then the elements; state of the row is in registers."""
    declared, given = _extras(rule, extras)
    zero = " ".join(f"if (extra{k}) extra{k}[at] = A(0);" for k in range(extras))
    row_states = [f"s{k}" for k in rule.row_states]
    element_states = ["s0"] if rule.row_states == (1,) else []
    load_row = " ".join(f"A {name} = table{name[1]}[row];" for name in row_states)
    store_row = " ".join(f"table{name[1]}[row] = {name};" for name in row_states)
    load = " ".join(f"A {name} = table{name[1]}[element];" for name in element_states)
    store = " ".join(f"table{name[1]}[element] = {name};" for name in element_states)
    gradient = """A g = grad[(i64)numbers[q] * width + column];
                if (deduplicate) for (i64 k = q + 1; k < end; ++k) g = g + grad[(i64)numbers[k] * width + column];"""
    return f"""
    __shared__ A sums[{ROW_BLOCK}];
    const int t = (int)threadIdx.x;
    for (i64 p = blockIdx.x; p < count; p += gridDim.x) {{
        const i64 row = keys[p];
        if (row >= rows || (p > 0 && keys[p - 1] == row)) continue;
        i64 end = p + 1;
        while (end < count && keys[end] == row) ++end;
        {load_row}
        for (i64 q = p; q < (deduplicate ? p + 1 : end); ++q) {{
            A squares = A(0);
            for (i64 column = t; column < width; column += {ROW_BLOCK}) {{
                {gradient}
                squares = squares + g * g;
            }}
            __syncthreads();
            sums[t] = squares;
            __syncthreads();
            for (int half = {ROW_BLOCK // 2}; half > 0; half /= 2) {{
                if (t < half) sums[t] = sums[t] + sums[t + half];
                __syncthreads();
            }}
            const A mean = sums[0] / (A)width;
            {rule.code}
            for (i64 column = t; column < width; column += {ROW_BLOCK}) {{
                {gradient}
                const i64 element = row * width + column;
                A param = params[element]; {load}
                {declared}
                {rule.takes}
                params[element] = param; {store}
                i64 at = (i64)numbers[q] * width + column;
                {given}
                if (deduplicate) for (i64 k = q + 1; k < end; ++k) {{
                    at = (i64)numbers[k] * width + column;
                    {zero}
                }}
            }}
        }}
        if (t == 0) {{ {store_row} }}
    }}"""


for _kind in (
    SparseMomentumSGDUpdate,
    SparseAdagrad,
    SparseAdadelta,
    SparseFtrl,
    SparseAdam,
    RowWiseSparseAdagrad,
    RowWiseSparseAdam,
):
    on_cuda(_kind)(type("CudaSparseUpdate", (CudaSparseUpdate,), {"__module__": __name__}))
