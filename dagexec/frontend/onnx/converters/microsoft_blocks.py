"""Converters of onnxruntime's operators (com.microsoft) whose weights are integers of few bits with a scale a block.

Exporters of language models write them. Weights are constants: those of MatMulNBits become floats at load, as BLAS and
oneDNN multiply these; rows that GatherBlockQuantized picks become floats in each run.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import from_numpy
from dagexec.core.node import Node
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.composition import Composition
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts_microsoft

Array = npt.NDArray[Any]

_BITS = (2, 4, 8)
_HELD = (np.dtype(np.uint8), np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.int4))


@converts_microsoft("MatMulNBits", inputs="A B scales zero_points? g_idx? bias?")
def matmul_n_bits(node: OnnxNode) -> list[Node]:
    """A B^T + bias, with B of N x K: integers packed into bytes, and blocks of K that share a scale."""
    node.ignore("accuracy_level")  # onnxruntime's least precision; here products are of floats
    if node.integer("weight_prepacked", 0):
        raise CannotConvertError("weight_prepacked is not supported")
    compose = Composition(node)
    product = compose("BatchMatMul", node.inputs[0], compose.constant(_weights(node).T.copy()), broadcast=1)
    return compose.result("Add", product, node.inputs[5]) if node.has_input(5) else compose.finish()


def _weights(node: OnnxNode) -> Array:
    """The floats that B stands for, N x K."""
    columns, rows = _size(node, "K"), _size(node, "N")
    bits, block = _bits(node), _size(node, "block_size")
    blocks = -(-columns // block)
    packed, scales = node.constant(1, "weights"), _scales(node)
    if packed.dtype != np.uint8 or 8 * packed.size != rows * blocks * block * bits or scales.size != rows * blocks:
        raise ModelFormatError(
            f"{node.label}: {rows} x {blocks} blocks of {block} integers of {bits} bits need as many scales, found "
            f"{packed.dtype}{list(packed.shape)} and scales of shape {scales.shape}"
        )
    group = np.arange(columns) // block
    if node.has_input(4):
        group = node.constant(4, "g_idx").reshape(-1)
        if group.dtype.kind not in "iu" or len(group) < columns or group.min() < 0 or group.max() >= blocks:
            raise ModelFormatError(
                f"{node.label}: g_idx must name a block below {blocks} for each of {columns} columns"
            )
        group = group[:columns]
    integers = _unpacked(packed.reshape(rows, -1), bits)[:, :columns]
    each = scales.reshape(rows, blocks)
    weights = integers - _zero_points(node, rows, blocks, bits).take(group, axis=1)
    weights *= each.astype(np.float32).take(group, axis=1)
    return weights.astype(scales.dtype, copy=False)


def _zero_points(node: OnnxNode, rows: int, blocks: int, bits: int) -> Array:
    """The zero points of all blocks in float32, by default the middle of the range. Input 3 may have them packed."""
    if not node.has_input(3):
        return np.full((rows, blocks), 1 << (bits - 1), np.float32)
    values = node.constant(3, "zero points")
    if values.dtype != np.uint8 and not from_numpy(values.dtype).is_float:
        raise ModelFormatError(f"{node.label}: zero points must be uint8 or floats, found {values.dtype}")
    width = math.ceil(blocks * bits / 8) if values.dtype == np.uint8 else blocks
    if values.size != rows * width:
        raise ModelFormatError(f"{node.label}: {rows} x {blocks} blocks need other zero points than {values.shape}")
    points = values.reshape(rows, width)
    return (_unpacked(points, bits)[:, :blocks] if values.dtype == np.uint8 else points).astype(np.float32)


def _scales(node: OnnxNode) -> Array:
    scales = node.constant(2, "scales")
    if not from_numpy(scales.dtype).is_float:
        raise ModelFormatError(f"{node.label}: scales must be floats, found {scales.dtype}")
    return scales


def _unpacked(packed: Array, bits: int) -> Array:
    """The unsigned integers in the bytes of the last axis, the first one in the lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    parts = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(*packed.shape[:-1], -1)


def _bits(node: OnnxNode) -> int:
    bits = node.integer("bits", 4)
    if bits not in _BITS:
        raise CannotConvertError(f"integers of {bits} bits are not supported; expected one of {_BITS}")
    return bits


def _size(node: OnnxNode, name: str, default: int = 0) -> int:
    size = node.integer(name, default)
    if size < 1:
        raise ModelFormatError(f"{node.label}: attribute {name!r} must be at least 1, found {size}")
    return size


@converts_microsoft("GatherBlockQuantized", inputs="data indices scales zero_points?")
def gather_block_quantized(node: OnnxNode) -> list[Node]:
    """Rows of a matrix of integers at the indices, times their scales, one for each block of a row."""
    data, scales = node.constant(0, "data"), _scales(node)
    if data.ndim != 2 or node.integer("gather_axis", 0) != 0 or node.integer("quantize_axis", 1) not in (1, -1):
        raise CannotConvertError("only rows of a matrix with scales along them are supported")
    bits, block = _bits(node), _size(node, "block_size", 128)
    packed = data.dtype == np.uint8
    zeros = node.constant(3, "zero points") if node.has_input(3) else None
    if data.dtype not in _HELD or (zeros is not None and zeros.dtype != data.dtype):
        raise ModelFormatError(f"{node.label}: data and zero points must be uint8, uint4 or int4, found {data.dtype}")
    if packed:
        data = _unpacked(data, bits)
    if zeros is not None and packed and zeros.ndim == 2:
        zeros = _unpacked(zeros, bits)[:, : scales.shape[-1]]
    if zeros is None:
        zeros = np.full(scales.shape, 1 << (bits - 1) if packed else 0)
    if zeros.shape != scales.shape or scales.shape != (len(data), -(-data.shape[1] // block)):
        raise ModelFormatError(
            f"{node.label}: scales of shape {scales.shape} do not fit blocks of {block} of {data.shape}"
        )
    kind = np.uint8 if packed else np.int8
    compose = Composition(node)
    tables = [compose.constant(data.astype(kind)), node.inputs[2], compose.constant(zeros.astype(kind))]
    rows = [compose("Gather", table, node.inputs[1], axis=0, wrap_indices=1) for table in tables]
    return compose.result("DequantizeLinear", *rows, axis=-1, block_size=block)
