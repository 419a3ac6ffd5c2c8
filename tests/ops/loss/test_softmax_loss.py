"""SoftmaxWithLoss, SpatialSoftmaxWithLoss, AveragedLoss: values, gradients, extreme logits, bad labels."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, FeedError, OperatorError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.gradient_checks import check_gradient
from tests.ops.running import Array, operator_def, run_operator

NARROW = [(np.float16, 4e-3), (ml_dtypes.bfloat16, 3e-2)]


def row_losses(logits: Array, labels: Array) -> list[float]:
    """-ln p(label) of each row, in Python's floats."""
    found = []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        top = max(row)
        found.append(math.log(math.fsum(math.exp(value - top) for value in row)) - (row[label] - top))
    return found


def with_distribution(logits: Array, labels: Array, *weights: Array) -> tuple[Array, Array]:
    """Softmax and loss with label_prob; the labels must be a distribution in every run."""
    names = ["x", "label", "weights"][: 2 + len(weights)]
    workspace = Workspace()
    for name, array in zip(names, [logits, labels, *weights], strict=True):
        workspace.feed_blob(name, array)
    definition = operator_def("SoftmaxWithLoss", names, ["p", "loss"], label_prob=1)
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
    return workspace.fetch_blob("p"), workspace.fetch_blob("loss")


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 300),
    classes=st.integers(1, 400),
    scale=st.sampled_from([1.0, 0.0, 2.5]),
    weighted=st.booleans(),
    dtype=st.sampled_from([np.float32, np.float64]),
    label_type=st.sampled_from([np.int32, np.int64]),
)
def test_loss_is_the_weighted_mean_of_what_each_row_costs(
    rows: int, classes: int, scale: float, weighted: bool, dtype: Any, label_type: Any
) -> None:
    rng = np.random.default_rng(rows * 1000 + classes)
    logits, labels = rng.normal(0, 5, (rows, classes)).astype(dtype), rng.integers(0, classes, rows).astype(label_type)
    weights = rng.uniform(0, 2, rows).astype(dtype)
    given_weights = [weights] if weighted else []
    softmax, loss = run_operator("SoftmaxWithLoss", [logits, labels, *given_weights], 2, scale=scale)
    assert loss.shape == ()
    assert loss.dtype == softmax.dtype == dtype
    costs = row_losses(logits.astype(np.float64), labels)
    wanted = scale * np.average(costs, weights=weights.astype(np.float64) if weighted else None)
    tolerance = 1e-12 if dtype == np.float64 else 3e-6
    np.testing.assert_allclose(loss, wanted, tolerance, tolerance)
    np.testing.assert_allclose(softmax.sum(1), 1, rtol=1e-5)
    own = softmax[np.arange(rows), labels]
    np.testing.assert_allclose(own, np.exp(-np.array(costs)), rtol=1e-12 if dtype == np.float64 else 1e-5, atol=1e-30)


@pytest.mark.parametrize(
    ("axis", "shape", "labels"), [(1, (4, 3), (4,)), (1, (4, 3), (4, 1)), (-1, (2, 3, 5), (2, 3)), (2, (2, 3, 5), (6,)),
                                  (1, (2, 3, 5), (2,)), (0, (7,), (1,))],
)  # fmt: skip
def test_axes_from_the_given_one_on_are_the_classes(axis: int, shape: tuple[int, ...], labels: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    rows, start = math.prod(labels), axis % len(shape)
    logits = rng.normal(size=shape)
    given_labels = rng.integers(0, math.prod(shape[start:]), labels).astype(np.int32)
    softmax, loss = run_operator("SoftmaxWithLoss", [logits, given_labels], 2, axis=axis)
    assert softmax.shape == shape
    np.testing.assert_allclose(loss, np.mean(row_losses(logits.reshape(rows, -1), given_labels.reshape(-1))))
    check_gradient("SoftmaxWithLoss", [logits, given_labels], outputs=2, weighted=[1], axis=axis)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_loss_and_gradient_of_extreme_logits_are_finite_and_right(dtype: Any) -> None:
    logits = np.array([[1000, -1000, 0], [-1e30, 1e30, 0], [88, 88, 88], [-2000, -2000, -2001]], dtype)
    labels = np.array([1, 1, 0, 2], np.int32)
    softmax, loss = run_operator("SoftmaxWithLoss", [logits, labels], 2)
    np.testing.assert_allclose(loss, np.mean(row_losses(logits.astype(np.float64), labels)), rtol=1e-6)
    assert loss > 500
    [dx] = run_operator("SoftmaxWithLossGradient", [logits, labels, softmax, np.ones((), dtype)])
    np.testing.assert_allclose(dx[0], [0.25, -0.25, 0], atol=1e-7)
    np.testing.assert_allclose(dx[1], 0, atol=1e-7)


def test_a_loss_near_zero_keeps_its_accuracy() -> None:
    logits = np.array([[0.0, -20.0]])
    _, loss = run_operator("SoftmaxWithLoss", [logits, np.array([0], np.int32)], 2)
    np.testing.assert_allclose(loss, np.log1p(np.exp(-20)), rtol=1e-6)


@pytest.mark.parametrize("spatial", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), NARROW)
def test_16_bit_logits_are_computed_in_float32(dtype: Any, tolerance: float, spatial: bool) -> None:
    rng = np.random.default_rng(2)
    shape = (3, 7, 5) if spatial else (300, 500)
    op_type = "SpatialSoftmaxWithLoss" if spatial else "SoftmaxWithLoss"
    logits = rng.normal(size=shape).astype(dtype)
    labels = rng.integers(0, 7, (3, 5) if spatial else 300).astype(np.int32)
    softmax, loss = run_operator(op_type, [logits, labels], 2)
    wide = run_operator(op_type, [logits.astype(np.float64), labels], 2)
    np.testing.assert_allclose(softmax.astype(np.float64), wide[0], tolerance, 1e-7)
    np.testing.assert_allclose(loss.astype(np.float64), wide[1], tolerance)
    [dx] = run_operator(f"{op_type}Gradient", [logits, labels, softmax, np.ones((), dtype)])
    [wide_dx] = run_operator(f"{op_type}Gradient", [logits.astype(np.float64), labels, wide[0], np.ones(())])
    np.testing.assert_allclose(dx.astype(np.float64), wide_dx, tolerance, 1e-4)


@settings(max_examples=10, deadline=None)
@given(rows=st.integers(1, 5), classes=st.integers(1, 5), weighted=st.booleans(), scale=st.sampled_from([1.0, 3.0]))
def test_gradient_by_labels_agrees_with_differences(rows: int, classes: int, weighted: bool, scale: float) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(rows, classes)), rng.integers(0, classes, rows).astype(np.int32)]
    inputs += [rng.uniform(0.1, 1, rows)] if weighted else []
    check_gradient("SoftmaxWithLoss", inputs, wanted=[0], outputs=2, weighted=[1], scale=scale)


@pytest.mark.parametrize("weighted", [False, True])
def test_label_distributions_cost_their_cross_entropy(weighted: bool) -> None:
    rng = np.random.default_rng(3)
    logits, labels = rng.normal(size=(6, 4)), rng.uniform(size=(6, 4))
    labels[2] = [0, 1, 0, 0]
    labels /= labels.sum(1, keepdims=True)
    weights = [rng.uniform(size=6)] if weighted else []
    softmax, loss = with_distribution(logits, labels, *weights)
    costs = -(labels * np.log(softmax)).sum(1)
    np.testing.assert_allclose(loss, np.average(costs, weights=weights[0] if weighted else None))
    inputs = [logits, labels, *weights]
    check_gradient("SoftmaxWithLoss", inputs, wanted=[0], outputs=2, weighted=[1], label_prob=1)


def test_a_distribution_over_impossible_classes_costs_as_much_as_a_probability_of_1e_20() -> None:
    labels = np.array([[0.5, 0.5]])
    _, loss = with_distribution(np.array([[0.0, -1e5]]), labels)
    np.testing.assert_allclose(loss, -0.5 * math.log(1e-20))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    batch=st.integers(1, 2),
    classes=st.integers(1, 4),
    pixels=st.lists(st.integers(1, 3), max_size=2),
    weighted=st.booleans(),
)
def test_spatial_loss_passes_over_pixels_without_a_label(
    batch: int, classes: int, pixels: list[int], weighted: bool
) -> None:
    rng = np.random.default_rng(classes)
    logits = rng.normal(size=(batch, classes, *pixels))
    labels = rng.integers(-1, classes, (batch, *pixels)).astype(np.int32)
    weights = rng.uniform(0.1, 2, labels.shape)
    inputs = [logits, labels, weights] if weighted else [logits, labels]
    softmax, loss = run_operator("SpatialSoftmaxWithLoss", inputs, 2, scale=2.0)
    rows = np.moveaxis(logits, 1, -1).reshape(-1, classes)
    used = labels.reshape(-1) >= 0
    if used.any():
        costs = row_losses(rows[used], labels.reshape(-1)[used])
        wanted = 2 * np.average(costs, weights=weights.reshape(-1)[used] if weighted else None)
    else:
        wanted = 0
    np.testing.assert_allclose(loss, wanted)
    np.testing.assert_allclose(softmax.sum(1), 1)
    found = check_gradient("SpatialSoftmaxWithLoss", inputs, wanted=[0], outputs=2, weighted=[1], scale=2.0)
    assert not np.moveaxis(found[0], 1, -1).reshape(-1, classes)[~used].any()


def test_nan_spoils_the_loss_but_not_from_an_ignored_pixel() -> None:
    logits, labels = np.zeros((1, 2, 3)), np.array([[0, -1, 1]], np.int32)
    logits[0, 0, 1] = np.nan
    softmax, loss = run_operator("SpatialSoftmaxWithLoss", [logits, labels], 2)
    np.testing.assert_allclose(loss, math.log(2))
    [dx] = run_operator("SpatialSoftmaxWithLossGradient", [logits, labels, softmax, np.ones(())])
    assert not dx[0, :, 1].any()
    labels[0, 1] = 0
    assert np.isnan(run_operator("SpatialSoftmaxWithLoss", [logits, labels], 2)[1])


@pytest.mark.parametrize("op_type", ["SoftmaxWithLoss", "SpatialSoftmaxWithLoss"])
def test_an_empty_batch_costs_nothing(op_type: str) -> None:
    logits, labels = np.zeros((0, 4), np.float32), np.zeros(0, np.int32)
    softmax, loss = run_operator(op_type, [logits, labels], 2)
    assert softmax.shape == (0, 4)
    assert loss == 0
    [dx] = run_operator(f"{op_type}Gradient", [logits, labels, softmax, np.ones((), np.float32)])
    assert dx.shape == (0, 4)


def test_weights_that_sum_to_zero_give_no_loss_and_no_gradient() -> None:
    logits, labels, weights = np.ones((2, 3)), np.array([0, 1], np.int32), np.zeros(2)
    softmax, loss = run_operator("SoftmaxWithLoss", [logits, labels, weights], 2)
    assert loss == 0
    assert not run_operator("SoftmaxWithLossGradient", [logits, labels, weights, softmax, np.ones(())])[0].any()


def test_what_depends_on_the_softmax_is_differentiated_too() -> None:
    rng = np.random.default_rng(5)
    inputs = [rng.normal(size=(3, 4)), np.array([0, 3, 2], np.int32)]
    check_gradient("SoftmaxWithLoss", inputs, outputs=2)
    check_gradient("SoftmaxWithLoss", inputs, outputs=2, weighted=[0])
    spatial = [rng.normal(size=(2, 3, 2)), np.array([[0, -1], [1, 2]], np.int32)]
    check_gradient("SpatialSoftmaxWithLoss", spatial, outputs=2)


def test_gradient_maker_passes_the_softmax_and_the_weights() -> None:
    definition = operator_def("SoftmaxWithLoss", ["x", "label", "w"], ["p", "loss"], scale=2.0)
    [made] = gradient(definition, [None, "dloss"]).operators
    assert list(made.input) == ["x", "label", "w", "p", "dloss"]
    assert list(made.output) == ["x_grad"]
    assert [arg.name for arg in made.arg] == ["scale"]


@pytest.mark.parametrize("op_type", ["SoftmaxWithLoss", "SpatialSoftmaxWithLoss"])
@pytest.mark.parametrize("bad", [3, 17, -2])
def test_a_label_out_of_range_is_named_with_its_place_in_forward_and_gradient(op_type: str, bad: int) -> None:
    logits, labels = np.zeros((4, 3), np.float32), np.array([0, 2, bad, bad], np.int32)
    message = rf"{op_type}.* 'y0'.*label {bad} at position \[2\] of blob 'x1' is out of range: expected 0 to 2 \(3 cl"
    with pytest.raises(OperatorError, match=message) as caught:
        run_operator(op_type, [logits, labels], 2)
    assert isinstance(caught.value.__cause__, FeedError)
    with pytest.raises(OperatorError, match=rf"label {bad} at position \[2\] of blob 'x1' is out of range"):
        run_operator(f"{op_type}Gradient", [logits, labels, logits, np.ones((), np.float32)])


def test_a_net_goes_on_after_a_bad_label_was_fed_once() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.zeros((2, 4)))
    workspace.feed_blob("label", np.array([0, 9], np.int32))
    definition = operator_def("SoftmaxWithLoss", ["x", "label"], ["p", "loss"])
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        with pytest.raises(OperatorError, match=r"label 9 at position \[1\] of blob 'label'"):
            net.run()
        workspace.feed_blob("label", np.array([0, 3], np.int32))
        net.run()
    np.testing.assert_allclose(workspace.fetch_blob("loss"), math.log(4))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([[0.5, 0.5], [0.5, 0.6]], r"the probabilities of row 1 of blob 'label' must sum to 1, found 1\.1"),
        ([[0.5, 0.5], [1.5, -0.5]], r"probability -0\.5 at position \[1, 1\] of blob 'label' must be at least 0"),
        ([[0.5, 0.5], [np.nan, 1]], r"probability nan at position \[1, 0\]"),
    ],
)
def test_labels_that_are_no_distribution_are_refused(labels: Any, message: str) -> None:
    with pytest.raises(OperatorError, match=message):
        with_distribution(np.zeros((2, 2)), np.array(labels))


def test_losses_refuse_what_does_not_fit() -> None:
    logits, labels = np.zeros((4, 3), np.float32), np.zeros(4, np.int32)
    with pytest.raises(ShapeError, match=r"labels 'x1' must have 4 elements .*found shape \(3,\)"):
        run_operator("SoftmaxWithLoss", [logits, labels[:3]], 2)
    with pytest.raises(ShapeError, match=r"'x1' must be one of int32, int64, found float32"):
        run_operator("SoftmaxWithLoss", [logits, labels.astype(np.float32)], 2)
    with pytest.raises(ShapeError, match=r"there must be 4 weights, one per row, found shape \(3,\)"):
        run_operator("SoftmaxWithLoss", [logits, labels, np.ones(3, np.float32)], 2)
    with pytest.raises(ShapeError, match=r"probabilities for 4 rows and 3 classes, found shape \(4, 2\)"):
        run_operator("SoftmaxWithLoss", [logits, np.ones((4, 2), np.float32)], 2, label_prob=1)
    with pytest.raises(ArgumentError, match="'scale' must be at least 0, found -1"):
        run_operator("SoftmaxWithLoss", [logits, labels], 2, scale=-1.0)
    with pytest.raises(ArgumentError, match="'scale' is not a number"):
        run_operator("SoftmaxWithLoss", [logits, labels], 2, scale=float("nan"))
    with pytest.raises(ArgumentError, match="'order' must be NCHW, found 'NHWC'"):
        run_operator("SoftmaxWithLoss", [logits, labels], 2, order="NHWC")
    with pytest.raises(ShapeError, match=r"argument 'axis' must be in \[-2, 1\], found 2"):
        run_operator("SoftmaxWithLoss", [logits, labels], 2, axis=2)
    with pytest.raises(ShapeError, match="there must be at least one class"):
        run_operator("SoftmaxWithLoss", [logits[:, :0], labels], 2)
    with pytest.raises(ArgumentError, match="does not know the argument 'label_prob'"):
        run_operator("SpatialSoftmaxWithLoss", [logits, logits], 2, label_prob=1)
    with pytest.raises(ShapeError, match=r"the gradient 'x3' must have one element, found shape \(2,\)"):
        run_operator("SoftmaxWithLossGradient", [logits, labels, logits, np.ones(2, np.float32)])


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=3), dtype=st.sampled_from([np.float32, np.float64, np.float16]))
def test_averaged_loss_is_the_mean_and_zero_of_nothing(shape: list[int], dtype: Any) -> None:
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    [loss] = run_operator("AveragedLoss", [x])
    assert (loss.shape, loss.dtype) == ((), dtype)
    wanted = math.fsum(x.reshape(-1).tolist()) / x.size if x.size else 0
    np.testing.assert_allclose(loss, wanted, rtol=2e-3 if dtype == np.float16 else 1e-6, atol=1e-7)
    if dtype == np.float64 and x.size:
        check_gradient("AveragedLoss", [x])
    [dx] = run_operator("AveragedLossGradient", [x, np.full((), 3, dtype)])
    np.testing.assert_allclose(dx, np.full(shape, 3 / max(1, x.size)), rtol=1e-3)


def test_averaged_loss_of_many_float32_elements_does_not_lose_the_small_ones() -> None:
    x = np.full(3_000_000, 0.1, np.float32)
    np.testing.assert_allclose(run_operator("AveragedLoss", [x])[0], np.float64(np.float32(0.1)), rtol=2e-7)
