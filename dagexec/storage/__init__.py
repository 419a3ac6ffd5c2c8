"""Databases of records, and blobs kept in them: Caffe2's formats, written so that no crash leaves half of one."""

from dagexec.storage import lmdb_database, minidb
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
