"""Files: opened without waiting for whoever else uses their names, and written all or not at all."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from dagexec.errors import ModelFormatError


def regular_only(path: str, flags: int) -> int:
    """The `opener` of `open` for regular files, at once. Raises OSError for a pipe, a device, a socket or a folder."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", path)


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path`: all of it or, on failure, nothing. Raises ModelFormatError."""
    if not path.name:
        raise ModelFormatError(f"{path}: cannot be written: not the name of a file")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ModelFormatError(f"{path}: cannot be written: {reason(error)}") from None
    finally:
        with suppress(OSError, ValueError):
            temporary.unlink(missing_ok=True)


def reason(error: OSError | ValueError) -> str:
    """What the system says of a failure, without the number and the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
