"""in-place: results over inputs that die."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.compiler.passes.in_place import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged


def test_a_chain_works_in_one_blob() -> None:
    operators = [op("Softmax", ["x"], ["a"]), op("Relu", ["a"], ["b"]), op("Tanh", ["b"], ["y"])]
    assert rewritten(PASS, model_of(operators)) == ["Softmax x -> y", "Relu y -> y", "Tanh y -> y"]


def test_any_function_of_one_element_overwrites_its_input() -> None:
    operators = [op("Softmax", ["x"], ["a"]), op("Erf", ["a"], ["b"]), op("Floor", ["b"], ["y"])]
    assert rewritten(PASS, model_of(operators)) == ["Softmax x -> y", "Erf y -> y", "Floor y -> y"]


def test_a_binary_operator_overwrites_an_operand_of_its_results_type() -> None:
    operators = [op("Softmax", ["x"], ["a"]), op("Mul", ["v", "a"], ["y"])]
    assert rewritten(PASS, model_of(operators, v=normal(6))) == ["Softmax x -> y", "Mul v y -> y"]
    smaller = [op("Softmax", ["v"], ["a"]), op("Mul", ["a", "x"], ["y"])]
    assert unchanged(PASS, model_of(smaller, inputs={"x": (2, 3), "v": (1, 3)}))


def test_what_is_read_earlier_in_any_case_may_be_overwritten_and_nothing_else() -> None:
    start = [op("Softmax", ["x"], ["a"]), op("LogSoftmax", ["a"], ["b"])]
    ordered = [*start, op("Mul", ["a", "b"], ["y"])]
    assert rewritten(PASS, model_of(ordered))[-1] == "Mul y b -> y"
    unordered = [*start, op("Relu", ["a"], ["y"])]
    assert unchanged(PASS, model_of(unordered, ["y", "b"]))


def not_in_place() -> dict[str, list[OperatorDef]]:
    first, second = op("Softmax", ["x"], ["a"]), op("Relu", ["a"], ["y"])
    waits, remote = OperatorDef(), OperatorDef()
    for copy in (waits, remote):
        copy.CopyFrom(second)
    waits.control_input.append("x")
    remote.device_option.device_type = 1
    other = op("Softmax", ["x"], ["z"])
    return {
        "an input": [second.__class__(type="Relu", input=["x"], output=["y"]), other],
        "an output": [op("Softmax", ["x"], ["z"]), op("Relu", ["z"], ["y"])],
        "control input": [first, waits, other],
        "another device": [first, remote, other],
        "a view of it": [first, op("Flatten", ["a"], ["f"]), op("LogSoftmax", ["f"], ["z"]), second],
        "a part": [op("Split", ["x"], ["a", "z"], axis=1), second],
        "joined": [first, op("Relu", ["a"], ["b"]), op("Concat", ["b", "b"], ["y"], axis=1), other],
        "another type": [first, op("Cast", ["a"], ["y"], to=11), other],
        "both operands": [first, op("FusedElementwise", ["a", "a"], ["y"], post_ops=["mul:1"]), other],
        "a layer": [first, op("FusedConv", ["x", "w", "a"], ["y"], kernel=1, post_ops=["add:2"]), other],
        "a neighbor": [first, op("Softmax", ["a"], ["y"]), other],
    }


@pytest.mark.parametrize("why", not_in_place())
def test_it_is_not_done_for(why: str) -> None:
    assert unchanged(PASS, model_of(not_in_place()[why], ["y", "z"], w=normal(4, 4, 1, 1)))


def test_what_shapes_depend_on_is_not_written_over() -> None:
    operators = [
        op("Shape", ["x"], ["sizes"]),
        op("Mul", ["sizes", "one"], ["same"]),
        op("Add", ["same", "zero"], ["target"]),
        op("Reshape", ["x", "target"], ["r", "old"]),
        op("Sqr", ["r"], ["y"]),
    ]
    assert unchanged(PASS, model_of(operators, inputs={"x": (None, 3)}, one=np.array([1]), zero=np.array([0])))
