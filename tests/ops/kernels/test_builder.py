"""The builder: what each operation computes, loops and masks, and that values which do not fit are refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from dagexec.ops.kernels.builder import Builder, Mask, Scalar, Vector
from dagexec.ops.kernels.expressions import DOWN, TO_ZERO, UP
from dagexec.ops.kernels.registers import OutOfRegistersError
from dagexec.platform.assembly.instructions import GREATER, LESS, NOT_GREATER, ZERO
from dagexec.platform.assembly.native import REGISTERS
from tests.ops.kernels.running import Array, applied, call, each_size

X = np.array([1.5, -2.25, 0.0, -0.0, 3.5, 1e30, -1e-30, 2.5, -7.0, 0.5, math.inf, math.nan], np.float32)


def three_ways(build: Builder, x: Vector) -> Vector:
    """Sums of products by each form of the instruction: operands that are used again and that are not, constants."""
    a, b, c = x + 1.0, x * 0.5, x - 3.0
    first = build.fma(a, b, c)  # c is used again
    second = build.fma(a, b, first)  # a is used again
    third = build.fnma(build.fma(second, 2.0, c), a, second)
    fourth = build.fma(build.fma(third, third, 1.5), -0.25, build.fnma(third, 3.0, c))
    fifth = build.fma(c, c, c)
    return build.fma(fourth, fifth, build.fma(third, second, first))


def three_ways_in_numpy(x: Array) -> Array:
    v = x.astype(np.float64)
    a, b, c = v + 1, v * 0.5, v - 3
    first = a * b + c
    second = a * b + first
    third = second - (second * 2 + c) * a
    fourth = (third * third + 1.5) * -0.25 + (c - third * 3)
    return fourth * (c * c + c) + (third * second + first)


OPERATIONS: dict[str, tuple[Callable[[Builder, Vector], Vector], Callable[[Array], Array]]] = {
    "arithmetic": (lambda build, x: 1.0 - (x + 2.0) * 3.0 / (x - 0.25), lambda x: 1 - (x + 2) * 3 / (x - 0.25)),
    "two vectors": (lambda build, x: (x + x) * (x - x * x), lambda x: (x + x) * (x - x * x)),
    "constants on the left": (lambda build, x: 2.0 / x + 3.0 * x, lambda x: 2 / x + 3 * x),
    "maximum": (lambda build, x: build.minimum(2.0, build.maximum(-1.0, x)), lambda x: np.clip(x, -1, 2)),
    "maximum of NaN": (lambda build, x: build.maximum(x, build.constant(1)), lambda x: np.fmax(x, 1)),
    "square root": (lambda build, x: build.square_root(x), np.sqrt),
    "nearest": (lambda build, x: build.round(x), np.rint),
    "down": (lambda build, x: build.round(x, DOWN), np.floor),
    "up": (lambda build, x: build.round(x, UP), np.ceil),
    "to zero": (lambda build, x: build.round(x, TO_ZERO), np.trunc),
    "magnitude": (lambda build, x: build.absolute(x), np.abs),
    "sign": (
        lambda build, x: build.either(build.constant(3), build.sign_of(x)),
        lambda x: np.copysign(np.float32(3), x),
    ),
    "less": (lambda build, x: build.select(build.less(x, 1.0), x, 9.0), lambda x: np.where(x < 1, x, 9)),
    "equal": (lambda build, x: build.select(build.equal(x, 2.5), 1.0, x), lambda x: np.where(x == 2.5, 1, x)),
    "is NaN": (lambda build, x: build.select(build.is_nan(x), -1.0, x), lambda x: np.where(np.isnan(x), -1, x)),
    "integers": (
        lambda build, x: build.from_integer(
            build.shift(
                build.subtract_integers(build.shift(build.to_integer(clipped(build, x)), 3), build.integer(5)), -1
            )
        ),
        lambda x: ((np.rint(np.clip(np.nan_to_num(x), -9, 9)).astype(int) * 8 - 5) >> 1).astype(np.float32),
    ),
}


def integers(build: Builder, x: Vector) -> Vector:
    return build.from_integer(build.shift(build.subtract_integers(build.shift(x, 3), build.integer(5)), -1))


def clipped(build: Builder, x: Vector) -> Vector:
    return build.maximum(-9.0, build.minimum(9.0, build.select(build.is_nan(x), 0.0, x)))


@each_size
@pytest.mark.parametrize("together", [1, 2, 3])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_that_of_numpy(name: str, together: int, lanes: int) -> None:
    kernel, expected = OPERATIONS[name]
    x = np.concatenate([X, X[:7], X])
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(applied(kernel, x, lanes, together), expected(x), rtol=2e-7)


@each_size
def test_sums_of_products_are_right_in_every_form(lanes: int) -> None:
    x = np.linspace(-2, 2, 37).astype(np.float32)
    for together in (1, 2):
        found = applied(three_ways, x, lanes, together)
        np.testing.assert_allclose(found, three_ways_in_numpy(x), rtol=1e-4, atol=1e-4)


@each_size
@pytest.mark.parametrize("size", [0, 1, 5, 8, 16, 31, 96, 101])
def test_sums_over_a_loop_and_over_lanes(size: int, lanes: int) -> None:
    x = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    build = Builder(lanes)
    source, target, count = build.arguments(3)
    total, most = build.constant(0.0), build.constant(-math.inf)

    def body(place: Scalar, mask: Mask | None) -> None:
        value = build.load(source, place, mask=mask)
        total.set(total + value)
        most.set(build.maximum(most, value if mask is None else build.select(mask, value, -math.inf)))

    build.each(count, body, 2)
    build.store_first(build.over_lanes(total, lambda a, b: a + b), target)
    build.store_first(build.over_lanes(most, build.maximum), target, offset=4)
    found = np.full(3, 7, np.float32)
    call(build, x.ctypes.data, found.ctypes.data, size)
    assert abs(found[0] - x.astype(np.float64).sum()) < 1e-4
    assert found[1] == (x.max() if size else -math.inf)
    assert found[2] == 7


@each_size
def test_numbers_and_loops(lanes: int) -> None:
    """A table of rows, each with a place, is added up: numbers in memory, counted loops, conditions, addresses."""
    build = Builder(lanes)
    fields, target = build.arguments(2)
    table, places, rows, width = build.numbers(fields, 4)
    kept = build.zero()
    with build.range(rows << 3, 8) as row:
        place = build.number(places + row)
        with build.when(place, GREATER, -1), build.when(place, LESS, width):
            value = build.broadcast(table, place, scale=4)
            build.store_first(value * 2.0, target, kept, scale=4)
            kept.set(kept + 1)
        table.set(table + width * 4)
    with build.when(kept, ZERO, 0):
        build.store_first(build.constant(-1), target)
    step = build.copied(kept)
    with build.repeat(kept):
        step.set(((step - 1) & 0xFF) * 3 >> 1)
        with build.when(step - kept, NOT_GREATER, step * step):
            step.set(rows - step)
    build.store_first(build.from_integer(build.repeated(step)), target, kept, scale=4)
    values = np.arange(24, dtype=np.float32).reshape(4, 6)
    for chosen in ([0, 5, 2, 1], [-1, 3, 6, 0], [7, -5, 6, -1]):
        index = np.array(chosen, np.int64)
        numbers = np.array([values.ctypes.data, index.ctypes.data, 4, 6], np.int64)
        found = np.full(6, 7, np.float32)
        call(build, numbers.ctypes.data, found.ctypes.data)
        right = [2 * values[row, place] for row, place in enumerate(chosen) if 0 <= place < 6]
        expected, count = len(right), len(right)
        for _ in range(count):
            expected = ((expected - 1) & 0xFF) * 3 >> 1
            if expected - count <= expected * expected:
                expected = 4 - expected
        assert found.tolist()[: count + 1] == [*right, expected]
        assert (found[max(1, count + 1) :] == 7).all()


@each_size
def test_values_that_do_not_fit_are_refused(lanes: int) -> None:
    registers = REGISTERS[lanes]
    for count in (registers, registers + 1):
        build = Builder(lanes)
        source, target = build.arguments(2)
        values = [build.load(source, offset=4 * number) for number in range(count)]
        for number, value in enumerate(reversed(values)):
            build.store(value, target, offset=4 * number)
        if count == registers:
            x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
            call(build, x.ctypes.data, y.ctypes.data)
            assert y[:count].tolist() == x[:count][::-1].tolist()
        else:
            with pytest.raises(OutOfRegistersError, match="more vector registers than there are"):
                build.function()


@each_size
def test_what_the_caller_keeps_is_preserved(lanes: int) -> None:
    """A kernel that needs all general registers gives back those of its caller."""
    build = Builder(lanes)
    source, target = build.arguments(2)
    numbers = build.numbers(source, 13)
    for number, value in enumerate(numbers):
        build.store_first(build.from_integer(build.repeated(value)), target, offset=4 * number)
    values, found = np.arange(13, dtype=np.int64), np.zeros(13, np.float32)
    for _ in range(3):
        call(build, values.ctypes.data, found.ctypes.data)
    assert found.tolist() == list(range(13))
