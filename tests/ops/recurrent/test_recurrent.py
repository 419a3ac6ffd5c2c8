"""LSTM and GRU by NumPy, LSTM by oneDNN too, against a loop over steps in float64 and against onnxruntime."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from dagexec import NetDef, Workspace, compile
from dagexec.core.arguments import ArgumentValue
from dagexec.core.tensor import Tensor
from dagexec.errors import ArgumentError, OperatorError, ShapeError
from dagexec.frontend.onnx.model import from_model_proto
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.drawing import drawn
from tests.ops.onednn.engine import ENGINES, fallbacks, needs_onednn, run_onednn
from tests.ops.recurrent_layers import DIRECTIONS, Layer, layers
from tests.ops.running import operator_def, run_net, run_operator


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@drawn(100)
@given(layer=layers, outputs=st.integers(1, 3))
def test_each_step_follows_from_the_one_before(engine: str, layer: Layer, outputs: int) -> None:
    count = min(outputs, layer.results)
    found = run_operator(layer.op_type, list(layer.inputs()), count, engine=engine, **layer.arguments())
    for one, other in zip(found, layer.expected(), strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@drawn(30)
@given(layer=layers)
def test_what_is_saved_for_the_gradient_changes_no_result(layer: Layer) -> None:
    inputs, count = list(layer.inputs()), layer.results
    plain = run_operator(layer.op_type, inputs, count, **layer.arguments())
    with_saved = run_operator(layer.op_type, inputs, count + 2, **layer.arguments())
    for one, other in zip(plain, with_saved, strict=False):
        assert one.tobytes() == other.tobytes()
    gates, other = with_saved[count:]
    assert gates.shape == (layer.steps, layer.batch, layer.directions, layer.gates * layer.hidden)
    assert other.shape == plain[0].shape


@pytest.mark.parametrize("op_type", ["LSTM", "GRU"])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_stands_behind_the_end_of_a_sequence_reaches_no_result(op_type: str, direction: str) -> None:
    layer = Layer(op_type, direction=direction, shorter=(0, 1, 4))
    inputs = layer.inputs()
    for n, length in enumerate(layer.lengths):
        inputs[0][length:, n] = np.nan
    found = run_operator(op_type, list(inputs), layer.results, **layer.arguments())
    for one, other in zip(found, layer.expected(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("threads", [1, 2])
def test_onednn_serves(direction: str, threads: int) -> None:
    layer = Layer(steps=7, features=32, hidden=48, direction=direction)
    found = run_onednn("LSTM", list(layer.inputs()), 3, threads=threads, **layer.arguments())
    for one, other in zip(found, layer.expected(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_constant_weights_are_packed_and_give_the_same() -> None:
    layer, workspace = Layer(direction="bidirectional"), Workspace()
    names = ["x", "w", "r", "b", "h", "c"]
    for name, array in zip(names, layer.inputs(), strict=True):
        workspace.feed_blob(name, array)
    for name in "wrb":
        workspace.get_blob(name).get(Tensor).freeze()
    definition = operator_def("LSTM", names, ["y"], **layer.arguments(), engine="ONEDNN")
    with fallbacks() as reasons, SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
        peak = peak_memory(net.run)
    assert not reasons
    assert peak < 20_000
    np.testing.assert_allclose(workspace.fetch_blob("y"), layer.expected()[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layer", [Layer(), Layer("GRU"), Layer("GRU", linear=True, shorter=(1, 0))])
def test_constant_weights_give_the_same(layer: Layer) -> None:
    names, workspace = [f"x{index}" for index in range(len(layer.inputs()))], Workspace()
    for name, array in zip(names, layer.inputs(), strict=True):
        workspace.feed_blob(name, array)
    for name in names[1:4]:
        workspace.get_blob(name).get(Tensor).freeze()
    definition = operator_def(layer.op_type, names, ["y"], **layer.arguments())
    run_net(workspace, definition)
    np.testing.assert_allclose(workspace.fetch_blob("y"), layer.expected()[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("layer", [Layer(), Layer("GRU", shorter=(1, 0)), Layer("GRU", linear=True)])
def test_other_float_types(engine: str, dtype: type, layer: Layer) -> None:
    inputs = [array if array.dtype == np.int32 else array.astype(dtype) for array in layer.inputs()]
    found = run_operator(layer.op_type, list(inputs), layer.results + 2, engine=engine, **layer.arguments())
    for one, other in zip(found, layer.expected(), strict=False):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(np.float64), other, atol=1e-6 if dtype is np.float64 else 3e-2)
    assert {one.dtype for one in found[layer.results :]} == {
        np.dtype(np.float64 if dtype is np.float64 else np.float32)
    }


def onnx_model(layer: Layer, **attributes: object) -> onnx.ModelProto:
    """The layer as a model whose weights are initializers."""
    x, *arrays = layer.inputs()
    states = ["h", "c"][: layer.states] if layer.state else []
    slots = ["w", "r", "b" if layer.bias else "", "lengths" if layer.shorter is not None else "", *states]
    names = [name for name in slots if name]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in zip(names, arrays, strict=True)]
    outputs = ["y", "y_h", "y_c"][: layer.results]
    kind: dict[str, object] = {"hidden_size": layer.hidden, "direction": layer.direction, **attributes}
    if layer.op_type == "GRU":
        kind["linear_before_reset"] = int(layer.linear)
    node = helper.make_node(layer.op_type, ["x", *slots], outputs, **kind)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


@pytest.mark.parametrize("kind", [{"op_type": "LSTM"}, {"op_type": "GRU"}, {"op_type": "GRU", "linear": True}])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("bias", "state", "shorter"),
    [(True, True, None), (False, True, None), (True, False, None), (True, True, (1, 0, 3)), (False, False, (3, 2, 1))],
)
def test_an_onnx_model_gives_what_onnxruntime_gives(
    kind: dict[str, Any], direction: str, bias: bool, state: bool, shorter: tuple[int, ...] | None
) -> None:
    layer = Layer(**kind, direction=direction, bias=bias, state=state, shorter=shorter)
    proto = onnx_model(layer)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": layer.inputs()[0]})
    with compile(from_model_proto(proto)) as executor:
        found = executor.run({"x": layer.inputs()[0]})
    for name, other in zip(("y", "y_h", "y_c"), expected, strict=False):
        np.testing.assert_allclose(found[name], other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"direction": "backward"}, ArgumentError, "must be one of"),
        ({"hidden_size": 7}, ShapeError, "'hidden_size' is 7, R has a state of 6"),
        ({"bias": 0}, ShapeError, "expected 5 inputs, found 6"),
        ({"sequence_lengths": 1}, ShapeError, "expected 7 inputs, found 6"),
        ({"direction": "bidirectional"}, ShapeError, r"must have shape \(2, 24, 5\)"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(
    change: dict[str, ArgumentValue], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_operator("LSTM", list(Layer().inputs()), **(Layer().arguments() | change))


def test_a_part_of_what_the_gradient_reads_is_an_error() -> None:
    with pytest.raises(ShapeError, match="up to 3 outputs, or 5 with gates and cells for the gradient, found 4"):
        run_operator("LSTM", list(Layer().inputs()), 4, **Layer().arguments())


@pytest.mark.parametrize(("length", "op_type"), [(5, "LSTM"), (-1, "GRU")])
def test_a_length_beyond_the_steps_is_an_error(length: int, op_type: str) -> None:
    layer = Layer(op_type, shorter=(0, 1))
    inputs = layer.inputs()
    inputs[4][1] = length
    with pytest.raises(OperatorError, match=rf"sequence length must be in \[0, 4\], found {length}"):
        run_operator(op_type, list(inputs), **layer.arguments())


def test_lengths_that_are_no_integers_are_an_error() -> None:
    layer = Layer(shorter=(0,))
    inputs = layer.inputs()
    inputs[4] = inputs[4].astype(np.float32)
    with pytest.raises(ShapeError, match="must be one of int32, int64, found float"):
        run_operator("LSTM", list(inputs), **layer.arguments())
