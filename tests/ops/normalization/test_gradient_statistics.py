"""Outputs that are there for a gradient operator: a loss that depends on them has no silent zero for a gradient."""

from __future__ import annotations

import pytest

from dagexec.core.gradient import gradient
from dagexec.errors import GradientError
from tests.ops.running import operator_def

IMAGE_NORMS = [("InstanceNorm", 3), ("GroupNorm", 3), ("LayerNorm", 3)]


@pytest.mark.parametrize("index", [1, 2])
@pytest.mark.parametrize(("op_type", "inputs"), IMAGE_NORMS)
def test_no_gradient_comes_from_mean_and_deviation(op_type: str, inputs: int, index: int) -> None:
    outputs = ["y", "mean", "deviation"]
    definition = operator_def(op_type, ["x", "scale", "bias"][:inputs], outputs)
    given = ["dy" if position in (0, index) else None for position in range(3)]
    with pytest.raises(GradientError, match=f"output '{outputs[index]}' is there for the gradient operator"):
        gradient(definition, given)
    assert gradient(definition, ["dy", None, None]).inputs[0] == "x_grad"


@pytest.mark.parametrize("index", [3, 4])
def test_no_gradient_comes_from_the_saved_statistics_of_a_batch(index: int) -> None:
    outputs = ["y", "m", "v", "saved_mean", "saved_inv_std"]
    definition = operator_def("SpatialBN", ["x", "s", "b", "m", "v"], outputs, is_test=0)
    given = ["dy" if position in (0, index) else None for position in range(5)]
    with pytest.raises(GradientError, match=f"output '{outputs[index]}' is there for the gradient operator"):
        gradient(definition, given)


def test_running_statistics_count_as_constants() -> None:
    definition = operator_def("SpatialBN", ["x", "s", "b", "m", "v"], ["y", "m", "v", "sm", "siv"], is_test=0)
    made = gradient(definition, ["dy", "dm", None, None, None])
    assert made.inputs == ("x_grad", "s_grad", "b_grad", None, None)
    assert all("dm" not in operator.input for operator in made.operators)


def test_no_gradient_comes_from_the_scale_of_local_response_normalization() -> None:
    definition = operator_def("LRN", ["x"], ["y", "scale"], size=3)
    with pytest.raises(GradientError, match="output 'scale' is there for the gradient operator"):
        gradient(definition, [None, "dscale"])
