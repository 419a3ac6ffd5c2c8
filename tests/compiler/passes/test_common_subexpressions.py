"""common-subexpressions: operators that compute the same."""

from __future__ import annotations

from dagexec.compiler.passes.common_subexpressions import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged


def test_equal_operators_and_those_equal_because_of_them_are_merged() -> None:
    operators = [
        op("Relu", ["x"], ["a"]),
        op("Relu", ["x"], ["b"]),
        op("MaxPool", ["a"], ["c"], kernel=2, stride=1),
        op("MaxPool", ["b"], ["d"], stride=1, kernel=2),
        op("Add", ["c", "d"], ["y"]),
    ]
    assert rewritten(PASS, model_of(operators)) == ["Relu x -> a", "MaxPool a -> c", "Add c c -> y"]


def test_operators_that_differ_in_an_argument_an_input_or_an_engine_stay() -> None:
    other = op("Relu", ["x"], ["b"])
    other.engine = "ONEDNN"
    operators = [op("Relu", ["x"], ["a"]), other, op("LeakyRelu", ["x"], ["c"], alpha=0.1)]
    operators += [op("LeakyRelu", ["x"], ["d"], alpha=0.2), op("Sum", ["a", "b", "c", "d"], ["y"])]
    assert unchanged(PASS, model_of(operators))


def test_operators_of_different_numbers_of_outputs_stay() -> None:
    operators = [op("Concat", ["x", "x"], ["a"], axis=1), op("Concat", ["x", "x"], ["b", "sizes"], axis=1)]
    assert unchanged(PASS, model_of([*operators, op("Add", ["a", "b"], ["y"])], ["y", "sizes"]))
    assert unchanged(PASS, model_of([*operators[::-1], op("Add", ["a", "b"], ["y"])]))


def test_random_fillers_outputs_and_ordered_operators_stay() -> None:
    random = [op("UniformFill", [], [name], shape=[6]) for name in "ab"]
    assert unchanged(PASS, model_of([*random, op("Sum", ["x", "a", "b"], ["y"])]))
    assert unchanged(PASS, model_of([op("Relu", ["x"], ["y"]), op("Relu", ["x"], ["z"])], ["y", "z"]))
    waits = OperatorDef(type="Relu", input=["x"], output=["b"], control_input=["a"])
    assert unchanged(PASS, model_of([op("Relu", ["x"], ["a"]), waits, op("Add", ["a", "b"], ["y"])]))


def test_readers_of_a_blob_before_and_after_it_is_overwritten_are_not_the_same() -> None:
    operators = [
        op("Abs", ["p"], ["a"]),
        op("Negative", ["p"], ["p"]),
        op("Abs", ["p"], ["b"]),
        op("Sub", ["a", "b"], ["c"]),
        op("Add", ["x", "c"], ["y"]),
    ]
    assert unchanged(PASS, model_of(operators, p=normal(6)))
