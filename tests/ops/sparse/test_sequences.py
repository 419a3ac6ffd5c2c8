"""Sequences padded, packed and masked, features merged, and lists as columns, against loops and examples by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.errors import DagexecError
from tests.ops.running import operator_def, run_operator

RNG = np.random.default_rng(47)
LENGTHS = np.array([2, 0, 3], np.int32)
Arrays = Sequence[np.ndarray]


def test_paddings_are_added_removed_and_summed() -> None:
    data, start, end = RNG.normal(size=(5, 2)), RNG.normal(size=2), RNG.normal(size=2)
    widths = {"padding_width": 2, "end_padding_width": 1}
    padded, lengths = run_operator("AddPadding", [data, LENGTHS, start, end], 2, **widths)
    parts = np.split(data, [2, 2])
    np.testing.assert_array_equal(padded, np.concatenate([np.stack([start, start, *part, end]) for part in parts]))
    assert (lengths.tolist(), lengths.dtype) == ([5, 3, 6], np.int32)
    removed, shorter = run_operator("RemovePadding", [padded, lengths], 2, **widths)
    np.testing.assert_array_equal(removed, data)
    assert shorter.tolist() == LENGTHS.tolist()
    sums = run_operator("GatherPadding", [padded, lengths], 2, **widths)
    np.testing.assert_allclose(sums, [6 * start, 3 * end], rtol=1e-12)
    [both] = run_operator("GatherPadding", [padded, lengths], **widths)
    np.testing.assert_allclose(both, 6 * start + 3 * end, rtol=1e-12)


def test_one_padding_is_for_both_ends_and_none_is_zeros() -> None:
    data, padding = np.array([1, 2]), np.array(9)
    assert run_operator("AddPadding", [data, np.array([2], np.int32), padding])[0].tolist() == [9, 1, 2, 9]
    assert run_operator("AddPadding", [data], end_padding_width=2)[0].tolist() == [0, 1, 2, 0, 0]
    assert run_operator("AddPadding", [data], 2, padding_width=0)[1].tolist() == [2]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, object])
def test_segments_are_packed_and_unpacked(dtype: Any) -> None:
    data = np.array([b"a", b"b", b"c", b"d", b"e"], object) if dtype is object else np.arange(1, 6).astype(dtype)
    packed, present = run_operator("PackSegments", [LENGTHS, data], 2, return_presence_mask=1)
    empty: Any = b"" if dtype is object else 0
    first, last = data.tolist()[:2], data.tolist()[2:]
    assert packed.tolist() == [[*first, empty], [empty] * 3, last]
    assert present.tolist() == [[True, True, False], [False] * 3, [True] * 3]
    assert run_operator("UnpackSegments", [LENGTHS, packed])[0].tolist() == data.tolist()


def test_packed_segments_have_the_length_and_the_filling_that_is_said() -> None:
    data = np.arange(5, dtype=np.float32)
    [longer] = run_operator("PackSegments", [LENGTHS, data], max_length=4, pad_minf=1)
    none = -math.inf
    assert longer.tolist() == [[0, 1, none, none], [none] * 4, [2, 3, 4, none]]
    [shorter] = run_operator("PackSegments", [LENGTHS, data], max_length=1)
    assert shorter.tolist() == [[0], [0], [2]]
    assert run_operator("UnpackSegments", [LENGTHS, shorter], max_length=1)[0].tolist() == [0, 0, 2, 0, 0]
    assert run_operator("PackSegments", [LENGTHS[:0], data[:0]])[0].shape == (0, 0)


def test_packed_segments_are_reversed_up_to_their_ends() -> None:
    data = RNG.normal(size=(4, 3, 2))
    [found] = run_operator("ReversePackedSegs", [data, LENGTHS])
    expected = data.copy()
    for number, length in enumerate(LENGTHS):
        expected[:length, number] = data[:length, number][::-1]
    np.testing.assert_array_equal(found, expected)


KEPT = {
    "sequence": lambda i, j, number, radius: j < number,
    "window": lambda i, j, number, radius: number - radius <= j <= number + radius,
    "upper": lambda i, j, number, radius: j >= i,
    "lower": lambda i, j, number, radius: j <= i,
    "upperdiag": lambda i, j, number, radius: j > i,
    "lowerdiag": lambda i, j, number, radius: j < i,
}


@pytest.mark.parametrize("arguments", [{}, {"axis": 2}, {"batch": 0, "axis": 2}, {"batch": 0}])
@pytest.mark.parametrize("mode", KEPT)
def test_masks_of_rows_and_columns(mode: str, arguments: dict[str, int]) -> None:
    x, numbers = RNG.normal(size=(2, 3, 4)).astype(np.float32), np.array([3, 0, 1, 9, 2, 5], np.int32)
    of_rows = [numbers] if mode in ("sequence", "window") else []
    [found] = run_operator("SequenceMask", [x, *of_rows], mode=mode, radius=1, **arguments)
    axis, first = arguments.get("axis", 1), arguments.get("batch", -1) + 1
    matrices = x.reshape(math.prod(x.shape[:first]), math.prod(x.shape[first:axis]), -1)
    expected = np.full(matrices.shape, -np.inf)
    for matrix, i, j in np.ndindex(matrices.shape):
        if KEPT[mode](i, j, int(numbers[i]), 1):
            expected[matrix, i, j] = matrices[matrix, i, j]
    np.testing.assert_array_equal(found, expected.reshape(x.shape))


def test_columns_are_counted_without_the_axes_that_are_repeated() -> None:
    x = np.ones((2, 3, 2), np.float32)
    arguments: dict[str, Any] = {"mode": "sequence", "repeat_from_axis": -1, "fill_val": 7.0}
    [found] = run_operator("SequenceMask", [x, np.array([1, 3], np.int32)], **arguments)
    assert found[..., 0].tolist() == [[1, 7, 7], [1, 1, 1]]
    np.testing.assert_array_equal(found[..., 0], found[..., 1])
    [dx] = run_operator("SequenceMask", [x, np.array([1, 3], np.int32)], grad=1, **arguments)
    assert dx[..., 0].tolist() == [[1, 0, 0], [1, 1, 1]]


PRESENT = [np.array([True, False]), np.array([True, True])]
FEW, MANY = np.array([1, 2], np.int32), np.array([2, 1], np.int32)
KEYS = [np.array([11, 12, 13]), np.array([14, 15, 16])]
COUNTS = [np.array([2, 0, 1], np.int32), np.array([1, 1, 1], np.int32)]
ROWS = [np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])]


@pytest.mark.parametrize(
    ("kind", "inputs", "expected"),
    [
        (
            "SingleScalar",
            [ROWS[0][:2], PRESENT[0], ROWS[1][:2], PRESENT[1]],
            [[2, 1], [8, 9, 9], [1, 4, 5]],
        ),
        (
            "SingleList",
            [MANY, ROWS[0], PRESENT[0], FEW, ROWS[1], PRESENT[1]],
            [[2, 1], [8, 9, 9], [2, 1, 2], [1, 2, 4, 5, 6]],
        ),
        (
            "SingleMap",
            [MANY, KEYS[0], ROWS[0], PRESENT[0], FEW, KEYS[1], ROWS[1], PRESENT[1]],
            [[2, 1], [8, 9, 9], [2, 1, 2], [11, 12, 14, 15, 16], [1, 2, 4, 5, 6]],
        ),
        (
            "MultiScalar",
            [FEW, KEYS[0], ROWS[0], MANY, KEYS[1], ROWS[1]],
            [[3, 3], [11, 14, 15, 12, 13, 16], [1, 4, 5, 2, 3, 6]],
        ),
        (
            "MultiList",
            [FEW, KEYS[0], COUNTS[0], ROWS[0], MANY, KEYS[1], COUNTS[1], ROWS[1]],
            [[3, 3], [11, 14, 15, 12, 13, 16], [2, 1, 1, 0, 1, 1], [1, 2, 4, 5, 3, 6]],
        ),
        (
            "MultiMap",
            [FEW, KEYS[0], COUNTS[0], KEYS[0], ROWS[0], MANY, KEYS[1], COUNTS[1], KEYS[1], ROWS[1]],
            [[3, 3], [11, 14, 15, 12, 13, 16], [2, 1, 1, 0, 1, 1], [11, 12, 14, 15, 13, 16], [1, 2, 4, 5, 3, 6]],
        ),
    ],
)
def test_features_of_several_inputs_become_one_list(kind: str, inputs: Arrays, expected: list[list[float]]) -> None:
    arguments: dict[str, Any] = {"feature_ids": [8, 9]} if kind.startswith("Single") else {}
    found = run_operator(f"Merge{kind}FeatureTensors", list(inputs), len(expected), **arguments)
    assert [array.tolist() for array in found] == expected
    assert [array.dtype for array in found[:2]] == [np.int32, np.int64]


def test_dense_features_become_a_list_of_those_that_are_present() -> None:
    values, present = np.array([[1.5, 2.5], [3.5, 4.5]]), np.array([[True, False], [True, True]])
    found = run_operator("MergeDenseFeatureTensors", [values, present], 3, feature_ids=[11, 12])
    assert [array.tolist() for array in found] == [[1, 2], [11, 11, 12], [1.5, 3.5, 4.5]]


def test_values_become_columns() -> None:
    x, lengths = np.array([[2, 3], [4, 1], [2, 5]]), np.array([2, 3], np.int32)
    [found] = run_operator("BatchOneHot", [x, lengths, np.array([2, 4, 1, 3, 5])])
    assert found.tolist() == [[1, 0, 0, 1, 0], [0, 1, 1, 0, 0], [1, 0, 0, 0, 1]]
    [found] = run_operator("SegmentOneHot", [LENGTHS, np.array([1, 1, 0, 3, 2]), np.array(4)])
    assert found.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 1, 1]]


def test_identifiers_of_a_mask_become_columns() -> None:
    indices, values, default = np.array([3, -1, 7, 3, 8]), RNG.normal(size=(5, 2)), RNG.normal(size=2)
    arguments: dict[str, Any] = {"mask": [7, 3, 5], "return_presence_mask": 1}
    dense, present = run_operator("SparseToDenseMask", [indices, values, default, LENGTHS], 2, **arguments)
    expected = [[default, values[0], default], [default] * 3, [values[2], values[3], default]]
    np.testing.assert_array_equal(dense, expected)
    assert present.tolist() == [[False, True, False], [False] * 3, [True, True, False]]
    [flat] = run_operator("SparseToDenseMask", [indices, values, default], **arguments)
    np.testing.assert_array_equal(flat, [values[2], values[3], default])


def by_caffe2s_test(indices: np.ndarray, seed: int, modulo: int) -> list[int]:
    size = 8 * indices.itemsize
    found = []
    for index in indices:
        number = 0xDEADBEEF * seed
        for byte in index.tobytes():
            number = number * 65537 + (byte - 256 if byte > 127 else byte)
        number %= 1 << size
        found.append((number - (1 << size) if number >> (size - 1) else number) % modulo)
    return found


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_hashes_of_indices_are_those_of_integers_of_any_size(dtype: Any) -> None:
    indices = RNG.integers(0, np.iinfo(dtype).max, 20).astype(dtype)
    [found] = run_operator("IndexHash", [indices], seed=12345, modulo=97)
    assert (found.tolist(), found.dtype) == (by_caffe2s_test(indices, 12345, 97), dtype)


def test_boundaries_end_buckets() -> None:
    [found] = run_operator("Bucketize", [np.array([[1, 0.5], [4, 9]], np.float32)], boundaries=[1.0, 4.0])
    assert (found.tolist(), found.dtype) == ([[0, 0], [1, 2]], np.int32)


@pytest.mark.parametrize("share", [0.0, 0.168, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("absolute", [0, 1])
def test_a_quantile_is_not_exceeded_by_its_share(share: float, absolute: int) -> None:
    parts = [RNG.normal(size=(30, 10)), RNG.normal(size=100)]
    [found] = run_operator("Quantile", parts, quantile=share, abs=absolute, tol=1e-4)
    values = np.concatenate([part.reshape(-1) for part in parts])
    values = np.abs(values) if absolute else values
    least = max(1, math.ceil(np.float32(share) * np.float32(400)))
    assert np.count_nonzero(values <= found[0]) >= least
    assert np.count_nonzero(values <= found[0] - 2e-4 * abs(found[0]) - 1e-9) <= least


def test_lists_are_dropped_whole() -> None:
    x, lengths = np.arange(1, 2001), np.repeat(np.array([2, 0], np.int32), 1000)
    arguments: dict[str, Any] = {"ratio": 0.25, "replacement_value": -1}
    drop = operator_def("SparseDropoutWithReplacement", ["x", "lengths"], ["y", "longer"], **arguments)
    workspace = Workspace()
    workspace.feed_blob("x", x)
    workspace.feed_blob("lengths", lengths)
    workspace.run_net_once(NetDef(name="dropout", op=[drop]))
    found, longer = workspace.fetch_blob("y"), workspace.fetch_blob("longer")
    dropped = longer == 1
    assert 400 < np.count_nonzero(dropped) < 600
    assert longer[~dropped].tolist() == lengths[~dropped].tolist()
    by_list = np.split(found, np.cumsum(longer)[:-1])
    wanted = np.split(x, np.cumsum(lengths)[:-1])
    for here, before, gone in zip(by_list, wanted, dropped, strict=True):
        assert here.tolist() == ([-1] if gone else before.tolist())


def test_rows_by_masks_values_and_places() -> None:
    mask = np.array([True, False, True, True, False])
    assert run_operator("BooleanMaskLengths", [LENGTHS, mask])[0].tolist() == [1, 0, 2]
    data = np.array([3, 1, 3, 3, 1])
    assert run_operator("FindDuplicateElements", [data])[0].tolist() == [2, 3, 4]
    texts = np.array([b"a", b"b", b"a"], object)
    assert run_operator("FindDuplicateElements", [texts])[0].tolist() == [2]
    assert run_operator("RemoveDataBlocks", [data, np.array([4, 0, 4])])[0].tolist() == [1, 3, 3]


SHORT = np.array([1], np.int32)


@pytest.mark.parametrize(
    ("op_type", "inputs", "arguments", "problem"),
    [
        ("AddPadding", [np.zeros(2), SHORT], {}, "add up to 2 rows"),
        ("AddPadding", [np.zeros(2)], {"padding_width": -1}, "widths must be at least 0"),
        ("RemovePadding", [np.zeros(1)], {}, "do not fit in 1 rows"),
        ("RemovePadding", [np.zeros(4), np.array([1, 3], np.int32)], {}, "at least 2"),
        ("GatherPadding", [np.zeros(4), np.array([1, 3], np.int32)], {}, "at least 2"),
        ("PackSegments", [SHORT, np.zeros(2)], {}, "add up to 2 rows"),
        ("UnpackSegments", [np.array([-1], np.int32), np.zeros((1, 2))], {}, "at least 0"),
        ("UnpackSegments", [SHORT, np.zeros((1, 2))], {"max_length": 3}, "max_length.*found 3"),
        ("ReversePackedSegs", [np.zeros((2, 1, 1)), np.array([3], np.int32)], {}, r"in \[0, 2\]"),
        ("SequenceMask", [np.zeros((1, 2))], {"mode": "diagonal"}, "'mode' must be one of sequence"),
        ("SequenceMask", [np.zeros((1, 2))], {"mode": "sequence"}, "which need it"),
        ("SequenceMask", [np.zeros((2, 2)), SHORT], {"mode": "window"}, "each of 2 rows, found 1"),
        ("SequenceMask", [np.zeros((2, 2))], {"mode": "upper", "batch": 1}, "'batch' must be an axis before 1"),
        ("SegmentOneHot", [SHORT, np.array([4]), np.array(4)], {}, "index 4"),
        (
            "SparseToDenseMask",
            [np.array([-1]), np.zeros(1), np.zeros(())],
            {"mask": [1], "max_skipped_indices": 0},
            "1 id",
        ),
        ("IndexHash", [np.array([1])], {"modulo": 0}, "'modulo' must be above 0"),
        ("Bucketize", [np.zeros(1, np.float32)], {"boundaries": [2.0, 1.0]}, "rising order"),
        ("Quantile", [np.zeros(1)], {"quantile": 1.5}, r"in \[0, 1\]"),
        ("RemoveDataBlocks", [np.zeros(1), np.array([1])], {}, "index 1"),
        ("BooleanMaskLengths", [SHORT, np.array([True, True])], {}, "add up to 2"),
        ("MergeMultiScalarFeatureTensors", [SHORT, np.array([1, 2]), np.zeros(1)], {}, "a key for each feature"),
    ],
)
def test_what_does_not_fit_is_refused(op_type: str, inputs: Arrays, arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(DagexecError, match=problem):
        run_operator(op_type, list(inputs), 3 if op_type.startswith("Merge") else 1, **arguments)
