"""Operators that read a table row by row, and batch by batch, with a cursor that several nets may share."""

from __future__ import annotations

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.dataset.fields import FIELDS, FieldTree, Table, columns_of
from dagexec.ops.families.dataset.shuffling import MinimalStandard, shuffle
from dagexec.ops.families.storage.loading import store
from dagexec.platform.forking import ProcessLock

BATCH_SIZE = "rows at once (default: 1)"


class TreeCursor:
    """A place in a table.

    Attributes:
        tree: the fields of the table.
        offsets: where the next row begins in each domain; empty at the beginning.
        lock: held while the place is changed.
    """

    def __init__(self, tree: FieldTree) -> None:
        """A cursor at the beginning."""
        self.tree = tree
        self.offsets: list[int] = []
        self.lock = ProcessLock()

    def starts(self) -> list[int]:
        """Where the next row begins in each domain; the lock is held."""
        domains = 1 + len(self.tree.lengths)
        if len(self.offsets) != domains:  # ReadRandomBatch counts on in the first alone
            self.offsets = [0] * domains
        return self.offsets


def _positive(operator: Operator, name: str) -> int:
    size = operator.arguments.int(name, 1)
    if size < 1:
        raise ArgumentError(f"{operator.label}: argument {name!r} must be 1 or more, found {size}")
    return size


@new_operator(
    "CreateTreeCursor",
    infer=None,
    doc="Makes a cursor at the first row of a table. Every run makes a new one.",
    output_names=("cursor",),
    args={"fields": FIELDS},
    required_args=("fields",),
    effects=True,
)
class CreateTreeCursor(Operator):
    """A cursor in a blob."""

    def prepare(self) -> Step:
        """Put a new cursor into the output blob."""
        tree, blob = FieldTree.of(self), self.output_blobs[0]

        def create() -> None:
            blob.value = TreeCursor(tree)

        return create


@new_operator(
    "ResetCursor",
    infer=lambda _call: [],
    doc="Brings a cursor back to the first row.",
    input_names=("cursor",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class ResetCursor(Operator):
    """Back to the beginning."""

    def prepare(self) -> Step:
        def reset() -> None:
            cursor = self.handle(0, TreeCursor)
            with cursor.lock.own:
                cursor.offsets = []

        return reset


class _Reader(Operator):
    """Reads a table, the inputs from `first_field` on, with the cursor in input 0."""

    first_field = 1

    def table(self, cursor: TreeCursor) -> Table:
        """The table as it is now."""
        return Table(cursor.tree, columns_of(self, self.first_field), self.label)

    def give(self, parts: list[Array]) -> None:
        """Make these the outputs."""
        if len(parts) != len(self.output_blobs):
            raise ShapeError(
                f"{self.label}: expected {len(parts)} outputs, a field each; found {len(self.output_blobs)}"
            )
        for index, part in enumerate(parts):
            store(self, index, part)


@new_operator(
    "ReadNextBatch",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="The next rows of a table, an output for each field; fewer at its end, and then none.",
    input_names=("cursor", "fields..."),
    output_names=("fields...",),
    args={
        "batch_size": BATCH_SIZE,
        "enforce_batch_size": "the last rows are left out where they are fewer (default 0)",
    },
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class ReadNextBatch(_Reader):
    """One batch after another."""

    def prepare(self) -> Step:
        """Move the cursor on, and copy what it moved over."""
        size, whole = _positive(self, "batch_size"), self.arguments.bool("enforce_batch_size")

        def read() -> None:
            cursor = self.handle(0, TreeCursor)
            table = self.table(cursor)
            with cursor.lock.own:
                offsets = table.offsets(cursor.starts(), size)
                cursor.offsets = offsets[-1].tolist()
            full = len(offsets) > size or not whole
            self.give(table.piece(offsets[0], offsets[-1] if full else offsets[0]))

        return read


@new_operator(
    "ComputeOffset",
    inputs=(1, UNBOUNDED),
    infer=None,
    doc="A matrix of int64 that ReadRandomBatch needs: for each row, and for the end, the offset in each domain. The "
    "cursor is at the first row afterwards.",
    input_names=("cursor", "fields..."),
    output_names=("offsets",),
    handles=(0,),
    mutates=(0,),
    effects=True,
)
class ComputeOffset(_Reader):
    """Where rows begin."""

    def prepare(self) -> Step:
        """From the beginning to the end."""

        def compute() -> None:
            cursor = self.handle(0, TreeCursor)
            table = self.table(cursor)
            with cursor.lock.own:
                starts = cursor.starts()
                cursor.offsets = [0] * len(starts)
            store(self, 0, table.offsets(starts, table.limits[0]))

        return compute


@new_operator(
    "SortAndShuffle",
    inputs=(1, UNBOUNDED),
    infer=None,
    doc="The numbers of the rows, int64, in an order for ReadRandomBatch: sorted by a field, mixed among "
    "`shuffle_size` batches that follow one another, and then the batches in random order, the same in every run. The "
    "rows that fill no batch come last.",
    input_names=("cursor", "fields..."),
    output_names=("indices",),
    args={
        "sort_by_field_idx": "the number of an int32 field with an element a row, or -1 for none (default: 1)",
        "batch_size": BATCH_SIZE,
        "shuffle_size": "batches whose rows are mixed (default: 1)",
    },
    handles=(0,),
)
class SortAndShuffle(_Reader):
    """An order of rows."""

    def prepare(self) -> Step:
        """Sort, mix rows, mix batches."""
        field, size = self.arguments.int("sort_by_field_idx", 1), _positive(self, "batch_size")
        mixed = _positive(self, "shuffle_size")

        def sort() -> None:
            tree = self.handle(0, TreeCursor).tree
            if not -1 <= field < len(tree.names) or (field >= 0 and tree.domains[field]):
                raise ArgumentError(
                    f"{self.label}: argument 'sort_by_field_idx' must be -1 or a field with an element a row; "
                    f"found {field}, of {list(tree.names)}"
                )
            column = self.x(1 + max(field, 0))
            if not column.ndim or (field >= 0 and column.dtype != INT32.numpy):
                raise ShapeError(f"{self.label}: expected a column of int32, found {column.dtype}{list(column.shape)}")
            store(self, 0, _order(column if field >= 0 else np.zeros(len(column)), size, mixed))

        return sort


def _order(keys: Array, size: int, mixed: int) -> Array:
    rows = len(keys)
    order: Array = np.argsort(keys, kind="stable")
    reach = size * min(mixed, rows // size) if size * mixed > rows else size * mixed
    if reach > 1:
        for begin in range(0, rows - reach, reach):
            shuffle(order[begin : begin + reach], MinimalStandard())
    batches = np.arange(rows // size)
    shuffle(batches, MinimalStandard())
    whole = order[: len(batches) * size].reshape(-1, size)
    return np.concatenate((whole[batches].reshape(-1), order[len(batches) * size :])).astype(np.int64)


@new_operator(
    "ReadRandomBatch",
    inputs=(3, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="The rows of a table that the next of `indices` name, an output for each field; `offsets` is ComputeOffset's.",
    input_names=("cursor", "indices", "offsets", "fields..."),
    output_names=("fields...",),
    args={
        "batch_size": BATCH_SIZE,
        "enforce_batch_size": "the last indices are left out where they are fewer (default 0)",
        "loop_over": "begin anew behind the last index (default 0)",
    },
    handles=(0,),
    mutates=(0,),
    effects=True,
    reproducible=False,
)
class ReadRandomBatch(_Reader):
    """Rows in any order."""

    first_field = 3

    def prepare(self) -> Step:
        """Move the cursor on, and copy what it moved over."""
        size, whole = _positive(self, "batch_size"), self.arguments.bool("enforce_batch_size")
        loops = self.arguments.bool("loop_over")

        def read() -> None:
            cursor = self.handle(0, TreeCursor)
            table = self.table(cursor)
            count = self._count(len(table.limits))
            with cursor.lock.own:
                begin = cursor.offsets[0] if cursor.offsets else 0
                if whole and begin + size > count:
                    begin = count
                next_place = begin + size
                if loops and begin >= count:
                    begin, next_place = 0, size
                cursor.offsets = [next_place]
            pieces = [table.piece(*bounds) for bounds in self._rows(begin, begin + size)]
            nothing = [column[:0] for column in table.columns]
            self.give([np.concatenate(parts) for parts in zip(nothing, *pieces, strict=True)])

        return read

    def _count(self, domains: int) -> int:
        """How many indices there are."""
        indices, offsets = self.x(1), self.x(2)
        if indices.dtype != INT64.numpy or indices.ndim != 1:
            raise ShapeError(
                f"{self.label}: expected a vector of int64 indices, found {indices.dtype}{list(indices.shape)}"
            )
        if offsets.dtype != INT64.numpy or offsets.ndim != 2 or offsets.shape[1] != domains:
            raise ShapeError(
                f"{self.label}: expected int64 offsets of {domains} columns, found {offsets.dtype}{list(offsets.shape)}"
            )
        return len(indices)

    def _rows(self, begin: int, end: int) -> Array:
        """For each of these indices the offsets where its row begins, and where it ends."""
        indices, offsets = self.x(1)[begin:end], self.x(2)
        if ((indices < 0) | (indices >= len(offsets) - 1)).any():
            raise ShapeError(f"{self.label}: an index is not one of {max(len(offsets) - 1, 0)} rows")
        bounds = np.stack((offsets[indices], offsets[indices + 1]), axis=1)
        if (bounds < 0).any() or (bounds[:, 0] > bounds[:, 1]).any():
            raise ShapeError(f"{self.label}: the offsets are negative, or decrease")
        return bounds


no_gradient(
    "CreateTreeCursor", "ResetCursor", "ReadNextBatch", "ReadRandomBatch", "ComputeOffset", "SortAndShuffle",
)  # fmt: skip
