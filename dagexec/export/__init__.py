"""Models as files of other frameworks: ONNX.

`onnx_model` makes the graph: names, types, parameters. `onnx_node` is what an exporter sees of an operator; most
operators follow from what their schema says (`OpSchema.onnx`), and `onnx_operators`, `onnx_images` and `onnx_shapes`
have functions for those that take more than other names.
"""

from dagexec.export.onnx_model import operators_without_counterpart, save_onnx, to_onnx

__all__ = ["operators_without_counterpart", "save_onnx", "to_onnx"]
