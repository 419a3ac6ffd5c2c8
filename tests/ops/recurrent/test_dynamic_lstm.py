"""DynamicQuantLSTM against a simulation in float64, on NumPy's engine and on oneDNN's."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.errors import OperatorError, ShapeError
from dagexec.testing import run_operator

Array = npt.NDArray[Any]
STEPS, BATCH, FEATURES, HIDDEN = 5, 3, 7, 6
ENGINES = ("", "ONEDNN")


def quantized(values: Array) -> Array:
    """What 8 bits leave of values, by their range with 0."""
    wide = values.astype(np.float32)
    low, high = min(np.float32(0), wide.min()), max(np.float32(0), wide.max())
    step = (high - low) / np.float32(255) or np.float32(1)
    zero = np.rint(-low / step)
    return (np.clip(np.rint(wide / step) + zero, 0, 255) - zero).astype(np.float64) * float(step)


def simulated(x: Array, w: Array, r: Array, b: Array, lengths: Array, state: Array, cell: Array, backward: bool) -> Any:
    """Y, h and c of one direction; weights are real numbers, gates input, output, forget, cell."""
    sums, h, c = quantized(x) @ w.T + b, state, cell
    y = np.zeros((STEPS, BATCH, HIDDEN))
    for t in range(STEPS)[:: -1 if backward else 1]:
        i, o, f, g = np.split(sums[t] + quantized(h) @ r.T, 4, axis=1)
        after = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
        running = (t < lengths)[:, None]
        y[t] = np.where(running, np.tanh(after) / (1 + np.exp(-o)), 0)
        h, c = np.where(running, y[t], h), np.where(running, after, c)
    return y, h, c


def arrays(per_gate: bool, hidden: int = HIDDEN) -> list[Array]:
    """X, W, R, B, lengths, h, c and the scales of W and R, for two directions."""
    random = np.random.default_rng(5)
    weights = [random.integers(-127, 128, (2, 4 * hidden, size)).astype(np.int8) for size in (FEATURES, hidden)]
    floats = [(STEPS, BATCH, FEATURES), (2, 8 * hidden), (2, BATCH, hidden), (2, BATCH, hidden)]
    x, b, h, c = (random.standard_normal(shape).astype(np.float32) for shape in floats)
    scales = [random.uniform(0.001, 0.006, (2, 4 * hidden) if per_gate else 2).astype(np.float32) for _ in range(2)]
    return [x, *weights, b, np.array([STEPS, 2, 4], np.int32), h, c, *scales]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("per_gate", [False, True])
def test_x_and_the_state_of_each_step_are_quantized_by_their_ranges(engine: str, per_gate: bool) -> None:
    given = arrays(per_gate)
    flags = {"bias": 1, "sequence_lengths": 1, "initial_state": 1, "direction": "bidirectional"}
    found = run_operator("DynamicQuantLSTM", given, outputs=3, engine=engine, **flags)
    x, w, r, b, lengths, h, c, w_scale, r_scale = given
    for number in range(2):
        real_w, real_r = (
            weights[number] * scale[number].astype(np.float64).reshape(-1, 1)
            for weights, scale in ((w, w_scale), (r, r_scale))
        )
        bias = b[number].astype(np.float64).reshape(2, -1).sum(axis=0)
        expected = simulated(x, real_w, real_r, bias, lengths, h[number], c[number], backward=number == 1)
        for one, other in zip((found[0][:, number], found[1][number], found[2][number]), expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_without_bias_lengths_and_state_more_terms_than_float32_sums_exactly(engine: str) -> None:
    random = np.random.default_rng(6)
    x = random.uniform(0, 1, (1, 1, 700)).astype(np.float32)
    w = np.full((1, 4, 700), 127, np.int8)
    w[0, :, ::2] = -126
    scales = [np.array([1e-4], np.float32)] * 2
    (y,) = run_operator("DynamicQuantLSTM", [x, w, np.zeros((1, 4, 1), np.int8), *scales], engine=engine)
    gates = quantized(x)[0] @ w[0].T * 1e-4
    opened = 1 / (1 + np.exp(-gates))
    np.testing.assert_allclose(y.reshape(-1), opened[:, 1] * np.tanh(opened[:, 0] * np.tanh(gates[:, 3])), rtol=1e-5)


def test_a_step_of_zeros_and_one_of_nan_are_integers_too() -> None:
    x, w, r, *_, w_scale, r_scale = arrays(per_gate=False)
    x[1] = np.nan
    y, zeros = (run_operator("DynamicQuantLSTM", [one, w, r, w_scale, r_scale], direction="bidirectional")[0]
                for one in (x, np.zeros_like(x)))  # fmt: skip
    assert np.isfinite(y).all()
    assert not zeros.any()


@pytest.mark.parametrize(
    ("index", "value", "error", "message"),
    [
        (7, np.ones(3, np.float32), ShapeError, "one entry a direction"),
        (8, np.zeros(2, np.float32), OperatorError, "finite and above 0"),
        (1, np.zeros((2, 24, FEATURES), np.float32), ShapeError, "int8"),
    ],
)
def test_what_makes_no_sense_is_named(index: int, value: Array, error: type[Exception], message: str) -> None:
    given = arrays(per_gate=False)
    given[index] = value
    flags = {"bias": 1, "sequence_lengths": 1, "initial_state": 1, "direction": "bidirectional"}
    with pytest.raises(error, match=message):
        run_operator("DynamicQuantLSTM", given, outputs=3, **flags)
