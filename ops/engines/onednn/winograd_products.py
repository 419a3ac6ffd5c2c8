"""Tables of kernel calls for the products of Winograd's algorithm (`winograd`): one at every place of a tile and group.

Tiles are rows of a product. v and z have the places of a tile one after another, of those that one piece computes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dagexec.ops.engines.onednn.descriptors import Array, aligned_empty
from dagexec.ops.engines.onednn.panel_rows import Panels, Rows, panels_of_rows
from dagexec.ops.engines.onednn.winograd_tiling import Tiling
from dagexec.platform.addresses import address_of

_FLOAT = 4  # bytes


class Products:
    """Writes tables of calls for blocks of tiles; the fields that they point at live as long as this.

    Attributes:
        nbytes: of all tables and fields.
    """

    def __init__(self, tiling: Tiling, lanes: int, v: Array, z: Array, weights: Array) -> None:
        self._tiling, self._lanes = tiling, lanes
        self._v, self._z, self._weights = map(address_of, (v, z, weights))
        self._bias = _zeros()
        self._kept: list[list[Panels]] = []
        self.nbytes = 0

    def tables(self, rows: int) -> list[Array]:
        """The calls of each piece, [calls, 5], for a block of so many rows of tiles; the same for all such blocks."""
        tiles = rows * self._tiling.columns
        tiling, layer, apart = self._tiling, self._tiling.layer, self._tiling.places_apart
        read, written = layer.channels // layer.groups, layer.filters // layer.groups
        matrix = Rows(tiles, _FLOAT * apart * layer.channels, _FLOAT * apart * layer.filters, read, read, [0])
        panels = panels_of_rows(matrix, written, self._lanes, address_of(self._bias), 0)
        self._kept.append(panels)
        room = tiling.block_rows * tiling.columns * apart * _FLOAT  # of v and z for a piece, by channels
        tables = list[Array]()
        for number in range(tiling.cut):
            products = np.arange(number * apart * layer.groups, (number + 1) * apart * layer.groups)
            within = products - products[0]
            read_from = self._v + number * room * layer.channels + _FLOAT * read * within
            written_to = self._z + number * room * layer.filters + _FLOAT * written * within
            weights = self._weights + _FLOAT * read * written * products
            parts = []
            for one in panels:
                calls = np.empty((len(products), len(one.columns), len(one.rows), 5), np.int64)
                calls[..., 0] = one.kernels
                calls[..., 1] = read_from[:, None, None] + matrix.read * one.rows
                calls[..., 2] = weights[:, None, None] + (_FLOAT * read * one.columns)[:, None]
                calls[..., 3] = written_to[:, None, None] + (_FLOAT * one.columns)[:, None] + matrix.written * one.rows
                calls[..., 4] = one.addresses
                parts.append(calls.reshape(len(products), -1, 5))
            tables.append(np.concatenate(parts, axis=1).reshape(-1, 5))
        self.nbytes += sum(table.nbytes for table in tables) + sum(one.fields.nbytes for one in panels)
        return tables


@lru_cache(maxsize=1)
def _zeros() -> Array:
    """The bias of a product that has none, of as many numbers as a panel has columns."""
    found = aligned_empty(256)
    found[...] = 0
    return found
