"""Operators that change tables: more rows, fewer rows, rows as records of their own; and a check of one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core import dtypes
from dagexec.core.dtypes import FLOAT32, STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError, StorageError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.dataset.fields import FIELDS, FieldTree, Table, columns_of
from dagexec.ops.families.optimize.counter import Mutex
from dagexec.ops.families.storage.loading import store
from dagexec.storage.tensor_proto import decode_tensor, encode_tensor
from dagexec.storage.wire import LENGTH, WireError, fields, length_field

_FIELDS = {"fields": FIELDS}


@new_operator(
    "CheckDatasetConsistency",
    inputs=(1, UNBOUNDED),
    infer=lambda _call: [],
    doc="An error unless the fields of a table have as many elements as their lengths, and each other, say.",
    input_names=("fields...",),
    args=_FIELDS,
    required_args=("fields",),
    effects=True,
)
class CheckDatasetConsistency(Operator):
    """Lengths that add up."""

    def prepare(self) -> Step:
        tree = FieldTree.of(self)
        return lambda: Table(tree, columns_of(self), self.label).check()


def _check_added(operator: Operator, index: int, added: Array) -> None:
    """Raise ShapeError unless an array can stand behind input `index`: of its type, or that has no elements."""
    rows = operator.x(index)
    if not added.ndim or (rows.size and (rows.dtype != added.dtype or rows.shape[1:] != added.shape[1:])):
        raise ShapeError(
            f"{operator.label}: cannot append {added.dtype}{list(added.shape)} to "
            f"{operator.input_blobs[index].name!r}, which is {rows.dtype}{list(rows.shape)}"
        )


def _append(operator: Operator, index: int, added: Array) -> None:
    """Put an array behind what output `index` holds, in its memory where that can grow; in place of no elements."""
    tensor = operator.output(index)
    rows, count = tensor.array, len(tensor.array)
    if not rows.size:
        store(operator, index, added)
        return
    if operator.runtime.in_host_memory and tensor.meta is not STRING:
        tensor.grow_in_place()
        if tensor.make_room(rows.nbytes + added.nbytes):
            tensor.resize((count + len(added), *rows.shape[1:]), tensor.meta)[count:] = added
            return
    store(operator, index, np.concatenate((operator.y(index), added)))


@new_operator(
    "Append",
    infer=None,
    doc="Appends the rows of B to those of A, in place.",
    input_names=("A", "B"),
    output_names=("C",),
    enforced_inplace=((0, 0),),
)
class Append(Operator):
    """More rows."""

    def prepare(self) -> Step:
        def append() -> None:
            added = self.x(1)
            _check_added(self, 0, added)
            _append(self, 0, added)

        return append


@new_operator(
    "AtomicAppend",
    inputs=(3, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="While it holds the mutex, appends to each of some tables' columns, in place, another one: the inputs are the "
    "mutex, the columns, and as many that are appended.",
    input_names=("mutex", "columns...", "added..."),
    output_names=("columns...",),
    inplace=lambda source, target: source == target + 1,
    handles=(0,),
    effects=True,
)
class AtomicAppend(Operator):
    """More rows under a mutex."""

    def prepare(self) -> Step:
        """All columns or, where one does not fit, none."""
        count = len(self.output_blobs)
        if self.definition.input[1:] != self.definition.output + self.definition.input[1 + count :] or (
            len(self.input_blobs) != 1 + 2 * count
        ):
            raise ShapeError(
                f"{self.label}: expected a mutex, {count} columns that are the outputs, and {count} to append; "
                f"found {len(self.input_blobs)} inputs"
            )

        def append() -> None:
            with self.handle(0, Mutex).lock.own:
                added = [self.x(1 + count + index) for index in range(count)]
                for index, array in enumerate(added):
                    _check_added(self, 1 + index, array)
                for index, array in enumerate(added):
                    _append(self, index, array)

        return append


@new_operator(
    "TrimDataset",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="The first rows of a table, as many as are a multiple of `multiple_of`, with the elements of their lists.",
    input_names=("fields...",),
    output_names=("fields...",),
    args={**_FIELDS, "multiple_of": "what the number of rows is a multiple of"},
    required_args=("fields", "multiple_of"),
    inplace=lambda source, target: source == target,
)
class TrimDataset(Operator):
    """Fewer rows."""

    def prepare(self) -> Step:
        """Cut each column."""
        tree, multiple = FieldTree.of(self), self.arguments.int("multiple_of", 1)
        if multiple < 1:
            raise ArgumentError(f"{self.label}: argument 'multiple_of' must be 1 or more, found {multiple}")

        def trim() -> None:
            table = Table(tree, columns_of(self), self.label)
            offsets = table.offsets([0] * len(table.limits), table.limits[0] // multiple * multiple)
            for index, part in enumerate(table.piece(offsets[0], offsets[-1])):
                store(self, index, part.copy())

        return trim


def infer_pack(call: OperatorCall) -> list[TensorType]:
    """A string for each row, or one."""
    if not call.inputs[0].shape:
        raise call.fail("the first field must have a row for each element")
    single = call.arguments.bool("pack_to_single_shared_ptr")
    return [TensorType((1,) if single else call.inputs[0].shape[:1], STRING)]


@new_operator(
    "PackRecords",
    inputs=(1, UNBOUNDED),
    infer=infer_pack,
    doc="A string for each row of a table, which holds it with its lists: what is shuffled and queued is one tensor. "
    "(Caffe2's elements are pointers.)",
    input_names=("fields...",),
    output_names=("packed",),
    args={**_FIELDS, "pack_to_single_shared_ptr": "all rows in one string (default 0)"},
    required_args=("fields",),
)
class PackRecords(Operator):
    """Rows as strings."""

    def prepare(self) -> Step:
        """A string of serialized tensors each."""
        tree, packed = FieldTree.of(self), self.y(0)
        single = self.arguments.bool("pack_to_single_shared_ptr")

        def pack() -> None:
            table = Table(tree, columns_of(self), self.label)
            offsets = table.offsets([0] * len(table.limits), table.limits[0])
            if len(offsets) - 1 != len(table.columns[0]):
                raise ShapeError(f"{self.label}: its fields have {len(offsets) - 1} rows, the first more")
            bounds = offsets[[0, -1]] if single else offsets
            for row in range(len(bounds) - 1):
                parts = table.piece(bounds[row], bounds[row + 1])
                packed[row] = b"".join(length_field(1, encode_tensor("", np.ascontiguousarray(part))) for part in parts)

        return pack


def _unpacked(text: bytes) -> list[Array]:
    """The tensors in a packed row. Raises StorageError."""
    try:
        parts = [
            decode_tensor(content, len(text))
            for number, kind, content, _ in fields(memoryview(text))
            if number == 1 and kind == LENGTH
        ]
        return [part.values.reshape(part.shape) for part in parts]
    except (WireError, ValueError) as error:
        raise StorageError(f"it is no packed record: {error}") from None


@new_operator(
    "UnPackRecords",
    inputs=(1, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=None,
    doc="The table that PackRecords packed. Where there may be no rows, the inputs behind it are fields of the same "
    "types.",
    input_names=("packed", "prototypes..."),
    output_names=("fields...",),
    args=_FIELDS,
    required_args=("fields",),
)
class UnPackRecords(Operator):
    """Strings as rows."""

    def prepare(self) -> Step:
        """Join the tensors of all rows."""
        count = len(self.output_blobs)
        names = self.arguments.strings("fields")
        if len(names) != count or len(self.input_blobs) not in (1, 1 + count):
            raise ShapeError(
                f"{self.label}: expected {len(names)} outputs, and as many prototypes or none; found {count} outputs, "
                f"{len(self.input_blobs)} inputs"
            )

        def unpack() -> None:
            packed = self.x(0)
            if dtypes.from_numpy(packed.dtype) is not STRING:
                raise ShapeError(f"{self.label}: expected packed records, which are strings; found {packed.dtype}")
            rows = [array[:0] for array in columns_of(self, 1)]
            table = [rows] if rows else []
            for text in packed.reshape(-1).tolist():
                try:
                    table.append(_unpacked(text))
                except StorageError as error:
                    raise StorageError(f"{self.label}: {error}") from None
            self._check(table)
            for index, parts in enumerate(zip(*table, strict=True)):
                store(self, index, np.concatenate(parts))

        return unpack

    def _check(self, table: Sequence[Sequence[Array]]) -> None:
        if not table:
            raise ShapeError(f"{self.label}: there are no rows, and no prototypes that say the types of the fields")
        for row in table:
            if len(row) != len(self.output_blobs) or any(
                not part.ndim or (part.dtype, part.shape[1:]) != (first.dtype, first.shape[1:])
                for part, first in zip(row, table[0], strict=False)
            ):
                expected, found = (
                    ", ".join(f"{part.dtype}{list(part.shape)}" for part in of) for of in (table[0], row)
                )
                raise ShapeError(f"{self.label}: expected {len(self.output_blobs)} fields as {expected}; found {found}")


def infer_coalesce(call: OperatorCall) -> list[TensorType]:
    """The inputs, and all of their elements in a row."""
    if len(call.definition.output) != len(call.inputs) + 1:
        raise call.fail(f"expected {len(call.inputs) + 1} outputs, found {len(call.definition.output)}")
    for index in range(len(call.inputs)):
        call.require_types(index, FLOAT32)
    return [*call.inputs, TensorType((sum(kind.elements for kind in call.inputs),), FLOAT32)]


@new_operator(
    "UnsafeCoalesce",
    inputs=(1, UNBOUNDED),
    outputs=(2, UNBOUNDED),
    infer=infer_coalesce,
    doc="The inputs again, and all their elements in a row. (Caffe2's outputs share memory; here each has its own.)",
    input_names=("X...",),
    output_names=("Y...", "coalesced"),
    inplace=lambda source, target: source == target,
)
class UnsafeCoalesce(Operator):
    """Tensors in one piece."""

    def prepare(self) -> Step:
        """Copies."""
        arrays = [self.x(index) for index in range(len(self.input_blobs))]
        copies = [(self.y(index), array) for index, array in enumerate(arrays)]
        coalesced = self.y(len(arrays))

        def copy() -> None:
            np.concatenate([array.reshape(-1) for array in arrays], out=coalesced)
            for target, array in copies:
                if target is not array:
                    np.copyto(target, array)

        return copy


no_gradient(
    "CheckDatasetConsistency", "Append", "AtomicAppend", "TrimDataset", "PackRecords", "UnPackRecords",
    "UnsafeCoalesce",
)  # fmt: skip
