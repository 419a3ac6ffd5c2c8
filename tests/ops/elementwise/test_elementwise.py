"""Elementwise operators of several inputs beyond their formulas (`test_formulas`)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from dagexec.errors import ArgumentError, SchemaError, ShapeError
from tests.ops.running import Array, operator_def, run_net, run_operator, workspace_of


def sample(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).uniform(0.5, 3, shape).astype(dtype)


def run_in_place(op_type: str, inputs: dict[str, Array], output: str, **arguments: Any) -> Array:
    workspace = workspace_of(inputs)
    definition = operator_def(op_type, list(inputs), [output], **arguments)
    run_net(workspace, definition)
    return workspace.fetch_blob(output)


@pytest.mark.parametrize("dtype", [np.int8, np.int32, np.int64])
def test_integer_division_rounds_towards_zero_as_c_does(dtype: type) -> None:
    a, b = np.array([7, -7, 7, -7, 6, 0, 5], dtype), np.array([2, 2, -2, -2, 3, 5, 0], dtype)
    assert run_operator("Div", [a, b])[0].tolist() == [3, -3, -3, 3, 2, 0, 0]
    assert run_in_place("Div", {"a": a, "b": b}, "a").tolist() == [3, -3, -3, 3, 2, 0, 0]


def test_integer_division_of_the_least_value_by_minus_one_survives() -> None:
    least = np.iinfo(np.int32).min
    [c] = run_operator("Div", [np.array([least, least], np.int32), np.array([-1, 2], np.int32)])
    assert c[1] == least // 2


@pytest.mark.parametrize(
    ("b_shape", "arguments", "view"),
    [
        ((5,), {}, (1, 1, 1, 5)),
        ((4, 5), {}, (1, 1, 4, 5)),
        ((3,), {"axis": 1}, (1, 3, 1, 1)),
        ((3, 4), {"axis": 1}, (1, 3, 4, 1)),
        ((2,), {"axis": 0}, (2, 1, 1, 1)),
        ((3,), {"axis_str": "C"}, (1, 3, 1, 1)),
        ((5,), {"axis_str": "C", "order": "NHWC"}, (1, 1, 1, 5)),
        ((1, 4, 1), {}, (1, 1, 4, 1)),
        ((1, 1), {}, (1, 1, 1, 1)),
        ((), {}, (1, 1, 1, 1)),
    ],
)
def test_older_broadcasting_matches_b_to_a_run_of_as_axes(
    b_shape: tuple[int, ...], arguments: dict[str, Any], view: tuple[int, ...]
) -> None:
    a, b = sample(0, 2, 3, 4, 5), sample(1, *b_shape)
    [c] = run_operator("Sub", [a, b], broadcast=1, **arguments)
    np.testing.assert_array_equal(c, a - b.reshape(view))


@pytest.mark.parametrize(
    ("b_shape", "arguments"),
    [((3,), {}), ((4,), {"axis": 1}), ((3,), {"axis": 4}), ((2, 2, 3, 4, 5), {}), ((3, 1, 5), {})],
)
def test_older_broadcasting_refuses_a_b_that_matches_no_such_run(
    b_shape: tuple[int, ...], arguments: dict[str, Any]
) -> None:
    with pytest.raises(ShapeError, match=r"B of shape .* must match a run of A's axes \(2, 3, 4, 5\)"):
        run_operator("Add", [sample(0, 2, 3, 4, 5), sample(1, *b_shape)], broadcast=1, **arguments)


def test_axis_without_broadcast_is_refused_since_it_would_be_ignored() -> None:
    with pytest.raises(ArgumentError, match="'axis' requires broadcast=1"):
        run_operator("Add", [sample(0, 2, 3), sample(1, 3)], axis=1)
    with pytest.raises(ArgumentError, match="'axis_str' must be a letter of 'NCHW', without 'axis'; found 'D'"):
        run_operator("Add", [sample(0, 2, 3), sample(1, 3)], broadcast=1, axis_str="D")


def test_axis_spelt_out_with_its_default_is_no_axis() -> None:
    a, b = sample(0, 2, 3), sample(1, 3)
    [c] = run_operator("Sub", [a, b], broadcast=0, axis=-1, axis_str="")
    np.testing.assert_array_equal(c, a - b)


def test_binary_operators_refuse_shapes_and_types_that_do_not_meet() -> None:
    with pytest.raises(ShapeError, match=r"shapes \(2, 3\), \(2,\) do not broadcast together.*x0: float32"):
        run_operator("Add", [sample(0, 2, 3), sample(1, 2)])
    with pytest.raises(ShapeError, match="share one element type, found float32, float64"):
        run_operator("Add", [sample(0, 2), sample(1, 2, dtype=np.float64)])
    with pytest.raises(ShapeError, match=r"'x0' must be one of .*, found bool"):
        run_operator("Mul", [np.array([True]), np.array([True])])
    with pytest.raises(ShapeError, match="'x0' must be one of bool, found float32"):
        run_operator("And", [sample(0, 2), sample(1, 2)])


def test_in_place_is_refused_when_the_result_has_another_shape() -> None:
    with pytest.raises(ShapeError, match=r"output float32\[3, 4\] cannot overwrite input 'b', which is float32\[4\]"):
        run_in_place("Add", {"b": sample(1, 4), "a": sample(0, 3, 4)}, "b")
    with pytest.raises(ShapeError, match="cannot overwrite input 'b'"):
        run_in_place("Sum", {"b": sample(1, 4), "a": sample(0, 3, 4)}, "b")


def test_in_place_is_refused_for_comparisons_and_for_the_divisor() -> None:
    with pytest.raises(SchemaError, match="may not overwrite input 0 in place"):
        run_in_place("LT", {"a": sample(0, 3), "b": sample(1, 3)}, "a")
    with pytest.raises(SchemaError, match="may not overwrite input 1 in place"):
        run_in_place("Div", {"a": sample(0, 3), "b": sample(1, 3)}, "b")


@pytest.mark.parametrize("exponent", [2, 0.5, -1, 3, 1.7, 0, 1])
def test_pow_takes_its_exponent_as_an_argument(exponent: float) -> None:
    x = sample(0, 3, 4)
    [y] = run_operator("Pow", [x], exponent=exponent)
    np.testing.assert_allclose(y, [[value**exponent for value in row] for row in x.tolist()], rtol=1e-6)
    np.testing.assert_array_equal(run_in_place("Pow", {"x": x}, "x", exponent=exponent), y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
def test_pow_takes_its_exponent_as_an_input_also_of_another_type(dtype: type) -> None:
    x, exponent = sample(0, 3, 2), np.array([2, 3], dtype)
    [y] = run_operator("Pow", [x, exponent])
    assert y.dtype == np.float32
    np.testing.assert_allclose(y, x.astype(np.float64) ** [2, 3], rtol=1e-6)


def test_pow_refuses_two_exponents_none_and_nan() -> None:
    for inputs, arguments in (([sample(0, 2)], {}), ([sample(0, 2), sample(1, 2)], {"exponent": 2.0})):
        with pytest.raises(ArgumentError, match="the exponent must be given once"):
            run_operator("Pow", inputs, **arguments)
    with pytest.raises(ArgumentError, match="'exponent' is not a number"):
        run_operator("Pow", [sample(0, 2)], exponent=float("nan"))


def test_sum_adds_in_list_order() -> None:
    xs = [np.array([value], np.float32) for value in (1e8, -1e8, 1.0)]
    assert run_operator("Sum", xs)[0][0] == 1
    assert run_operator("Sum", [xs[0], xs[2], xs[1]])[0][0] == 0


def test_sum_and_mean_of_16_bit_floats_round_once() -> None:
    xs = [np.array([value], np.float16) for value in (2048, 1, 1)]
    assert run_operator("Sum", xs)[0].tolist() == [2050]
    big = [np.array([60000], np.float16)] * 3
    assert run_operator("Mean", big)[0].tolist() == [60000]


def test_max_and_min_pass_nan_on() -> None:
    xs = [np.array([np.nan, 1, 2], np.float32), np.array([0, np.nan, 3], np.float32)]
    np.testing.assert_array_equal(run_operator("Max", xs)[0], [np.nan, np.nan, 3])
    np.testing.assert_array_equal(run_operator("Min", xs)[0], [np.nan, np.nan, 2])


def test_mean_refuses_integers_and_sum_booleans() -> None:
    with pytest.raises(ShapeError, match=r"must be one of float32.*, found int32"):
        run_operator("Mean", [np.array([1], np.int32)])
    with pytest.raises(ShapeError, match=r"must be one of .*, found bool"):
        run_operator("Sum", [np.array([True])])


@settings(max_examples=20, deadline=None)
@given(shapes=mutually_broadcastable_shapes(num_shapes=3, max_dims=3, max_side=3))
def test_where_selects_by_element_and_broadcasts_all_three(shapes: Any) -> None:
    c_shape, x_shape, y_shape = shapes.input_shapes
    c = np.random.default_rng(0).random(c_shape) > 0.5
    x, y = sample(1, *x_shape), sample(2, *y_shape)
    [z] = run_operator("Where", [c, x, y])
    assert z.shape == shapes.result_shape
    chosen = np.broadcast_arrays(c, x, y)
    expected = [p if k else q for k, p, q in zip(*(array.ravel() for array in chosen), strict=True)]
    np.testing.assert_array_equal(z.ravel(), expected)


def test_where_with_broadcast_on_rows_selects_rows() -> None:
    x, y = sample(0, 2, 3), sample(1, 2, 3)
    [z] = run_operator("Where", [np.array([True, False]), x, y], broadcast_on_rows=1)
    np.testing.assert_array_equal(z, [x[0], y[1]])
    with pytest.raises(ShapeError, match=r"C must have one axis.*found shape \(3,\)"):
        run_operator("Where", [np.ones(3, bool), x, y], broadcast_on_rows=1)
    with pytest.raises(ShapeError, match="'x0' must be one of bool, found float32"):
        run_operator("Where", [x, x, y])
