"""Databases of records, and blobs kept in them: Caffe2's formats, written so that no crash leaves half of one."""

from pathlib import Path
from typing import TYPE_CHECKING

from dagexec.platform.lazy import LazyModule
from dagexec.storage.database import (
    Cursor,
    Database,
    Mode,
    Transaction,
    database_exists,
    database_types,
    open_database,
    register_database,
)

if not TYPE_CHECKING:
    lmdb_database = LazyModule("dagexec.storage.lmdb_database")
    minidb = LazyModule("dagexec.storage.minidb")
else:
    from dagexec.storage import lmdb_database, minidb

__all__ = [
    "Cursor",
    "Database",
    "Mode",
    "Transaction",
    "database_exists",
    "database_types",
    "lmdb_database",
    "minidb",
    "open_database",
    "register_database",
]

register_database(
    "lmdb", lambda path, mode: lmdb_database.LmdbDatabase(path, mode), lambda path: lmdb_database.exists(path)
)
register_database("minidb", lambda path, mode: minidb.MiniDatabase(path, mode), Path.is_file)
