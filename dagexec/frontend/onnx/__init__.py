"""ONNX models (opsets 7 to the newest the onnx package knows, and older ones where nothing changed) into Models.

`model` loads, checks and assembles; `initializers` turns TensorProtos into arrays; `node` is what a converter sees of
a NodeProto and finds the converter of a type. Most are operators whose schema says so (`OpSchema.onnx`); what takes
more than other names is in a module a family in `converters`. Nodes of other domains are converted the same way, and
`converts` is for applications, too (docs/onnx.md).
Specification: https://github.com/onnx/onnx/blob/main/docs/IR.md and Operators.md beside it.
"""

from dagexec.core.node import Node
from dagexec.frontend.onnx.model import from_model_proto, load_onnx
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts

__all__ = ["CannotConvertError", "Node", "OnnxNode", "converts", "from_model_proto", "load_onnx"]
