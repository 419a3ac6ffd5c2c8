"""Inception v3: Szegedy et al. 2015, "Rethinking the Inception architecture for computer vision", table 1.

Channels of the inner branches, which the paper leaves open, are those of the authors' release, without the auxiliary
classifier. Every convolution is followed by batch normalization and ReLU.
"""

from __future__ import annotations

from dagexec.building.fillers import gaussian
from dagexec.building.model_builder import ModelBuilder, Pair
from dagexec.zoo.architecture import Architecture, Images


def _layers(builder: ModelBuilder, x: str, images: Images) -> str:
    """Convolutions, three kinds of blocks with reductions between them, global pooling, dropout and a classifier."""
    net = _Network(builder)
    x = net.conv(x, "conv1", images.channels, 32, kernel=3, stride=2)
    x = net.conv(x, "conv2", 32, 32, kernel=3)
    x = net.conv(x, "conv3", 32, 64, kernel=3, pad=1)
    x = builder.max_pool(x, "pool1", kernel=3, stride=2)
    x = net.conv(x, "conv4", 64, 80, kernel=1)
    x = net.conv(x, "conv5", 80, 192, kernel=3)
    x = builder.max_pool(x, "pool2", kernel=3, stride=2)
    for name, dim, pool in (("mixed_a0", 192, 32), ("mixed_a1", 256, 64), ("mixed_a2", 288, 64)):
        x = net.five_by_five_block(x, name, dim, pool)
    x = net.first_reduction(x, "reduction_a", 288)
    for name, width in (("mixed_b0", 128), ("mixed_b1", 160), ("mixed_b2", 160), ("mixed_b3", 192)):
        x = net.factorized_block(x, name, 768, width)
    x = net.second_reduction(x, "reduction_b", 768)
    for name, dim in (("mixed_c0", 1280), ("mixed_c1", 2048)):
        x = net.expanded_block(x, name, dim)
    x = builder.global_average_pool(x, "pool3")
    x = builder.dropout(x, "drop", ratio=0.5)
    return builder.fc(x, "pred", 2048, images.classes, weight_init=gaussian(0.002))


class _Network:
    """The layers and blocks of the paper, added to a model builder."""

    def __init__(self, builder: ModelBuilder) -> None:
        self.builder = builder

    def conv(
        self, x: str, name: str, dim_in: int, dim_out: int, *, kernel: Pair, stride: int = 1, pad: Pair = 0
    ) -> str:
        """Convolution, batch normalization, ReLU."""
        x = self.builder.conv(x, name, dim_in, dim_out, kernel=kernel, stride=stride, pad=pad, bias=False)
        x = self.builder.spatial_bn(x, f"{name}_bn", dim_out, epsilon=1e-3)
        return self.builder.relu(x, x)

    def five_by_five_block(self, x: str, name: str, dim: int, pool: int) -> str:
        """On 35x35: 1x1, 5x5, two 3x3, and pooling (figure 5)."""
        one = self.conv(x, f"{name}/1x1", dim, 64, kernel=1)
        five = self.conv(x, f"{name}/5x5_reduce", dim, 48, kernel=1)
        five = self.conv(five, f"{name}/5x5", 48, 64, kernel=5, pad=2)
        double = self._double_three(x, name, dim, stride=1, pad=1)
        return self.builder.concat([one, five, double, self._pool_branch(x, name, dim, pool)], f"{name}/output")

    def first_reduction(self, x: str, name: str, dim: int) -> str:
        """35x35 to 17x17 (figure 10)."""
        three = self.conv(x, f"{name}/3x3", dim, 384, kernel=3, stride=2)
        double = self._double_three(x, name, dim, stride=2, pad=0)
        return self.builder.concat([three, double, self._pool(x, name)], f"{name}/output")

    def factorized_block(self, x: str, name: str, dim: int, width: int) -> str:
        """On 17x17: 7x7 as 1x7 and 7x1, once and twice (figure 6)."""
        one = self.conv(x, f"{name}/1x1", dim, 192, kernel=1)
        seven = self.conv(x, f"{name}/7x7_reduce", dim, width, kernel=1)
        seven = self._row(seven, f"{name}/7x7_row", width, width)
        seven = self._column(seven, f"{name}/7x7_column", width, 192)
        double = self.conv(x, f"{name}/double_reduce", dim, width, kernel=1)
        double = self._column(double, f"{name}/double_column1", width, width)
        double = self._row(double, f"{name}/double_row1", width, width)
        double = self._column(double, f"{name}/double_column2", width, width)
        double = self._row(double, f"{name}/double_row2", width, 192)
        return self.builder.concat([one, seven, double, self._pool_branch(x, name, dim, 192)], f"{name}/output")

    def second_reduction(self, x: str, name: str, dim: int) -> str:
        """17x17 to 8x8."""
        three = self.conv(x, f"{name}/3x3_reduce", dim, 192, kernel=1)
        three = self.conv(three, f"{name}/3x3", 192, 320, kernel=3, stride=2)
        seven = self.conv(x, f"{name}/7x7_reduce", dim, 192, kernel=1)
        seven = self._row(seven, f"{name}/7x7_row", 192, 192)
        seven = self._column(seven, f"{name}/7x7_column", 192, 192)
        seven = self.conv(seven, f"{name}/7x7_last", 192, 192, kernel=3, stride=2)
        return self.builder.concat([three, seven, self._pool(x, name)], f"{name}/output")

    def expanded_block(self, x: str, name: str, dim: int) -> str:
        """On 8x8: 3x3 as 1x3 beside 3x1, each with an output of its own (figure 7)."""
        one = self.conv(x, f"{name}/1x1", dim, 320, kernel=1)
        three = self.conv(x, f"{name}/3x3_reduce", dim, 384, kernel=1)
        double = self.conv(x, f"{name}/double_reduce", dim, 448, kernel=1)
        double = self.conv(double, f"{name}/double_3x3", 448, 384, kernel=3, pad=1)
        sides = [
            self.conv(source, f"{name}/{branch}_{side}", 384, 384, kernel=kernel, pad=pad)
            for branch, source in (("3x3", three), ("double", double))
            for side, kernel, pad in (("row", (1, 3), (0, 1)), ("column", (3, 1), (1, 0)))
        ]
        return self.builder.concat([one, *sides, self._pool_branch(x, name, dim, 192)], f"{name}/output")

    def _double_three(self, x: str, name: str, dim: int, *, stride: int, pad: int) -> str:
        x = self.conv(x, f"{name}/double_reduce", dim, 64, kernel=1)
        x = self.conv(x, f"{name}/double_3x3a", 64, 96, kernel=3, pad=1)
        return self.conv(x, f"{name}/double_3x3b", 96, 96, kernel=3, stride=stride, pad=pad)

    def _row(self, x: str, name: str, dim_in: int, dim_out: int) -> str:
        return self.conv(x, name, dim_in, dim_out, kernel=(1, 7), pad=(0, 3))

    def _column(self, x: str, name: str, dim_in: int, dim_out: int) -> str:
        return self.conv(x, name, dim_in, dim_out, kernel=(7, 1), pad=(3, 0))

    def _pool(self, x: str, name: str) -> str:
        return self.builder.max_pool(x, f"{name}/pool", kernel=3, stride=2)

    def _pool_branch(self, x: str, name: str, dim: int, dim_out: int) -> str:
        pooled = self.builder.average_pool(x, f"{name}/pool", kernel=3, pad=1)
        return self.conv(pooled, f"{name}/pool_proj", dim, dim_out, kernel=1)


INCEPTION_V3 = Architecture("inception_v3", Images(3, 299, 1000), _layers, least_size=75)
"""Inception v3; 23,834,568 trained parameters."""
