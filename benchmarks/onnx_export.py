"""ONNX models of the zoo's nets, so that every contender reads the same graph and the same weights.

Only what those nets hold is known: Conv, SpatialBN, Relu, Clip, MaxPool, AveragePool, LRN, Concat, Sum, Slice, Dropout,
Flatten, FC and Softmax. Dropout of a test net is the identity and gets no node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.shape_inference
from onnx import TensorProto, helper, numpy_helper

from dagexec.core.arguments import Arguments
from dagexec.core.model import Model
from dagexec.core.node import arguments_of
from dagexec.core.proto import OperatorDef
from dagexec.core.workspace import Workspace

OPSET = 13


def to_onnx(model: Model) -> onnx.ModelProto:
    """`model` with its parameters as initializers. Raises ValueError for an operator that is not known here."""
    exporter = _Exporter(_parameters(model))
    for definition in model.net.op:
        exporter.add(definition)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, info.shape) for name, info in model.inputs.items()]
    outputs = [helper.make_tensor_value_info(exporter.name(name), TensorProto.FLOAT, None) for name in model.outputs]
    graph = helper.make_graph(exporter.nodes, model.name, inputs, outputs, exporter.initializers)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    proto = onnx.shape_inference.infer_shapes(proto)
    onnx.checker.check_model(proto)
    return proto


def _parameters(model: Model) -> dict[str, npt.NDArray[Any]]:
    parameters = dict(model.parameters)
    if model.init_net is not None:
        workspace = Workspace()
        for name, array in parameters.items():
            workspace.feed_blob(name, array)
        workspace.run_net_once(model.init_net)
        parameters |= {name: workspace.fetch_blob(name) for name in model.init_net.external_output}
    return parameters


class _Exporter:
    """Nodes and initializers so far, and the current ONNX name of every blob: nets write in place, ONNX does not."""

    def __init__(self, parameters: dict[str, npt.NDArray[Any]]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._names: dict[str, str] = {}
        self._parameters = parameters

    def name(self, blob: str) -> str:
        """What ONNX calls the present value of `blob`."""
        if blob in self._parameters:
            self.initializers.append(numpy_helper.from_array(self._parameters.pop(blob), blob))
            self._names[blob] = blob
        return self._names.get(blob, blob)

    def add(self, definition: OperatorDef) -> None:
        """The node of one operator."""
        arguments = arguments_of(definition)
        inputs = [self.name(blob) for blob in definition.input]
        if definition.type == "Dropout":
            self._names[definition.output[0]] = inputs[0]
            return
        convert = _CONVERSIONS.get(definition.type)
        if convert is None:
            raise ValueError(f"no conversion of operator {definition.type} to ONNX")
        blob = definition.output[0]
        output = blob if blob not in self._names and blob not in definition.input else f"{blob}/{len(self.nodes)}"
        convert(self, arguments, inputs, output)
        self._names[blob] = output

    def node(self, op_type: str, inputs: Sequence[str], output: str, **attributes: Any) -> None:
        """Append a node."""
        self.nodes.append(helper.make_node(op_type, inputs, [output], **attributes))

    def integers(self, values: Sequence[int], name: str) -> str:
        """An initializer of int64."""
        self.initializers.append(numpy_helper.from_array(np.array(values, np.int64), name))
        return name


Conversion = Callable[[_Exporter, Arguments, list[str], str], None]
_CONVERSIONS: dict[str, Conversion] = {}


def _converts(op_type: str) -> Callable[[Conversion], Conversion]:
    def register(conversion: Conversion) -> Conversion:
        _CONVERSIONS[op_type] = conversion
        return conversion

    return register


def _window(arguments: Arguments) -> dict[str, Any]:
    kernels = arguments.ints("kernels") or [arguments.int("kernel", 1)] * 2
    strides = arguments.ints("strides") or [arguments.int("stride", 1)] * 2
    sides = [arguments.int(f"pad_{side}", arguments.int("pad", 0)) for side in "tlbr"]
    return {"kernel_shape": kernels, "strides": strides, "pads": arguments.ints("pads") or sides}


@_converts("Conv")
def _conv(to: _Exporter, arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("Conv", inputs, output, group=arguments.int("group", 1), **_window(arguments))


@_converts("SpatialBN")
def _batch_norm(to: _Exporter, arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("BatchNormalization", inputs, output, epsilon=arguments.float("epsilon", 1e-5))


@_converts("Relu")
def _relu(to: _Exporter, _arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("Relu", inputs, output)


@_converts("Clip")
def _clip(to: _Exporter, arguments: Arguments, inputs: list[str], output: str) -> None:
    for bound in ("min", "max"):
        name = f"{output}_{bound}"
        to.initializers.append(numpy_helper.from_array(np.array(arguments.float(bound, 0.0), np.float32), name))
        inputs = [*inputs, name]
    to.node("Clip", inputs, output)


@_converts("MaxPool")
def _max_pool(to: _Exporter, arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("MaxPool", inputs, output, ceil_mode=arguments.int("ceil_mode", 0), **_window(arguments))


@_converts("AveragePool")
def _average_pool(to: _Exporter, arguments: Arguments, inputs: list[str], output: str) -> None:
    if arguments.int("global_pooling", 0):
        to.node("GlobalAveragePool", inputs, output)
    else:
        to.node("AveragePool", inputs, output, ceil_mode=arguments.int("ceil_mode", 0), **_window(arguments))


@_converts("LRN")
def _lrn(to: _Exporter, arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node(
        "LRN", inputs, output, size=arguments.int("size", 5), alpha=arguments.float("alpha", 1e-4),
        beta=arguments.float("beta", 0.75), bias=arguments.float("bias", 1.0),
    )  # fmt: skip


@_converts("Concat")
def _concat(to: _Exporter, _arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("Concat", inputs, output, axis=1)


@_converts("Sum")
def _sum(to: _Exporter, _arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("Add" if len(inputs) == 2 else "Sum", inputs, output)


@_converts("Slice")
def _slice(to: _Exporter, arguments: Arguments, inputs: list[str], output: str) -> None:
    starts = arguments.ints("starts")
    ends = [np.iinfo(np.int64).max if end == -1 else end for end in arguments.ints("ends")]
    to.node("Slice", [*inputs, to.integers(starts, f"{output}_starts"), to.integers(ends, f"{output}_ends")], output)


@_converts("Flatten")
def _flatten(to: _Exporter, _arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("Flatten", inputs, output, axis=1)


@_converts("FC")
def _fc(to: _Exporter, _arguments: Arguments, inputs: list[str], output: str) -> None:
    flat = f"{output}_flat"
    to.node("Flatten", inputs[:1], flat, axis=1)
    to.node("Gemm", [flat, *inputs[1:]], output, transB=1)


@_converts("Softmax")
def _softmax(to: _Exporter, _arguments: Arguments, inputs: list[str], output: str) -> None:
    to.node("Softmax", inputs, output, axis=1)
