"""Files and folders that appear whole: written beside their place under a hidden name, synchronized, renamed.

A writer holds a lock (flock) on what it writes. So leftovers of a killed process can be told from files that are being
written, and the next writer of the same place removes them.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # Windows: leftovers stay
    fcntl = None  # type: ignore[assignment]

from dagexec.errors import OutputError
from dagexec.platform.disk import disk, make_folders, remove, writing

_MARK = ".unfinished-"


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path`: all of it or, on failure, nothing. Raises OutputError."""
    with written_atomically(path) as file:
        file.write(content)


@contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A file that is at `path` once the block has ended: all that was written to it or, on failure, nothing.

    A `path` that keeps no content, such as /dev/stdout, a device or a pipe, is written to directly. Raises OutputError,
    also for an OSError of the block.
    """
    with being_written(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY), "wb") as stream:
                os.set_blocking(stream.fileno(), True)
                yield stream
            return
        os.stat(path.parent)  # a folder that does not exist is a mistake here
        unpublished = Unpublished(Path(os.path.realpath(path)) if path.name else path)
        try:
            with writing(unpublished.path, "r+b") as file:
                yield file
            unpublished.publish()
        finally:
            unpublished.discard()


class Unpublished:
    """A file or a folder that is being written, to appear at `target` as a whole.

    Attributes:
        target: where it will be.
        path: where it is now; no other process writes there.
    """

    _lock = -1
    _is_there = False

    def __init__(self, target: Path, *, folder: bool = False) -> None:
        """Make the empty file or folder, and the folders above it. Raises OutputError when that cannot be done."""
        self.target = target
        try:
            with being_written(target):
                if not target.name:
                    raise OSError(errno.EINVAL, "not the name of a file")
                make_folders(target.parent)
                remove_leftovers(target)
                while self._lock < 0:
                    self.path = target.with_name(f".{target.name}{_MARK}{os.urandom(16).hex()}")
                    self._is_there = True
                    if folder:
                        disk().make_folder(self.path)
                    else:
                        disk().open(self.path, "xb").close()
                    self._lock = _locked(self.path)
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Put it in its place, as `put_in_place` does. Raises OSError; then the caller discards it."""
        put_in_place(self.path, self.target)
        self._is_there = False
        self._unlock()

    def discard(self) -> None:
        """Remove it, unless it was published. Idempotent."""
        if self._is_there:
            with suppress(OSError):
                remove(self.path)
            self._is_there = False
        self._unlock()

    def __del__(self) -> None:
        """For a writer that was lost when memory ran out."""
        self.discard()

    def _unlock(self) -> None:
        handle, self._lock = self._lock, -1
        if handle >= 0:
            os.close(handle)


def remove_leftovers(target: Path) -> None:
    """Remove leftovers of `target` from killed processes, not files that are being written."""
    if fcntl is None:
        return
    mark = f".{target.name}{_MARK}"
    try:
        names = [name for name in os.listdir(target.parent) if name.startswith(mark)]
    except OSError:  # whoever may write to a folder may not always list it
        return
    for name in names:
        with suppress(OSError):
            path = target.with_name(name)
            handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_IFMT(os.fstat(handle).st_mode) in (stat.S_IFREG, stat.S_IFDIR):  # others are not ours
                    remove(path)
            finally:
                os.close(handle)


def _locked(path: Path) -> int:
    """A handle that holds the lock on `path`, if the file system has locks; -1 when another process took it for a
    leftover in between.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return -1
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(handle), os.stat(path)):
                raise FileNotFoundError
    except (BlockingIOError, FileNotFoundError):
        os.close(handle)
        return -1
    except OSError:
        pass
    return handle


def put_in_place(path: Path, target: Path) -> None:
    """Rename `path` to `target`, so that one of them, whole, outlasts a loss of power.

    For a folder, the caller has synchronized its content. Raises OSError.
    """
    disk().synchronize(path)
    disk().replace(path, target)
    disk().synchronize(target.parent)


@contextmanager
def being_written(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns errors of the system within the block into OutputError, which names `path`."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise OutputError(f"{os.fspath(path)}: cannot be written: {reason(error)}") from None


def reason(error: Exception) -> str:
    """What the system says of a failure, without the number and the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)
