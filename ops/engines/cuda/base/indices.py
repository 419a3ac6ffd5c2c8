"""Index arithmetic of kernels that walk several axes: quotients without a division, 32-bit indices where they suffice.

An integer division takes a GPU some twenty instructions, a 64-bit one a hundred. A `divider` holds a multiplier and a
shift that give the quotient of a number below 2**31 by a constant of the launch: Granlund and Montgomery, "Division by
invariant integers using multiplication", 1994. Kernels compute in type I, `int` or `i64`; see `index_type`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.errors import ShapeError

Integers = npt.NDArray[np.int64]

INT_LIMIT = 1 << 31
"""Kernels compute in `int` when every number they meet is below this, else in `i64`."""

INDICES = r"""
struct divider { i64 size, multiplier, shift; };
__device__ inline int quotient(int n, const divider& d) {
    return (int)((__umulhi((u32)n, (u32)d.multiplier) + (u32)n) >> (u32)d.shift);
}
__device__ inline i64 quotient(i64 n, const divider& d) { return n / d.size; }
template <class I> __device__ inline I split(I& rest, const divider& d) {
    I whole = quotient(rest, d), part = rest - whole * (I)d.size;
    rest = whole;
    return part;
}
"""
"""C++ that stands before a kernel: `quotient(n, d)` for n >= 0; `split(rest, d)` takes the last digit off `rest`."""


def divider(size: int) -> list[int]:
    """The fields of a `divider` by `size`, which is 1 at least; a size of 0, of what is never walked, counts as 1."""
    size = max(1, size)
    shift = (size - 1).bit_length()
    multiplier = ((1 << 32) * ((1 << shift) - size)) // size + 1
    return [size, multiplier, shift]


def index_type(*numbers: int) -> str:
    """The type I that holds `numbers`: the largest that a kernel meets, in size."""
    return "int" if all(abs(number) < INT_LIMIT for number in numbers) else "i64"


def element_strides(array: Any) -> list[int]:
    """The strides of an array in elements; 0 for an axis of one element."""
    steps = (step // array.itemsize for step in array.strides)
    return [step if size > 1 else 0 for size, step in zip(array.shape, steps, strict=True)]


def reach(shape: Sequence[int], strides: Iterable[int]) -> int:
    """How far from the first element the last one may lie, in elements; 0 when there is none."""
    if 0 in shape:
        return 0
    return sum((size - 1) * abs(step) for size, step in zip(shape, strides, strict=True))


def packed_strides(shape: Sequence[int]) -> list[int]:
    """The strides of a packed array, in elements."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return strides


def by_value(numbers: Iterable[int]) -> Integers:
    """Numbers as the struct of i64 that a kernel gets by value."""
    return np.array(list(numbers), np.int64)


def require_axes(found: int, most: int, what: str) -> None:
    """Raise ShapeError when a kernel would have to walk more axes than it can."""
    if found > most:
        raise ShapeError(f"{what}: {found} axes that cannot be merged; a CUDA kernel supports at most {most}")
