"""Convolutions on images N, ..., W, C with padding beside their rows, for which `brgconv` of oneDNN 3.1 takes pixels.

Where padding of two columns and more reaches into the last block of columns, which is smaller than others, the code
that it generates for the first block leaves out the test for padding at the beginning of a row (`ldb_loop` in
src/cpu/x64/brgemm/jit_brgemm_kernel.cpp: a whole block before `bdb_tail` passes over all `vpad` above -`bdb_tail`). It
then multiplies what lies before the row: the end of another one, or what is before the image. How columns are cut is
the library's to decide, so it is given no such padding: an image is copied to where zeros are beside its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.onednn.descriptors import SRC, Array
from dagexec.ops.engines.onednn.implementation import estimated_seconds
from dagexec.ops.engines.onednn.problem import (
    COMPOSED,
    DIRECT,
    Asked,
    Assembled,
    Candidate,
    Memory,
    Pack,
    Problem,
    assemble,
)
from dagexec.ops.kernels.tables import c_function, can_run, in_pieces
from dagexec.platform.addresses import address_of

_SPEED = 0.9
"""Of the time of the library's other implementations, which are older or have layouts of their own."""


def with_edges(axes: Sequence[Axis]) -> list[Axis]:
    """The axes of the window over images whose padding of columns is a part of them."""
    *others, columns = axes
    tail = max(0, columns.covered - columns.head - columns.size)
    return [*others, replace(columns, size=columns.head + columns.size + tail, head=0)]


def candidates(problem: Callable[[], Problem], head: int, columns: int, pixel: int) -> Iterator[Asked]:
    """`brgconv`, if the library has it, for images of so many columns, with so many bytes a pixel.

    `problem` gives that of images with edges, whose first `head` columns are padding.
    """
    if not can_run():
        return
    wide = problem()
    likely = Candidate(f"{COMPOSED}edged ", None, seconds=_SPEED * estimated_seconds(wide))
    yield Asked(likely, partial(_candidate, wide, likely, head, columns, pixel))


def _candidate(wide: Problem, likely: Candidate, head: int, columns: int, pixel: int) -> Candidate | None:
    one = next((one for one in wide.candidates(DIRECT) if "brgconv" in one.name), None)
    if one is None:
        return None
    assembled = partial(_assemble, wide.answered(wide.label), one, head, columns, pixel)
    return replace(one, name=likely.name + one.name, assemble=assembled, seconds=likely.seconds)


def _assemble(
    wide: Problem,
    candidate: Candidate,
    head: int,
    columns: int,
    pixel: int,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    image = arrays[SRC]
    layout = wide.tensors[SRC][0]
    edged = memory(layout.nbytes).view(image.dtype)
    rows = image.nbytes // (columns * pixel)
    row = edged.nbytes // rows
    start = address_of(edged)
    table = np.zeros((rows + 1, 5), np.int64)
    table[0] = c_function("memset"), start, 0, rows * row, 0
    table[1:, 0] = c_function("memcpy")
    table[1:, 1] = start + head * pixel + row * np.arange(rows)
    table[1:, 2] = address_of(image) + columns * pixel * np.arange(rows)
    table[1:, 3] = columns * pixel
    fill = in_pieces([table], (image, edged), problem.label)
    found = assemble(wide, candidate, {**arrays, SRC: edged}, memory, pack)
    return replace(found, steps=[fill, *found.steps], direct=found.direct - {SRC}, nbytes=found.nbytes + table.nbytes)
