"""Whether two ways to run one model gave the same: bytes, or numbers but for rounding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MODERATE = 1e4  # results beyond are of sums that cancel, or overflow in one order and not in another
_CLOSE = 0.02  # of the largest result
_PIECE = 1 << 20


class WrongError(Exception):
    """Two ways to run one model gave different results."""


def same(one: Any, other: Any) -> bool:
    """Whether two results have the same bytes."""
    if isinstance(one, list) and isinstance(other, list):  # a sequence
        return len(one) == len(other) and all(map(same, one, other))
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):  # an optional without a value, a mapping
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return one.tolist() == other.tolist() if one.dtype == object else one.tobytes() == other.tobytes()


def require_near(name: str, plain: Any, fast: Any) -> None:
    """Raise WrongError unless the result `fast` is `plain` but for rounding."""
    if isinstance(plain, list) and isinstance(fast, list) and len(plain) == len(fast):
        for one, other in zip(plain, fast, strict=True):
            require_near(name, one, other)
        return
    if not isinstance(plain, np.ndarray) or not isinstance(fast, np.ndarray):
        if not same(plain, fast):
            raise WrongError(f"{name!r}: another value when optimized")
        return
    if plain.shape != fast.shape or plain.dtype != fast.dtype:
        raise WrongError(f"{name!r}: {fast.dtype}{fast.shape} when optimized, {plain.dtype}{plain.shape} as given")
    if plain.dtype.kind != "f" or not plain.size:
        return
    largest = np.abs(plain).max()
    if not np.isfinite(fast).all() and np.isfinite(plain).all() and largest < _MODERATE:
        raise WrongError(f"{name!r}: not finite when optimized")
    if np.isfinite(plain).all() and largest < _MODERATE:
        pieces = zip(_pieces(plain), _pieces(fast), strict=True)
        difference = max(float(np.abs(one.astype(np.float64) - other).max()) for one, other in pieces)
        if difference > _CLOSE * (1e-3 + float(largest)):
            raise WrongError(f"{name!r}: differs by {difference:.3g} of {largest:.3g} when optimized")


def _pieces(array: Array) -> Iterator[Array]:
    """The elements, some at a time: a case has memory for a result, and not for another copy of it in float64."""
    flat = array.reshape(-1)
    yield from (flat[start : start + _PIECE] for start in range(0, flat.size, _PIECE))
