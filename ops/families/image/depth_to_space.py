"""DepthToSpace and SpaceToDepth: channels dealt out as the pixels of blocks, and gathered again.

Shi et al. 2016, arXiv:1609.05158, section 3.2 (the periodic shuffling); as ONNX defines the two orders of channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np

from dagexec.core.arguments import ArgumentValue
from dagexec.core.gradient import gradient_by
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.families.shape.reshaping import copy_cost

_ARGS = {
    "block_size": "the height and width of a block of pixels",
    "mode": "DCR: a block's channels lie apart by the number of channels of the result (default); CRD: side by side",
}
_ATTRIBUTES = {"blocksize": "block_size", "mode": "mode"}
_MODES: Mapping[str, Mapping[ArgumentValue, ArgumentValue]] = {"mode": {"DCR": "DCR", "CRD": "CRD"}}


def _block(call: OperatorCall) -> int:
    """The argument block_size. Raises ArgumentError for one below 1, and for an unknown mode."""
    block, mode = call.arguments.int("block_size", 0), call.arguments.string("mode", "DCR")
    if block < 1 or mode not in ("DCR", "CRD"):
        raise ArgumentError(
            f"{call.label}: expected a block_size of at least 1, and mode DCR or CRD; found {block}, {mode!r}"
        )
    return block


def infer_depth_to_space(call: OperatorCall) -> list[TensorType]:
    """Height and width times the block size, channels divided by its square."""
    batch, channels, height, width = call.require_rank(0, 4)
    block = _block(call)
    if channels % (block * block):
        raise call.fail(f"{channels} channels do not divide into blocks of {block}x{block} pixels")
    return [TensorType((batch, channels // (block * block), height * block, width * block), call.inputs[0].meta)]


def infer_space_to_depth(call: OperatorCall) -> list[TensorType]:
    """Height and width divided by the block size, channels times its square."""
    batch, channels, height, width = call.require_rank(0, 4)
    block = _block(call)
    if height % block or width % block:
        raise call.fail(f"{height}x{width} pixels do not divide into blocks of {block}x{block}")
    return [TensorType((batch, channels * block * block, height // block, width // block), call.inputs[0].meta)]


def _dealt_out(owner: Operator, deep: np.ndarray, wide: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Views of both images with axes batch, channel, row, row in the block, column, column in the block."""
    block = owner.arguments.int("block_size", 0)
    batch, channels, height, width = deep.shape
    depth = channels // (block * block)
    if owner.arguments.string("mode", "DCR") == "CRD":
        parts = deep.reshape(batch, depth, block, block, height, width).transpose(0, 1, 4, 2, 5, 3)
    else:
        parts = deep.reshape(batch, block, block, depth, height, width).transpose(0, 3, 4, 1, 5, 2)
    return parts, wide.reshape(batch, depth, height, block, width, block)


@new_operator(
    "DepthToSpace",
    infer=infer_depth_to_space,
    doc="Groups of block_size^2 channels of X (N, C, H, W) become blocks of pixels.",
    input_names=("X",),
    output_names=("Y",),
    args=_ARGS,
    required_args=("block_size",),
    cost=copy_cost,
    onnx=(OnnxName("DepthToSpace", 28, _ATTRIBUTES, values=_MODES),),
    moves_elements=True,
    rows=first_axis,
)
class DepthToSpace(Operator):
    """Channels to pixels."""

    def prepare(self) -> Step:
        """One copy between two views."""
        deep, wide = _dealt_out(self, self.x(0), self.y(0))
        return partial(np.copyto, wide, deep)


@new_operator(
    "SpaceToDepth",
    infer=infer_space_to_depth,
    doc="Blocks of block_size x block_size pixels of X (N, C, H, W) become channels.",
    input_names=("X",),
    output_names=("Y",),
    args=_ARGS,
    required_args=("block_size",),
    cost=copy_cost,
    onnx=(OnnxName("SpaceToDepth", 28, _ATTRIBUTES, values=_MODES),),
    moves_elements=True,
    rows=first_axis,
)
class SpaceToDepth(Operator):
    """Pixels to channels."""

    def prepare(self) -> Step:
        """One copy between two views."""
        deep, wide = _dealt_out(self, self.y(0), self.x(0))
        return partial(np.copyto, deep, wide)


gradient_by("DepthToSpace", "SpaceToDepth", ("dY",))
gradient_by("SpaceToDepth", "DepthToSpace", ("dY",))
