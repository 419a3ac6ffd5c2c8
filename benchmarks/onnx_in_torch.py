"""An ONNX graph as a torch module, for the operators of the benchmarked networks: one torch function for each node.

What depends on constants alone is computed once. The rest is what a user writes by hand in `forward`, in list order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import onnx
import onnx.numpy_helper
import torch
import torch.nn.functional as functional

Tensor: TypeAlias = Any
Function = Callable[..., Tensor]


class OnnxModule(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """Calls with the graph's inputs in order return its first output; weights are buffers."""

    def __init__(self, model: onnx.ModelProto) -> None:
        """Raises NotImplementedError for a node type that is not known here."""
        super().__init__()
        graph = model.graph
        constants = {tensor.name: _tensor(tensor) for tensor in graph.initializer}
        self.input_names = [value.name for value in graph.input if value.name not in constants]
        self.output_name = graph.output[0].name
        self.steps: list[tuple[Function, tuple[tuple[bool, str], ...], str]] = []
        held: dict[str, str] = {}
        for node in graph.node:
            function = _function(node, model.opset_import[0].version, constants)
            operands = [name for name in node.input if name and name not in _values_read(node)]
            if all(name in constants for name in operands):
                constants[node.output[0]] = function(*(constants[name] for name in operands))
                continue
            for name in operands:
                if name in constants and name not in held:
                    held[name] = f"constant{len(held)}"
                    self.register_buffer(held[name], constants[name])
            places = tuple((name in held, held.get(name, name)) for name in operands)
            self.steps.append((function, places, node.output[0]))

    def forward(self, *images: Tensor) -> Tensor:
        """The first output."""
        values = dict(zip(self.input_names, images, strict=True))
        for function, operands, output in self.steps:
            values[output] = function(*[getattr(self, name) if held else values[name] for held, name in operands])
        return values[self.output_name]


def _tensor(tensor: onnx.TensorProto) -> Tensor:
    return torch.from_numpy(onnx.numpy_helper.to_array(tensor).copy())


def _values_read(node: onnx.NodeProto) -> Sequence[str]:
    """Inputs that the function holds as numbers: shapes and bounds."""
    return node.input[1:] if node.op_type in ("Reshape", "Slice", "Clip") else ()


def _function(node: onnx.NodeProto, opset: int, constants: dict[str, Tensor]) -> Function:
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
    make = _FUNCTIONS.get(node.op_type)
    if make is None:
        raise NotImplementedError(f"no torch function for ONNX's {node.op_type}")
    values = [constants[name].tolist() for name in _values_read(node)]
    return make(attributes | {"opset": opset}, values)


def _window(a: dict[str, Any]) -> tuple[list[int], list[int], list[int]]:
    """Strides, pads before, pads after."""
    rank = len(a["kernel_shape"])
    pads = list(a.get("pads", [0] * (2 * rank)))
    return list(a.get("strides", [1] * rank)), pads[:rank], pads[rank:]


def _conv(a: dict[str, Any], _values: list[Any]) -> Function:
    strides, before, after = _window(a)
    group = a.get("group", 1)
    if before == after:
        return lambda x, w, b=None: functional.conv2d(x, w, b, strides, before, groups=group)
    sides = [before[1], after[1], before[0], after[0]]
    return lambda x, w, b=None: functional.conv2d(functional.pad(x, sides), w, b, strides, groups=group)


def _max_pool(a: dict[str, Any], _values: list[Any]) -> Function:
    strides, before, after = _window(a)
    kernel, ceil = list(a["kernel_shape"]), bool(a.get("ceil_mode", 0))
    if before == after:
        return lambda x: functional.max_pool2d(x, kernel, strides, before, ceil_mode=ceil)
    sides = [before[1], after[1], before[0], after[0]]
    low = float("-inf")
    return lambda x: functional.max_pool2d(functional.pad(x, sides, value=low), kernel, strides, ceil_mode=ceil)


def _average_pool(a: dict[str, Any], _values: list[Any]) -> Function:
    strides, before, after = _window(a)
    kernel, ceil, counted = list(a["kernel_shape"]), bool(a.get("ceil_mode", 0)), bool(a.get("count_include_pad", 0))
    if before == after:
        return lambda x: functional.avg_pool2d(x, kernel, strides, before, ceil, counted)
    sides = [before[1], after[1], before[0], after[0]]

    def uneven(x: Tensor) -> Tensor:
        """The mean over what is inside the image: that of the padded image over that of a padded image of ones."""
        inside = functional.pad(torch.ones_like(x[:1, :1]), sides)
        total = functional.avg_pool2d(functional.pad(x, sides), kernel, strides, 0, ceil)
        return total / functional.avg_pool2d(inside, kernel, strides, 0, ceil)

    return uneven


def _gemm(a: dict[str, Any], _values: list[Any]) -> Function:
    if a.get("transA", 0) or a.get("alpha", 1.0) != 1.0 or a.get("beta", 1.0) != 1.0:
        raise NotImplementedError("only Gemm as an inner product")
    if a.get("transB", 0):
        return lambda x, w, b=None: functional.linear(x, w, b)
    return lambda x, w, b=None: functional.linear(x, w.T, b)


def _softmax(a: dict[str, Any], _values: list[Any]) -> Function:
    axis = a.get("axis", 1 if a["opset"] < 13 else -1)
    if a["opset"] < 13:
        return lambda x: functional.softmax(x.flatten(axis), axis).reshape(x.shape)
    return lambda x: functional.softmax(x, axis)


def _slice(_a: dict[str, Any], values: list[Any]) -> Function:
    starts, ends, *rest = values
    axes = rest[0] if rest else range(len(starts))
    steps = rest[1] if len(rest) > 1 else [1] * len(starts)
    parts = {axis: slice(*bounds) for axis, *bounds in zip(axes, starts, ends, steps, strict=True)}
    return lambda x: x[tuple(parts.get(axis, slice(None)) for axis in range(x.dim()))]


def _add(*terms: Tensor) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _unsqueeze(x: Tensor, axes: Sequence[int]) -> Tensor:
    for axis in sorted(axes):
        x = x.unsqueeze(axis)
    return x


_FUNCTIONS: dict[str, Callable[[dict[str, Any], list[Any]], Function]] = {
    "Add": lambda _a, _v: _add,
    "AveragePool": _average_pool,
    "BatchNormalization": lambda a, _v: (
        lambda x, s, b, mean, var: functional.batch_norm(x, mean, var, s, b, eps=a.get("epsilon", 1e-5))
    ),
    "Clip": lambda _a, v: lambda x: torch.clamp(x, *v),
    "Concat": lambda a, _v: lambda *parts: torch.cat(parts, a["axis"]),
    "Conv": _conv,
    "Dropout": lambda _a, _v: lambda x: x,
    "Exp": lambda _a, _v: torch.exp,
    "Flatten": lambda a, _v: lambda x: x.flatten(a.get("axis", 1)),
    "Gemm": _gemm,
    "GlobalAveragePool": lambda _a, _v: lambda x: functional.adaptive_avg_pool2d(x, 1),
    "LRN": lambda a, _v: (
        lambda x: functional.local_response_norm(
            x, a["size"], a.get("alpha", 1e-4), a.get("beta", 0.75), a.get("bias", 1.0)
        )
    ),
    "MatMul": lambda _a, _v: torch.matmul,
    "MaxPool": _max_pool,
    "Mul": lambda _a, _v: torch.mul,
    "Relu": lambda _a, _v: functional.relu,
    "Reshape": lambda _a, v: lambda x: x.reshape(v[0]),
    "Sigmoid": lambda _a, _v: torch.sigmoid,
    "Slice": _slice,
    "Softmax": _softmax,
    "Sub": lambda _a, _v: torch.sub,
    "Sum": lambda _a, _v: _add,
    "Tanh": lambda _a, _v: torch.tanh,
    "Transpose": lambda a, _v: lambda x: x.permute(*a["perm"]),
    "Unsqueeze": lambda a, _v: lambda x: _unsqueeze(x, a["axes"]),
}
