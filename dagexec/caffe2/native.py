"""What scripts call of the extension module of Caffe2, as `core.C` and `workspace.C`: databases, and workspaces."""

from __future__ import annotations

from pathlib import Path

from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.caffe2.native_workspace import NativeWorkspace as Workspace
from dagexec.storage.database import Database, open_database
from dagexec.storage.database import Mode as DatabaseMode
from dagexec.storage.database import Transaction as DatabaseTransaction

__all__ = ["DB", "Cursor", "Mode", "Transaction", "Workspace", "create_db"]


class Mode:
    """How a database is opened: to read it, to go on writing, or to begin anew."""

    read = DatabaseMode.READ
    write = DatabaseMode.WRITE
    new = DatabaseMode.NEW


class Transaction:
    """Records to be written: those put since the last `commit`, all or none; at the end by itself."""

    def __init__(self, database: DB) -> None:
        self._database = database  # which stays open as long
        self._transaction: DatabaseTransaction | None = None

    def put(self, key: str | bytes, value: str | bytes) -> None:
        """Add a record."""
        if self._transaction is None:
            self._transaction = self._database.opened.transaction()
        self._transaction.put(_bytes(key), _bytes(value))

    def commit(self) -> None:
        """Write what was put since the last time."""
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            transaction.commit()

    def __del__(self) -> None:
        self.commit()


class Cursor:
    """A place in a database, at first that of the first record."""

    def __init__(self, database: DB) -> None:
        self._database = database  # which stays open as long
        self._cursor = database.opened.cursor()

    def key(self) -> bytes:
        """The key of the record at the cursor."""
        return self._cursor.key

    def value(self) -> bytes:
        """The value of the record at the cursor."""
        return self._cursor.value

    def next(self) -> None:
        """Go to the next record."""
        self._cursor.next()

    def valid(self) -> bool:
        """False behind the last record."""
        return self._cursor.valid


class DB:
    """An open database; closed when the script lets go of it.

    Attributes:
        opened: the database itself.
    """

    def __init__(self, database: Database) -> None:
        self.opened = database

    def new_transaction(self) -> Transaction:
        """A transaction, one at a time."""
        return Transaction(self)

    def new_cursor(self) -> Cursor:
        """A cursor at the first record."""
        return Cursor(self)

    def close(self) -> None:
        """Close it now."""
        self.opened.close()

    def __del__(self) -> None:
        self.close()


def create_db(db_type: str, name: str, mode: DatabaseMode) -> DB:
    """Open the database at the path `name`. Raises Caffe2Error when it cannot be opened."""
    with failing_as_caffe2(f"cannot open the {db_type} database {name!r}"):
        return DB(open_database(db_type, Path(name), mode))


def _bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else text
