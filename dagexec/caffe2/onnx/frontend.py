"""Caffe2's nets as ONNX models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx

from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.core.dtypes import from_numpy
from dagexec.core.model import InputInfo
from dagexec.core.proto import NetDef
from dagexec.export.onnx_model import to_onnx
from dagexec.frontend.caffe2 import from_nets

__all__ = ["caffe2_net_to_onnx_graph", "caffe2_net_to_onnx_model"]

ValueInfo = Mapping[str, tuple[int, Sequence[int]]]
"""The element type, a number of ONNX's, and the shape of each input."""


def caffe2_net_to_onnx_model(
    predict_net: NetDef, init_net: NetDef | None = None, value_info: ValueInfo | None = None
) -> onnx.ModelProto:
    """A net, with the parameters that `init_net` fills, as an ONNX model.

    Raises Caffe2Error for operators that ONNX has no counterpart for, all of which it names.
    """
    with failing_as_caffe2(f"net {predict_net.name!r} as an ONNX model"):
        model = from_nets(init_net, predict_net)
        inputs = dict(model.inputs)
        for name, (number, shape) in (value_info or {}).items():
            if name in inputs:
                dtype = from_numpy(onnx.helper.tensor_dtype_to_np_dtype(number))
                inputs[name] = InputInfo(dtype, tuple(shape))
        return to_onnx(replace(model, inputs=inputs))


def caffe2_net_to_onnx_graph(
    predict_net: NetDef, init_net: NetDef | None = None, value_info: ValueInfo | None = None
) -> onnx.GraphProto:
    """The graph of that model."""
    return caffe2_net_to_onnx_model(predict_net, init_net, value_info).graph
