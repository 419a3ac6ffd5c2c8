"""ResNet-20 for small images: He et al. 2015, "Deep residual learning for image recognition", section 4.2.

Shortcuts have no parameters: where a stage halves the image, they take every other pixel and add channels of zeros
(option A of the paper).
"""

from __future__ import annotations

from dagexec.building.fillers import gaussian, uniform
from dagexec.building.model_builder import ModelBuilder
from dagexec.zoo.architecture import Architecture, Images, stand_in

_WIDTHS = (16, 32, 64)
_BLOCKS = 3  # in each stage: 6 * 3 + 2 layers


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """A convolution, three stages of three blocks of two convolutions, global pooling and a classifier."""
    dim = _WIDTHS[0]
    x = _conv_bn(builder, x, "conv1", images.channels, dim)
    x = builder.relu(x, x)
    for stage, width in enumerate(_WIDTHS, start=2):
        for block in range(_BLOCKS):
            x = _block(builder, x, f"res{stage}_{block}", dim, width, images)
            dim = width
    x = builder.global_average_pool(x, "pool")
    return builder.fc(x, "pred", dim, images.classes, weight_init=gaussian(0.1))


def _conv_bn(
    builder: ModelBuilder, x: str, name: str, dim_in: int, dim_out: int, *, stride: int = 1, last: bool = False
) -> str:
    """3x3 convolution and batch normalization."""
    x = builder.conv(x, name, dim_in, dim_out, kernel=3, stride=stride, pad=1, bias=False)
    last_scale = stand_in(builder, uniform(0.1, 0.5))
    return builder.spatial_bn(x, f"{name}_bn", dim_out, scale_init=last_scale if last else None)


def _block(builder: ModelBuilder, x: str, name: str, dim_in: int, width: int, images: Images) -> str:
    stride = width // dim_in
    branch = _conv_bn(builder, x, f"{name}_branch2a", dim_in, width, stride=stride)
    branch = builder.relu(branch, branch)
    branch = _conv_bn(builder, branch, f"{name}_branch2b", width, width, last=True)
    shortcut = x if stride == 1 else _halved(builder, x, f"{name}_branch1", dim_in, width, images)
    total = builder.sum([branch, shortcut], branch)
    return builder.relu(total, total)


def _halved(builder: ModelBuilder, x: str, name: str, dim_in: int, dim_out: int, images: Images) -> str:
    """Every other pixel of each row and column, with channels of zeros on both sides."""
    picked = builder.average_pool(x, f"{name}_picked", kernel=1, stride=2)
    before = (dim_out - dim_in) // 2
    pads = [*images.axes(0, before, 0, 0), *images.axes(0, dim_out - dim_in - before, 0, 0)]
    return builder.add_operator("Pad", [picked], [name], pads=pads)


RESNET20 = Architecture("resnet20", Images(3, 32, 10), _layers, least_size=4)
"""ResNet-20; 269,722 trained parameters."""
