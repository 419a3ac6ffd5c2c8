"""Features, parts, sequences and blocks against loops, and what undoes what."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.errors import OperatorError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(31)
LENGTHS = np.array([2, 0, 3], np.int32)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_batch_moments_are_means_of_values_and_of_squares(order: str) -> None:
    x = RNG.normal(size=(2, 3, 4, 5)).astype(np.float32)
    axes = (0, 2, 3) if order == "NCHW" else (0, 1, 2)
    mu, squares = run_operator("BatchMoments", [x], 2, order=order)
    np.testing.assert_allclose(mu, x.astype(np.float64).mean(axes), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(squares, np.square(x.astype(np.float64)).mean(axes), rtol=1e-6)


def test_box_cox_is_a_power_or_a_logarithm() -> None:
    x = np.array([[2.0, 3.0, -5.0]], np.float32)
    [y] = run_operator("BatchBoxCox", [x, np.array([0, 2, 0.5], np.float32), np.array([1, 0, 0], np.float32)])
    np.testing.assert_allclose(y, [[math.log(3), 4, (1e-3 - 1) / 0.5]], rtol=1e-6)


def test_buckets_count_the_boundaries_below() -> None:
    x = np.array([[0.5, 9, 2], [3, 9, -1]], np.float32)
    boundaries, lengths = np.array([1, 2, 0], np.float32), np.array([2, 1], np.int32)
    [y] = run_operator("BatchBucketize", [x, np.array([0, 2], np.int32), boundaries, lengths])
    assert y.tolist() == [[0, 1], [2, 0]]


def test_a_stump_has_two_values() -> None:
    x = np.array([0, 0.5, 0.75], np.float32)
    [y] = run_operator("StumpFunc", [x], threshold=0.5, low_value=-1.0, high_value=2.0)
    assert y.tolist() == [-1, -1, 2]


def test_unique_elements_and_their_places() -> None:
    found, places = run_operator("Unique", [np.array([3, 1, 3, 7])], 2)
    assert (found.tolist(), places.tolist(), places.dtype) == ([1, 3, 7], [1, 0, 1, 2], np.int32)


def test_lists_of_indices_become_rows_and_back() -> None:
    indices, values = np.array([3, 0, 1, 2, 0]), RNG.normal(size=5).astype(np.float32)
    [dense] = run_operator("BatchSparseToDense", [LENGTHS, indices, values], dense_last_dim=4, default_value=9.0)
    expected = np.full((3, 4), 9, np.float32)
    for row, column, value in zip([0, 0, 2, 2, 2], indices, values, strict=True):
        expected[row, column] = value
    np.testing.assert_array_equal(dense, expected)
    np.testing.assert_array_equal(run_operator("BatchDenseToSparse", [LENGTHS, indices, dense])[0], values)
    with pytest.raises(OperatorError, match=r"index 3 .* in \[0, 3\)"):
        run_operator("BatchSparseToDense", [LENGTHS, indices, values], dense_last_dim=3)


@pytest.mark.parametrize("pack", [0, 1])
def test_rows_are_dealt_by_key_and_gathered_again(pack: int) -> None:
    keys, rows = np.array([4, -1, 7, 3, 5]), RNG.normal(size=(5, 2))
    found = run_operator("Partition", [keys, rows], 6, pack_first_input=pack)
    for part in range(3):
        here = np.array([key % 3 == part for key in keys.tolist()])
        assert found[2 * part].tolist() == [key // 3 if pack else key for key in keys[here].tolist()]
        np.testing.assert_array_equal(found[2 * part + 1], rows[here])
    np.testing.assert_array_equal(run_operator("GatherByKey", [keys, *found[1::2]])[0], rows)


def test_segments_are_dealt_with_their_lengths() -> None:
    found = run_operator("LengthsPartition", [LENGTHS, np.array([1, 2, 2, 4, 3], np.int32)], 4)
    assert [array.tolist() for array in found] == [[1, 0, 2], [2, 2, 4], [1, 0, 1], [1, 3]]


def test_sequences_side_by_side_and_one_after_another() -> None:
    values = RNG.normal(size=(5, 2))
    [packed] = run_operator("PackRNNSequence", [values, LENGTHS])
    assert packed.shape == (3, 3, 2)
    np.testing.assert_array_equal(packed[:2, 0], values[:2])
    np.testing.assert_array_equal(packed[:, 2], values[2:])
    assert not packed[2, 0].any()
    assert not packed[:, 1].any()
    np.testing.assert_array_equal(run_operator("UnpackRNNSequence", [packed, LENGTHS])[0], values)


def test_the_greatest_of_each_segment() -> None:
    values, places = run_operator("LengthsTopK", [np.array([1, 5, 2, 9, 2], np.float32), LENGTHS], 2, k=2)
    assert values.tolist() == [[5, 1], [0, 0], [9, 2]]
    assert places.tolist() == [[1, 0], [-1, -1], [1, 0]]


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("block", "pad"), [(2, 0), (2, 1), (3, 2)])
def test_pixels_of_blocks_become_images_and_go_back(block: int, pad: int, order: str) -> None:
    x = RNG.normal(size=(2, 3, 2 * block - 2 * pad + 2 * block, 4 * block - 2 * pad)).astype(np.float32)
    given = x if order == "NCHW" else np.moveaxis(x, 1, -1).copy()
    [found] = run_operator("SpaceToBatch", [given], block_size=block, pad=pad, order=order)
    padded = np.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    images = [padded[:, :, i::block, j::block] for i in range(block) for j in range(block)]
    expected = np.concatenate(images)
    np.testing.assert_array_equal(found if order == "NCHW" else np.moveaxis(found, -1, 1), expected)
    [back] = run_operator("BatchToSpace", [found], block_size=block, pad=pad, order=order)
    np.testing.assert_array_equal(back, given)


def test_blocks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\(3, 4\) must be multiples of the block size 2"):
        run_operator("SpaceToBatch", [np.zeros((1, 1, 3, 4), np.float32)])


@pytest.mark.parametrize("arguments", [{"pad_value": 0.5}, {"replicate": 1}])
def test_rows_of_different_lengths_have_a_product(arguments: dict[str, float]) -> None:
    x, y = RNG.normal(size=(3, 4)), RNG.normal(size=(3, 2))
    long = np.hstack([y, y]) if "replicate" in arguments else np.hstack([y, np.full((3, 2), 0.5)])
    np.testing.assert_allclose(
        run_operator("DotProductWithPadding", [x, y], **arguments)[0], (x * long).sum(1), rtol=1e-12
    )


def test_a_rate_grows_against_the_direction() -> None:
    rate, g, d = np.array([0.5]), np.array([3.0, 4.0]), np.array([-3.0, 4.0])
    np.testing.assert_allclose(
        run_operator("LearningRateAdaption", [rate, g, d], lr_alpha=0.1)[0], 0.5 * (1 - 0.1 * 7 / 25)
    )
    [plain] = run_operator("LearningRateAdaption", [rate, g, d], lr_alpha=0.1, normalized_lr_adaption=0)
    np.testing.assert_allclose(plain, 0.5 - 0.1 * 7)
