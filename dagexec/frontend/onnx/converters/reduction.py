"""Converters of operators that reduce axes to one value."""

from __future__ import annotations

from dagexec.core.node import Node
from dagexec.frontend.onnx.node import OnnxNode, converts


def _reduce(node: OnnxNode, op_type: str, source: str, target: str) -> Node:
    """The axes: an attribute before opset 13 (ReduceSum) or 18 (the others), an input from then on; none for all."""
    axes, computed = node.integers_or_input("axes", 1, since=13 if node.op_type == "ReduceSum" else 18)
    idle = node.integer("noop_with_empty_axes", 0) or None
    return node.operator(
        op_type, [source, *computed], [target], axes=axes or None, keepdims=node.integer("keepdims", 1),
        noop_with_empty_axes=idle, infinite=1 if op_type in ("ReduceMax", "ReduceMin") else None,
    )  # fmt: skip


@converts(
    ReduceL1=18, ReduceL2=18, ReduceLogSum=28, ReduceLogSumExp=28, ReduceMax=20, ReduceMean=18, ReduceMin=20,
    ReduceProd=18, ReduceSum=13, ReduceSumSquare=18,
)  # fmt: skip
def reduce(node: OnnxNode) -> list[Node]:
    """Reductions; the sums of squares and the logarithm of a sum are two operators."""
    [output] = node.only_output()
    if node.op_type == "ReduceSumSquare":
        square = node.new_name("square")
        return [node.operator("Sqr", [node.inputs[0]], [square]), _reduce(node, "ReduceSum", square, output)]
    if node.op_type == "ReduceLogSum":
        total = node.new_name("sum")
        return [_reduce(node, "ReduceSum", node.inputs[0], total), node.operator("Log", [total], [output])]
    return [_reduce(node, node.op_type, node.inputs[0], output)]
