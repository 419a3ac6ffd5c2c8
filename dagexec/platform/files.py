"""Files: opened without waiting for whoever else uses their names, and written all or not at all."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from dagexec.errors import OutputError


def regular_only(path: str, flags: int) -> int:
    """The `opener` of `open` for regular files, at once. Raises OSError for a pipe, a device, a socket or a folder."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", path)


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path`: all of it or, on failure, nothing. Raises OutputError."""
    with written_atomically(path) as file:
        file.write(content)


@contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that is at `path` once the block has ended: all that was written to it or, on failure, nothing.

    What is at `path` and keeps nothing, as /dev/stdout, a device or a pipe that somebody reads, is written to directly.
    Raises OutputError, also for an OSError of the block.
    """
    with being_written(path):
        if not path.name:
            raise OSError(errno.EINVAL, "not the name of a file")
        if path.exists() and not path.is_file() and not path.is_dir():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "wb") as stream:
                os.set_blocking(stream.fileno(), True)
                yield stream
            return
        target = Path(os.path.realpath(path))
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with temporary.open("xb") as file:
                yield file
            put_in_place(temporary, target)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def put_in_place(path: Path, target: Path) -> None:
    """Rename `path` to `target`, so that either outlasts a loss of power: what was there, or all that is there now.

    Of a folder, the caller has synchronized what is in it. Raises OSError.
    """
    synchronize(path)
    os.replace(path, target)
    synchronize(target.parent)


def synchronize(path: Path) -> None:
    """Bring the content of a file, or the names in a folder, to the disk. Raises OSError."""
    if path.is_dir() and (os.name == "nt" or not os.access(path, os.R_OK)):
        return  # it cannot be opened
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def being_written(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises OutputError, which names `path`, for what the system says in the block."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise OutputError(f"{os.fspath(path)}: cannot be written: {reason(error)}") from None


def reason(error: OSError | ValueError) -> str:
    """What the system says of a failure, without the number and the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
