"""Sums of an expression of broadcast tensors, over the axes along which one was stretched: gradients of broadcasts.

A block has `depth` rows of threads that share the terms of `width` sums; what each thread has added up is added in a
tree. Long sums are cut into segments of a length that only the sizes decide, and the segments' sums are added the same
way, so the same bytes come out whatever the device and the grid.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from dagexec.core import dtypes
from dagexec.core.operator import Step, in_sequence, nothing_to_do
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.kernels import BLOCK, block_count
from dagexec.ops.engines.cuda.base.copy import copy_step
from dagexec.ops.engines.cuda.base.expression import (
    MAX_AXES,
    MAX_ELEMENTS_32,
    c_type_of_scalar,
    element_strides,
    elementwise,
    join_axes,
)
from dagexec.ops.engines.cuda.base.formulas import FORMULAS
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of

_TERMS = 64
"""So many terms a thread adds up at most."""


def reduced(
    operator: CudaOperator,
    name: str,
    shape: tuple[int, ...],
    inputs: Mapping[str, Array],
    target: Array,
    expression: str = "",
    scalars: Mapping[str, np.generic] | None = None,
) -> Step:
    """The step that computes `value`, which `expression` assigns, over `shape`, and sums it into `target`.

    Inputs broadcast to `shape`, and are read as in `elementwise`. `target` is packed and has as many axes as `shape`,
    each of that size or 1; the sum is over the axes along which it is stretched. Without an expression the first input
    is summed. Sums are added in the type that elements of the target are computed in; a sum over nothing is 0.
    """
    kept = tuple(target.shape)
    if target.size == 0:
        return nothing_to_do
    if 0 in shape:
        return elementwise(operator, "zero", {}, {"y": target}, "y = A(0);")
    first = next(iter(inputs.values()))
    if not expression:
        if first.shape == kept == shape and first.dtype == target.dtype:
            return nothing_to_do if address(first) == address(target) else copy_step(target, first)
        expression = f"value = {next(iter(inputs))};"
    if kept == shape:
        return elementwise(operator, name, inputs, {"value": target}, expression, scalars)
    return _sum(operator, name, shape, inputs, target, expression, scalars or {})


def _sum(
    operator: CudaOperator,
    name: str,
    shape: tuple[int, ...],
    inputs: Mapping[str, Array],
    target: Array,
    expression: str,
    scalars: Mapping[str, np.generic],
) -> Step:
    rows = [element_strides(array, shape) for array in inputs.values()]
    strides = element_strides(target, shape)
    axes = join_axes(shape, [*rows, strides])
    kept_axes = [axis for axis in axes if axis.strides[-1]]
    summed_axes = [axis for axis in axes if not axis.strides[-1]]
    kept, count = prod(axis.size for axis in kept_axes), prod(axis.size for axis in summed_axes)
    if len(axes) > MAX_AXES:
        raise ValueError(f"a sum over {len(axes)} axes that cannot be merged; at most {MAX_AXES}")
    width, depth = _block(kept, count, bool(axes[-1].strides[-1]))
    length = depth * _TERMS
    segments = -(-count // length)
    computed = _computed(target)
    partial = operator.scratch((segments, kept), computed) if segments > 1 else target
    reach = max(sum(axis.strides[row] * (axis.size - 1) for axis in axes) for row in range(len(rows)))
    small = max(kept * count, reach, segments * max(kept, length)) < MAX_ELEMENTS_32
    index = np.uint32 if small else np.int64
    table = np.zeros((len(rows) + 1, MAX_AXES), index)
    for number, axis in enumerate([*kept_axes, *summed_axes]):
        table[:, number] = [axis.size, *axis.strides[:-1]]
    ends = np.array([len(kept_axes), len(axes)], index)
    where = np.concatenate([ends, table.reshape(-1)])
    groups = -(-kept // width)
    source = _source(name, inputs, partial, target, expression, scalars, "u32" if small else "i64")
    sizes = [index(kept), index(count), index(length), index(groups * segments), np.int32(width)]
    step = operator.launch(
        f"reduced_{name}",
        source,
        [*inputs.values(), partial, *scalars.values(), *sizes, where],
        blocks=block_count(groups * segments * BLOCK, operator.device_index),
    )
    if segments == 1:
        return step
    total = target.reshape(1, kept)
    return in_sequence([step, _sum(operator, "sum", (segments, kept), {"v": partial}, total, "value = v;", {})])


def _block(kept: int, count: int, innermost_kept: bool) -> tuple[int, int]:
    """Width and depth of a block: threads next to one another read what is next to one another."""
    least_width = min(32, _power_above(kept)) if innermost_kept else 1
    depth = min(_power_above(count), BLOCK // least_width)
    return BLOCK // depth, depth


def _power_above(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def _computed(array: Array) -> np.dtype[np.generic]:
    """The dtype that elements are computed in."""
    narrow = dtypes.from_numpy(array.dtype).is_float and array.itemsize == 2
    return np.dtype(np.float32) if narrow else array.dtype


def _source(
    name: str,
    inputs: Mapping[str, Array],
    partial: Array,
    target: Array,
    expression: str,
    scalars: Mapping[str, np.generic],
    index_type: str,
) -> str:
    parameters = [f"const {c_type_of(array)}* {key}_p" for key, array in inputs.items()]
    parameters.append(f"{c_type_of(partial)}* target_p")
    parameters += [f"{c_type_of_scalar(value)} {key}" for key, value in scalars.items()]
    parameters += ["ix kept", "ix terms", "ix length", "ix tasks", "int width", "BY_VALUE layout where"]
    bases = ", ".join(f"{key}_base = 0" for key in inputs)
    ats = ", ".join(f"{key}_at = {key}_base" for key in inputs)
    of_base = " ".join(f"{key}_base += at * where.stride[{row}][d];" for row, key in enumerate(inputs))
    of_at = " ".join(f"{key}_at += at * where.stride[{row}][d];" for row, key in enumerate(inputs))
    loads = " ".join(f"const auto {key} = get({key}_p, {key}_at);" for key in inputs)
    first = next(iter(inputs.values()))
    return f"""
typedef {index_type} ix;
typedef computed<{c_type_of(target)}>::type sum_t;
{FORMULAS}
struct layout {{ ix ends[2]; ix size[{MAX_AXES}]; ix stride[{len(inputs)}][{MAX_AXES}]; }};
extern "C" __global__ void reduced_{name}({", ".join(parameters)}) {{
    typedef computed<{c_type_of(first)}>::type A;
    __shared__ sum_t sums[{BLOCK}];
    const int lane = (int)threadIdx.x % width, row = (int)threadIdx.x / width, depth = {BLOCK} / width;
    const ix groups = (kept + (ix)width - 1) / (ix)width;
    for (ix task = blockIdx.x; task < tasks; task += gridDim.x) {{
        const ix segment = task / groups, place = (task - segment * groups) * (ix)width + (ix)lane;
        sum_t total = 0;
        if (place < kept) {{
            ix rest = place, {bases};
            for (int d = (int)where.ends[0] - 1; d >= 0; --d) {{
                ix next = rest / where.size[d], at = rest - next * where.size[d]; rest = next;
                {of_base}
            }}
            const ix limit = segment * length + length, end = limit < terms ? limit : terms;
            for (ix term = segment * length + (ix)row; term < end; term += (ix)depth) {{
                ix left = term, {ats};
                for (int d = (int)where.ends[1] - 1; d >= (int)where.ends[0]; --d) {{
                    ix next = left / where.size[d], at = left - next * where.size[d]; left = next;
                    {of_at}
                }}
                {loads}
                sum_t value;
                {expression}
                total = plus(total, value);
            }}
        }}
        sums[threadIdx.x] = total;
        __syncthreads();
        for (int half = depth / 2; half > 0; half /= 2) {{
            if (row < half) sums[threadIdx.x] = plus(sums[threadIdx.x], sums[threadIdx.x + half * width]);
            __syncthreads();
        }}
        if (row == 0 && place < kept) put(target_p, segment * kept + place, sums[lane]);
        __syncthreads();
    }}
}}
"""
