"""FolderLock: one training at a time writes the checkpoints of a folder; another is told who does.

The lock is flock's on a file in the folder, which the kernel gives back however the process ends. A child made by fork
closes its copy: it is no owner, and does not hold the folder when its parent is gone.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from dagexec.errors import OutputError, StorageError
from dagexec.platform.files import reason
from dagexec.platform.forking import reset_after_fork

try:
    import fcntl
except ImportError:  # Windows: nobody is kept out
    fcntl = None  # type: ignore[assignment]

NAME = ".training-lock"
_LONGEST = 300  # characters that say who holds the lock


class FolderLock:
    """Holds a folder from when it is made until `close`, or until the process ends."""

    def __init__(self, folder: Path) -> None:
        """Raises StorageError, naming the process that holds the folder; OutputError if the file cannot be written."""
        self._path = folder / NAME
        self._handle = -1
        try:
            while self._handle < 0 and fcntl is not None:
                self._handle = _held(self._path)
            self._sign()
        except BlockingIOError:
            raise StorageError(
                f"{folder}: another training is writing its checkpoints there: {_holder(self._path)}; wait for it, or "
                f"train in another folder"
            ) from None
        except OSError as error:
            self.close()
            raise OutputError(f"{folder}: checkpoints cannot be written there: {reason(error)}") from None
        reset_after_fork(self, FolderLock._forked)

    def close(self) -> None:
        """Let others have the folder. Idempotent."""
        if self._handle >= 0:
            with suppress(OSError):
                self._path.unlink()
            self._let_go()

    def _sign(self) -> None:
        """Write down who holds the folder, for others to read."""
        if self._handle >= 0:
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            text = f"process {os.getpid()} on {socket.gethostname()} since {since}: {' '.join(sys.argv)}"
            os.ftruncate(self._handle, 0)
            os.pwrite(self._handle, text[:_LONGEST].encode(errors="replace"), 0)

    def _forked(self) -> None:
        self._let_go()

    def _let_go(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _held(path: Path) -> int:
    """A handle with the lock on the file at `path`; -1 when another file was put there meanwhile.

    Raises BlockingIOError when somebody holds it.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path.name} is not a regular file")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(path)):
                return handle
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return -1


def _holder(path: Path) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(4 * _LONGEST).decode(errors="replace")
    except OSError:
        text = ""
    return "".join(letter for letter in text if letter.isprintable())[:_LONGEST] or "a process that has just begun"
