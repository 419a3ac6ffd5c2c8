"""WeightedSum, its gradient, and the operators on rows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.gradient import gradient
from dagexec.errors import DagexecError, GradientError, SchemaError, ShapeError
from tests.ops.optimize.updating import DEVICES, Array, run_steps, scalar
from tests.ops.running import operator_def, run_operator


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4), st.lists(st.integers(0, 4), max_size=3), st.sampled_from([np.float32, np.float64]), st.booleans()
)
def test_tensors_are_added_with_their_weights(terms: int, shape: list[int], dtype: type, one: bool) -> None:
    rng = np.random.default_rng(terms)
    tensors = [rng.standard_normal(shape).astype(dtype) for _ in range(terms)]
    weights = [1.0 if one and k == 0 else float(rng.integers(-8, 8)) / 4 for k in range(terms)]
    inputs = [array for pair in zip(tensors, map(scalar, weights), strict=True) for array in pair]
    expected = np.zeros(shape)
    for tensor, weight in zip(tensors, weights, strict=True):
        expected += weight * tensor.astype(np.float64)
    (result,) = run_operator("WeightedSum", inputs)
    assert result.dtype == dtype
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    names = [f"x{k}" for k in range(len(inputs))]
    inside = run_steps("WeightedSum", names, ["x0"], dict(zip(names, inputs, strict=True)), [{}])
    assert inside["x0"].tobytes() == result.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_it_is_gradient_descent(device: str) -> None:
    blobs = {"w": np.arange(40_000, dtype=np.float32), "one": scalar(1), "g": np.ones(40_000, np.float32)}
    fed = [{"rate": scalar(rate)} for rate in (-0.5, -0.25)]
    inputs = ["w", "one", "g", "rate"]
    result = run_steps("WeightedSum", inputs, ["w"], {**blobs, **fed[0]}, fed, device=device)
    assert result["w"].tolist() == (np.arange(40_000) - 0.75).tolist()


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([np.ones(3, np.float32), scalar(1), np.ones(3, np.float32)], "an odd number of inputs"),
        ([np.ones(3, np.float32), scalar(1), np.ones(4, np.float32), scalar(1)], "that of the first tensor"),
        ([np.ones(3, np.float32), np.ones(3, np.float32)], "a weight, must have one element"),
        ([np.ones(3, np.float32), scalar(1), np.ones(3), scalar(1)], "must share one element type"),
        ([np.ones(3, np.int32), scalar(1)], "must be one of float32, float64, found int32"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(inputs: list[Array], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        run_operator("WeightedSum", inputs)


def test_weights_have_no_gradient_unless_asked_for() -> None:
    definition = operator_def("WeightedSum", ["x0", "w0", "x1", "w1"], ["y"])
    assert gradient(definition, ["y_grad"]).inputs == ("x0_grad", None, "x1_grad", None)


def test_gradients_of_float32_are_those_of_float64() -> None:
    rng = np.random.default_rng(1)
    inputs = [
        rng.standard_normal(50),
        rng.standard_normal(50),
        np.array([0.75]),
        rng.standard_normal(50),
        np.array([3.0]),
    ]
    wide = run_operator("WeightedSumGradient", inputs, 4, grad_on_w=1)
    narrow = run_operator("WeightedSumGradient", [array.astype(np.float32) for array in inputs], 4, grad_on_w=1)
    for one, other in zip(wide, narrow, strict=True):
        assert other.dtype == np.float32
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_a_gradient_with_a_wrong_number_of_outputs_is_refused() -> None:
    x = np.ones(3, np.float32)
    with pytest.raises(ShapeError, match="expected 2 outputs, found 1"):
        run_operator("WeightedSumGradient", [x, x, scalar(1), x, scalar(2)])


def scatter(table: Array, indices: Array, pairs: list[tuple[Array, float]], first: float, device: str = "cpu") -> Array:
    """The table after ScatterWeightedSum."""
    blobs = {"table": table, "w0": scalar(first), "indices": indices}
    names = ["table", "w0", "indices"]
    for k, (values, weight) in enumerate(pairs, 1):
        blobs |= {f"x{k}": values, f"w{k}": scalar(weight)}
        names += [f"x{k}", f"w{k}"]
    return run_steps("ScatterWeightedSum", names, ["table"], blobs, [{}], device=device)["table"]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 4), max_size=8),
    st.sampled_from([(), (3,), (2, 2)]),
    st.sampled_from([1.0, 0.5]),
    st.integers(0, 2),
)
def test_rows_are_scaled_and_added_to_in_order(
    rows: int, drawn: list[int], width: tuple[int, ...], first: float, terms: int
) -> None:
    rng = np.random.default_rng(rows)
    indices = np.array([index % rows for index in drawn], np.int64)
    table = rng.standard_normal((rows, *width)).astype(np.float32)
    pairs = [(rng.standard_normal((len(drawn), *width)).astype(np.float32), 0.25 * k - 1) for k in range(terms)]
    expected = table.astype(np.float64)
    for index in indices:
        expected[index] *= first
    for values, weight in pairs:
        for index, row in zip(indices, values, strict=True):
            expected[index] += weight * row
    np.testing.assert_allclose(scatter(table, indices, pairs, first), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_wide_rows_are_added_to(device: str) -> None:
    table, values = np.zeros((4, 20_000), np.float32), np.ones((3, 20_000), np.float32)
    result = scatter(table, np.array([2, 0, 2], np.int32), [(values, -0.5)], 1.0, device)
    assert result[:, 0].tolist() == [-0.5, 0, -1, 0]
    assert (result == result[:, :1]).all()


def test_an_index_outside_the_table_is_refused() -> None:
    table, values = np.zeros((4, 2), np.float32), np.ones((2, 2), np.float32)
    with pytest.raises(DagexecError, match=r"index 4 at place 1 must be in \[0, 4\)"):
        scatter(table, np.array([0, 4]), [(values, 1.0)], 1.0)


def test_scattered_rows_must_fit() -> None:
    table, indices = np.zeros((4, 2), np.float32), np.array([0, 1])
    with pytest.raises(ShapeError, match=r"must have shape \(2, 2\) \(a row for each index\), found \(2, 3\)"):
        scatter(table, indices, [(np.ones((2, 3), np.float32), 1.0)], 1.0)
    with pytest.raises(ShapeError, match="must share one element type"):
        scatter(table, indices, [(np.ones((2, 2)), 1.0)], 1.0)
    with pytest.raises(ShapeError, match="must be one of int32, int64"):
        scatter(table, np.array([0.0, 1.0]), [(np.ones((2, 2), np.float32), 1.0)], 1.0)
    names = ["table", "w0", "indices", "x1"]
    blobs = {"table": table, "w0": scalar(1), "indices": indices, "x1": np.ones((2, 2), np.float32)}
    with pytest.raises(ShapeError, match="an odd number of inputs"):
        run_steps("ScatterWeightedSum", names, ["table"], blobs, [{}])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=8),
    st.sampled_from([(), (3,)]),
    st.sampled_from([np.float32, np.int32, np.bool_]),
)
def test_assigned_rows_are_the_last_of_each_index(indices: list[int], width: tuple[int, ...], dtype: type) -> None:
    rng = np.random.default_rng(0)
    table = rng.integers(0, 2, (5, *width)).astype(dtype)
    slices = rng.integers(0, 2, (len(indices), *width)).astype(dtype)
    blobs = {"table": table, "indices": np.array(indices, np.int64), "slices": slices}
    result = run_steps("ScatterAssign", list(blobs), ["table"], blobs, [{}])["table"]
    for index, row in enumerate(result):
        places = [place for place, found in enumerate(indices) if found == index]
        assert (row == (slices[places[-1]] if places else table[index])).all()


def test_assignments_must_fit_and_be_in_place() -> None:
    blobs = {"table": np.zeros((4, 2)), "indices": np.array([0]), "slices": np.zeros((1, 3))}
    with pytest.raises(ShapeError, match=r"must have shape \(1, 2\)"):
        run_steps("ScatterAssign", list(blobs), ["table"], blobs, [{}])
    for op_type, names in (("ScatterAssign", ["a", "i", "b"]), ("ScatterWeightedSum", ["a", "w", "i", "b", "v"])):
        with pytest.raises(SchemaError, match="must overwrite input"):
            run_steps(op_type, names, ["other"], {name: np.zeros((1, 1)) for name in names}, [{}])
        with pytest.raises(GradientError, match="after the gradients are known"):
            gradient(operator_def(op_type, names, ["a"]), ["dy"])
