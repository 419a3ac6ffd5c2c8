"""A convolution cut into tiles and blocks for Winograd's algorithm (`winograd`): sizes, memory, and an estimate."""

from __future__ import annotations

from dataclasses import replace

from dagexec.ops.families.conv.toom_cook import MinimalFilter, minimal_filter
from dagexec.ops.kernels.post_ops import PostOp
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.ops.kernels.winograd_kernels import Epilogue
from dagexec.platform.cached import cached_property
from dagexec.platform.processor import core_cache
from dagexec.platform.records import dataclass

TAPS = 3
OUTPUTS = (2, 4)
"""The sizes m of a tile's result."""

_FLOAT = 4  # bytes
_BLOCK = 2  # times a core's cache: v and z of a block
_PRODUCTS, _TRANSFORMED, _STREAM = 5e10, 2.2e10, 2.5e10  # a second: products, bytes of v and z, bytes of weights
_START = 3e-6  # seconds: to start the steps of a block
_BLOCKS = 4  # of an image: that many are pieces


@dataclass(frozen=True)
class Layer:
    """A convolution that can be computed so.

    Attributes:
        batch, height, width, channels: N, H, W, C of the image.
        filters: M.
        groups: G, of the filter.
        heads: rows and columns of zeros before the image.
        result: H and W of the result.
        finish: bias and post-ops.
        other: the argument that is added to the result, 0 for none; DST for what it held before.
        later: post-ops behind those of `finish`, done to each row of tiles that was written.
        lanes: of the vectors that do them.
    """

    batch: int
    height: int
    width: int
    channels: int
    filters: int
    groups: int
    heads: tuple[int, int]
    result: tuple[int, int]
    finish: Epilogue
    other: int = 0
    later: tuple[PostOp, ...] = ()
    lanes: int = 8


@dataclass(frozen=True)
class Tiling:
    """A layer in tiles of m x m results."""

    layer: Layer
    outputs: int

    @property
    def filter(self) -> MinimalFilter:
        """F(m, 3)."""
        return minimal_filter(self.outputs, TAPS)

    @property
    def places(self) -> int:
        """t x t."""
        return self.filter.tile**2

    @property
    def columns(self) -> int:
        """Tiles in a row of tiles."""
        return -(-self.layer.result[1] // self.outputs)

    @property
    def image_rows(self) -> int:
        return -(-self.layer.result[0] // self.outputs)

    @cached_property
    def rows(self) -> int:
        """Rows of tiles in all images."""
        return self.layer.batch * self.image_rows

    @cached_property
    def block_rows(self) -> int:
        """Rows of tiles that are computed together: as many as stay in the cache of a core, or more.

        More where reading the weights would take longer than the rest. The last block may have fewer rows.
        """
        row = self.columns * self.places * (self.layer.channels + self.layer.filters) * _FLOAT
        most = max(1, _BLOCK * core_cache() // row, -(-self._weights_nbytes // (2 * row)))
        most = min(most, self.rows)
        return min(range(-(-most // 2), most + 1), key=lambda size: (-(-self.rows // size) * size, -size))

    @cached_property
    def blocks(self) -> list[range]:
        """The rows of tiles of each block."""
        size = self.block_rows
        return [range(start, min(start + size, self.rows)) for start in range(0, self.rows, size)]

    @cached_property
    def cut(self) -> int:
        """In how many products, of so many fewer places, that of a block is cut: where an image has few blocks.

        All pieces of a block wait for each other, so that those of one block are to be worth it.
        """
        image = self if self.layer.batch == 1 else Tiling(replace(self.layer, batch=1), self.outputs)
        if len(image.blocks) >= _BLOCKS:
            return 1
        most = pieces_of(image._products_seconds / len(image.blocks), MOST_OF_ONE)
        return max(count for count in range(1, most + 1) if self.places % count == 0)

    @property
    def places_apart(self) -> int:
        """Of one of the products."""
        return self.places // self.cut

    @property
    def _weights_nbytes(self) -> int:
        return self.places * self.layer.channels * self.layer.filters // self.layer.groups * _FLOAT

    @property
    def memory(self) -> tuple[int, ...]:
        """Bytes of v, of z, and of each strip, for one block."""
        layer, tiles = self.layer, self.block_rows * self.columns
        read = (self.columns * self.outputs + TAPS - 1) * layer.channels
        strip = self.filter.tile * max(read, self.columns * self.outputs * layer.filters) * _FLOAT
        images = (tiles * self.places * channels * _FLOAT for channels in (layer.channels, layer.filters))
        shared = pieces_of(self._transforms_seconds / (2 * len(self.blocks)), MOST_OF_ONE)
        strips = 1 if self.cut == 1 else min(self.block_rows, max(2, shared))
        return *images, *[strip] * strips

    def seconds(self, cold: bool) -> float:
        """An estimate of what a run takes on one core; with `cold` weights they are read from memory."""
        read = self._weights_nbytes / _STREAM if cold else 0.0
        return self._products_seconds + self._transforms_seconds + read + len(self.blocks) * _START

    @property
    def _tiles_of_blocks(self) -> int:
        return len(self.blocks) * self.block_rows * self.columns

    @property
    def _products_seconds(self) -> float:
        layer = self.layer
        return self._tiles_of_blocks * self.places * layer.channels * layer.filters / layer.groups / _PRODUCTS

    @property
    def _transforms_seconds(self) -> float:
        channels = self.layer.channels + self.layer.filters
        return self._tiles_of_blocks * self.places * channels * _FLOAT / _TRANSFORMED
