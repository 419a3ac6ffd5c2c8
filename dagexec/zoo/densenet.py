"""DenseNet-121: Huang et al. 2017, "Densely connected convolutional networks", table 1, growth rate 32."""

from __future__ import annotations

from dagexec.building.fillers import gaussian
from dagexec.building.model_builder import ModelBuilder
from dagexec.zoo.architecture import Architecture, Images

_BLOCKS = (6, 12, 24, 16)
_GROWTH = 32
_BOTTLENECK = 4 * _GROWTH


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """Dense blocks with transitions between them, global pooling and a classifier."""
    x = builder.conv(x, "conv0", images.channels, 2 * _GROWTH, kernel=7, stride=2, pad=3, bias=False)
    x = _bn_relu(builder, x, "norm0", 2 * _GROWTH)
    x = builder.max_pool(x, "pool0", kernel=3, stride=2, pad=1)
    dim = 2 * _GROWTH
    for number, layers in enumerate(_BLOCKS, start=1):
        for layer in range(layers):
            x = _dense_layer(builder, x, f"block{number}/layer{layer}", dim)
            dim += _GROWTH
        if number < len(_BLOCKS):
            x = _transition(builder, x, f"transition{number}", dim)
            dim //= 2
    x = _bn_relu(builder, x, "norm5", dim)
    x = builder.global_average_pool(x, "pool5")
    return builder.fc(x, "pred", dim, images.classes, weight_init=gaussian(0.01))


def _bn_relu(builder: ModelBuilder, x: str, name: str, dim: int) -> str:
    x = builder.spatial_bn(x, name, dim)
    return builder.relu(x, x)


def _dense_layer(builder: ModelBuilder, x: str, name: str, dim: int) -> str:
    """BN, ReLU, 1x1 to four growths, BN, ReLU, 3x3 to one growth; its output joins its input."""
    inner = _bn_relu(builder, x, f"{name}/norm1", dim)
    inner = builder.conv(inner, f"{name}/conv1", dim, _BOTTLENECK, kernel=1, bias=False)
    inner = _bn_relu(builder, inner, f"{name}/norm2", _BOTTLENECK)
    inner = builder.conv(inner, f"{name}/conv2", _BOTTLENECK, _GROWTH, kernel=3, pad=1, bias=False)
    return builder.concat([x, inner], f"{name}/output")


def _transition(builder: ModelBuilder, x: str, name: str, dim: int) -> str:
    """BN, ReLU, 1x1 to half the channels, average over 2x2."""
    x = _bn_relu(builder, x, f"{name}/norm", dim)
    x = builder.conv(x, f"{name}/conv", dim, dim // 2, kernel=1, bias=False)
    return builder.average_pool(x, f"{name}/pool", kernel=2, stride=2)


DENSENET121 = Architecture("densenet121", Images(3, 224, 1000), _layers, least_size=32)
"""DenseNet-121; 7,978,856 trained parameters."""
