"""Accuracy and MultiClassAccuracy against sorting, with ties, NaNs and bad labels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, OperatorError, ShapeError
from tests.ops.running import Array, operator_def, run_operator


def by_sorting(scores: Array, labels: Array, top: int) -> float:
    """The share of rows whose label is among the first of a stable descending sort."""
    hits = 0
    for row, label in zip(scores.tolist(), labels.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda index: -row[index])  # sorted is stable
        hits += label in order[:top]
    return hits / len(labels)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 60),
    classes=st.integers(1, 12),
    top=st.integers(1, 14),
    values=st.integers(1, 6),
    dtype=st.sampled_from([np.float32, np.float64, np.float16, ml_dtypes.bfloat16]),
    label_type=st.sampled_from([np.int32, np.int64]),
)
def test_accuracy_is_that_of_a_stable_sort_also_with_equal_scores(
    rows: int, classes: int, top: int, values: int, dtype: Any, label_type: Any
) -> None:
    rng = np.random.default_rng(rows * 17 + classes)
    scores = rng.integers(0, values, (rows, classes)).astype(dtype)
    labels = rng.integers(0, classes, rows).astype(label_type)
    [found] = run_operator("Accuracy", [scores, labels], top_k=top)
    assert (found.shape, found.dtype) == ((), np.float32)
    np.testing.assert_allclose(found, by_sorting(scores.astype(np.float64), labels, top), rtol=1e-6)


@pytest.mark.slow
def test_accuracy_of_many_rows_counts_every_piece() -> None:
    rng = np.random.default_rng(0)
    scores, labels = rng.normal(size=(9000, 37)).astype(np.float32), rng.integers(0, 37, 9000).astype(np.int32)
    np.testing.assert_allclose(run_operator("Accuracy", [scores, labels], top_k=5), by_sorting(scores, labels, 5), 1e-6)


def test_a_score_that_is_no_number_is_never_right() -> None:
    scores = np.array([[np.nan, 1.0], [np.nan, np.nan], [2.0, 1.0]], np.float32)
    assert run_operator("Accuracy", [scores, np.zeros(3, np.int32)])[0] == np.float32(1 / 3)


def test_accuracy_of_no_rows_is_nan() -> None:
    assert np.isnan(run_operator("Accuracy", [np.zeros((0, 3), np.float32), np.zeros(0, np.int32)])[0])


def test_accuracy_of_each_class_counts_its_rows() -> None:
    scores = np.array([[3, 1, 0], [0, 2, 1], [5, 4, 0], [1, 1, 1], [0, 0, 1]], np.float32)
    accuracies, amounts = run_operator("MultiClassAccuracy", [scores, np.array([0, 1, 1, 0, 0], np.int32)], 2)
    np.testing.assert_allclose(accuracies, [2 / 3, 1 / 2, 0], rtol=1e-6)
    assert (accuracies.dtype, amounts.dtype, amounts.tolist()) == (np.float32, np.int32, [3, 2, 0])
    empty = run_operator("MultiClassAccuracy", [scores[:0], np.zeros(0, np.int32)], 2)
    assert [array.tolist() for array in empty] == [[0, 0, 0], [0, 0, 0]]


def test_metrics_have_no_gradient() -> None:
    assert gradient(operator_def("Accuracy", ["x", "label"], ["a"]), ["da"]).inputs == (None, None)


@pytest.mark.parametrize(("op_type", "outputs"), [("Accuracy", 1), ("MultiClassAccuracy", 2)])
def test_metrics_refuse_what_does_not_fit(op_type: str, outputs: int) -> None:
    scores, labels = np.zeros((4, 3), np.float32), np.zeros(4, np.int32)
    for bad in (-1, 3):
        wrong = np.array([0, bad, 0, bad], np.int32)
        with pytest.raises(OperatorError, match=rf"label {bad} at position \[1\] of blob 'x1' .* 0 to 2"):
            run_operator(op_type, [scores, wrong], outputs)
    with pytest.raises(ShapeError, match=r"labels 'x1' must have 4 elements .*found shape \(3,\)"):
        run_operator(op_type, [scores, labels[:3]], outputs)
    with pytest.raises(ShapeError, match="'x1' must be one of int32, int64, found float32"):
        run_operator(op_type, [scores, labels.astype(np.float32)], outputs)
    with pytest.raises(ShapeError, match="'x0' must have 2 axes, found 1"):
        run_operator(op_type, [scores[0], labels], outputs)


def test_accuracy_refuses_top_k_below_1() -> None:
    with pytest.raises(ArgumentError, match="'top_k' must be at least 1, found 0"):
        run_operator("Accuracy", [np.zeros((1, 3), np.float32), np.zeros(1, np.int32)], top_k=0)
