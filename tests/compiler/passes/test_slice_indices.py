"""slice-indices: indices that are one for all elements of a slice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.compiler.passes.slice_indices import PASS
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, op, rewritten, unchanged

ROWS = np.array([3, 0, -1, 3, 3, 1])
COLUMN = op("Reshape", ["rows"], ["column"], shape=[-1, 1])
EXPAND = op("Expand", ["column"], ["indices"], shape=[6, 4])


def scattered(*before: OperatorDef, data: tuple[int, ...] = (5, 4), **arguments: Any) -> Model:
    """x with the rows of u put, or added, where blob `indices` says."""
    operators = [*before, op("ScatterElements", ["x", "indices", "u"], ["y"], **arguments)]
    return model_of(operators, inputs={"x": data, "u": (6, 4)}, rows=ROWS)


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
@pytest.mark.parametrize("repeat", [EXPAND, op("TileAxes", ["column"], ["indices"], repeats=[1, 4])])
def test_rows_are_put_at_the_index_that_all_of_their_elements_have(repeat: OperatorDef, reduction: str) -> None:
    model = scattered(COLUMN, repeat, reduction=reduction)
    assert rewritten(PASS, model)[-1] == "ScatterND x column u -> y"


@pytest.mark.parametrize(("axis", "data"), [(0, (7, 3, 4)), (1, (2, 7, 4))])
def test_slices_are_picked_along_any_axis(axis: int, data: tuple[int, ...]) -> None:
    shape, whole = [1, 1, 1], list(data)
    shape[axis] = whole[axis] = 6
    operators = [
        op("Reshape", ["rows"], ["wide"], shape=shape),
        op("Expand", ["wide"], ["indices"], shape=whole),
        op("GatherElements", ["x", "indices"], ["y"], axis=axis),
    ]
    model = model_of(operators, inputs={"x": data}, rows=ROWS)
    assert rewritten(PASS, model)[2:] == ["Reshape wide -> wide/slices", "Gather x wide/slices -> y"]


def test_constant_indices_may_repeat_a_column() -> None:
    operators = [op("ScatterElements", ["x", "indices", "u"], ["y"], reduction="add")]
    repeated = np.repeat(ROWS[:, np.newaxis], 4, axis=1)
    model = model_of(operators, inputs={"x": (5, 4), "u": (6, 4)}, indices=repeated)
    assert rewritten(PASS, model) == ["ScatterND x indices/slices u -> y"]
    repeated[2, 3] = 0
    assert unchanged(PASS, model_of(operators, inputs={"x": (5, 4), "u": (6, 4)}, indices=repeated))


@pytest.mark.parametrize("case", ["part of a row", "along rows", "an index for each element"])
def test_elements_that_are_no_whole_slices_stay(case: str) -> None:
    if case == "part of a row":
        assert unchanged(PASS, scattered(COLUMN, EXPAND, data=(5, 7)))
    elif case == "along rows":
        row = op("Reshape", ["columns"], ["row"], shape=[1, 4])
        operators = [row, op("Expand", ["row"], ["indices"], shape=[6, 4])]
        operators.append(op("ScatterElements", ["x", "indices", "u"], ["y"], axis=1))
        assert unchanged(PASS, model_of(operators, inputs={"x": (6, 5), "u": (6, 4)}, columns=np.array([3, 0, 1, 2])))
    else:
        row = op("Reshape", ["columns"], ["row"], shape=[1, 4])
        operators = [row, op("Expand", ["row"], ["indices"], shape=[6, 4])]
        operators.append(op("ScatterElements", ["x", "indices", "u"], ["y"]))
        assert unchanged(PASS, model_of(operators, inputs={"x": (5, 4), "u": (6, 4)}, columns=np.array([3, 0, 1, 2])))


def test_indices_of_other_ranks_are_left_to_be_refused() -> None:
    operators = [op("GatherElements", ["x", "indices"], ["y"], axis=0)]
    for data in ((5, 4), (5, 4, 2)):
        rank = 5 - len(data)
        model = model_of(operators, inputs={"x": data}, indices=np.zeros((1,) * rank, np.int64))
        assert not PASS.apply(model).changes
