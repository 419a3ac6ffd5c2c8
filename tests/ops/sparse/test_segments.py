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


IDS = np.array([0, 0, 1, 2, 2, 2])
REDUCED = {
    "Sum": np.sum,
    "Mean": np.mean,
    "Max": np.max,
    "LogSumExp": lambda rows, axis: np.log(np.sum(np.exp(rows), axis)),
    "LogMeanExp": lambda rows, axis: np.log(np.mean(np.exp(rows), axis)),
}


@pytest.mark.parametrize("name", REDUCED)
def test_ranges_of_rows_with_one_number_are_reduced(name: str) -> None:
    data = RNG.normal(size=(6, 2, 3)).astype(np.float32)
    [found] = run_operator(f"SortedSegmentRange{name}", [data, IDS])
    expected = [REDUCED[name](data[number == IDS].astype(np.float64), axis=0) for number in range(3)]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_exponentials_of_large_numbers_do_not_overflow() -> None:
    data = np.array([1000, 1000, -1000, -np.inf], np.float32)
    [found] = run_operator("SortedSegmentRangeLogSumExp", [data, np.array([0, 0, 1, 2], np.int32)])
    np.testing.assert_allclose(found, [1000 + np.log(2), -1000, -np.inf], rtol=1e-6)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["Sum", "Mean", "WeightedSum"])
@pytest.mark.parametrize(
    ("kind", "ids", "arguments", "count"),
    [
        ("Sorted", IDS, {}, 3),
        ("Unsorted", np.array([3, 0, 3, 0, 1, 1], np.int32), {}, 4),
        ("Unsorted", np.array([3, 0, 3, 0, 1, 1], np.int32), {"num_segments": 6}, 6),
    ],
)
def test_rows_are_reduced_by_their_number(
    kind: str, ids: np.ndarray, arguments: dict[str, Any], count: int, name: str, sparse: bool
) -> None:
    data, weights, picked = RNG.normal(size=(6, 3)), RNG.normal(size=6), RNG.integers(0, 6, 6)
    rows = data[picked] if sparse else data
    given = [weights] if name == "WeightedSum" else []
    if given:
        rows = rows * weights[:, None]
    indices = [picked] if sparse else []
    [found] = run_operator(f"{'Sparse' * sparse}{kind}Segment{name}", [data, *given, *indices, ids], **arguments)
    divisor = [max(1, (number == ids).sum()) if name == "Mean" else 1 for number in range(count)]
    expected = [rows[number == ids].sum(axis=0) / divisor[number] for number in range(count)]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_weights_by_place_in_a_segment() -> None:
    data, weights, picked = RNG.normal(size=(4, 3)), RNG.normal(size=3), RNG.integers(0, 4, 6)
    [found] = run_operator("SparseLengthsPositionalWeightedSum", [data, weights, picked, LENGTHS])
    rows = data[picked] * weights[[0, 1, 0, 1, 2, 0]][:, None]
    np.testing.assert_allclose(found, by_loop(rows, "Sum"), rtol=1e-12)


@pytest.mark.parametrize(
    ("op_type", "inputs", "arguments", "expected"),
    [
        ("LengthsToOffsets", [[1, 3, 0, 2]], {}, [0, 1, 4, 4]),
        ("LengthsToOffsets", [[1, 3, 0, 2]], {"include_last_offset": 1}, [0, 1, 4, 4, 6]),
        ("LengthsToShape", [[10, 10, 10]], {}, [3, 10]),
        ("LengthsSplit", [[9, 4, 5]], {"n_split": 3}, [3, 3, 3, 2, 1, 1, 2, 2, 1]),
        ("LengthsSplit", [[2, 0], [3]], {"n_split": 1}, [1, 1, 0, 0, 0, 0]),
        ("LengthsTile", [[7, 8, 9], [2, 0, 1]], {}, [7, 7, 9]),
        ("LengthsGather", [[1, 2, 3, 4], [0, 1, 2, 1], [2, 1, 2]], {}, [2, 3, 1, 2, 3]),
        ("SegmentIdsToRanges", [[0, 0, 2, 2, 4]], {}, [[0, 2], [2, 0], [2, 2], [4, 0], [4, 1]]),
        ("SegmentIdsToRanges", [[0], [9, 9]], {}, [[0, 1], [1, 0]]),
        ("SegmentIdsToLengths", [[0, 2], [0, 0, 0, 0]], {}, [1, 0, 1, 0]),
        ("SegmentIdsToLengthWeights", [[0, 0, 2]], {}, [0.5**0.5, 0.5**0.5, 1]),
        ("SegmentIdsToLengthWeights", [[0, 0, 0, 0]], {"power": 1.0}, [0.25] * 4),
    ],
)
def test_lengths_and_numbers_of_segments(
    op_type: str, inputs: list[list[int]], arguments: dict[str, Any], expected: list[Any]
) -> None:
    [found] = run_operator(op_type, [np.array(values, np.int32) for values in inputs], **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == (np.float32 if op_type.endswith("Weights") else np.int32)


@pytest.mark.parametrize(
    ("op_type", "inputs", "problem"),
    [
        ("SortedSegmentSum", [np.zeros(2), np.array([1, 1])], "begin with 0"),
        ("SortedSegmentRangeSum", [np.zeros(2), np.array([0, 2])], "grow by 0 or 1"),
        ("UnsortedSegmentSum", [np.zeros(2), np.array([0, -1])], "index -1 at place 1"),
        ("UnsortedSegmentSumGradient", [np.zeros(2), np.array([0, 2])], "index 2 at place 1"),
        ("SortedSegmentRangeMaxGradient", [*[np.zeros(2)] * 3, np.array([0, 2])], "index 2 at place 1"),
        ("LengthsToShape", [np.array([1, 2], np.int32)], "all of them equal"),
        ("LengthsSplit", [np.array([1], np.int32)], "n_split.* at least 1, found 0"),
        ("LengthsTile", [np.zeros(1), np.array([-1])], "at least 0, found -1"),
        ("LengthsGather", [np.zeros(1), np.array([1]), np.array([1])], "index 1 at place 0"),
        ("SegmentIdsToRanges", [np.array([3]), np.zeros(2)], "each of 4 segments, found 2"),
        (
            "SparseLengthsPositionalWeightedSum",
            [np.zeros((1, 1)), np.zeros(1), np.array([0, 0]), np.array([2])],
            "each of 2 places",
        ),
    ],
)
def test_what_says_no_segments_is_refused(op_type: str, inputs: list[np.ndarray], problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        run_operator(op_type, list(inputs))


def test_weights_have_a_gradient_only_where_lengths_say_the_segments() -> None:
    definition = operator_def("SortedSegmentWeightedSum", ["x", "weights", "ids"], ["y"], grad_on_weights=1)
    with pytest.raises(GradientError, match="only where lengths say"):
        gradient(definition, ["y_grad"])
