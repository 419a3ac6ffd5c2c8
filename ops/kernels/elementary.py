"""Elementary functions of vectors, written with a `Builder`, for all float32 numbers, infinities and NaN.

Errors against float64, over dense samples of the whole range, in units in the last place of the result (ulp, 6e-8 to
1.2e-7 of it): exp 1.0, expm1 1.6, log 1.0, tanh 2.5, sigmoid 2.5, erf 5. Of the others the docstring tells.

e^x is 2^n e^r with whole n and |r| <= ln(2)/2, where x - n ln(2) is computed in two parts (Cody and Waite, "Software
manual for the elementary functions", 1980). Logarithms of 1 + f are series of s = f / (2 + f). Polynomials are
Chebyshev interpolants, computed when first needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from dagexec.ops.base.error_function import LIMIT, log_erfc_coefficients
from dagexec.ops.kernels.builder import Builder, Vector

_LOG2E, _LN2 = math.log2(math.e), math.log(2)
_LN2_HIGH = 355 / 512
"""The first bits of ln(2): whole numbers up to 2^14 times it are exact."""
_LN2_LOW = _LN2 - _LN2_HIGH
_LEAST, _MOST, _LEAST_NORMAL = -104.0, 89.0, -87.33
"""Below and above these, e^x is 0 and infinite in float32, and no normal number."""
_FRACTION_BITS, _ONE_EXPONENT = 23, 127
_ROOT_BITS = 0x3F3504F3  # of the square root of 1/2
_TINY = 2.0**-126
_MOST_POWER = 125.9  # of 2: it and its inverse are normal numbers
_INFINITE_POWER = 128.0  # of 2


def horner(build: Builder, x: Vector, coefficients: Sequence[float]) -> Vector:
    """The polynomial with these coefficients, highest power first."""
    highest, second, *rest = coefficients
    value = build.fma(x, build.constant(highest), second)
    for coefficient in rest:
        value = build.fma(value, x, coefficient)
    return value


def exp(build: Builder, x: Vector) -> Vector:
    """e^x."""
    n, grown = _reduced(build, x)
    return _scaled(build, grown + 1.0, n)


def expm1(build: Builder, x: Vector) -> Vector:
    """e^x - 1, near 0 too."""
    n, grown = _reduced(build, build.maximum(-18.0, x))  # below it is -1
    half = _near(build, build.constant(0.5), n)
    return build.fma(grown, half, half - 0.5) * 2.0


def decay(build: Builder, x: Vector) -> Vector:
    """e^x for x <= 0; 0 below -87.3, where it is less than 2^-126."""
    n, grown = _parts(build, x)
    return build.select(build.less(x, _LEAST_NORMAL), 0.0, _near(build, grown + 1.0, n))


def log(build: Builder, x: Vector) -> Vector:
    """The natural logarithm: -infinity of 0, NaN of what is negative."""
    is_subnormal = build.less(x, _TINY)
    bits = build.select(is_subnormal, x * 2.0**_FRACTION_BITS, x)
    shift = build.select(is_subnormal, build.constant(-_FRACTION_BITS), build.constant(0.0))
    exponent = build.shift(build.subtract_integers(bits, build.integer(_ROOT_BITS)), -_FRACTION_BITS)
    mantissa = build.subtract_integers(bits, build.shift(exponent, _FRACTION_BITS))
    n = build.from_integer(exponent) + shift
    f = mantissa - 1.0
    half_square = f * f * 0.5
    s = f / (f + 2.0)
    rest = horner(build, s * s, _atanh_coefficients(0.03, 2)) * (s * s)
    low = build.fma(s, half_square + rest, n * _LN2_LOW)
    value = build.fma(n, _LN2_HIGH, f - (half_square - low))
    value = build.select(build.equal(x, math.inf), x, value)
    without = build.select(build.equal(x, 0.0), build.constant(-math.inf), build.constant(math.nan))
    return build.select(build.less(0.0, x), value, without)


def tanh(build: Builder, x: Vector) -> Vector:
    """The hyperbolic tangent, (e^2|x| - 1) / (e^2|x| + 1) with the sign of x."""
    grown = expm1(build, build.minimum(20.0, build.absolute(x) * 2.0))
    return build.either(grown / (grown + 2.0), build.sign_of(x))


def sigmoid(build: Builder, x: Vector) -> Vector:
    """1 / (1 + e^-x), as e^x / (1 + e^x) for negative x: the relative error is as small there."""
    small = decay(build, 0.0 - build.absolute(x))
    return build.select(build.less(x, 0.0), small, 1.0) / (small + 1.0)


def near_swish(build: Builder, x: Vector, alpha: float = 1.0) -> Vector:
    """x / (1 + e^(-alpha x)), SiLU with alpha = 1; NaN of -infinity. The error is 1e-7 of the greater of 1 and |x|."""
    if alpha == 0:
        return x * 0.5
    return x / _one_and_decay(build, x, alpha)


def near_sigmoid(build: Builder, x: Vector) -> Vector:
    """As `sigmoid`, with an error of 1e-7, in two thirds of the instructions."""
    return 1.0 / _one_and_decay(build, x, 1.0)


def _one_and_decay(build: Builder, x: Vector, alpha: float) -> Vector:
    """1 + e^(-alpha x), infinite from 2^128 on: the relative error of the power is 6e-8 |alpha x|."""
    return _power_of_two(build, clip(build, x * (-alpha * _LOG2E), -_MOST_POWER, _INFINITE_POWER)) + 1.0


def erf(build: Builder, x: Vector) -> Vector:
    """The error function."""
    bounded = build.minimum(LIMIT, build.absolute(x))
    return build.either(0.0 - expm1(build, _log_erfc(build, bounded)), build.sign_of(x))


def erfc(build: Builder, m: Vector) -> Vector:
    """1 - erf(m), of m from 0 to LIMIT."""
    return _power_of_two(build, _log_erfc(build, m, -1 / _LN2))


def gelu(build: Builder, x: Vector) -> Vector:
    """x/2 (1 + erf(x / sqrt(2))), as max(x, 0) - |x|/2 erfc(|x| / sqrt(2)): 3e-7 of |x| and 2e-7.

    The maximum is computed as x/2 + |x|/2, which is NaN at -infinity.
    Hendrycks and Gimpel 2016, arXiv:1606.08415.
    """
    half = x * 0.5
    size = build.absolute(half)
    positive = half + size
    bounded = build.minimum(LIMIT, size * math.sqrt(2))
    rest = erfc(build, bounded) * bounded
    return build.fnma(rest, math.sqrt(0.5), positive)


def tanh_gelu(build: Builder, x: Vector) -> Vector:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), as x times a sigmoid: 4 ulp above -8.5, below -1e-24."""
    near = clip(build, x, -10.5, 10.5)  # further away the sigmoid is 0 and 1
    slope = 2 * math.sqrt(2 / math.pi)
    factor = build.fma(near * near, build.constant(slope * 0.044715), slope)
    return x * sigmoid(build, factor * near)


def softplus(build: Builder, x: Vector) -> Vector:
    """ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|). 3 ulp."""
    small = decay(build, 0.0 - build.absolute(x))
    s = small / (small + 2.0)
    series = horner(build, s * s, _atanh_coefficients(1 / 9, 3)) * (s * s)
    return build.maximum(0.0, x) + build.fma(s, series, s + s)


def mish(build: Builder, x: Vector) -> Vector:
    """x tanh(ln(1 + e^x)) = x g / (g + 2) with g = e^x (e^x + 2). 5 ulp. Misra 2019, arXiv:1908.08681."""
    grown = exp(build, build.minimum(20.0, x))
    gate = grown * (grown + 2.0)
    return x * (gate / (gate + 2.0))


def elu(build: Builder, x: Vector, alpha: float = 1.0) -> Vector:
    """x where it is positive, else alpha (e^x - 1)."""
    return build.fma(expm1(build, build.minimum(0.0, x)), alpha, build.maximum(0.0, x))


def leaky_relu(build: Builder, x: Vector, alpha: float) -> Vector:
    """x where it is positive, else alpha x."""
    return build.select(build.less(0.0, x), x, x * alpha)


def clip(build: Builder, x: Vector, low: float, high: float) -> Vector:
    """Not below `low` and not above `high`; NaN stays."""
    value = build.maximum(low, x) if low > -math.inf else x
    return build.minimum(high, value) if high < math.inf else value


def hard_sigmoid(build: Builder, x: Vector, alpha: float, beta: float) -> Vector:
    """alpha x + beta, from 0 to 1."""
    return clip(build, build.fma(x, build.constant(alpha), beta), 0.0, 1.0)


def power(build: Builder, x: Vector, exponent: float) -> Vector | None:
    """x^exponent for exponents that are products and roots; None for others."""
    simple = _POWERS.get(exponent)
    return None if simple is None else simple(build, x)


def has_power(exponent: float) -> bool:
    """True for the exponents that `power` knows."""
    return exponent in _POWERS


_POWERS: dict[float, Callable[[Builder, Vector], Vector]] = {
    -2.0: lambda build, x: 1.0 / (x * x),
    -1.0: lambda build, x: 1.0 / x,
    -0.5: lambda build, x: build.select(build.equal(x, -math.inf), 0.0, 1.0 / build.square_root(x + 0.0)),
    0.5: lambda build, x: build.square_root(x),  # as NumPy has it for -infinity and -0, not as a power of C
    1.0: lambda build, x: x,
    2.0: lambda build, x: x * x,
    3.0: lambda build, x: x * x * x,
    4.0: lambda build, x: (x * x) * (x * x),
}


def _reduced(build: Builder, x: Vector) -> tuple[Vector, Vector]:
    """`_parts` of x between the limits of float32."""
    return _parts(build, clip(build, x, _LEAST, _MOST))


def _parts(build: Builder, x: Vector) -> tuple[Vector, Vector]:
    """n and e^r - 1, of x = n ln(2) + r."""
    n = build.round(x * _LOG2E)
    r = build.fnma(n, _LN2_HIGH, x)
    r = build.fnma(n, _LN2_LOW, r)
    return n, build.fma(horner(build, r, _exp_coefficients()), r * r, r)


def _power_of_two(build: Builder, p: Vector) -> Vector:
    """2^p for p from -126 to 128, where it is infinite."""
    n = build.round(p)
    return _near(build, horner(build, p - n, _power_coefficients()), n)


def _near(build: Builder, value: Vector, n: Vector) -> Vector:
    """value * 2^n where both and the result are normal numbers: n is added to the bits of the exponent."""
    return build.add_integers(value, build.shift(build.to_integer(n), _FRACTION_BITS))


def _scaled(build: Builder, value: Vector, n: Vector) -> Vector:
    """value * 2^n. With AVX2 in two steps, as 2^n alone may be no number of float32."""
    if build.lanes == 16:
        return build.scaled(value, n)
    whole = build.to_integer(n)
    half = build.shift(whole, -1)
    for part in (half, build.subtract_integers(whole, half)):
        power = build.shift(build.add_integers(part, build.integer(_ONE_EXPONENT)), _FRACTION_BITS)
        value = value * power
    return value


def _log_erfc(build: Builder, m: Vector, factor: float = -1.0) -> Vector:
    """-ln(erfc(m)) times `factor`, for m from 0 to LIMIT."""
    coefficients = [factor * value for value in log_erfc_coefficients(np.dtype(np.float32))]
    t = build.fma(m, build.constant(2 / LIMIT), -1.0)
    return horner(build, t, coefficients) * m


@cache
def _exp_coefficients() -> tuple[float, ...]:
    """Of (e^r - 1 - r) / r^2 for |r| <= ln(2)/2: relative error of e^r 2e-9."""
    return _interpolated(lambda r: (math.expm1(r) - r) / r**2 if r else 0.5, -_LN2 / 2, _LN2 / 2, 4)


@cache
def _power_coefficients() -> tuple[float, ...]:
    """Of 2^f for |f| <= 1/2, exactly 1 for f = 0: relative error 8e-8."""
    return (*_interpolated(lambda f: (math.exp2(f) - 1) / f if f else _LN2, -0.5, 0.5, 4), 1.0)


@cache
def _atanh_coefficients(end: float, degree: int) -> tuple[float, ...]:
    """Of (2 atanh(s) / s - 2) / s^2 in s^2, which goes from 0 to `end`."""
    return _interpolated(lambda z: (2 * math.atanh(math.sqrt(z)) / math.sqrt(z) - 2) / z, 0.0, end, degree)


def _interpolated(function: Callable[[float], float], low: float, high: float, degree: int) -> tuple[float, ...]:
    """Coefficients of the Chebyshev interpolant, highest power first."""
    nodes = np.polynomial.chebyshev.chebpts1(degree + 1)
    points = (low + high) / 2 + nodes * (high - low) / 2
    series = np.polynomial.Chebyshev.fit(points, [function(point) for point in points], degree, [low, high])
    return tuple(float(value) for value in series.convert(kind=np.polynomial.Polynomial).coef[::-1])
