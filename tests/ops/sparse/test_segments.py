"""Segments of rows against loops over them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.core.gradient import gradient
from dagexec.errors import GradientError, OperatorError
from tests.ops.running import operator_def, run_operator

RNG = np.random.default_rng(21)
LENGTHS = np.array([2, 0, 3, 1], np.int32)
FLOATS = [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)]


def by_loop(rows: np.ndarray, kind: str) -> np.ndarray:
    ends = np.cumsum(LENGTHS)
    pieces = [rows[end - length : end] for end, length in zip(ends, LENGTHS, strict=True)]
    reduce = {"Sum": np.sum, "Mean": np.mean, "Max": np.max}[kind]
    return np.array([reduce(piece, axis=0) if len(piece) else np.zeros(rows.shape[1:]) for piece in pieces])


@pytest.mark.parametrize(("dtype", "tolerance"), FLOATS)
@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max"])
def test_each_segment_is_reduced(kind: str, dtype: Any, tolerance: float) -> None:
    data = RNG.normal(size=(6, 2, 3)).astype(dtype)
    [found] = run_operator(f"Lengths{kind}", [data, LENGTHS])
    assert found.dtype == dtype
    expected = by_loop(data.astype(np.float64), kind)
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["Sum", "Mean", "Max"])
@pytest.mark.parametrize("indices", [np.int32, np.int64])
def test_rows_are_picked_by_indices_first(kind: str, indices: Any) -> None:
    data, picked = RNG.normal(size=(4, 3)), RNG.integers(0, 4, 6).astype(indices)
    [found] = run_operator(f"SparseLengths{kind}", [data, picked, LENGTHS])
    np.testing.assert_allclose(found, by_loop(data[picked], kind), rtol=1e-12)


def test_rows_are_weighted() -> None:
    data, weights, picked = RNG.normal(size=(4, 3)), RNG.normal(size=6), RNG.integers(0, 4, 6)
    [found] = run_operator("SparseLengthsWeightedSum", [data, weights, picked, LENGTHS])
    np.testing.assert_allclose(found, by_loop(data[picked] * weights[:, None], "Sum"), rtol=1e-12)
    rows = RNG.normal(size=(6, 3))
    [found] = run_operator("LengthsWeightedSum", [rows, weights, LENGTHS])
    np.testing.assert_allclose(found, by_loop(rows * weights[:, None], "Sum"), rtol=1e-12)


def test_of_float16_the_sparse_ones_give_float32() -> None:
    data = RNG.normal(size=(4, 3)).astype(np.float16)
    [found] = run_operator("SparseLengthsMean", [data, np.array([0, 1]), np.array([2], np.int32)])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found[0], data[:2].astype(np.float64).mean(0), rtol=1e-6)


def test_lengths_in_other_words() -> None:
    assert run_operator("LengthsToSegmentIds", [LENGTHS])[0].tolist() == [0, 0, 2, 2, 2, 3]
    assert run_operator("LengthsToRanges", [LENGTHS])[0].tolist() == [[0, 2], [2, 0], [2, 3], [5, 1]]
    [weights] = run_operator("LengthsToWeights", [LENGTHS], power=1.0)
    np.testing.assert_allclose(weights, [1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 1], rtol=1e-6)
    assert run_operator("SegmentIdsToLengths", [np.array([0, 0, 2, 2, 2, 3])])[0].tolist() == LENGTHS.tolist()


def test_segments_are_padded_to_one_length() -> None:
    data = np.arange(6, dtype=np.float32)
    [found] = run_operator("LengthsPad", [data, LENGTHS], target_length=3, padding_value=-1.0)
    assert found.reshape(4, 3).tolist() == [[0, 1, -1], [-1, -1, -1], [2, 3, 4], [5, -1, -1]]


@pytest.mark.parametrize(
    ("op_type", "inputs", "problem"),
    [
        ("LengthsSum", [np.zeros((5, 2)), LENGTHS], "add up to 5 rows, found 6"),
        ("LengthsSum", [np.zeros((1, 2)), np.array([2, -1], np.int32)], "must be at least 0"),
        ("SparseLengthsSum", [np.zeros((2, 2)), np.array([2]), np.array([1], np.int32)], r"index 2 .* in \[0, 2\)"),
        ("SegmentIdsToLengths", [np.array([1, 0])], "not decrease"),
        ("LengthsToSegmentIds", [np.array([-1], np.int32)], "at least 0, found -1"),
    ],
)
def test_segments_that_are_none_are_refused(op_type: str, inputs: list[np.ndarray], problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        run_operator(op_type, list(inputs))


def test_the_maximum_of_segments_has_no_gradient() -> None:
    with pytest.raises(GradientError, match="LengthsMax has no gradient"):
        gradient(operator_def("LengthsMax", ["x", "lengths"], ["y"]), ["y_grad"])
