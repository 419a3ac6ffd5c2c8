"""ONNX models (opsets 7 to the newest the onnx package knows, and older ones where nothing changed) into Models.

`model` loads, checks and assembles; `initializers` turns TensorProtos into arrays; `node` is a converter's view of a
NodeProto, and finds the converter of a type. Most conversions follow from an operator's schema (`OpSchema.onnx`); those
that need more than other names are in `converters`, a module a family. Nodes of other domains are converted the same
way, and applications may use `converts`, too (docs/onnx.md).
Specification: https://github.com/onnx/onnx/blob/main/docs/IR.md and Operators.md beside it.
"""

from dagexec.core.node import Node
from dagexec.frontend.onnx.model import from_model_proto, load_onnx
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts

__all__ = ["CannotConvertError", "Node", "OnnxNode", "converts", "from_model_proto", "load_onnx"]
