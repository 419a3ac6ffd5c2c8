"""Converters of onnxruntime's own operators (com.microsoft) that its optimizer and exporters write for float models.

Products and convolutions with what was fused into them, GELUs, and normalizations with a residual: they become what
they were before they were fused, so that the passes and engines of dagexec see them. Those on integers are in
`microsoft_quantized`, attention in `microsoft_attention`. What they compute is described in onnxruntime's
`ContribOperators.md`.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import INT32
from dagexec.core.node import Node
from dagexec.frontend.onnx.composition import Composition
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts_microsoft

_EPSILON = 1e-5


@converts_microsoft("Gelu", inputs="X")
def gelu(node: OnnxNode) -> list[Node]:
    """GELU by the error function."""
    return node.unary("Gelu")


@converts_microsoft("FastGelu", "BiasGelu", inputs="X bias?")
def biased_gelu(node: OnnxNode) -> list[Node]:
    """GELU of X plus a bias: FastGelu by tanh, BiasGelu by the error function."""
    compose = Composition(node)
    x = compose("Add", *node.inputs[:2]) if node.has_input(1) else node.inputs[0]
    return compose.result("Gelu", x, fast_gelu=1 if node.op_type == "FastGelu" else None)


@converts_microsoft("QuickGelu", inputs="X")
def quick_gelu(node: OnnxNode) -> list[Node]:
    """X * sigmoid(alpha X)."""
    compose = Composition(node)
    alpha, x = node.number("alpha", 1.702), node.inputs[0]
    if alpha == 1:
        return compose.result("Swish", x)
    return compose.result("Mul", x, compose("Sigmoid", compose("Scale", x, scale=alpha)))


_ACTIVATIONS = {
    "Relu": ("Relu", ()),
    "Sigmoid": ("Sigmoid", ()),
    "Tanh": ("Tanh", ()),
    "LeakyRelu": ("LeakyRelu", ("alpha",)),
    "Clip": ("Clip", ("min", "max")),
    "HardSigmoid": ("HardSigmoid", ("alpha", "beta")),
    "HardSwish": ("HardSwish", ()),
}


def _activated(compose: Composition, x: str, name: str, parameters: list[float]) -> list[Node]:
    """The operators with an activation after them, as FusedConv and FusedGemm name it. Raises CannotConvertError."""
    if name not in _ACTIVATIONS:
        raise CannotConvertError(f"its activation {name!r} is not supported; expected one of {', '.join(_ACTIVATIONS)}")
    op_type, names = _ACTIVATIONS[name]
    return compose.result(op_type, x, **dict(zip(names, parameters, strict=False)))


@converts_microsoft("FusedConv", inputs="X W B? Z?")
def fused_conv(node: OnnxNode) -> list[Node]:
    """Conv, then Z added, then an activation."""
    name, parameters = node.text("activation", ""), node.numbers("activation_params") or []
    if not name and not node.has_input(3):
        return node.standard("Conv", node.inputs[:3], node.outputs)
    compose = Composition(node)
    y = node.new_name("Conv")
    compose.operators += node.standard("Conv", node.inputs[:3], [y])
    if node.has_input(3) and not name:
        return compose.result("Add", y, node.inputs[3])
    if node.has_input(3):
        y = compose("Add", y, node.inputs[3])
    return _activated(compose, y, name, parameters)


@converts_microsoft("FusedGemm", inputs="A B C?")
def fused_gemm(node: OnnxNode) -> list[Node]:
    """Gemm, then an activation."""
    compose = Composition(node)
    y = node.new_name("Gemm")
    inputs = [name for name in node.inputs if name]
    compose.operators.append(
        node.operator(
            "Gemm", inputs, [y], alpha=node.number("alpha", 1.0), beta=node.number("beta", 1.0),
            trans_a=node.integer("transA", 0), trans_b=node.integer("transB", 0),
        )
    )  # fmt: skip
    names = [name for name in ("activation_alpha", "activation_beta", "activation_gamma") if name in node]
    parameters = [node.number(name, 0.0) for name in names]
    return _activated(compose, y, node.text("activation", ""), parameters)


@converts_microsoft("FusedMatMul", "TransposeMatMul", inputs="A B")
def fused_matmul(node: OnnxNode) -> list[Node]:
    """alpha A B; before the product the matrices of A and B may be transposed, and their batch axes moved."""
    compose = Composition(node)
    operands = [
        _batch_last(compose, name) if node.integer(f"transBatch{letter}", 0) else name
        for letter, name in zip("AB", node.inputs, strict=True)
    ]
    trans = {"trans_a": node.integer("transA", 0), "trans_b": node.integer("transB", 0), "broadcast": 1}
    alpha = node.number("alpha", 1.0)
    if alpha == 1:
        return compose.result("BatchMatMul", *operands, **trans)
    return compose.result("Scale", compose("BatchMatMul", *operands, **trans), scale=alpha)


def _batch_last(compose: Composition, name: str) -> str:
    """The tensor with its first axis, the rows, moved after those of the batch."""
    shape = compose.node.shape_of(name)
    if shape is None or len(shape) < 2:
        raise CannotConvertError(
            f"its batch is transposed, and {name!r} is not known to have one: its shape is {shape}"
        )
    axes = range(len(shape))
    return compose("Transpose", name, axes=[*axes[1:-1], 0, axes[-1]])


@converts_microsoft("SkipLayerNormalization", inputs="input skip gamma beta? bias?", outputs=4)
def skip_layer_normalization(node: OnnxNode) -> list[Node]:
    """LayerNormalization of input + skip + bias over the last axis; that sum is the fourth output."""
    compose = Composition(node)
    total = _sum(compose, [node.inputs[0], node.inputs[1], *node.inputs[4:5]])
    beta = node.inputs[3] if node.has_input(3) else ""
    _normalized(compose, total, node.inputs[2], beta, node.number("epsilon", 1e-12))
    return compose.operators


@converts_microsoft("SkipSimplifiedLayerNormalization", inputs="input skip gamma bias?", outputs=4)
def skip_simplified_layer_normalization(node: OnnxNode) -> list[Node]:
    """Root mean square normalization of input + skip + bias; that sum is the fourth output."""
    compose = Composition(node)
    total = _sum(compose, [node.inputs[0], node.inputs[1], *node.inputs[3:4]])
    return _by_root_mean_square(compose, total, node.inputs[2], -1, node.number("epsilon", 1e-5))


@converts_microsoft("SimplifiedLayerNormalization", inputs="X scale", outputs=2)
def simplified_layer_normalization(node: OnnxNode) -> list[Node]:
    """Root mean square normalization over the axes from `axis` on."""
    node.ignore("stash_type")  # the type of a number that is not given out
    axis = node.integer("axis", -1)
    return _by_root_mean_square(Composition(node), node.inputs[0], node.inputs[1], axis, node.number("epsilon", 1e-5))


def _sum(compose: Composition, terms: list[str]) -> str:
    """The sum of the residual connection, in the order of the inputs; it is the node's fourth output if that is read.

    Raises CannotConvertError when mean or deviation are read, which only training needs.
    """
    node = compose.node
    if node.is_read(1) or node.is_read(2):
        raise CannotConvertError("its outputs 1 and 2, for training, are not supported")
    total, *rest = [name for name in terms if name]
    for position, term in enumerate(rest):
        last = position == len(rest) - 1 and node.is_read(3)
        name = node.outputs[3] if last else node.new_name("sum")
        compose.operators.append(node.operator("Add", [total, term], [name]))
        total = name
    return total


def _normalized(compose: Composition, x: str, gamma: str, beta: str, epsilon: float) -> None:
    """LayerNorm over the last axis as the node's first output."""
    node, scale = compose.node, compose.node.value_of(gamma)
    if not beta and scale is None:
        raise CannotConvertError(f"it has no beta, and gamma {gamma!r} is computed")
    if not beta:
        beta = compose.constant(np.zeros_like(scale))
    outputs = [node.outputs[0], node.new_name("mean"), node.new_name("deviation")]
    arguments = {"axis": -1, "epsilon": epsilon, "elementwise_affine": 1}
    compose.operators.append(node.operator("LayerNorm", [x, gamma, beta], outputs, **arguments))


def _by_root_mean_square(compose: Composition, x: str, gamma: str, axis: int, epsilon: float) -> list[Node]:
    """X / sqrt(mean of X^2 + epsilon) * gamma. Zhang and Sennrich, 2019, arXiv:1910.07467."""
    node = compose.node
    if node.is_read(1):
        raise CannotConvertError("its output 1, for training, is not supported")
    if axis != -1:
        raise CannotConvertError(f"axis {axis} is not supported; expected -1")
    mean = compose("ReduceMean", compose("Sqr", x), axes=[-1], keepdims=1)
    scale = node.value_of(gamma)
    shifted = compose("Add", mean, compose.constant(np.array(epsilon, np.float32 if scale is None else scale.dtype)))
    output = node.outputs[0]
    normalized = compose("Mul", x, compose("Rsqrt", shifted))
    compose.operators.append(node.operator("Mul", [normalized, gamma], [output]))
    return compose.operators


@converts_microsoft(
    "EmbedLayerNormalization",
    inputs="input_ids segment_ids? word_embedding position_embedding segment_embedding? gamma beta mask? position_ids?",
    outputs=3,
)
def embed_layer_normalization(node: OnnxNode) -> list[Node]:
    """LayerNormalization of the sum of word, position and segment embeddings; and the length of each sequence."""
    compose = Composition(node)
    ids, segments, words, positions, kinds, gamma, beta = node.inputs[:7]
    _note_shapes(node)
    total = compose("Gather", words, ids, axis=0)
    total = compose("Add", total, _positions(compose, positions, ids))
    if segments:
        total = compose("Add", total, compose("Gather", kinds, segments, axis=0))
    if node.is_read(2):
        compose.operators.append(node.operator("Copy", [total], [node.outputs[2]]))
    if node.integer("mask_index_type", 0) not in (0, 1):
        raise CannotConvertError("only mask_index_type 0 and 1 are supported")
    if node.is_read(1):
        _sequence_lengths(compose, node.inputs[7] if node.has_input(7) else "")
    _normalized(compose, total, gamma, beta, node.number("epsilon", 1e-12))
    return compose.operators


def _note_shapes(node: OnnxNode) -> None:
    """Note the sizes of the outputs, batch x positions x width and batch, as far as they are known."""
    ids, table = node.shape(0), node.shape(2)
    batch, positions = ids if ids is not None and len(ids) == 2 else (None, None)
    width = table[-1] if table else None
    for name, shape in zip(
        node.outputs, ((batch, positions, width), (batch,), (batch, positions, width)), strict=False
    ):
        node.scope.shapes.setdefault(name, shape)


def _positions(compose: Composition, embedding: str, ids: str) -> str:
    """The embeddings of the positions that the node names, by default the first ones, for each column of `ids`."""
    node = compose.node
    if node.has_input(8):
        return compose("Gather", embedding, node.inputs[8], axis=0)
    count = compose("Shape", ids, axes=[1])
    return compose("Slice", embedding, compose.constant(np.zeros(1, np.int64)), count, onnx_style=1)


def _sequence_lengths(compose: Composition, mask: str) -> None:
    """The second output: how many elements of each row of the mask are 1; 0 without a mask."""
    node, ids = compose.node, compose.node.inputs[0]
    lengths = compose("ReduceSum", mask or compose("Sub", ids, ids), axes=[1], keepdims=0)
    compose.operators.append(node.operator("Cast", [lengths], [node.outputs[1]], to=INT32.number))
