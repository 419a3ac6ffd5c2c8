"""Host memory: what this process may still take of it, and how much of it is committed.

The least of these numbers counts: what the machine has available, what the control groups around the process have left,
and the process's address space and private memory where they are limited. The system gives out memory when it is
touched first, long after it was requested. So large blocks are kept in a list, and what nothing has touched of them is
taken off.

Some libraries end the process when they get no memory: before they are called, there must be room for all they may take
(`check_room`).
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.errors import ResourceError
from dagexec.platform.cgroups import control_groups, memory_left, memory_limit
from dagexec.platform.library_pages import give_back_library_pages
from dagexec.platform.records import dataclass
from dagexec.platform.system import memory_fields
from dagexec.platform.threads import threads

Array = npt.NDArray[Any]

_OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
_UNDEFINED = 0xA5
"""A byte of memory that nobody has written to yet, where that matters: four are about -3e-16 as a float32."""

_LINE = 64  # bytes: a cache line, and the widest vector register
_FRESH = 0.05  # seconds for which a number is believed
_FRESH_FOR_SMALL = 1.0  # seconds, for less than a part of it
_SMALL_PART = 64
_SPARE = 1 << 30  # bytes of addresses behind a block that may grow
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # of Linux; named by Python 3.13
_MIN_MAPPED = 1 << 20  # bytes: a program keeps smaller pieces for itself when they are free
_MIN_LISTED = 1 << 16  # bytes: smaller blocks are not listed, since preparation adds up what it takes
_ROOM = 32 << 20  # bytes: eight times what the largest of 1,100 primitives of bundled nets took to be made


@dataclass(frozen=True)
class Limit:
    """Bytes that are left of something.

    Attributes:
        left: the bytes.
        owner: who has them, for messages.
        committed: whether blocks that nothing has touched yet are among those left.
    """

    left: int
    owner: str
    committed: bool = True


def physical_bytes() -> int:
    """Bytes of memory that the machine has."""
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return memory_fields().get("MemTotal", sys.maxsize)


def limits() -> Iterator[Limit]:
    """All that bounds what this process may take, as of now."""
    physical = physical_bytes()
    yield Limit(_available(physical), "this machine")
    for folder in dict.fromkeys(control_groups("memory")):
        limit = memory_limit(folder)
        left = memory_left(folder, limit) if limit is not None and limit < physical else None
        if left is not None:
            yield Limit(left, f"the control group {folder} (limit {limit:,})")
    yield from _limited()


def _available(physical: int) -> int:
    return memory_fields().get("MemAvailable", physical)


@functools.cache
def _counts_promises() -> bool:
    """True where the system promises no more memory than it has, touched or not, and refuses the rest."""
    try:
        with open(_OVERCOMMIT, encoding="ascii") as file:
            return file.read().strip() == "2"
    except OSError:
        return False


def _limited() -> Iterator[Limit]:
    """What is left of the address space, and of memory that may be promised, where there is a limit."""
    if sys.platform != "linux":
        return
    import resource

    for number, field, owner in (
        (resource.RLIMIT_AS, 0, "the address space of this process"),
        (resource.RLIMIT_DATA, 5, "the private memory of this process"),
    ):
        limit, _ = resource.getrlimit(number)
        if limit != resource.RLIM_INFINITY:
            left = max(0, limit - (_used(field) or 0))
            yield Limit(left, f"{owner} (limit {limit:,})", committed=False)
    if _counts_promises():
        found = memory_fields()
        if "CommitLimit" in found:
            left = max(0, found["CommitLimit"] - found.get("Committed_AS", 0))
            yield Limit(left, "what this machine promises", committed=False)


def _used(field: int) -> int | None:
    """Bytes that this process has, by the field of Linux's `statm`; None where that is not known."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[field]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return None


def address_space_is_limited() -> bool:
    """True when addresses cost something, even those of memory that is never touched."""
    return any(True for _ in _limited())


@dataclass(frozen=True, slots=True)
class _Block:
    address: int
    nbytes: int
    reference: weakref.ref[Array]


class CommittedMemory:
    """Large blocks that were requested and live; the system may not have given all of them yet."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self._recent: list[int] = []  # bytes of those listed since `nbytes` was asked last
        self._committed = 0  # bytes of the others that nothing has touched, or more
        self._seen = -math.inf
        self._limits: tuple[Limit, ...] = ()

    def add(self, owner: Array, nbytes: int, start: int = 0) -> None:
        """List `nbytes` bytes from `start` of the memory of `owner`, for as long as that array lives."""
        if nbytes < _MIN_LISTED:
            return
        address = owner.__array_interface__["data"][0] + start
        reference = weakref.ref(owner, partial(self._blocks.pop, address))
        self._blocks[address] = _Block(address, nbytes, reference)
        self._recent.append(nbytes)

    def remove(self, owner: Array) -> None:
        """Take what is in the memory of `owner` off the list."""
        start = owner.__array_interface__["data"][0]
        for address in self._blocks.copy():
            if start <= address < start + owner.nbytes:
                self._blocks.pop(address, None)

    def shortage(self, nbytes: int) -> Limit | None:
        """The limit that `nbytes` more bytes would exceed, and what is left beside committed memory; None: no limit.

        Cheap while there is plenty.
        """
        age = time.monotonic() - self._seen
        if age < _FRESH_FOR_SMALL:
            taken = nbytes + sum(self._recent)
            if self._short(taken if age < _FRESH else _SMALL_PART * taken) is None:
                return None
        blocks = tuple(self._blocks.copy().values())  # blocks that die meanwhile leave the dict
        self._recent = []
        self._limits = tuple(limits())
        self._seen = time.monotonic()
        self._committed = sum(block.nbytes for block in blocks)
        if self._short(nbytes) is None:
            return None
        self._committed = sum(map(_untouched, blocks))
        return self._short(nbytes)

    def _short(self, nbytes: int) -> Limit | None:
        for limit in self._limits:
            left = max(0, limit.left - self._committed) if limit.committed else limit.left
            if nbytes > left:
                return Limit(left, limit.owner, limit.committed)
        return None


_committed_memory = CommittedMemory()


def aligned_bytes(nbytes: int, what: str) -> npt.NDArray[np.uint8]:
    """`nbytes` new bytes on a cache line. Raises ResourceError, saying `what` they are, when they are not to be had.

    In a controlled schedule they are never what the one before has left there, which may well be the right values.
    """
    check_fits(nbytes, what)
    try:
        raw = np.empty(nbytes + _LINE, np.uint8)
    except MemoryError:
        raise ResourceError(f"{what} of {nbytes:,} bytes: the system refused the allocation") from None
    commit(raw, nbytes)
    if not threads().concurrent:
        raw.fill(_UNDEFINED)
    offset = -raw.ctypes.data % _LINE
    return raw[offset : offset + nbytes]


def unshared_bytes(nbytes: int, what: str) -> npt.NDArray[np.uint8]:
    """As `aligned_bytes`; much of it goes back to the system when nothing needs it any more."""
    if nbytes < _MIN_MAPPED or not hasattr(mmap, "MAP_PRIVATE"):
        return aligned_bytes(nbytes, what)
    check_fits(nbytes, what)
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, MemoryError, OverflowError):
        raise ResourceError(f"{what} of {nbytes:,} bytes: the system refused the allocation") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def reserve(nbytes: int) -> Array | None:
    """Host memory of `nbytes` bytes and as many addresses behind, or 1 GiB; None where addresses are counted, or gone.

    It begins on a page, and pages are taken when they are touched first.
    """
    if sys.platform != "linux" or address_space_is_limited():
        return None
    try:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        return np.frombuffer(mmap.mmap(-1, nbytes + max(nbytes, _SPARE), flags=flags), np.uint8)
    except (OSError, OverflowError):
        return None


def check_fits(nbytes: int, what: str) -> None:
    """Raise ResourceError when this process cannot take `nbytes` more bytes; `what` names it in the message."""
    short = _committed_memory.shortage(nbytes)
    if short is not None:
        raise ResourceError(f"{what} needs {nbytes:,} bytes; {short.owner} has {short.left:,} left")


def check_room(what: str) -> None:
    """Raise ResourceError where a library that is about to do `what` might be refused memory, and end the process then.

    Limits of what is touched refuse nothing: whoever takes much of that calls `check_fits`.
    """
    for limit in _limited():
        if limit.left < _ROOM:
            raise ResourceError(f"{what}: {limit.owner} has {limit.left:,} bytes left; {_ROOM:,} must be, to be safe")


def fits(nbytes: int) -> bool:
    """True when `check_fits` would raise nothing: for who calls it often, and makes its message only where it does."""
    return _committed_memory.shortage(nbytes) is None


def commit(owner: Array, nbytes: int, start: int = 0) -> None:
    """Let later checks know that `nbytes` bytes from `start` of the array's memory are going to be used."""
    _committed_memory.add(owner, nbytes, start)


def decommit(owner: Array, nbytes: int) -> None:
    """Give the first `nbytes` bytes of what `reserve` gave back to the system. They are zeros when touched next."""
    whole = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    if _madvise is not None and not _madvise(owner.ctypes.data, whole, mmap.MADV_DONTNEED):
        _committed_memory.remove(owner)


def give_back_pages(address: int, nbytes: int) -> None:
    """Give the whole pages within these bytes back to the system. They are zeros when touched next."""
    first, last = -(-address // mmap.PAGESIZE), (address + nbytes) // mmap.PAGESIZE
    if _madvise is not None and first < last:
        _madvise(first * mmap.PAGESIZE, (last - first) * mmap.PAGESIZE, mmap.MADV_DONTNEED)


def give_back_free_memory(about: int) -> bool:
    """Have the C library give memory that is free back to the system, which it keeps between what is in use.

    Libraries' pages that were only needed to prepare (`library_pages`) go as well.

    It takes under a millisecond for every 10 MB that it gives back, and some 0.1 ms to look for them: so `about` as
    many bytes as were taken for a while must be worth it. False where it is not, or the library has no such function.
    """
    give_back_library_pages()
    if _malloc_trim is None or about < _WORTH_GIVING_BACK:
        return False
    _malloc_trim(0)
    return True


_WORTH_GIVING_BACK = 1 << 20
"""Bytes."""


def _of_c_library(name: str, *arguments: Any) -> Any:
    """A function of the C library of Linux; None where there is none."""
    if sys.platform != "linux":
        return None
    try:
        function = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = arguments
    return function


_mincore = _of_c_library("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_malloc_trim = _of_c_library("malloc_trim", ctypes.c_size_t)
_madvise = _of_c_library("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def _untouched(block: _Block) -> int:
    """Bytes of a block's pages that the system has not given yet; 0 where it does not tell."""
    if _mincore is None or block.reference() is None:
        return 0
    page = mmap.PAGESIZE
    first = -(-block.address // page)
    count = (block.address + block.nbytes) // page - first
    if count <= 0:
        return 0
    resident = np.zeros(count, np.uint8)
    if _mincore(first * page, count * page, resident.ctypes.data):
        return 0
    return int(count - np.count_nonzero(resident & 1)) * page
