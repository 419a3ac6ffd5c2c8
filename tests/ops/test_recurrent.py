"""LSTM by NumPy and by oneDNN, against a loop over steps in float64 and against onnxruntime."""

from __future__ import annotations

import tracemalloc
from dataclasses import dataclass

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
from dagexec.core.errors import ArgumentError, ShapeError, UnsupportedOperatorError
from dagexec.core.tensor import Tensor
from dagexec.frontend.onnx.model import from_model_proto
from dagexec.scheduler.simple import SimpleNet
from tests.ops.drawing import drawn
from tests.ops.onednn import ENGINES, fallbacks, needs_onednn, run_onednn
from tests.ops.running import Array, operator_def, run_operator


@dataclass(frozen=True)
class Case:
    """An LSTM; its arrays are made from `seed`."""

    steps: int = 4
    batch: int = 3
    features: int = 5
    hidden: int = 6
    direction: str = "forward"
    bias: bool = True
    state: bool = True
    seed: int = 0

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    def inputs(self) -> list[Array]:
        rng, d, h = np.random.default_rng(self.seed), self.directions, self.hidden
        shapes = [(self.steps, self.batch, self.features), (d, 4 * h, self.features), (d, 4 * h, h)]
        shapes += [(d, 8 * h)] * self.bias + [(d, self.batch, h)] * 2 * self.state
        return [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]

    def arguments(self) -> dict[str, ArgumentValue]:
        return {"direction": self.direction, "bias": int(self.bias), "initial_state": int(self.state)}

    def expected(self) -> tuple[Array, Array, Array]:
        """Y, Y_h and Y_c, one step after the other, in float64."""
        x, w, r, *rest = (array.astype(np.float64) for array in self.inputs())
        b = rest.pop(0) if self.bias else np.zeros((self.directions, 8 * self.hidden))
        start = rest or [np.zeros((self.directions, self.batch, self.hidden))] * 2
        y = np.zeros((self.steps, self.directions, self.batch, self.hidden))
        last_h, last_c = (np.array(state) for state in start)
        for d in range(self.directions):
            h, c = start[0][d], start[1][d]
            backwards = self.direction == "reverse" or d == 1
            for t in sorted(range(self.steps), reverse=backwards):
                total = np.einsum("nc,gc->ng", x[t], w[d]) + np.einsum("nh,gh->ng", h, r[d])
                total = total + b[d, : 4 * self.hidden] + b[d, 4 * self.hidden :]
                i, o, f, g = np.split(total, 4, axis=1)
                c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
                h = np.tanh(c) / (1 + np.exp(-o))
                y[t, d] = h
            last_h[d], last_c[d] = h, c
        return y, last_h, last_c


cases = st.builds(
    Case,
    steps=st.integers(0, 5),
    batch=st.integers(1, 4),
    features=st.integers(1, 9),
    hidden=st.integers(1, 20),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    bias=st.booleans(),
    state=st.booleans(),
    seed=st.integers(0, 99),
)


@pytest.mark.parametrize("engine", ENGINES)
@drawn(60)
@given(case=cases, outputs=st.integers(1, 3))
def test_each_step_follows_from_the_one_before(engine: str, case: Case, outputs: int) -> None:
    found = run_operator("LSTM", list(case.inputs()), outputs, engine=engine, **case.arguments())
    for one, other in zip(found, case.expected(), strict=False):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("threads", [1, 2])
def test_onednn_serves(direction: str, threads: int) -> None:
    case = Case(steps=7, features=32, hidden=48, direction=direction)
    found = run_onednn("LSTM", list(case.inputs()), 3, threads=threads, **case.arguments())
    for one, other in zip(found, case.expected(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_constant_weights_are_packed_and_give_the_same() -> None:
    case, workspace = Case(direction="bidirectional"), Workspace()
    names = ["x", "w", "r", "b", "h", "c"]
    for name, array in zip(names, case.inputs(), strict=True):
        workspace.feed_blob(name, array)
    for name in "wrb":
        workspace.get_blob(name).get(Tensor).freeze()
    definition = operator_def("LSTM", names, ["y"], **case.arguments())
    definition.engine = "ONEDNN"
    with fallbacks() as reasons, SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        net.run()
        tracemalloc.start()
        net.run()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert not reasons
    assert peak < 20_000
    np.testing.assert_allclose(workspace.fetch_blob("y"), case.expected()[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", [np.float64, np.float16, ml_dtypes.bfloat16])
def test_other_float_types(engine: str, dtype: type) -> None:
    case = Case()
    found = run_operator("LSTM", [array.astype(dtype) for array in case.inputs()], 3, engine=engine, **case.arguments())
    for one, other in zip(found, case.expected(), strict=True):
        assert one.dtype == dtype
        np.testing.assert_allclose(one.astype(np.float64), other, atol=1e-6 if dtype is np.float64 else 3e-2)


def onnx_model(case: Case, **attributes: object) -> onnx.ModelProto:
    """The LSTM as a model whose weights are initializers."""
    x, *rest = case.inputs()
    names = ["w", "r", *(["b"] if case.bias else []), *(["h", "c"] if case.state else [])]
    node_inputs = ["x", "w", "r", "b" if case.bias else "", "", *(["h", "c"] if case.state else [])]
    initializers = [onnx.numpy_helper.from_array(array, name) for name, array in zip(names, rest, strict=True)]
    outputs = ["y", "y_h", "y_c"]
    kind = {"hidden_size": case.hidden, "direction": case.direction, **attributes}
    node = helper.make_node("LSTM", node_inputs, outputs, **kind)
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        initializers,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("bias", "state"), [(True, True), (False, True), (True, False)])
def test_an_onnx_model_gives_what_onnxruntime_gives(direction: str, bias: bool, state: bool) -> None:
    case = Case(direction=direction, bias=bias, state=state)
    proto = onnx_model(case)
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    expected = session.run(None, {"x": case.inputs()[0]})
    with compile(from_model_proto(proto)) as executor:
        found = executor.run({"x": case.inputs()[0]})
    for name, other in zip(("y", "y_h", "y_c"), expected, strict=True):
        np.testing.assert_allclose(found[name], other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"clip": 1.0}, "clip"),
        ({"activations": ["Relu", "Tanh", "Tanh"]}, "activations other than"),
        ({"layout": 1}, "batch first"),
    ],
)
def test_an_onnx_lstm_of_another_kind_is_refused(attributes: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedOperatorError, match=reason):
        from_model_proto(onnx_model(Case(), **attributes))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"direction": "backward"}, ArgumentError, "must be one of"),
        ({"hidden_size": 7}, ShapeError, "'hidden_size' is 7, R has a state of 6"),
        ({"bias": 0}, ShapeError, "there are 5 inputs"),
        ({"direction": "bidirectional"}, ShapeError, r"must have shape \(2, 24, 5\)"),
    ],
)
def test_arguments_that_do_not_fit_are_errors(
    change: dict[str, ArgumentValue], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        run_operator("LSTM", list(Case().inputs()), **(Case().arguments() | change))
