"""Ranges, lists of identifiers, decoded labels, losses of pairs and enlarged images against loops."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError
from tests.ops.running import run_operator

RNG = np.random.default_rng(41)
DATA = np.arange(10, dtype=np.float32)


def test_ranges_are_gathered_one_after_another() -> None:
    ranges = np.array([[[0, 2], [5, 1]], [[7, 0], [8, 2]]])
    found, lengths = run_operator("GatherRanges", [DATA, ranges], 2)
    assert (found.tolist(), lengths.tolist(), lengths.dtype) == ([0, 1, 5, 8, 9], [3, 2], np.int32)


def test_ranges_become_rows_sorted_by_their_keys() -> None:
    ranges, keys = np.array([[[0, 2], [5, 3]], [[7, 0], [2, 3]]]), np.arange(10)[::-1].copy()
    plain = run_operator("GatherRangesToDense", [DATA, ranges], 2, lengths=[2, 3])
    assert [array.tolist() for array in plain] == [[[0, 1], [0, 0]], [[5, 6, 7], [2, 3, 4]]]
    ordered = run_operator("GatherRangesToDense", [DATA, ranges, keys], 2, lengths=[2, 3])
    assert [array.tolist() for array in ordered] == [[[1, 0], [0, 0]], [[7, 6, 5], [4, 3, 2]]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"max_mismatched_ratio": 0.25}, "max_mismatched_ratio=0.25: of 2 ranges .1. are of another length"),
        ({"max_mismatched_ratio": 1.0, "max_empty_ratio": 0.0}, "max_empty_ratio=0: of 2 ranges .1. are empty"),
    ],
)
def test_too_many_ranges_that_do_not_fit_are_an_error(arguments: dict[str, float], problem: str) -> None:
    ranges = np.array([[[0, 2]], [[0, 0]]])
    with pytest.raises(OperatorError, match=problem):
        run_operator("GatherRangesToDense", [DATA, ranges], lengths=[3], min_observation=2, **arguments)


def test_a_range_beyond_the_data_is_refused() -> None:
    with pytest.raises(OperatorError, match="within the 10 elements"):
        run_operator("GatherRanges", [DATA, np.array([[[9, 2]]])], 2)


def test_positive_elements_become_identifiers() -> None:
    lengths, ids = run_operator("DenseVectorToIdList", [np.array([[0, 2, 1.5], [-1, 0, 0], [1, 0, 0]], np.float32)], 2)
    assert (lengths.tolist(), ids.tolist()) == ([2, 0, 1], [1, 2, 0])


def test_lists_are_merged_row_by_row() -> None:
    one = [np.array([2, 0, 1], np.int32), np.array([5, 3, 9])]
    other = [np.array([1, 1, 0], np.int32), np.array([3, 4])]
    lengths, ids = run_operator("MergeIdLists", [*one, *other], 2)
    assert (lengths.tolist(), ids.tolist()) == ([2, 1, 1], [3, 5, 4, 9])


@pytest.mark.parametrize(("merge", "expected"), [(1, [1, 2, 1]), (0, [1, 1, 2, 1])])
def test_the_best_labels_are_decoded_without_blanks(merge: int, expected: list[int]) -> None:
    best = [1, 1, 0, 2, 1]
    scores = np.zeros((5, 2, 3), np.float32)
    for time, label in enumerate(best):
        scores[time, 0, label] = 1
    lengths, labels = run_operator("CTCGreedyDecoder", [scores, np.array([5, 0], np.int32)], 2, merge_repeated=merge)
    assert (lengths.tolist(), labels.tolist()) == ([len(expected), 0], expected)


def test_the_loss_of_pairs_is_a_mean_over_those_with_an_order() -> None:
    x, label = np.array([1.0, 3, 2, 5], np.float32), np.array([1.0, 0, 2, 9], np.float32)
    lengths = np.array([3, 1], np.int32)
    pairs = [(2, 0), (0, 1), (2, 1)]
    expected = np.mean([math.log1p(math.exp(x[low] - x[high])) for high, low in pairs])
    np.testing.assert_allclose(run_operator("PairWiseLoss", [x, label, lengths])[0], [expected, 0], rtol=1e-6)


def test_perplexity_is_the_number_of_equal_choices() -> None:
    np.testing.assert_allclose(run_operator("Perplexity", [np.array([0.1, 0.001], np.float32)])[0], 100, rtol=1e-5)


def test_bytes_become_a_tensor() -> None:
    [found] = run_operator("GivenTensorByteStringToUInt8Fill", [], shape=[2, 2], values=[b"\x00\xff\x01\x02"])
    assert found.tolist() == [[0, 255], [1, 2]]
    with pytest.raises(ArgumentError, match="needs 4 bytes, found 3"):
        run_operator("GivenTensorByteStringToUInt8Fill", [], shape=[2, 2], values=[b"abc"])


@pytest.mark.parametrize("scales", [(2.0, 3.0), (1.0, 1.5), (0.5, 1.0)])
def test_an_enlarged_image_has_its_corners_on_corners(scales: tuple[float, float]) -> None:
    x = RNG.normal(size=(1, 2, 4, 6))
    by_input = run_operator("UpsampleBilinear", [x, np.array(scales, np.float32)])[0]
    [found] = run_operator("UpsampleBilinear", [x], height_scale=scales[0], width_scale=scales[1])
    np.testing.assert_array_equal(by_input, found)
    height, width = int(4 * scales[0]), int(6 * scales[1])
    for row in range(height):
        for column in range(width):
            along, across = row * 3 / max(height - 1, 1), column * 5 / max(width - 1, 1)
            i, j = min(int(along), 2), min(int(across), 4)
            a, b = along - i, across - j
            square = x[0, 0, i : i + 2, j : j + 2]
            expected = (1 - a) * ((1 - b) * square[0, 0] + b * square[0, 1]) + a * (
                (1 - b) * square[1, 0] + b * square[1, 1]
            )
            np.testing.assert_allclose(found[0, 0, row, column], expected, rtol=1e-10, atol=1e-10)
