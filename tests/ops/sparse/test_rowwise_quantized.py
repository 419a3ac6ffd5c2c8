"""Rows quantized with a scale and a bias each: layout of the bytes, how near the numbers are, and sums of such rows."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(22)
X = RNG.normal(size=(3, 8)).astype(np.float32)
TAIL = {8: np.float32, 4: np.float16, 2: np.float16}


def unfused(fused: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes, bit by bit, and the pairs of scale and bias."""
    tail = 2 * np.dtype(TAIL[bits]).itemsize
    ones = np.unpackbits(fused[:, :-tail], axis=1, bitorder="little").reshape(len(fused), -1, bits)
    codes = (ones * 2 ** np.arange(bits)).sum(axis=-1)
    return codes, fused[:, -tail:].copy().view(TAIL[bits]).astype(np.float64)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_a_fused_row_is_codes_scale_and_bias(bits: int) -> None:
    [fused] = run_operator(f"FloatToFused{bits}BitRowwiseQuantized", [X])
    assert fused.shape == (3, 8 * bits // 8 + 2 * np.dtype(TAIL[bits]).itemsize)
    codes, ends = unfused(fused, bits)
    assert codes.min() == 0
    assert codes.max() == 2**bits - 1
    numbers = codes * ends[:, :1] + ends[:, 1:]
    steps = ends[:, :1] * np.ones_like(X)
    assert (np.abs(numbers - X) <= 0.51 * steps + 2e-3).all()
    [back] = run_operator(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    np.testing.assert_allclose(back, numbers, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_rows_of_one_number_and_of_equal_numbers_come_back(bits: int) -> None:
    x = np.full((2, 4), 3.5, np.float32)
    [fused] = run_operator(f"FloatToFused{bits}BitRowwiseQuantized", [x])
    np.testing.assert_allclose(run_operator(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])[0], x, rtol=1e-3)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("kind", ["Sum", "Mean", "WeightedSum"])
def test_segments_of_quantized_rows_are_those_of_their_numbers(kind: str, bits: int) -> None:
    [fused] = run_operator(f"FloatToFused{bits}BitRowwiseQuantized", [X])
    [numbers] = run_operator(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    rest = [np.array([0, 2, 2, 1]), np.array([3, 0, 1], np.int32)]
    weights = [RNG.normal(size=4).astype(np.float32)] if kind == "WeightedSum" else []
    [found] = run_operator(f"SparseLengths{kind}Fused{bits}BitRowwise", [fused, *weights, *rest])
    [expected] = run_operator(f"SparseLengths{kind}", [numbers, *weights, *rest])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_scale_and_bias_may_be_apart() -> None:
    codes, ends = run_operator("FloatToRowwiseQuantized8Bits", [X], 2)
    [back] = run_operator("Rowwise8BitQuantizedToFloat", [codes, ends])
    np.testing.assert_allclose(back, codes * ends[:, :1] + ends[:, 1:], rtol=1e-6)
    assert (np.abs(back - X) <= 0.51 * ends[:, :1]).all()
    picked, lengths = np.array([2, 0]), np.array([2], np.int32)
    [found] = run_operator("SparseLengthsSum8BitsRowwise", [codes, picked, lengths, ends])
    np.testing.assert_allclose(found[0], back[2] + back[0], rtol=1e-5)


def test_rows_are_gathered_as_numbers() -> None:
    [fused] = run_operator("FloatToFused8BitRowwiseQuantized", [X])
    [numbers] = run_operator("Fused8BitRowwiseQuantizedToFloat", [fused])
    np.testing.assert_array_equal(run_operator("GatherFused8BitRowwise", [fused, np.array([2, 0])])[0], numbers[[2, 0]])


def test_rows_that_are_none_are_refused() -> None:
    with pytest.raises(ShapeError, match="at least the 8 bytes of scale and bias"):
        run_operator("Fused8BitRowwiseQuantizedToFloat", [np.zeros((2, 7), np.uint8)])
    with pytest.raises(ShapeError, match="a multiple of 4 numbers, found 3"):
        run_operator("FloatToFused2BitRowwiseQuantized", [np.zeros((2, 3), np.float32)])


def searched(row: np.ndarray, bits: int) -> tuple[float, float]:
    """Scale and bias by the greedy search, written out for one row: 200 steps, of which 32 are taken at most."""
    half = lambda value: np.float32(np.float16(value))  # noqa: E731

    def parts(low: np.float32, high: np.float32) -> tuple[np.float32, np.float32]:
        bias = half(low)
        return half((high - bias) / np.float32(2**bits - 1)), bias

    def error(low: np.float32, high: np.float32) -> float:
        scale, bias = parts(low, high)
        codes = np.clip(np.round((row - bias) / scale), 0, 2**bits - 1)
        return float(np.sqrt(((row - (codes * scale + bias)).astype(np.float64) ** 2).sum()))

    low, high = row.min(), row.max()
    step = (high - low) / np.float32(200)
    best, best_error, current = (low, high), error(low, high), error(low, high)
    for _ in range(40):
        if low + step * np.float32(168) >= high:
            break
        left, right = error(low + step, high), error(low, high - step)
        if current < min(left, right, best_error):
            best, best_error = (low, high), current
        low, high, current = (low + step, high, left) if left < right else (low, high - step, right)
    scale, bias = parts(*best)
    return float(scale), float(bias)


@pytest.mark.parametrize("bits", [4, 2])
def test_engine_greedy_narrows_the_range_of_a_row_where_that_is_nearer(bits: int) -> None:
    x = np.concatenate([np.random.default_rng(5).normal(size=(6, 64)), X.repeat(8, 1)]).astype(np.float32)
    op_type = f"FloatToFused{bits}BitRowwiseQuantized"
    [fused], [plain] = run_operator(op_type, [x], engine="GREEDY"), run_operator(op_type, [x])
    _, ends = unfused(fused, bits)
    np.testing.assert_array_equal(ends, [searched(row, bits) for row in x])
    errors = [
        np.square(run_operator(f"Fused{bits}BitRowwiseQuantizedToFloat", [one])[0] - x).sum(1) for one in (fused, plain)
    ]
    assert (errors[0] <= errors[1]).all()
    assert (errors[0] < errors[1]).any()
    np.testing.assert_array_equal(run_operator(op_type, [x[2:3]], engine="GREEDY")[0], fused[2:3])
