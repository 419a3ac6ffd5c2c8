"""Element-wise kernels from an expression: `y = larger(x, A(0))`, over arrays that may broadcast.

The source is made from the names and C types of the arrays and the expression; equal sources are compiled once. Inside
it each input's name is its element, already widened (see `dagexec.core.cuda.prelude`), each output's is assigned.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.cuda.operator import Array, CudaOperator, c_type_of

MOST_AXES = 8


def elementwise(
    operator: CudaOperator,
    name: str,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    expression: str,
    scalars: Mapping[str, np.generic] | None = None,
    helpers: str = "",
) -> Step:
    """A step that evaluates `expression`, C++ statements, for every element of the outputs, which have one shape.

    Inputs are broadcast to it as NumPy does; an output may overwrite an input of its own shape. `scalars` are passed by
    value, under their names, as NumPy scalars. `helpers` is C++ that stands before the kernel. `i` is the number of the
    element.
    """
    shape = next(iter(outputs.values())).shape
    scalars = scalars or {}
    arrays = {**inputs, **outputs}
    steps = {key: _element_strides(array, shape) for key, array in arrays.items()}
    flat = all(np.array_equal(found, _element_strides_of(shape)) or prod(shape) == 0 for found in steps.values())
    kernel = f"elementwise_{name}"
    source = _source(kernel, inputs, outputs, expression, scalars, helpers, flat)
    arguments: list[Any] = [*arrays.values(), *scalars.values(), np.int64(prod(shape))]
    if not flat:
        arguments += _layout(shape, list(steps.values()))
    return operator.launch(kernel, source, arguments, elements=prod(shape))


def _source(
    kernel: str,
    inputs: Mapping[str, Array],
    outputs: Mapping[str, Array],
    expression: str,
    scalars: Mapping[str, np.generic],
    helpers: str,
    flat: bool,
) -> str:
    parameters = [f"const {c_type_of(array)}* {key}_p" for key, array in inputs.items()]
    parameters += [f"{c_type_of(array)}* {key}_p" for key, array in outputs.items()]
    parameters += [f"{_scalar_type(value)} {key}" for key, value in scalars.items()]
    parameters.append("i64 n")
    lines = []
    if not flat:
        parameters.append("layout where")
        lines += ["i64 rest = i; i64 " + ", ".join(f"{key}_at = 0" for key in [*inputs, *outputs]) + ";"]
        moves = " ".join(
            f"{key}_at += at * where.stride[{number}][d];" for number, key in enumerate([*inputs, *outputs])
        )
        lines.append(
            f"for (int d = where.axes - 1; d >= 0; --d) {{ "
            f"i64 at = rest % where.size[d]; rest /= where.size[d]; {moves} }}"
        )
    place = {key: "i" if flat else f"{key}_at" for key in [*inputs, *outputs]}
    lines += [f"const auto {key} = get({key}_p, {place[key]});" for key in inputs]
    lines += [f"computed<{c_type_of(array)}>::type {key};" for key, array in outputs.items()]
    lines.append(expression)
    lines += [f"put({key}_p, {place[key]}, {key});" for key in outputs]
    rows = len(inputs) + len(outputs)
    struct = f"struct layout {{ i64 axes; i64 size[{MOST_AXES}]; i64 stride[{rows}][{MOST_AXES}]; }};\n"
    body = "\n        ".join(lines)
    return (
        f"{helpers}\n{'' if flat else struct}"
        f'extern "C" __global__ void {kernel}({", ".join(parameters)}) {{\n'
        f"    FOR_EACH(i, n) {{\n        {body}\n    }}\n}}\n"
    )


def _scalar_type(value: np.generic) -> str:
    return {"f": {4: "float", 8: "double"}, "i": {4: "int", 8: "i64"}, "u": {4: "u32", 8: "u64"}, "b": {1: "bool"}}[
        value.dtype.kind
    ][value.dtype.itemsize]


def _element_strides_of(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Strides, in elements, of a packed array."""
    sizes = np.array([*shape[1:], 1], np.int64)
    return np.cumprod(sizes[::-1])[::-1].astype(np.int64)[: len(shape)]


def _element_strides(array: Array, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Strides, in elements, with which an array is read over `shape`; 0 along axes it is broadcast over.

    An axis of size 1 has the stride of a packed array, as it does not matter there.
    """
    missing = len(shape) - array.ndim
    packed = _element_strides_of(shape)
    found = np.zeros(len(shape), np.int64)
    for axis in range(len(shape)):
        own = axis - missing
        if shape[axis] == 1:
            found[axis] = packed[axis]
        elif own >= 0 and array.shape[own] != 1:
            found[axis] = array.strides[own] // array.itemsize
    return found


def _layout(shape: tuple[int, ...], strides: list[npt.NDArray[np.int64]]) -> list[npt.NDArray[np.int64]]:
    """The argument `where` of a kernel: axes joined where every array can step through both as one."""
    sizes = [int(size) for size in shape]
    rows = [list(map(int, row)) for row in strides]
    axis = len(sizes) - 2
    while axis >= 0:
        if all(row[axis] == row[axis + 1] * sizes[axis + 1] for row in rows):
            sizes[axis] *= sizes.pop(axis + 1)
            for row in rows:
                row[axis] = row.pop(axis + 1)
        axis -= 1
    if len(sizes) > MOST_AXES:
        raise ValueError(f"an element-wise kernel over {len(sizes)} axes that cannot be joined; at most {MOST_AXES}")
    empty = [0] * (MOST_AXES - len(sizes))
    return [np.array([len(sizes), *sizes, *empty, *(x for row in rows for x in [*row, *empty])], np.int64)]
