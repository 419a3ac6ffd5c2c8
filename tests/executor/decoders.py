"""Small decoders in ONNX with their caches as inputs, as exporters write them, and onnxruntime as who runs them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]

LAYERS, HEADS, KEY_HEADS, WIDTH, WORDS = 2, 4, 2, 48, 60
ELEMENTS = WIDTH // HEADS
CACHES = [f"past_{kind}.{layer}" for layer in range(LAYERS) for kind in ("key", "value")]


class Writer:
    """Nodes and weights of a graph.

    Attributes:
        nodes: in order.
        weights: by name, random ones and constants.
    """

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: dict[str, Array] = {}
        self._random = np.random.default_rng(3)
        self._numbers = itertools.count()

    def node(self, kind: str, *inputs: str, into: str = "", more: Sequence[str] = (), **arguments: Any) -> str:
        """Add one; the name of its first output, `into` or a new one."""
        output = into or f"v{next(self._numbers)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [output, *more], **arguments))
        return output

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        """The name of a new constant."""
        name = f"c{next(self._numbers)}"
        self.weights[name] = np.array(value, dtype)
        return name

    def weight(self, *shape: int) -> str:
        """The name of new random numbers."""
        return self.constant(self._random.standard_normal(shape) * shape[0] ** -0.5, np.float32)


def decoder(
    batch: int | str = "batch",
    *,
    masked: bool = False,
    mixed: bool = False,
    context: bool = False,
    placed: bool = False,
    softcap: float = 0.0,
    window: int = 0,
    operator: str = "",
) -> onnx.ModelProto:
    """Tokens `ids` [batch, new], caches [batch, heads, past, elements], with fewer heads than queries have.

    Positions and a causal mask follow from the caches' length; `masked` adds an input `attention_mask` [batch, past +
    new] of int64, `placed` one `position_ids` [batch, new], `context` one [batch, count, elements] whose mean all
    tokens are told, `mixed` an output that is the mean of a cache, so that it cannot stay where it is. Scores are
    capped by `softcap`, a token sees `window` positions, its own the last; 0 for all. `operator` is *3* or *4* where
    attention is ONNX's operator, with the heads side by side, or of four axes.
    """
    w = Writer()
    past = w.node("Gather", w.node("Shape", CACHES[0]), w.constant(2))
    new = w.node("Gather", w.node("Shape", "ids"), w.constant(1))
    total = w.node("Add", past, new)
    positions = w.node("Range", past, total, w.constant(1))
    columns = w.node("Range", w.constant(0), total, w.constant(1))
    hidden = w.node(
        "Greater", w.node("Unsqueeze", columns, w.constant([0])), w.node("Unsqueeze", positions, w.constant([1]))
    )
    if window:
        distance = w.node(
            "Sub", w.node("Unsqueeze", positions, w.constant([1])), w.node("Unsqueeze", columns, w.constant([0]))
        )
        hidden = w.node("Or", hidden, w.node("GreaterOrEqual", distance, w.constant(window)))
    seen = w.node("Not", hidden) if window or masked else ""
    if masked and operator:
        padding = w.node("Unsqueeze", w.node("Greater", "attention_mask", w.constant(0)), w.constant([1, 2]))
        seen = w.node("And", seen, padding)
    elif masked:
        padding = w.node("Equal", w.node("Gather", "attention_mask", columns, axis=1), w.constant(0))
        hidden = w.node("Or", hidden, w.node("Unsqueeze", padding, w.constant([1, 2])))
        sizes = [w.node("Slice", w.node("Shape", "ids"), w.constant([0]), w.constant([1])), w.constant([1])]
        sizes += [w.node("Unsqueeze", one, w.constant([0])) for one in (new, total)]
        hidden = w.node("Expand", hidden, w.node("Concat", *sizes, axis=0))
    mask = w.node("Where", hidden, w.constant(-1e9, np.float32), w.constant(0, np.float32))
    places = "position_ids" if placed else positions
    x = w.node("Add", w.node("Gather", w.weight(WORDS, WIDTH), "ids"), w.node("Gather", w.weight(512, WIDTH), places))
    if context:
        x = w.node("Add", x, w.node("ReduceMean", "context", axes=[1]))
    split = w.constant([0, 0, -1, ELEMENTS])
    for layer in range(LAYERS):
        qkv = [w.node("MatMul", x, w.weight(WIDTH, size)) for size in (WIDTH, *[KEY_HEADS * ELEMENTS] * 2)]
        if operator != "3":
            qkv = [w.node("Transpose", w.node("Reshape", one, split), perm=[0, 2, 1, 3]) for one in qkv]
        caches = [f"past_{kind}.{layer}" for kind in ("key", "value")]
        presents = [name.replace("past", "present") for name in caches]
        if operator:
            heads = {"q_num_heads": HEADS, "kv_num_heads": KEY_HEADS} if operator == "3" else {}
            mixture = w.node("Attention", *qkv, seen, *caches, more=presents, is_causal=1, softcap=softcap, **heads)
        else:
            mixture = _attention(w, qkv, caches, presents, mask, softcap)
        if operator != "3":
            mixture = w.node("Transpose", mixture, perm=[0, 2, 1, 3])
        line = w.node("Reshape", mixture, w.constant([0, 0, WIDTH]))
        x = w.node("Add", x, w.node("MatMul", line, w.weight(WIDTH, WIDTH)))
        x = w.node(
            "Add", x, w.node("MatMul", w.node("Tanh", w.node("MatMul", x, w.weight(WIDTH, 64))), w.weight(64, WIDTH))
        )
    w.node("MatMul", x, w.weight(WIDTH, WORDS), into="scores")
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, "new", WORDS])]
    if mixed:
        w.node("ReduceMean", "present_key.0", into="mean", axes=[2], keepdims=0)
        outputs.append(helper.make_tensor_value_info("mean", TensorProto.FLOAT, [batch, KEY_HEADS, ELEMENTS]))
    inputs = [helper.make_tensor_value_info("ids", TensorProto.INT64, [batch, "new"])]
    if placed:
        inputs.append(helper.make_tensor_value_info("position_ids", TensorProto.INT64, [batch, "new"]))
    if masked:
        inputs.append(helper.make_tensor_value_info("attention_mask", TensorProto.INT64, [batch, "total"]))
    if context:
        inputs.append(helper.make_tensor_value_info("context", TensorProto.FLOAT, [batch, "count", WIDTH]))
    for name in CACHES:
        sizes = [batch, KEY_HEADS, "past", ELEMENTS]
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))
        outputs.append(helper.make_tensor_value_info(name.replace("past", "present"), TensorProto.FLOAT, sizes))
    weights = [numpy_helper.from_array(array, name) for name, array in w.weights.items()]
    opset = 23 if operator else 17
    graph = helper.make_graph(w.nodes, "decoder", inputs, outputs, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def _attention(
    w: Writer, qkv: Sequence[str], caches: Sequence[str], presents: Sequence[str], mask: str, softcap: float
) -> str:
    """What exporters make of it: products, a mask that is added, Softmax."""
    q, *new = qkv
    keys, values = (
        _repeated(w, w.node("Concat", past, one, into=present, axis=2))
        for past, one, present in zip(caches, new, presents, strict=True)
    )
    scores = w.node("MatMul", q, w.node("Transpose", keys, perm=[0, 1, 3, 2]))
    scores = w.node("Mul", scores, w.constant(ELEMENTS**-0.5, np.float32))
    if softcap:
        cap = w.constant(softcap, np.float32)
        scores = w.node("Mul", w.node("Tanh", w.node("Div", scores, cap)), cap)
    return w.node("MatMul", w.node("Softmax", w.node("Add", scores, mask), axis=-1), values)


def _repeated(w: Writer, cache: str) -> str:
    """Each head of a cache for as many heads of queries."""
    sizes = w.node("Shape", cache)
    more = w.node("Unsqueeze", cache, w.constant([2]))
    ones = w.constant([1, 1, HEADS // KEY_HEADS, 1, 1])
    wide = w.node("Expand", more, ones)
    parts = [w.node("Slice", sizes, w.constant([start]), w.constant([stop])) for start, stop in ((0, 1), (2, 4))]
    return w.node("Reshape", wide, w.node("Concat", parts[0], w.constant([HEADS]), parts[1], axis=0))


class Peer:
    """onnxruntime's session of a decoder, caches fed back."""

    def __init__(self, model: onnx.ModelProto, batch: int = 1) -> None:
        import onnxruntime

        self._session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        self._names = [output.name for output in self._session.get_outputs()]
        self.caches = {name: np.zeros((batch, KEY_HEADS, 0, ELEMENTS), np.float32) for name in CACHES}

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The results, and what was put into the caches is there in the next run."""
        results = dict(zip(self._names, self._session.run(None, {**feeds, **self.caches}), strict=True))
        self.caches = {name: results[name.replace("past", "present")] for name in CACHES}
        return results


def merged(model: onnx.ModelProto) -> onnx.ModelProto:
    """A decoder of one row as Optimum merges it with that of a first run, which reads no caches.

    What it is fed in their place means nothing, and `use_cache_branch` says which one is run.
    """
    graph = model.graph
    nothing = numpy_helper.from_array(np.zeros((1, KEY_HEADS, 0, ELEMENTS), np.float32), "nothing")
    first = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    for node in first:
        node.input[:] = ["nothing" if name in CACHES else name for name in node.input]
    branches = {
        f"{name}_branch": helper.make_graph(nodes, name, [], graph.output)
        for name, nodes in (("then", graph.node), ("else", first))
    }
    choice = helper.make_node("If", ["use_cache_branch"], [output.name for output in graph.output], **branches)
    condition = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    made = helper.make_graph(
        [choice], graph.name, [*graph.input, condition], graph.output, [*graph.initializer, nothing]
    )
    return helper.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version)
