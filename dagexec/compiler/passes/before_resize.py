"""before-resize: convolutions of one tap go from behind an enlarged image to before it, where there are fewer pixels.

Interpolation mixes pixels and such a convolution mixes channels, both linearly, so that their order is free; and one
on joined channels is a sum over the parts that are joined:

    W Concat(Resize(a), Resize(b), c) = Resize(W_a a) + Resize(W_b b) + W_c c

Heads of segmentation and pyramids of features join images of several sizes so. The bias is added with what is not
resized, or with the first part: the weights of an interpolation have the sum 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.linear_layer import LinearLayer, read_layer
from dagexec.compiler.passes.operator_traits import of_type
from dagexec.compiler.passes.post_operations import Types
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node, new_node
from dagexec.platform.records import dataclass

_RESIZED, _ADDED = 30, 10  # products in the time of a number that is interpolated, and of one that is added

_BY_FACTORS = ("ResizeNearest", "UpsampleBilinear")
_is_resizing = of_type("Resize", *_BY_FACTORS)
_is_convolution = of_type("Conv")


@dataclass(frozen=True)
class _Part:
    """Channels that a convolution reads.

    Attributes:
        name: the blob that has them.
        weights: the columns of the filter that they are multiplied by.
        resize: the operator that writes the blob, and that the convolution goes before; None where it stays behind.
    """

    name: str
    weights: np.ndarray
    resize: int | None


def edit(draft: Draft) -> None:
    """Look before each convolution."""
    for number in draft.having(_is_convolution):
        layer = read_layer(draft, number)
        if layer is not None and _has_one_tap(draft, layer):
            parts = _parts(draft, layer, draft.types())
            if any(part.resize is not None for part in parts):
                _rewrite(draft, number, parts)


def _has_one_tap(draft: Draft, layer: LinearLayer) -> bool:
    """True for a convolution in NCHW that computes each pixel from all channels of that one."""
    arguments = draft.arguments(layer.number)
    strides = {1, *arguments.ints("strides"), *(arguments.int(f"stride{axis}", 1) for axis in ("", "_h", "_w"))}
    plain = layer.group == 1 and layer.inner_axis == 1 and not layer.is_padded
    return plain and math.prod(layer.weights.shape[2:]) == 1 and strides == {1}


def _parts(draft: Draft, layer: LinearLayer, types: Types) -> list[_Part]:
    """What the convolution reads: of a Concat that nobody else reads, its inputs."""
    source = draft[layer.number].input[0]
    names, concat = [source], draft.producer(source)
    if concat is not None and draft.only_reader(source) == layer.number and _joins_channels(draft, concat):
        names = list(draft[concat].input)
    parts, first = [], 0
    for name in names:
        kind = types.get(name)
        channels = None if kind is None or kind.rank < 2 else kind.shape[1]
        if channels is None:
            return []
        weights = layer.weights[:, first : first + channels]
        parts.append(_Part(name, weights, _resize_before(draft, name, weights, types, is_alone=len(names) == 1)))
        first += channels
    return parts


def _joins_channels(draft: Draft, number: int) -> bool:
    definition, arguments = draft[number], draft.arguments(number)
    if definition.type != "Concat" or len(definition.output) > 1 or arguments.int("add_axis", 0):
        return False
    return arguments.string("order", "NCHW").upper() == "NCHW" and arguments.int("axis", 1) == 1


def _resize_before(draft: Draft, name: str, weights: np.ndarray, types: Types, *, is_alone: bool) -> int | None:
    """The operator that enlarges an image to `name`, if products by `weights` take less time before it."""
    number = draft.producer(name)
    if number is None or draft.only_reader(name) is None or not _changes_pixels_alone(draft, number, types):
        return None
    small, large = types[draft[number].input[0]], types[name]
    filters, channels = weights.shape[:2]
    lost = _RESIZED * (filters - channels) + (0 if is_alone else _ADDED * filters)
    share = max(
        math.prod(one[2:]) / max(1, math.prod(other[2:])) for one, other in zip(small.shapes, large.shapes, strict=True)
    )
    return number if share < 1 and filters * channels * (1 - share) > lost else None


def _changes_pixels_alone(draft: Draft, number: int, types: Types) -> bool:
    """True for a resizing of images in NCHW, of whose arguments those for images and channels can be left out."""
    definition, arguments = draft[number], draft.arguments(number)
    small, large = types.get(definition.input[0]), types.get(definition.output[0])
    if definition.type in _BY_FACTORS:
        return small is not None and large is not None and arguments.string("order", "NCHW").upper() == "NCHW"
    if definition.type != "Resize" or small is None or large is None or small.rank < 3:
        return False
    if len(definition.input) > 1 or arguments.string("coordinates", "half_pixel") == "tf_crop_and_resize":
        return False
    if arguments.string("keep_aspect_ratio_policy", "stretch") != "stretch":
        return False
    axes = [axis % small.rank for axis in arguments.ints("axes")] or list(range(small.rank))
    factors = arguments.floats("scales") or [1.0] * len(axes)
    same = all(one[:2] == other[:2] for one, other in zip(small.shapes, large.shapes, strict=True))
    return same and all(factor == 1 for axis, factor in zip(axes, factors, strict=True) if axis < 2)


def _rewrite(draft: Draft, number: int, parts: Sequence[_Part]) -> None:
    definition = draft[number]
    resized = [(part, part.resize) for part in parts if part.resize is not None]
    rest = [part for part in parts if part.resize is None]
    concat = draft.producer(definition.input[0]) if len(parts) > 1 else None
    bias = list(definition.input[2:])
    added: list[Node] = []
    terms: list[str] = []

    def convolve(source: str, weights: np.ndarray, hint: str) -> str:
        filters = draft.add_parameter(definition.input[1], weights)
        result = draft.fresh(hint)
        added.append(definition.changed(inputs=[source, filters, *bias], outputs=[result]))
        bias.clear()
        return result

    if rest:
        source = rest[0].name
        if len(rest) > 1:
            source = draft.fresh(f"{definition.input[0]}/rest")
            added.append(new_node("Concat", [part.name for part in rest], [source], axis=1))
        weights = np.concatenate([part.weights for part in rest], axis=1)
        terms.append(convolve(source, weights, f"{definition.output[0]}/rest"))
    for part, resize in resized:
        enlarging = draft[resize]
        few = convolve(enlarging.input[0], part.weights, f"{enlarging.input[0]}/mixed")
        terms.append(draft.fresh(f"{part.name}/mixed"))
        inputs, arguments = [few, *enlarging.input[1:]], _of_pixels(draft, resize)
        added.append(enlarging.changed(inputs=inputs, outputs=[terms[-1]], arguments=arguments))
    if len(terms) == 1:
        added[-1] = added[-1].changed(outputs=definition.output)
    else:
        added.append(new_node("Sum", terms, definition.output))
    behind = ", ".join(draft.label(resize) for _, resize in resized)
    draft.changed(f"{draft.label(number)} is done before {behind}")
    for gone in (*(resize for _, resize in resized), *(() if concat is None else (concat,))):
        draft.remove(gone)
    draft.replace(number, *added)


def _of_pixels(draft: Draft, number: int) -> dict[str, ArgumentValue | None]:
    """The arguments of resizing `number` that change where they are to say nothing of images and channels."""
    if draft[number].type in _BY_FACTORS:
        return {}
    arguments = draft.arguments(number)
    count = max(len(arguments.ints("sizes")), len(arguments.floats("scales")))
    axes = arguments.ints("axes") or list(range(count))
    kept = [place for place, axis in enumerate(axes) if not 0 <= axis < 2]
    changed: dict[str, ArgumentValue | None] = {"axes": [axes[place] for place in kept]}
    if "sizes" in arguments:
        changed["sizes"] = [arguments.ints("sizes")[place] for place in kept]
    else:
        changed["scales"] = [arguments.floats("scales")[place] for place in kept]
    return changed


PASS = Pass(
    "before-resize",
    "Convolutions of one tap on enlarged images are done before these are enlarged.",
    edit,
    needs=(_is_resizing, _is_convolution),
)
