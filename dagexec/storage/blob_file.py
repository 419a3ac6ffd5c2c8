"""Files of blobs: what Save writes and Load reads, in a database of any type, with checksums.

The last record, under a reserved key, has the checksum of every other one. It is itself a blob, a string, so that
Caffe2 reads such files (with load_all it makes one blob more). Caffe2's own files have no such record, and are read as
well.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import numpy.typing as npt

from dagexec.core.proto import DeviceOption
from dagexec.errors import DagexecError, StorageError
from dagexec.platform.records import dataclass
from dagexec.storage.blob_proto import CHUNK_SEPARATOR, Assembly, BlobRecord, decode_blob, encode_blob, encode_string
from dagexec.storage.database import Cursor, Mode, PathLike, open_database

Array = npt.NDArray[Any]

INTEGRITY_KEY = "dagexec/integrity"


def write_blobs(
    db_type: str,
    path: PathLike,
    blobs: Iterable[tuple[str, Array]],
    *,
    strings: Mapping[str, bytes] | None = None,
    chunk_size: int = -1,
) -> None:
    """Put blobs into a new database that replaces the one at `path`: all of them or, on failure, nothing.

    Raises OutputError, naming the path, when it cannot be written, StorageError for two blobs of one name, ShapeError
    for a dtype that tensors do not hold.
    """
    sums: dict[str, tuple[int, int]] = {}
    with open_database(db_type, path, Mode.NEW) as database, database.transaction() as transaction:

        def put(key: str, value: bytes) -> None:
            if key in sums or key == INTEGRITY_KEY:
                raise StorageError(f"{path}: two blobs have the name {key!r}")
            sums[key] = zlib.crc32(value), len(value)
            transaction.put(key.encode(), value)

        for name, content in (strings or {}).items():
            put(name, encode_string(name, content))
        for name, array in blobs:
            for key, value in encode_blob(name, array, chunk_size):
                put(key, value)
        transaction.put(INTEGRITY_KEY.encode(), encode_string(INTEGRITY_KEY, integrity_of(sums)))


@dataclass
class BlobFile:
    """The blobs that were read from a database.

    Attributes:
        tensors, strings: by name, in the order of their first records.
        devices: where tensors were, of those whose records say so.
        is_checked: the database has checksums, and they agree.
    """

    tensors: dict[str, Array] = field(default_factory=dict)
    strings: dict[str, bytes] = field(default_factory=dict)
    devices: dict[str, DeviceOption] = field(default_factory=dict)
    is_checked: bool = False


def read_blob_file(db_type: str, path: PathLike, *, require_checksums: bool = False) -> BlobFile:
    """All blobs of a database, complete and checked.

    Raises StorageError, naming file and place, for a damaged one and, with `require_checksums`, for one without.
    """
    with open_database(db_type, path) as database, database.cursor() as cursor:
        return read_blobs(cursor, database.nbytes, str(path), require_checksums=require_checksums)


def read_blobs(
    cursor: Cursor,
    most_bytes: int,
    source: str,
    wanted: Callable[[str], bool] = lambda _name: True,
    *,
    require_checksums: bool = False,
) -> BlobFile:
    """The blobs whose name in the database (that of their key) is `wanted`. `source` names it in errors."""
    blobs = BlobFile()
    assemblies: dict[str, Assembly] = {}
    sums: dict[str, tuple[int, int]] = {}
    integrity: bytes | None = None
    cursor.seek_to_first()
    while cursor.valid:
        with _naming(source, cursor):
            key = _text(cursor.key)
            if key in sums:
                raise StorageError(f"key {key!r} occurs twice")
            if key == INTEGRITY_KEY:
                content = decode_blob(cursor.value, most_bytes).content
                integrity = content if isinstance(content, bytes) else b""
                if cursor.value != encode_string(key, integrity):
                    raise StorageError("damaged: the checksum record has changed")
            else:
                sums[key] = zlib.crc32(cursor.value), len(cursor.value)
                name = blob_name(key)
                if wanted(name):
                    _take(name, cursor.value, most_bytes, blobs, assemblies)
        cursor.next()
    if integrity is not None:
        _compare(integrity, sums, source)
    elif require_checksums:
        raise StorageError(f"{source}: the checksums are missing: the file is truncated, or was not written by dagexec")
    blobs.is_checked = integrity is not None
    try:
        blobs.tensors = {name: assembly.finish() for name, assembly in assemblies.items()}
    except StorageError as error:
        raise StorageError(f"{source}: {error}") from None
    return blobs


def blob_name(key: str) -> str:
    """The name of the blob that a record with this key belongs to."""
    return key.partition(CHUNK_SEPARATOR)[0]


def _take(name: str, value: bytes, most_bytes: int, found: BlobFile, assemblies: dict[str, Assembly]) -> None:
    record: BlobRecord = decode_blob(value, most_bytes)
    if name in found.strings or (isinstance(record.content, bytes) and name in assemblies):
        raise StorageError(f"blob {name!r} occurs twice")
    if isinstance(record.content, bytes):
        found.strings[name] = record.content
        return
    if name not in assemblies:
        assemblies[name] = Assembly.of(record, record.content)
        if record.content.device is not None:
            found.devices[name] = record.content.device
    assemblies[name].add(record.content, record.chunks)


def _text(key: bytes) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise StorageError(f"key {key[:80]!r} is not UTF-8") from None


def integrity_of(sums: Mapping[str, tuple[int, int]]) -> bytes:
    """The content of the record of checksums: of each record, the CRC-32 and the size of its value."""
    body = json.dumps({"version": 1, "records": sums}, separators=(",", ":")).encode()
    return f"{zlib.crc32(body):08x} ".encode() + body


def _compare(integrity: bytes, found: Mapping[str, tuple[int, int]], source: str) -> None:
    """Raise StorageError, naming the record, unless the records `found` are those that were `written`."""
    written = _written(integrity, source)
    for key, (crc, size) in found.items():
        if key not in written:
            raise StorageError(f"{source}: damaged: record {key!r} was not written by the saving program")
        if written[key] != [crc, size]:
            raise StorageError(
                f"{source}: damaged: record {key!r} was written with checksum and size {written[key]}, "
                f"but now has {[crc, size]}"
            )
    missing = [key for key in written if key not in found]
    if missing:
        raise StorageError(f"{source}: damaged: {len(missing)} records are missing, including {missing[0]!r}")


def _written(integrity: bytes, source: str) -> dict[str, list[int]]:
    crc, _, body = integrity.partition(b" ")
    try:
        if f"{zlib.crc32(body):08x}".encode() != crc:
            raise StorageError(f"{source}: damaged: the checksum record has changed")
        records = json.loads(body)["records"]
        if isinstance(records, dict):
            return records
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    raise StorageError(f"{source}: damaged: the checksum record cannot be read")


@contextmanager
def _naming(source: str, cursor: Cursor) -> Iterator[None]:
    """Within it, an error of the storage says which record of which database it is about."""
    try:
        yield
    except DagexecError as error:
        raise type(error)(f"{source}: {cursor.position}: {error}") from None
