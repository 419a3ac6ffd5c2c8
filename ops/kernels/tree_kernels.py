"""Walks through decision trees as machine code: several at once, without a branch that depends on data.

A node is a row of one array: threshold, column, and the places of its children where threshold < x[column] is false and
where it is true, or one is NaN. A walk takes one node in some seven instructions; those of eight trees for one row
overlap, or of a tree for four rows, so that they wait for memory together. Leaves lie before the array's address, with
NaN as threshold and themselves as child, so that walks which end early stay where they are until all have ended. Leaf
i is -1 - i, as in `dagexec.ops.families.tabular.forest`.

Rows are taken in blocks, all trees for one block, eight trees after the other, so that these stay in the first cache.
A row's weights are added in the order of the trees, whatever the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.ops.kernels.builder import BYTES, Builder, Mask, Scalar
from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.row_kernels import Call
from dagexec.platform.addresses import address_of
from dagexec.platform.assembly.instructions import NOT_LESS, SUB, SUB_DOUBLES
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]
_TREES_AT_ONCE = (8, 4, 2, 1)
_ROWS_OF_ONE = 4
"""Rows at once where a tree is walked alone."""

_NODES, _X_BYTES, _OUT_BYTES, _WEIGHTS, _TARGETS, _TREES = 0, 8, 16, 24, 32, 40
"""Places in the fields of a call: where the nodes are; bytes from row to row; where the weights of leaves are, and how
many targets there are; then for each tree its root and the place of its target, in bytes."""

ONE, OWN, ROW, WIDE, PLACES = "one", "own", "row", "wide", "places"
"""What becomes of the leaves: the one weight of each is added to the one target, or to that of the tree; the row of
weights of each is added, which fits a vector or not; or their places are written."""

_BLOCK_BYTES = 1 << 18  # of the rows of a block
_MOST_ROWS = 256
_MOST_PLACES = 1 << 30


@dataclass(frozen=True, eq=False)
class WalkedTrees:
    """Trees in the form that kernels walk.

    Attributes:
        memory: the leaves and behind them the nodes.
        start: the address where the nodes begin.
        units: 8 bytes in a node; places of nodes are counted in them.
        roots: the places of the roots.
        offsets: for each root, where its target is, in bytes.
        columns: how many the nodes look at.
        negates: nodes look at the negated columns behind them, too.
        weights: of leaves, a row each; none where a leaf has one, in `memory`, or where places are wanted.
        targets: the number of targets; 0 where places are wanted.
    """

    memory: Array
    start: int
    units: int
    roots: Array
    offsets: Array
    columns: int
    negates: bool
    weights: Array
    targets: int

    @property
    def is_double(self) -> bool:
        """Thresholds and columns are float64."""
        return self.units > 2

    @property
    def width(self) -> int:
        """Numbers that a row is given: a sum for each target, or a place for each root."""
        return self.targets or len(self.roots)

    def form(self, lanes: int) -> str:
        """What becomes of the leaves, on vectors of so many numbers."""
        if not self.targets:
            return PLACES
        if not self.weights.size:
            return ONE if self.targets == 1 else OWN
        return ROW if self.targets <= lanes else WIDE


def walked_trees(
    nodes: tuple[Array, Array, Array],
    roots: Array,
    columns: int,
    *,
    negates: bool,
    weights: Array,
    targets: Array,
    width: int,
) -> WalkedTrees | None:
    """Trees of `nodes`: thresholds, columns and children [nodes, 2], which are nodes or leaves -1 - i, as roots are.

    `weights` are float32 [leaves, 1], where each of `targets`, of `width` of them, is that of a tree, or [leaves,
    width]; or [leaves, 0] to have places written. None where there are more nodes than can be numbered.
    """
    thresholds, features, children = nodes
    is_double = thresholds.dtype == np.float64
    kind = np.dtype(
        [("threshold", np.float64), ("column", np.int32), ("unused", np.int32), ("children", np.int32, 2)]
        if is_double
        else [("threshold", np.float32), ("column", np.int32), ("children", np.int32, 2)]
    )
    units, (count, each) = kind.itemsize // 8, weights.shape
    if max(count, len(thresholds)) * max(units, each * BYTES) > _MOST_PLACES:
        return None
    memory = np.zeros(count + len(thresholds), kind)
    end, rest = memory[:count][::-1], memory[count:]
    end["threshold"] = np.nan
    end["children"][:, 1] = (-1 - np.arange(count)) * units
    rest["threshold"], rest["column"], rest["children"] = thresholds, features, children * units
    if each == 1:
        end["children"][:, 0] = weights[:, 0].astype(np.float32).view(np.int32)
    else:
        end["children"][:, 0] = np.arange(count) * each * BYTES
    offsets = targets * BYTES if each == 1 else np.zeros(len(roots), np.int64)
    rows = np.ascontiguousarray(weights if each > 1 else weights[:0], np.float32)
    start = address_of(memory) + count * kind.itemsize
    return WalkedTrees(memory, start, units, roots * units, offsets, columns, negates, rows, width if each else 0)


def walk_calls(machine: Machine, trees: WalkedTrees, x: Array, out: Array) -> tuple[list[list[Call]], object] | None:
    """Calls for rows `x` [rows, columns or more], a list a block, that write sums or places to `out` [rows, width].

    Both are packed; x is float32, or float64 where thresholds are, and `out` float32, or int64 for places. The second
    thing lives as long as the calls. None where kernels cannot run.
    """
    if not machine.can_run or x.shape[1] < max(trees.columns, 1):
        return None
    columns = 2 * trees.columns if trees.negates else x.shape[1]
    rows = max(_ROWS_OF_ONE, min(_MOST_ROWS, _BLOCK_BYTES // (columns * x.itemsize)))
    held = np.empty((min(rows, len(x)), columns) if trees.negates else 0, x.dtype)
    groups = _groups(trees, columns * x.itemsize, out.strides[0])
    copied = np.array([x.strides[0], trees.columns, columns * x.itemsize], np.int64)
    blocks = []
    for first in range(0, len(x), rows):
        count = min(rows, len(x) - first)
        begin, target = (address_of(array) + first * array.strides[0] for array in (x, out))
        calls: list[tuple[int | None, int, int, int, int]] = []
        if trees.negates:
            copy = _negated(machine.lanes, trees.is_double)
            calls.append((copy, address_of(copied), begin, address_of(held), count))
            begin = address_of(held)
        for group in groups:
            calls += _group_calls(machine.lanes, trees, group, begin, target, count)
        if any(call[0] is None for call in calls):
            return None
        blocks.append([(call[0] or 0, *call[1:]) for call in calls])
    return blocks, (trees, x, out, held, groups, copied)


@dataclass(frozen=True)
class _Group:
    """Trees that are walked at once: the number of the first, how many, and the fields of their calls."""

    first: int
    count: int
    fields: Array

    def strides(self) -> tuple[int, int]:
        """Bytes from row to row of what is read and what is written."""
        return int(self.fields[_X_BYTES // 8]), int(self.fields[_OUT_BYTES // 8])


def _groups(trees: WalkedTrees, x_bytes: int, out_bytes: int) -> list[_Group]:
    """All trees, as many at once as may be."""
    head = trees.start, x_bytes, out_bytes, address_of(trees.weights), trees.targets
    groups, first, left = [], 0, len(trees.roots)
    for count in _TREES_AT_ONCE:
        while left >= count:
            own = np.stack([trees.roots, trees.offsets], axis=1)[first : first + count].reshape(-1)
            groups.append(_Group(first, count, np.array([*head, *own.tolist()], np.int64)))
            first, left = first + count, left - count
    return groups


def _group_calls(
    lanes: int, trees: WalkedTrees, group: _Group, x: int, out: int, count: int
) -> list[tuple[int | None, int, int, int, int]]:
    """The calls for a group; of one tree alone several rows at once, and then the rest."""
    form = trees.form(lanes)
    place = out + group.first * 8 if form == PLACES else out
    x_bytes, out_bytes = group.strides()
    calls, done = [], 0
    for together in (_ROWS_OF_ONE, 1) if group.count == 1 else (1,):
        if times := (count - done) // together:
            kernel = _walk(lanes, form, trees.is_double, not group.first, group.count, together)
            begin = x + done * x_bytes, place + done * out_bytes
            calls.append((kernel, address_of(group.fields), *begin, times))
            done += times * together
    return calls


@lru_cache
def _negated(lanes: int, is_double: bool) -> int | None:
    """The address of a function of fields, x, where to write and a number of rows: columns, and those negated."""
    build = Builder(lanes)
    fields, x, out, rows = build.arguments(4)
    units, subtract = (2, SUB_DOUBLES) if is_double else (1, SUB)
    zero = build.constant(0.0)
    with build.repeat(rows):
        numbers = build.number(fields, 8) * units
        nbytes = numbers << 2

        def body(place: Scalar, mask: Mask | None) -> None:
            value = build.load(x, place, mask=mask)
            build.store(value, out, place, mask=mask)
            build.store(build.compute(subtract, zero, value), out, place + nbytes, mask=mask)

        build.each(numbers, body)
        x.set(x + build.number(fields, 0))
        out.set(out + build.number(fields, 16))
    return build.function()


@lru_cache
def _walk(lanes: int, form: str, is_double: bool, begins: bool, trees: int, together: int) -> int | None:
    """The address of a function of fields, x, where to write and how many times to take so many rows `together`.

    Where it `begins`, sums are begun, else they are added to.
    """
    build = Builder(lanes)
    fields, x, out, times = build.arguments(4)
    column, children = (8, 16) if is_double else (4, 8)
    with build.repeat(times):
        if begins and form in (OWN, WIDE):
            _clear(build, fields, out, together)
        nodes = build.number(fields, _NODES)
        rows = [x]
        for _ in range(together - 1):
            rows.append(rows[-1] + build.number(fields, _X_BYTES))
        roots = [build.number(fields, _TREES + 16 * tree) for tree in range(trees)]
        walks = [(row, build.copied(root)) for row in rows for root in roots]
        with build.loop() as again:
            for row, place in walks:
                feature = build.short_number(nodes, place, 8, column)
                threshold = build.load_first(nodes, place, 0, 8, is_double=is_double)
                build.append_less(place, threshold, row, feature, is_double=is_double)
                place.set(build.short_number(nodes, place, 4, children))
            ended = walks[0][1]
            for _, place in walks[1:]:
                ended = ended & place
            again(NOT_LESS, ended, 0)
        x.set(rows[-1] + build.number(fields, _X_BYTES))
        for first in range(0, len(walks), trees):
            places = [place for _, place in walks[first : first + trees]]
            _ADDED[form](build, _Ends(fields, nodes, places, children), out, begins)
            out.set(out + build.number(fields, _OUT_BYTES))
    return build.function()


@dataclass(frozen=True)
class _Ends:
    """Where the walks of a row ended: the fields of the call, the nodes, the places, and where leaves have weights."""

    fields: Scalar
    nodes: Scalar
    places: list[Scalar]
    weight: int


def _clear(build: Builder, fields: Scalar, out: Scalar, rows: int) -> None:
    """Zeros for all targets of so many rows, one after another."""
    zero = build.constant(0.0)
    count = build.number(fields, _TARGETS) * rows
    build.each(count, lambda at, mask: build.store(zero, out, at, mask=mask))


def _add_one(build: Builder, ends: _Ends, out: Scalar, begins: bool) -> None:
    total = build.constant(0.0) if begins else build.load_first(out)
    for place in ends.places:
        total = total + build.load_first(ends.nodes, place, ends.weight, 8)
    build.store_first(total, out)


def _add_own(build: Builder, ends: _Ends, out: Scalar, _begins: bool) -> None:
    for tree, place in enumerate(ends.places):
        weight = build.load_first(ends.nodes, place, ends.weight, 8)
        target = build.number(ends.fields, _TREES + 16 * tree + 8)
        build.store_first(build.load_first(out, target) + weight, out, target)


def _add_row(build: Builder, ends: _Ends, out: Scalar, begins: bool) -> None:
    mask = build.first(build.number(ends.fields, _TARGETS))
    total = build.constant(0.0) if begins else build.load(out, mask=mask)
    for place in ends.places:
        row = build.short_number(ends.nodes, place, 8, ends.weight)
        total = total + build.load(build.number(ends.fields, _WEIGHTS), row, mask=mask)
    build.store(total, out, mask=mask)


def _add_wide(build: Builder, ends: _Ends, out: Scalar, _begins: bool) -> None:
    offsets = [build.short_number(ends.nodes, place, 8, ends.weight) for place in ends.places]
    for row in [offset + build.number(ends.fields, _WEIGHTS) for offset in offsets]:

        def body(at: Scalar, mask: Mask | None, row: Scalar = row) -> None:
            total = build.load(out, at, mask=mask) + build.load(row, at, mask=mask)
            build.store(total, out, at, mask=mask)

        build.each(build.number(ends.fields, _TARGETS), body)


def _write_places(build: Builder, ends: _Ends, out: Scalar, _begins: bool) -> None:
    for number, place in enumerate(ends.places):
        build.store_number(place, out, offset=8 * number)


_ADDED: dict[str, Callable[[Builder, _Ends, Scalar, bool], None]] = {
    ONE: _add_one, OWN: _add_own, ROW: _add_row, WIDE: _add_wide, PLACES: _write_places,
}  # fmt: skip
