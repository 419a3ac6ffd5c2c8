"""Converters of operators on images and on regions of them, and of deformable and transposed windows."""

from __future__ import annotations

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts


def _named(node: OnnxNode, name: str, default: str, meanings: dict[str, str]) -> str:
    value = node.text(name, default)
    if value not in meanings:
        raise CannotConvertError(f"its attribute {name} = {value!r:.80} is not supported")
    return meanings[value]


@converts(GridSample=22)
def grid_sample(node: OnnxNode) -> list[Node]:
    """Before opset 20 the modes have the names of two dimensions."""
    modes = {name: name for name in ("linear", "nearest", "cubic")} | {"bilinear": "linear", "bicubic": "cubic"}
    return [
        node.operator(
            "GridSample",
            node.inputs,
            node.only_output(),
            mode=_named(node, "mode", "linear", modes),
            padding_mode=node.text("padding_mode", "zeros"),
            align_corners=node.integer("align_corners", 0),
        )
    ]


@converts(RoiAlign=22)
def roi_align(node: OnnxNode) -> list[Node]:
    """Before opset 16 the center of the first pixel is 0."""
    default = "half_pixel" if node.opset >= 16 else "output_half_pixel"
    places = {"half_pixel": "1", "output_half_pixel": "0"}
    aligned = int(_named(node, "coordinate_transformation_mode", default, places))
    arguments: dict[str, ArgumentValue | None] = {
        "output_height": node.integer("output_height", 1),
        "output_width": node.integer("output_width", 1),
        "sampling_ratio": node.integer("sampling_ratio", 0),
        "spatial_scale": node.number("spatial_scale", 1.0),
        "mode": node.text("mode", "avg"),
    }
    return [node.operator("RoiAlign", node.inputs, node.only_output(), aligned=aligned, **arguments)]


@converts(NonMaxSuppression=11)
def non_max_suppression(node: OnnxNode) -> list[Node]:
    """Selection with the limits that are given."""
    limits = {"max_output_input": 2, "iou_input": 3, "score_input": 4}
    flags: dict[str, ArgumentValue | None] = {name: int(node.has_input(index)) for name, index in limits.items()}
    inputs = [name for name in node.inputs if name]
    center = node.integer("center_point_box", 0)
    return [node.operator("NonMaxSuppression", inputs, node.only_output(), center_point_box=center, **flags)]


def _windows(node: OnnxNode) -> dict[str, ArgumentValue | None]:
    return {name: node.integers(name) for name in ("strides", "dilations", "pads")}


@converts(Col2Im=18)
def columns_to_image(node: OnnxNode) -> list[Node]:
    """Columns added up in an image of any number of axes."""
    return [node.operator("ColumnsToImage", node.inputs, node.only_output(), **_windows(node))]


@converts(DeformConv=22)
def deform_conv(node: OnnxNode) -> list[Node]:
    """The kernel's shape is the filter's."""
    node.ignore("kernel_shape")
    return [
        node.operator(
            "DeformConv",
            [name for name in node.inputs if name],
            node.only_output(),
            group=node.integer("group", 1),
            offset_group=node.integer("offset_group", 1),
            bias=int(node.has_input(3)),
            mask=int(node.has_input(4)),
            **_windows(node),
        )
    ]
