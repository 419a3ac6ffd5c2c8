"""Models that tests and benchmarks share: the ONNX package's light models with weights that prove something.

The files hold the graphs of nine well-known networks with every weight a constant. Here each weight gets a value that
suits its place: He-normal filters (He et al. 2015), small biases, and batch normalization away from the identity.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.numpy_helper

Array = npt.NDArray[Any]

LIGHT_MODELS = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)

_CLASSIFIER_GAIN = {
    "bvlc_alexnet": 0.4,
    "densenet121": 1e-3,
    "inception_v1": 10.0,
    "inception_v2": 0.05,
    "resnet50": 1e-4,
    "shufflenet": 1e-5,
    "squeezenet": 0.4,
    "vgg19": 0.4,
}
"""Factor on the last layer's weights that gives logits a spread near 2: a softmax neither flat nor one-hot."""


def light_model_path(name: str) -> Path:
    """The file of a light model in the installed onnx package."""
    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light" / f"light_{name}.onnx"


def light_model_input(name: str, seed: int = 0) -> tuple[str, Array]:
    """The input's name and a normal random image (1 x 3 x 224 x 224)."""
    graph = onnx.load(light_model_path(name)).graph
    given = {tensor.name for tensor in graph.initializer}
    [blob] = [value.name for value in graph.input if value.name not in given]
    image = np.random.default_rng(seed).standard_normal((1, 3, 224, 224), dtype=np.float32)
    return blob, image


def he_normal_light_model(name: str) -> onnx.ModelProto:
    """The light model `name` with every float weight an initializer of random values, the same in every call."""
    model = onnx.load(light_model_path(name))
    graph = model.graph
    roles = _roles(graph)
    shapes = _weight_shapes(graph)
    classifier = _last_weight(graph)
    kept_initializers = [tensor for tensor in graph.initializer if tensor.name not in shapes]
    kept_nodes = [node for node in graph.node if node.op_type != "ConstantOfShape"]
    weights = []
    for weight, shape in shapes.items():
        values = _values(f"{name}/{weight}", shape, roles[weight])
        if weight == classifier:
            values *= np.float32(_CLASSIFIER_GAIN.get(name, 1.0))
        weights.append(onnx.numpy_helper.from_array(values, weight))
    unused = {node.input[0] for node in graph.node if node.op_type == "ConstantOfShape"}
    initializers = {tensor.name for tensor in graph.initializer}
    kept_inputs = [value for value in graph.input if value.name not in initializers]
    del graph.node[:], graph.initializer[:], graph.input[:]
    graph.node.extend(kept_nodes)
    graph.initializer.extend([tensor for tensor in kept_initializers if tensor.name not in unused] + weights)
    graph.input.extend(kept_inputs)
    model.ir_version = 4  # from which initializers need not be inputs
    return model


def with_free_batch(model: onnx.ModelProto) -> onnx.ModelProto:
    """`model`, made for one image, for any number: inputs, outputs, and the shapes that Reshapes of data name."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Reshape" and node.input[0] not in constants:
            shape = onnx.numpy_helper.to_array(constants[node.input[1]]).copy()
            if shape[0] == 1:
                shape[0] = 0  # as many as there are
                constants[node.input[1]].CopyFrom(onnx.numpy_helper.from_array(shape, node.input[1]))
    for value in (*graph.input, *graph.output):
        if value.name not in constants:
            value.type.tensor_type.shape.dim[0].dim_param = "N"
    del graph.value_info[:]
    return changed


def _weight_shapes(graph: onnx.GraphProto) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights: outputs of ConstantOfShape, and float initializers that a node reads as a weight."""
    initializers = {tensor.name: tensor for tensor in graph.initializer}
    shapes = {
        node.output[0]: tuple(int(size) for size in onnx.numpy_helper.to_array(initializers[node.input[0]]))
        for node in graph.node
        if node.op_type == "ConstantOfShape"
    }
    roles = _roles(graph)
    for tensor in graph.initializer:
        if tensor.data_type == onnx.TensorProto.FLOAT and tensor.name in roles:
            shapes[tensor.name] = tuple(tensor.dims)
    return shapes


def _roles(graph: onnx.GraphProto) -> dict[str, str]:
    """What each constant is for: the kind of its reader and its place there, looked up through reshapes."""
    source = {node.output[0]: node.input[0] for node in graph.node if node.op_type in ("Unsqueeze", "Reshape")}
    roles = {}
    for node in graph.node:
        for place, blob in enumerate(node.input):
            role = _ROLES.get((node.op_type, place))
            if role:
                while blob in source:
                    blob = source[blob]
                roles[blob] = role
    return roles


_ROLES = {
    ("Conv", 1): "weight",
    ("Conv", 2): "bias",
    ("Gemm", 1): "weight",
    ("Gemm", 2): "bias",
    ("BatchNormalization", 1): "scale",
    ("BatchNormalization", 2): "shift",
    ("BatchNormalization", 3): "shift",
    ("BatchNormalization", 4): "scale",
    ("Mul", 1): "scale",
    ("Add", 1): "shift",
}


def _last_weight(graph: onnx.GraphProto) -> str:
    last = [node for node in graph.node if node.op_type in ("Conv", "Gemm")][-1]
    blob = last.input[1]
    for node in reversed(graph.node):
        if node.op_type == "Reshape" and node.output[0] == blob:
            blob = node.input[0]
    return blob


def _values(seed: str, shape: tuple[int, ...], role: str) -> Array:
    random = np.random.default_rng(zlib.crc32(seed.encode()))
    if role == "scale":
        return random.uniform(0.5, 1.5, shape).astype(np.float32)
    values = random.standard_normal(shape, dtype=np.float32)
    if role == "weight":
        values *= np.float32(math.sqrt(2 / math.prod(shape[1:])))
    else:
        values *= np.float32(0.1 if role == "shift" else 0.01)
    return values
