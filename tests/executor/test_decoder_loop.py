"""A language model that writes 64 tokens, its caches fed back: at every length it gives the values of onnxruntime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.options import CompileOptions

Array = npt.NDArray[Any]
Feeds = Mapping[str, Array]

LAYERS, HEADS, WIDTH, WORDS, STEPS = 2, 4, 64, 96, 64
ELEMENTS = WIDTH // HEADS
CACHES = [f"{kind}{layer}" for layer in range(LAYERS) for kind in ("key", "value")]


class Writer:
    """The nodes and weights of a model in ONNX."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self._random = np.random.default_rng(5)

    def node(self, kind: str, inputs: list[str], output: str, **arguments: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], **arguments))
        return output

    def constant(self, name: str, array: Array) -> str:
        self.weights[name] = array
        return name

    def random(self, name: str, *shape: int) -> str:
        return self.constant(name, (self._random.standard_normal(shape) * 0.2).astype(np.float32))

    def normalized(self, x: str, name: str) -> str:
        scale, bias = self.random(f"{name}/scale", WIDTH), self.random(f"{name}/bias", WIDTH)
        return self.node("LayerNormalization", [x, scale, bias], name, axis=-1)

    def layer(self, x: str, name: str, inner: int, units: int) -> str:
        product = self.node("MatMul", [x, self.random(f"{name}/w", inner, units)], f"{name}/product")
        return self.node("Add", [product, self.random(f"{name}/b", units)], name)


def language_model() -> onnx.ModelProto:
    """Pre-normalized blocks of attention over a cache and of two layers, and a last layer with the embedding's weights.

    Inputs: `token` [1, 1], `key0`, `value0` and so on [1, heads, length, elements]. Outputs: `scores` [1, 1, words] and
    `new_key0` and so on, one position longer.
    """
    w = Writer()
    table = w.random("table", WORDS, WIDTH)
    split = w.constant("split", np.array([1, 1, HEADS, ELEMENTS]))
    joined = w.constant("joined", np.array([1, 1, WIDTH]))
    scale = w.constant("scale", np.array(ELEMENTS**-0.5, np.float32))
    x = w.node("Gather", [table, "token"], "embedded")
    for layer in range(LAYERS):
        at = f"layer{layer}"
        read = w.normalized(x, f"{at}/read")
        heads = {}
        for kind in ("query", "key", "value"):
            line = w.layer(read, f"{at}/{kind}", WIDTH, WIDTH)
            parted = w.node("Reshape", [line, split], f"{at}/{kind}/parted")
            heads[kind] = w.node("Transpose", [parted], f"{at}/{kind}/heads", perm=[0, 2, 1, 3])
        for kind in ("key", "value"):
            w.node("Concat", [f"{kind}{layer}", heads[kind]], f"new_{kind}{layer}", axis=2)
        turned = w.node("Transpose", [f"new_key{layer}"], f"{at}/turned", perm=[0, 1, 3, 2])
        raw = w.node("MatMul", [heads["query"], turned], f"{at}/raw")
        shares = w.node("Softmax", [w.node("Mul", [raw, scale], f"{at}/scaled")], f"{at}/shares", axis=-1)
        mixed = w.node("MatMul", [shares, f"new_value{layer}"], f"{at}/mixed")
        line = w.node("Reshape", [w.node("Transpose", [mixed], f"{at}/back", perm=[0, 2, 1, 3]), joined], f"{at}/line")
        x = w.node("Add", [x, w.layer(line, f"{at}/out", WIDTH, WIDTH)], f"{at}/attended")
        wide = w.node("Tanh", [w.layer(w.normalized(x, f"{at}/last"), f"{at}/wide", WIDTH, 4 * WIDTH)], f"{at}/bent")
        x = w.node("Add", [x, w.layer(wide, f"{at}/narrow", 4 * WIDTH, WIDTH)], f"{at}/done")
    w.node("MatMul", [w.normalized(x, "end"), w.node("Transpose", [table], "head", perm=[1, 0])], "scores")
    cache = [1, HEADS, "length", ELEMENTS]
    inputs = [helper.make_tensor_value_info("token", TensorProto.INT64, [1, 1])]
    inputs += [helper.make_tensor_value_info(name, TensorProto.FLOAT, cache) for name in CACHES]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [1, 1, WORDS])]
    longer = [1, HEADS, "longer", ELEMENTS]
    outputs += [helper.make_tensor_value_info(f"new_{name}", TensorProto.FLOAT, longer) for name in CACHES]
    weights = [numpy_helper.from_array(array, name) for name, array in w.weights.items()]
    graph = helper.make_graph(w.nodes, "writer", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def written(run: Callable[[Feeds], Feeds]) -> tuple[list[int], list[Feeds], list[Feeds]]:
    """The tokens of the highest scores, and what was fed and given back at each step."""
    start = np.random.default_rng(7)
    feeds: dict[str, Array] = {name: start.standard_normal((1, HEADS, 15, ELEMENTS), np.float32) for name in CACHES}
    feeds["token"] = np.array([[3]])
    tokens, fed, given = [], [], []
    for _ in range(STEPS):
        results = {name: np.array(array) for name, array in run(feeds).items()}
        fed.append(feeds)
        given.append(results)
        tokens.append(int(results["scores"].argmax()))
        feeds = {name: results[f"new_{name}"] for name in CACHES} | {"token": np.array([[tokens[-1]]])}
    return tokens, fed, given


@pytest.mark.slow
def test_every_step_of_a_loop_gives_the_peers_values_and_the_bytes_of_a_fresh_executor() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = language_model()
    peer = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in peer.get_outputs()]
    options = CompileOptions(num_workers=1)
    with dagexec.compile(model, options) as executor:
        tokens, fed, given = written(executor.run)
    for feeds, results in zip(fed, given, strict=True):
        for name, expected in zip(names, peer.run(None, feeds), strict=True):
            np.testing.assert_allclose(results[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    assert tokens == written(lambda feeds: dict(zip(names, peer.run(None, feeds), strict=True)))[0]
    for step in (17, STEPS - 1):
        with dagexec.compile(model, options) as fresh:
            for name, expected in fresh.run(fed[step]).items():
                np.testing.assert_array_equal(given[step][name], expected, err_msg=name)
