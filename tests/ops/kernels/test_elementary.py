"""Elementary functions by kernels: against float64, what is not finite, and bytes that depend on the number alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.expressions import PRIMITIVES
from dagexec.ops.kernels import elementary
from dagexec.ops.kernels.builder import Builder, Vector
from tests.ops.kernels.running import Array, applied, each_size

Double = npt.NDArray[np.float64]

NORMAL = 1.2e-38
"""The least normal number: smaller results may be 0."""


def sigmoid(x: Double) -> Double:
    return np.exp(-np.logaddexp(0, -x))


def softplus(x: Double) -> Double:
    return np.logaddexp(0, x)


FUNCTIONS: dict[str, tuple[Callable[[Builder, Vector], Vector], Callable[[Double], Double], float, float]] = {
    # a kernel, the formula, the relative error allowed, and the error of what is near 0, times the magnitude of x
    "exp": (elementary.exp, np.exp, 1.3e-7, 1e-45),
    "decay": (
        lambda build, x: elementary.decay(build, 0.0 - build.absolute(x)),
        lambda x: np.exp(-np.abs(x)),
        1.3e-7,
        0,
    ),
    "expm1": (elementary.expm1, np.expm1, 2e-7, 0),
    "log": (elementary.log, np.log, 1e-7, 0),
    "tanh": (elementary.tanh, np.tanh, 2.4e-7, 0),
    "sigmoid": (elementary.sigmoid, sigmoid, 2.4e-7, 0),
    "near sigmoid": (elementary.near_sigmoid, sigmoid, 0, 1.5e-7),
    "near swish": (elementary.near_swish, lambda x: x * sigmoid(x), 2e-7, 1.2e-7),
    "near swish -1.7": (
        lambda build, x: elementary.near_swish(build, x, -1.7),
        lambda x: x * sigmoid(-1.7 * x),
        2e-7,
        1.2e-7,
    ),
    "erf": (elementary.erf, PRIMITIVES["erf"].function, 4.5e-7, 0),
    "gelu": (elementary.gelu, lambda x: x / 2 * (1 + PRIMITIVES["erf"].function(x * math.sqrt(0.5))), 1.2e-7, 1e-7),
    "tanh gelu": (
        elementary.tanh_gelu,
        lambda x: x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)),
        3e-7,
        2e-7,
    ),
    "softplus": (elementary.softplus, softplus, 3e-7, 0),
    "mish": (elementary.mish, lambda x: x * np.tanh(softplus(x)), 4e-7, 0),
    "elu": (
        lambda build, x: elementary.elu(build, x, 1.3),
        lambda x: np.where(x > 0, x, 1.3 * np.expm1(np.minimum(x, 0))),
        3e-7,
        0,
    ),
    "leaky relu": (
        lambda build, x: elementary.leaky_relu(build, x, 0.3),
        lambda x: np.where(x > 0, x, 0.3 * x),
        2e-7,
        0,
    ),
    "hard sigmoid": (
        lambda build, x: elementary.hard_sigmoid(build, x, 0.2, 0.5),
        lambda x: np.clip(0.2 * x + 0.5, 0, 1),
        2e-7,
        1e-7,
    ),
}

LIMITS = {
    "near swish -1.7": (math.nan, -math.inf),
    **dict.fromkeys(("near swish", "gelu", "tanh gelu", "mish"), (math.inf, math.nan)),
}
"""Of products with a gate, at infinity and at minus infinity: NaN where the gate is 0, as IEEE has it."""


def points() -> Array:
    """Where functions change: around 0, in the ranges of float32, and at their ends."""
    sizes = np.geomspace(1e-44, 3e38, 4001)
    special = [0.0, -0.0, 88.72, 88.73, 89, -87.3, -87.4, -103.9, -104.1, 3.4e38, -3.4e38]
    parts = np.linspace(-110, 100, 12001), np.linspace(-2, 2, 6001), sizes, -sizes, special
    return np.concatenate(parts).astype(np.float32)


@each_size
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_its_formula(name: str, lanes: int) -> None:
    kernel, formula, relative, absolute = FUNCTIONS[name]
    x = points()
    with np.errstate(all="ignore"):
        expected = formula(x.astype(np.float64))
        found = applied(kernel, x, lanes).astype(np.float64)
        is_finite = np.abs(expected) < 3.4028235e38
        size = np.maximum(np.abs(expected) * relative, absolute * np.maximum(1, np.abs(x)))
        wrong = np.abs(found - expected) > size + NORMAL
        assert not (wrong & is_finite).any(), (x[wrong & is_finite][:3], found[wrong & is_finite][:3])
        rest = ~is_finite
        np.testing.assert_array_equal(found[rest], expected[rest].astype(np.float32))


@each_size
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_not_finite(name: str, lanes: int) -> None:
    kernel, formula, _, _ = FUNCTIONS[name]
    found = applied(kernel, np.array([math.inf, -math.inf, math.nan, -math.nan], np.float32), lanes)
    with np.errstate(all="ignore"):
        limits = LIMITS.get(name) or tuple(formula(np.array([math.inf, -math.inf])))
    np.testing.assert_allclose(found, [*limits, math.nan, math.nan], rtol=2e-7, atol=1e-15)


@each_size
@pytest.mark.parametrize("name", ["exp", "gelu", "log"])
def test_bytes_depend_on_the_number_alone(name: str, lanes: int) -> None:
    kernel = FUNCTIONS[name][0]
    x = points()[:203]
    whole = applied(kernel, x, lanes)
    for size in (0, 1, 7, 8, 9, 15, 16, 33, 40, 104, 202):
        assert applied(kernel, x[:size], lanes, 3).tobytes() == whole[:size].tobytes()
    assert applied(kernel, x[5:], lanes).tobytes() == whole[5:].tobytes()


@each_size
def test_powers_are_products_and_roots(lanes: int) -> None:
    x = np.array([-2, -0.0, 0, 0.5, 1, 3, math.inf, -math.inf, math.nan], np.float32)
    for exponent in (-2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 4.0):
        with np.errstate(all="ignore"):
            wide = x.astype(np.float64)
            expected = np.sqrt(wide) if exponent == 0.5 else np.power(wide, np.full(len(x), exponent))
        found = applied(lambda build, value, e=exponent: elementary.power(build, value, e) or value, x, lanes)  # type: ignore[misc]
        np.testing.assert_allclose(found, expected, rtol=2e-7)
    assert elementary.power(Builder(lanes), Builder(lanes).constant(1.0), 1.7) is None
