"""Tables of kernel calls for the products of Winograd's algorithm (`winograd`): one at every place of a tile and group.

Tiles are rows of a product. v and z have the places of a tile one after another, of those that one piece computes.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from dagexec.core.native import native_rows, table_code
from dagexec.ops.engines.onednn.descriptors import Array, aligned_empty
from dagexec.ops.engines.onednn.panel_rows import Panels, Rows, panels_of_rows
from dagexec.ops.engines.onednn.winograd_tiling import Tiling
from dagexec.ops.kernels.moving import NativeRows
from dagexec.platform.addresses import address_of

_FLOAT = 4  # bytes


class Products:
    """Writes tables of calls for blocks of tiles; the fields that they point at live as long as this.

    Attributes:
        written: all tables so far.
    """

    def __init__(self, tiling: Tiling, lanes: int, weights: Array) -> None:
        self._tiling, self._lanes, self._weights = tiling, lanes, address_of(weights)
        self._bias = _zeros()
        self._at_zero: dict[int, list[Array]] = {}
        self._calls: dict[tuple[int, int], list[Array]] = {}
        self._kept: list[list[Panels]] = []
        self.written: list[NativeRows] = []

    @property
    def nbytes(self) -> int:
        """Of all tables and fields."""
        fields = sum(one.fields.nbytes for panels in self._kept for one in panels)
        return fields + sum(table.nbytes for table in self.written)

    def calls(self, rows: int, v: Array, z: Array) -> list[Array]:
        """The call of each piece, [1, 5], for a block of so many rows of tiles from v to z: of a table."""
        key = rows, address_of(v)
        if rows not in self._at_zero:
            self._at_zero[rows] = self._products(rows * self._tiling.columns)
        if key not in self._calls:
            moved = [native_rows(table) for table in self._at_zero[rows]]
            for table in moved:
                table[:, 1] += np.uint64(address_of(v))
                table[:, 3] += np.uint64(address_of(z))
            self.written += moved
            run = table_code() or 0
            self._calls[key] = [np.array([(run, address_of(table), len(table), 0, 0)]) for table in moved]
        return self._calls[key]

    def _products(self, tiles: int) -> list[Array]:
        """The calls of each piece, [calls, 5], for so many tiles, as if v and z lay at address 0."""
        tiling, layer, apart = self._tiling, self._tiling.layer, self._tiling.places_apart
        read, written = layer.channels // layer.groups, layer.filters // layer.groups
        matrix = Rows(tiles, _FLOAT * apart * layer.channels, _FLOAT * apart * layer.filters, read, read, [0])
        panels = panels_of_rows(matrix, written, self._lanes, address_of(self._bias), 0)
        self._kept.append(panels)
        products = np.arange(tiling.places * layer.groups)
        part, within = np.divmod(products, apart * layer.groups)
        room = tiling.block_rows * tiling.columns * apart * _FLOAT  # of v and z for a part, by channels
        read_from = part * (room * layer.channels) + _FLOAT * read * within
        written_to = part * (room * layer.filters) + _FLOAT * written * within
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
        return list(np.concatenate(parts, axis=1).reshape(tiling.cut, -1, 5))


@lru_cache(maxsize=1)
def _zeros() -> Array:
    """The bias of a product that has none, of as many numbers as a panel has columns."""
    found = aligned_empty(256)
    found[...] = 0
    return found
