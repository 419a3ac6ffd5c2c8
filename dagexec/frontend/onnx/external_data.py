"""External data of an ONNX model: the bytes of tensors in files of the model's folder.

They are read into memory of the process, once, so that a loaded model does not depend on its files: with a mapped file,
whoever writes to it changes results, and whoever truncates it ends the process. While they are read, a file must not
change.

Data may lie only inside the model's own folder, so that a model file cannot make anyone read other files.
Specification: https://github.com/onnx/onnx/blob/main/docs/ExternalData.md.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import RawIOBase
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dagexec.errors import ModelFormatError
from dagexec.platform.host_memory import aligned_bytes, unshared_bytes

_Bytes = npt.NDArray[np.uint8]

_MAX_DIGITS = 19
_LINE = 64  # bytes: a cache line
_SMALL = 1 << 16  # bytes: smaller pieces share a block
_BLOCK = 1 << 20
_MAX_AT_ONCE = 1 << 30  # bytes: systems read no more than 2 GiB in one call


class _State(NamedTuple):
    """Identifies the content of a file."""

    device: int
    inode: int
    size: int
    modified: int
    changed: int

    @staticmethod
    def of(descriptor: int) -> _State:
        status = os.fstat(descriptor)
        return _State(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class OwnFile:
    """A model's own file, in which large raw data of the message is external data (`model_file`)."""

    _LOCATION = "\0"
    """No name of a file."""

    def __init__(self, path: Path, descriptor: int) -> None:
        """`descriptor` is of the open file."""
        self.path = path
        self.state = _State.of(descriptor)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.state.size

    @classmethod
    def entries(cls, offset: int, length: int) -> dict[str, str]:
        """The entries of a tensor whose raw data is there in the file."""
        return {"location": cls._LOCATION, "offset": str(offset), "length": str(length)}

    def holds(self, entries: Mapping[str, str]) -> bool:
        """True for such entries."""
        return entries.get("location") == self._LOCATION


class ExternalData:
    """The files of one model, while it is loaded. Bytes that several tensors name are read once.

    Use it as a context manager: at the end, all files must be as they were when they were first opened.
    """

    def __init__(self, folder: Path | None, own: OwnFile | None = None) -> None:
        """`folder` is where data may be; None when it may not be used. `own` is the file of the message, if known."""
        self._folder = folder
        self._own = own
        self._states: dict[Path, tuple[_State, str]] = {}  # with the name of the first reader
        if own is not None:
            self._states[own.path] = (own.state, "the model")
        self._paths: dict[str, Path] = {}  # by location
        self._open: tuple[Path, RawIOBase] | None = None  # the file that was read last
        self._pieces: dict[tuple[Path, int, int], _Bytes] = {}
        self._block = np.empty(0, np.uint8)  # room for small pieces

    def __enter__(self) -> ExternalData:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exc: object) -> None:
        self._close()
        self._pieces.clear()
        self._block = np.empty(0, np.uint8)
        if kind is None:
            self.check_unchanged()

    def read(self, entries: Mapping[str, str], needed: int, owner: str) -> _Bytes:
        """The `needed` bytes that `entries` of a TensorProto name, on a cache line, shared by all who ask for them.

        `owner` names the tensor in errors. Raises ModelFormatError for data that is missing, too short or outside the
        folder, or that changes, and ResourceError when memory does not suffice.
        """
        path = self._path(entries, owner)
        offset = _entry(entries, "offset", 0, owner)
        length = _entry(entries, "length", needed, owner)
        if length != needed:
            raise ModelFormatError(f"{owner}: its sizes ask for {needed} bytes, found {length}")
        piece = self._pieces.get((path, offset, length))
        if piece is None:
            piece = self._pieces[path, offset, length] = self._read(path, offset, length, owner)
        return piece

    def check_unchanged(self) -> None:
        """Raise ModelFormatError unless every file that was read is still the same."""
        for path, (_, owner) in self._states.items():
            with _opened(path, owner) as file:
                self._check(file, path, owner)

    def _path(self, entries: Mapping[str, str], owner: str) -> Path:
        if self._own is not None and self._own.holds(entries):
            return self._own.path
        location = entries.get("location", "")
        path = self._paths.get(location)
        if path is None:
            path = self._paths[location] = _inside(self._folder, location, owner)
        return path

    def _read(self, path: Path, offset: int, length: int, owner: str) -> _Bytes:
        with _reading(path, owner):
            file = self._file(path)
            state = self._check(file, path, owner)
            if offset + length > state.size:
                raise ModelFormatError(
                    f"{owner}: external data {path.name!r} has {state.size} bytes; "
                    f"expected {length} bytes at offset {offset}"
                )
            room = self._room(length, f"{owner}: external data {path.name!r}")
            if not _fill(room, file, offset):
                raise _changed(path, owner)
        return room

    def _file(self, path: Path) -> RawIOBase:
        if self._open is None or self._open[0] != path:
            self._close()
            self._open = path, _opened_file(path)
        return self._open[1]

    def _close(self) -> None:
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def _room(self, length: int, what: str) -> _Bytes:
        """New memory; small pieces share a block, which lives as long as one of them."""
        if length >= _SMALL:
            return unshared_bytes(length, what)
        if length > self._block.size:
            self._block = aligned_bytes(_BLOCK, what)
        room, self._block = self._block[:length], self._block[-(-length // _LINE) * _LINE :]
        return room

    def _check(self, file: RawIOBase, path: Path, owner: str) -> _State:
        """The state of an open file, which must be the same as when it was first opened."""
        state = _State.of(file.fileno())
        if self._states.setdefault(path, (state, owner))[0] != state:
            raise _changed(path, owner)
        return state


@contextmanager
def _reading(path: Path, owner: str) -> Iterator[None]:
    """Turns errors of the system about a file within the block into ModelFormatError."""
    try:
        yield
    except OSError as error:
        raise ModelFormatError(f"{owner}: external data {path.name!r} cannot be read: {error.strerror}") from None


@contextmanager
def _opened(path: Path, owner: str) -> Iterator[RawIOBase]:
    """The file, unbuffered. Errors of the system within the block become ModelFormatError."""
    with _reading(path, owner), _opened_file(path) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _changed(path, owner)
        yield file


def _opened_file(path: Path) -> RawIOBase:
    return open(path, "rb", buffering=0, opener=_open_without_waiting)


def _open_without_waiting(path: str, flags: int) -> int:
    """As `os.open`, without blocking: a pipe may have replaced the file."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _fill(target: _Bytes, file: RawIOBase, offset: int) -> bool:
    """Read from `offset` on until `target` is full; False when the file ends before."""
    file.seek(offset)
    rest = target.data
    while rest:
        count = file.readinto(rest[:_MAX_AT_ONCE])
        if not count:
            return False
        rest = rest[count:]
    return True


def _changed(path: Path, owner: str) -> ModelFormatError:
    return ModelFormatError(f"{owner}: external data {path.name!r} changed while the model was loaded; load it again")


def _entry(entries: Mapping[str, str], key: str, default: int, owner: str) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit()):
        raise ModelFormatError(f"{owner}: external data {key} must be a number of bytes, found {text[:40]!r}")
    if len(text) > _MAX_DIGITS:
        raise ModelFormatError(f"{owner}: external data {key} is too large: {text[:40]}")
    return int(text)


def _inside(folder: Path | None, location: str, owner: str) -> Path:
    """The file `location` of `folder`, after symbolic links; it must be a regular file inside the folder."""
    if folder is None:
        raise ModelFormatError(f"{owner}: has external data {location!r}, but the model was not loaded from a file")
    if not location:
        raise ModelFormatError(f"{owner}: external data has no location")
    try:
        root = folder.resolve()
        path = (root / location).resolve()
        allowed = path.is_relative_to(root) and not Path(location).is_absolute()
        regular = allowed and path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a NUL byte, a loop of links
        raise ModelFormatError(f"{owner}: external data location {location[:80]!r} is no file name: {error}") from None
    if not allowed:
        raise ModelFormatError(f"{owner}: external data {location!r} is outside the model's folder {root}")
    if not regular:
        raise ModelFormatError(f"{owner}: external data {location!r} is not a file in {root}")
    return path
