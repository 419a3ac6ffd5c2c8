"""Range, LengthsRangeFill, IsEmpty and HasElements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.errors import OperatorError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.running import operator_def, run_operator


@pytest.mark.parametrize(
    ("dtype", "bounds"),
    [
        (np.int32, (5,)),
        (np.int64, (2, 9)),
        (np.int64, (10, -5, -4)),
        (np.int64, (0, 10, 3)),
        (np.int64, (3, 3)),
        (np.int64, (3, 1)),
        (np.float32, (0.5, 2.75, 0.25)),
        (np.float64, (1, -1, -0.5)),
    ],
)
def test_range_is_numpys(dtype: Any, bounds: tuple[float, ...]) -> None:
    [y] = run_operator("Range", [np.array([bound], dtype) for bound in bounds])
    assert y.dtype == dtype
    np.testing.assert_allclose(y, np.arange(*bounds, dtype=dtype), rtol=1e-6)


def test_range_follows_bounds_that_change_between_runs() -> None:
    workspace = Workspace()
    definition = operator_def("Range", ["start", "stop"], ["y"])
    workspace.feed_blob("start", np.array([1]))
    workspace.feed_blob("stop", np.array([3]))
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        net.run()
        for start, stop in ((4, 9), (5, 10), (0, 0)):
            workspace.feed_blob("start", np.array([start]))
            workspace.feed_blob("stop", np.array([stop]))
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("y"), np.arange(start, stop))


@pytest.mark.parametrize(
    ("bounds", "problem"),
    [
        ([[1], [2], [0]], "a step other than 0"),
        ([[1, 2]], "must have one element"),
        ([[0.0], [np.inf]], "expected finite bounds"),
        ([[-1e308], [1e308], [1e-308]], "too many numbers"),
    ],
)
def test_range_refuses_what_has_no_end(bounds: list[list[float]], problem: str) -> None:
    with pytest.raises(OperatorError, match=problem):
        run_operator("Range", [np.array(bound) for bound in bounds])


def test_a_range_that_memory_cannot_hold_is_refused() -> None:
    with pytest.raises(OperatorError, match=r"Range .y0.*shape \(1125899906842624,\) needs"):
        run_operator("Range", [np.array([2**50])])


@pytest.mark.parametrize("lengths", [[2, 3], [0, 4, 0, 1], [], [0]])
def test_lengths_range_counts_within_each_segment(lengths: list[int]) -> None:
    [y] = run_operator("LengthsRangeFill", [np.array(lengths, np.int32)])
    assert y.dtype == np.int32
    assert y.tolist() == [position for length in lengths for position in range(length)]


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(OperatorError, match="at least 0, found -1"):
        run_operator("LengthsRangeFill", [np.array([2, -1], np.int32)])


def test_emptiness() -> None:
    full, empty = np.zeros((2, 2), np.float32), np.zeros((2, 0), np.float32)
    for inputs, is_empty in (([full], False), ([empty], True)):
        assert run_operator("IsEmpty", inputs)[0] == is_empty
    for inputs, has_elements in (([full], True), ([empty], False), ([empty, full], True), ([empty, empty], False)):
        [found] = run_operator("HasElements", inputs)
        assert found.dtype == np.bool_
        assert found.shape == ()
        assert found == has_elements
