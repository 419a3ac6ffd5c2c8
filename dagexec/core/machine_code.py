"""Machine code that is written at run time: where it lives, and how it is called.

Code is written to memory first and made executable then, never both at once. Systems that forbid that, other processors
than x86-64 and other systems than Linux have none, and whoever wants it does without.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
import sys

logger = logging.getLogger("dagexec")

_pages: list[mmap.mmap] = []


def is_supported() -> bool:
    """True on x86-64 Linux, whose calling convention is the one that is written here."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize >= 1 << 32


def executable(code: bytes) -> int | None:
    """The address of a copy of `code` that lives as long as the process; None where it cannot be run."""
    if not is_supported():
        return None
    size = -(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))  # keeps `memory` from being closed
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(address), size, mmap.PROT_READ | mmap.PROT_EXEC):
            raise OSError(ctypes.get_errno(), "mprotect")
    except (OSError, AttributeError) as error:
        logger.info("no machine code can be written here: %s", error)
        return None
    _pages.append(memory)
    return address


def is_allowed() -> bool:
    """False where the system forbids to execute memory that was written, which it may from any moment on.

    Takes a microsecond. True where that cannot be told.
    """
    if _libc is None:
        return True
    change, address = _libc.mprotect, ctypes.c_void_p(_trial_address)
    allowed = not change(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
    change(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    return allowed


_libc = ctypes.PyDLL(None) if is_supported() else None
_trial = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if _libc else None
_trial_address = ctypes.addressof(ctypes.c_char.from_buffer(_trial)) if _trial else 0
