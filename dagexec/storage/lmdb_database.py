"""lmdb: a database in a folder, with an index and transactions of its own (extra `lmdb`)."""

from __future__ import annotations

import os
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from dagexec.errors import OutputError, StorageError
from dagexec.platform.disk import disk, reading, remove, writing
from dagexec.platform.extras import install_command
from dagexec.platform.files import Unpublished, put_in_place, reason
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.locks import new_lock
from dagexec.storage.database import Cursor, Database, Mode, Transaction
from dagexec.storage.lmdb_pages import check_pages

_FILE = "data.mdb"
_CHECKSUM = "data.crc32"
_MAP_SIZES = (1 << 40, 1 << 36, 1 << 32, 1 << 30)
"""Address space to ask for, the first that is granted; disk space is taken as records come."""
_MAX_KEY = 511


def _lmdb() -> ModuleType:
    try:
        import lmdb
    except ImportError:
        raise StorageError(
            f"databases of type lmdb need the module lmdb; install it with: {install_command('lmdb')}"
        ) from None
    module: ModuleType = lmdb
    return module


class _Environments:
    """The environments that this process has open: lmdb allows one for each folder, so users of a folder share it."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._open: dict[tuple[int, int], tuple[Any, int]] = {}
        reset_after_fork(self, _Environments.__init__)

    def open(self, module: ModuleType, path: Path) -> tuple[tuple[int, int], Any]:
        """A key to give back, and the environment. Raises what lmdb raises."""
        with self._lock:
            if (path / _FILE).exists():
                key = _identity(path)
                if key in self._open:
                    environment, users = self._open[key]
                    self._open[key] = environment, users + 1
                    return key, environment
            environment = _open(module, path)
            key = _identity(path)
            self._open[key] = environment, 1
            return key, environment

    def give_back(self, key: tuple[int, int]) -> None:
        """Close it when the last user gives it back."""
        with self._lock:
            environment, users = self._open.pop(key, (None, 0))
            if users > 1:
                self._open[key] = environment, users - 1
            elif environment is not None:
                environment.close()


_environments = _Environments()


def _identity(path: Path) -> tuple[int, int]:
    status = (path / _FILE).stat()
    return status.st_dev, status.st_ino


def _open(module: ModuleType, path: Path) -> Any:
    """Open with as much address space as the system gives; read-only where nothing can be written."""
    fresh = not (path / _FILE).exists()
    writable = os.access(path, os.W_OK) and (fresh or os.access(path / _FILE, os.W_OK))
    for size in _MAP_SIZES:
        try:
            return module.open(
                str(path), map_size=size, readonly=not writable, lock=writable, readahead=False, max_readers=512
            )
        except (module.MemoryError, MemoryError):
            if size == _MAP_SIZES[-1]:
                raise
    raise AssertionError("no sizes")


class LmdbDatabase(Database):
    """An lmdb environment.

    NEW replaces all records of an existing one in a single transaction of lmdb's, which a crash undoes; a new one is
    written beside its place and renamed. After a commit a file `data.crc32` has the checksum of the database, so that
    damage is found. lmdb does not check its pages, so `lmdb_pages` checks their structure before.
    """

    def __init__(self, path: Path, mode: Mode) -> None:
        """Raises StorageError when lmdb is not installed, or the database is missing, damaged or cannot be opened."""
        self.path = path
        self.mode = mode
        self._module = _lmdb()
        self._key: tuple[int, int] | None = None
        self._environment: Any = None
        self._unpublished: Unpublished | None = None
        if exists(path):
            verify_file(path)
            self._enter(path)
        elif mode is Mode.READ:
            raise StorageError(f"{path}: there is no lmdb database; expected a folder with a file {_FILE}")
        elif path.is_file():
            raise StorageError(
                f"{path}: cannot be written: it is a file, and an lmdb database is a folder; the file was kept"
            )
        else:
            self._unpublished = Unpublished(path, folder=True)
            self._enter(self._unpublished.path)

    def _enter(self, path: Path) -> None:
        try:
            self._key, self._environment = _environments.open(self._module, path)
            self._finalizer = weakref.finalize(self, _environments.give_back, self._key)
        except (self._module.Error, OSError) as error:
            self.close()
            raise StorageError(f"{self.path}: this lmdb database cannot be opened: {error}") from None

    def _leave(self) -> None:
        if self._key is not None:
            self._finalizer()
        self._key = self._environment = None

    def cursor(self) -> LmdbCursor:
        """A cursor over the records as they are now."""
        if self.mode is not Mode.READ:
            raise StorageError(f"{self.path}: opened for {self.mode.value}; open it for reading to use a cursor")
        return LmdbCursor(self.path, self._module, self._environment)

    def transaction(self) -> LmdbTransaction:
        """A transaction; the first of a database opened NEW starts from nothing."""
        if self.mode is Mode.READ:
            raise StorageError(f"{self.path}: opened for reading; open it with Mode.WRITE or Mode.NEW to add records")
        return LmdbTransaction(self)

    @property
    def nbytes(self) -> int:
        """The size of the file with the records."""
        return (self.path / _FILE).stat().st_size

    def close(self) -> None:
        """Close the environment; forget a new one that nothing was committed to."""
        self._leave()
        if self._unpublished is not None:
            self._unpublished.discard()
            self._unpublished = None

    def begin(self) -> Any:
        """A write transaction of lmdb's, empty if it is to replace what is there."""
        with suppress(FileNotFoundError):
            disk().unlink(self.path / _CHECKSUM)
            disk().synchronize(self.path)
        begun = self._environment.begin(write=True)
        if self.mode is Mode.NEW:
            begun.drop(self._environment.open_db(txn=begun), delete=False)
        return begun

    def finish_transaction(self) -> None:
        """Write the checksum after a commit or an abort, and put a new folder in its place. Raises OSError."""
        if self._unpublished is None:
            _write_checksum(self.path)
            return
        folder = self._unpublished.path
        self._environment.sync(True)
        self._leave()
        _write_checksum(folder)
        self._unpublished.publish()
        self._unpublished = None
        self._enter(self.path)

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What lmdb raises."""
        return (self._module.Error, OSError)


class LmdbTransaction(Transaction):
    """A write transaction of lmdb's."""

    def __init__(self, database: LmdbDatabase) -> None:
        self._database = database
        try:
            self._transaction: Any = database.begin()
        except database.errors as error:
            raise self._failed(error) from None

    def put(self, key: bytes, value: bytes) -> None:
        """Add a record. Raises StorageError for a key that is empty, too long or there already."""
        if not 0 < len(key) <= _MAX_KEY:
            raise StorageError(
                f"{self._database.path}: a key of {len(key)} bytes is not possible in an lmdb database, which allows "
                f"1 to {_MAX_KEY}: {key[:40]!r}; minidb takes any"
            )
        try:
            new = self._opened().put(key, value, overwrite=False)
        except self._database.errors as error:
            raise self._failed(error) from None
        if not new:
            raise StorageError(f"{self._database.path}: key {key[:80]!r} already exists")

    def commit(self) -> None:
        """Commit; lmdb synchronizes the file."""
        transaction = self._opened()
        try:
            self._transaction = None
            transaction.commit()
            self._database.finish_transaction()
            self._database.mode = Mode.WRITE
        except self._database.errors as error:
            raise self._failed(error) from None

    def abort(self) -> None:
        if self._transaction is not None:
            with suppress(*self._database.errors):
                self._transaction.abort()
                if exists(self._database.path):
                    self._database.finish_transaction()
            self._transaction = None

    def _opened(self) -> Any:
        if self._transaction is None:
            raise StorageError(f"{self._database.path}: this transaction has ended; start a new one")
        return self._transaction

    def _failed(self, error: Exception) -> OutputError:
        if hasattr(self, "_transaction"):
            self.abort()
        state = "the records before it stay" if exists(self._database.path) else "nothing is left of it"
        return OutputError(f"{self._database.path}: cannot be written: {error}; {state}")


class LmdbCursor(Cursor):
    """A cursor in a read transaction of its own."""

    def __init__(self, path: Path, module: ModuleType, environment: Any) -> None:
        self._path = path
        self._error = module.Error
        try:
            self._transaction = environment.begin()
            self._cursor = self._transaction.cursor()
        except module.Error as error:
            raise StorageError(f"{path}: this lmdb database cannot be read: {error}") from None
        self.seek_to_first()

    def seek_to_first(self) -> None:
        """Go to the smallest key."""
        self._move(self._cursor.first)

    def next(self) -> None:
        """Go to the next key in order of bytes."""
        self._move(self._cursor.next)

    def seek(self, key: bytes) -> None:
        self._move(lambda: self._cursor.set_key(key))

    def close(self) -> None:
        self._cursor.close()
        self._transaction.abort()

    def _move(self, move: Any) -> None:
        self.key = self.value = b""
        try:
            self.valid = move()
            if self.valid:
                self.key, self.value = self._cursor.item()
        except self._error as error:
            self.valid = False
            raise StorageError(f"{self._path}: damaged: {error}") from None


def exists(path: Path) -> bool:
    """True when the folder holds an lmdb database."""
    return (path / _FILE).is_file()


def verify_file(path: Path) -> None:
    """Raise StorageError when lmdb could not read the database in the folder `path` safely.

    Its bytes must be those that were committed, if there is a checksum; and the structure of its pages must be right in
    any case, because a malicious change can come with the right checksum.
    """
    try:
        _compare_checksum(path)
        check_pages(path / _FILE)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {reason(error)}") from None


def _compare_checksum(path: Path) -> None:
    """Raise StorageError for other bytes than the checksum is of; OSError."""
    written = _checksum_text(path)
    if not written:
        return
    present = _checksum(path / _FILE)
    if present != written and _checksum_text(path) == written:  # otherwise somebody commits just now
        raise StorageError(
            f"{path}: damaged: {_FILE} was written with checksum and size {written}, but now has {present}; "
            f"if another program has changed it since, remove {_CHECKSUM}"
        )


def _checksum_text(path: Path) -> str:
    try:
        with reading(path / _CHECKSUM) as file:
            return file.read().decode("latin-1").strip()
    except OSError:
        return ""


def _checksum(file: Path) -> str:
    crc = size = 0
    with reading(file) as opened:
        while block := opened.read(1 << 22):
            crc = zlib.crc32(block, crc)
            size += len(block)
    return f"{crc:08x} {size}"


def _write_checksum(folder: Path) -> None:
    target = folder / _CHECKSUM
    unfinished = target.with_suffix(".new")
    remove(unfinished)  # whatever has that name
    with writing(unfinished, "xb") as file:
        file.write(_checksum(folder / _FILE).encode())
    put_in_place(unfinished, target)
