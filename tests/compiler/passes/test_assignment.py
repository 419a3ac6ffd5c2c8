"""single-assignment: blobs that are written more than once."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes.assignment import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged


def test_each_value_gets_a_name_and_the_last_writer_keeps_the_blobs() -> None:
    model = model_of([op("Tanh", ["x"], ["y"]), op("Relu", ["y"], ["y"]), op("Negative", ["y"], ["y"])])
    assert rewritten(PASS, model) == ["Tanh x -> y/1", "Relu y/1 -> y/2", "Negative y/2 -> y"]


def test_readers_between_two_writers_read_the_value_between_them() -> None:
    operators = [
        op("Tanh", ["x"], ["a"]),
        op("Abs", ["a"], ["b"]),
        op("Relu", ["x"], ["a"]),
        op("Add", ["a", "b"], ["y"]),
    ]
    assert rewritten(PASS, model_of(operators)) == ["Tanh x -> a/1", "Abs a/1 -> b", "Relu x -> a", "Add a b -> y"]


def test_a_name_that_is_taken_is_not_given_again() -> None:
    operators = [op("Tanh", ["x"], ["y"]), op("Relu", ["y"], ["y"]), op("Abs", ["y"], ["y/1"])]
    assert rewritten(PASS, model_of(operators, ["y", "y/1"]))[0] == "Tanh x -> y/1/1"


def test_a_blob_that_is_fed_or_a_parameter_is_left_alone() -> None:
    fed = model_of([op("Tanh", ["x"], ["x"]), op("Relu", ["x"], ["x"])], "x")
    assert unchanged(PASS, fed)
    counted = model_of([op("Add", ["p", "p"], ["p"]), op("Relu", ["p"], ["p"])], "p", p=normal(3))
    assert unchanged(PASS, counted)


@pytest.mark.parametrize("device", [0, 1])
def test_a_blob_that_another_device_touches_is_left_alone(device: int) -> None:
    remote = op("Abs", ["y"], ["z"])
    remote.device_option.device_type = device  # 1 is CUDA
    model = model_of([op("Tanh", ["x"], ["y"]), op("Relu", ["y"], ["y"]), remote], "z")
    assert unchanged(PASS, model) == (device == 1)


def test_a_blob_that_a_control_input_names_is_left_alone() -> None:
    waits = OperatorDef(type="Abs", input=["x"], output=["z"], control_input=["y"])
    assert unchanged(PASS, model_of([op("Tanh", ["x"], ["y"]), op("Relu", ["y"], ["y"]), waits], ["y", "z"]))


def test_an_operator_that_adds_in_place_keeps_doing_so() -> None:
    convolution = op("FusedConv", ["x", "w", "y"], ["y"], kernel=1, post_ops=["sum:2"])
    model = model_of([op("Tanh", ["x"], ["y"]), convolution], w=normal(4, 4, 1, 1))
    assert unchanged(PASS, model)
    again = model_of([op("Tanh", ["x"], ["y"]), convolution, op("Relu", ["y"], ["y"])], w=normal(4, 4, 1, 1))
    assert rewritten(PASS, again) == ["Tanh x -> y/1", "FusedConv x w y/1 -> y/1", "Relu y/1 -> y"]
