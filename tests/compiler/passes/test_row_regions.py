"""expression-fusion of rows: softmax and normalizations with what is around them, however they are spelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

import dagexec
from dagexec.compiler.passes.expression_fusion import PASS
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import feeds_for, model_of, normal, op, outputs_of, rewritten, unchanged
from tests.ops.onednn.engine import needs_onednn

pytestmark = needs_onednn

Array = np.ndarray
EPSILON, WIDTH = 0.25, 12  # large, so that one that is lost shows
NUMBERS = {
    "two": np.float32(2), "one": np.float32(1), "half": np.float32(0.5), "minus_half": np.float32(-0.5),
    "epsilon": np.float32(EPSILON),
}  # fmt: skip
SQUARES = [
    op("Sqr", ["x"], ["s"]),
    op("Pow", ["x"], ["s"], exponent=2.0),
    op("Pow", ["x", "two"], ["s"]),
    op("Mul", ["x", "x"], ["s"]),
]
ENDS: dict[str, list[OperatorDef]] = {
    "rsqrt": [op("Rsqrt", ["e"], ["r"]), op("Mul", ["x", "r"], ["n"])],
    "reciprocal": [op("Sqrt", ["e"], ["q"]), op("Reciprocal", ["q"], ["r"]), op("Mul", ["r", "x"], ["n"])],
    "one over the root": [op("Sqrt", ["e"], ["q"]), op("Div", ["one", "q"], ["r"]), op("Mul", ["x", "r"], ["n"])],
    "quotient": [op("Sqrt", ["e"], ["q"]), op("Div", ["x", "q"], ["n"])],
    "power": [op("Pow", ["e", "minus_half"], ["r"]), op("Mul", ["x", "r"], ["n"])],
}
SCALED = op("Mul", ["n", "weight"], ["y"])


def spelled(
    end: str, square: OperatorDef = SQUARES[0], axes: Sequence[int] = (-1,), kind: str = "ReduceMean"
) -> list[OperatorDef]:
    mean = op(kind, ["s"], ["m"], axes=list(axes), keepdims=1)
    return [square, mean, op("Add", ["epsilon", "m"], ["e"]), *ENDS[end]]


def model(operators: list[OperatorDef], *more: OperatorDef, outputs: str | list[str] = "y") -> Model:
    parameters = {
        "weight": normal(WIDTH),
        "bias": normal(WIDTH),
        **{name: np.array(one) for name, one in NUMBERS.items()},
    }
    read = {name for one in (*operators, *more) for name in one.input}
    inputs = {name: (None, 5, WIDTH) for name in ("x", "z") if name in read}
    return model_of([*operators, *more], outputs, inputs, **{k: v for k, v in parameters.items() if k in read})


@pytest.mark.parametrize("square", SQUARES, ids=lambda one: f"{one.type}{len(one.input)}")
@pytest.mark.parametrize("end", ENDS)
def test_a_root_mean_square_normalization_is_one_operator_however_it_is_spelled(end: str, square: OperatorDef) -> None:
    given = model(spelled(end, square), SCALED)
    assert rewritten(PASS, given) == ["FusedRows x weight -> y"]
    feeds = feeds_for(given)
    x = feeds["x"].astype(np.float64)
    expected = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + EPSILON) * given.parameters["weight"]
    np.testing.assert_allclose(outputs_of(PASS.apply(given).model, feeds)["y"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2"])
def test_other_reductions_join_members_too(kind: str) -> None:
    assert rewritten(PASS, model(spelled("quotient", kind=kind), SCALED)) == ["FusedRows x weight -> y"]


def test_what_is_around_a_normalization_goes_into_it() -> None:
    layer = op("LayerNorm", ["a", "weight", "bias"], ["l"], axis=2)
    given = model([op("Add", ["x", "z"], ["a"]), layer], op("Tanh", ["l"], ["t"]), op("Mul", ["t", "l"], ["y"]))
    assert rewritten(PASS, given) == ["FusedRows x z weight bias -> y"]


def test_a_mean_over_rows_of_one_axis_is_joined_as_a_pooling() -> None:
    pooled = op("AveragePool", ["x"], ["m"], global_pooling=1)
    assert rewritten(PASS, model([pooled, op("Sub", ["x", "m"], ["y"])])) == ["FusedRows x -> y"]


@pytest.mark.parametrize(
    "operators",
    [
        [op("Softmax", ["x"], ["y"], axis=2)],
        [op("LayerNorm", ["x"], ["y"], axis=2)],
        [op("Softmax", ["x"], ["s"], axis=1), op("Tanh", ["s"], ["y"])],
        [op("LayerNorm", ["x"], ["s"], axis=1), op("Tanh", ["s"], ["y"])],
        [op("ReduceMean", ["x"], ["m"], axes=[1], keepdims=1), op("Sub", ["x", "m"], ["y"])],
        [op("ReduceMean", ["x"], ["m"], axes=[1, 2], keepdims=1), op("Sub", ["x", "m"], ["y"])],
        [op("ReduceMax", ["x"], ["m"], axes=[2], keepdims=1), op("Tanh", ["m"], ["y"])],
    ],
    ids=["softmax", "a normalization", "softmax of two axes", "of two axes", "another axis", "two axes", "no element"],
)
def test_it_leaves_alone(operators: list[OperatorDef]) -> None:
    assert unchanged(PASS, model(operators))


def test_what_others_read_stays_outside_and_so_does_what_follows_from_it() -> None:
    given = model(spelled("quotient"), SCALED, outputs=["y", "m"])
    assert rewritten(PASS, given) == [
        "Sqr x -> s", "ReduceMean s -> m", "FusedExpression m -> q", "FusedExpression x q weight -> y",
    ]  # fmt: skip


def test_rows_that_are_cut_within_stay() -> None:
    operators = [op("ReduceMax", ["x"], ["m"], axes=[1], keepdims=1), op("Sub", ["x", "m"], ["y"])]
    assert unchanged(PASS, model_of(operators, inputs={"x": (1, 1 << 16)}))


Nodes = Callable[[], list[onnx.NodeProto]]


def residual_norm(activation: str) -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("Add", ["x", "z"], ["a"]), node("ReduceMean", ["a"], ["m"], axes=[-1]), node("Sub", ["a", "m"], ["d"]),
        node("Pow", ["d", "two"], ["s"]), node("ReduceMean", ["s"], ["v"], axes=[-1]),
        node("Add", ["v", "epsilon"], ["e"]), node("Sqrt", ["e"], ["q"]), node("Div", ["d", "q"], ["n"]),
        node("Mul", ["n", "weight"], ["u"]), node("Add", ["u", "bias"], ["w"]), node(activation, ["w"], ["y"]),
    ]  # fmt: skip


def scaled_softmax(kind: str) -> list[onnx.NodeProto]:
    node = helper.make_node
    return [
        node("Mul", ["x", "half"], ["a"]), node("Add", ["a", "mask"], ["s"]), node(kind, ["s"], ["y"], axis=-1),
    ]  # fmt: skip


def layer_norm(activation: str) -> list[onnx.NodeProto]:
    node = helper.make_node
    layer = node("LayerNormalization", ["a", "weight", "bias"], ["w"], axis=-1)
    return [node("Add", ["x", "z"], ["a"]), layer, node(activation, ["w"], ["y"])]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("shape", [(3, 4, 31), (2, 3, 5, 64), (300, 320)])
@pytest.mark.parametrize(
    "nodes",
    [
        residual_norm("Relu"), residual_norm("Sigmoid"), layer_norm("Tanh"), scaled_softmax("Softmax"),
        scaled_softmax("LogSoftmax"),
    ],
)  # fmt: skip
def test_models_give_what_onnxruntime_gives(nodes: list[onnx.NodeProto], shape: tuple[int, ...], workers: int) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    random = np.random.default_rng(4)
    sizes = {
        "x": shape,
        "z": shape,
        "weight": shape[-1:],
        "bias": shape[-1:],
        "mask": (*shape[:1], *[1] * (len(shape) - 2), shape[-1]),
    }
    arrays = {name: random.normal(0, 1, size).astype(np.float32) for name, size in sizes.items()}
    read = {name for node in nodes for name in node.input}
    fed = [name for name in ("x", "z", "mask") if name in read]
    constants = {**{name: arrays[name] for name in ("weight", "bias")}, **NUMBERS}
    graph = helper.make_graph(
        nodes, "graph",
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes[name]) for name in fed],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.asarray(one), name) for name, one in constants.items() if name in read],
    )  # fmt: skip
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    feeds = {name: arrays[name] for name in fed}
    session = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    [wanted] = session.run(None, feeds)
    with dagexec.compile(made, num_workers=workers) as executor:
        assert [node.type for node in executor.model.program.op] == ["FusedRows"]
        np.testing.assert_allclose(executor.run(feeds)["y"], wanted, rtol=2e-5, atol=2e-6)
