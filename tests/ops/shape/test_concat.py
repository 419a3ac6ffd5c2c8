"""Concat and Split, against placing every part by hand; one undoes the other."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.errors import ArgumentError, DagexecError, ShapeError
from tests.ops.running import run_operator

Array = npt.NDArray[Any]


def numbered(shape: tuple[int, ...], start: int = 0, dtype: npt.DTypeLike = np.float32) -> Array:
    return (np.arange(int(np.prod(shape)), dtype=np.int64) + start).reshape(shape).astype(dtype)


@st.composite
def parts_along_an_axis(draw: st.DrawFn) -> tuple[list[Array], int]:
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    axis = draw(st.integers(0, len(shape) - 1))
    sizes = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    dtype = draw(st.sampled_from([np.float32, np.float64, np.int32, np.float16]))
    parts = [numbered((*shape[:axis], size, *shape[axis + 1 :]), 100 * i, dtype) for i, size in enumerate(sizes)]
    return parts, axis


@pytest.mark.slow
@given(parts_along_an_axis(), st.booleans())
@settings(max_examples=50, deadline=None)
def test_concat_places_the_parts_one_after_another(case: tuple[list[Array], int], negative: bool) -> None:
    parts, axis = case
    y, info = run_operator("Concat", parts, 2, axis=axis - parts[0].ndim if negative else axis)
    start = 0
    for part in parts:
        end = start + part.shape[axis]
        np.testing.assert_array_equal(np.take(y, range(start, end), axis), part)
        start = end
    assert y.shape[axis] == start
    assert y.dtype == parts[0].dtype
    assert info.dtype == np.int32
    assert info.tolist() == [part.shape[axis] for part in parts]


@pytest.mark.slow
@given(parts_along_an_axis(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_split_undoes_concat(case: tuple[list[Array], int], by_input: bool) -> None:
    parts, axis = case
    y, info = run_operator("Concat", parts, 2, axis=axis)
    if by_input:
        back = run_operator("Split", [y, info], len(parts), axis=axis)
    else:
        back = run_operator("Split", [y], len(parts), axis=axis, split=info.tolist())
    for one, other in zip(back, parts, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_concat_joins_strings() -> None:
    [y] = run_operator("Concat", [np.array([b"a", b"b"], object), np.array([b"c"], object)], axis=0)
    assert y.tolist() == [b"a", b"b", b"c"]


@pytest.mark.parametrize("op_type", ["Concat", "DepthConcat"])
def test_the_order_names_the_channel_axis(op_type: str) -> None:
    a, b = numbered((2, 3, 4, 5)), numbered((2, 3, 4, 5), 1000)
    for arguments, axis in (({}, 1), ({"order": "NCHW"}, 1), ({"order": "NHWC"}, 3)):
        [y] = run_operator(op_type, [a, b], **arguments)
        first, second = np.split(y, 2, axis)
        np.testing.assert_array_equal(first, a)
        np.testing.assert_array_equal(second, b)


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_add_axis_stacks_and_split_undoes_it(axis: int) -> None:
    a, b = numbered((2, 3)), numbered((2, 3), 50)
    y, info = run_operator("Concat", [a, b], 2, axis=axis, add_axis=1)
    assert y.shape[axis] == 2
    np.testing.assert_array_equal(y.take(0, axis), a)
    np.testing.assert_array_equal(y.take(1, axis), b)
    assert info.tolist() == [1, 1]
    back = run_operator("Split", [y], 2, axis=axis, add_axis=1)
    np.testing.assert_array_equal(back[0], a)
    np.testing.assert_array_equal(back[1], b)


def test_concat_refuses_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(2, 4\).*except on axis 1\), found \(3, 4\)"):
        run_operator("Concat", [numbered((2, 3)), numbered((3, 4))], axis=1)
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(2, 3\).*found \(2,\)"):
        run_operator("Concat", [numbered((2, 3)), numbered((2,))], axis=1)
    with pytest.raises(ShapeError, match="share one element type, found float32, int32"):
        run_operator("Concat", [numbered((2,)), numbered((2,), 0, np.int32)], axis=0)
    with pytest.raises(ShapeError, match="'axis' must be in"):
        run_operator("Concat", [numbered((2,))], axis=1)
    with pytest.raises(ShapeError, match=r"'x1' must have shape \(2, 3\)"):
        run_operator("Concat", [numbered((2, 3)), numbered((3, 2))], axis=0, add_axis=1)
    with pytest.raises(ShapeError, match="order NCHW puts the channels on axis 1"):
        run_operator("Concat", [numbered((2,))])
    with pytest.raises(ArgumentError, match="expected 'axis' or 'order', found both"):
        run_operator("Concat", [numbered((2,))], axis=0, order="NCHW")
    with pytest.raises(ArgumentError, match="must be NCHW, NHWC, NCHW8c or NCHW16c, found 'CHWN'"):
        run_operator("Concat", [numbered((2, 3))], order="CHWN")


def test_split_makes_equal_parts_by_default() -> None:
    x = numbered((2, 6, 2))
    parts = run_operator("Split", [x], 3)
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(part, x[:, 2 * index : 2 * index + 2])


def test_split_follows_sizes_that_are_fed_anew() -> None:
    x = numbered((5, 2))
    for sizes in ([1, 4], [5, 0]):
        first, second = run_operator("Split", [x, np.array(sizes, np.int32)], 2, axis=0)
        np.testing.assert_array_equal(first, x[: sizes[0]])
        np.testing.assert_array_equal(second, x[sizes[0] :])


def test_split_refuses_sizes_that_do_not_fit() -> None:
    x = numbered((2, 6))
    for outputs, arguments, message in (
        (4, {}, "axis 1 of size 6 cannot be split into 4 equal parts"),
        (2, {"split": [2, 3]}, r"sizes \[2, 3\] must add up to 6"),
        (2, {"split": [7, -1]}, r"sizes \[7, -1\] must add up to 6"),
        (2, {"split": [6]}, r"expected 2 sizes, one for each output, found \[6\]"),
        (3, {"add_axis": 1}, r"every part must have size 1 along axis 1, found \[2, 2, 2\]"),
    ):
        with pytest.raises(ShapeError, match=message):
            run_operator("Split", [x], outputs, axis=1, **arguments)
    with pytest.raises(DagexecError, match="by both an input and the argument 'split'"):
        run_operator("Split", [x, np.array([3, 3], np.int32)], 2, axis=1, split=[3, 3])
