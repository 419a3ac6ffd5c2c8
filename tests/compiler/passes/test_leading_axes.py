"""leading-axes: layers between reshapes."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes.leading_axes import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged

BEFORE = op("Reshape", ["x"], ["m"], shape=[-1, 6])


def layers(units: int, *shape: int) -> list[OperatorDef]:
    return [BEFORE, op("FC", ["m", "w", "b"], ["n"]), op("Reshape", ["n"], ["y"], shape=[*shape, units])]


@pytest.mark.parametrize("units", [6, 8])
def test_a_layer_takes_the_axes_that_a_reshape_merged(units: int) -> None:
    model = model_of(layers(units, -1, 5), inputs={"x": (None, 5, 6)}, w=normal(units, 6), b=normal(units))
    assert rewritten(PASS, model)[-1] == "FC x w b -> y"


def test_a_reshape_to_other_axes_is_moved_before_a_layer_with_as_many_outputs() -> None:
    model = model_of(layers(6, 5, -1), inputs={"x": (None, 5, 6)}, w=normal(6, 6), b=normal(6))
    assert rewritten(PASS, model) == [
        "Reshape x -> m", "Reshape m -> m/wide", "FC m/wide w b -> y"
    ]  # fmt: skip


@pytest.mark.parametrize("case", ["other axes", "the matrix is read", "units are taken apart", "no layer behind"])
def test_what_needs_the_matrix_stays(case: str) -> None:
    operators, outputs = layers(8, -1, 5), ["y"]
    if case == "other axes":
        operators = layers(8, 5, -1)
    elif case == "the matrix is read":
        outputs = ["y", "n"]
    elif case == "units are taken apart":
        operators = [*layers(8)[:-1], op("Reshape", ["n"], ["y"], shape=[-1, 5, 4, 2])]
    else:
        operators = operators[:-1]
        outputs = ["n"]
    assert unchanged(PASS, model_of(operators, outputs, inputs={"x": (None, 5, 6)}, w=normal(8, 6), b=normal(8)))
