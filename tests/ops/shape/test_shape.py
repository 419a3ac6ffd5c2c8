"""Views, transpositions and shapes, against index arithmetic written out, and the sharing of storage."""

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.errors import DagexecError, OperatorError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def, run_operator, workspace_of

Array = npt.NDArray[Any]

SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(tuple)


def counting(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Array:
    return np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape).astype(dtype)


@pytest.mark.parametrize(
    ("shape", "wanted", "expected"),
    [
        ((2, 3, 4), [0, -1], (2, 12)),
        ((2, 3, 4), [-1, 0, 2], (4, 3, 2)),
        ((2, 3, 4), [24], (24,)),
        ((1,), [], ()),
        ((0, 3), [0, -1], None),
        ((0, 3), [3, -1], (3, 0)),
        ((0, 3), [0, 7], (0, 7)),
    ],
)
def test_reshape_resolves_zero_and_minus_one(
    shape: tuple[int, ...], wanted: list[int], expected: tuple[int, ...] | None
) -> None:
    x = counting(shape)
    if expected is None:
        with pytest.raises(ShapeError, match="-1 cannot be resolved"):
            run_operator("Reshape", [x], shape=wanted)
        return
    y, old = run_operator("Reshape", [x], 2, shape=wanted)
    assert y.shape == expected
    np.testing.assert_array_equal(y.reshape(-1), x.reshape(-1))
    assert old.dtype == np.int64
    assert old.tolist() == list(shape)


def test_reshape_takes_the_shape_from_its_second_input() -> None:
    [y] = run_operator("Reshape", [counting((4, 3)), np.array([0, 1, -1], np.int32)])
    assert y.shape == (4, 1, 3)


def test_reshape_with_allow_zero_keeps_a_size_of_zero() -> None:
    [y] = run_operator("Reshape", [counting((3, 0))], shape=[0, 5], allow_zero=1)
    assert y.shape == (0, 5)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ([5], r"\(5,\) has 5 elements, the input has 6"),
        ([-1, -1], "more than one -1"),
        ([4, -1], "-1 cannot be resolved: 6 elements are not a multiple of 4"),
        ([-2, 3], "has the size -2"),
        ([2, 3, 0], "copies axis 2, which the input does not have"),
    ],
)
def test_reshape_says_what_is_wrong_with_a_shape(wanted: list[int], message: str) -> None:
    with pytest.raises(ShapeError, match=message):
        run_operator("Reshape", [counting((2, 3))], shape=wanted)


def test_reshape_wants_the_shape_exactly_once() -> None:
    with pytest.raises(ShapeError, match="the new shape is missing"):
        run_operator("Reshape", [counting((2, 3))])
    with pytest.raises(DagexecError, match="by both an input and the argument"):
        run_operator("Reshape", [counting((2, 3)), np.array([6])], shape=[6])


def test_reshape_refuses_a_shape_of_floats() -> None:
    with pytest.raises(DagexecError, match="'x1' must be one of int32, int64, found float32"):
        run_operator("Reshape", [counting((2, 3)), np.array([6], np.float32)])


def test_reshape_in_place_changes_the_shape_and_keeps_values_and_old_shape() -> None:
    fill = operator_def("GivenTensorFill", [], ["x"], shape=[2, 3], values=[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    negate = operator_def("Reshape", ["x"], ["x", "old"], shape=[3, 2])
    workspace = Workspace()
    with SimpleNet(NetDef(name="in_place", op=[fill, negate]), workspace) as net:
        for _ in range(3):
            net.run()
            assert workspace.fetch_blob("x").tolist() == [[0, 1], [2, 3], [4, 5]]
            assert workspace.fetch_blob("old").tolist() == [2, 3]


def test_reshape_in_place_of_an_adopted_array_leaves_that_array_alone() -> None:
    workspace = Workspace()
    mine = counting((2, 3))
    workspace.adopt_blob("x", mine)
    workspace.run_operator_once(operator_def("Reshape", ["x"], ["x"], shape=[3, 2]))
    assert workspace.fetch_blob("x").tolist() == [[0, 1], [2, 3], [4, 5]]
    assert mine.shape == (2, 3)


def test_an_input_reshaped_in_place_may_be_fed_again_in_its_old_shape() -> None:
    workspace = workspace_of({"x": counting((2, 3))})
    with SimpleNet(NetDef(name="n", op=[operator_def("FlattenToVec", ["x"], ["x"])]), workspace) as net:
        net.run()
        for sign in (1, -1):
            workspace.feed_blob("x", sign * counting((2, 3)))
            net.run()
            assert workspace.fetch_blob("x").tolist() == [sign * value for value in range(6)]


def test_a_net_that_writes_what_another_net_views_leaves_the_viewed_blob_alone() -> None:
    workspace = workspace_of({"x": counting((2, 3))})
    workspace.run_operator_once(operator_def("StopGradient", ["x"], ["y"]))
    workspace.run_operator_once(operator_def("ConstantFill", [], ["y"], shape=[2, 3], value=9.0))
    assert workspace.fetch_blob("x").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert workspace.fetch_blob("y").tolist() == [[9, 9, 9], [9, 9, 9]]


@pytest.mark.parametrize("op_type", ["Flatten", "FlattenToVec", "StopGradient"])
def test_a_view_shares_the_storage_of_its_input_and_follows_it(op_type: str) -> None:
    workspace = workspace_of({"x": counting((2, 3))})
    with SimpleNet(NetDef(name="view", op=[operator_def(op_type, ["x"], ["y"])]), workspace) as net:
        net.run()
        x, y = workspace.get_blob("x").tensor(), workspace.get_blob("y").tensor()
        assert y.shares_storage_with(x)
        assert np.shares_memory(x.array, y.array)
        workspace.feed_blob("x", -counting((2, 3)))
        net.run()
    np.testing.assert_array_equal(workspace.fetch_blob("y").reshape(-1), -np.arange(6.0))


def test_a_view_whose_blob_has_another_writer_copies() -> None:
    workspace = workspace_of({"x": counting((2, 3))})
    ops = [operator_def("FlattenToVec", ["x"], ["y"]), operator_def("Relu", ["y"], ["y"])]
    workspace.feed_blob("x", -counting((2, 3)))
    with SimpleNet(NetDef(name="copy", op=ops), workspace) as net:
        net.run()
        net.run()
    np.testing.assert_array_equal(workspace.fetch_blob("x"), -counting((2, 3)))
    np.testing.assert_array_equal(workspace.fetch_blob("y"), np.zeros(6))


@given(SHAPES, st.integers(-4, 4))
@settings(max_examples=40, deadline=None)
def test_flatten_multiplies_the_sizes_on_either_side_of_the_axis(shape: tuple[int, ...], axis: int) -> None:
    x = counting(shape)
    if not -len(shape) <= axis <= len(shape):
        with pytest.raises(ShapeError, match="'axis' must be in"):
            run_operator("Flatten", [x], axis=axis)
        return
    cut = axis if axis >= 0 else len(shape) + axis
    [y] = run_operator("Flatten", [x], axis=axis)
    rows = 1
    for size in shape[:cut]:
        rows *= size
    columns = 1
    for size in shape[cut:]:
        columns *= size
    assert y.shape == (rows, columns)
    assert y.tobytes() == x.tobytes()


@pytest.mark.slow
@given(SHAPES, st.data())
@settings(max_examples=40, deadline=None)
def test_squeeze_undoes_expand_dims(shape: tuple[int, ...], data: st.DataObject) -> None:
    x = counting(shape)
    rank = len(shape) + 2
    dims = data.draw(st.permutations(range(rank)))[:2]
    signed = [dim - rank if data.draw(st.booleans()) else dim for dim in dims]
    [expanded] = run_operator("ExpandDims", [x], dims=signed)
    np.testing.assert_array_equal(expanded, np.expand_dims(x, tuple(dims)))
    assert [size for axis, size in enumerate(expanded.shape) if axis not in dims] == list(shape)
    [squeezed] = run_operator("Squeeze", [expanded], dims=signed)
    np.testing.assert_array_equal(squeezed, x)


def test_an_axis_may_be_named_more_than_once_as_caffe2_has_it() -> None:
    [expanded] = run_operator("ExpandDims", [counting((4, 3))], dims=[0, 0, 2])
    assert expanded.shape == (1, 4, 1, 3)
    [squeezed] = run_operator("Squeeze", [expanded], dims=[2, 0, 2])
    assert squeezed.shape == (4, 3)
    [sizes] = run_operator("Shape", [expanded], axes=[1, 1, 3])
    assert sizes.tolist() == [4, 4, 3]


def test_squeeze_and_expand_dims_name_the_bad_axis() -> None:
    with pytest.raises(ShapeError, match="axis 1 to squeeze must have size 1, found 3"):
        run_operator("Squeeze", [counting((1, 3))], dims=[1])
    with pytest.raises(ShapeError, match=r"expected axes in \[-2, 1\], found 2"):
        run_operator("Squeeze", [counting((1, 3))], dims=[2])
    with pytest.raises(ShapeError, match="an axis is named twice"):
        run_operator("ExpandDims", [counting((3,))], dims=[0, -3])
    with pytest.raises(ShapeError, match="the new axes as the argument 'dims' or as input 1"):
        run_operator("ExpandDims", [counting((1, 3))])
    with pytest.raises(OperatorError, match="by both an input and the argument 'dims'"):
        run_operator("Squeeze", [counting((1, 3)), np.array([0])], dims=[0])


def test_axes_may_be_an_input() -> None:
    assert run_operator("Squeeze", [counting((1, 3, 1)), np.array([-1])])[0].shape == (1, 3)
    assert run_operator("Squeeze", [counting((1, 3, 1))])[0].shape == (3,)
    assert run_operator("ExpandDims", [counting((3,)), np.array([2, 0])])[0].shape == (1, 3, 1)


@given(SHAPES, st.data())
@settings(max_examples=40, deadline=None)
def test_transpose_moves_every_element_to_its_place(shape: tuple[int, ...], data: st.DataObject) -> None:
    axes = list(data.draw(st.permutations(range(len(shape)))))
    x = counting(shape, np.int32)
    [y] = run_operator("Transpose", [x], axes=axes)
    assert y.shape == tuple(shape[axis] for axis in axes)
    for place in itertools.product(*(range(size) for size in y.shape)):
        source = [0] * len(shape)
        for axis, position in zip(axes, place, strict=True):
            source[axis] = position
        assert y[place] == x[tuple(source)]


def test_transpose_reverses_by_default_and_refuses_what_is_no_permutation() -> None:
    [y] = run_operator("Transpose", [counting((2, 3, 4))])
    assert y.shape == (4, 3, 2)
    assert y[3, 2, 1] == 23
    with pytest.raises(ShapeError, match=r"permutation of 0\.\.2, found \[0, 1, 1\]"):
        run_operator("Transpose", [counting((2, 3, 4))], axes=[0, 1, 1])


@pytest.mark.parametrize("spatial", [(5,), (4, 5), (2, 4, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.uint8, ml_dtypes.bfloat16])
def test_channel_order_changes_both_ways(spatial: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    x = counting((2, 3, *spatial), dtype)
    [last] = run_operator("NCHW2NHWC", [x])
    assert last.shape == (2, *spatial, 3)
    for channel in range(3):
        np.testing.assert_array_equal(last[..., channel], x[:, channel])
    [first] = run_operator("NHWC2NCHW", [last])
    assert first.tobytes() == x.tobytes()


def test_channel_order_needs_an_image_batch() -> None:
    with pytest.raises(ShapeError, match="must have 3 or 4 or 5 axes, found 2"):
        run_operator("NCHW2NHWC", [counting((2, 3))])


def test_shape_and_size_are_int64() -> None:
    x = counting((2, 3, 0))
    [shape] = run_operator("Shape", [x])
    [some] = run_operator("Shape", [x], axes=[-2, 0])
    [size] = run_operator("Size", [counting((2, 3))])
    assert (shape.dtype, shape.tolist()) == (np.dtype(np.int64), [2, 3, 0])
    assert some.tolist() == [3, 2]
    assert (size.dtype, size.shape, size.item()) == (np.dtype(np.int64), (), 6)
    with pytest.raises(ShapeError, match="'axes' must hold axes"):
        run_operator("Shape", [x], axes=[3])


@pytest.mark.parametrize("op_type", ["Copy", "EnsureCPUOutput"])
@pytest.mark.parametrize("x", [counting((2, 3)), np.array([[b"a", b"bc"]], object), np.zeros((0, 2), np.float16)])
def test_copy_has_memory_of_its_own(op_type: str, x: Array) -> None:
    workspace = workspace_of({"x": x})
    workspace.run_operator_once(operator_def(op_type, ["x"], ["y"]))
    np.testing.assert_array_equal(workspace.fetch_blob("y"), x)
    assert not workspace.get_blob("y").tensor().shares_storage_with(workspace.get_blob("x").tensor())
