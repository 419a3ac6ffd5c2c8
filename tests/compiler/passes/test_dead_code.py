"""dead-code: what nobody reads."""

from __future__ import annotations

from dagexec.compiler.passes.dead_code import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged
from tests.nets import temporary_operator


def test_operators_and_parameters_that_nobody_reads_go() -> None:
    operators = [op("Abs", ["x"], ["y"]), op("Mul", ["x", "w"], ["a"]), op("Relu", ["a"], ["b"])]
    model = model_of(operators, w=normal(6))
    assert rewritten(PASS, model) == ["Abs x -> y"]
    result = PASS.apply(model).model
    assert not result.parameters
    assert list(result.net.external_input) == ["x"]


def test_optional_outputs_that_nobody_reads_are_not_written() -> None:
    model = model_of([op("Concat", ["x", "x"], ["y", "info"], axis=1)])
    assert rewritten(PASS, model) == ["Concat x x -> y"]
    assert unchanged(PASS, model_of([op("Concat", ["x", "x"], ["y", "info"], axis=1)], ["y", "info"]))


def test_training_keeps_the_outputs_that_it_needs() -> None:
    """Without its mask, a Dropout in training is refused."""
    training, inference = (op("Dropout", ["x"], ["y", "mask"], is_test=is_test) for is_test in (0, 1))
    assert unchanged(PASS, model_of([training]))
    assert rewritten(PASS, model_of([inference])) == ["Dropout x -> y"]


def test_an_output_among_several_keeps_the_operator() -> None:
    assert unchanged(PASS, model_of([op("Split", ["x"], ["a", "y"], axis=1)]))


def test_what_is_there_for_order_or_effect_stays() -> None:
    waits = OperatorDef(type="Abs", input=["x"], output=["y"], control_input=["a"])
    assert unchanged(PASS, model_of([op("Relu", ["x"], ["a"]), waits]))
    assert unchanged(PASS, model_of([op("Abs", ["x"], ["y"]), op("NoOp", ["x"], ["a"])]))
    with temporary_operator("Prints", lambda operator: None):
        assert unchanged(PASS, model_of([op("Abs", ["x"], ["y"]), op("Prints", ["x"], ["a"])]))


def test_a_parameter_that_the_net_updates_for_the_next_run_stays() -> None:
    assert unchanged(PASS, model_of([op("Mul", ["x", "p"], ["y"]), op("Abs", ["p"], ["p"])], p=normal(6)))
