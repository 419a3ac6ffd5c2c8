"""GoogLeNet (Inception v1): Szegedy et al. 2014, "Going deeper with convolutions", table 1, without the auxiliaries."""

from __future__ import annotations

from dagexec.building.fillers import gaussian
from dagexec.building.model_builder import ModelBuilder
from dagexec.platform.records import dataclass
from dagexec.zoo.architecture import Architecture, Images


@dataclass(frozen=True)
class _Inception:
    """A row of table 1: output channels of the four branches, `reduce*` of their 1x1 reductions."""

    name: str
    conv1: int
    reduce3: int
    conv3: int
    reduce5: int
    conv5: int
    pool: int

    @property
    def dim_out(self) -> int:
        """Channels of the joined branches."""
        return self.conv1 + self.conv3 + self.conv5 + self.pool


_STAGES = (
    (_Inception("3a", 64, 96, 128, 16, 32, 32), _Inception("3b", 128, 128, 192, 32, 96, 64)),
    (
        _Inception("4a", 192, 96, 208, 16, 48, 64),
        _Inception("4b", 160, 112, 224, 24, 64, 64),
        _Inception("4c", 128, 128, 256, 24, 64, 64),
        _Inception("4d", 112, 144, 288, 32, 64, 64),
        _Inception("4e", 256, 160, 320, 32, 128, 128),
    ),
    (_Inception("5a", 256, 160, 320, 32, 128, 128), _Inception("5b", 384, 192, 384, 48, 128, 128)),
)


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """Convolutions, nine inception blocks with pooling between them, global pooling, dropout and a classifier."""
    x = _conv_relu(builder, x, "conv1", images.channels, 64, kernel=7, stride=2)
    x = builder.max_pool(x, "pool1", kernel=3, stride=2, ceil_mode=True)
    x = builder.lrn(x, "norm1")
    x = _conv_relu(builder, x, "conv2_reduce", 64, 64, kernel=1)
    x = _conv_relu(builder, x, "conv2", 64, 192, kernel=3)
    x = builder.lrn(x, "norm2")
    x = builder.max_pool(x, "pool2", kernel=3, stride=2, ceil_mode=True)
    dim = 192
    for number, stage in enumerate(_STAGES, start=3):
        for block in stage:
            x = _inception(builder, x, dim, block)
            dim = block.dim_out
        if number < 5:
            x = builder.max_pool(x, f"pool{number}", kernel=3, stride=2, ceil_mode=True)
    x = builder.global_average_pool(x, "pool5")
    x = builder.dropout(x, "drop", ratio=0.4)
    return builder.fc(x, "pred", dim, images.classes, weight_init=gaussian(0.015))


def _conv_relu(
    builder: ModelBuilder, x: str, name: str, dim_in: int, dim_out: int, *, kernel: int, stride: int = 1
) -> str:
    x = builder.conv(x, name, dim_in, dim_out, kernel=kernel, stride=stride, pad=kernel // 2)
    return builder.relu(x, x)


def _inception(builder: ModelBuilder, x: str, dim_in: int, block: _Inception) -> str:
    name = f"inception_{block.name}"
    one = _conv_relu(builder, x, f"{name}/1x1", dim_in, block.conv1, kernel=1)
    three = _conv_relu(builder, x, f"{name}/3x3_reduce", dim_in, block.reduce3, kernel=1)
    three = _conv_relu(builder, three, f"{name}/3x3", block.reduce3, block.conv3, kernel=3)
    five = _conv_relu(builder, x, f"{name}/5x5_reduce", dim_in, block.reduce5, kernel=1)
    five = _conv_relu(builder, five, f"{name}/5x5", block.reduce5, block.conv5, kernel=5)
    pool = builder.max_pool(x, f"{name}/pool", kernel=3, pad=1)
    pool = _conv_relu(builder, pool, f"{name}/pool_proj", dim_in, block.pool, kernel=1)
    return builder.concat([one, three, five, pool], f"{name}/output")


GOOGLENET = Architecture("googlenet", Images(3, 224, 1000), _layers, least_size=47)
"""GoogLeNet; 6,998,552 parameters."""
