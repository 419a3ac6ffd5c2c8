"""A model in ONNX in the making, with random weights: what the examples run in place of files that one downloads."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike
from onnx import TensorProto, helper, numpy_helper


class Graph:
    """Nodes, weights, inputs and outputs; methods that add one return its name."""

    def __init__(self, name: str, seed: int = 0) -> None:
        self._name = name
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._random, self._numbers = np.random.default_rng(seed), itertools.count()

    def input(self, name: str, shape: Sequence[int | str], dtype: int = TensorProto.FLOAT) -> str:
        """An input; axes with a name are free."""
        self._inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def output(self, name: str, shape: Sequence[int | str], kind: str, *inputs: str, **arguments: Any) -> str:
        """An output of float32, and the node that makes it."""
        self._outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        self._nodes.append(helper.make_node(kind, inputs, [name], **arguments))
        return name

    def node(self, kind: str, *inputs: str, **arguments: Any) -> str:
        """A node of one output."""
        return self.nodes(kind, 1, *inputs, **arguments)[0]

    def nodes(self, kind: str, count: int, *inputs: str, **arguments: Any) -> list[str]:
        """A node of several outputs."""
        outputs = [f"v{next(self._numbers)}" for _ in range(count)]
        self._nodes.append(helper.make_node(kind, inputs, outputs, **arguments))
        return outputs

    def constant(self, value: ArrayLike, dtype: type = np.int64) -> str:
        """Numbers."""
        name = f"c{next(self._numbers)}"
        self._weights.append(numpy_helper.from_array(np.array(value, dtype), name))
        return name

    def weight(self, *shape: int, inner: int = 0) -> str:
        """Random numbers: a product with `inner` of them (default: all but axis 0) is as large as its other factor."""
        scale = (inner or np.prod(shape[1:])) ** -0.5 if len(shape) > 1 else 0.1
        return self.constant(self._random.standard_normal(shape) * scale, np.float32)

    def table(self, rows: int, width: int) -> str:
        """Random numbers, rows of which stand for words or positions."""
        return self.constant(self._random.standard_normal((rows, width)), np.float32)

    def linear(self, x: str, inner: int, units: int, *, bias: bool = True) -> str:
        """A fully connected layer."""
        product = self.node("MatMul", x, self.node("Transpose", self.weight(units, inner), perm=[1, 0]))
        return self.node("Add", product, self.weight(units)) if bias else product

    def size(self, x: str, axis: int) -> str:
        """How long an axis is."""
        return self.node("Gather", self.node("Shape", x), self.constant(axis))

    def model(self) -> onnx.ModelProto:
        """It."""
        graph = helper.make_graph(self._nodes, self._name, self._inputs, self._outputs, self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
