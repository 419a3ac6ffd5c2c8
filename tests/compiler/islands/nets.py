"""Nets that islands are made of: a convolution net and a layer of a transformer, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

Array = npt.NDArray[Any]

RUNTIMES = ("onnxruntime", "openvino")

ANY: dict[str, Any] = {"nan": "any", "batch_invariant": False}
"""Options that promise nothing an island would have to be tested for."""


def needs(runtime: str) -> None:
    """Skip the test where the runtime is not installed."""
    pytest.importorskip(runtime)


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(7)

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.weights)}"
        values = (self._random.standard_normal(shape) / np.sqrt(np.prod(shape[1:]) or 1)).astype(np.float32)
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def integers(self, *values: int) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type.lower()}{len(self.nodes)}"
        domain = attributes.pop("domain", "")
        self.nodes.append(helper.make_node(op_type, inputs, [name], name, domain=domain, **attributes))
        return name

    def model(self, shape: list[int | str], output: str) -> onnx.ModelProto:
        given = helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)
        returned = onnx.ValueInfoProto(name=output)
        graph = helper.make_graph(self.nodes, "net", [given], [returned], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)


def convolutions(*, middle: str = "Relu") -> onnx.ModelProto:
    """Two convolutions with an activation `middle` between them, a branch, and a dense layer; any number of images."""
    graph = _Graph()
    first = graph.add("Conv", "x", graph.weight(16, 3, 3, 3), graph.weight(16), pads=[1] * 4)
    left = graph.add("Conv", graph.add(middle, first), graph.weight(32, 16, 3, 3), pads=[1] * 4)
    joined = graph.add("Concat", left, graph.add("AveragePool", first, kernel_shape=[3, 3], pads=[1] * 4), axis=1)
    pooled = graph.add("Flatten", graph.add("GlobalAveragePool", joined))
    return graph.model(["n", 3, 12, 12], graph.add("Gemm", pooled, graph.weight(10, 48), graph.weight(10), transB=1))


def attention() -> onnx.ModelProto:
    """One head of attention with a residual, LayerNormalization and a GELU, for any number of texts of any length."""
    graph = _Graph()
    query, key, value = (graph.add("MatMul", "x", graph.weight(32, 32)) for _ in range(3))
    scores = graph.add("MatMul", query, graph.add("Transpose", key, perm=[0, 2, 1]))
    mixed = graph.add("MatMul", graph.add("Softmax", scores, axis=-1), value)
    normal = graph.add("LayerNormalization", graph.add("Add", mixed, "x"), graph.weight(32), graph.weight(32))
    wide = graph.add("Gelu", graph.add("MatMul", normal, graph.weight(32, 64)))
    return graph.model(["n", "length", 32], graph.add("MatMul", wide, graph.weight(64, 32)))


def reshaping() -> onnx.ModelProto:
    """Rows reshaped as their number asks for, normalized by channels, and back."""
    graph = _Graph()
    rows = graph.add("Slice", graph.add("Shape", "x"), graph.integers(0), graph.integers(1))
    wide = graph.add("Reshape", "x", graph.add("Concat", rows, graph.integers(2, -1), axis=0))
    normal = graph.add("InstanceNormalization", wide, graph.weight(2), graph.weight(2))
    return graph.model(["n", 4, 6], graph.add("Reshape", normal, graph.add("Shape", "x")))


NETS = {"convolutions": (convolutions, (2, 3, 12, 12)), "attention": (attention, (2, 5, 32))}


def fed(*shape: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(3).standard_normal(shape).astype(np.float32)}
