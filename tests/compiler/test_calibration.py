"""Ranges found over sample inputs, and what 8 bits leave of values in them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.compiler.passes.calibration import ValueRange, calibrate, fake_quantized, quantized_weights, run_each
from dagexec.errors import FeedError
from tests.compiler.passes.models import feeds_for, model_of, normal, op, outputs_of

Array = npt.NDArray[Any]
ends = st.floats(-1e6, 1e6, width=32)


@given(ends, ends)
def test_zero_is_exact_and_the_ends_are_within_half_a_step(one: float, other: float) -> None:
    span = ValueRange(min(one, other), max(one, other))
    scale, zero = span.parameters()
    assert scale > 0
    assert fake_quantized(np.zeros(1, np.float32), span)[0] == 0
    for value in (min(span.low, 0.0), max(span.high, 0.0)):
        found = float(fake_quantized(np.array([value], np.float32), span)[0])
        assert abs(found - value) <= 0.5001 * float(scale) + 1e-30
    assert 0 <= int(zero) <= 255


def test_a_range_of_nothing_but_zero_has_scale_one() -> None:
    assert ValueRange(0.0, 0.0).parameters() == (1.0, 0)
    assert ValueRange(0.0, 1e-45).parameters() == (1.0, 0)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8), st.integers(0, 100))
def test_weights_are_within_half_a_step_of_their_row(rows: int, columns: int, seed: int) -> None:
    weights = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32) * 3
    weights[0] = 0
    integers, scales = quantized_weights(weights)
    assert np.abs(integers).max() <= 127
    assert scales[0] == 1
    assert (np.abs(integers * scales[:, None] - weights) <= 0.5001 * scales[:, None]).all()
    assert all(np.abs(row).max() == 127 for row in integers[1:])


MODEL = model_of([op("Relu", ["x"], ["h"]), op("Negative", ["h"], ["y"])], inputs={"x": (None, 3)})
SAMPLES = [{"x": normal(2, 3)}, {"x": normal(5, 3) * 2}, {"x": normal(5, 3)}]


def test_ranges_are_the_extremes_of_all_samples_and_zero() -> None:
    found = calibrate(MODEL, SAMPLES, {"x", "h", "y"})
    whole = np.concatenate([sample["x"] for sample in SAMPLES])
    assert found["x"] == ValueRange(float(whole.min()), float(whole.max()))
    assert found["h"] == ValueRange(0.0, float(whole.max()))
    assert found["y"] == ValueRange(-float(whole.max()), 0.0)
    above = calibrate(MODEL, [{"x": np.full((1, 3), 2, np.float32)}], {"x"})
    assert above["x"] == ValueRange(0.0, 2.0)


def test_constant_values_have_a_range() -> None:
    model = model_of([op("Copy", ["x"], ["y"])], inputs={"x": (4, 4)})
    for value in (0.0, 2.0):
        span = calibrate(model, [{"x": np.full((4, 4), value, np.float32)}], {"y"})["y"]
        assert fake_quantized(np.float32([value]), span)[0] == pytest.approx(value, abs=0.01)


def test_operators_are_told_with_what_they_read_and_wrote() -> None:
    operators = [op("Relu", ["x"], ["h"]), op("Relu", ["h"], ["h"]), op("Add", ["h", "h"], ["y"])]
    model = model_of(operators, inputs={"x": (2, 3)})
    seen: list[tuple[int, str, list[Array], list[Array]]] = []
    samples = [feeds_for(model, seed) for seed in range(3)]
    run_each(
        model, samples, lambda index, definition, inputs, outputs: seen.append(
            (index, definition.type, [array.copy() for array in inputs], [array.copy() for array in outputs])
        )
    )  # fmt: skip
    assert [(index, kind) for index, kind, _, _ in seen] == [(0, "Relu"), (1, "Relu"), (2, "Add")] * 3
    for number, sample in enumerate(samples):
        np.testing.assert_array_equal(seen[3 * number][2][0], sample["x"])
        np.testing.assert_array_equal(seen[3 * number + 2][3][0], outputs_of(model, sample)["y"])


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_an_error_that_names_the_blob(value: float) -> None:
    sample = {"x": np.full((1, 3), value, np.float32)}
    with pytest.raises(FeedError, match="blob 'x' is not finite in a calibration run"):
        calibrate(MODEL, [sample], {"x"})


def test_what_is_missing_is_an_error() -> None:
    with pytest.raises(FeedError, match="int8 needs sample inputs for calibration; found none"):
        calibrate(MODEL, [], {"h"})
    with pytest.raises(FeedError, match="no calibration run produced 'nothing'"):
        calibrate(MODEL, SAMPLES, {"nothing"})
    with pytest.raises(FeedError, match=r"missing input\(s\) \['x'\]"):
        calibrate(MODEL, [{}], {"h"})
