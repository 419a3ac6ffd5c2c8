"""The gradients of Slice, Tile and Expand: against central differences."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dagexec import NetDef
from dagexec.core.gradient import gradient
from dagexec.errors import ArgumentError, OperatorError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.gradient_checks import analytic_gradients, check_gradient
from tests.ops.running import operator_def, run_operator, workspace_of

Array = npt.NDArray[Any]


def numbers(shape: tuple[int, ...]) -> Array:
    return 1.0 + np.arange(math.prod(shape), dtype=np.float64).reshape(shape)


def test_integers_are_put_back_too() -> None:
    [dx] = run_operator("SliceGradient", [np.zeros(4, np.int32), np.array([5, 6], np.int32)], starts=[1], ends=[3])
    np.testing.assert_array_equal(dx, np.array([0, 5, 6, 0], np.int32), strict=True)


def test_a_slice_by_inputs_follows_their_values_in_every_run() -> None:
    check_gradient("Slice", [numbers((4, 3)), np.array([1, 0]), np.array([3, 2])], wanted=[0])
    workspace = workspace_of({"x": np.zeros(4), "dy": np.ones(2), "starts": np.array([0]), "ends": np.array([2])})
    definition = operator_def("SliceGradient", ["x", "starts", "ends", "dy"], ["dx"])
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        for start, expected in ((0, [1, 1, 0, 0]), (2, [0, 0, 1, 1])):
            workspace.feed_blob("starts", np.array([start]))
            workspace.feed_blob("ends", np.array([start + 2]))
            net.run()
            assert workspace.fetch_blob("dx").tolist() == expected
        workspace.feed_blob("ends", np.array([3]))
        with pytest.raises(OperatorError, match=r"dY must have the shape \(1,\) of the slice of X, found \(2,\)"):
            net.run()


def test_slice_gradients_refuse_another_dy() -> None:
    with pytest.raises(ShapeError, match=r"must have shape \(2,\).*found \(3,\)"):
        run_operator("SliceGradient", [np.ones(4), np.ones(3)], starts=[0], ends=[2])
    with pytest.raises(ShapeError, match="found only one of them"):
        run_operator("SliceGradient", [np.ones(4), np.array([0]), np.ones(3)])


def test_no_tiles_leave_a_gradient_of_zeros() -> None:
    found = analytic_gradients(
        operator_def("Tile", ["x0"], ["y0"], tiles=0), [np.ones((2, 3))], {0: np.ones((0, 3))}, [0]
    )
    np.testing.assert_array_equal(found[0], np.zeros((2, 3)))


def test_tile_gradients_refuse_what_is_not_whole_tiles() -> None:
    with pytest.raises(ShapeError, match="of size 5, cannot be divided into 2"):
        run_operator("TileGradient", [np.ones(5)], tiles=2)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_many_tiles_of_16_bits_are_summed_in_float32(dtype: Any) -> None:
    found = run_operator("TileGradient", [np.ones((3000, 2), dtype)], tiles=3000)[0]
    np.testing.assert_array_equal(found, np.full((1, 2), 3000, dtype))
    found = run_operator("ExpandGradient", [np.ones((3000, 2), dtype), np.ones((1, 1), dtype)])[0]
    np.testing.assert_array_equal(found, np.full((1, 1), 6000, dtype))


def test_expand_gradients_refuse_what_does_not_broadcast() -> None:
    with pytest.raises(ShapeError, match=r"X of shape \(3, 2\) does not broadcast to dY's shape \(2, 2\)"):
        run_operator("ExpandGradient", [np.ones((2, 2)), np.ones((3, 2))])
    with pytest.raises(ArgumentError, match="'factor' must be finite"):
        run_operator("ExpandGradient", [np.ones((2, 2)), np.ones((1, 2))], factor=math.inf)


def test_bounds_tiles_and_shapes_have_no_gradient() -> None:
    for op_type in ("Slice", "Tile", "Expand"):
        names = ["x", "a", "b"][: 2 if op_type == "Expand" else 3]
        made = gradient(operator_def(op_type, names, ["y"]), ["g"], wanted=[1])
        assert made.inputs == (None,) * len(names)
