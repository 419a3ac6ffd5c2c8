"""Exact integer sums on the floating-point unit: products of 8-bit integers added up in float32 or float64.

A sum whose terms' magnitudes add up to no more than 2^24 (2^53 in float64) is exact in any order, so the BLAS and the
convolution algorithms that only multiply and add give the integer a 32-bit accumulator would hold, at their own speed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.constant import Constant
from dagexec.core.dtypes import TypeMeta
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.ops.families.quantized.scales import Array, integer_range
from dagexec.platform.records import dataclass


def exact_dtype(terms: int, a: TypeMeta, zero_point: int, b: TypeMeta) -> np.dtype[Any]:
    """float32 if it holds every sum of `terms` products of (an `a` less its zero point) and a `b`, else float64."""
    least, most = integer_range(a)
    low, high = integer_range(b)
    return exact_for(terms * max(most - zero_point, zero_point - least) * max(abs(low), abs(high)))


def exact_for(bound: int) -> np.dtype[Any]:
    """float32 if it holds every sum whose terms' magnitudes add up to no more than `bound`, else float64."""
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


@dataclass(frozen=True)
class Operand:
    """Integers of which a zero point is subtracted before they are multiplied.

    Attributes:
        owner: the operator.
        index: the input that has them.
        zero_point: the input that has their zero point, None without one.
        view: gives a vector of zero points the axes that it broadcasts with.
    """

    owner: Operator
    index: int
    zero_point: int | None
    view: Callable[[Array], Array]

    @property
    def zero(self) -> Array | None:
        """The zero point as it broadcasts to the integers."""
        return None if self.zero_point is None else self.view(self.owner.x(self.zero_point))

    @property
    def constant(self) -> Constant | None:
        """What keeps what follows from the integers, where they and their zero point never change."""
        if self.zero_point is not None and self.owner.input(self.zero_point).constant is None:
            return None
        return self.owner.input(self.index).constant

    def key(self, what: str) -> tuple[str, ...]:
        """What `constant` keeps something of these differences under."""
        zero = self.zero
        return (what,) if zero is None else (what, str(zero.shape), zero.tobytes().hex())

    def largest(self) -> int:
        """No difference has a larger magnitude."""
        constant = self.constant
        if constant is not None:
            magnitudes: Array = constant.derived(self.key("largest"), self._magnitude)
            return int(magnitudes)
        least, most = integer_range(self.owner.input(self.index).meta)
        if self.zero_point is None:
            return max(abs(least), abs(most))
        lowest, highest = integer_range(self.owner.input(self.zero_point).meta)
        return max(most - lowest, highest - least)

    def _magnitude(self) -> Array:
        return np.asarray(np.abs(self.wide(np.dtype(np.int64))).max(initial=0))

    def differences(self, work: np.dtype[Any]) -> tuple[Array, Step]:
        """The integers less their zero point in dtype `work`, and the step that computes them, once for constants."""
        x, zero, constant = self.owner.x(self.index), self.zero, self.constant
        if constant is not None:
            wide = constant.derived((*self.key("differences"), work.str), lambda: self.wide(work))
            return wide.reshape(x.shape), nothing_to_do
        wide = self.owner.scratch(x.shape, work)
        if zero is None:
            return wide, partial(np.copyto, wide, x, casting="unsafe")
        return wide, partial(np.subtract, x, zero, out=wide, dtype=work, casting="unsafe")

    def wide(self, work: np.dtype[Any]) -> Array:
        """The integers less their zero point in dtype `work`, as they are now."""
        x, zero = self.owner.x(self.index).astype(work), self.zero
        return x if zero is None else x - zero.astype(work)
