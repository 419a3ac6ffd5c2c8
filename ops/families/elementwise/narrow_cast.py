"""Conversion to the types of at most 8 bits, by the rules of ONNX's Cast.

Floats that a type cannot hold become its largest or, without `saturate`, what the type has for them: infinity or NaN.
float8e8m0 is a power of two without sign, so zero becomes the least one, and what lies between two powers is rounded
as `round_mode` says (Open Compute Project, Microscaling Formats, v1.0).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes

Array = npt.NDArray[Any]

ROUND_MODES = ("up", "down", "nearest")
_POWERS = "float8e8m0"
_MAX_POWER = 127


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """True for the types that this module is about."""
    return dtypes.from_numpy(dtype) in dtypes.NARROW_TYPES


def to_narrow(source: Array, target: Array, *, saturate: bool, round_mode: str) -> None:
    """Write the elements of `source`, numbers or booleans, to `target`, whose type has at most 8 bits."""
    with np.errstate(all="ignore"):
        if dtypes.from_numpy(target.dtype).name == _POWERS:
            target[...] = _powers(source.astype(np.float32), saturate, round_mode).astype(target.dtype)
        elif _holds_floats(target.dtype):
            values = source.astype(np.float32)
            if saturate:
                most = np.float32(ml_dtypes.finfo(target.dtype).max)  # type: ignore[no-untyped-call]
                np.clip(values, -most, most, out=values)
            target[...] = values.astype(target.dtype)
        else:
            target[...] = source.astype(target.dtype)


def _holds_floats(dtype: np.dtype[Any]) -> bool:
    return dtypes.from_numpy(dtype).name.startswith("float")


def _powers(values: Array, saturate: bool, round_mode: str) -> Array:
    """The powers of two next to |values|, NaN where there is none."""
    fraction, exponent = np.frexp(np.abs(values))  # in [0.5, 1)
    least = {"up": np.nextafter(np.float32(0.5), np.float32(1)), "down": np.float32(1), "nearest": np.float32(0.75)}
    power = exponent - 1 + (fraction >= least[round_mode])
    power[values == 0] = -_MAX_POWER
    found = np.ldexp(np.float64(1), np.clip(power, -_MAX_POWER, _MAX_POWER))
    undefined = ~np.isfinite(values) | ((power > _MAX_POWER) & (not saturate))
    return np.where(undefined, np.nan, found)
