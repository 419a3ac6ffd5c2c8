"""SpaceToBatch and BatchToSpace: pixels of one place in blocks of an image become images of their own, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.base.layout import channels_last

_ARGS = {
    "block_size": "height and width of a block (default 2)",
    "pad": "rows and columns of zeros on each side of the image (default 0)",
    "pad_t": "those above", "pad_l": "those on the left", "pad_b": "those below", "pad_r": "those on the right",
    "order": "NCHW or NHWC (default NCHW)",
}  # fmt: skip


def _geometry(call: OperatorCall) -> tuple[int, tuple[int, int, int, int]]:
    """The block size, and the padding above, left, below and right. Raises ArgumentError."""
    block, pad = call.arguments.int("block_size", 2), call.arguments.int("pad", 0)
    pads = [call.arguments.int(f"pad_{side}", pad) for side in "tlbr"]
    if block < 1 or min(pads) < 0:
        raise ArgumentError(f"{call.label}: expected a block_size of at least 1 and no negative padding")
    top, left, bottom, right = pads
    return block, (top, left, bottom, right)


def _channels_second(call: OperatorCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[3], shape[1], shape[2]) if channels_last(call) else shape


def _as_given(call: OperatorCall, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[2], shape[3], shape[1]) if channels_last(call) else shape


def infer_space_to_batch(call: OperatorCall) -> list[TensorType]:
    """block^2 times the images, each with its sizes divided by the block. Raises ShapeError where they do not fit."""
    meta = call.require_types(0, *FLOAT_TYPES)
    batch, channels, height, width = _channels_second(call, call.require_rank(0, 4))
    block, (top, left, bottom, right) = _geometry(call)
    height, width = height + top + bottom, width + left + right
    if height % block or width % block:
        raise call.fail(f"padded sizes {(height, width)} must be multiples of the block size {block}")
    shape = (batch * block * block, channels, height // block, width // block)
    return [TensorType(_as_given(call, shape), meta)]


def _rows_of_pixels(asked: RowsCall) -> list[Rows | None]:
    """Image (i, j) of all images of the batch comes before the next (i, j)."""
    rows = asked.only(0)
    if rows.axis != 0:
        raise asked.mixes(rows.axis)
    block, _ = _geometry(asked.call)
    return [replace(rows, before=rows.before * block * block)]


def _rows_of_blocks(asked: RowsCall) -> list[Rows | None]:
    """The batch from which `_rows_of_pixels` made the images."""
    rows = asked.only(0)
    block, _ = _geometry(asked.call)
    if rows.axis != 0 or rows.before % (block * block):
        raise asked.refuse(f"makes one image of {block * block}, which are not those of one example")
    return [replace(rows, before=rows.before // (block * block))]


@array_function(
    "SpaceToBatch",
    infer=infer_space_to_batch,
    doc="Pixel (i, j) of all blocks of an image becomes image (i, j) of the batch, after a padding with zeros.",
    input_names=("X",),
    output_names=("Y",),
    args=_ARGS,
    rows=_rows_of_pixels,
)
def space_to_batch(call: OperatorCall, x: Array) -> Sequence[Array]:
    """A padding, and a transposition."""
    block, (top, left, bottom, right) = _geometry(call)
    images = np.moveaxis(x, -1, 1) if channels_last(call) else x
    padded = np.pad(images, ((0, 0), (0, 0), (top, bottom), (left, right)))
    batch, channels, height, width = padded.shape
    cut = padded.reshape(batch, channels, height // block, block, width // block, block)
    found = cut.transpose(3, 5, 0, 1, 2, 4).reshape(-1, channels, height // block, width // block)
    return [np.moveaxis(found, 1, -1) if channels_last(call) else found]


def infer_batch_to_space(call: OperatorCall) -> list[TensorType]:
    """What SpaceToBatch made it from. Raises ShapeError where that cannot be."""
    meta = call.require_types(0, *FLOAT_TYPES)
    batch, channels, height, width = _channels_second(call, call.require_rank(0, 4))
    block, (top, left, bottom, right) = _geometry(call)
    height, width = height * block - top - bottom, width * block - left - right
    if batch % (block * block) or min(height, width) < 0:
        raise call.fail(f"expected a multiple of {block * block} images, larger than the padding")
    return [TensorType(_as_given(call, (batch // (block * block), channels, height, width)), meta)]


@array_function(
    "BatchToSpace",
    infer=infer_batch_to_space,
    doc="Images of the batch become pixels of blocks, and the padding goes: undoes SpaceToBatch.",
    input_names=("X",),
    output_names=("Y",),
    args=_ARGS,
    rows=_rows_of_blocks,
)
def batch_to_space(call: OperatorCall, x: Array) -> Sequence[Array]:
    """A transposition, and a cut."""
    block, (top, left, bottom, right) = _geometry(call)
    images = np.moveaxis(x, -1, 1) if channels_last(call) else x
    batch, channels, height, width = images.shape
    cut = images.reshape(block, block, batch // (block * block), channels, height, width).transpose(2, 3, 4, 0, 5, 1)
    whole = cut.reshape(-1, channels, height * block, width * block)
    found = whole[:, :, top : height * block - bottom, left : width * block - right]
    return [np.moveaxis(found, 1, -1) if channels_last(call) else found]


@gradient_of("SpaceToBatch", "BatchToSpace")
def block_gradient(request: GradientRequest) -> GradientOperators:
    """By the operator that undoes this one."""
    undone = "BatchToSpace" if request.definition.type == "SpaceToBatch" else "SpaceToBatch"
    return request.single(undone, [request.dy(0)], [0])
