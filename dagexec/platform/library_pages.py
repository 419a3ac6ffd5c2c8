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
from pathlib import Path

_mappings: set[tuple[int, int]] = set()  # address and length of the code of libraries to be given back


def give_back_when_prepared(path: str) -> None:
    """From now on `give_back_library_pages` gives the code of the loaded library at `path` back.

    Only code that is as it is in the file: pages that were written to, as by a debugger, would be lost.
    """
    if sys.platform == "linux":
        _mappings.update(_unchanged_code(os.path.realpath(path)))


def give_back_library_pages() -> None:
    """Take the code of those libraries out of this process's memory until it is used again. It takes some 0.3 ms."""
    for address, length in _mappings:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def _unchanged_code(path: str) -> list[tuple[int, int]]:
    """Address and length of the executable mappings of a file that have no page of their own."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return []
    found: list[tuple[int, int]] = []
    is_code = False
    for line in lines:
        fields = line.split(maxsplit=5)
        if not fields[0].endswith(":"):
            start, end = (int(number, 16) for number in fields[0].split("-"))
            is_code = fields[1] == "r-xp" and len(fields) == 6 and fields[5] == path
        elif is_code and fields[0] == "Anonymous:" and fields[1] == "0":
            found.append((start, end - start))
    return found
