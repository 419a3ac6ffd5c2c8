"""activation-fusion: activations behind layers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dagexec.compiler.passes.activation_fusion import PASS
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, post_ops, rewritten, types_of, unchanged

CONVOLUTION = op("Conv", ["x", "w", "b"], ["c"], kernel=3, pad=1)
WEIGHTS = {"w": normal(4, 4, 3, 3), "b": normal(4)}
ACTIVATIONS = [
    (op("Relu", ["c"], ["y"]), ["relu"]),
    (op("ReluN", ["c"], ["y"], n=6.0), ["clip:0.0:6.0"]),
    (op("Clip", ["c"], ["y"], min=0.0, max=6.0), ["clip:0.0:6.0"]),
    (op("Clip", ["c"], ["y"], max=1.0), [f"clip:{float(np.finfo(np.float32).min)!r}:1.0"]),
    (op("LeakyRelu", ["c"], ["y"], alpha=0.25), ["leaky_relu:0.25"]),
    (op("Sigmoid", ["c"], ["y"]), ["sigmoid"]),
    (op("Tanh", ["c"], ["y"]), ["tanh"]),
    (op("Elu", ["c"], ["y"], alpha=0.5), ["elu:0.5"]),
    (op("Selu", ["c"], ["y"], alpha=1.5, scale=2.0), ["elu:1.5", "linear:2.0:0.0"]),
    (op("Swish", ["c"], ["y"]), ["swish:1.0"]),
    (op("HardSwish", ["c"], ["y"]), ["hardswish"]),
    (op("HardSigmoid", ["c"], ["y"], alpha=0.25, beta=0.5), ["hardsigmoid:0.25:0.5"]),
    (op("Gelu", ["c"], ["y"]), ["gelu_erf"]),
    (op("Gelu", ["c"], ["y"], fast_gelu=1), ["gelu_tanh"]),
    (op("Softplus", ["c"], ["y"]), ["softplus"]),
    (op("Abs", ["c"], ["y"]), ["abs"]),
    (op("Sqr", ["c"], ["y"]), ["square"]),
    (op("Cube", ["c"], ["y"]), ["pow:1.0:3.0"]),
    (op("Exp", ["c"], ["y"]), ["exp"]),
    (op("Negative", ["c"], ["y"]), ["linear:-1.0:0.0"]),
]


@pytest.mark.parametrize(("activation", "expected"), ACTIVATIONS, ids=lambda one: getattr(one, "type", ""))
def test_an_activation_becomes_a_post_op(activation: OperatorDef, expected: list[str]) -> None:
    model = model_of([CONVOLUTION, activation], **WEIGHTS)
    assert rewritten(PASS, model) == ["FusedConv x w b -> y"]
    (fused,) = PASS.apply(model).model.net.op
    assert post_ops(fused) == expected
    assert {argument.name: argument.i for argument in fused.arg}["bias"] == 1


def test_any_number_in_a_row_and_no_bias() -> None:
    operators = [
        op("Conv", ["x", "w"], ["c"], kernel=3),
        op("Relu", ["c"], ["d"]),
        op("Sqrt", ["d"], ["e"]),
        op("Tanh", ["e"], ["y"]),
    ]
    model = model_of(operators, **WEIGHTS)
    assert rewritten(PASS, model) == ["FusedConv x w -> y"]
    assert post_ops(PASS.apply(model).model.net.op[0]) == ["relu", "sqrt", "tanh"]


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2])
def test_groups_and_orders(group: int, order: str) -> None:
    shape = (4, 4 // group, 3, 3) if order == "NCHW" else (4, 3, 3, 4 // group)
    size = (2, 4, 6, 6) if order == "NCHW" else (2, 6, 6, 4)
    layer = op("Conv", ["x", "w", "b"], ["c"], kernel=3, group=group, order=order)
    model = model_of([layer, op("Relu", ["c"], ["y"])], inputs={"x": size}, w=normal(*shape), b=normal(4))
    assert types_of(PASS.apply(model).model) == ["FusedConv"]
    assert len(rewritten(PASS, model)) == 1


def test_a_fully_connected_layer() -> None:
    operators = [op("FC", ["x", "w", "b"], ["c"]), op("Relu", ["c"], ["y"])]
    model = model_of(operators, inputs={"x": (3, 5)}, w=normal(6, 5), b=normal(6))
    assert rewritten(PASS, model) == ["FusedFC x w b -> y"]


def not_fused() -> dict[str, list[OperatorDef]]:
    relu = op("Relu", ["c"], ["y"])
    waits, remote, chosen = (OperatorDef() for _ in range(3))
    for copy in (waits, remote):
        copy.CopyFrom(relu)
    chosen.CopyFrom(CONVOLUTION)
    waits.control_input.append("x")
    remote.device_option.device_type = 1
    chosen.engine = "FFT"
    return {
        "another reader": [CONVOLUTION, relu, op("Tanh", ["c"], ["z"])],
        "twice a reader": [CONVOLUTION, op("Mul", ["c", "c"], ["y"]), op("Abs", ["x"], ["z"])],
        "an output": [CONVOLUTION, relu, op("Copy", ["c"], ["z"])],
        "control input": [CONVOLUTION, waits, op("Abs", ["x"], ["z"])],
        "another device": [CONVOLUTION, remote, op("Abs", ["x"], ["z"])],
        "an engine asked for": [chosen, relu, op("Abs", ["x"], ["z"])],
        "no activation": [CONVOLUTION, op("Softmax", ["c"], ["y"]), op("Abs", ["x"], ["z"])],
        "overwritten": [CONVOLUTION, op("Relu", ["c"], ["c"]), op("Abs", ["c"], ["y"]), op("Abs", ["x"], ["z"])],
    }


@pytest.mark.parametrize("why", not_fused())
def test_it_is_not_fused_for(why: str) -> None:
    assert unchanged(PASS, model_of(not_fused()[why], ["y", "z"], **WEIGHTS))


def test_fed_weights_stay() -> None:
    operators = [CONVOLUTION, op("Relu", ["c"], ["y"])]
    fed = {"x": (2, 4, 6, 6), "w": (4, 4, 3, 3)}
    assert unchanged(PASS, model_of(operators, inputs=fed, **WEIGHTS))


def test_at_most_as_many_post_ops_as_a_primitive_takes() -> None:
    names = ["c", *(f"a{index}" for index in range(39)), "y"]
    chain = [op("Tanh", [source], [target]) for source, target in itertools.pairwise(names)]
    model = model_of([CONVOLUTION, *chain], **WEIGHTS)
    result = PASS.apply(model).model
    assert len(post_ops(result.net.op[0])) == 32
    assert len(rewritten(PASS, model)) == 1 + 8
