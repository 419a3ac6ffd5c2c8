"""Exporters of operators on images: windows, normalization, resizing. Axes in another order than NCHW are moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dagexec.export.onnx_node import CannotExportError, Operation, exports
from dagexec.ops.base.geometry import LegacyPad, Window, read_transposed_window, read_window
from dagexec.ops.base.layout import NCHW, NHWC, image_order

_NEEDS_SIZES = "its window needs the number of axes"


def _on_nchw(operation: Operation, inputs: list[str], compute: Callable[[list[str], str], None]) -> None:
    """`compute` from inputs in NCHW into the output of that name; for NHWC, input and output are transposed."""
    order = image_order(operation.calls(_NEEDS_SIZES)[0])
    output = operation.only_output()
    if order == NCHW:
        compute(inputs, output)
        return
    if order != NHWC:
        raise CannotExportError(f"images in the order {order} have no counterpart")
    rank = operation.rank(0, _NEEDS_SIZES)
    moved = operation.through("Transpose", inputs[:1], perm=[0, rank - 1, *range(1, rank - 1)])
    compute([moved, *inputs[1:]], inner := f"{output}/nchw")
    operation.node("Transpose", [inner], [output], perm=[0, *range(2, rank), 1])


def _filter(operation: Operation, name: str) -> str:
    """The filter with its channels before the kernel's axes."""
    if image_order(operation.calls(_NEEDS_SIZES)[0]) != NHWC:
        return name
    rank = operation.rank(1, _NEEDS_SIZES)
    return operation.through("Transpose", [name], perm=[0, rank - 1, *range(1, rank - 1)])


def _window(operation: Operation) -> tuple[Window, dict[str, Any]]:
    """The window of input 0, and it as attributes without kernel_shape."""
    calls = operation.calls(_NEEDS_SIZES)
    rank = len(calls[0].inputs[0].shape) - 2
    window = read_window(calls[0], rank)
    if window.global_pooling:
        return window, {}
    if window.legacy_pad is LegacyPad.CAFFE_LEGACY_POOLING:
        window = _rounding_up(window, [call.inputs[0].shape for call in calls])
    attributes: dict[str, Any] = {"strides": list(window.stride), "dilations": list(window.dilation)}
    if window.legacy_pad in (LegacyPad.SAME_UPPER, LegacyPad.SAME_LOWER):
        return window, attributes | {"auto_pad": window.legacy_pad.name}
    pads = [_pads(window, call.inputs[0].shape) for call in calls]
    if any(found != pads[0] for found in pads):
        raise CannotExportError(f"its pads depend on sizes that are open (legacy_pad {window.legacy_pad.name})")
    if any(pad < 0 for pad in pads[0]):
        raise CannotExportError(f"pads {pads[0]} cut pixels off, which ONNX has not")
    return window, attributes | {"pads": pads[0]}


def _rounding_up(window: Window, shapes: list[tuple[int, ...]]) -> Window:
    """The window of Caffe's pooling as one with ceil_mode. Raises CannotExportError where that has other sizes."""
    rounding = replace(window, legacy_pad=LegacyPad.NOTSET, ceil_mode=True, tail=window.head)
    for sizes in map(window.spatial, shapes):
        if [axis.out for axis in rounding.over(sizes)] != [axis.out for axis in window.over(sizes)]:
            raise CannotExportError("Caffe's rounding of its output's sizes has no counterpart")
    return rounding


def _pads(window: Window, shape: tuple[int, ...]) -> list[int]:
    if window.legacy_pad is LegacyPad.NOTSET:
        return [*window.head, *window.tail]
    axes = window.over(window.spatial(shape))
    return [axis.head for axis in axes] + [axis.tail for axis in axes]


@exports("Conv")
def convolution(operation: Operation) -> None:
    """Conv."""
    window, attributes = _window(operation)
    weights = _filter(operation, operation.inputs[1])
    attributes |= {"kernel_shape": list(window.kernel), "group": operation.integer("group", 1)}

    def compute(inputs: list[str], output: str) -> None:
        operation.node("Conv", inputs, [output], **attributes)

    _on_nchw(operation, [operation.inputs[0], weights, *operation.inputs[2:]], compute)


@exports("ConvTranspose")
def transposed_convolution(operation: Operation) -> None:
    """ConvTranspose, with the pads that its sizes come to."""
    found = []
    for call in operation.calls(_NEEDS_SIZES):
        window, axes = read_transposed_window(call, call.inputs[0].shape)
        adjs = [axis.size - ((axis.out - 1) * axis.stride + axis.extent - axis.head - axis.tail) for axis in axes]
        found.append(([axis.head for axis in axes] + [axis.tail for axis in axes], adjs))
    if any(pads != found[0] for pads in found):
        raise CannotExportError("its pads depend on sizes that are open")
    pads, adjs = found[0]
    weights = _filter(operation, operation.inputs[1])

    def compute(inputs: list[str], output: str) -> None:
        operation.node(
            "ConvTranspose", inputs, [output], kernel_shape=list(window.kernel), strides=list(window.stride),
            dilations=list(window.dilation), group=operation.integer("group", 1), pads=pads, output_padding=adjs,
        )  # fmt: skip

    _on_nchw(operation, [operation.inputs[0], weights, *operation.inputs[2:]], compute)


@exports("MaxPool", "AveragePool")
def pooling(operation: Operation) -> None:
    """MaxPool and AveragePool, or the global ones."""
    kind = operation.definition.type
    window, attributes = _window(operation)
    if not window.global_pooling:
        attributes |= {"kernel_shape": list(window.kernel), "ceil_mode": int(window.ceil_mode)}
        if kind == "AveragePool":
            attributes["count_include_pad"] = operation.integer("count_include_pad", 0)
            if operation.integer("legacy_pad", 0) == LegacyPad.CAFFE_LEGACY_POOLING:
                raise CannotExportError("averages of windows that Caffe pads have no counterpart")

    def compute(inputs: list[str], output: str) -> None:
        operation.node(f"Global{kind}" if window.global_pooling else kind, inputs, [output], **attributes)

    _on_nchw(operation, list(operation.inputs), compute)


@exports("LpPool")
def lp_pooling(operation: Operation) -> None:
    """LpPool, or the global one; ONNX's exponents are integers."""
    window, attributes = _window(operation)
    exponent = operation.number("p", 2.0)
    if not exponent.is_integer():
        raise CannotExportError(f"exponent {exponent:g} is no integer")
    kind = "GlobalLpPool" if window.global_pooling else "LpPool"
    if not window.global_pooling:
        attributes |= {"kernel_shape": list(window.kernel), "ceil_mode": int(window.ceil_mode)}
    _single(operation, kind, p=int(exponent), **attributes)


@exports("MaxPoolWithIndex")
def max_pooling_with_index(operation: Operation) -> None:
    """MaxPool with its second output."""
    if not operation.flag("flat_indices"):
        raise CannotExportError("indices within a channel have no counterpart")
    window, attributes = _window(operation)
    if window.global_pooling or image_order(operation.calls(_NEEDS_SIZES)[0]) != NCHW:
        raise CannotExportError("indices of global pooling, or of images in another order, have no counterpart")
    storage_order = operation.integer("storage_order", 0)
    operation.node(
        "MaxPool", operation.inputs, operation.outputs, kernel_shape=list(window.kernel), storage_order=storage_order,
        ceil_mode=int(window.ceil_mode), **attributes,
    )  # fmt: skip


@exports("SpatialBN")
def batch_normalization(operation: Operation) -> None:
    """BatchNormalization as inference computes it."""
    if not operation.flag("is_test"):
        raise CannotExportError("only inference (is_test=1) has a counterpart")
    epsilon = operation.number("epsilon", 1e-5)
    operation.ignore("momentum")
    _single(operation, "BatchNormalization", epsilon=epsilon)


@exports("InstanceNorm")
def instance_normalization(operation: Operation) -> None:
    """InstanceNormalization."""
    _single(operation, "InstanceNormalization", epsilon=operation.number("epsilon", 1e-5))


@exports("LRN")
def local_response_normalization(operation: Operation) -> None:
    """LRN."""
    factors = {
        name: operation.number(name, default) for name, default in (("alpha", 0.0), ("beta", 0.0), ("bias", 1.0))
    }
    _single(operation, "LRN", size=operation.integer("size", 1), **factors)


@exports("ResizeNearest")
def resize_nearest(operation: Operation) -> None:
    """Resize, where output pixel i is input pixel floor(i / factor)."""
    if len(operation.inputs) > 1:
        raise CannotExportError("computed scales have no counterpart")
    factors = [1.0, 1.0, operation.number("height_scale", 1.0), operation.number("width_scale", 1.0)]
    scales = operation.constant(factors, "float32")

    def compute(inputs: list[str], output: str) -> None:
        operation.node(
            "Resize", [inputs[0], "", scales], [output], mode="nearest", nearest_mode="floor",
            coordinate_transformation_mode="asymmetric",
        )  # fmt: skip

    _on_nchw(operation, list(operation.inputs), compute)


def _single(operation: Operation, op_type: str, **attributes: Any) -> None:
    def compute(inputs: list[str], output: str) -> None:
        operation.node(op_type, inputs, [output], **attributes)

    _on_nchw(operation, list(operation.inputs), compute)


@exports("PRelu")
def prelu(operation: Operation) -> None:
    """PRelu; a slope a channel gets axes of size 1 behind it."""
    slope = operation.inputs[1]
    shape = operation.shape(1, _NEEDS_SIZES)
    if len(shape) == 1 and shape != (1,):
        spatial = operation.rank(0, _NEEDS_SIZES) - 2
        slope = operation.through("Reshape", [slope, operation.constant([-1, *[1] * spatial])])

    def compute(inputs: list[str], output: str) -> None:
        operation.node("PRelu", [inputs[0], slope], [output])

    _on_nchw(operation, [operation.inputs[0]], compute)
