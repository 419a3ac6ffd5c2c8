"""Load: blobs from one database or several. Everything is read and checked before the first blob is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dagexec.core import dtypes
from dagexec.core.arguments import Arguments
from dagexec.core.blob import Blob
from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import STRING
from dagexec.core.gradient import no_gradient
from dagexec.core.io_access import IO
from dagexec.core.operator import Array, Operator, Step
from dagexec.core.proto import DeviceOption
from dagexec.core.registry import new_operator
from dagexec.core.runtime import runtime_of
from dagexec.core.schema import UNBOUNDED
from dagexec.core.tensor import Tensor
from dagexec.errors import ArgumentError, StorageError
from dagexec.ops.families.storage.databases import DB_ARGS, StorageOperator, db_type, names_of_user
from dagexec.ops.families.storage.saving import without_prefix
from dagexec.storage import open_database
from dagexec.storage.blob_file import BlobFile, read_blobs
from dagexec.storage.reader import DBReader

_MAX_READERS = 64


def store(op: Operator, index: int, array: npt.NDArray[np.generic]) -> None:
    """Make a copy of `array` the value of output `index`, on the operator's device; in place where it fits."""
    if op.runtime.in_host_memory:
        op.output(index).resize(tuple(array.shape), dtypes.from_numpy(array.dtype))
        np.copyto(op.y(index), array)
    else:
        op.output(index).feed(array)


@new_operator(
    "Load",
    inputs=(0, _MAX_READERS),
    outputs=(0, UNBOUNDED),
    infer=None,
    doc="Reads blobs from the databases `dbs` (or `db`), or those of the readers. A blob that is not there is an "
    "error, and so is one that is damaged; then nothing is changed.",
    input_names=("readers...",),
    output_names=("blobs...",),
    args={
        "db": "the path",
        "dbs": "several paths",
        **DB_ARGS,
        "add_prefix": "text before the name in the database, for the blob's name",
        "strip_prefix": "of each name in the database, what comes before this text and the text itself is left out",
        "keep_device": "blobs go to the device that the database says; otherwise to the operator's",
        "load_all": "load every blob there is, into blobs of their names",
        "allow_incomplete": "outputs that are not in the database stay as they are",
        "source_blob_names": "names in the database of the outputs; otherwise their own",
    },
    handles=tuple(range(_MAX_READERS)),
    effects=True,
    does_io=IO.READ_FOLDER,
    reproducible=False,
)
class Load(StorageOperator):
    """Blobs from files."""

    def prepare(self) -> Step:
        """Read all, then change blobs."""
        wanted = _Selection(self.arguments, names_of_user(self.definition.output, self.runtime.device), self.label)
        kind = db_type(self.arguments, self.label)
        paths = self.arguments.strings("dbs") or [path for path in [self.arguments.string("db", "")] if path]
        if bool(paths) == bool(self.input_blobs):
            raise ArgumentError(f"{self.label}: expected 'db', 'dbs' or readers as inputs, and only one of these")
        places = [self.place(path) for path in paths]

        def load() -> None:
            files = [_read(kind, path, wanted.takes) for path in places]
            files += [self._read_reader(index, wanted.takes) for index in range(len(self.input_blobs))]
            self._store(wanted, files)

        return load

    def _read_reader(self, index: int, wanted: Callable[[str], bool]) -> BlobFile:
        reader = self.handle(index, DBReader)
        with reader.database.cursor() as cursor:
            return read_blobs(cursor, reader.database.nbytes, reader.path, wanted)

    def _store(self, wanted: _Selection, files: Sequence[BlobFile]) -> None:
        tensors: dict[str, tuple[Array, Device | None]] = {}
        strings: dict[str, bytes] = {}
        for file in files:
            for source, content in (file.tensors | file.strings).items():
                name = wanted.name(source)
                if name in tensors or name in strings:
                    raise StorageError(f"{self.label}: blob {name!r} occurs twice, the second time as {source!r}")
                if isinstance(content, bytes):
                    strings[name] = content
                else:
                    option = file.devices.get(source) if wanted.keep_device else None
                    tensors[name] = content, None if option is None else _present(option)
        missing = [name for name in wanted.outputs if name not in tensors and name not in strings]
        if missing and not wanted.incomplete:
            there = ", ".join(sorted([*tensors, *strings])[:20]) or "none of them"
            raise StorageError(
                f"{self.label}: not in the database: {', '.join(missing)}; of the requested blobs it has: {there}"
            )
        for name, (array, device) in tensors.items():
            if name in wanted.outputs:
                self._store_output(wanted.outputs.index(name), array, device)
            else:
                blob = self.workspace.create_blob(name)
                _feed(blob, array, device if wanted.keep_device else self.runtime.device)
        for name, text in strings.items():
            place = wanted.outputs.index(name) if name in wanted.outputs else -1
            blob = self.output_blobs[place] if place >= 0 else self.workspace.create_blob(name)
            blob.value = text

    def _store_output(self, index: int, array: Array, device: Device | None) -> None:
        if device is None or device == self.runtime.device:
            store(self, index, array)
        else:
            _feed(self.output_blobs[index], array, device)


class _Selection:
    """Which blobs of a database are loaded, and what they are called then.

    Attributes:
        outputs: the names, after prefixes, of the operator's outputs.
        incomplete: some of them may be missing.
        keep_device: blobs go where they were.
    """

    def __init__(self, arguments: Arguments, outputs: list[str], owner: str) -> None:
        self._strip = arguments.string("strip_prefix", "")
        self._add = arguments.string("add_prefix", "")
        self._all = arguments.bool("load_all")
        self.incomplete = arguments.bool("allow_incomplete")
        self.keep_device = arguments.bool("keep_device")
        self.outputs = arguments.strings("source_blob_names") or outputs
        if len(self.outputs) != len(outputs) or len(set(self.outputs)) != len(outputs):
            raise ArgumentError(
                f"{owner}: expected {len(outputs)} different 'source_blob_names', one for each output; "
                f"found {self.outputs}"
            )
        if self._all and arguments.strings("source_blob_names"):
            raise ArgumentError(f"{owner}: 'load_all' and 'source_blob_names' cannot be combined")
        if not outputs and not self._all:
            raise ArgumentError(f"{owner}: without outputs, 'load_all' is required: otherwise nothing would be loaded")

    def name(self, source: str) -> str:
        """What blob `source` of the database is called."""
        return self._add + without_prefix(source, self._strip)

    def takes(self, source: str) -> bool:
        """True when it is loaded."""
        return self._all or self.name(source) in self.outputs


def _read(kind: str, path: Path, wanted: Callable[[str], bool]) -> BlobFile:
    with open_database(kind, path) as database, database.cursor() as cursor:
        return read_blobs(cursor, database.nbytes, str(path), wanted)


def _present(option: DeviceOption) -> Device:
    """The device of a record. Raises DeviceError when dagexec has none of its type, or it is not here."""
    device = Device.from_option(option)
    runtime_of(device)
    return device


def _feed(blob: Blob, array: Array, device: Device | None) -> None:
    """Give a blob that is no output a value, where it is already or, a new one, on `device`."""
    strings = dtypes.from_numpy(array.dtype) is STRING
    if not isinstance(blob.value, Tensor) or (device is not None and blob.value.device != device):
        blob.value = Tensor(CPU if device is None or strings else device)
    blob.tensor().feed(array)


no_gradient("Load")
