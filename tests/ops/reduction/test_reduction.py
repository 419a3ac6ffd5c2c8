"""Reductions against exact sums of Python numbers, onnxruntime, and element loops."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

from dagexec.errors import ArgumentError, OperatorError, ShapeError
from tests.ops.running import Array, run_operator

OF_LIST: dict[str, Callable[[list[float]], float]] = {
    "ReduceSum": math.fsum,
    "ReduceMean": lambda values: math.fsum(values) / len(values),
    "ReduceMax": max,
    "ReduceMin": min,
    "ReduceProd": math.prod,
    "ReduceL1": lambda values: math.fsum(map(abs, values)),
    "ReduceL2": lambda values: math.hypot(*values),
}


def sample(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def by_list(function: Callable[[list[float]], float], x: Array, axes: tuple[int, ...], keep: bool) -> Array:
    """`function` of the elements of each group, as a list of Python floats."""
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    rows = x.astype(np.float64).transpose(*rest, *axes).reshape(math.prod(x.shape[axis] for axis in rest), -1)
    shape = [1 if axis in axes else size for axis, size in enumerate(x.shape) if keep or axis not in axes]
    return np.array([function(row.tolist()) for row in rows]).reshape(shape)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(shape=st.lists(st.integers(1, 4), max_size=4), op_type=st.sampled_from(sorted(OF_LIST)), data=st.data())
def test_reductions_over_any_axes(shape: list[int], op_type: str, data: st.DataObject) -> None:
    x = sample(0, *shape)
    every = list(range(len(shape)))
    chosen = data.draw(st.lists(st.sampled_from(every), unique=True)) if shape else []
    given_axes = [axis - len(shape) if data.draw(st.booleans()) else axis for axis in chosen]
    keep = data.draw(st.booleans())
    [y] = run_operator(op_type, [x], axes=given_axes, keepdims=int(keep))
    expected = by_list(OF_LIST[op_type], x, tuple(sorted(chosen)) or tuple(every), keep)
    assert y.shape == expected.shape
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", OF_LIST)
def test_reductions_by_default_take_all_axes_and_keep_them(op_type: str) -> None:
    x = sample(0, 2, 3)
    [y] = run_operator(op_type, [x])
    np.testing.assert_allclose(y, [[OF_LIST[op_type](x.astype(np.float64).ravel().tolist())]], rtol=1e-5)


@pytest.mark.parametrize("op_type", OF_LIST)
def test_reductions_agree_with_onnxruntime(op_type: str) -> None:
    x = sample(0, 3, 4, 5)
    node = helper.make_node(op_type, ["x"], ["y"], axes=[0, 2], keepdims=0)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info("x", 1, x.shape)], [helper.make_tensor_value_info("y", 1, (4,))]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})
    np.testing.assert_allclose(run_operator(op_type, [x], axes=[0, 2], keepdims=0)[0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("op_type", sorted(set(OF_LIST) - {"ReduceProd"}))
def test_16_bit_floats_are_accumulated_in_float32(op_type: str, dtype: Any) -> None:
    x = np.random.default_rng(0).uniform(0.5, 1.5, (2, 20_000)).astype(dtype)
    [y] = run_operator(op_type, [x], axes=[1], keepdims=0)
    assert y.dtype == dtype
    expected = by_list(OF_LIST[op_type], x, (1,), False)
    np.testing.assert_allclose(y.astype(np.float64), expected, rtol=4e-3 if dtype != np.float16 else 5e-4)


def test_mean_of_16_bit_floats_does_not_overflow_on_the_way() -> None:
    x = np.full((1, 1000), 60000, np.float16)
    assert run_operator("ReduceMean", [x])[0].tolist() == [[60000]]


@pytest.mark.parametrize("op_type", ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1"])
def test_integers_are_reduced_exactly_in_their_type(op_type: str) -> None:
    x = np.array([[2**40 + 1, -3], [5, 7]], np.int64)
    [y] = run_operator(op_type, [x], axes=[0], keepdims=0)
    assert y.dtype == np.int64
    functions: dict[str, Callable[[list[int]], int]] = {"ReduceSum": sum, "ReduceL1": lambda v: sum(map(abs, v))}
    function = functions.get(op_type) or OF_LIST[op_type]
    assert y.tolist() == [function([2**40 + 1, 5]), function([-3, 7])]  # type: ignore[arg-type]


def test_sums_over_nothing_are_zero_means_nan_and_extremes_those_of_the_type() -> None:
    x = np.empty((2, 0), np.float32)
    assert run_operator("ReduceSum", [x], axes=[1], keepdims=0)[0].tolist() == [0, 0]
    assert run_operator("ReduceProd", [x], axes=[1], keepdims=0)[0].tolist() == [1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isnan(run_operator("ReduceMean", [x], axes=[1])[0]).all()
    assert run_operator("ReduceMax", [x], axes=[0], keepdims=0)[0].shape == (0,)
    limits = np.finfo(np.float32)
    for dtype, least, greatest, infinite in (
        (np.float32, limits.min, limits.max, 0),
        (np.float32, -np.inf, np.inf, 1),
        (np.int8, -128, 127, 1),
        (np.bool_, False, True, 0),
    ):
        nothing, arguments = np.empty((2, 0), dtype), {"axes": [1], "keepdims": 0, "infinite": infinite}
        assert run_operator("ReduceMax", [nothing], **arguments)[0].tolist() == [least, least]
        assert run_operator("ReduceMin", [nothing], **arguments)[0].tolist() == [greatest, greatest]
    for op_type in ("RowwiseMax", "ArgMax"):
        with pytest.raises(ShapeError, match="an axis without elements has no maximum"):
            run_operator(op_type, [np.empty((2, 1, 0), np.float32)])


def test_axes_may_be_an_input() -> None:
    x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    [y] = run_operator("ReduceSum", [x, np.array([-1, 0])], keepdims=0)
    assert y.tolist() == [3, 12]
    [y] = run_operator("ReduceL1", [-x, np.array([], np.int64)], noop_with_empty_axes=1)
    assert y.tolist() == x.tolist()
    for axes in ([3], [1, -2]):
        with pytest.raises(OperatorError, match=r"expected distinct axes in \[-3, 2\]"):
            run_operator("ReduceSum", [x, np.array(axes)])
    with pytest.raises(OperatorError, match="by both an input and the argument 'axes'"):
        run_operator("ReduceSum", [x, np.array([1])], axes=[1])


def test_extremes_pass_nan_on() -> None:
    x = np.array([[1, np.nan], [3, 4]], np.float32)
    np.testing.assert_array_equal(run_operator("ReduceMax", [x], axes=[1], keepdims=0)[0], [np.nan, 4])
    np.testing.assert_array_equal(run_operator("ReduceMin", [x], axes=[1], keepdims=0)[0], [np.nan, 3])


def test_reductions_refuse_bad_axes_and_types() -> None:
    x = sample(0, 2, 3)
    with pytest.raises(ShapeError, match=r"'axes' must be in \[-2, 1\], found \[2\]"):
        run_operator("ReduceSum", [x], axes=[2])
    with pytest.raises(ArgumentError, match=r"'axes' names an axis twice: \[1, -1\]"):
        run_operator("ReduceSum", [x], axes=[1, -1])
    with pytest.raises(ShapeError, match=r"must be one of float32.*found int32"):
        run_operator("ReduceMean", [x.astype(np.int32)])
    with pytest.raises(ShapeError, match=r"must be one of .*, found bool"):
        run_operator("ReduceSum", [x > 0])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("what", ["Sum", "Mean", "Max"])
def test_front_and_back_reductions_take_so_many_axes(what: str, count: int) -> None:
    x, function = sample(0, 2, 3, 4), OF_LIST[f"Reduce{what}"]
    [front] = run_operator(f"ReduceFront{what}", [x], num_reduce_dim=count)
    np.testing.assert_allclose(front, by_list(function, x, tuple(range(count)), False), rtol=1e-5, atol=1e-6)
    [back] = run_operator(f"ReduceBack{what}", [x], num_reduce_dim=count)
    np.testing.assert_allclose(back, by_list(function, x, tuple(range(3 - count, 3)), False), rtol=1e-5, atol=1e-6)


def test_front_and_back_reductions_by_default_take_one_axis_and_refuse_too_many() -> None:
    assert run_operator("ReduceFrontSum", [sample(0, 2, 3, 4)])[0].shape == (3, 4)
    assert run_operator("ReduceBackSum", [sample(0, 2, 3, 4)])[0].shape == (2, 3)
    with pytest.raises(ArgumentError, match=r"'num_reduce_dim' must be in \[0, 2\], found 3"):
        run_operator("ReduceFrontMax", [sample(0, 2, 3)], num_reduce_dim=3)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("what", ["Sum", "Mean", "Max"])
def test_front_and_back_reductions_of_the_first_elements_only(what: str, dtype: type) -> None:
    """Of no elements the first counts nevertheless, as in Caffe2, and a mean is divided by 0."""
    x, lengths = sample(0, 4, 2, 3, dtype=dtype), np.array([[4, 1, 3], [2, 0, 4]], np.int32)
    combine = {"Sum": np.sum, "Mean": np.sum, "Max": np.max}[what]
    expected = np.array([combine(x[: max(n, 1), i, j].astype(np.float64)) for (i, j), n in np.ndenumerate(lengths)])
    if what == "Mean":
        with np.errstate(divide="ignore"):
            expected = expected / lengths.reshape(-1)
    [front] = run_operator(f"ReduceFront{what}", [x, lengths.reshape(-1)])
    [back] = run_operator(f"ReduceBack{what}", [np.moveaxis(x, 0, -1).copy(), lengths.reshape(-1)])
    for found in (front, back):
        np.testing.assert_allclose(found.astype(np.float64), expected.reshape(2, 3), rtol=1e-3, atol=1e-3)


def test_lengths_that_do_not_fit_are_refused() -> None:
    x = sample(0, 4, 3)
    with pytest.raises(OperatorError, match=r"ReduceFrontSum 'y0'.*length 5 must be in \[0, 4\]"):
        run_operator("ReduceFrontSum", [x, np.array([1, 5, 2])])
    with pytest.raises(ShapeError, match=r"expected a length for each of 3 elements of Y, found shape \(4,\)"):
        run_operator("ReduceFrontSum", [x, np.array([1, 1, 2, 2])])
    with pytest.raises(ArgumentError, match="with lengths, argument 'num_reduce_dim' must be 1, found 2"):
        run_operator("ReduceFrontSum", [x, np.array([1])], num_reduce_dim=2)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize(("op_type", "power"), [("SumElements", 1), ("SumSqrElements", 2)])
def test_sum_of_elements_is_a_scalar_and_may_be_averaged(op_type: str, power: int, dtype: type) -> None:
    x = sample(0, 3, 50, dtype=dtype)
    expected = math.fsum(value**power for value in x.astype(np.float64).ravel().tolist())
    [total] = run_operator(op_type, [x])
    [average] = run_operator(op_type, [x], average=1)
    assert total.shape == average.shape == ()
    tolerance = 1e-3 if dtype == np.float16 else 1e-5
    np.testing.assert_allclose(float(total), expected, rtol=tolerance)
    np.testing.assert_allclose(float(average), expected / 150, rtol=tolerance)


@pytest.mark.parametrize("op_type", ["SumElements", "SumSqrElements"])
def test_sum_and_average_of_no_elements_are_zero(op_type: str) -> None:
    for average in (0, 1):
        assert run_operator(op_type, [np.empty((0, 3), np.float32)], average=average)[0] == 0


def test_rowwise_and_colwise_max_of_a_batch_of_matrices() -> None:
    x = sample(0, 2, 3, 4)
    rows = [[max(row) for row in matrix] for matrix in x.tolist()]
    columns = [[max(column) for column in zip(*matrix, strict=True)] for matrix in x.tolist()]
    assert run_operator("RowwiseMax", [x])[0].tolist() == rows
    assert run_operator("ColwiseMax", [x])[0].tolist() == columns
    with pytest.raises(ShapeError, match="'x0' must have 3 axes, found 2"):
        run_operator("RowwiseMax", [sample(0, 2, 3)])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data(), greatest=st.booleans())
def test_arg_extreme_gives_the_first_of_equal_elements(shape: list[int], data: st.DataObject, greatest: bool) -> None:
    axis, keep = data.draw(st.integers(-len(shape), len(shape) - 1)), data.draw(st.booleans())
    x = np.random.default_rng(0).integers(0, 3, shape).astype(np.float32)
    [y] = run_operator("ArgMax" if greatest else "ArgMin", [x], axis=axis, keepdims=int(keep))
    assert y.dtype == np.int64
    extreme = max if greatest else min
    expected = by_list(lambda values: values.index(extreme(values)), x, (axis % len(shape),), keep)
    np.testing.assert_array_equal(y, expected)
    assert y.shape == expected.shape


def test_arg_extreme_defaults_to_the_last_axis_kept_and_refuses_others() -> None:
    assert run_operator("ArgMax", [np.array([[1, 5, 2]], np.float32)])[0].tolist() == [[1]]
    with pytest.raises(ShapeError, match=r"'axis' must be in \[-2, 1\], found 2"):
        run_operator("ArgMin", [sample(0, 2, 3)], axis=2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_log_of_a_sum_of_exponentials_does_not_overflow(dtype: Any) -> None:
    """In a row far above what has an exponential, with infinities, and of elements that have none."""
    x = np.array([[1000, 999, 1000], [-np.inf, -np.inf, -np.inf], [np.inf, 0, 1], [-2000, -2001, -np.inf]], dtype)
    [found] = run_operator("ReduceLogSumExp", [x], axes=[1], keepdims=0)
    expected = [1000 + np.log(2 + np.exp(-1)), -np.inf, np.inf, -2000 + np.log(1 + np.exp(-1))]
    assert found.dtype == dtype
    np.testing.assert_allclose(found, np.array(expected, dtype), rtol=1e-3 if dtype == np.float16 else 1e-6)
    [empty] = run_operator("ReduceLogSumExp", [x[:, :0]], axes=[1])
    np.testing.assert_array_equal(empty, np.full((4, 1), -np.inf))
