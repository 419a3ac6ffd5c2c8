"""Converters of operators that draw at random: each run draws anew, from the node's seed where it has one."""

from __future__ import annotations

import onnx

from dagexec.core.node import Node
from dagexec.frontend.onnx.converters.normalization import seeded
from dagexec.frontend.onnx.initializers import element_type
from dagexec.frontend.onnx.node import OnnxNode, converts


def _bounds(node: OnnxNode) -> tuple[str, dict[str, float]]:
    """The filler of the node's distribution, and its arguments."""
    if "Normal" in node.op_type:
        return "GaussianFill", {"mean": node.number("mean", 0.0), "std": node.number("scale", 1.0)}
    return "UniformFill", {"min": node.number("low", 0.0), "max": node.number("high", 1.0)}


def _to_type(node: OnnxNode, source: str, like: str | None, target: str) -> Node:
    """`source` in the type that the node names, else in that of tensor `like`, else float32."""
    number = node.integer("dtype", onnx.TensorProto.UNDEFINED)
    if number == onnx.TensorProto.UNDEFINED and like is not None:
        return node.operator("CastLike", [source, like], [target])
    kind = element_type(number or onnx.TensorProto.FLOAT, node.label)
    return node.operator("Cast", [source], [target], to=kind.number)


@converts(RandomNormal=22, RandomUniform=22)
def random_fill(node: OnnxNode) -> list[Node]:
    """Numbers in a tensor of a shape that an attribute says."""
    filler, arguments = _bounds(node)
    drawn = node.new_name("drawn")
    fill = node.operator(filler, [], [drawn], shape=node.integers("shape") or [], **arguments)
    return [seeded(node, fill), _to_type(node, drawn, None, node.outputs[0])]


@converts(RandomNormalLike=22, RandomUniformLike=22)
def random_like(node: OnnxNode) -> list[Node]:
    """Numbers in a tensor like another."""
    filler, arguments = _bounds(node)
    drawn = node.new_name("drawn")
    fill = node.operator(filler, [node.inputs[0]], [drawn], **arguments)
    return [seeded(node, fill), _to_type(node, drawn, node.inputs[0], node.outputs[0])]


@converts(Bernoulli=22)
def bernoulli(node: OnnxNode) -> list[Node]:
    """1 with the probability that an element is."""
    drawn, place, is_one = (node.new_name(name) for name in ("drawn", "place", "is_one"))
    return [
        seeded(node, node.operator("UniformFill", [node.inputs[0]], [drawn])),
        node.operator("CastLike", [drawn, node.inputs[0]], [place]),
        node.operator("LT", [place, node.inputs[0]], [is_one]),
        _to_type(node, is_one, node.inputs[0], node.outputs[0]),
    ]


@converts(Multinomial=22)
def multinomial(node: OnnxNode) -> list[Node]:
    """Numbers of classes."""
    kind = element_type(node.integer("dtype", onnx.TensorProto.INT32), node.label)
    [drawn] = node.unary("Multinomial", sample_size=node.integer("sample_size", 1), dtype=kind.number)
    return [seeded(node, drawn)]
