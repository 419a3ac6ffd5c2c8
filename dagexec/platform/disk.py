"""File system calls for files that must survive: each goes through the `Disk` in force.

By default that is the system's. `stress/simulated_disk.py` has one whose calls fail one after another, and which loses
power; a test looks for code that writes past this module.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

StrPath = str | os.PathLike[str]


def regular_only(path: str, flags: int) -> int:
    """The `opener` of `open` for regular files; never blocks. Raises OSError for a pipe, device, socket or folder."""
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o666)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "not a regular file", path)


class Disk:
    """The system's files. Every method raises OSError."""

    def open(self, path: StrPath, mode: str, *, regular: bool = True) -> io.FileIO:
        """An unbuffered file; `mode` as of `open`, binary. A write may take less than it is given."""
        return io.FileIO(path, mode, opener=regular_only if regular else None)

    def make_folder(self, path: Path) -> None:
        """Make a folder in one that exists."""
        os.mkdir(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file or folder in one step; a file of the new name is replaced."""
        os.replace(source, target)

    def unlink(self, path: Path) -> None:
        """Remove a file."""
        os.unlink(path)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        os.rmdir(path)

    def synchronize(self, path: Path) -> None:
        """Make the content of a file, or the names in a folder, outlast a loss of power."""
        if path.is_dir() and (os.name == "nt" or not os.access(path, os.R_OK)):
            return  # it cannot be opened
        handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


_current: list[Disk] = [Disk()]


def disk() -> Disk:
    """The `Disk` in force."""
    return _current[-1]


@contextmanager
def installed(other: Disk) -> Iterator[None]:
    """Within it, `disk()` is `other`, in every thread. For one user at a time: tests and simulations."""
    _current.append(other)
    try:
        yield
    finally:
        _current.remove(other)


def reading(path: StrPath, *, regular: bool = True) -> BinaryIO:
    """A file for reading. Raises OSError, and ValueError for a null character in the path."""
    return io.BufferedReader(disk().open(path, "rb", regular=regular))


def writing(path: StrPath, mode: str) -> BinaryIO:
    """A regular file for writing, `mode` as of `open`. Raises what `reading` does."""
    return io.BufferedWriter(disk().open(path, mode))


def make_folders(path: Path) -> None:
    """Make the folder `path`, and those above it, unless they exist; the new ones outlast a loss of power."""
    if path.is_dir():
        return
    make_folders(path.parent)
    try:
        disk().make_folder(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    disk().synchronize(path.parent)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its content, if there is one. Raises OSError."""
    try:
        if path.is_dir() and not path.is_symlink():
            for inside in path.iterdir():
                remove(inside)
            disk().remove_folder(path)
        else:
            disk().unlink(path)
    except FileNotFoundError:
        pass
