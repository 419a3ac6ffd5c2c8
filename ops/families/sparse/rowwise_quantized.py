"""Matrices quantized row by row, with scale and bias of each row: embedding tables in 8, 4 or 2 bits.

A number is code * scale + bias. A fused row is its codes, the lowest bits of a byte first, then scale and bias: two
float32 behind 8-bit codes, two float16 behind those of 4 and 2 bits. The last axis is the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT16, FLOAT32, INT32, UINT8, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.registry import operator, schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import ArrayFunction, array_function
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.index.indexing import check_indices
from dagexec.ops.families.sparse.segments import Reduce, across, checked_lengths, segment_means, segment_sums

_TAIL: dict[int, np.dtype[Any]] = {8: np.dtype(np.float32), 4: np.dtype(np.float16), 2: np.dtype(np.float16)}
"""What scale and bias are, by bits."""

_TINY = 1e-8
_BINS, _NARROWED = 200, 0.16  # of the greedy search: steps of a range, and how much of it is left out at most

Floats = npt.NDArray[np.float32]


def quantize(x: Floats, bits: int, *, greedy: bool = False) -> tuple[npt.NDArray[np.uint8], Floats, Floats]:
    """Codes, scale and bias of rows: for 8 bits a row's range in 255 steps, for fewer in float16's precision.

    `greedy`: the range is the one that `narrowed` finds.
    """
    low, high = x.min(axis=-1, initial=np.inf), x.max(axis=-1, initial=-np.inf)
    if not x.shape[-1]:
        low = high = np.zeros(x.shape[:-1], np.float32)
    if greedy:
        low, high = narrowed(x, low, high, bits)
    steps = (1 << bits) - 1
    if bits == 8:
        span = high - low
        inverse = np.float32(steps) / (span + np.float32(_TINY))
        return np.rint((x - low[..., None]) * inverse[..., None]).astype(np.uint8), span / np.float32(steps), low
    codes, scale, bias = _half_codes(x, low, high, steps)
    return codes.astype(np.uint8), scale, bias


def _half_codes(x: Floats, low: Floats, high: Floats, steps: int) -> tuple[Floats, Floats, Floats]:
    bias = low.astype(np.float16).astype(np.float32)
    span = high - bias
    scale = np.where(span == 0, 1, span / np.float32(steps)).astype(np.float16).astype(np.float32)
    scale = np.where(scale == 0, np.float32(1), scale)
    return np.clip(np.rint((x - bias[..., None]) / scale[..., None]), 0, steps), scale, bias


def narrowed(x: Floats, low: Floats, high: Floats, bits: int) -> tuple[Floats, Floats]:
    """A part of each row's range, at least 84% of it, that codes represent with less error: Caffe2's greedy search.

    The end moves in, by a 200th of the range, that leaves the smaller error; the best range is the last minimum on the
    way that is below all before.
    """
    step = (high - low) / np.float32(_BINS)
    least = step * np.float32(_BINS * (1 - _NARROWED))
    best_low, best_high = low, high

    def error(low: Floats, high: Floats) -> Floats:
        codes, scale, bias = _half_codes(x, low, high, (1 << bits) - 1)
        found: Floats = np.sqrt(np.square(x - (codes * scale[..., None] + bias[..., None])).sum(-1))
        return found

    current = best = error(low, high)
    while np.any(moves := low + least < high):
        left, right = error(low + step, high), error(low, high - step)
        minimum = moves & (current < left) & (current < right) & (current < best)
        best = np.where(minimum, current, best)
        best_low, best_high = np.where(minimum, low, best_low), np.where(minimum, high, best_high)
        by_left = left < right
        low, high = np.where(moves & by_left, low + step, low), np.where(moves & ~by_left, high - step, high)
        current = np.where(by_left, left, right)
    return best_low, best_high


def fuse(codes: npt.NDArray[np.uint8], scale: Floats, bias: Floats, bits: int) -> npt.NDArray[np.uint8]:
    """Codes, `8 / bits` of them in a byte, then scale and bias."""
    each = 8 // bits
    columns = codes.shape[-1]
    padded = np.zeros((*codes.shape[:-1], -(-columns // each) * each), np.uint8)
    padded[..., :columns] = codes
    packed = np.zeros((*codes.shape[:-1], padded.shape[-1] // each), np.uint8)
    for place in range(each):
        packed |= padded[..., place::each] << np.uint8(place * bits)
    tail = np.ascontiguousarray(np.stack([scale, bias], axis=-1).astype(_TAIL[bits]))
    return np.concatenate([packed, tail.view(np.uint8)], axis=-1)


def dequantize(fused: npt.NDArray[np.uint8], bits: int) -> Floats:
    """The numbers of fused rows."""
    tail = 2 * _TAIL[bits].itemsize
    packed = fused[..., :-tail]
    ends = np.ascontiguousarray(fused[..., -tail:]).view(_TAIL[bits]).astype(np.float32)
    each = 8 // bits
    codes = np.empty((*packed.shape[:-1], packed.shape[-1] * each), np.float32)
    for place in range(each):
        codes[..., place::each] = packed >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    found: Floats = codes * ends[..., :1] + ends[..., 1:]
    return found


def fused_columns(columns: int, bits: int) -> int:
    """Bytes of a fused row of so many numbers."""
    return -(-columns * bits // 8) + 2 * _TAIL[bits].itemsize


def _columns(call: OperatorCall, bits: int, index: int = 0) -> int:
    """Numbers in a fused row of input `index`. Raises ShapeError for rows that are too short."""
    call.require_types(index, UINT8)
    shape, tail = call.inputs[index].shape, 2 * _TAIL[bits].itemsize
    if not shape or shape[-1] < tail:
        raise call.fail(f"a fused row must have at least the {tail} bytes of scale and bias")
    return (shape[-1] - tail) * (8 // bits)


def _quantizer(name: str, meta: TypeMeta, bits: int, *, stored: int = 0) -> None:
    """Register the operator that quantizes rows to `bits`, stored in as many or in `stored`."""
    store = stored or bits

    def infer(call: OperatorCall) -> list[TensorType]:
        call.require_types(0, meta)
        shape = call.inputs[0].shape
        if not shape:
            raise call.fail("expected rows, found a scalar")
        if store < 8 and shape[-1] % (8 // store):
            raise call.fail(f"a row must have a multiple of {8 // store} numbers, found {shape[-1]}")
        return [TensorType((*shape[:-1], fused_columns(shape[-1], store)), UINT8)]

    def compute(_call: OperatorCall, x: Array) -> Sequence[Array]:
        return [fuse(*quantize(x.astype(np.float32, copy=False), bits), store)]

    _register(name, infer, f"Rows quantized to {bits} bits, fused with scale and bias.", compute)
    if store < 8:
        search = partial(_quantize_greedily, bits)
        members = {"compute": staticmethod(search), "__doc__": narrowed.__doc__, "__module__": __name__}
        operator(schema_of(name), engine="GREEDY")(type(name, (ArrayFunction,), members))


def _quantize_greedily(bits: int, _call: OperatorCall, x: Array) -> Sequence[Array]:
    return [fuse(*quantize(x.astype(np.float32, copy=False), bits, greedy=True), bits)]


def _dequantizer(name: str, meta: TypeMeta, bits: int) -> None:
    """Register the operator that gives the numbers of fused rows."""

    def infer(call: OperatorCall) -> list[TensorType]:
        columns = _columns(call, bits)
        return [TensorType((*call.inputs[0].shape[:-1], columns), meta)]

    def compute(_call: OperatorCall, fused: Array) -> Sequence[Array]:
        return [dequantize(fused, bits)]

    _register(name, infer, f"The numbers of fused rows of {bits} bits.", compute)


def _register(
    name: str,
    infer: Callable[[OperatorCall], list[TensorType]],
    doc: str,
    compute: Callable[..., Sequence[Any]],
    inputs: tuple[str, ...] = ("X",),
    outputs: tuple[str, ...] = ("Y",),
    value_inputs: tuple[int, ...] = (),
) -> None:
    array_function(name, infer=infer, doc=doc, input_names=inputs, output_names=outputs, value_inputs=value_inputs)(
        compute
    )
    no_gradient(name)


_quantizer("FloatToFused8BitRowwiseQuantized", FLOAT32, 8)
_quantizer("HalfFloatToFused8BitRowwiseQuantized", FLOAT16, 8)
_dequantizer("Fused8BitRowwiseQuantizedToFloat", FLOAT32, 8)
_dequantizer("Fused8BitRowwiseQuantizedToHalfFloat", FLOAT16, 8)
for _bits in (4, 2):
    _quantizer(f"FloatToFused{_bits}BitRowwiseQuantized", FLOAT32, _bits)
    _quantizer(f"HalfToFused{_bits}BitRowwiseQuantized", FLOAT16, _bits)
    _quantizer(f"FloatToFused{_bits}BitFakeRowwiseQuantized", FLOAT32, _bits, stored=8)
    _quantizer(f"HalfToFused{_bits}BitFakeRowwiseQuantized", FLOAT16, _bits, stored=8)
    _dequantizer(f"Fused{_bits}BitRowwiseQuantizedToFloat", FLOAT32, _bits)
    _dequantizer(f"Fused{_bits}BitRowwiseQuantizedToHalf", FLOAT16, _bits)


def infer_rowwise(call: OperatorCall) -> list[TensorType]:
    """Codes in the shape of X, and scale and bias of each row."""
    call.require_types(0, FLOAT32)
    shape = call.inputs[0].shape
    if not shape:
        raise call.fail("expected rows, found a scalar")
    return [TensorType(shape, UINT8), TensorType((shape[0], 2), FLOAT32)]


def rowwise(_call: OperatorCall, x: Array) -> Sequence[Array]:
    """A row is all that shares the first index."""
    codes, scale, bias = quantize(x.reshape(len(x), math.prod(x.shape[1:])), 8)
    return [codes, np.stack([scale, bias], axis=-1)]


def infer_from_rowwise(call: OperatorCall) -> list[TensorType]:
    """Numbers in the shape of the codes."""
    call.require_types(0, UINT8)
    call.require_types(1, FLOAT32)
    call.require_shape(1, (*call.inputs[0].shape[:1], 2), "scale and bias of each row")
    return [TensorType(call.inputs[0].shape, FLOAT32)]


def from_rowwise(_call: OperatorCall, codes: Array, ends: Array) -> Sequence[Array]:
    """code * scale + bias."""
    return [codes * across(ends[:, 0], codes.ndim) + across(ends[:, 1], codes.ndim)]


_PAIR = ("codes", "scale_bias")
_register(
    "FloatToRowwiseQuantized8Bits", infer_rowwise, "Rows in 8 bits; their scale and bias apart.", rowwise, ("X",), _PAIR
)
_register("Rowwise8BitQuantizedToFloat", infer_from_rowwise, "The numbers of rows of 8 bits.", from_rowwise, _PAIR)


def infer_gather_fused(call: OperatorCall) -> list[TensorType]:
    """A row for each index."""
    columns = _columns(call, 8)
    call.require_rank(0, 2)
    return [TensorType((*call.inputs[1].shape, columns), FLOAT32)]


def gather_fused(call: OperatorCall, fused: Array, indices: Array) -> Sequence[Array]:
    """The numbers of the rows picked."""
    check_indices(indices, 0, len(fused), call.label)
    return [dequantize(fused[indices], 8)]


_register(
    "GatherFused8BitRowwise",
    infer_gather_fused,
    "Rows `indices` of fused rows of 8 bits.",
    gather_fused,
    ("X", "indices"),
)


def _reducer(
    name: str, bits: int, reduce: Reduce, *, weighted: bool = False, apart: bool = False, pruned: bool = False
) -> None:
    """Register a sum or mean of segments of quantized rows.

    `apart`: scale and bias are an input of their own. `pruned`: an input says where rows are, -1 for those of zeros.
    """
    extra = ("weights",) if weighted else ()
    names = ("data", *extra, "indices", "lengths", *(("scale_bias",) if apart else ("rows",) if pruned else ()))
    indices = names.index("indices")

    def infer(call: OperatorCall) -> list[TensorType]:
        columns = call.require_rank(0, 2)[1] if apart else _columns(call, bits)
        rows = call.require_rank(indices, 1)[0]
        if weighted:
            call.require_shape(1, (rows,), "a weight for each row")
        if apart:
            call.require_shape(indices + 2, (call.inputs[0].shape[0], 2), "scale and bias of each row")
        if pruned:
            call.require_types(indices + 2, INT32)
            call.require_rank(indices + 2, 1)
        checked_lengths(call, indices + 1, rows)
        return [TensorType((call.inputs[indices + 1].shape[0], columns), FLOAT32)]

    def compute(call: OperatorCall, data: Array, *others: Array) -> Sequence[Array]:
        picked = others[indices - 1]
        check_indices(picked, 0, len(others[-1] if pruned else data), call.label)
        if apart:
            ends = others[-1][picked]
            rows = data[picked] * ends[:, :1] + ends[:, 1:]
        elif pruned:
            picked = others[-1][picked]
            check_indices(picked, -1, len(data), call.label)
            rows = np.zeros((len(picked), (data.shape[1] - 2 * _TAIL[bits].itemsize) * (8 // bits)), np.float32)
            rows[picked >= 0] = dequantize(data[picked[picked >= 0]], bits)
        else:
            rows = dequantize(data[picked], bits)
        if weighted:
            rows = rows * others[0][:, None]
        return [reduce(rows, others[indices])]

    _register(
        name, infer, "Segments of quantized rows, reduced as numbers.", compute, names, value_inputs=(indices + 1,)
    )


for _bits in (8, 4, 2):
    _reducer(f"SparseLengthsSumFused{_bits}BitRowwise", _bits, segment_sums)
    _reducer(f"SparseLengthsMeanFused{_bits}BitRowwise", _bits, segment_means)
    _reducer(f"SparseLengthsWeightedSumFused{_bits}BitRowwise", _bits, segment_sums, weighted=True)
    _reducer(f"SparseLengthsSum{_bits}BitRowwiseSparse", _bits, segment_sums, pruned=True)
    _reducer(f"SparseLengthsMean{_bits}BitRowwiseSparse", _bits, segment_means, pruned=True)
    _reducer(f"SparseLengthsWeightedSum{_bits}BitRowwiseSparse", _bits, segment_sums, weighted=True, pruned=True)
_reducer("SparseLengthsSum8BitsRowwise", 8, segment_sums, apart=True)
_reducer("SparseLengthsMean8BitsRowwise", 8, segment_means, apart=True)
_reducer("SparseLengthsWeightedSum8BitsRowwise", 8, segment_sums, weighted=True, apart=True)
