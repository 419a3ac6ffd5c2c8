"""Slice, Tile and Expand, against loops over positions and onnxruntime."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from dagexec.errors import DagexecError, ShapeError
from tests.ops.running import run_operator

Array = npt.NDArray[Any]


def numbered(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)


def onnx_slice(x: Array, starts: list[int], ends: list[int], axes: list[int], steps: list[int]) -> Array:
    names = ["starts", "ends", "axes", "steps"]
    graph = helper.make_graph(
        [helper.make_node("Slice", ["x", *names], ["y"])],
        "slice",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [
            helper.make_tensor(name, TensorProto.INT64, [len(value)], value)
            for name, value in zip(names, (starts, ends, axes, steps), strict=True)
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: Array = session.run(None, {"x": x})[0]
    return result


@st.composite
def onnx_bounds(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int], list[int], list[int]]:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    axes = draw(st.lists(st.integers(0, len(shape) - 1), min_size=1, max_size=len(shape), unique=True))
    bound = st.one_of(st.integers(-7, 7), st.sampled_from([-(2**63), 2**63 - 1]))
    count = len(axes)
    starts = draw(st.lists(bound, min_size=count, max_size=count))
    ends = draw(st.lists(bound, min_size=count, max_size=count))
    steps = draw(st.lists(st.sampled_from([-3, -2, -1, 1, 2, 3]), min_size=count, max_size=count))
    # onnxruntime reads the largest int64 as "all the way" backwards too; the specification clamps it.
    ends = [end if step > 0 else min(end, 7) for end, step in zip(ends, steps, strict=True)]
    return shape, starts, ends, axes, steps


@pytest.mark.slow
@given(onnx_bounds())
@settings(max_examples=80, deadline=None)
def test_slice_in_onnx_style_agrees_with_onnxruntime(
    case: tuple[tuple[int, ...], list[int], list[int], list[int], list[int]],
) -> None:
    shape, starts, ends, axes, steps = case
    x = numbered(shape)
    [y] = run_operator("Slice", [x], starts=starts, ends=ends, axes=axes, steps=steps, onnx_style=1)
    expected = onnx_slice(x, starts, ends, axes, steps)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected)


@pytest.mark.slow
@given(st.integers(0, 5), st.integers(-7, 7), st.integers(-7, 7), st.booleans())
@settings(max_examples=80, deadline=None)
def test_a_negative_bound_counts_from_one_past_the_end(size: int, start: int, end: int, by_input: bool) -> None:
    x = numbered((size, 2))
    first = start if start >= 0 else size + 1 + start
    last = end if end >= 0 else size + 1 + end
    first, last = min(first, size), min(last, size)
    bounds = [np.array([value], np.int32) for value in (start, end)] if by_input else []
    arguments = {} if by_input else {"starts": [start], "ends": [end]}
    if first < 0 or last < first:
        with pytest.raises(DagexecError, match=f"axis 0 of size {size} has no slice from {start} to {end}"):
            run_operator("Slice", [x, *bounds], **arguments)
        return
    [y] = run_operator("Slice", [x, *bounds], **arguments)
    assert y.tolist() == [[2.0 * i, 2.0 * i + 1] for i in range(first, last)]


def test_slice_cuts_several_axes_and_keeps_the_rest() -> None:
    x = numbered((3, 4, 5))
    [y] = run_operator("Slice", [x], starts=[1, 0], ends=[-1, 2])
    assert y.shape == (2, 2, 5)
    for i, j, k in itertools.product(range(2), range(2), range(5)):
        assert y[i, j, k] == x[i + 1, j, k]
    [z] = run_operator("Slice", [x], starts=[1], ends=[4], axes=[-1], steps=[2])
    assert z.shape == (3, 4, 2)
    assert z[0, 0].tolist() == [1.0, 3.0]


def test_slice_of_a_scalar_is_read_anew_in_every_run() -> None:
    [y] = run_operator("Slice", [np.float32(2.5)], starts=[], ends=[])
    assert y.shape == ()
    assert y == 2.5


def test_slice_says_what_is_wrong_with_its_bounds() -> None:
    x = numbered((3, 4))
    with pytest.raises(ShapeError, match="found 1 starts, 2 ends, 1 axes and 1 steps"):
        run_operator("Slice", [x], starts=[1], ends=[2, 3])
    with pytest.raises(ShapeError, match="at most 2; found 3 starts"):
        run_operator("Slice", [x], starts=[0, 0, 0], ends=[1, 1, 1])
    with pytest.raises(ShapeError, match="argument 'ends' is missing"):
        run_operator("Slice", [x], starts=[1])
    with pytest.raises(ShapeError, match="step of axis 0 must not be 0"):
        run_operator("Slice", [x], starts=[0], ends=[2], steps=[0], onnx_style=1)
    with pytest.raises(ShapeError, match="in steps of -1"):
        run_operator("Slice", [x], starts=[0], ends=[2], steps=[-1])
    with pytest.raises(ShapeError, match="'axes' must hold axes"):
        run_operator("Slice", [x], starts=[0], ends=[1], axes=[2])
    with pytest.raises(DagexecError, match="found only one of them"):
        run_operator("Slice", [x, np.array([1])])


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), min_size=1, max_size=4), st.integers(0, 3), st.integers(-4, 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_tile_repeats_along_one_axis(shape: list[int], tiles: int, axis: int, by_input: bool) -> None:
    x = numbered(tuple(shape), np.int64)
    inputs = [x, np.array([tiles], np.int32), np.array([axis], np.int32)] if by_input else [x]
    arguments = {} if by_input else {"tiles": tiles, "axis": axis}
    if not -len(shape) <= axis < len(shape):
        with pytest.raises(DagexecError, match=r"'axis' must be"):
            run_operator("Tile", inputs, **arguments)
        return
    [y] = run_operator("Tile", inputs, **arguments)
    repeats = [1] * len(shape)
    repeats[axis] = tiles
    np.testing.assert_array_equal(y, np.tile(x, repeats))


def test_tile_refuses_a_negative_count() -> None:
    with pytest.raises(DagexecError, match=r"'tiles' must be one number of at least 0, found \[-1\]"):
        run_operator("Tile", [numbered((2,))], tiles=-1)


@pytest.mark.slow
@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4), st.booleans())
@settings(max_examples=80, deadline=None)
def test_expand_broadcasts_as_numpy_does(shape: list[int], wanted: list[int], by_input: bool) -> None:
    x = numbered(tuple(shape))
    inputs = [x, np.array(wanted, np.int64)] if by_input else [x]
    arguments = {} if by_input else {"shape": wanted}
    try:
        expected = x + np.zeros(wanted, np.float32)
    except ValueError:
        with pytest.raises(DagexecError, match="X cannot be broadcast with the shape"):
            run_operator("Expand", inputs, **arguments)
        return
    [y] = run_operator("Expand", inputs, **arguments)
    assert y.shape == expected.shape
    np.testing.assert_array_equal(y, expected)


def test_expand_wants_one_shape_without_negative_sizes() -> None:
    with pytest.raises(DagexecError, match="either as input 1 or as the argument"):
        run_operator("Expand", [numbered((1,))])
    with pytest.raises(DagexecError, match="sizes 1 and -1"):
        run_operator("Expand", [numbered((1,))], shape=[-1])
