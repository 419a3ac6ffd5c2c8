"""Operators of stores: FileStoreHandlerCreate, RedisStoreHandlerCreate, StoreSet, StoreGet, StoreAdd and StoreWait."""

from __future__ import annotations

from typing import Any

import numpy as np

from dagexec.core.dtypes import INT64, STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.io_access import IO
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.workspace import Workspace
from dagexec.errors import StorageError
from dagexec.ops.families.communication.store import FileStore, RedisStore, Store
from dagexec.storage.blob_proto import Assembly, decode_blob, encode_blob

_PREFIX = {"prefix": "what the names of keys begin with (default: nothing)"}


@new_operator(
    "FileStoreHandlerCreate",
    infer=None,
    doc="A store of values by key, in files of a folder that all processes see.",
    output_names=("handler",),
    args={"path": "the folder, made where it is not there", **_PREFIX},
    required_args=("path",),
    effects=True,
    does_io=IO.ANY,
)
class FileStoreHandlerCreate(Operator):
    """Puts a store in its output."""

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        super().__init__(definition, workspace, index=index, net=net)
        self._root = workspace.root_folder

    def prepare(self) -> Step:
        """A second run makes another handle on the same files."""
        folder = self._root / self.arguments.string("path", "")
        prefix, blob = self.arguments.string("prefix", ""), self.output_blobs[0]

        def create() -> None:
            blob.value = FileStore(folder, prefix)

        return create


@new_operator(
    "RedisStoreHandlerCreate",
    infer=None,
    doc="A store of values by key, on a Redis server.",
    output_names=("handler",),
    args={"host": "of the server (default localhost)", "port": "of the server (default 6379)", **_PREFIX},
    effects=True,
    does_io=IO.ANY,
)
class RedisStoreHandlerCreate(Operator):
    """Puts a store in its output."""

    def prepare(self) -> Step:
        """Connects when it runs."""
        arguments, blob = self.arguments, self.output_blobs[0]

        def create() -> None:
            host, port = arguments.string("host", "localhost"), arguments.int("port", 6379)
            blob.value = RedisStore(host, port, arguments.string("prefix", ""))

        return create


_OF_STORE: dict[str, Any] = {"handles": (0,), "mutates": (0,), "effects": True}


class _StoreOperator(Operator):
    """One whose input 0 is a store."""

    def store(self) -> Store:
        """The handle, as it is now."""
        return self.handle(0, Store)  # type: ignore[type-abstract]

    def key(self, default: str) -> str:
        """Argument `blob_name`, else the name of a blob."""
        return self.arguments.string("blob_name", default)


@new_operator(
    "StoreSet",
    infer=lambda _call: [],
    doc="Keeps a blob in the store, for StoreGet of any process.",
    input_names=("handler", "data"),
    args={"blob_name": "the key (default: the name of the blob)"},
    **_OF_STORE,
)
class StoreSet(_StoreOperator):
    """A blob as Caffe2 writes it to files."""

    def prepare(self) -> Step:
        """In one record."""
        key, x = self.key(self.input_blobs[1].name), self.x(1)

        def run() -> None:
            [(_, value)] = encode_blob(key, x, 0)
            self.store().set(key, value)

        return run


@new_operator(
    "StoreGet",
    infer=None,
    doc="The blob that StoreSet has kept, waiting until it is there.",
    input_names=("handler",),
    output_names=("data",),
    args={"blob_name": "the key (default: the name of the blob)"},
    reproducible=False,
    **_OF_STORE,
)
class StoreGet(_StoreOperator):
    """A blob of which only a run knows the type."""

    def prepare(self) -> Step:
        """Waits as long as stores do."""
        key = self.key(self.output_blobs[0].name)

        def run() -> None:
            value = self.store().get(key)
            record = decode_blob(value, len(value))
            if isinstance(record.content, bytes):
                raise StorageError(f"{self.label}: key {key!r} holds a string, expected a tensor")
            assembly = Assembly.of(record, record.content)
            assembly.add(record.content, record.chunks)
            self.output(0).resize(assembly.shape, assembly.meta)
            np.copyto(self.y(0), assembly.array)

        return run


@new_operator(
    "StoreAdd",
    infer=lambda _call: [TensorType((1,), INT64)],
    doc="Adds to a counter of the store, which begins at 0, and gives its value.",
    input_names=("handler",),
    output_names=("value",),
    args={"blob_name": "the key of the counter", "add_value": "what is added (default 1)"},
    required_args=("blob_name",),
    reproducible=False,
    **_OF_STORE,
)
class StoreAdd(_StoreOperator):
    """A counter that processes share."""

    def prepare(self) -> Step:
        """Whatever other processes do meanwhile."""
        key, value, y = self.key(""), self.arguments.int("add_value", 1), self.y(0)

        def run() -> None:
            y[0] = self.store().add(key, value)

        return run


def infer_store_wait(call: OperatorCall) -> list[TensorType]:
    """No outputs. Raises ShapeError for names that are no strings."""
    if len(call.inputs) > 1:
        call.require_types(1, STRING)
    return []


@new_operator(
    "StoreWait",
    inputs=(1, 2),
    infer=infer_store_wait,
    doc="Ends when all keys have values.",
    input_names=("handler", "names, strings"),
    args={"blob_names": "the keys, where no input has them"},
    **_OF_STORE,
)
class StoreWait(_StoreOperator):
    """A wait for others."""

    def prepare(self) -> Step:
        """For one key after another."""
        names = self.x(1) if len(self.input_blobs) > 1 else None

        def run() -> None:
            keys = self.arguments.strings("blob_names") if names is None else [n.decode() for n in names.reshape(-1)]
            self.store().wait(keys)

        return run


no_gradient("FileStoreHandlerCreate", "RedisStoreHandlerCreate", "StoreSet", "StoreGet", "StoreAdd", "StoreWait")
