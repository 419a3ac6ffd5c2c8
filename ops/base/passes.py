"""NumPy calls that operators are made of: each writes into an array that exists.

Arrays are float32 or float64, of one shape and dtype, where nothing else is said.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step

Array = npt.NDArray[Any]


def clip_pass(x: Array, low: float, high: float, out: Array) -> Step:
    """The pass `out = min(max(x, low), high)`, for arrays of one dtype; NaN stays.

    `ndarray.clip` is used because on long arrays it is three times as fast as `np.maximum` with a scalar.
    """
    scalar: Callable[[float], np.generic] = x.dtype.type
    if x.size < 1024 and low == -np.inf:
        return partial(np.minimum, x, scalar(high), out=out)
    if x.size < 1024 and high == np.inf:
        return partial(np.maximum, x, scalar(low), out=out)
    return partial(x.clip, scalar(low), scalar(high), out=out)


def scalar_pass(ufunc: Callable[..., Any], x: Array, value: float, out: Array) -> Step:
    """The pass `out = ufunc(x, value)`, the value rounded to the arrays' dtype."""
    constant: npt.NDArray[Any] = np.asarray(value, x.dtype)
    return partial(ufunc, x, constant, out=out)


def sigmoid_passes(x: Array, y: Array) -> list[Step]:
    """1 / (1 + exp(-x)): 0 where the power is infinite."""
    return [
        partial(np.negative, x, out=y),
        partial(np.exp, y, out=y),
        scalar_pass(np.add, y, 1.0, y),
        partial(np.divide, np.ones((), x.dtype), y, out=y),
    ]
