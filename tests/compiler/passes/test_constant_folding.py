"""constant-folding: what depends on parameters alone."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dagexec.compiler.passes import constant_folding
from dagexec.compiler.passes.constant_folding import GROWTH_BYTES, PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged
from tests.nets import temporary_operator


def test_a_chain_on_parameters_becomes_one_parameter() -> None:
    w = normal(4, 6)
    operators = [
        op("Transpose", ["w"], ["t"]),
        op("Mul", ["t", "s"], ["scaled"]),
        op("FC", ["x", "scaled", "b"], ["y"]),
    ]
    model = model_of(operators, inputs={"x": (2, 4)}, w=w, s=normal(1), b=normal(6))
    assert rewritten(PASS, model) == ["FC x scaled b -> y"]
    result = PASS.apply(model)
    np.testing.assert_array_equal(result.model.parameters["scaled"], w.T * model.parameters["s"])
    assert not result.model.parameters["scaled"].flags.writeable
    assert result.changes == ("Transpose 't' is computed once", "Mul 'scaled' is computed once")


def test_a_filler_without_inputs_is_a_constant_unless_it_is_random() -> None:
    fixed = model_of([op("ConstantFill", [], ["c"], shape=[4, 1, 1], value=2.0), op("Mul", ["x", "c"], ["y"])])
    assert rewritten(PASS, fixed) == ["Mul x c -> y"]
    assert unchanged(PASS, model_of([op("UniformFill", [], ["c"], shape=[4, 1, 1]), op("Mul", ["x", "c"], ["y"])]))


def test_a_result_much_larger_than_what_it_is_made_of_is_computed_in_each_run() -> None:
    large = GROWTH_BYTES // 4 + 100
    operators = [
        op("Expand", ["c"], ["long"], shape=[large]),
        op("ReduceSum", ["long"], ["s"]),
        op("Add", ["x", "s"], ["y"]),
    ]
    assert unchanged(PASS, model_of(operators, c=normal(1)))


def test_what_is_too_large_to_keep_is_never_computed() -> None:
    model = model_of([op("ConstantFill", [], ["c"], shape=[1 << 24]), op("Slice", ["c"], ["y"], starts=[0], ends=[1])])
    tracemalloc.start()
    try:
        assert not PASS.apply(model).changes
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_doubling_again_and_again_comes_to_an_end() -> None:
    doubled = [op("Concat", [f"c{step}"] * 2, [f"c{step + 1}", f"sizes{step}"], axis=0) for step in range(22)]
    model = model_of([*doubled, op("Slice", ["c22"], ["y"], starts=[0], ends=[1])], c0=normal(8))
    result = PASS.apply(model)
    assert result.changes
    assert max(array.nbytes for array in result.model.parameters.values()) <= 2 * GROWTH_BYTES


def test_what_would_take_long_is_left_to_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = [op("Abs", ["w"], ["a"]), op("Sqrt", ["a"], ["s"]), op("Mul", ["x", "s"], ["y"])]
    model = model_of(operators, w=normal(6))
    monkeypatch.setattr(constant_folding, "MAX_SECONDS", 1.5e-6)
    assert rewritten(PASS, model) == ["Sqrt a -> s", "Mul x s -> y"]
    monkeypatch.setattr(constant_folding, "MAX_SECONDS", 1e-6)
    assert unchanged(PASS, model)


def test_shapes_without_free_axes_are_constants() -> None:
    operators = [
        op("Shape", ["x"], ["sizes"]),
        op("Slice", ["sizes"], ["last"], starts=[2], ends=[4]),
        op("Concat", ["head", "last"], ["shape"], axis=0),
        op("Reshape", ["x", "shape"], ["y"]),
    ]
    model = model_of(operators, head=np.array([8], np.int64))
    assert rewritten(PASS, model) == ["Reshape x -> y"]
    free = model_of(operators, inputs={"x": (None, 4, 6, 6)}, head=np.array([8], np.int64))
    assert unchanged(PASS, free)


def test_outputs_and_what_is_fed_or_written_are_no_constants() -> None:
    assert unchanged(PASS, model_of([op("Relu", ["w"], ["y"]), op("Abs", ["x"], ["z"])], ["y", "z"], w=normal(3)))
    fed = model_of(
        [op("Abs", ["w"], ["a"]), op("Mul", ["x", "a"], ["y"])], inputs={"x": (2, 3), "w": (3,)}, w=normal(3)
    )
    assert unchanged(PASS, fed)
    updated = model_of(
        [op("Abs", ["w"], ["a"]), op("Mul", ["x", "a"], ["y"]), op("Negative", ["w"], ["w"])], ["y", "w"], w=normal(6)
    )
    assert unchanged(PASS, updated)


def test_control_inputs_and_other_devices_keep_an_operator() -> None:
    waits = OperatorDef(type="Abs", input=["w"], output=["a"], control_input=["x"])
    assert unchanged(PASS, model_of([waits, op("Mul", ["x", "a"], ["y"])], w=normal(6)))
    remote = op("Abs", ["w"], ["a"])
    remote.device_option.device_type = 1
    assert unchanged(PASS, model_of([remote, op("Mul", ["x", "a"], ["y"])], w=normal(6)))


def test_an_applications_own_operator_is_not_run_ahead() -> None:
    with temporary_operator("Measures", lambda operator: None):
        assert unchanged(PASS, model_of([op("Measures", ["w"], ["a"]), op("Abs", ["x"], ["y"])], w=normal(6)))


def test_an_operator_that_fails_on_its_constants_is_left_to_fail_in_the_run() -> None:
    assert unchanged(PASS, model_of([op("Add", ["v", "w"], ["a"]), op("Abs", ["x"], ["y"])], v=normal(2), w=normal(3)))
