"""The error function erf(x) = 2/sqrt(pi) * integral from 0 to x of exp(-t^2), elementwise with `out=`.

NumPy has none. Here, with h(x) = -ln(erfc(x)), which is smooth on x >= 0 and close to a parabola:

    h(x) = x * q(x),    erf(x) = sign(x) * (1 - exp(-h(|x|))),    erfc(|x|) = exp(-h(|x|))

q is a polynomial on [0, 6], found when it is first needed: the Chebyshev interpolant of values of `math.erfc`, whose
error falls geometrically with the degree (Trefethen, Approximation Theory and Approximation Practice, 2013, chapter 8).
Beyond 6, erfc is below 3e-17. Maximum relative errors against `math.erf`: 1e-6 in float32, 3e-14 in float64.
"""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.pointwise import clip_pass, scalar_pass

LIMIT = 6.0
_DEGREES = {np.dtype(np.float32): 14, np.dtype(np.float64): 24}


def erf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """`math.erf` of each element; for formulas, slow."""
    return np.array([math.erf(value) for value in x.ravel()]).reshape(x.shape)


def _log_erfc_ratio(t: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """q at x = LIMIT * (t + 1) / 2, for t in (-1, 1)."""
    points = LIMIT * (t + 1) / 2
    return np.array([-(math.log1p(-math.erf(x)) if x < 0.5 else math.log(math.erfc(x))) / x for x in points])


@cache
def log_erfc_coefficients(dtype: np.dtype[Any]) -> tuple[float, ...]:
    """Coefficients of q for float32 or float64, highest power first, in the variable t = 2x/LIMIT - 1."""
    degree = _DEGREES[dtype]
    nodes = np.polynomial.chebyshev.chebpts1(degree + 1)
    series = np.polynomial.chebyshev.chebfit(nodes, _log_erfc_ratio(nodes), degree)
    return tuple(float(value) for value in np.polynomial.chebyshev.cheb2poly(series)[::-1])


def log_erfc_passes(magnitude: Array, t: Array, out: Array) -> list[Step]:
    """Passes that leave ln(erfc(magnitude)) in `out`; `magnitude` is in [0, LIMIT], and `t` is scratch.

    The arrays are float32 or float64, of one shape and dtype, and do not overlap. Evaluates q by Horner's rule.
    """
    highest, second, *rest = log_erfc_coefficients(magnitude.dtype)
    steps = [
        scalar_pass(np.multiply, magnitude, 2 / LIMIT, t),
        scalar_pass(np.subtract, t, 1.0, t),
        scalar_pass(np.multiply, t, highest, out),
        scalar_pass(np.add, out, second, out),
    ]
    for coefficient in rest:
        steps += [partial(np.multiply, out, t, out=out), scalar_pass(np.add, out, coefficient, out)]
    return [*steps, partial(np.multiply, out, magnitude, out=out), partial(np.negative, out, out=out)]


def erf_passes(x: Array, y: Array, magnitude: Array, t: Array, work: Array) -> list[Step]:
    """Passes for `y = erf(x)`; `x` and `y` may be one array, the other three are scratch of the same shape."""
    return [
        partial(np.absolute, x, out=magnitude),
        clip_pass(magnitude, 0.0, LIMIT, magnitude),
        *log_erfc_passes(magnitude, t, work),
        partial(np.expm1, work, out=work),
        partial(np.copysign, work, x, out=y),
    ]
