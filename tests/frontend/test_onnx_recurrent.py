"""Recurrent layers in random forms of ONNX's operators, against onnxruntime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper, numpy_helper

import dagexec
from dagexec.errors import DagexecError
from tests.ops.running import run_operator

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS = {"RNN": 1, "GRU": 2, "LSTM": 3}
NAMED = ["Sigmoid", "Tanh", "Relu", "Affine", "LeakyRelu", "ScaledTanh", "HardSigmoid", "Elu", "Softsign", "Softplus"]
DIRECTIONS = ["forward", "reverse", "bidirectional"]


def drawn_layer(op_type: str, seed: int) -> tuple[dict[str, Any], dict[str, np.ndarray | None]]:
    """Attributes, and inputs in order; None for one that is absent."""
    rng = np.random.default_rng(seed)
    direction = DIRECTIONS[seed % 3]
    count, gates = 1 + (direction == "bidirectional"), GATES[op_type]
    steps, batch, features, hidden = (int(size) for size in rng.integers(1, 5, 4))

    def draw(*shape: int) -> np.ndarray:
        return rng.uniform(-1, 1, shape).astype(np.float32)

    def maybe(array: np.ndarray) -> np.ndarray | None:
        return array if rng.random() < 0.5 else None

    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    inputs: dict[str, np.ndarray | None] = {
        "X": draw(steps, batch, features),
        "W": draw(count, gates * hidden, features),
        "R": draw(count, gates * hidden, hidden),
        "B": maybe(draw(count, 2 * gates * hidden)),
        "sequence_lens": maybe(rng.integers(1, steps + 1, batch).astype(np.int32)),
        "initial_h": maybe(draw(count, batch, hidden)),
    }
    if op_type == "LSTM":
        inputs |= {"initial_c": maybe(draw(count, batch, hidden)), "P": maybe(draw(count, 3 * hidden))}
        attributes["input_forget"] = int(rng.integers(2))
    if op_type == "GRU":
        attributes["linear_before_reset"] = int(rng.integers(2))
    if rng.random() < 0.5:
        attributes["clip"] = 0.4
    if rng.random() < 0.6:
        names = [str(name) for name in rng.choice(NAMED, FUNCTIONS[op_type] * count)]
        attributes |= {
            "activations": names,
            "activation_alpha": [0.3] * len(names),
            "activation_beta": [0.6] * len(names),
        }
    return attributes, inputs


def computed(op_type: str, attributes: dict[str, Any], inputs: dict[str, np.ndarray | None]) -> tuple[Any, Any]:
    """What dagexec and onnxruntime give; the weights are constants of the model."""
    feeds = {name: array for name, array in inputs.items() if array is not None and name not in ("W", "R", "B", "P")}
    outputs = ["Y", "Y_h", "Y_c"][: 3 if op_type == "LSTM" else 2]
    node = helper.make_node(op_type, [n if a is not None else "" for n, a in inputs.items()], outputs, **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    graph = helper.make_graph(
        [node],
        "layer",
        [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in feeds.items()],
        [helper.make_empty_tensor_value_info(name) for name in outputs],
        [numpy_helper.from_array(a, n) for n, a in inputs.items() if n not in feeds and a is not None],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(outputs, feeds)
    with dagexec.compile(model) as executor:
        found = executor.run(feeds)
    return [found[name] for name in outputs], expected


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("op_type", GATES)
def test_recurrent_layers_compute_what_onnxruntime_does(op_type: str, seed: int) -> None:
    found, expected = computed(op_type, *drawn_layer(op_type, seed))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("op_type", GATES)
def test_the_batch_may_come_first(op_type: str) -> None:
    """onnxruntime has no layout=1: the same layer with its axes exchanged."""
    attributes, inputs = drawn_layer(op_type, 2)
    if op_type == "LSTM":
        inputs["initial_c"] = inputs["initial_h"]
    _, (y, *states) = computed(op_type, attributes, inputs)
    turned = {
        n: a.swapaxes(0, 1) if a is not None and n in ("X", "initial_h", "initial_c") else a for n, a in inputs.items()
    }
    feeds = {f"x{index}": array for index, array in enumerate(turned.values()) if array is not None}
    outputs = ["Y", *["Y_h", "Y_c"][: len(states)]]
    names = [f"x{index}" if array is not None else "" for index, array in enumerate(turned.values())]
    node = helper.make_node(op_type, names, outputs, layout=1, **attributes)
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    infos = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in feeds.items()]
    graph = helper.make_graph([node], "layer", infos, [helper.make_empty_tensor_value_info(name) for name in outputs])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8)
    with dagexec.compile(model) as executor:
        found = executor.run(feeds)
    np.testing.assert_allclose(found["Y"], y.transpose(2, 0, 1, 3), rtol=1e-4, atol=1e-5)
    for name, state in zip(outputs[1:], states, strict=True):
        np.testing.assert_allclose(found[name], state.swapaxes(0, 1), rtol=1e-4, atol=1e-5)


SIZES = [(3, 2, 4), (1, 5, 4), (1, 5, 5)]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"activations": ["Cosine"]}, "activation 'Cosine' is none of Sigmoid, Tanh"),
    ({"activations": ["Tanh", "Tanh"]}, "1 'activations' are needed"),
    ({"clip": -1.0}, "'clip' must not be negative"),
    ({"bias": 1}, "expected 4 inputs, found 3"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_arguments_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=f"RNN 'y0'.*{message}"):
        run_operator("RNN", [np.zeros(size, np.float32) for size in SIZES], **arguments)


def test_a_sequence_length_out_of_range_is_an_error() -> None:
    arrays = [np.zeros(size, np.float32) for size in SIZES]
    with pytest.raises(DagexecError, match=r"a sequence length must be in \[0, 3\], found 9"):
        run_operator("RNN", [*arrays, np.array([1, 9])], sequence_lengths=1)


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_floats_are_computed(dtype: Any) -> None:
    arrays = [np.random.default_rng(4).uniform(-1, 1, size) for size in SIZES]
    (exact,) = run_operator("RNN", [array.astype(np.float64) for array in arrays])
    (found,) = run_operator("RNN", [array.astype(dtype) for array in arrays])
    assert found.dtype == dtype
    np.testing.assert_allclose(found, exact, atol=4e-3 if dtype == np.float16 else 1e-12)
