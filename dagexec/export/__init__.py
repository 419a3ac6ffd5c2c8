"""Models as files of other frameworks: ONNX and Caffe2.

`onnx_model` makes the graph: names, types, parameters. `onnx_node` is what an exporter sees of an operator; most
operators follow from what their schema says (`OpSchema.onnx`), and `onnx_operators`, `onnx_images` and `onnx_shapes`
have functions for those that take more than other names. `caffe2` writes nets as they are.
"""

from dagexec.export.caffe2 import save_nets, save_predictor
from dagexec.export.onnx_model import operators_without_counterpart, save_onnx, to_onnx

__all__ = ["operators_without_counterpart", "save_nets", "save_onnx", "save_predictor", "to_onnx"]
