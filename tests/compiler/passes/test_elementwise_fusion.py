"""elementwise-fusion: element-wise operators in a row."""

from __future__ import annotations

import time

import numpy as np
import pytest

from dagexec.compiler.passes import run_passes
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.compiler.passes.elementwise_fusion import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import (
    assert_close,
    listed,
    model_of,
    normal,
    op,
    outputs_of,
    post_ops,
    rewritten,
    types_of,
    unchanged,
)


def test_functions_of_one_tensor() -> None:
    operators = [op("Abs", ["x"], ["a"]), op("Sqrt", ["a"], ["b"]), op("Tanh", ["b"], ["y"])]
    assert rewritten(PASS, model_of(operators)) == ["FusedElementwise x -> y"]


def test_operands_of_smaller_shapes_numbers_and_the_tensor_itself() -> None:
    operators = [
        op("Sub", ["x", "c"], ["a"]),
        op("Mul", ["s", "a"], ["b"]),
        op("Div", ["k", "b"], ["d"]),
        op("Max", ["d", "c", "x"], ["e"]),
        op("Sub", ["k", "e"], ["f"]),
        op("Mean", ["f", "x"], ["y"]),
    ]
    given = {"c": normal(4, 1, 1), "s": np.array(2.0, np.float32), "k": normal(6) + 3}
    model = model_of(operators, **given)
    assert rewritten(PASS, model) == ["FusedElementwise x c k c x k x -> y"]
    assert post_ops(PASS.apply(model).model.net.op[0]) == [
        "sub:1", "linear:2.0:0.0", "pow:1.0:-1.0", "mul:2", "max:3", "max:4", "linear:-1.0:0.0", "add:5", "add:6",
        "linear:0.5:0.0",
    ]  # fmt: skip


def test_numbers_on_either_side() -> None:
    operators = [
        op("Sub", ["n", "x"], ["a"]),
        op("Add", ["a", "n"], ["b"]),
        op("Div", ["b", "n"], ["c"]),
        op("Exp", ["c"], ["d"]),
        op("Div", ["n", "d"], ["y"]),
    ]
    model = model_of(operators, n=np.array([1.5], np.float32))
    assert rewritten(PASS, model) == ["FusedElementwise x -> y"]


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_a_batch_normalization_and_what_follows(order: str) -> None:
    shape = (2, 4, 5, 6) if order == "NCHW" else (2, 5, 6, 4)
    operators = [op("SpatialBN", ["x", "s", "o", "m", "v"], ["a"], is_test=1, order=order), op("Relu", ["a"], ["y"])]
    given = {**{name: normal(4) for name in "som"}, "v": np.abs(normal(4)) + np.float32(0.1)}
    model = model_of(operators, inputs={"x": shape}, **given)
    assert rewritten(PASS, model) == ["FusedElementwise x a/factor a/shift -> y"]
    factor = PASS.apply(model).model.parameters["a/factor"]
    assert factor.shape == ((1, 4, 1, 1) if order == "NCHW" else (1, 1, 1, 4))
    assert unchanged(PASS, model_of(operators[:1], "a", inputs={"x": shape}, **given))


def test_two_hundred_in_a_row_become_a_handful() -> None:
    kinds = ["Tanh", "Sigmoid", "Abs", "Softplus"]
    names = ["x", *(f"a{index}" for index in range(199)), "y"]
    operators = [op(kinds[index % 4], [names[index]], [names[index + 1]]) for index in range(200)]
    model = model_of(operators)
    start = time.perf_counter()
    assert len(PASS.apply(model).model.net.op) <= 7
    assert time.perf_counter() - start < 2
    assert len(rewritten(PASS, model)) <= 7


def test_where_chains_meet_one_goes_on_and_reads_the_other() -> None:
    operators = [
        op("Abs", ["x"], ["a"]), op("Sqrt", ["a"], ["b"]), op("Tanh", ["x"], ["c"]), op("Exp", ["c"], ["d"]),
        op("Mul", ["b", "d"], ["y"]),
    ]  # fmt: skip
    assert rewritten(PASS, model_of(operators)) == ["FusedElementwise x -> d", "FusedElementwise x d -> y"]


def test_fused_chains_are_joined() -> None:
    operators = [
        op("FusedElementwise", ["x", "c"], ["a"], post_ops=["relu", "mul:1"]),
        op("FusedElementwise", ["a", "c"], ["y"], post_ops=["add:1", "tanh"]),
    ]
    model = model_of(operators, c=normal(6))
    assert rewritten(PASS, model) == ["FusedElementwise x c c -> y"]
    assert post_ops(PASS.apply(model).model.net.op[0]) == ["relu", "mul:1", "add:2", "tanh"]


def not_fused() -> dict[str, list[OperatorDef]]:
    first, second = op("Abs", ["x"], ["a"]), op("Sqrt", ["a"], ["y"])
    waits, remote, chosen = OperatorDef(), OperatorDef(), OperatorDef()
    for copy in (waits, remote, chosen):
        copy.CopyFrom(second)
    waits.control_input.append("x")
    remote.device_option.device_type = 1
    chosen.engine = "OTHER"
    return {
        "another reader": [first, second, op("Softmax", ["a"], ["z"])],
        "an output": [op("Abs", ["x"], ["z"]), op("Sqrt", ["z"], ["y"])],
        "control input": [first, waits, op("Softmax", ["x"], ["z"])],
        "another device": [first, remote, op("Softmax", ["x"], ["z"])],
        "an engine asked for": [first, chosen, op("Softmax", ["x"], ["z"])],
        "alone": [op("Abs", ["x"], ["y"]), op("Softmax", ["x"], ["z"])],
        "no function of each element": [op("Softmax", ["x"], ["y"]), op("LogSoftmax", ["y"], ["z"])],
        "a result larger than the tensor": [op("Abs", ["v"], ["z"]), op("Mul", ["x", "z"], ["y"])],
        "integers": [op("Cast", ["x"], ["z"], to=2), op("Abs", ["z"], ["j"]), op("Negative", ["j"], ["y"])],
    }  # fmt: skip


@pytest.mark.parametrize("why", not_fused())
def test_it_is_not_fused_for(why: str) -> None:
    inputs = {"x": (2, 4, 6, 6), "v": (6,)}
    assert unchanged(PASS, model_of(not_fused()[why], ["y", "z"], inputs=inputs))


def test_a_tensor_that_broadcasts_up_starts_no_chain_but_may_be_an_operand() -> None:
    operators = [op("Abs", ["v"], ["a"]), op("Mul", ["a", "x"], ["b"]), op("Tanh", ["b"], ["y"])]
    model = model_of(operators, inputs={"x": (None, 6), "v": (6,)})
    assert rewritten(PASS, model) == ["Abs v -> a", "FusedElementwise x a -> y"]


def test_caffe2s_older_broadcasting_is_fused_only_where_it_means_the_same() -> None:
    operators = [op("Add", ["x", "c"], ["a"], broadcast=1, axis=1), op("Relu", ["a"], ["y"])]
    assert unchanged(PASS, model_of(operators, inputs={"x": (2, 4, 4)}, c=normal(4)))
    same = [op("Add", ["x", "c"], ["a"], broadcast=1), op("Relu", ["a"], ["y"])]
    model = model_of(same, inputs={"x": (3, 4)}, c=normal(3, 4))
    assert types_of(PASS.apply(model).model) == ["FusedElementwise"]
    assert listed(model) != listed(PASS.apply(model).model)


@pytest.mark.parametrize("sizes", [(1, 3), (3, 1)])
def test_inputs_of_different_batch_sizes_still_broadcast(sizes: tuple[int, int]) -> None:
    each = [op("Abs", ["x"], ["a"]), op("Abs", ["z"], ["b"])]
    model = model_of(
        [*each, op("Add", ["a", "b"], ["c"]), op("Tanh", ["c"], ["y"])], inputs={"x": (None, 4), "z": (None, 4)}
    )
    feeds = {"x": normal(sizes[0], 4), "z": normal(sizes[1], 4)}
    result = run_passes(model, GRAPH_PASSES).model
    assert_close(outputs_of(result, feeds), outputs_of(model, feeds))


@pytest.mark.parametrize("more", [0, 1])
def test_a_layer_applies_numbers_behind_its_activation(more: int) -> None:
    behind = [op("Relu", ["a"], ["b"]), op("Sub", ["b", "n"], ["c"]), op("Relu", ["c"], ["d"])]
    operators = [op("Conv", ["x", "w"], ["a"], kernel=1), *behind[: 2 + more]]
    model = model_of(operators, [operators[-1].output[0]], w=normal(4, 4, 1, 1), n=np.full(1, 0.75, np.float32))
    result = run_passes(model, GRAPH_PASSES).model
    assert types_of(result) == ["FusedConv"]
    assert run_passes(result, GRAPH_PASSES).model.net == result.net
    feeds = {"x": normal(2, 4, 6, 6)}
    assert_close(outputs_of(result, feeds), outputs_of(model, feeds))


def test_a_layer_whose_result_others_read_applies_nothing() -> None:
    operators = [op("Conv", ["x", "w"], ["a"], kernel=1), op("Sub", ["a", "n"], ["b"]), op("Relu", ["b"], ["y"])]
    model = model_of(operators, ["a", "y"], w=normal(4, 4, 1, 1), n=np.full(1, 0.75, np.float32))
    assert types_of(PASS.apply(model).model) == ["Conv", "FusedElementwise"]
