"""Converters of sliding windows, and of softmax; `normalization`, `resize` and `image` have what else images need."""

from __future__ import annotations

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts

_LEGACY_VALID = 1
_SAME_UPPER = 4
_SAME_LOWER = 5

WindowArguments = dict[str, ArgumentValue | None]


def _padding(node: OnnxNode) -> WindowArguments:
    """`auto_pad` and `pads` as arguments. With `auto_pad`, pads are computed from the input's size."""
    auto_pad = node.text("auto_pad", "NOTSET")
    if auto_pad == "NOTSET":
        return {"pads": node.integers("pads")}
    if auto_pad == "VALID":
        return {"legacy_pad": _LEGACY_VALID}
    if auto_pad == "SAME_UPPER":
        return {"legacy_pad": _SAME_UPPER}
    if auto_pad == "SAME_LOWER":
        return {"legacy_pad": _SAME_LOWER}
    raise CannotConvertError(f"auto_pad {auto_pad!r} is unknown")


def window_arguments(node: OnnxNode, kernels: list[int]) -> WindowArguments:
    """The arguments of a sliding window: kernels, strides, dilations and padding."""
    return {
        "kernels": kernels,
        "strides": node.integers("strides"),
        "dilations": node.integers("dilations"),
        **_padding(node),
    }


@converts(Conv=22)
def convolution(node: OnnxNode) -> list[Node]:
    """Conv; a missing kernel_shape is taken from the filter's shape."""
    kernels = node.integers("kernel_shape")
    if kernels is None:
        kernels = list(node.full_shape(1, "it has no kernel_shape")[2:])
    inputs = [name for name in node.inputs if name]
    window = window_arguments(node, kernels)
    return [node.operator("Conv", inputs, node.only_output(), group=node.integer("group", 1), **window)]


@converts(ConvTranspose=22)
def transposed_convolution(node: OnnxNode) -> list[Node]:
    """ConvTranspose; with output_shape, the pads are found from it. A missing kernel_shape is taken from the filter."""
    kernels = node.integers("kernel_shape")
    if kernels is None:
        kernels = list(node.full_shape(1, "it has no kernel_shape")[2:])
    window = window_arguments(node, kernels)
    sizes = node.integers("output_shape")
    if sizes:
        rank = len(kernels)
        if len(sizes) not in (rank, rank + 2):
            raise CannotConvertError(f"output_shape {sizes} must have {rank} sizes, or {rank + 2} with N and C")
        window["output_sizes"] = sizes[-rank:]
        window["pads"] = None
    window["adjs"] = node.integers("output_padding")
    inputs = [name for name in node.inputs if name]
    return [node.operator("ConvTranspose", inputs, node.only_output(), group=node.integer("group", 1), **window)]


@converts(MaxPool=22)
def max_pool(node: OnnxNode) -> list[Node]:
    """MaxPool, with the indices where someone uses them."""
    window = window_arguments(node, node.integers("kernel_shape") or [])
    window["ceil_mode"] = node.integer("ceil_mode", 0)
    storage_order = node.integer("storage_order", 0)  # of the indices
    if not node.is_read(1):
        return node.unary("MaxPool", **window)
    inputs, outputs = [node.inputs[0]], [node.outputs[0] or node.new_name("maximum"), node.outputs[1]]
    return [node.operator("MaxPoolWithIndex", inputs, outputs, flat_indices=1, storage_order=storage_order, **window)]


@converts(LpPool=22)
def lp_pool(node: OnnxNode) -> list[Node]:
    """LpPool; the exponent is a float in opset 1 and an integer from opset 2 on."""
    window = window_arguments(node, node.integers("kernel_shape") or [])
    return node.unary("LpPool", p=_exponent(node), ceil_mode=node.integer("ceil_mode", 0), **window)


@converts(GlobalLpPool=22)
def global_lp_pool(node: OnnxNode) -> list[Node]:
    """The p-norm of each channel."""
    return node.unary("LpPool", p=_exponent(node), global_pooling=1)


def _exponent(node: OnnxNode) -> float:
    return node.number("p", 2.0) if node.opset < 2 else float(node.integer("p", 2))


@converts(AveragePool=22)
def average_pool(node: OnnxNode) -> list[Node]:
    """AveragePool; padding counts only when the model says so."""
    window = window_arguments(node, node.integers("kernel_shape") or [])
    return node.unary(
        "AveragePool",
        ceil_mode=node.integer("ceil_mode", 0),
        count_include_pad=node.integer("count_include_pad", 0),
        **window,
    )


@converts(Softmax=13, LogSoftmax=13)
def softmax(node: OnnxNode) -> list[Node]:
    """Over one axis from opset 13 on; before that over all axes from `axis` on, as Caffe2 does."""
    if node.opset >= 13:
        return node.unary(node.op_type, axis=node.integer("axis", -1), single_axis=1)
    return node.unary(node.op_type, axis=node.integer("axis", 1))
