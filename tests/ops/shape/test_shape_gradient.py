"""The gradients of operators that keep elements as they are, join or cut tensors: against central differences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.core.gradient import gradient
from dagexec.errors import ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]


def numbers(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(3).permutation(math.prod(shape)).reshape(shape).astype(np.float64)


@pytest.mark.parametrize("shape", [(2, 3, 2), (0, 3), (1,), ()])
def test_resize_like_gives_the_shape_of_its_second_input(shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    (found,) = run_operator("ResizeLike", [x, np.zeros((1, x.size, 1), np.int32)])
    np.testing.assert_array_equal(found, x.reshape(1, -1, 1))


def test_resize_like_refuses_another_number_of_elements() -> None:
    with pytest.raises(ShapeError, match=r"data of 6 elements cannot take the shape \(4,\)"):
        run_operator("ResizeLike", [np.ones((2, 3)), np.ones(4)])


def test_resize_like_has_a_gradient_for_its_data_alone() -> None:
    check_gradient("ResizeLike", [numbers((2, 3)), np.zeros((3, 2))], wanted=[0])
    assert gradient(operator_def("ResizeLike", ["x", "like"], ["y"]), ["g"], wanted=[1]).inputs == (None, None)


@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (3, 0, 2)])
def test_reshape_goes_back_by_its_old_shape_in_place_too(shape: tuple[int, ...]) -> None:
    x = numbers(shape)
    definition = operator_def("Reshape", ["x0"], ["x0", "old"], shape=[1, *reversed(shape)], allow_zero=1)
    dy = numbers((1, *reversed(shape)))
    found = analytic_gradients(definition, [x], {0: dy}, [0])
    np.testing.assert_array_equal(found[0], dy.reshape(shape))
    check_gradient("Reshape", [numbers((2, 3)), np.array([3, 2])], outputs=2, wanted=[0])


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)))
def test_any_permutation_of_axes_goes_back(axes: list[int]) -> None:
    found = analytic_gradients(
        operator_def("Transpose", ["x0"], ["y0"], axes=axes),
        [np.zeros((2, 3, 4, 5))],
        {0: numbers((2, 3, 4, 5)).transpose(axes)},
        [0],
    )
    np.testing.assert_array_equal(found[0], numbers((2, 3, 4, 5)))


def test_sizes_and_walls_pass_on_no_gradient() -> None:
    for op_type in ("Shape", "Size", "StopGradient"):
        made = gradient(operator_def(op_type, ["x"], ["y"]), ["y_grad"])
        assert (made.operators, made.inputs) == ((), (None,))


@pytest.mark.parametrize("outputs", [["y"], ["y", "sizes"]])
def test_each_occurrence_of_a_blob_in_a_concat_has_its_gradient(outputs: list[str]) -> None:
    definition = operator_def("Concat", ["x", "x", "z"], outputs, axis=0)
    made = gradient(definition, ["y_grad", None][: len(outputs)])
    assert made.inputs == ("x_grad", "_x_grad_input_1", "z_grad")
    workspace = Workspace()
    for name, value in {"x": [1.0], "z": [0.0, 0.0], "y_grad": [1.0, 2.0, 3.0, 4.0]}.items():
        workspace.feed_blob(name, np.array(value))
    with SimpleNet(NetDef(name="test", op=[definition, *made.operators]), workspace) as net:
        net.run()
    found = [workspace.fetch_blob(str(name)).tolist() for name in made.inputs]
    assert found == [[1.0], [2.0], [3.0, 4.0]]


def test_concat_gradients_may_have_parts_without_elements() -> None:
    for outputs in (1, 2):
        definition = operator_def("Concat", ["x0", "x1"], ["y0", "y1"][:outputs], axis=1)
        found = analytic_gradients(definition, [np.ones((2, 0)), np.ones((2, 2))], {0: numbers((2, 2))}, [0, 1])
        assert found[0].shape == (2, 0)
        np.testing.assert_array_equal(found[1], numbers((2, 2)))


def test_concat_gradient_refuses_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"must have shape \(4, 2\).*found \(3, 2\)"):
        run_operator("ConcatGradient", [np.ones((3, 2)), np.ones((2, 2)), np.ones((2, 2))], 2, axis=0)
    with pytest.raises(ShapeError, match="expected 2 outputs, one per input, found 1"):
        run_operator("ConcatGradient", [np.ones((4, 2)), np.ones((2, 2)), np.ones((2, 2))], 1, axis=0)


def test_split_by_an_input_has_a_gradient_and_parts_without_one_count_as_zeros() -> None:
    check_gradient("Split", [numbers((2, 6)), np.array([4, 2], np.int32)], outputs=2, wanted=[0], axis=1)
    found = check_gradient("Split", [numbers((2, 6))], outputs=3, weighted=[1], axis=1)
    assert not found[0][:, :2].any()
    assert found[0][:, 2:4].all()
