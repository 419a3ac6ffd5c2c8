"""identities: operators that give their input back."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes.identities import PASS
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged

NOTHING = [
    op("Dropout", ["a"], ["b"], is_test=1),
    op("Dropout", ["a"], ["b", "mask"], is_test=1),
    op("Copy", ["a"], ["b"]),
    op("StopGradient", ["a"], ["b"]),
    op("Reshape", ["a"], ["b"], shape=[0, 4, 6, -1]),
    op("Transpose", ["a"], ["b"], axes=[0, 1, 2, 3]),
    op("Cast", ["a"], ["b"], to=FLOAT32.number),
    op("Sum", ["a"], ["b"]),
    op("Concat", ["a"], ["b"], axis=1),
    op("Resize", ["a"], ["b"], mode="linear", sizes=[6, 4], axes=[2, 1]),
]
SOMETHING = [
    op("Dropout", ["a"], ["b", "z"], is_test=1),
    op("Reshape", ["a"], ["b"], shape=[4, 2, 6, 6]),
    op("Transpose", ["a"], ["b"], axes=[0, 1, 3, 2]),
    op("Cast", ["a"], ["b"], to=FLOAT64.number),
    op("Sum", ["a", "a"], ["b"]),
    op("Concat", ["a"], ["b"], axis=1, add_axis=1),
    op("Resize", ["a"], ["b"], mode="linear", scales=[1.1, 1.1], axes=[2, 3]),
    op("Resize", ["a"], ["b"], mode="linear", sizes=[6, 7], axes=[2, 3], keep_aspect_ratio_policy="not_larger"),
    op("Resize", ["a"], ["b"], sizes=[6, 6], axes=[2, 3], coordinates="tf_crop_and_resize", roi=[0.0, 0.0, 0.5, 1.0]),
]


@pytest.mark.parametrize("nothing", NOTHING, ids=lambda one: one.type)
def test_it_is_removed_and_its_readers_read_its_input(nothing: OperatorDef) -> None:
    operators = [op("Abs", ["x"], ["a"]), nothing, op("Relu", ["b"], ["y"]), op("Tanh", ["b"], ["z"])]
    assert rewritten(PASS, model_of(operators, ["y", "z"])) == ["Abs x -> a", "Relu a -> y", "Tanh a -> z"]


@pytest.mark.parametrize("something", SOMETHING, ids=lambda one: one.type)
def test_an_operator_that_does_something_stays(something: OperatorDef) -> None:
    outputs = ["y", "z"] if "z" in something.output else ["y"]
    assert unchanged(PASS, model_of([op("Abs", ["x"], ["a"]), something, op("Negative", ["b"], ["y"])], outputs))


def test_of_an_output_the_name_stays() -> None:
    assert rewritten(PASS, model_of([op("Abs", ["x"], ["a"]), op("Copy", ["a"], ["y"])])) == ["Abs x -> y"]


def test_an_input_given_back_as_an_output_is_copied() -> None:
    assert unchanged(PASS, model_of([op("Copy", ["x"], ["y"])]))
    assert unchanged(PASS, model_of([op("Abs", ["x"], ["a"]), op("Copy", ["a"], ["y"])], ["y", "a"]))


def test_a_copy_of_what_is_overwritten_later_stays() -> None:
    operators = [op("Copy", ["p"], ["old"]), op("Negative", ["p"], ["p"]), op("Add", ["old", "p"], ["y"])]
    assert unchanged(PASS, model_of([*operators, op("Abs", ["x"], ["z"])], ["y", "z"], p=normal(6)))


def test_a_reshape_to_the_same_shape_is_seen_whatever_the_free_axes_are() -> None:
    free = {"x": (None, 4, None, 6)}
    operators = [op("Reshape", ["x"], ["a"], shape=[0, 4, -1, 6]), op("Relu", ["a"], ["y"])]
    assert rewritten(PASS, model_of(operators, inputs=free)) == ["Relu x -> y"]
    operators = [op("Reshape", ["x"], ["a"], shape=[-1, 4, 224, 6]), op("Relu", ["a"], ["y"])]
    assert unchanged(PASS, model_of(operators, inputs=free))
