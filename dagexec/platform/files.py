"""Opening files whose names others may have used for something else: nobody waits for the other end of a pipe."""

from __future__ import annotations

import errno
import os
import stat


def regular_only(path: str, flags: int) -> int:
    """The `opener` of `open` for regular files, at once. Raises OSError for a pipe, a device, a socket or a folder."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", path)
