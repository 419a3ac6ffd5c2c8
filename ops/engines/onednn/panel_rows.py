"""Convolutions on weights in panels: what `pointwise`, `windows` and `winograd` have in common.

A call computes some rows of a result, a step apart, in the columns of one panel. As many rows are computed at once as
sums fit into registers; what is over is a call of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.binding import Library
from dagexec.ops.engines.onednn.descriptors import Array
from dagexec.ops.engines.onednn.panel_product import widths
from dagexec.ops.engines.onednn.problem import COMPOSED, Assembled, Candidate, Memory, Pack, Problem
from dagexec.ops.kernels.machine import AVX2, AVX512
from dagexec.ops.kernels.panel_kernels import BIAS, SKIPPED, length_of, panel_kernel
from dagexec.ops.kernels.post_ops import PostOp
from dagexec.platform.addresses import address_of
from dagexec.platform.processor import nearest_cache_ways
from dagexec.platform.records import dataclass

_FLOAT = 4  # bytes
_FAR = 4096  # bytes: of rows that are a multiple of it apart, the first cache holds as many as it has ways
MOST_ROWS = {8: {3: 4, 2: 6, 1: 10}, 16: {2: 8, 1: 10}}
"""By lanes and vectors of a panel, the most rows that are computed at once."""


class Layer(Protocol):
    """A convolution that can be computed so; vectors of `lanes` fit if all are full."""

    @property
    def filters(self) -> int:
        """M."""

    @property
    def seconds(self) -> float:
        """An estimate of what a run takes on one core, by the widest vectors."""

    def fits(self, lanes: int) -> bool:
        """True where it can be computed by vectors of `lanes`."""


AssembleLayer = Callable[[Any, int, Problem, Mapping[int, Array], Memory, Pack], Assembled]
"""Makes the steps for a layer by vectors of so many lanes."""


def on_panels(library: Library, what: str, layer: Layer, assemble: AssembleLayer) -> Iterator[Candidate]:
    """The candidate for a layer, with the widest vectors that fit; none where the processor lacks AVX2 and FMA.

    Without oneDNN the last vector need not be full. With narrower vectors there are more of them than of the widest, of
    which the last is not full.
    """
    machine = library.machine
    sizes = [lanes for lanes in (AVX512, AVX2) if machine.can_run and lanes <= machine.lanes]
    fitting = [lanes for lanes in sizes if layer.fits(lanes)]
    for lanes in (fitting or ([] if library.has_primitives else sizes[-1:]))[:1]:
        isa = "avx512" if machine.lanes == AVX512 else "avx2"
        name = f"{COMPOSED}{what}, vectors of {lanes}:{isa}"
        seconds = layer.seconds * layer.filters / lanes / -(-layer.filters // machine.lanes)
        yield Candidate(name, None, partial(assemble, layer, lanes), seconds, is_in_pieces=True, keeps_nan=True)


@dataclass(frozen=True)
class Rows:
    """Rows of a product.

    Attributes:
        count: of them.
        read, written: bytes from one to the next, of what is read and of the result.
        inner: products that are summed up for an element.
        segment: numbers of a row that lie beside one another.
        skipped: bytes from the end of each segment to the next.
    """

    count: int
    read: int
    written: int
    inner: int
    segment: int
    skipped: Sequence[int]


@dataclass(frozen=True)
class Panels:
    """Panels of equal width.

    Attributes:
        columns: of the result, the first of each.
        kernels: of the calls for all rows.
        rows: the first row of each of these calls.
        fields: of these calls, for each panel, [panels, calls, fields].
        skipped: the numbers that fields point to.
    """

    columns: Array
    kernels: Array
    rows: Array
    fields: Array
    skipped: Array

    def within(self, columns: range) -> Panels:
        """Those which are in a range of columns."""
        pick = slice(*np.searchsorted(self.columns, (columns.start, columns.stop)))
        return Panels(self.columns[pick], self.kernels, self.rows, self.fields[pick], self.skipped)

    @property
    def addresses(self) -> Array:
        """Of the fields, [panels, calls]."""
        count, calls, _ = self.fields.shape
        found: Array = address_of(self.fields) + self.fields.strides[1] * np.arange(count * calls).reshape(count, calls)
        return found


def panels_of_rows(
    rows: Rows,
    units: int,
    lanes: int,
    bias: int,
    bias_step: int = _FLOAT,
    addend: int | None = None,
    post_ops: tuple[PostOp, ...] = (),
) -> list[Panels]:
    """All panels of `units` columns, by width.

    `bias` is the address of the number for the first column, `bias_step` the bytes to that of the next. What is added
    lies `addend` bytes from the result. Raises UnsupportedFeatureError where the kernels cannot run.
    """
    skipped = np.array(rows.skipped, np.int64)
    found = []
    for start, stop, width in widths(units, lanes):
        columns, vectors = np.arange(start, stop, width), width // lanes
        most = MOST_ROWS[lanes][vectors]
        blocks = blocks_of_rows(rows.count, min(most, nearest_cache_ways() - 1) if rows.read % _FAR == 0 else most)
        fields = np.empty((len(columns), len(blocks), SKIPPED + 1), np.int64)
        for number, (_, block, count) in enumerate(blocks):
            panel, segment = (_FLOAT * size * width for size in (rows.inner, rows.segment))
            steps = rows.read, 3 * rows.read, 5 * rows.read, block * rows.read, rows.written
            fields[:, number] = (count, panel, *steps, 0, addend or 0, segment, address_of(skipped))
        fields[:, :, BIAS] = (bias + bias_step * columns)[:, np.newaxis]
        ends = length_of(rows.segment), (stop - start) % lanes
        how = vectors, lanes, addend is not None, post_ops, True, *ends
        kernels = [panel_kernel(block, *how) for _, block, _ in blocks]
        if None in kernels:
            raise UnsupportedFeatureError("no machine code can be written here")
        found.append(Panels(columns, np.array(kernels), np.array([row for row, _, _ in blocks]), fields, skipped))
    return found


def blocks_of_rows(rows: int, most: int) -> list[tuple[int, int, int]]:
    """Blocks of at most so many rows, of equal size but the last: of each size the first row, the size, how many."""
    block = -(-rows // -(-rows // most))
    count, rest = divmod(rows, block)
    return [(0, block, count), *([(rows - rest, rest, 1)] if rest else [])]
