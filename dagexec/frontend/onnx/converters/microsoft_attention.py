"""Converters of onnxruntime's attention operators (com.microsoft): Attention, MultiHeadAttention, QAttention.

Each becomes the products, masks and Softmax that it stands for (Vaswani et al., 2017, arXiv:1706.03762). Tensors of
heads are batch x heads x positions x size of a head; P past positions and S new ones are T in all.
"""

from __future__ import annotations

import math

import numpy as np

from dagexec.core.dtypes import BOOL, INT64
from dagexec.core.node import Node
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.composition import Composition
from dagexec.frontend.onnx.converters.quantized import scaled_product
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts_microsoft

_LOWEST = float(np.finfo(np.float32).min)


@converts_microsoft(
    "Attention", inputs="input weights bias? mask_index? past? attention_bias? past_sequence_length?", outputs=2
)
def attention(node: OnnxNode) -> list[Node]:
    """Self-attention: one product gives queries, keys and values of all heads."""
    compose = Composition(node)
    sizes = node.integers("qkv_hidden_sizes")
    joined = compose("BatchMatMul", *node.inputs[:2], broadcast=1)
    if node.has_input(2):
        joined = compose("Add", joined, node.inputs[2])
    _refuse_inputs(node, 6)
    return _self_attention(compose, joined, sizes, mask=3, past=4, bias=5)


@converts_microsoft(
    "QAttention",
    inputs="input weight bias input_scale weight_scale mask_index? input_zero_point? weight_zero_point? past?",
    outputs=2,
)
def quantized_attention(node: OnnxNode) -> list[Node]:
    """As Attention, of an input and weights of integers."""
    compose = Composition(node)
    product = scaled_product(compose, (0, 1), (3, 4), (6, 7))
    joined = compose("Add", product, node.inputs[2])
    return _self_attention(compose, joined, None, mask=5, past=8, bias=9)


def _self_attention(
    compose: Composition, joined: str, sizes: list[int] | None, *, mask: int, past: int, bias: int
) -> list[Node]:
    """Attention whose queries, keys and values are `joined` along the last axis; then the numbers of inputs."""
    node = compose.node
    if node.integer("do_rotary", 0) or node.integer("past_present_share_buffer", 0):
        raise CannotConvertError("do_rotary and past_present_share_buffer are not supported")
    node.ignore("rotary_embedding_dim")
    heads = _heads(node)
    if node.rank(1, "the size of a head follows from its weights") != 2:
        raise ModelFormatError(f"{node.label}: its weights must be a matrix, found shape {node.shape(1)}")
    width = node.full_shape(1, "the size of a head follows from its weights")[1]
    head_size = (sizes[0] if sizes else width // 3) // heads
    q, k, v = (_by_heads(compose, part, heads) for part in compose.split(joined, 3, -1, sizes))
    if node.has_input(past):
        before = [compose("Squeeze", part, dims=[0]) for part in compose.split(node.inputs[past], 2, 0)]
        k, v = (compose("Concat", *pair, axis=2) for pair in zip(before, (k, v), strict=True))
    if node.is_read(1):
        both = [compose("ExpandDims", part, dims=[0]) for part in (k, v)]
        compose.operators.append(node.operator("Concat", both, [node.outputs[1]], axis=0))
    return _attend(compose, (q, k, v), head_size, mask, bias)


@converts_microsoft(
    "MultiHeadAttention",
    inputs="query key? value? bias? key_padding_mask? attention_bias? past_key? past_value? past_sequence_length? "
    "cache_indirection?",
    outputs=4,
)
def multi_head_attention(node: OnnxNode) -> list[Node]:
    """Attention of queries to keys and values that are separate tensors, those of the past before them."""
    compose = Composition(node)
    heads = _heads(node)
    if not (node.has_input(1) and node.has_input(2)) or node.rank(0, "it may be packed") != 3:
        raise CannotConvertError("packed queries, keys and values are not supported")
    _refuse_inputs(node, 8)
    head_size = node.full_shape(0, "the size of a head follows from its query")[-1] // heads
    q, k, v = (_projected(compose, index, heads, bias) for index, bias in enumerate(_biases(compose)))
    if node.has_input(6):
        k, v = compose("Concat", node.inputs[6], k, axis=2), compose("Concat", node.inputs[7], v, axis=2)
    for index, part in ((1, k), (2, v)):
        if node.is_read(index):
            compose.operators.append(node.operator("Copy", [part], [node.outputs[index]]))
    if node.is_read(3):
        raise CannotConvertError("its output qk is not supported")
    return _attend(compose, (q, k, v), head_size, 4, 5)


def _biases(compose: Composition) -> list[str]:
    """The parts of the bias that belong to queries, keys and values; '' without one."""
    node = compose.node
    if not node.has_input(3):
        return [""] * 3
    length = math.prod(node.full_shape(3, "its bias is cut in three"))
    width = node.full_shape(0, "its bias is cut by it")[-1]
    return compose.split(node.inputs[3], 3, 0, [width, width, length - 2 * width])


def _projected(compose: Composition, index: int, heads: int, bias: str) -> str:
    """Input `index` by heads, its bias added; keys and values of another sequence may have heads already."""
    node = compose.node
    name, rank = node.inputs[index], node.rank(index, "it may have heads already")
    if rank == 4:
        return name
    return _by_heads(compose, compose("Add", name, bias) if bias else name, heads)


def _heads(node: OnnxNode) -> int:
    heads = node.integer("num_heads", 0)
    if heads < 1:
        raise ModelFormatError(f"{node.label}: attribute 'num_heads' must be at least 1, found {heads}")
    return heads


def _refuse_inputs(node: OnnxNode, first: int) -> None:
    if any(node.inputs[first:]):
        raise CannotConvertError(f"inputs {list(node.inputs[first:])} are not supported")


def _by_heads(compose: Composition, name: str, heads: int) -> str:
    """batch x positions x (heads size) as batch x heads x positions x size."""
    return compose("Transpose", compose("Reshape", name, shape=[0, 0, heads, -1]), axes=[0, 2, 1, 3])


def _attend(compose: Composition, qkv: tuple[str, str, str], head_size: int, mask: int, bias: int) -> list[Node]:
    """Softmax(scale Q K^T + masks + bias) V, and the heads side by side; `mask` and `bias` are numbers of inputs."""
    node, (q, k, v) = compose.node, qkv
    scale = node.number("scale", 0.0) or 1 / math.sqrt(max(1, head_size))
    scores = compose("Scale", compose("BatchMatMul", q, k, trans_b=1, broadcast=1), scale=scale)
    masks = [_padding(compose, mask, k)] if node.has_input(mask) else []
    if node.integer("unidirectional", 0):
        masks.append(_causal(compose, q, k))
    if node.has_input(bias):
        masks.append(node.inputs[bias])
    for one in masks:
        scores = compose("Add", scores, one)
    weights = compose("Softmax", scores, axis=-1, single_axis=1)
    joined = compose("Transpose", compose("BatchMatMul", weights, v, broadcast=1), axes=[0, 2, 1, 3])
    compose.operators.append(node.operator("Reshape", [joined], [node.outputs[0]], shape=[0, 0, -1]))
    return compose.operators


def _padding(compose: Composition, index: int, k: str) -> str:
    """What is added where the mask in input `index` forbids a key: mask_filter_value.

    The mask is 1 for keys that count, batch x T or batch x S x T; or the number of keys that count, one for each batch,
    behind which may be the number of the first one.
    """
    node = compose.node
    value = node.number("mask_filter_value", -10000.0)
    rank = node.rank(index, "what its mask means follows from its axes")
    if rank in (2, 3):
        allowed = compose("Cast", node.inputs[index], to=BOOL.number)
        return _forbidden(compose, compose("ExpandDims", allowed, dims=[1, 2] if rank == 2 else [1]), value)
    if rank != 1:
        raise CannotConvertError(f"a mask of {rank} axes is not supported")
    positions = _positions(compose, k)
    starts, ends = (compose("ExpandDims", bound, dims=[1]) for bound in _bounds(compose, index, k))
    allowed = compose("And", compose("LT", positions, ends), compose("GE", positions, starts))
    return _forbidden(compose, compose("ExpandDims", allowed, dims=[1, 2]), value)


def _bounds(compose: Composition, index: int, k: str) -> tuple[str, str]:
    """The first key that counts and the one behind the last, for each batch; input `index` may say nothing of firsts.

    Zeros behind its ends stand for the starts that are not there.
    """
    mask = compose("Cast", compose.node.inputs[index], to=INT64.number)
    padded = compose("Concat", mask, compose("Sub", mask, mask), axis=0)
    batch, zero = compose("Shape", k, axes=[0]), compose.constant(np.zeros(1, np.int64))
    ends = compose("Slice", padded, zero, batch, onnx_style=1)
    return compose("Slice", padded, batch, compose("Add", batch, batch), onnx_style=1), ends


def _causal(compose: Composition, q: str, k: str) -> str:
    """The mask that forbids keys after their query; the last query belongs to the last key."""
    rows, columns = _positions(compose, q), _positions(compose, k)
    past = compose("Sub", compose("Shape", k, axes=[2]), compose("Shape", q, axes=[2]))
    rows = compose("ExpandDims", compose("Add", rows, past), dims=[1])
    return _forbidden(compose, compose("LE", columns, rows), _LOWEST)


def _positions(compose: Composition, heads: str) -> str:
    """0, 1, ... for the positions of a tensor of heads, int64."""
    count = compose("Squeeze", compose("Shape", heads, axes=[2]), dims=[0])
    return compose("Range", count)


def _forbidden(compose: Composition, allowed: str, value: float) -> str:
    """0 where a boolean is true, else `value`."""
    zero, other = (compose.constant(np.array(number, np.float32)) for number in (0, value))
    return compose("Where", allowed, zero, other)
