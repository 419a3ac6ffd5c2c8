"""MobileNetV2: Sandler et al. 2018, "Inverted residuals and linear bottlenecks", table 2, width 1.0."""

from __future__ import annotations

from dagexec.building.fillers import gaussian, lecun_normal
from dagexec.building.model_builder import ModelBuilder
from dagexec.zoo.architecture import Architecture, Images

_ROWS = (  # expansion t, channels c, repeats n, stride s
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_LAST = 1280


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """A convolution, inverted residuals, a wide 1x1 convolution, global pooling, dropout and a classifier."""
    x = _conv_bn_relu6(builder, x, "conv1", images.channels, 32, kernel=3, stride=2)
    dim, number = 32, 0
    for expansion, channels, repeats, first_stride in _ROWS:
        for repeat in range(repeats):
            stride = first_stride if repeat == 0 else 1
            x = _inverted_residual(builder, x, f"block{number}", dim, channels, expansion, stride)
            dim, number = channels, number + 1
    x = _conv_bn_relu6(builder, x, "conv_last", dim, _LAST, kernel=1)
    x = builder.global_average_pool(x, "pool")
    x = builder.dropout(x, "drop", ratio=0.2)
    return builder.fc(x, "pred", _LAST, images.classes, weight_init=gaussian(0.03))


def _conv_bn_relu6(
    builder: ModelBuilder, x: str, name: str, dim_in: int, dim_out: int, *, kernel: int, stride: int = 1, group: int = 1
) -> str:
    x = builder.conv(x, name, dim_in, dim_out, kernel=kernel, stride=stride, pad=kernel // 2, group=group, bias=False)
    x = builder.spatial_bn(x, f"{name}_bn", dim_out)
    return builder.clip(x, x, 0.0, 6.0)


def _inverted_residual(
    builder: ModelBuilder, x: str, name: str, dim_in: int, dim_out: int, expansion: int, stride: int
) -> str:
    """Expand by 1x1, filter depthwise by 3x3, project by a linear 1x1; added to the input where sizes agree."""
    hidden = dim_in * expansion
    inner = _conv_bn_relu6(builder, x, f"{name}/expand", dim_in, hidden, kernel=1) if expansion != 1 else x
    inner = _conv_bn_relu6(builder, inner, f"{name}/depthwise", hidden, hidden, kernel=3, stride=stride, group=hidden)
    inner = builder.conv(
        inner, f"{name}/project", hidden, dim_out, kernel=1, bias=False, weight_init=lecun_normal(hidden)
    )
    inner = builder.spatial_bn(inner, f"{name}/project_bn", dim_out)
    return builder.sum([inner, x], inner) if stride == 1 and dim_in == dim_out else inner


MOBILENET_V2 = Architecture("mobilenet_v2", Images(3, 224, 1000), _layers, least_size=32)
"""MobileNetV2; 3,504,872 trained parameters."""
