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
from dagexec.ops.engines.onednn.descriptors import DST, POST_OP, SRC, Array, Descriptor
from dagexec.ops.engines.onednn.division import MISREAD
from dagexec.ops.engines.onednn.implementation import estimated_seconds
from dagexec.ops.engines.onednn.pieces import ONE, Part, Piece, computed_in_pieces
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
from dagexec.ops.kernels.sharing import MOST_OF_ONE, pieces_of
from dagexec.ops.kernels.tables import c_function, can_run, in_pieces, shares
from dagexec.platform.addresses import address_of

_SPEED = 0.9
"""Of the time of the library's other implementations, which are older or have layouts of their own."""


STRIP = 512
"""Columns of a result: of more, the library makes so much code that to compute them in strips is cheaper."""


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
    one = _brgconv(wide)
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


def is_for_strips(axes: Sequence[Axis]) -> bool:
    """True for a window along a single axis that is long, or has padding which `brgconv` may take pixels for."""
    if len(axes) > 1:
        return False
    padding = max(axes[0].head, axes[0].covered - axes[0].head - axes[0].size)
    return padding >= MISREAD or (axes[0].kernel > 1 and axes[0].out > STRIP)


WithEdges = Callable[[Array, Part], Problem]
"""The problem of a part of images that have edges."""


def strips(problem: WithEdges, shape: tuple[int, ...], axis: Axis) -> Iterator[Asked]:
    """`brgconv` on strips of columns, for images [batch, columns, channels] that one axis of a window is laid on.

    Strips of a convolution are alike, so that one primitive computes them. Of long rows the library makes code for
    every number of columns: of 5,120 in 13 ms, and 5 MB.
    """
    if not can_run():
        return
    batch, _, channels = shape
    width = with_edges([axis])[0].size
    wide = problem(_outline(batch, width, channels), Part())
    likely = Candidate(f"{COMPOSED}strips ", None, seconds=_SPEED * estimated_seconds(wide))
    yield Asked(likely, partial(_in_strips, problem, likely, (width, channels), axis))


def _in_strips(problem: WithEdges, likely: Candidate, image: tuple[int, int], axis: Axis) -> Candidate | None:
    outline = _outline(1, *image)
    seconds = _SPEED * estimated_seconds(problem(outline, Part(ONE)))
    count = max(pieces_of(seconds, MOST_OF_ONE), -(-axis.out // STRIP))
    even = [more for more in range(count, min(2 * count, axis.out)) if axis.out % more == 0]
    rows = shares(axis.out, min(even[0] if even else count, axis.out))
    problems = {size: problem(outline, Part(ONE, 0, part)) for size, part in {len(part): part for part in rows}.items()}
    found = {size: _brgconv(one) for size, one in problems.items()}
    name = next((one.name for one in found.values() if one is not None), "")
    answered = {size: one.answered(one.label) for size, one in problems.items()}
    parts = [(part, answered[len(part)], one) for part in rows if (one := found[len(part)]) and one.name == name]
    if len(parts) < len(rows):
        return None
    assembled = partial(_assemble_strips, parts, axis, pieces_of(seconds, MOST_OF_ONE))
    return replace(likely, name=likely.name + name, assemble=assembled, is_in_pieces=True)


def _brgconv(problem: Problem) -> Candidate | None:
    return next((one for one in problem.candidates(DIRECT) if "brgconv" in one.name), None)


def _outline(*shape: int) -> Array:
    """Numbers of which only the shape counts."""
    return np.broadcast_to(np.zeros((), np.float32), shape)


def _assemble_strips(
    strips: Sequence[tuple[range, Problem, Candidate]],
    axis: Axis,
    pieces: int,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    """Strips are computed where images lie, but for those that read padding: they are copied between zeros before."""
    layout, meta = problem.tensors[SRC]
    row = layout.shape[1] * meta.itemsize
    source = arrays[SRC].reshape(-1).view(np.uint8)
    edged = [rows for rows, _, _ in strips if _on_image(rows, axis) != _read(rows, axis)]
    nbytes = problem.batch * sum(len(_read(rows, axis)) for rows in edged) * row
    copies = memory(nbytes) if nbytes else source
    table: list[tuple[int, int, int, int, int]] = []
    parts: list[Piece] = []
    taken = 0
    for number in range(problem.batch):
        image = source[number * axis.size * row : (number + 1) * axis.size * row]
        for rows, one, candidate in strips:
            read, there = _read(rows, axis), _on_image(rows, axis)
            pixels = image[there.start * row : there.stop * row]
            if rows in edged:
                copy = copies[taken : taken + len(read) * row]
                taken += len(copy)
                before, address = (there.start - read.start) * row, address_of(copy)
                behind = before + len(pixels)
                table.append((c_function("memset"), address, 0, before, 0))
                table.append((c_function("memcpy"), address + before, address_of(pixels), len(pixels), 0))
                table.append((c_function("memset"), address + behind, 0, len(copy) - behind, 0))
                pixels = copy
            given = {
                argument: _part(array, problem.tensors[argument][0], meta.itemsize, number, rows)
                for argument, array in arrays.items()
                if argument == DST or argument >= POST_OP
            }
            parts.append((one, candidate, {**arrays, **given, SRC: pixels}))
    found = computed_in_pieces(problem.label, parts, problem.batch * pieces, memory, pack, arrays)
    steps = found.steps
    if table:
        steps = [in_pieces([np.array(table, np.int64)], (source, copies), problem.label), *steps]
    return replace(found, steps=steps, direct=found.direct - {SRC}, nbytes=found.nbytes + 40 * len(table))


def _read(rows: range, axis: Axis) -> range:
    """The columns of an image that a strip reads, also those beside it."""
    return range(rows.start * axis.stride - axis.head, (rows.stop - 1) * axis.stride - axis.head + axis.extent)


def _on_image(rows: range, axis: Axis) -> range:
    """Those that are on the image."""
    read = _read(rows, axis)
    start = min(max(read.start, 0), read.stop)
    return range(start, max(start, min(read.stop, axis.size)))


def _part(array: Array, layout: Descriptor, itemsize: int, image: int, rows: range) -> Array:
    """The rows of an image, of a tensor that may have a single row, or image, for all."""
    batch, channels, size = layout.shape
    row = channels * itemsize
    first = (image * size if batch > 1 else 0) + (rows.start if size > 1 else 0)
    found: Array = array.reshape(-1).view(np.uint8)[first * row : (first + (len(rows) if size > 1 else 1)) * row]
    return found
