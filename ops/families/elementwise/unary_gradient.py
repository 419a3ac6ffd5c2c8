"""Gradients of the unary operators, as operators of their own or made of other operators; names are Caffe2's.

Rounding and signs are constant but for their steps, so they pass on no gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import dagexec.ops.families.elementwise.unary  # noqa: F401  registers the operators that these are gradients of
from dagexec.core.gradient import gradient_by, no_gradient
from dagexec.core.operator import Step
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.pointwise import scalar_pass
from dagexec.ops.base.pointwise_gradient import PointwiseGradient, pointwise_gradient

no_gradient("Sign", "Floor", "Ceil", "Round", "Not")


gradient_by("Exp", "Mul", ("dY", "Y"))
gradient_by("Log", "Div", ("dY", "X"))
gradient_by("Negative", "Negative", ("dY",))
gradient_by("Scale", "Scale", ("dY",))


FactorPasses = Callable[[Array, Array, Array], list[Step]]
"""The NumPy calls that compute the second array, a factor of dY or a divisor, from the first; the third is scratch."""


def _define(
    forward: str, reads: tuple[str, ...], doc: str, factor: FactorPasses, *, divide: bool = False, flops: float = 10
) -> None:
    """Register the gradient of `forward`: dX = dY * factor, or dY / factor."""
    combine = np.divide if divide else np.multiply

    def passes(_self: PointwiseGradient, value: Array, dy: Array, dx: Array, scratch: Scratch) -> list[Step]:
        work = scratch(0, value.shape)
        return [*factor(value, work, scratch(1, value.shape)), partial(combine, dy, work, out=dx)]

    members = {"passes": passes, "__doc__": f"Gradient of {forward}.", "__module__": __name__}
    cls = type(f"{forward}Gradient", (PointwiseGradient,), members)
    pointwise_gradient(forward, reads, f"dX = {doc}.", flops=flops)(cls)


def _one(array: Array) -> Array:
    return np.ones((), array.dtype)


def _of(ufunc: Callable[..., Any], scale: float = 1.0) -> FactorPasses:
    """scale * ufunc(value)."""

    def passes(value: Array, out: Array, _spare: Array) -> list[Step]:
        scaled = [] if scale == 1 else [scalar_pass(np.multiply, out, scale, out)]
        return [partial(ufunc, value, out=out), *scaled]

    return passes


def _twice(value: Array, out: Array, _spare: Array) -> list[Step]:
    return [scalar_pass(np.multiply, value, 2.0, out)]


def _cosine_squared(value: Array, out: Array, _spare: Array) -> list[Step]:
    return [partial(np.cos, value, out=out), partial(np.square, out, out=out)]


def _root_of_rest(scale: float) -> FactorPasses:
    """scale * sqrt(1 - x^2)."""

    def passes(value: Array, out: Array, spare: Array) -> list[Step]:
        return [
            *_one_minus_square(value, out, spare),
            partial(np.sqrt, out, out=out),
            scalar_pass(np.multiply, out, scale, out),
        ]

    return passes


def _one_minus_square(value: Array, out: Array, spare: Array) -> list[Step]:
    """(1 - x) (1 + x); as 1 - x^2 it would lose its accuracy near 1."""
    return [
        partial(np.subtract, _one(value), value, out=out),
        scalar_pass(np.add, value, 1.0, spare),
        partial(np.multiply, out, spare, out=out),
    ]


def _hypotenuse_with_one(value: Array, out: Array, _spare: Array) -> list[Step]:
    return [partial(np.hypot, value, _one(value), out=out)]


def _root_of_square_minus_one(value: Array, out: Array, spare: Array) -> list[Step]:
    """sqrt(x - 1) sqrt(x + 1), in which no square overflows."""
    return [
        scalar_pass(np.subtract, value, 1.0, out),
        partial(np.sqrt, out, out=out),
        scalar_pass(np.add, value, 1.0, spare),
        partial(np.sqrt, spare, out=spare),
        partial(np.multiply, out, spare, out=out),
    ]


def _square_plus_one(value: Array, out: Array, _spare: Array) -> list[Step]:
    return [partial(np.square, value, out=out), scalar_pass(np.add, out, 1.0, out)]


def _cube(scale: float) -> FactorPasses:
    """scale * x^3."""

    def passes(value: Array, out: Array, _spare: Array) -> list[Step]:
        return [
            partial(np.square, value, out=out),
            partial(np.multiply, out, value, out=out),
            scalar_pass(np.multiply, out, scale, out),
        ]

    return passes


def _bell(value: Array, out: Array, _spare: Array) -> list[Step]:
    """2 / sqrt(pi) * exp(-x^2)."""
    return [
        partial(np.square, value, out=out),
        partial(np.negative, out, out=out),
        partial(np.exp, out, out=out),
        scalar_pass(np.multiply, out, 2 / math.sqrt(math.pi), out),
    ]


_define("Sqr", ("X", "dY"), "2 * X * dY", _twice, flops=2)
_define("Cube", ("dY", "X"), "3 * X^2 * dY", _of(np.square, 3.0), flops=3)
_define("Abs", ("X", "dY"), "dY * sign(X), 0 where X = 0", _of(np.sign), flops=2)
_define("Sin", ("X", "dY"), "dY * cos(X)", _of(np.cos))
_define("Cos", ("X", "dY"), "-dY * sin(X)", _of(np.sin, -1.0))
_define("Tan", ("X", "dY"), "dY / cos(X)^2", _cosine_squared, divide=True)
_define("Asin", ("X", "dY"), "dY / sqrt(1 - X^2)", _root_of_rest(1.0), divide=True)
_define("Acos", ("X", "dY"), "-dY / sqrt(1 - X^2)", _root_of_rest(-1.0), divide=True)
_define("Atan", ("X", "dY"), "dY / (1 + X^2)", _square_plus_one, divide=True, flops=3)
_define("Sinh", ("dY", "X"), "dY * cosh(X)", _of(np.cosh))
_define("Cosh", ("dY", "X"), "dY * sinh(X)", _of(np.sinh))
_define("Asinh", ("X", "dY"), "dY / sqrt(X^2 + 1)", _hypotenuse_with_one, divide=True)
_define("Acosh", ("X", "dY"), "dY / sqrt(X^2 - 1)", _root_of_square_minus_one, divide=True)
_define("Atanh", ("X", "dY"), "dY / (1 - X^2)", _one_minus_square, divide=True, flops=4)
_define("Erf", ("X", "dY"), "dY * 2 / sqrt(pi) * exp(-X^2)", _bell, flops=14)
_define("Sqrt", ("Y", "dY"), "dY / (2 * Y)", _twice, divide=True, flops=5)
_define("Cbrt", ("dY", "Y"), "dY / (3 * Y^2)", _of(np.square, 3.0), divide=True, flops=6)
_define("Reciprocal", ("Y", "dY"), "-dY * Y^2", _of(np.square, -1.0), flops=3)
_define("Rsqrt", ("dY", "Y"), "-dY * Y^3 / 2", _cube(-0.5), flops=4)
