"""minidb: a database in one file, Caffe2's format and dagexec's default.

A record is two int32 (length of key, length of value; little-endian), the key and the value; records follow one
another to the end of the file. There is no index: a cursor reads from front to back.
"""

from __future__ import annotations

import os
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from dagexec.errors import OutputError, StorageError
from dagexec.platform.disk import disk, reading, remove, writing
from dagexec.platform.files import Unpublished, reason, write_atomically
from dagexec.storage.database import Cursor, Database, Mode, Transaction

_LENGTHS = struct.Struct("<ii")
_LONGEST = (1 << 31) - 1
_CHECKED = 1 << 16  # bytes before the end of a file that identify it


class MiniDatabase(Database):
    """A file of records.

    NEW writes beside the file and renames when the first transaction is committed; later ones are appended. WRITE
    appends; until the commit, a file `.<name>.committed` beside it has the old end, so that readers ignore a
    transaction that was cut short, and the next transaction undoes it.
    """

    def __init__(self, path: Path, mode: Mode) -> None:
        """Raises StorageError when the file cannot be opened."""
        self.path = path
        self.mode = mode
        self._unpublished: Unpublished | None = None
        if mode is Mode.NEW:
            self._unpublished = Unpublished(path)
            return
        try:
            disk().open(path, "rb" if mode is Mode.READ else "ab").close()
        except (OSError, ValueError) as error:
            raise StorageError(f"{path}: this minidb cannot be opened: {reason(error)}") from None

    def cursor(self) -> MiniCursor:
        """A cursor with a file handle of its own."""
        if self.mode is not Mode.READ:
            raise StorageError(f"{self.path}: opened for {self.mode.value}; open it for reading to use a cursor")
        return MiniCursor(self.path)

    def transaction(self) -> MiniTransaction:
        """A transaction at the end of the file."""
        if self.mode is Mode.READ:
            raise StorageError(f"{self.path}: opened for reading; open it with Mode.WRITE or Mode.NEW to add records")
        transaction = MiniTransaction(self.path, self._unpublished)
        self._unpublished = None
        return transaction

    @property
    def nbytes(self) -> int:
        """The size of the file."""
        return self.path.stat().st_size

    def close(self) -> None:
        """Forget a new file that no transaction was made for."""
        if self._unpublished is not None:
            self._unpublished.discard()
            self._unpublished = None


class MiniTransaction(Transaction):
    """Records at the end of a file."""

    def __init__(self, path: Path, unpublished: Unpublished | None) -> None:
        self._path = path
        self._unpublished = unpublished
        self._file: BinaryIO | None = None
        self._marked = False
        try:
            _undo_unfinished(path)
            if unpublished is None:
                self._marked = True
                write_atomically(_mark_of(path), _end_of(path).encode())
            self._file = writing(path if unpublished is None else unpublished.path, "ab")
        except (OSError, OutputError) as error:
            raise self._failed(error) from None
        except BaseException:
            self.abort()
            raise

    def put(self, key: bytes, value: bytes) -> None:
        file = self._opened()
        if max(len(key), len(value)) > _LONGEST:
            raise StorageError(
                f"{self._path}: record {key[:80]!r} of {len(value):,} bytes is too long for a minidb, "
                f"which holds {_LONGEST:,} bytes per record: write it in smaller chunks"
            )
        try:
            file.write(_LENGTHS.pack(len(key), len(value)))
            file.write(key)
            file.write(value)
        except OSError as error:
            raise self._failed(error) from None

    def commit(self) -> None:
        """Bring the records to the disk and, of a new file, put it in its place."""
        file = self._opened()
        try:
            file.close()
            if self._unpublished is None:
                disk().synchronize(self._path)
                _unmark(self._path)
            else:
                self._unpublished.publish()
            self._file, self._marked = None, False
        except OSError as error:
            raise self._failed(error) from None

    def abort(self) -> None:
        """Truncate the file to where the transaction began; remove a new one."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()  # flushes its buffer to the file, or fails
        if self._unpublished is not None:
            self._unpublished.discard()
        if self._marked:
            self._marked = False
            with suppress(OSError):  # then readers know of it, and the next transaction
                _undo_unfinished(self._path)

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise StorageError(f"{self._path}: this transaction has ended; start a new one")
        return self._file

    def _failed(self, error: OSError | OutputError) -> OutputError:
        self.abort()
        state = "the file before it stays" if self._path.exists() else "nothing is left of it"
        return OutputError(f"{self._path}: cannot be written: {reason(error)}; {state}")

    def __del__(self) -> None:
        if getattr(self, "_file", None) is not None:
            self.abort()


class MiniCursor(Cursor):
    """A place in a file of records.

    Attributes:
        offset: where the record begins in the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = reading(path)
            marked = _committed_size(path)
            self._size = os.fstat(self._file.fileno()).st_size if marked is None else marked
        except OSError as error:
            raise StorageError(f"{path}: this minidb cannot be read: {reason(error)}") from None
        self.offset = 0
        self.seek_to_first()

    def seek_to_first(self) -> None:
        """Go to the first record."""
        self._file.seek(0)
        self._end = 0
        self.next()

    def next(self) -> None:
        """Read the record that follows."""
        self.offset = self._end
        self.key = self.value = b""
        rest = self._size - self.offset
        self.valid = rest > 0
        if not self.valid:
            return
        if rest < _LENGTHS.size:
            raise self._damaged(f"it ends after {rest} bytes of a record's {_LENGTHS.size} bytes of lengths")
        key_length, value_length = _LENGTHS.unpack(self._read(_LENGTHS.size))
        rest -= _LENGTHS.size
        if key_length < 0 or value_length < 0:
            raise self._damaged(f"a record of negative length: key {key_length}, value {value_length}")
        if key_length + value_length > rest:
            raise self._damaged(
                f"the record has a key of {key_length:,} and a value of {value_length:,} bytes; {rest:,} follow"
            )
        self.key = self._read(key_length)
        self.value = self._read(value_length)
        self._end = self.offset + _LENGTHS.size + key_length + value_length

    @property
    def position(self) -> str:
        """Offset and key of the record."""
        return f"offset {self.offset}, key {self.key[:80]!r}"

    def close(self) -> None:
        with suppress(OSError):  # everything needed has been read
            self._file.close()

    def _read(self, count: int) -> bytes:
        try:
            content = self._file.read(count)
        except OSError as error:
            raise self._damaged(reason(error)) from None
        if len(content) != count:
            raise self._damaged(f"{count:,} bytes expected, {len(content):,} found: the file shrank while it was read")
        return content

    def _damaged(self, problem: str) -> StorageError:
        self.valid = False
        return StorageError(f"{self._path}: damaged at offset {self.offset}: {problem}")


def _mark_of(path: Path) -> Path:
    """The file that exists while records are appended."""
    return path.with_name(f".{path.name}.committed")


def _end_of(path: Path, size: int | None = None) -> str:
    """Identifies the end of a file, now or at `size`: the size, and a checksum of the bytes before. Raises OSError."""
    with reading(path) as file:
        end = os.fstat(file.fileno()).st_size if size is None else size
        file.seek(max(0, end - _CHECKED))
        return f"{end} {zlib.crc32(file.read(min(end, _CHECKED))):08x}"


def _committed_size(path: Path) -> int | None:
    """Committed bytes of a file to which a transaction appends, or appended before it was cut short; else None.

    Raises OSError.
    """
    try:
        with reading(_mark_of(path)) as file:
            text = file.read(64).decode(errors="replace")
    except FileNotFoundError:
        return None
    size = text.partition(" ")[0]
    is_current = size.isdecimal() and int(size) <= os.stat(path).st_size and text == _end_of(path, int(size))
    return int(size) if is_current else None  # otherwise it is of an earlier file


def _undo_unfinished(path: Path) -> None:
    """Truncate what an unfinished transaction has appended. Raises OSError."""
    if not _mark_of(path).exists():
        return
    size = _committed_size(path) if path.exists() else None
    if size is not None:
        with disk().open(path, "r+b") as file:
            file.truncate(size)
        disk().synchronize(path)
    _unmark(path)


def _unmark(path: Path) -> None:
    remove(_mark_of(path))
    disk().synchronize(path.parent)
