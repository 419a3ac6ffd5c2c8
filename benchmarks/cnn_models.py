"""The networks that `cnn.py` measures, as ONNX models for any batch size, with He-normal weights.

The nine light models of the ONNX package are those of the tests (`tests/models.py`); mobilenet_v2, inception_v3 and
nasnet_a are the zoo's, exported. The tiny ones are those of `tiny.py`, for one row.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper
from onnx_export import to_onnx

from dagexec import zoo

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.models import LIGHT_MODELS, he_normal_light_model

ZOO_MODELS = ("mobilenet_v2", "inception_v3", "nasnet_a")
NAMES = (*LIGHT_MODELS, *ZOO_MODELS)
TINY_NAMES = ("lenet", "perceptron", "elementwise")


@dataclass(frozen=True)
class Workload:
    """A model and what one run is fed.

    Attributes:
        name: of the network.
        batch: images in a run.
        model: the network for that batch size.
        feeds: a normal random array for every input, the same in every call.
    """

    name: str
    batch: int
    model: onnx.ModelProto
    feeds: dict[str, npt.NDArray[Any]]


def workload(name: str, batch: int) -> Workload:
    """The network `name` for `batch` images. Raises KeyError for a name that is not known."""
    if name in TINY_NAMES:
        from tiny import MODELS  # which needs onnxruntime

        model = MODELS[name]()
    elif name in LIGHT_MODELS:
        model = with_batch_size(he_normal_light_model(name), batch)
    elif name in zoo.names():
        model = to_onnx(zoo.build(name, batch))
    else:
        raise KeyError(f"no network {name!r}; known: {', '.join((*NAMES, *TINY_NAMES))}")
    return Workload(name, batch, model, random_feeds(model))


def random_feeds(model: onnx.ModelProto) -> dict[str, npt.NDArray[Any]]:
    """Normal random values for every input that is no initializer."""
    random = np.random.default_rng(0)
    given = {tensor.name for tensor in model.graph.initializer}
    return {
        value.name: random.standard_normal([axis.dim_value for axis in value.type.tensor_type.shape.dim], np.float32)
        for value in model.graph.input
        if value.name not in given
    }


def with_batch_size(model: onnx.ModelProto, batch: int) -> onnx.ModelProto:
    """`model`, made for one image, for `batch` images: inputs, outputs, and the shapes that Reshapes of data name."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Reshape" and node.input[0] not in constants:
            shape = onnx.numpy_helper.to_array(constants[node.input[1]]).copy()
            if shape[0] == 1:
                shape[0] = batch
                constants[node.input[1]].CopyFrom(onnx.numpy_helper.from_array(shape, node.input[1]))
    for value in (*graph.input, *graph.output):
        if value.name not in constants:
            value.type.tensor_type.shape.dim[0].dim_value = batch
    del graph.value_info[:]
    return changed
