"""Exact integer sums on the floating-point unit: products of 8-bit integers added up in float32 or float64.

A sum whose terms' magnitudes add up to no more than 2^24 (2^53 in float64) is exact in any order, so the BLAS and the
convolution algorithms that only multiply and add give the integer a 32-bit accumulator would hold, at their own speed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import TypeMeta
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.ops.quantized.scales import Array, integer_range


def exact_dtype(terms: int, a: TypeMeta, zero_point: int | None, b: TypeMeta) -> np.dtype[Any]:
    """float32 if it holds every sum of `terms` products of (an `a` less its zero point) and a `b`, else float64.

    `zero_point` is None when it is only known in a run.
    """
    least, most = integer_range(a)
    largest = most - least if zero_point is None else max(most - zero_point, zero_point - least)
    low, high = integer_range(b)
    bound = terms * largest * max(abs(low), abs(high))
    return np.dtype(np.float32) if bound <= 1 << 24 else np.dtype(np.float64)


def fits_int32(terms: int, a: TypeMeta, b: TypeMeta) -> bool:
    """True when no sum of `terms` products of an `a`, less any zero point, and a `b` leaves the range of int32."""
    least, most = integer_range(a)
    low, high = integer_range(b)
    return terms * (most - least) * max(abs(low), abs(high)) < 1 << 31


def centered(owner: Operator, x: Array, zero_point: int, work: np.dtype[Any]) -> tuple[Array, Step]:
    """`x` less its zero point in dtype `work`, and the step that computes it."""
    wide = owner.scratch(x.shape, work)
    if zero_point == 0:
        return wide, partial(np.copyto, wide, x, casting="unsafe")
    return wide, partial(np.subtract, x, work.type(zero_point), out=wide, dtype=work, casting="unsafe")


def widened(owner: Operator, index: int, array: Array, work: np.dtype[Any]) -> tuple[Array, Step]:
    """Input `index`, seen as `array`, in dtype `work`, and the step that converts it; a constant is converted once."""
    constant = owner.input(index).constant
    if constant is not None:
        wide = constant.derived(("wide", work.str), lambda: owner.x(index).astype(work))
        return wide.reshape(array.shape), nothing_to_do
    wide = owner.scratch(array.shape, work)
    return wide, partial(np.copyto, wide, array, casting="unsafe")
