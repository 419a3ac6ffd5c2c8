"""DBReader: records of a database one after another, forever, shared by its readers."""

from __future__ import annotations

from dagexec.errors import StorageError
from dagexec.platform.threads import threads
from dagexec.storage.database import Cursor, Database, PathLike, open_database


class DBReader:
    """A place in a database that wraps around: after the last record comes the first.

    With several shards, reader `shard_id` of `num_shards` gets every `num_shards`-th record, from that number on.
    Threads may share one; each record goes to one of them.

    Attributes:
        reads: records handed out.
    """

    def __init__(self, db_type: str, path: PathLike, num_shards: int = 1, shard_id: int = 0) -> None:
        """Raises StorageError when the database cannot be read or has no record for this shard."""
        if not 0 <= shard_id < num_shards:
            raise StorageError(f"{path}: shard {shard_id} of {num_shards}: expected 0 <= shard_id < num_shards")
        self.path = str(path)
        self.reads = 0
        self._shards = num_shards
        self._shard = shard_id
        self._lock = threads().lock()
        self.database: Database = open_database(db_type, path)
        self._cursor: Cursor = self.database.cursor()
        self._to_beginning()

    def read(self) -> tuple[bytes, bytes]:
        """The current record; moves on to the next one of the shard. Raises StorageError for a damaged one."""
        with self._lock:
            if not self._cursor.valid:
                self._to_beginning()  # after an error
            record = self._cursor.key, self._cursor.value
            for _ in range(self._shards):
                self._cursor.next()
                if not self._cursor.valid:
                    self._to_beginning()
                    break
            self.reads += 1
            return record

    def close(self) -> None:
        """Release the database. Idempotent."""
        self._cursor.close()
        self.database.close()

    def _to_beginning(self) -> None:
        self._cursor.seek_to_first()
        for _ in range(self._shard):
            if self._cursor.valid:
                self._cursor.next()
        if not self._cursor.valid:
            raise StorageError(f"{self.path}: it has no record for shard {self._shard} of {self._shards}")

    def __repr__(self) -> str:
        return f"DBReader({self.path!r}, shard {self._shard} of {self._shards})"
