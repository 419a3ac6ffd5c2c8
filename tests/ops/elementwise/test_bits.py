"""Remainders against Python's integers; bitwise logic is in `test_formulas`."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import ArgumentError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(5)


@pytest.mark.parametrize("follow", [0, 1])
@pytest.mark.parametrize("divisor", [3, -3, 7, -1])
def test_remainders_of_integers(divisor: int, follow: int) -> None:
    x = np.arange(-9, 10, dtype=np.int64)
    [y] = run_operator("Mod", [x], divisor=divisor, sign_follow_divisor=follow)
    expected = [value % divisor if follow else int(math.fmod(value, divisor)) for value in range(-9, 10)]
    np.testing.assert_array_equal(y, expected)


def test_remainders_of_large_integers_are_exact() -> None:
    divisor = 3495612017404364603
    [y] = run_operator("Mod", [np.array([-6527, -(2**63)])], divisor=divisor, sign_follow_divisor=1)
    assert y.tolist() == [-6527 % divisor, -(2**63) % divisor]


@pytest.mark.parametrize("follow", [0, 1])
def test_remainders_by_an_input_broadcast(follow: int) -> None:
    x, divisor = RNG.normal(0, 5, (4, 3)), np.array([1.5, -2.0, 0.75])
    [y] = run_operator("Mod", [x, divisor], sign_follow_divisor=follow)
    expected = [[(v % d if follow else math.fmod(v, d)) for v, d in zip(row, divisor, strict=True)] for row in x]
    np.testing.assert_allclose(y, expected, rtol=1e-13)


def test_the_remainder_of_an_integer_by_0_is_0() -> None:
    [y] = run_operator("Mod", [np.array([7, -7]), np.array([0, 2])])
    np.testing.assert_array_equal(y, [0, -1])


@pytest.mark.parametrize("arguments", [{}, {"divisor": 0}, {"divisor": 2**40}])
def test_a_divisor_that_is_none_is_refused(arguments: dict[str, int]) -> None:
    with pytest.raises(ArgumentError, match="divisor"):
        run_operator("Mod", [np.zeros(2, np.int32)], **arguments)


def test_bits_of_floats_are_refused() -> None:
    with pytest.raises(ShapeError, match="found float32"):
        run_operator("BitwiseAnd", [np.zeros(2, np.float32), np.zeros(2, np.float32)])
