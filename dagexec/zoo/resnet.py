"""ResNet-50: He et al. 2015, "Deep residual learning for image recognition", table 1.

The stride is in the 3x3 convolution of a block (the variant of Gross and Wilber, "v1.5"), as in most later releases.
"""

from __future__ import annotations

from dagexec.building.fillers import constant, gaussian, uniform
from dagexec.building.model_builder import ModelBuilder
from dagexec.zoo.architecture import Architecture, Images, stand_in

_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))  # width of the bottleneck, blocks
_EXPANSION = 4


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """A convolution and pooling, four stages of bottleneck blocks, global pooling and a classifier."""
    x = _conv_bn(builder, x, "conv1", images.channels, 64, kernel=7, stride=2, pad=3)
    x = builder.relu(x, x)
    x = builder.max_pool(x, "pool1", kernel=3, stride=2, pad=1)
    dim = 64
    for stage, (width, blocks) in enumerate(_STAGES, start=2):
        for block in range(blocks):
            stride = 2 if block == 0 and stage > 2 else 1
            x = _bottleneck(builder, x, f"res{stage}_{block}", dim, width, stride)
            dim = width * _EXPANSION
    x = builder.global_average_pool(x, "pool5")
    return builder.fc(x, "pred", dim, images.classes, weight_init=gaussian(0.003))


def _conv_bn(
    builder: ModelBuilder,
    x: str,
    name: str,
    dim_in: int,
    dim_out: int,
    *,
    kernel: int,
    stride: int = 1,
    pad: int = 0,
    last: bool = False,
) -> str:
    """Convolution and batch normalization. The last of a branch has a small scale, so that sums over blocks stay small.

    For training it starts at zero (Goyal et al. 2017, section 5.1), so that each block begins as the identity.
    """
    x = builder.conv(x, name, dim_in, dim_out, kernel=kernel, stride=stride, pad=pad, bias=False)
    last_scale = stand_in(builder, uniform(0.1, 0.5), constant(0))
    return builder.spatial_bn(x, f"{name}_bn", dim_out, scale_init=last_scale if last else None)


def _bottleneck(builder: ModelBuilder, x: str, name: str, dim_in: int, width: int, stride: int) -> str:
    dim_out = width * _EXPANSION
    branch = _conv_bn(builder, x, f"{name}_branch2a", dim_in, width, kernel=1)
    branch = builder.relu(branch, branch)
    branch = _conv_bn(builder, branch, f"{name}_branch2b", width, width, kernel=3, stride=stride, pad=1)
    branch = builder.relu(branch, branch)
    branch = _conv_bn(builder, branch, f"{name}_branch2c", width, dim_out, kernel=1, last=True)
    shortcut = x
    if dim_in != dim_out:
        shortcut = _conv_bn(builder, x, f"{name}_branch1", dim_in, dim_out, kernel=1, stride=stride)
    total = builder.sum([branch, shortcut], branch)
    return builder.relu(total, total)


RESNET50 = Architecture("resnet50", Images(3, 224, 1000), _layers, least_size=32)
"""ResNet-50; 25,557,032 trained parameters."""
