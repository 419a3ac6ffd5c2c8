"""Converters of operators that fill or read tensors by index, where names of attributes do not suffice."""

from __future__ import annotations

import onnx

from dagexec.core.node import Node
from dagexec.frontend.onnx.initializers import element_type
from dagexec.frontend.onnx.node import OnnxNode, converts


@converts(EyeLike=22)
def eye_like(node: OnnxNode) -> list[Node]:
    """Ones on a diagonal; ONNX numbers element types in its own way."""
    number = node.integer("dtype", onnx.TensorProto.UNDEFINED)
    dtype = element_type(number, node.label).number if number else None
    return node.unary("EyeLike", dtype=dtype, k=node.integer("k", 0))
