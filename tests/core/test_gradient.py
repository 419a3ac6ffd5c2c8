"""The registry of gradient makers, and what a maker is asked."""

from __future__ import annotations

import pytest

from dagexec import OperatorDef
from dagexec.core.device import Device
from dagexec.core.gradient import (
    GradientOperators,
    GradientRequest,
    SparseGradient,
    gradient,
    gradient_of,
    has_maker,
    no_gradient,
    not_differentiable,
)
from dagexec.errors import GradientError
from tests.ops.running import operator_def


@gradient_of("TestProduct")
def product_gradient(request: GradientRequest) -> GradientOperators:
    return request.single("TestProductGradient", [request.dy(0), request.x(0), request.x(1)], [0, 1], extra=3)


@gradient_of("TestPair")
def pair_gradient(request: GradientRequest) -> GradientOperators:
    return request.single("TestPairGradient", [request.dy(0), request.dy(1), request.dy(1)], [0])


no_gradient("TestShape")
not_differentiable("it rounds", "TestRound")


def test_a_gradient_operator_has_the_device_engine_and_arguments_of_the_forward_operator() -> None:
    definition = operator_def("TestProduct", ["a", "b"], ["c"], extra=1, axis=2)
    definition.engine = "ONEDNN"
    definition.device_option.CopyFrom(Device("sim", 1).to_option())
    made = gradient(definition, ["c_grad"])
    [operator] = made.operators
    assert (operator.type, operator.engine, operator.is_gradient_op) == ("TestProductGradient", "ONEDNN", True)
    assert Device.from_option(operator.device_option) == Device("sim", 1)
    assert {arg.name: arg.i for arg in operator.arg} == {"extra": 3, "axis": 2}
    assert made.inputs == ("a_grad", "b_grad")


def test_a_blob_that_is_two_inputs_gets_a_gradient_for_each() -> None:
    made = gradient(operator_def("TestProduct", ["a", "a"], ["c"]), ["c_grad"])
    assert len(set(made.inputs)) == 2
    assert list(made.operators[0].output) == list(made.inputs)


def test_an_output_that_nothing_depends_on_has_zeros_for_a_gradient() -> None:
    made = gradient(operator_def("TestPair", ["a"], ["b", "c"]), ["b_grad", None])
    fill, operator = made.operators
    assert (fill.type, list(fill.input)) == ("ConstantFill", ["c"])
    assert list(operator.input) == ["b_grad", fill.output[0], fill.output[0]]


def test_without_any_output_gradient_there_is_nothing_to_compute() -> None:
    assert gradient(operator_def("TestPair", ["a"], ["b", "c"]), [None, None]) == GradientOperators((), (None,))


def test_an_operator_without_gradient_passes_on_none() -> None:
    assert gradient(operator_def("TestShape", ["a"], ["b"]), ["b_grad"]).inputs == (None,)
    assert not has_maker("TestShape")


@pytest.mark.parametrize(
    ("definition", "gradients", "message"),
    [
        (operator_def("TestRound", ["a"], ["b"]), ["b_grad"], "TestRound has no gradient: it rounds"),
        (operator_def("TestUnknown", ["a"], ["b"]), ["b_grad"], "no gradient maker is registered for TestUnknown"),
        (operator_def("TestPair", ["a"], ["b", "c"]), ["b_grad"], "each of 2 outputs, found 1"),
        (operator_def("TestPair", ["a"], ["b", "c"]), [SparseGradient("i", "v"), None], "expected a dense gradient"),
    ],
)
def test_what_has_no_gradient_is_an_error_that_says_why(
    definition: OperatorDef, gradients: list[str | None], message: str
) -> None:
    with pytest.raises(GradientError, match=message):
        gradient(definition, gradients)


def test_a_second_maker_for_a_type_is_refused() -> None:
    with pytest.raises(GradientError, match="already has a gradient maker"):
        no_gradient("TestRound")
