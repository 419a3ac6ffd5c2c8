"""Converters of operators that reduce axes to one value."""

from __future__ import annotations

from dagexec.core.proto import OperatorDef
from dagexec.frontend.onnx.node import Node, converts


def _axes(node: Node) -> list[int] | None:
    """The axes: an attribute before opset 13 (ReduceSum) or 18 (the others), an input from then on; None for all."""
    since = 13 if node.op_type == "ReduceSum" else 18
    return node.integers_given("axes", 1, since) or None


def _reduce(node: Node, op_type: str, source: str, target: str) -> OperatorDef:
    return node.operator(op_type, [source], [target], axes=_axes(node), keepdims=node.integer("keepdims", 1))


@converts(
    ReduceL1=18, ReduceL2=18, ReduceLogSum=28, ReduceLogSumExp=28, ReduceMax=20, ReduceMean=18, ReduceMin=20,
    ReduceProd=18, ReduceSum=13, ReduceSumSquare=18,
)  # fmt: skip
def reduce(node: Node) -> list[OperatorDef]:
    """Reductions; the sums of squares and the logarithm of a sum are two operators."""
    [output] = node.only_output()
    idle = node.integer("noop_with_empty_axes", 0) == 1 and _axes(node) is None
    if node.op_type == "ReduceSumSquare":
        square = output if idle else node.new_name("square")
        squared = node.operator("Sqr", [node.inputs[0]], [square])
        return [squared] if idle else [squared, _reduce(node, "ReduceSum", square, output)]
    if node.op_type == "ReduceLogSum":
        total = node.inputs[0] if idle else node.new_name("sum")
        logarithm = node.operator("Log", [total], [output])
        return [logarithm] if idle else [_reduce(node, "ReduceSum", node.inputs[0], total), logarithm]
    if idle:
        return node.unary("Copy" if node.op_type not in ("ReduceL1", "ReduceL2") else "Abs")
    return [_reduce(node, node.op_type, node.inputs[0], output)]
