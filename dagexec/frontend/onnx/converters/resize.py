"""Converters of Resize and Upsample, whose attributes and inputs changed with most operator sets."""

from __future__ import annotations

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.node import CannotConvertError, OnnxNode, converts

Arguments = dict[str, ArgumentValue | None]


@converts(Upsample=10)
def upsample(node: OnnxNode) -> list[Node]:
    """Nearest or linear, at the places i / scale; scales are attributes before opset 9, an input from then on."""
    mode = node.text("mode", "nearest")
    if node.opset < 9:
        if node.opset < 7:
            scales: list[float] = [1.0, 1.0, node.number("height_scale", 1.0), node.number("width_scale", 1.0)]
        else:
            scales = list(node.numbers("scales") or [])
        inputs, factors = node.inputs[:1], Arguments(scales=scales)
    else:
        inputs, factors = _factors(node, 1, "scales")
    return _resized(node, inputs, factors, mode=_mode(mode), coordinates="asymmetric", rounding="floor")


@converts(Resize=19)
def resize(node: OnnxNode) -> list[Node]:
    """Before opset 11 as Upsample; then with places, region of interest, and sizes instead of scales."""
    mode = _mode(node.text("mode", "nearest"))
    if node.opset < 11:
        inputs, factors = _factors(node, 1, "scales")
        return _resized(node, inputs, factors, mode=mode, coordinates="asymmetric", rounding="floor")
    sized = node.has_input(3)
    inputs, factors = _factors(node, 3, "sizes") if sized else _factors(node, 2, "scales")
    coordinates = node.text("coordinate_transformation_mode", "half_pixel")
    if coordinates == "tf_crop_and_resize" and node.has_input(1):
        roi, region = _factors(node, 1, "roi")
        inputs, factors = (*inputs, *roi[1:]), factors | region
    return _resized(
        node,
        inputs,
        factors,
        mode=mode,
        coordinates=coordinates,
        rounding=node.text("nearest_mode", "round_prefer_floor"),
        axes=node.integers("axes"),
        cubic_a=node.number("cubic_coeff_a", -0.75),
        antialias=node.integer("antialias", 0),
        exclude_outside=node.integer("exclude_outside", 0),
        extrapolation_value=node.number("extrapolation_value", 0.0),
        keep_aspect_ratio_policy=node.text("keep_aspect_ratio_policy", "stretch"),
    )


def _mode(mode: str) -> str:
    modes = {"nearest": "nearest", "linear": "linear", "bilinear": "linear", "cubic": "cubic"}
    if mode not in modes:
        raise CannotConvertError(f"mode {mode!r} is not supported; expected one of {', '.join(modes)}")
    return modes[mode]


def _factors(node: OnnxNode, index: int, name: str) -> tuple[tuple[str, ...], Arguments]:
    """Input `index` as argument `name` where it is a constant; else as an input, with the argument that says so."""
    if not node.has_input(index):
        raise ModelFormatError(f"{node.label}: scales or sizes are required")
    if node.value(index) is None:
        return (node.inputs[0], node.inputs[index]), {f"{name}_input": 1}
    if name == "sizes":
        return node.inputs[:1], {name: node.constant_ints(index, name)}
    return node.inputs[:1], {name: [float(value) for value in node.constant(index, name).reshape(-1)]}


def _resized(
    node: OnnxNode, inputs: tuple[str, ...], factors: Arguments, **arguments: ArgumentValue | None
) -> list[Node]:
    """Resize; ResizeNearest, which nets of images know better, where it computes the same."""
    scales = factors.get("scales")
    if isinstance(scales, list) and _is_plain(scales, arguments):
        return node.unary("ResizeNearest", height_scale=scales[2], width_scale=scales[3])
    return [node.operator("Resize", list(inputs), node.only_output(), **factors, **arguments)]


def _is_plain(scales: list[float] | list[int] | list[str], arguments: Arguments) -> bool:
    """True for images whose output pixel i is floor(i / scale): other places agree with it for whole factors."""
    if arguments["mode"] != "nearest" or arguments.get("axes") or len(scales) != 4 or scales[:2] != [1.0, 1.0]:
        return False
    rule = (arguments["coordinates"], arguments["rounding"])
    if rule == ("asymmetric", "floor"):
        return True
    whole = all(float(scale) >= 1 and float(scale).is_integer() for scale in scales)
    return whole and rule[0] in ("half_pixel", "half_pixel_symmetric") and str(rule[1]).startswith("round_prefer")
