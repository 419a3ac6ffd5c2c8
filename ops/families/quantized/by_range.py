"""Quantization to uint8 by the range that values have in this run, as ONNX's DynamicQuantizeLinear."""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.operator import Operator, Step
from dagexec.ops.families.quantized.scales import Array
from dagexec.platform.records import dataclass

_ZERO, _ONE, _MOST = np.float32(0), np.float32(1), np.float32(255)


@dataclass(frozen=True)
class ByRange:
    """Floats and their quantization: scale = (max - min) / 255, zero = round(-min / scale), 0 being in the range.

    Attributes:
        x: the values, in one row.
        scale, zero: scalars, that each run sets; zero is a whole number in float32. Of nothing but 0 the scale is 1.
        point: zero as int32, in a vector of one entry.
    """

    x: Array
    scale: Array
    zero: Array
    point: Array

    @classmethod
    def of(cls, owner: Operator, x: Array) -> ByRange:
        """For values of an operator, with memory of its own."""
        scale, zero = (owner.scratch((), np.float32) for _ in range(2))
        return cls(x.reshape(-1), scale, zero, owner.scratch((1,), np.int32))

    def measure(self) -> None:
        """Set everything by the values that are there now. NaN counts as 0."""
        low, high = np.fmin.reduce(self.x, initial=_ZERO), np.fmax.reduce(self.x, initial=_ZERO)
        step = (high - low) / _MOST
        if not step > 0:
            step = _ONE
        zero = min(max(-low / step, _ZERO), _MOST)
        self.zero[...] = self.point[0] = round(float(zero)) if zero > 0 else 0
        self.scale[...] = step

    def centered_passes(self, values: Array) -> list[Step]:
        """Passes that set `values`, float32, to the integers less their zero."""
        return [*self.passes(values), partial(np.subtract, values, self.zero, out=values)]

    def passes(self, values: Array, piece: slice = slice(None)) -> list[Step]:
        """Passes that set `values`, float32, to the integers of a piece of x; NaN becomes 0."""
        flat = values.reshape(-1)
        return [
            partial(np.divide, self.x[piece], self.scale, flat),
            partial(np.rint, flat, flat),
            partial(np.add, flat, self.zero, flat),
            partial(np.fmax, flat, _ZERO, out=flat),
            partial(np.minimum, flat, _MOST, out=flat),
        ]
