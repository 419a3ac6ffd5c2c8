"""Element-wise kernels from an expression: `y = nan_max(x, A(0));`, over arrays that may broadcast.

The source is made from the names and C types of the arrays and the expression; equal sources are compiled once. Inside
it each input's name is its element, already widened (see `dagexec.devices.cuda.prelude`), each output's is assigned,
and `A` is the type that the first array is computed in. Sizes are arguments, so one kernel serves all shapes: arrays
that fill the shape are indexed by the number of the element, arrays of one element by 0, and only others need the sizes
and strides of axes, in as few axes as say the same. Indices have 32 bits where the sizes allow it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from dagexec.core import dtypes
from dagexec.core.operator import Step
from dagexec.devices.cuda.prelude import c_type
from dagexec.ops.engines.cuda.base.formulas import FORMULAS
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.platform.records import dataclass

MAX_AXES = 8
MAX_ELEMENTS_32 = 1 << 31
"""From so many elements on indices have 64 bits."""


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
    value, under their names, as NumPy scalars. `helpers` is C++ that stands before the kernel, after `FORMULAS`. `i` is
    the number of the element, `elements` how many there are.
    """
    shape = next(iter(outputs.values())).shape
    size = prod(shape)
    scalars = scalars or {}
    places = Places(shape, {**inputs, **outputs})
    kernel = f"elementwise_{name}"
    parameters = [f"const {c_type_of(array)}* {key}_p" for key, array in inputs.items()]
    parameters += [f"{c_type_of(array)}* {key}_p" for key, array in outputs.items()]
    parameters += [f"{c_type_of_scalar(value)} {key}" for key, value in scalars.items()]
    parameters += ["ix elements", *places.parameters]
    first = next(iter({**inputs, **outputs}.values()))
    lines = [
        f"typedef computed<{c_type_of(first)}>::type A;",
        *places.statements("i"),
        *(f"const auto {key} = get({key}_p, {places.of(key)});" for key in inputs),
        *(f"computed<{c_type_of(array)}>::type {key};" for key, array in outputs.items()),
        expression,
        *(f"put({key}_p, {places.of(key)}, {key});" for key in outputs),
    ]
    body = "\n        ".join(lines)
    source = (
        f"typedef {places.index_type} ix;\n{FORMULAS}{helpers}\n{places.declarations}"
        f'extern "C" __global__ void {kernel}({", ".join(parameters)}) {{\n'
        "    for (ix i = (ix)first_index(), step = (ix)index_step(); i < elements; i += step) {\n"
        f"        {body}\n    }}\n}}\n"
    )
    arguments = [*inputs.values(), *outputs.values(), *scalars.values(), places.number(size), *places.arguments]
    return operator.launch(kernel, source, arguments, elements=size)


def computed_scalar(array: Array, value: float) -> np.generic:
    """`value` as a scalar of the type that elements of `array` are computed in."""
    meta = dtypes.from_numpy(array.dtype)
    kind = np.float32 if meta.is_float and array.itemsize == 2 else array.dtype.type
    with np.errstate(over="ignore"):
        return np.array([value], kind)[0]  # type: ignore[no-any-return]


def c_type_of_scalar(value: np.generic) -> str:
    """The C type of a NumPy scalar."""
    return {"uint32": "u32", "uint64": "u64"}.get(value.dtype.name) or c_type(dtypes.from_numpy(value.dtype))


class Places:
    """Where the element of each array is that belongs to an element of a shape to which they are broadcast.

    Attributes:
        declarations, parameters, arguments: what a kernel needs before it, as parameters, and as their values.
        index_type: the C type of indices; 64 bits where an index may need them.
    """

    def __init__(self, shape: tuple[int, ...], arrays: Mapping[str, Array], prefix: str = "") -> None:
        """`prefix` tells the names apart where a kernel has several. Raises ValueError for too many axes."""
        size = prod(shape)
        self.index_type = "u32" if size < MAX_ELEMENTS_32 else "i64"
        self._prefix = prefix
        self._place: dict[str, str] = {}
        self._strided: list[str] = []
        rows: list[list[int]] = []
        packed = _packed_strides(shape)
        for key, array in arrays.items():
            strides = element_strides(array, shape)
            matters = [(s, p) for s, p, n in zip(strides, packed, shape, strict=True) if n != 1]
            if not size or all(s == p for s, p in matters):
                self._place[key] = "{i}"
            elif all(s == 0 for s, _ in matters):
                self._place[key] = "0"
            else:
                self._place[key] = f"{prefix}{key}_at"
                self._strided.append(key)
                rows.append(strides)
                reach = sum(s * (n - 1) for s, n in zip(strides, shape, strict=True))
                if reach >= MAX_ELEMENTS_32:
                    self.index_type = "i64"
        self.declarations, self.parameters, self.arguments = "", [], list[Any]()
        if rows:
            name = f"{prefix}layout"
            self.declarations = (
                f"struct {name} {{ ix axes; ix size[{MAX_AXES}]; ix stride[{len(rows)}][{MAX_AXES}]; }};\n"
            )
            self.parameters = [f"BY_VALUE {name} {prefix}where"]
            self.arguments = [_layout(shape, rows, np.uint32 if self.index_type == "u32" else np.int64)]

    def number(self, value: int) -> np.generic:
        """A number as an argument of the index type."""
        return np.uint32(value) if self.index_type == "u32" else np.int64(value)

    def statements(self, index: str) -> list[str]:
        """C++ that finds the places of element `index` of the shape."""
        self._index = index
        if not self._strided:
            return []
        p = self._prefix
        names = ", ".join(f"{p}{key}_at = 0" for key in self._strided)
        moves = " ".join(f"{p}{key}_at += at * {p}where.stride[{row}][d];" for row, key in enumerate(self._strided))
        return [
            f"ix {p}rest = {index}, {names};",
            f"for (int d = (int){p}where.axes - 1; d >= 0; --d) {{ ix size = {p}where.size[d], next = {p}rest / size, "
            f"at = {p}rest - next * size; {p}rest = next; {moves} }}",
        ]

    def of(self, key: str) -> str:
        """The C++ expression of the place of array `key`, after `statements`."""
        return self._place[key].format(i=self._index)


def _packed_strides(shape: Sequence[int]) -> list[int]:
    """Strides, in elements, of a packed array."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return strides


def element_strides(array: Array, shape: tuple[int, ...]) -> list[int]:
    """Strides, in elements, with which an array is read over `shape`; 0 along axes that it is broadcast over."""
    missing = len(shape) - array.ndim
    own = zip(array.shape, array.strides, strict=True)
    return [0] * missing + [0 if size == 1 else stride // array.itemsize for size, stride in own]


@dataclass
class _Axis:
    """Neighboring axes as one."""

    size: int
    strides: list[int]


def join_axes(shape: Sequence[int], rows: Sequence[Sequence[int]]) -> list[_Axis]:
    """The axes of `shape` in as few as say the same to arrays with these strides; at least one, none of size 1."""
    joined: list[_Axis] = []
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        strides = [row[axis] for row in rows]
        last = joined[-1] if joined else None
        if last is not None and all(a == b * size for a, b in zip(last.strides, strides, strict=True)):
            last.size, last.strides = last.size * size, strides
        else:
            joined.append(_Axis(size, strides))
    return joined or [_Axis(1, [0] * len(rows))]


def _layout(shape: Sequence[int], rows: Sequence[Sequence[int]], dtype: type[np.generic]) -> Array:
    """The argument `where` of a kernel."""
    axes = join_axes(shape, rows)
    if len(axes) > MAX_AXES:
        raise ValueError(f"an element-wise kernel over {len(axes)} axes that cannot be merged; at most {MAX_AXES}")
    table = np.zeros((1 + len(rows), MAX_AXES), dtype)
    for number, axis in enumerate(axes):
        table[:, number] = [axis.size, *axis.strides]
    return np.concatenate([np.array([len(axes)], dtype), table.reshape(-1)])


def converted(owner: CudaOperator, source: Array, target: Array) -> Step:
    """A step that copies `source`, which broadcasts to it, to `target`, converting the element type."""
    return elementwise(owner, "copied", {"x": source}, {"y": target}, "y = (decltype(y))x;")


def zeroed(owner: CudaOperator, target: Array) -> Step:
    """A step that makes every element of `target` 0."""
    return elementwise(owner, "zero", {}, {"y": target}, "y = 0;")
