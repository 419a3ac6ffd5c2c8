"""Lists and rows as Caffe2's feature pipelines change them, against plain Python."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError
from tests.ops.running import operator_def, run_net, run_operator, workspace_of

RNG = np.random.default_rng(7)
LENGTHS = np.array([2, 0, 3, 0], np.int32)


def changed(op_type: str, *inputs: np.ndarray, **arguments: float) -> np.ndarray:
    """Input 0 after an operator that writes it."""
    blobs = {f"x{index}": array for index, array in enumerate(inputs)}
    workspace = workspace_of(blobs)
    run_net(workspace, operator_def(op_type, list(blobs), ["x0"], **arguments))
    return workspace.fetch_blob("x0")


def test_the_largest_of_each_row_and_their_gradient() -> None:
    x = np.array([[3, 1, 3, 2], [0, 5, 5, 5], [7, 6, 5, 4]], np.float32)
    counts = np.array([2, 3, 1])
    values, places = run_operator("FlexibleTopK", [x, counts], 2)
    assert (values.tolist(), places.tolist()) == ([3, 3, 5, 5, 5, 7], [0, 2, 1, 2, 3, 0])
    [dx] = run_operator("FlexibleTopKGradient", [x, counts, places, np.arange(1, 7, dtype=np.float32)])
    assert dx.tolist() == [[1, 0, 2, 0], [0, 3, 4, 5], [6, 0, 0, 0]]
    with pytest.raises(OperatorError, match="from 1 to 4, found 0 to 5"):
        run_operator("FlexibleTopK", [x, np.array([0, 3, 5])], 2)


@pytest.mark.parametrize("use_max_norm", [0, 1])
def test_rows_are_scaled_to_a_norm(use_max_norm: int) -> None:
    table = RNG.normal(size=(5, 3)).astype(np.float32)
    table[1] /= 100
    norms = np.linalg.norm(table.astype(np.float64), axis=1)
    expected = table.astype(np.float64)
    for row in {1, 2, 4}:
        if norms[row] > 0.5 or not use_max_norm:
            expected[row] *= 0.5 / norms[row]
    for name, tolerance in (("SparseNormalize", 1e-6), ("Float16SparseNormalize", 2e-3)):
        given = table if name == "SparseNormalize" else table.astype(np.float16)
        indices = np.array([4, 1, 2, 1])
        found = changed(name, given, indices, norm=0.5, use_max_norm=use_max_norm)
        np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def test_parameters_are_clipped_where_indices_say() -> None:
    param = np.array([[-2, 0.5], [3, -3], [9, 9]], np.float32)
    assert run_operator("EnsureClipped", [param], min=0.0)[0].tolist() == [[0, 0.5], [3, 0], [9, 9]]
    [some] = run_operator("EnsureClipped", [param, np.array([1]), param[:1]], min=-1.0, max=1.0)
    assert some.tolist() == [[-2, 0.5], [1, -1], [9, 9]]


def test_empty_segments_get_a_row_of_zeros() -> None:
    rows = RNG.normal(size=(5, 2)).astype(np.float32)
    lengths, found, texts = run_operator(
        "PadEmptySamples", [LENGTHS, rows, np.array([b"a", b"b", b"c", b"d", b"e"], object)], 3
    )
    assert lengths.tolist() == [2, 1, 3, 1]
    np.testing.assert_array_equal(found, np.concatenate([rows[:2], [[0, 0]], rows[2:], [[0, 0]]]))
    assert len(texts) == 7


def test_rows_are_repeated_and_replaced() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(run_operator("NumpyTile", [x, np.array([2, 3], np.int32)])[0], np.tile(x, (2, 3)))
    row = np.array([9, 8, 7], np.float32)
    [copied] = run_operator("CopyRowsToTensor", [x, np.array([1, 3]), row])
    assert copied.tolist() == [x[0].tolist(), row.tolist(), x[2].tolist(), row.tolist()]
    sequences = np.ones((3, 2, 2), np.float32)
    padded = changed("VariableLengthSequencePadding", sequences, np.array([1, 3], np.int32))
    assert padded[..., 0].tolist() == [[1, 1], [0, 1], [0, 1]]


def test_features_of_categories() -> None:
    lists = {"col_ids": [2, 0], "categorical_limits": [2, 3], "vals": [5, 7, 1, 2, 3]}
    x = np.array([[1, 0, 5], [3, 0, 7], [2, 0, 7], [4, 0, 4]], np.float32)
    assert run_operator("NGramFromCategorical", [x], **lists)[0].tolist() == [0, 1 + 4, 1 + 2, 0]
    with pytest.raises(ArgumentError, match="a limit for each column"):
        run_operator("NGramFromCategorical", [x], **{**lists, "vals": [5]})
    [divided] = run_operator("SquareRootDivide", [x[:3], np.array([4, 0, -1], np.int32)])
    assert divided.tolist() == [[0.5, 0, 2.5], [3, 0, 7], [2, 0, 7]]


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_pruned_rows_count_as_zeros(bits: int) -> None:
    table = RNG.normal(size=(4, 8)).astype(np.float32)
    [fused] = run_operator(f"FloatToFused{bits}BitRowwiseQuantized", [table])
    [plain] = run_operator(f"Fused{bits}BitRowwiseQuantizedToFloat", [fused])
    rows = np.array([3, -1, 0, -1, 1, 2], np.int32)
    indices, weights = np.array([0, 1, 5, 2, 3]), RNG.normal(size=5).astype(np.float32)
    picked = np.where(rows[indices, None] >= 0, plain[rows[indices]], 0).astype(np.float64)
    spans = np.split(np.arange(5), np.cumsum(LENGTHS)[:-1])
    for name, values, divided in (
        ("Sum", picked, False),
        ("Mean", picked, True),
        ("WeightedSum", picked * weights[:, None], False),
    ):
        expected = [values[span].sum(0) / (max(len(span), 1) if divided else 1) for span in spans]
        extra = [weights] if name == "WeightedSum" else []
        [found] = run_operator(f"SparseLengths{name}{bits}BitRowwiseSparse", [fused, *extra, indices, LENGTHS, rows])
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(OperatorError, match="index 4 "):
        run_operator(f"SparseLengthsSum{bits}BitRowwiseSparse", [fused, indices, LENGTHS, rows + 1])


def test_gradients_pass_through_rows_that_are_replaced() -> None:
    dy = RNG.normal(size=(4, 3)).astype(np.float32)
    np.testing.assert_array_equal(run_operator("CopyRowsToTensorGradient", [dy])[0], dy)
