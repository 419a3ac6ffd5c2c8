"""Databases: keys and values in a file or a folder, behind one interface. The kinds are `minidb` and `lmdb`.

    with open_database("minidb", "weights.minidb", Mode.NEW) as database, database.transaction() as transaction:
        transaction.put(b"w", value)

A database opened NEW replaces what is there when its first transaction is committed, and not before.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self

from dagexec.errors import StorageError
from dagexec.platform.closing import Closing

PathLike = str | os.PathLike[str]


class Mode(Enum):
    """How a database is opened.

    READ: it exists and is not changed. WRITE: records are added, to a new one if there is none. NEW: a new one replaces
    it.
    """

    READ = "read"
    WRITE = "write"
    NEW = "new"


class Cursor(ABC, Closing):
    """A place in a database: at a record, or past the last one.

    Attributes:
        valid: it is at a record; `key` and `value` are that record's.
    """

    valid: bool
    key: bytes
    value: bytes

    @abstractmethod
    def seek_to_first(self) -> None:
        """Go to the first record. Raises StorageError, naming the place, for a damaged one, as all movements do."""

    @abstractmethod
    def next(self) -> None:
        """Go to the next record."""

    def seek(self, key: bytes) -> None:
        """Go to the record of `key`, or past the end when there is none."""
        self.seek_to_first()
        while self.valid and self.key != key:
            self.next()

    @property
    def position(self) -> str:
        """Where it is, for messages."""
        return f"key {self.key[:80]!r}"

    @abstractmethod
    def close(self) -> None:
        """Release the database. Idempotent."""

    def __iter__(self) -> Iterator[tuple[bytes, bytes]]:
        """All records from the first one on."""
        self.seek_to_first()
        while self.valid:
            yield self.key, self.value
            self.next()


class Transaction(ABC):
    """Records that are added all together, or not at all. As a context manager it commits, unless something raises."""

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> None:
        """Add a record. Raises OutputError when it cannot be written."""

    @abstractmethod
    def commit(self) -> None:
        """Make the records part of the database, on the disk when this returns. Raises OutputError."""

    @abstractmethod
    def abort(self) -> None:
        """Drop the records; no effect after `commit`. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


class Database(ABC, Closing):
    """An open database; close it, or use it as a context manager.

    Attributes:
        path: where it is.
        mode: how it was opened.
    """

    path: Path
    mode: Mode

    @abstractmethod
    def cursor(self) -> Cursor:
        """A new cursor, at the first record. Raises StorageError unless the mode is READ."""

    @abstractmethod
    def transaction(self) -> Transaction:
        """A new transaction, one at a time. Raises StorageError when the mode is READ."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The size of the database, which no value in it exceeds."""

    @abstractmethod
    def close(self) -> None:
        """Release files. Idempotent."""


DatabaseFactory = Callable[[Path, Mode], Database]
_kinds: dict[str, tuple[DatabaseFactory, Callable[[Path], bool]]] = {}


def register_database(db_type: str, factory: DatabaseFactory, exists: Callable[[Path], bool]) -> None:
    """Make `factory(path, mode)` open the databases of type `db_type`; `exists(path)` tells whether there is one."""
    _kinds[db_type] = factory, exists


def database_types() -> list[str]:
    """The registered types."""
    return sorted(_kinds)


def open_database(db_type: str, path: PathLike, mode: Mode = Mode.READ) -> Database:
    """Open a database. Raises StorageError for an unknown type, and for one that cannot be opened."""
    return _kind(db_type)[0](Path(path), mode)


def database_exists(db_type: str, path: PathLike) -> bool:
    """True when there is a database of that type at `path`. Raises StorageError for an unknown type."""
    return _kind(db_type)[1](Path(path))


def _kind(db_type: str) -> tuple[DatabaseFactory, Callable[[Path], bool]]:
    kind = _kinds.get(db_type)
    if kind is None:
        raise StorageError(f"database type {db_type!r} is unknown; expected one of {', '.join(database_types())}")
    return kind
