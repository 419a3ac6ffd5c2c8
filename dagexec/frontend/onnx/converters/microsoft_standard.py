"""Converters of onnxruntime's own operators (com.microsoft) that ONNX has as well by now, and RotaryEmbedding.

Exporters wrote them before ONNX had them; their inputs and attributes are those of the later operators.
"""

from __future__ import annotations

import numpy as np

from dagexec.core.node import Node
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.composition import Composition
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts_microsoft


@converts_microsoft("Trilu", inputs="X k?")
def trilu(node: OnnxNode) -> list[Node]:
    """The triangle of each matrix."""
    return node.standard("Trilu", node.inputs, node.outputs)


@converts_microsoft("Pad", inputs="data pads value?")
def pad(node: OnnxNode) -> list[Node]:
    """Padding of all axes."""
    return node.standard("Pad", node.inputs, node.outputs)


@converts_microsoft("GatherND", inputs="data indices")
def gather_nd(node: OnnxNode) -> list[Node]:
    """Slices at tuples of indices."""
    return node.standard("GatherND", node.inputs, node.outputs)


@converts_microsoft("Range", inputs="start limit delta?")
def arange(node: OnnxNode) -> list[Node]:
    """Numbers from `start` up to `limit`, in steps of 1 unless there is a delta."""
    return Composition(node).result("Range", *[name for name in node.inputs if name])


@converts_microsoft("ExpandDims", inputs="X axis")
def expand_dims(node: OnnxNode) -> list[Node]:
    """An axis of size 1 more."""
    axis = node.constant(1, "an axis")
    if axis.size != 1:
        raise ModelFormatError(f"{node.label}: 'axis' must have one entry, found shape {axis.shape}")
    compose = Composition(node)
    axes = compose.constant(axis.reshape(1).astype(np.int64))
    return node.standard("Unsqueeze", [node.inputs[0], axes], node.outputs)


@converts_microsoft("RotaryEmbedding", inputs="input position_ids cos_cache sin_cache")
def rotary_embedding(node: OnnxNode) -> list[Node]:
    """Pairs of elements turned by the angles of their positions, which are given, or follow the first one's."""
    if node.integer("is_packed_batching", 0) or node.number("scale", 1.0) != 1:
        raise CannotConvertError("is_packed_batching=1 and another scale than 1 are not supported")
    compose = Composition(node)
    x, positions, *angles = node.inputs
    rank = node.rank(0, "where its positions are follows from it")
    if node.rank(1, "one position is the first, two axes are all") == 1:
        steps = compose("Range", compose("Squeeze", compose("Shape", x, axes=[1 if rank == 3 else 2]), dims=[0]))
        rows = compose("Concat", compose("Shape", x, axes=[0]), compose.constant(np.array([1], np.int64)), axis=0)
        positions = compose("Expand", compose("Add", steps, positions), rows)
    arguments = {name: node.integer(name, 0) for name in ("rotary_embedding_dim", "interleaved", "num_heads")}
    if rank == 3 and not arguments["num_heads"]:
        arguments["num_heads"] = _heads(node)
    return compose.result("RotaryEmbedding", x, *angles, positions, **arguments)


def _heads(node: OnnxNode) -> int:
    """How many heads lie side by side, where all of a head is turned: an angle serves two elements."""
    width = node.full_shape(0, "the number of heads follows from it")[-1]
    pairs = node.full_shape(2, "the size of a head follows from it")[-1]
    if not pairs or width % (2 * pairs):
        raise ModelFormatError(f"{node.label}: heads of {2 * pairs} elements do not divide {width}")
    return width // (2 * pairs)
