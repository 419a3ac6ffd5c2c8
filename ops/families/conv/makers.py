"""Gradient makers of convolutions, transposed and locally connected ones, Im2Col and Col2Im.

The gradient operators are in `gradient`, `transposed` and `locally_connected`.
"""

from __future__ import annotations

from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_by, gradient_of
from dagexec.ops.families.conv.convolution import SPATIAL_AXES
from dagexec.ops.families.conv.gradient_outputs import BIAS, FILTER, INPUT

_LAYERS = tuple(f"{kind}{suffix}" for kind in ("Conv", "ConvTranspose", "LC") for suffix in SPATIAL_AXES)


@gradient_of(*_LAYERS)
def layer_gradient(request: GradientRequest) -> GradientOperators:
    """(X, filter, dY) -> dfilter, dbias, dX, as far as they are wanted; `wanted` says which where it is no prefix."""
    names = {1: FILTER, 2: BIAS, 0: INPUT}
    if not request.has_x(2) or request.arguments.bool("no_bias"):
        del names[2]
    found = [index for index in names if index in request.wanted]
    if not found:
        return request.result([], {})
    arguments: dict[str, int | list[str]] = {} if 2 in names else {"no_bias": 1}
    least = len(names) - 1
    if found[:least] != list(names)[:least]:
        arguments["wanted"] = [names[index] for index in found]
    inputs = [request.x(0), request.x(1), request.dy(0)]
    return request.single(f"{request.definition.type}Gradient", inputs, found, **arguments)


gradient_by("Im2Col", "Col2Im", ("dY", "X"))


@gradient_of("Col2Im")
def col2im_gradient(request: GradientRequest) -> GradientOperators:
    """The columns of dY; the image, whose values are not read, has no gradient."""
    if 0 not in request.wanted:
        return request.result([], {})
    return request.single("Im2Col", [request.dy(0)], [0])
