"""Files and folders that appear whole: written beside their place under a hidden name, synchronized, renamed.

Whoever writes one holds a lock on it (flock), so what a killed process has left behind can be told from what somebody
writes at this moment, and is removed by the next writer of the same place.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: leftovers stay
    fcntl = None  # type: ignore[assignment]

from dagexec.errors import OutputError
from dagexec.platform.files import put_in_place
from dagexec.storage.database import reason

_MARK = ".unfinished-"


class Unpublished:
    """A file or a folder that is being written, to appear at `target` as a whole.

    Attributes:
        target: where it will be.
        path: where it is now; nothing else writes there.
    """

    def __init__(self, target: Path, *, folder: bool = False) -> None:
        """Make the empty file or folder. Raises OutputError when that cannot be done."""
        if not target.name:
            raise OutputError(f"{target}: cannot be written: not the name of a file")
        self.target = target
        self._lock = -1
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(target)
            while self._lock < 0:
                self.path = target.with_name(f".{target.name}{_MARK}{uuid.uuid4().hex}")
                if folder:
                    self.path.mkdir()
                else:
                    os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                self._lock = _locked(self.path)
        except (OSError, ValueError) as error:
            self.discard()
            raise OutputError(f"{target}: cannot be written: {reason(error)}") from None

    def publish(self) -> None:
        """Put it in its place, as `put_in_place` does. Raises OSError; then the caller discards it."""
        put_in_place(self.path, self.target)
        self._unlock()

    def discard(self) -> None:
        """Remove it, unless it was published. Idempotent."""
        if hasattr(self, "path"):
            _remove(self.path)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_leftovers(target: Path) -> None:
    """Remove what processes that were killed have left of `target`; what somebody writes just now stays."""
    if fcntl is None:
        return
    mark = f".{target.name}{_MARK}"
    for path in [path for path in target.parent.iterdir() if path.name.startswith(mark)]:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_IFMT(os.fstat(handle).st_mode) in (stat.S_IFREG, stat.S_IFDIR):  # others are not ours
                    _remove(path)
            finally:
                os.close(handle)


def _locked(path: Path) -> int:
    """A handle that holds the lock on `path`; -1 when another process took it for a leftover in between."""
    handle = os.open(path, os.O_RDONLY)
    if fcntl is None:
        return handle
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(handle), os.stat(path)):
            return handle
    except OSError:
        pass
    os.close(handle)
    return -1


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
