"""Sliding windows drawn by hypothesis, and what they mean: positions found by walking, sums by loops over taps.

A `Geometry` prints as one line that makes it again; the checks of convolution and pooling put it in their messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
from hypothesis import strategies as st
from onnx import helper

from dagexec.core.arguments import ArgumentValue

Array = npt.NDArray[Any]
NOTSET, VALID, SAME, LEGACY, SAME_UPPER, SAME_LOWER = range(6)
SAMES = (SAME, SAME_UPPER, SAME_LOWER)


@dataclass(frozen=True)
class Geometry:
    """A window over an image: one entry for each spatial axis; `pads` has the heads, then the tails."""

    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[int, ...]
    legacy_pad: int = NOTSET
    ceil_mode: bool = False

    @property
    def rank(self) -> int:
        return len(self.size)

    def arguments(self) -> dict[str, ArgumentValue]:
        """The plural spelling; arguments that have their default value are left out."""
        found: dict[str, ArgumentValue] = {"kernels": list(self.kernel)}
        if self.legacy_pad:
            found["legacy_pad"] = self.legacy_pad
        if any(self.pads):
            found["pads"] = list(self.pads)
        if set(self.stride) != {1}:
            found["strides"] = list(self.stride)
        if set(self.dilation) != {1}:
            found["dilations"] = list(self.dilation)
        if self.ceil_mode:
            found["ceil_mode"] = 1
        return found

    def onnx_attributes(self) -> dict[str, Any]:
        """The attributes of the ONNX node; not for CAFFE_LEGACY_POOLING, which ONNX lacks."""
        found: dict[str, Any] = {"kernel_shape": self.kernel, "strides": self.stride, "dilations": self.dilation}
        if self.legacy_pad == NOTSET:
            return found | {"pads": self.pads}
        return found | {"auto_pad": {VALID: "VALID", SAME_LOWER: "SAME_LOWER"}.get(self.legacy_pad, "SAME_UPPER")}

    def windows(self) -> list[AxisWindows]:
        """Where the windows of each axis are."""
        rank = self.rank
        return [
            axis_windows(
                self.size[i], self.kernel[i], self.stride[i], self.dilation[i], self.pads[i], self.pads[rank + i],
                self.legacy_pad, self.ceil_mode,
            )
            for i in range(rank)
        ]  # fmt: skip


@dataclass(frozen=True)
class AxisWindows:
    """The taps of each window of an axis, as pixel numbers that may lie outside; the padded image is [low, high)."""

    taps: list[list[int]]
    low: int
    high: int


def axis_windows(
    size: int, kernel: int, stride: int, dilation: int, head: int, tail: int, legacy: int, ceil: bool
) -> AxisWindows:
    """The windows of one axis, found by walking from the first to the last that is allowed."""
    reach = dilation * (kernel - 1)  # from the first tap to the last
    if legacy in SAMES:
        count = -(-size // stride)
        need = (count - 1) * stride + reach + 1 - size
        if legacy != SAME and need < 0:
            need = 0
        head = int(need / 2)
        if legacy == SAME_LOWER:
            head = need - head
        starts = [i * stride - head for i in range(count)]
        return AxisWindows([[s + t * dilation for t in range(kernel)] for s in starts], -head, size - head + need)
    if legacy == LEGACY:
        starts = walk(-head, stride, lambda start: start + reach < size + head)
        full = len(starts)
        if starts[-1] + reach + 1 != size + head:
            starts.append(starts[-1] + stride)
        if head > 0 and starts[-1] >= size:
            starts.pop()
        tail = head + stride * (len(starts) - full)
    else:
        starts = walk(-head, stride, lambda start: start + reach < size + tail)
        if ceil and starts[-1] + reach + 1 != size + tail and starts[-1] + stride < size:
            starts.append(starts[-1] + stride)
    return AxisWindows([[s + t * dilation for t in range(kernel)] for s in starts], -head, size + tail)


def walk(start: int, stride: int, fits: Callable[[int], bool]) -> list[int]:
    found = []
    while fits(start):
        found.append(start)
        start += stride
    return found


def convolve(x: Array, weights: Array, bias: Array | None, geometry: Geometry, group: int) -> Array:
    """Convolution in float64, tap by tap. `x` is N, C, spatial; `weights` M, C/group, kernel."""
    axes = geometry.windows()
    batch, channels = x.shape[:2]
    filters = weights.shape[0]
    y = np.zeros((batch, filters, *(len(axis.taps) for axis in axes)))
    images = x.astype(np.float64).reshape(batch, group, channels // group, *x.shape[2:])
    matrices = weights.astype(np.float64).reshape(group, filters // group, *weights.shape[1:])
    for place in product(*(range(len(axis.taps)) for axis in axes)):
        for tap in product(*map(range, geometry.kernel)):
            pixel = [axis.taps[i][t] for axis, i, t in zip(axes, place, tap, strict=True)]
            if all(0 <= p < size for p, size in zip(pixel, geometry.size, strict=True)):
                found = np.einsum("ngc,gmc->ngm", images[(..., *pixel)], matrices[(..., *tap)])
                y[(..., *place)] += found.reshape(batch, filters)
    if bias is not None:
        y += bias.astype(np.float64).reshape(-1, *(1,) * geometry.rank)
    return y


def pool(x: Array, geometry: Geometry, kind: str, count_padding: bool = False) -> Array:
    """The maximum or mean of each window in float64, window by window. `x` is N, C, spatial."""
    axes = geometry.windows()
    y = np.zeros((*x.shape[:2], *(len(axis.taps) for axis in axes)))
    for place in product(*(range(len(axis.taps)) for axis in axes)):
        taps = [axis.taps[i] for axis, i in zip(axes, place, strict=True)]
        inside = [[p for p in row if 0 <= p < size] for row, size in zip(taps, geometry.size, strict=True)]
        values = x.astype(np.float64)[(slice(None), slice(None), *np.ix_(*inside))]
        values = values.reshape(*x.shape[:2], math.prod(map(len, inside)))
        if kind == "MaxPool":
            y[(..., *place)] = values.max(axis=2, initial=-np.inf)
            continue
        count = values.shape[2]
        if count_padding:
            count = 1
            for axis, row in zip(axes, taps, strict=True):
                count *= sum(axis.low <= p < axis.high for p in row)
        y[(..., *place)] = values.sum(axis=2) / max(count, 1)  # 0 for a window of nothing but padding
    return y


@st.composite
def geometries(draw: st.DrawFn, *, pooling: bool = False, dilated: bool = True) -> Geometry:
    """Windows that fit their image. For pooling every pad is less than the kernel, and rounding up is drawn too."""
    rank = draw(st.sampled_from([1, 2, 2, 2, 3]))
    legacy = draw(st.sampled_from([NOTSET, NOTSET, NOTSET, VALID, LEGACY, *SAMES]))
    most = 3 if rank == 3 else 5
    rows = []
    for _ in range(rank):
        kernel = draw(st.integers(1, most))
        stride = draw(st.integers(1, 4))
        dilation = draw(st.integers(1, 3)) if dilated and legacy != LEGACY else 1
        reach = dilation * (kernel - 1)
        limit = kernel - 1 if pooling else 4
        explicit = legacy in (NOTSET, LEGACY)
        head = draw(st.integers(0, limit)) if explicit else 0
        tail = draw(st.integers(0, limit)) if explicit else 0
        padding = 2 * head if legacy == LEGACY else head + tail
        least = 1 if legacy in SAMES else max(1, reach + 1 - padding)
        size = draw(st.integers(least, least + (3 if rank == 3 else 8)))
        rows.append((size, kernel, stride, dilation, head, tail))
    sizes, kernels, strides, dilations, heads, tails = zip(*rows, strict=True)
    return Geometry(
        sizes,
        kernels,
        strides,
        dilations,
        (*heads, *tails),
        legacy,
        ceil_mode=pooling and legacy in (NOTSET, VALID) and draw(st.booleans()),
    )


def onnx_has(geometry: Geometry) -> bool:
    """False for the padding of Caffe, and for SAME with dilation, which onnxruntime refuses, or that leaves pixels out.

    Where the last window of SAME ends before the image does, onnxruntime starts the first one at some later pixel.
    """
    if geometry.legacy_pad not in SAMES:
        return geometry.legacy_pad != LEGACY
    axes = zip(geometry.windows(), geometry.size, geometry.dilation, strict=True)
    return all(
        axis.low <= 0 and axis.high >= size and axis.taps[-1][-1] >= size - 1 and dilation == 1
        for axis, size, dilation in axes
    )


def run_onnx(op: str, inputs: list[Array], attributes: dict[str, Any], opset: int = 22) -> Array:
    """The output of one ONNX node in onnxruntime."""
    return run_onnx_outputs(op, inputs, attributes, 1, opset)[0]


def run_onnx_outputs(
    op: str, inputs: list[Array], attributes: dict[str, Any], outputs: int, opset: int = 22
) -> list[Array]:
    """All outputs of one ONNX node in onnxruntime."""
    names = [f"x{index}" for index in range(len(inputs))]
    kinds = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs]
    infos = [
        helper.make_tensor_value_info(name, kind, array.shape)
        for name, kind, array in zip(names, kinds, inputs, strict=True)
    ]
    results = [f"y{index}" for index in range(outputs)]
    types = [helper.make_empty_tensor_value_info(name) for name in results]
    graph = helper.make_graph([helper.make_node(op, names, results, **attributes)], "one", infos, types)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, dict(zip(names, inputs, strict=True)))
    return found


def to_channels_last(array: Array) -> Array:
    """N, C, spatial as N, spatial, C; the same for a filter."""
    return np.ascontiguousarray(np.moveaxis(array, 1, -1))


def to_channels_first(array: Array) -> Array:
    """N, spatial, C as N, C, spatial."""
    return np.moveaxis(array, -1, 1)


def taps_inside(geometry: Geometry) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Each window and each of its taps that lies inside the image, with its pixel."""
    axes = geometry.windows()
    for place in product(*(range(len(axis.taps)) for axis in axes)):
        for tap in product(*map(range, geometry.kernel)):
            pixel = tuple(axis.taps[i][t] for axis, i, t in zip(axes, place, tap, strict=True))
            if all(0 <= p < size for p, size in zip(pixel, geometry.size, strict=True)):
                yield place, tap, pixel
