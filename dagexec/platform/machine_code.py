"""Machine code that is written at run time: where it lives, and how it is called.

Code is written to memory first and made executable then, never both at once. It stays for good: at the end of the
process a daemon thread may be in it when all of Python's objects are gone. Systems that forbid that, other processors
than x86-64 and other systems than Linux have none, and whoever wants it does without.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import platform
import sys
from functools import cache

from dagexec.errors import ResourceError

logger = logging.getLogger("dagexec")


def is_supported() -> bool:
    """True on x86-64 Linux, whose calling convention is the one that is written here."""
    return sys.platform == "linux" and platform.machine() == "x86_64" and sys.maxsize >= 1 << 32


def executable(code: bytes) -> int | None:
    """The address of a copy of `code` that outlives the interpreter; None where it cannot be run.

    Raises ResourceError where there is no memory for it.
    """
    if not is_supported():
        return None
    size = -(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        libc = _with_errors()
        writable, own = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = libc.mmap(None, ctypes.c_size_t(size), writable, own, -1, ctypes.c_long())
        if address in (None, _FAILED):
            raise _last_error("mmap")
        ctypes.memmove(address, code, len(code))
        if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
            raise _last_error("mprotect")
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
            raise ResourceError(f"{size:,} bytes for machine code: the system refused the allocation") from None
        logger.info("no machine code can be written here: %s", str(error))
        return None
    return int(address)


@cache
def _with_errors() -> ctypes.CDLL:
    """The C library, whose `errno` can be asked for."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc


_FAILED = ctypes.c_void_p(-1).value


def _last_error(function: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{function}: {os.strerror(number)}")


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
