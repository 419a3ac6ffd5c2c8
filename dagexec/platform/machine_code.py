"""Machine code that is written at run time: where it lives, and how it is called.

Code is written to memory first and made executable then, never both at once. It stays for good: at the end of the
process a daemon thread may be in it when all of Python's objects are gone. It runs on x86-64 and on 64-bit Arm, under
Linux and macOS, whose calling conventions are those that are written. Systems that forbid to execute what was written
have none, nor has Windows, whose convention is another; whoever wants it does without.

macOS on Arm gives such memory only with MAP_JIT, and each thread switches whether it writes there or executes (Apple,
"Porting just-in-time compilers to Apple silicon"). Processors of Arm read instructions past the cache of data, which is
therefore flushed: by the C compiler's own function, where there is one, as Linux does when a page is made executable.
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

_ARM = ("aarch64", "arm64")
_MAP_JIT = 0x0800  # macOS, sys/mman.h


@cache
def is_supported() -> bool:
    """True on x86-64 and 64-bit Arm under Linux and macOS, for whose calling conventions code is written here."""
    if platform.machine() in ("x86_64", "AMD64", *_ARM) and sys.maxsize >= 1 << 32:
        if sys.platform in ("linux", "darwin"):
            return True
        logger.info("no machine code is written for the calling convention of %s", sys.platform)
    return False


def executable(code: bytes) -> int | None:
    """The address of a copy of `code` that outlives the interpreter; None where it cannot be run.

    Raises ResourceError where there is no memory for it.
    """
    if not is_supported():
        return None
    size = -(-len(code) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        return _switched(code, size) if _is_switched() else _protected(code, size)
    except (OSError, AttributeError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOMEM, errno.EAGAIN):
            raise ResourceError(f"{size:,} bytes for machine code: the system refused the allocation") from None
        logger.info("no machine code can be written here: %s", str(error))
        return None


def _is_switched() -> bool:
    return sys.platform == "darwin" and platform.machine() in _ARM


def _protected(code: bytes, size: int) -> int:
    """Memory that is written first, and executable then."""
    libc = _with_errors()
    address = _mapped(mmap.PROT_READ | mmap.PROT_WRITE, 0, size)
    ctypes.memmove(address, code, len(code))
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_EXEC):
        raise _last_error("mprotect")
    flush = _flush() if platform.machine() in _ARM else None
    if flush is not None:
        flush(ctypes.c_void_p(address), ctypes.c_void_p(address + size))
    return address


def _switched(code: bytes, size: int) -> int:
    """Memory that this thread may write for a moment, as macOS on Arm has it."""
    libc = _with_errors()
    address = _mapped(mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC, _MAP_JIT, size)
    libc.pthread_jit_write_protect_np(0)
    try:
        ctypes.memmove(address, code, len(code))
    finally:
        libc.pthread_jit_write_protect_np(1)
    libc.sys_icache_invalidate(ctypes.c_void_p(address), ctypes.c_size_t(size))
    return address


def _mapped(protection: int, flags: int, size: int) -> int:
    own = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags
    address = _with_errors().mmap(None, ctypes.c_size_t(size), protection, own, -1, ctypes.c_long())
    if address in (None, _FAILED):
        raise _last_error("mmap")
    return int(address)


@cache
def _flush() -> ctypes._NamedFuncPointer | None:
    """The C compiler's function that makes what was written visible to whoever executes it; None without it."""
    try:
        return ctypes.CDLL("libgcc_s.so.1")["__clear_cache"]
    except (OSError, AttributeError):
        return None


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
    if _libc is None or _is_switched():
        return True
    change, address = _libc.mprotect, ctypes.c_void_p(_trial_address)
    allowed = not change(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC)
    change(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    return allowed


_libc = ctypes.PyDLL(None) if is_supported() else None
_trial = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if _libc else None
_trial_address = ctypes.addressof(ctypes.c_char.from_buffer(_trial)) if _trial else 0
