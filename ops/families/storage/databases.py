"""CreateDB and DBExists; and where and of which type a database is, as the arguments of storage operators say it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dagexec.core.arguments import Arguments
from dagexec.core.device import Device
from dagexec.core.dtypes import BOOL
from dagexec.core.gradient import no_gradient
from dagexec.core.io_access import IO
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError
from dagexec.storage import database_exists, database_types
from dagexec.storage.reader import DBReader

DB_ARGS = {
    "db_type": "minidb (the default) or lmdb",
    "absolute_path": "the path is taken as it is; otherwise it is relative to the workspace's root folder",
}


def db_type(arguments: Arguments, owner: str) -> str:
    """Argument `db_type`. Raises ArgumentError unless it is a registered one."""
    found = arguments.string("db_type", "minidb")
    if found not in database_types():
        raise ArgumentError(f"{owner}: argument 'db_type' must be one of {database_types()}, found {found!r}")
    return found


def required_path(arguments: Arguments, name: str, owner: str) -> str:
    """Argument `name`, a path. Raises ArgumentError when it is empty."""
    found = arguments.string(name, "")
    if not found or "\0" in found:
        raise ArgumentError(f"{owner}: argument {name!r} must be a path, found {found!r}")
    return found


def names_of_user(names: Iterable[str], device: Device) -> list[str]:
    """The names of blobs as the user's net has them; a net on several devices calls `y` on another one `y@<device>`."""
    return [name.removesuffix(f"@{device}") for name in names]


class StorageOperator(Operator):
    """An operator that knows the folder of its workspace.

    Attributes:
        workspace: the one it was made in.
    """

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Raises AccessError for a path that the workspace does not allow; those made in a run are checked then."""
        super().__init__(definition, workspace, index=index, net=net)
        self.workspace = workspace
        given = [self.arguments.string(name, "") for name in ("db", "db_name")]
        for path in filter(None, [*given, *self.arguments.strings("dbs")]):
            self.place(path)

    def place(self, path: str) -> Path:
        """Where `path` is. Raises AccessError for a place that the workspace does not allow."""
        return self.workspace.place(path, absolute=self.arguments.bool("absolute_path"), owner=self.label)


@new_operator(
    "CreateDB",
    infer=None,
    doc="Opens a database to read its records one after another, for ever. Every run begins at the first record.",
    output_names=("reader",),
    args={
        "db": "the path",
        **DB_ARGS,
        "num_shards": "readers that share the records (default: 1)",
        "shard_id": "which of them this one is (default: 0)",
    },
    required_args=("db",),
    effects=True,
    does_io=IO.READ_FOLDER,
)
class CreateDB(StorageOperator):
    """A reader in a blob."""

    def prepare(self) -> Step:
        """Put a new reader into the output blob."""
        kind = db_type(self.arguments, self.label)
        path = self.place(required_path(self.arguments, "db", self.label))
        shards, shard = self.arguments.int("num_shards", 1), self.arguments.int("shard_id", 0)
        if not 0 <= shard < shards:
            raise ArgumentError(f"{self.label}: expected 0 <= shard_id < num_shards, found {shard} and {shards}")

        def create() -> None:
            self.output_blobs[0].value = DBReader(kind, path, shards, shard)

        return create


def infer_exists(call: OperatorCall) -> list[TensorType]:
    """A scalar."""
    db_type(call.arguments, call.label)
    required_path(call.arguments, "db_name", call.label)
    return [TensorType((), BOOL)]


@new_operator(
    "DBExists",
    infer=infer_exists,
    doc="True when there is such a database.",
    output_names=("exists",),
    args={"db_name": "the path", **DB_ARGS},
    required_args=("db_name",),
    effects=True,
    does_io=IO.READ_FOLDER,
    reproducible=False,
)
class DBExists(StorageOperator):
    """Whether a database is there."""

    def prepare(self) -> Step:
        kind, found = db_type(self.arguments, self.label), self.y(0)
        path = self.place(self.arguments.string("db_name", ""))

        def look() -> None:
            found[...] = database_exists(kind, path)

        return look


no_gradient("CreateDB", "DBExists")
