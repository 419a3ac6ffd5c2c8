"""Pages of a library's file that were read to load it or to prepare something, and are not needed to run.

To load a large library the system's loader reads its tables of symbols and relocations, and to prepare a primitive
oneDNN looks through many implementations. The pages stay in the process's memory although nothing reads them again.
They can be taken out of it at any time: what is read again after all is taken from the system's page cache, at about
a microsecond for 64 KiB.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np

_WORTH = 6 << 20
"""Bytes; preparing a further small net reads 4 MB of oneDNN's code."""

_mappings: set[tuple[int, int]] = set()  # address and length of the code of libraries to be given back
_left = [0]  # pages of files that stayed the last time

_ENOUGH = 8
"""Primitives; to ask the system for the pages takes 30 to 150 us."""

_made = [_ENOUGH]  # primitives since the system was asked


def note_made() -> None:
    """A primitive was made, for which a library may have read its code."""
    _made[0] += 1


def give_back_when_prepared(path: str) -> None:
    """From now on `give_back_library_pages` gives the code of the loaded library at `path` back.

    Only code that is as it is in the file: pages that were written to, as by a debugger, would be lost.
    """
    if sys.platform == "linux":
        _mappings.update(_unchanged_code(os.path.realpath(path)))


def give_back_library_pages() -> None:
    """Take the code of those libraries out of this process's memory until it is used again.

    It takes some 0.3 ms, and as long once more to take back what is used after all: so what was read since the last
    time must be worth it.
    """
    if not _mappings or _made[0] < _ENOUGH:
        return
    _made[0] = 0
    if _pages_of_files() - _left[0] < _WORTH // mmap.PAGESIZE:
        return
    for address, length in _mappings:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_DONTNEED)
    _left[0] = _pages_of_files()


def _pages_of_files() -> int:
    """Pages of files that this process has in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[2])


def _unchanged_code(path: str) -> list[tuple[int, int]]:
    """Address and length of the executable mappings of a file that have no page of their own."""
    found: list[tuple[int, int]] = []
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, access, *_, name = line.split(maxsplit=5)
            if access == "r-xp" and name == path:
                start, end = (int(number, 16) for number in span.split("-"))
                if not _has_own_pages(start, end - start):
                    found.append((start, end - start))
    return found


def _has_own_pages(address: int, length: int) -> bool:
    """Whether a page there was written to: one in memory, or swapped out, that is no longer of a file (pagemap(5))."""
    with open("/proc/self/pagemap", "rb", buffering=0) as file:
        told = os.pread(file.fileno(), 8 * (length // mmap.PAGESIZE), 8 * (address // mmap.PAGESIZE))
    pages = np.frombuffer(told, np.uint64)
    return bool(np.any((pages >> np.uint64(62) != 0) & (pages >> np.uint64(61) & np.uint64(1) == 0)))
