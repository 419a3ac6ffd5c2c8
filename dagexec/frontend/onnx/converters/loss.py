"""Converters of losses."""

from __future__ import annotations

from dagexec.core.node import Node
from dagexec.frontend.onnx.node import OnnxNode, converts


@converts(NegativeLogLikelihoodLoss=22, SoftmaxCrossEntropyLoss=13)
def class_loss(node: OnnxNode) -> list[Node]:
    """The loss, and the log probabilities where they are read."""
    softmax = node.op_type == "SoftmaxCrossEntropyLoss"
    ignored = node.integer("ignore_index", 0) if "ignore_index" in node else None
    outputs = [node.outputs[0] or node.new_name("loss"), *([node.outputs[1]] if node.is_read(1) else [])]
    inputs = [name for name in node.inputs if name]
    reduction = node.text("reduction", "mean")
    op_type = "SoftmaxClassLoss" if softmax else "ClassLoss"
    return [node.operator(op_type, inputs, outputs, reduction=reduction, ignore_index=ignored)]
