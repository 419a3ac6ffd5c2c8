"""Losses of Detectron against loops over elements in float64. Differences check gradients in test_gradient_coverage."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from dagexec.errors import ArgumentError, OperatorError, ShapeError
from tests.ops.running import run_operator

RNG = np.random.default_rng(31)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def smooth(difference: float, beta: float) -> float:
    return difference**2 / (2 * beta) if abs(difference) < beta else abs(difference) - beta / 2


def test_smooth_l1_of_weighted_differences() -> None:
    y_hat, y, inside, outside = normal(3, 2, 4), normal(3, 8), normal(24), normal(3, 8)
    parts = zip(*(array.reshape(-1).astype(float) for array in (y_hat, y, inside, outside)), strict=True)
    expected = sum(b * smooth(a * (x - t), 0.6) for x, t, a, b in parts) * 1.7 / 3
    [loss] = run_operator("SmoothL1Loss", [y_hat, y, inside, outside], beta=0.6, scale=1.7)
    assert loss.shape == ()
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert run_operator("SmoothL1Loss", [y_hat[:0], y[:0], inside[:0], outside[:0]])[0] == 0
    with pytest.raises(ShapeError, match="'x3' must have as many elements"):
        run_operator("SmoothL1Loss", [y_hat, y, inside, outside[:2]])
    with pytest.raises(ArgumentError, match="'beta' must be above 0"):
        run_operator("SmoothL1Loss", [y_hat, y, inside, outside], beta=0.0)


@pytest.mark.parametrize("count", [0, 3])
def test_smooth_l1_of_selected_boxes(count: int) -> None:
    y_hat, y = normal(2, 8, 3, 4), normal(3, 4)
    places = np.array([[0, 0, 2, 3], [1, 4, 0, 1], [1, 3, 2, 2]], np.float32)
    total = sum(
        smooth(float(y_hat[n, c + j, row, column]) - float(y[i, j]), 0.4)
        for i, (n, c, row, column) in enumerate(places.astype(int))
        for j in range(4)
    )
    normalizer = np.array([count], np.float32)
    inputs = [y_hat, y, places, normalizer]
    [loss] = run_operator("SelectSmoothL1Loss", inputs, beta=0.4, scale=0.5)
    np.testing.assert_allclose(loss, 0.5 * total / max(count, 1), rtol=1e-6)
    assert run_operator("SelectSmoothL1Loss", [y_hat, y[:0], places[:0], normalizer])[0] == 0
    places[0, 1] = 5
    with pytest.raises(OperatorError, match="a location is not in Y_hat"):
        run_operator("SelectSmoothL1Loss", inputs)


@pytest.mark.parametrize("normalize", [0, 1])
def test_objectness_passes_over_unknown_targets(normalize: int) -> None:
    x = np.array([0.3, -2, 90, -90, 5, 1.5], np.float32).reshape(2, 3)
    targets = np.array([1, 0, -1, 1, 0, 1], np.int32)
    losses = [
        math.log1p(math.exp(-z if t else z)) for z, t in zip(map(float, x.reshape(-1)), targets, strict=True) if t >= 0
    ]
    [loss] = run_operator("SigmoidCrossEntropyLoss", [x, targets], scale=2.0, normalize=normalize)
    np.testing.assert_allclose(loss, 2 * sum(losses) / (5 if normalize else 1), rtol=1e-6)
    [nothing] = run_operator("SigmoidCrossEntropyLoss", [x, np.full(6, -1, np.int32)])
    assert nothing == 0


def places_of(labels: np.ndarray, classes: int) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Image, anchor, row and column, the label, and the channel at which the anchor's classes begin."""
    for image, anchor, row, column in np.ndindex(labels.shape):
        yield image, anchor, row, column, int(labels[image, anchor, row, column]), anchor * classes


FOCAL = {"num_classes": 3, "gamma": 1.5, "alpha": 0.3, "scale": 2.0}
LABELS = np.array([0, 1, 2, -1, 2, 0, 1, 2, -1, 0, 2, 1], np.int32).reshape(1, 2, 2, 3)


def test_focal_loss_of_logistic_functions() -> None:
    x = 3 * normal(1, 6, 2, 3)
    total = 0.0
    for image, _, row, column, label, first in places_of(LABELS, 3):
        for number in range(3):
            p = 1 / (1 + math.exp(-float(x[image, first + number, row, column])))
            if label == number + 1:
                total -= 0.3 * (1 - p) ** 1.5 * math.log(p)
            elif label >= 0:
                total -= 0.7 * p**1.5 * math.log(1 - p)
    [loss] = run_operator("SigmoidFocalLoss", [x, LABELS, np.array([4], np.float32)], **FOCAL)
    np.testing.assert_allclose(loss, 2 * total / 4, rtol=1e-6)
    far = np.array([200, -200], np.float32).reshape(1, 2, 1, 1)
    label, one = np.array([[[[2]]]], np.int32), np.array([0], np.float32)
    [loss] = run_operator("SigmoidFocalLoss", [far, label, one], num_classes=2)
    np.testing.assert_allclose(loss, 0.75 * 200 + 0.25 * 87.336544, rtol=1e-6)  # -ln of float32's smallest normal


def test_focal_loss_of_a_softmax_and_its_probabilities() -> None:
    x = 3 * normal(1, 6, 2, 3)
    total, expected = 0.0, np.zeros(x.shape)
    for image, _, row, column, label, first in places_of(LABELS, 3):
        powers = np.exp(x[image, first : first + 3, row, column].astype(float))
        p = expected[image, first : first + 3, row, column] = powers / powers.sum()
        if label >= 0:
            total -= (0.3 if label else 0.7) * (1 - p[label]) ** 1.5 * math.log(p[label])
    inputs = [x, LABELS, np.array([0.5], np.float32)]
    loss, probabilities = run_operator("SoftmaxFocalLoss", inputs, 2, **FOCAL)
    np.testing.assert_allclose(loss, 2 * total, rtol=1e-6)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-6)
    [alone] = run_operator("GroupSpatialSoftmax", [x], num_classes=3)
    assert alone.tobytes() == probabilities.tobytes()
    with pytest.raises(OperatorError, match="label 3 at position"):
        run_operator("SoftmaxFocalLoss", [x, np.full(LABELS.shape, 3, np.int32), inputs[2]], 2, **FOCAL)
    with pytest.raises(ShapeError, match="a multiple of num_classes=4"):
        run_operator("GroupSpatialSoftmax", [x], num_classes=4)
    certain = np.array([400, 0, 0], np.float32).reshape(1, 3, 1, 1)
    arrays = [certain, np.zeros((1, 1, 1, 1), np.int32), inputs[2], certain / 400, np.ones((), np.float32)]
    [slope] = run_operator("SoftmaxFocalLossGradient", arrays, num_classes=3, gamma=0.5)
    np.testing.assert_array_equal(slope, 0)  # no NaN of 0 to a negative power
