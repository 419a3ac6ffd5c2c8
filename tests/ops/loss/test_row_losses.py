"""Losses of rows: cross entropies of probabilities and logits, distances, similarities; and MakeTwoClass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, OperatorError, ShapeError
from tests.ops.gradient_checks import check_gradient
from tests.ops.running import Array, operator_def, run_operator

Number = Callable[..., float]


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def mean_of(terms: Callable[..., float]) -> Number:
    return lambda *rows: -math.fsum(map(terms, *rows)) / max(1, len(rows[0]))


def cosine(x: list[float], y: list[float]) -> float:
    lengths = [max(math.hypot(*row), 1e-6) for row in (x, y)]
    return math.fsum(a / lengths[0] * (b / lengths[1]) for a, b in zip(x, y, strict=True))


PAIRS: dict[str, Number] = {
    "SquaredL2Distance": lambda x, y: math.dist(x, y) ** 2 / 2,
    "L1Distance": lambda x, y: math.fsum(abs(a - b) for a, b in zip(x, y, strict=True)),
    "DotProduct": lambda x, y: math.fsum(a * b for a, b in zip(x, y, strict=True)),
    "CosineSimilarity": cosine,
}
LOGITS: dict[str, tuple[str, dict[str, Any], Number]] = {
    "plain": ("SigmoidCrossEntropyWithLogits", {}, mean_of(lambda x, t: -t * softplus(-x) - (1 - t) * softplus(x))),
    "log D": (
        "SigmoidCrossEntropyWithLogits",
        {"log_D_trick": 1},
        mean_of(lambda x, t: -(2 * t - 1) * softplus(-x)),
    ),
    "unjoined": (
        "SigmoidCrossEntropyWithLogits",
        {"unjoined_lr_loss": 1},
        mean_of(lambda x, t: t * x - (1 - t) * softplus(x)),
    ),
    "weighted": (
        "WeightedSigmoidCrossEntropyWithLogits",
        {},
        mean_of(lambda x, t, w: w * (-t * softplus(-x) - (1 - t) * softplus(x))),
    ),
}
TYPES = [(np.float64, 1e-12), (np.float32, 4e-6), (np.float16, 1e-2), (ml_dtypes.bfloat16, 8e-2)]


def rows_of(arrays: list[Array], axis: int) -> list[tuple[list[float], ...]]:
    """The rows of arrays of one shape, as lists; `axis` is the first of a row."""
    shape = (math.prod(arrays[0].shape[:axis]), math.prod(arrays[0].shape[axis:]))
    return list(zip(*(array.astype(np.float64).reshape(shape).tolist() for array in arrays), strict=True))


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 7, 30]), min_size=1, max_size=3)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(op_type=st.sampled_from(sorted(PAIRS)), shape=SHAPES, kind=st.sampled_from(TYPES))
def test_distance_of_each_row_agrees_with_its_definition(
    op_type: str, shape: list[int], kind: tuple[Any, float]
) -> None:
    dtype, tolerance = kind
    rng = np.random.default_rng(len(shape))
    x, y = (rng.normal(size=shape).astype(dtype) for _ in range(2))
    [z] = run_operator(op_type, [x, y])
    assert (z.shape, z.dtype) == (tuple(shape[:1]), np.dtype(dtype))
    wanted = [PAIRS[op_type](*pair) for pair in rows_of([x, y], 1)]
    np.testing.assert_allclose(z.astype(np.float64), wanted, tolerance, tolerance * max(1, math.prod(shape[1:])) ** 0.5)


def test_equal_elements_have_no_gradient_in_l1_distance() -> None:
    x = np.array([[1.0, 2.0, 3.0]])
    dx, dy = run_operator("L1DistanceGradient", [x, np.array([[1.0, 3.0, 3.0 + 1e-13]]), np.array([2.0])], 2)
    assert dx.tolist() == [[0, -2, 0]]
    assert dy.tolist() == [[0, 2, 0]]


def test_cosine_of_a_row_of_zeros_is_zero_and_its_gradient_is_finite() -> None:
    x, y = np.zeros((1, 3)), np.ones((1, 3))
    assert run_operator("CosineSimilarity", [x, y])[0] == 0
    dx, dy = run_operator("CosineSimilarityGradient", [x, y, np.ones(1)], 2)
    np.testing.assert_allclose(dx, y / 1e-6 / math.sqrt(3))
    assert not dy.any()


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(case=st.sampled_from(sorted(LOGITS)), shape=SHAPES, kind=st.sampled_from(TYPES))
def test_cross_entropy_of_logits_agrees_with_its_definition(
    case: str, shape: list[int], kind: tuple[Any, float]
) -> None:
    dtype, tolerance = kind
    op_type, arguments, formula = LOGITS[case]
    rng = np.random.default_rng(2)
    x, target, weights = rng.normal(0, 4, shape), rng.uniform(size=shape), rng.uniform(size=shape)
    inputs = [a.astype(dtype) for a in ([x, target, weights] if case == "weighted" else [x, target])]
    [z] = run_operator(op_type, inputs, **arguments)
    assert (z.shape, z.dtype) == (tuple(shape[:-1]), np.dtype(dtype))
    wanted = np.array([formula(*row) for row in rows_of(inputs, len(shape) - 1)]).reshape(z.shape)
    np.testing.assert_allclose(z.astype(np.float64), wanted, tolerance, tolerance)


@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_cross_entropy_of_extreme_logits_is_right_and_so_is_its_gradient(case: str, dtype: Any) -> None:
    op_type, arguments, formula = LOGITS[case]
    x = np.array([[-1e4], [-100], [-30], [30], [100], [1e4]], dtype)
    for target in (0.0, 1.0):
        inputs = [x, np.full_like(x, target), *([np.ones_like(x)] if case == "weighted" else [])]
        [z] = run_operator(op_type, inputs, **arguments)
        wanted = [formula(*row) for row in rows_of(inputs, 1)]
        np.testing.assert_allclose(z, wanted, rtol=1e-6, atol=1e-40)
        [dx] = run_operator(f"{op_type}Gradient", [np.ones(6, dtype), *inputs], **arguments)
        assert np.isfinite(dx).all()
        assert (np.abs(dx) <= 2).all()


@pytest.mark.parametrize("case", LOGITS)
@pytest.mark.parametrize("shape", [(4, 5), (3,), (2, 3, 2), (0, 3), (3, 0)], ids=str)
def test_gradients_by_logits_agree_with_differences(case: str, shape: tuple[int, ...]) -> None:
    op_type, arguments, _ = LOGITS[case]
    rng = np.random.default_rng(0)
    inputs = [rng.normal(0, 2, shape), *(rng.uniform(size=shape) for _ in range(2 if case == "weighted" else 1))]
    check_gradient(op_type, inputs, wanted=[0], **arguments)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(0, 50), classes=st.integers(1, 50), kind=st.sampled_from(TYPES))
def test_cross_entropies_of_probabilities_agree_with_their_definitions(
    rows: int, classes: int, kind: tuple[Any, float]
) -> None:
    dtype, tolerance = kind
    rng = np.random.default_rng(rows)
    x, target = (rng.uniform(0.01, 1, (rows, classes)).astype(dtype) for _ in range(2))
    labels = rng.integers(0, classes, rows).astype(np.int32)
    [z] = run_operator("LabelCrossEntropy", [x, labels])
    pairs = rows_of([x, target], 1)
    np.testing.assert_allclose(
        z.astype(np.float64),
        [-math.log(p[label]) for (p, _), label in zip(pairs, labels, strict=True)],
        tolerance,
        tolerance,
    )
    [z] = run_operator("CrossEntropy", [x, target])
    wanted = [-math.fsum(t * math.log(p) for p, t in zip(*pair, strict=True)) for pair in pairs]
    np.testing.assert_allclose(z.astype(np.float64), wanted, tolerance * 2, tolerance)


@pytest.mark.parametrize("shape", [(4, 3), (0, 3), (2, 3, 2), (5,)], ids=str)
def test_gradients_of_label_cross_entropy_agree_with_differences(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(0.1, 1, shape)
    rows, classes = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, shape[0])
    check_gradient("LabelCrossEntropy", [x, rng.integers(0, classes, rows)], wanted=[0])


def test_a_probability_of_zero_counts_as_1e_20() -> None:
    x = np.array([[0.0, 1.0]], np.float32)
    labels = np.array([0], np.int32)
    np.testing.assert_allclose(run_operator("LabelCrossEntropy", [x, labels])[0], [-math.log(1e-20)], rtol=1e-6)
    [dx] = run_operator("LabelCrossEntropyGradient", [x, labels, np.ones(1, np.float32)])
    np.testing.assert_allclose(dx, [[-1e20, 0]], rtol=1e-6)
    target = np.array([[0.5, 0.5]], np.float32)
    np.testing.assert_allclose(run_operator("CrossEntropy", [x, target])[0], [-math.log(1e-20) / 2], rtol=1e-6)


def test_nan_stays_in_its_row() -> None:
    x = np.full((3, 4), 0.5)
    x[1, 2] = np.nan
    assert np.isnan(run_operator("LabelCrossEntropy", [x, np.full(3, 2)])[0]).tolist() == [False, True, False]


@pytest.mark.parametrize("shape", [(4,), (4, 1), (2, 3), (0,), ()], ids=str)
def test_two_classes_are_made_of_one_probability(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).uniform(size=shape)
    [y] = run_operator("MakeTwoClass", [x])
    np.testing.assert_array_equal(y, np.stack([1 - x, x], axis=-1))
    assert check_gradient("MakeTwoClass", [x])[0].shape == shape


def test_gradient_makers_pass_the_inputs_in_caffe2s_order() -> None:
    [made] = gradient(operator_def("L1Distance", ["x", "y"], ["z"]), ["dz"]).operators
    assert (list(made.input), list(made.output)) == (["x", "y", "dz"], ["x_grad", "y_grad"])
    [made] = gradient(operator_def("SigmoidCrossEntropyWithLogits", ["x", "t"], ["z"]), ["dz"]).operators
    assert (list(made.input), list(made.output)) == (["dz", "x", "t"], ["x_grad"])
    [made] = gradient(operator_def("LabelCrossEntropy", ["x", "label"], ["z"]), ["dz"]).operators
    assert (list(made.input), list(made.output)) == (["x", "label", "dz"], ["x_grad"])


@pytest.mark.parametrize("bad", [-1, 3])
def test_a_label_out_of_range_is_named_with_its_place(bad: int) -> None:
    x, labels = np.full((4, 3), 0.5, np.float32), np.array([0, 1, 2, bad], np.int32)
    message = rf"label {bad} at position \[3\] of blob 'x1' is out of range: expected 0 to 2 \(3 classes\)"
    with pytest.raises(OperatorError, match=message):
        run_operator("LabelCrossEntropy", [x, labels])
    with pytest.raises(OperatorError, match=message):
        run_operator("LabelCrossEntropyGradient", [x, labels, np.ones(4, np.float32)])


def test_row_losses_refuse_what_does_not_fit() -> None:
    x = np.ones((4, 3), np.float32)
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(4, 3\) .*found \(3, 4\)"):
        run_operator("SquaredL2Distance", [x, x.T.copy()])
    with pytest.raises(ShapeError, match="share one element type, found float32, float64"):
        run_operator("DotProduct", [x, x.astype(np.float64)])
    with pytest.raises(ShapeError, match=r"'x0' must be one of float32.*found int32"):
        run_operator("L1Distance", [x.astype(np.int32)] * 2)
    with pytest.raises(ShapeError, match="must have at least 1 axis, found a scalar"):
        run_operator("L1Distance", [np.float32(1), np.float32(1)])
    with pytest.raises(ShapeError, match=r"'x2' must have shape \(4,\) \(one element a row\), found \(3,\)"):
        run_operator("SquaredL2DistanceGradient", [x, x, np.ones(3, np.float32)], 2)
    with pytest.raises(ArgumentError, match="'log_D_trick' and 'unjoined_lr_loss' cannot both be 1"):
        run_operator("SigmoidCrossEntropyWithLogits", [x, x], log_D_trick=1, unjoined_lr_loss=1)
    with pytest.raises(ShapeError, match=r"labels 'x1' must have 4 elements"):
        run_operator("LabelCrossEntropy", [x, np.zeros(3, np.int32)])
    with pytest.raises(ShapeError, match=r"the last axis of dY must have size 2, found shape \(4, 3\)"):
        run_operator("MakeTwoClassGradient", [x])
