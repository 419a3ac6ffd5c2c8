"""Whether a primitive gives the same bytes on one thread as on several.

A product cuts long sums into a piece a thread where there are few of them: general ones (`gemm`) mostly, those made for
a geometry now and then. Nothing in the library says where, so it is tried, on random numbers, once for a geometry.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from functools import cache

import numpy as np

from dagexec.core.dtypes import BFLOAT16, FLOAT16, from_numpy
from dagexec.ops.onednn.primitive import (
    EXEC_ARG_MD,
    SCRATCHPAD,
    SCRATCHPAD_MD,
    Array,
    Descriptor,
    PrimitiveDescriptor,
    aligned_empty,
)

_ENOUGH = 64  # sums: if they were cut, one of so many would differ
_MAX_KNOWN = 4096

_known: dict[Hashable, bool] = {}


def gives_same_bytes(
    one: PrimitiveDescriptor,
    other: PrimitiveDescriptor,
    arrays: Mapping[int, Array],
    further: Mapping[int, tuple[Descriptor, Array]],
    result: int,
    label: str,
) -> bool:
    """True when both are known to give the same bytes in argument `result`: never of 16 bits, whose rounding hides it.

    `arrays` are the arguments by number, of which only types, shapes and strides count, `further` those of post-ops.
    """
    if arrays[result].itemsize < np.dtype(np.float32).itemsize:
        return False
    tensors = {**arrays, **{number: array for number, (_, array) in further.items()}}
    kinds = tuple((number, array.shape, array.strides, array.dtype.str) for number, array in tensors.items())
    key = (one.name, one.threads, other.name, other.threads, kinds)
    if key not in _known:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[key] = _agree(one, other, arrays, further, result, label)
    return _known[key]


def _agree(
    one: PrimitiveDescriptor,
    other: PrimitiveDescriptor,
    arrays: Mapping[int, Array],
    further: Mapping[int, tuple[Descriptor, Array]],
    result: int,
    label: str,
) -> bool:
    layouts = {number: one.descriptor(EXEC_ARG_MD, number) for number in arrays}
    if any(layout != other.descriptor(EXEC_ARG_MD, number) for number, layout in layouts.items()):
        return False
    layouts |= {number: layout for number, (layout, _) in further.items()}
    tensors = {**arrays, **{number: array for number, (_, array) in further.items()}}
    memory = {number: (layout, aligned_empty(layout.nbytes)) for number, layout in layouts.items()}
    for _ in range(-(-_ENOUGH // max(1, arrays[result].size))):
        for number, (_, place) in memory.items():
            _fill(place, tensors[number].dtype)
        before = memory[result][1].copy()
        outputs = []
        for description in (one, other):
            memory[result][1][...] = before
            nbytes = description.scratchpad_bytes
            scratchpad = {SCRATCHPAD: (description.descriptor(SCRATCHPAD_MD), aligned_empty(nbytes))} if nbytes else {}
            description.create().bind({**memory, **scratchpad}, label).step()
            outputs.append(memory[result][1].tobytes())
        if outputs[0] != outputs[1]:
            return False
    return True


_PERIOD = 65_521
"""Of the numbers in a tensor: a prime, so that no row or block begins where another one does."""


@cache
def _normal_numbers() -> Array:
    return np.random.default_rng(0).standard_normal(_PERIOD, np.float32)


@cache
def _integers() -> Array:
    return np.random.default_rng(0).integers(0, 100, _PERIOD)


def _fill(place: Array, dtype: np.dtype[np.generic]) -> None:
    """Fill memory with normal numbers, or integers."""
    values = place.view(dtype)
    is_float = from_numpy(dtype) in (BFLOAT16, FLOAT16) or dtype.kind == "f"
    numbers = (_normal_numbers() if is_float else _integers()).astype(dtype)
    for start in range(0, values.size, _PERIOD):
        part = values[start : start + _PERIOD]
        part[...] = numbers[: part.size]
