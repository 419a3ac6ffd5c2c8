"""The file of a plan: a header, a manifest in JSON, and sections of bytes that can be used where they are.

    offset  bytes  what
    0       8      magic: 0x89 "dagexec"
    8       4      version of the format, little-endian as all numbers
    12      4      0
    16      8      bytes of the file
    24      8      bytes of the manifest
    32      32     SHA-256 of the manifest
    64             the manifest: {"sections": [bytes, ...], "hashes": [SHA-256 in hex, ...], "plan": see `plan.py`}

From the next page on there are the small sections, each on a cache line, and then the others, each on a page. The first
hash is that of all small ones with what is between them, and each of the others has one. Header, manifest, and small
sections are checked when a file is opened; who reads a large one decides whether its hash is worth the time. Nothing
here is executed or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt

from dagexec.errors import ModelFormatError
from dagexec.platform.disk import reading
from dagexec.platform.files import reason, written_atomically
from dagexec.platform.host_memory import unshared_bytes

VERSION = 2
"""Of the format; a file of another one is not read."""

Bytes = npt.NDArray[np.uint8]
Given = TypeVar("Given")
Found = TypeVar("Found")

_MAGIC = b"\x89dagexec"
_HEADER = struct.Struct("<8sIIQQ32s")
_LINE, _PAGE = 64, 4096
_SMALL = 16 << 10  # bytes
_MOST_MANIFEST = 64 << 20
_MOST_AT_ONCE = 1 << 30  # bytes: systems read no more than 2 GiB in one call


class DamagedError(Exception):
    """What is wrong with the content of a plan; whoever knows the file makes a ModelFormatError of it."""


def text(value: object) -> str:
    """`value`, if it is text. Raises DamagedError, as the functions after it do."""
    if isinstance(value, str):
        return value
    raise DamagedError(f"expected text, found {value!r:.80}")


def flag(value: object) -> bool:
    """`value`, if it is true or false."""
    if isinstance(value, bool):
        return value
    raise DamagedError(f"expected true or false, found {value!r:.80}")


def count(value: object) -> int:
    """`value`, if it is a whole number from 0 on, of at most 63 bits."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
        return value
    raise DamagedError(f"expected a number of 0 or more, found {value!r:.80}")


def items(value: object, length: int | None = None) -> list[Any]:
    """`value`, if it is a list, of so many elements where that is said."""
    if isinstance(value, list) and length in (None, len(value)):
        return value
    raise DamagedError(f"expected a list{'' if length is None else f' of {length}'}, found {value!r:.80}")


def record(value: object, names: Iterable[str]) -> list[Any]:
    """What `value` has under `names`, if it is an object with these names and no others."""
    wanted = tuple(names)
    if isinstance(value, dict) and value.keys() == set(wanted):
        return [value[name] for name in wanted]
    raise DamagedError(f"expected an object of {', '.join(wanted)}, found {value!r:.80}")


def maybe(read: Callable[[Given], Found], value: Given | None) -> Found | None:
    """None, or `value` as `read` takes it."""
    return None if value is None else read(value)


class Sections:
    """The sections of a file that is going to be written. Those of equal bytes are one."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[bytes, int], int] = {}
        self._contents: list[Bytes] = []

    def add(self, content: bytes | npt.NDArray[Any]) -> int:
        """The number of the section with these bytes. `content` stays as it is until all is written."""
        if isinstance(content, bytes):
            found = np.frombuffer(content, np.uint8)
        else:
            found = np.ascontiguousarray(content).reshape(-1).view(np.uint8)
        key = hashlib.sha256(found.data).digest(), found.nbytes
        if key not in self._numbers:
            self._numbers[key] = len(self._contents)
            self._contents.append(found)
        return self._numbers[key]

    def write(self, path: Path, plan: Mapping[str, object]) -> None:
        """Put a file with these sections, and `plan` in its manifest, at `path`: as a whole or not at all.

        Equal content gives equal bytes. Raises OutputError.
        """
        sizes = [size for _, size in self._numbers]
        starts, small, end = _places(sizes)
        gathered = bytearray(small)
        hashes = []
        for (digest, size), start, content in zip(self._numbers, starts, self._contents, strict=True):
            if size <= _SMALL:
                gathered[start : start + size] = content.data
            else:
                hashes.append(digest.hex())
        hashes.insert(0, hashlib.sha256(gathered).hexdigest())
        manifest = json.dumps({"sections": sizes, "hashes": hashes, "plan": plan}, separators=(",", ":")).encode()
        base = _aligned(_HEADER.size + len(manifest), _PAGE)
        digest = hashlib.sha256(manifest).digest()
        with written_atomically(path) as file:
            file.write(_HEADER.pack(_MAGIC, VERSION, 0, base + end, len(manifest), digest))
            file.write(manifest)
            file.write(bytes(base - _HEADER.size - len(manifest)))
            file.write(gathered)
            position = small
            for start, content in zip(starts, self._contents, strict=True):
                if content.nbytes > _SMALL:
                    file.write(bytes(start - position))
                    file.write(content.data)
                    position = start + content.nbytes


class Container:
    """A file of a plan that is open: its manifest, and its sections.

    Attributes:
        path: where it was found.
        plan: what the manifest says of the plan.
        identity: the hash of the manifest, which has those of all sections.
    """

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        """Check header, manifest, and where sections are.

        `mapped`, the file is mapped into memory, so that only what is used is read: it must not be written to where it
        is, but may be replaced or removed. Otherwise it is read whole, and all hashes are checked. Raises
        ModelFormatError for what is no plan or a damaged one, and ResourceError when memory does not suffice.
        """
        self.path = path
        try:
            with reading(path) as file:
                self._content = _mapped(file) if mapped else _read(file, f"{path}: the plan")
        except (OSError, ValueError, OverflowError) as error:  # ValueError: a null character in the path
            raise ModelFormatError(f"{path}: cannot be read: {reason(error)}") from None
        try:
            sections, hashes, self.plan = record(self._manifest(), ("sections", "hashes", "plan"))
            self._sizes = list(map(count, items(sections)))
            self._starts, small, end = _places(self._sizes)
            if end != len(self._content) - self._base:
                raise DamagedError(f"its sections have {end} bytes, found {len(self._content) - self._base}")
            large = [number for number, size in enumerate(self._sizes) if size > _SMALL]
            of_small, *of_large = items(hashes, 1 + len(large))
            if hashlib.sha256(self._content[self._base : self._base + small].data).hexdigest() != of_small:
                raise DamagedError("the small sections have not the bytes that were written: their hash is another")
            self._hashes = dict(zip(large, of_large, strict=True))
            self._checked: set[int] = set()
            for number in () if mapped else large:
                self.checked(number)
        except DamagedError as error:
            raise self.damaged(error) from None

    def damaged(self, error: DamagedError) -> ModelFormatError:
        """The error that names the file."""
        return ModelFormatError(f"{self.path}: no plan, or a damaged one: {error}")

    def unchecked(self, number: object) -> Bytes:
        """The bytes of a section, read-only, whose hash was not compared. Raises DamagedError for an unknown one."""
        index = count(number)
        if index >= len(self._sizes):
            raise DamagedError(f"section {index} of {len(self._sizes)}")
        start = self._base + self._starts[index]
        return self._content[start : start + self._sizes[index]]

    def checked(self, number: object) -> Bytes:
        """The bytes of a section, which have the hash that the manifest says. Raises DamagedError."""
        found, index = self.unchecked(number), count(number)
        if index in self._hashes and index not in self._checked:
            if hashlib.sha256(found.data).hexdigest() != self._hashes[index]:
                raise DamagedError(f"section {index} has not the bytes that were written: its hash is another")
            self._checked.add(index)
        return found

    def _manifest(self) -> object:
        """The manifest, after the header was checked."""
        content = self._content
        if len(content) < _HEADER.size:
            raise DamagedError(f"{len(content)} bytes are too few")
        magic, version, nothing, size, length, digest = _HEADER.unpack(content[: _HEADER.size].tobytes())
        if magic != _MAGIC:
            raise DamagedError("it does not begin as a plan does")
        if version != VERSION:
            raise DamagedError(f"version {version} of the format; this dagexec reads {VERSION}: build it again")
        if nothing or size != len(content):
            raise DamagedError(f"it says that it has {size} bytes, found {len(content)}")
        if length > min(_MOST_MANIFEST, size - _HEADER.size):
            raise DamagedError(f"a manifest of {length} bytes")
        manifest = content[_HEADER.size : _HEADER.size + length].tobytes()
        if hashlib.sha256(manifest).digest() != digest:
            raise DamagedError("the hash of the manifest is another")
        self._base = _aligned(_HEADER.size + length, _PAGE)
        self.identity: str = digest.hex()
        try:
            found: object = json.loads(manifest)
        except (ValueError, RecursionError) as error:
            raise DamagedError(f"the manifest: {error}") from None
        return found


def _places(sizes: Sequence[int]) -> tuple[list[int], int, int]:
    """Where sections of so many bytes begin, and where the small ones end, and all of them."""
    starts, end = [0] * len(sizes), 0
    for number, size in enumerate(sizes):
        if size <= _SMALL:
            starts[number], end = end, _aligned(end + size, _LINE)
    small = end
    for number, size in enumerate(sizes):
        if size > _SMALL:
            starts[number] = _aligned(end, _PAGE)
            end = starts[number] + size
    return starts, small, end


def _aligned(place: int, alignment: int) -> int:
    """The first multiple of `alignment` from `place` on."""
    return -(-place // alignment) * alignment


def _mapped(file: BinaryIO) -> Bytes:
    """The bytes of a file, where the system has them. Raises OSError, and ValueError for an empty one."""
    return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


def _read(file: BinaryIO, what: str) -> Bytes:
    """The bytes of a file in memory of this process. Raises OSError, and ResourceError, which says `what` it is."""
    size = os.fstat(file.fileno()).st_size
    found = unshared_bytes(size, what)
    left = found.data
    while left:
        done = file.readinto(left[:_MOST_AT_ONCE])  # type: ignore[attr-defined]  # a BufferedReader
        if not done:
            raise OSError(0, "it ended while it was read")
        left = left[done:]
    found.flags.writeable = False
    return found
