"""Save, Checkpoint and Snapshot: blobs to a new database, which replaces the one before in one step.

Killed at any instant, the old file or the new one is there, whole; so it is when the disk is full.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dagexec.core.arguments import Arguments
from dagexec.core.gradient import no_gradient
from dagexec.core.io_access import IO
from dagexec.core.node import Node
from dagexec.core.operator import Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.families.storage.databases import DB_ARGS, StorageOperator, db_type, names_of_user, required_path
from dagexec.storage.blob_file import INTEGRITY_KEY, write_blobs
from dagexec.storage.blob_proto import CHUNK_SEPARATOR

_ARGS = {
    "db": "the path",
    **DB_ARGS,
    "strip_prefix": "of each name, what comes before this text and the text itself is left out",
    "blob_name_overrides": "names in the database in place of the blobs'",
    "chunk_size": "elements in a record (default: 1,000,000; 0: no limit)",
}
_CONVERSION = re.compile(r"%%|%[-0 ]*\d*(?:l|ll)?[di]|%")


def names_in_database(arguments: Arguments, blobs: Sequence[str], owner: str) -> list[str]:
    """What the blobs are called in the database. Raises ArgumentError for names that are reserved or not distinct."""
    names = arguments.strings("blob_name_overrides")
    prefix = arguments.string("strip_prefix", "")
    if names and prefix:
        raise ArgumentError(f"{owner}: 'blob_name_overrides' and 'strip_prefix' cannot be combined")
    if names and len(names) != len(blobs):
        raise ArgumentError(f"{owner}: expected {len(blobs)} 'blob_name_overrides', found {len(names)}")
    names = names or [without_prefix(name, prefix) for name in blobs]
    for index, name in enumerate(names):
        if not name or CHUNK_SEPARATOR in name or name == INTEGRITY_KEY:
            raise ArgumentError(f"{owner}: blob {blobs[index]!r} cannot be named {name!r} in a database")
        if name in names[:index]:
            raise ArgumentError(f"{owner}: two blobs would be named {name!r} in the database")
    return names


def _blobs(definition: Node) -> list[str]:
    return names_of_user(definition.input, definition.device)


def without_prefix(name: str, prefix: str) -> str:
    """The part of `name` after the first `prefix` in it; all of it when there is none."""
    _, found, rest = name.partition(prefix) if prefix else ("", "", "")
    return rest if found else name


def infer_save(call: OperatorCall) -> list[TensorType]:
    """No outputs."""
    db_type(call.arguments, call.label)
    required_path(call.arguments, "db", call.label)
    names_in_database(call.arguments, _blobs(call.definition), call.label)
    if call.arguments.int("chunk_size", -1) < -1:
        raise ArgumentError(f"{call.label}: argument 'chunk_size' must be 0 or more")
    return []


def infer_checkpoint(call: OperatorCall) -> list[TensorType]:
    """No outputs; the first input is the counter."""
    infer_save(call)
    if call.arguments.int("every", 1) < 1:
        raise ArgumentError(f"{call.label}: argument 'every' must be 1 or more, found {call.arguments.int('every', 1)}")
    counter = call.inputs[0]
    if counter.elements != 1 or not counter.meta.is_integer:
        raise call.fail(f"the counter must be one integer, found {counter}")
    checkpoint_path(call.arguments.string("db", ""), 0, call.label)
    return []


def checkpoint_path(pattern: str, iteration: int, owner: str) -> str:
    """`pattern` with the iteration in place of its `%d` (or `%06d`); `%%` is a percent sign. Raises ArgumentError."""
    conversions = [found for found in _CONVERSION.findall(pattern) if found != "%%"]
    if len(conversions) > 1 or any(not found.endswith(("d", "i")) for found in conversions):
        raise ArgumentError(f"{owner}: argument 'db' must have at most one %d, and no other conversion: {pattern!r}")
    return pattern % iteration if conversions else pattern.replace("%%", "%")


def _writing_cost(call: OperatorCall, _outputs: Sequence[TensorType]) -> Cost:
    nbytes = sum(kind.nbytes for kind in call.inputs)
    return Cost(0, nbytes, 10 * nbytes)


class _Save(StorageOperator):
    """Writes its inputs."""

    def _writer(self) -> Step:
        """A call that saves the inputs, to the path of the iteration if there is a counter."""
        kind = db_type(self.arguments, self.label)
        pattern = self.arguments.string("db", "")
        names = names_in_database(self.arguments, _blobs(self.definition), self.label)
        arrays = [self.x(index) for index in range(len(names))]
        chunk_size = self.arguments.int("chunk_size", -1)
        counted = self.definition.type != "Save"

        def write() -> None:
            path = checkpoint_path(pattern, int(arrays[0].reshape(-1)[0]), self.label) if counted else pattern
            write_blobs(kind, self.place(path), zip(names, arrays, strict=True), chunk_size=chunk_size)

        return write


@new_operator(
    "Save",
    inputs=(1, UNBOUNDED),
    infer=infer_save,
    doc="Writes the blobs to a new database at `db`, all of them or, when that fails, nothing.",
    input_names=("blobs...",),
    args=_ARGS,
    required_args=("db",),
    cost=_writing_cost,
    effects=True,
    does_io=IO.WRITE_FOLDER,
)
class Save(_Save):
    """Blobs to a file."""

    def prepare(self) -> Step:
        return self._writer()


_CHECKPOINT = {
    "inputs": (1, UNBOUNDED),
    "outputs": (0, 0),
    "infer": infer_checkpoint,
    "input_names": ("iteration", "blobs..."),
    "args": {
        **_ARGS,
        "db": "the path, with %d (or %06d) where the iteration goes",
        "every": "iterations from one checkpoint to the next (default: 1)",
    },
    "required_args": ("db",),
    "cost": _writing_cost,
    "effects": True,
    "does_io": IO.WRITE_FOLDER,
}


class _Checkpoint(_Save):
    """A save now and then."""

    def prepare(self) -> Step:
        """Write when the iteration is a multiple of `every`."""
        write, iteration, every = self._writer(), self.x(0), self.arguments.int("every", 1)

        def write_sometimes() -> None:
            if int(iteration.reshape(-1)[0]) % every == 0:
                write()

        return write_sometimes


@new_operator(
    "Checkpoint",
    doc="Saves all inputs, the counter included, when the counter is a multiple of `every`.",
    **_CHECKPOINT,  # type: ignore[arg-type]
)
class Checkpoint(_Checkpoint):
    """Blobs to a file now and then."""


@new_operator("Snapshot", doc="The old name of Checkpoint.", **_CHECKPOINT)  # type: ignore[arg-type]
class Snapshot(_Checkpoint):
    """Checkpoint under its old name."""


no_gradient("Save", "Checkpoint", "Snapshot")
