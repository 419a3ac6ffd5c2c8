"""What the system tells of its machine: Linux by files of /proc and /sys, macOS by `sysctl`, Windows by its kernel.

What cannot be had is left to whoever asks, with a line of the log (DEBUG). The ways of macOS and Windows follow Apple's
"sysctlbyname(3)" and Microsoft's reference of `GlobalMemoryStatusEx` and `GetLogicalProcessorInformation`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger("dagexec")

_PROCESSOR = Path("/proc/cpuinfo")
_MEMORY = Path("/proc/meminfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 10, "M": 20, "G": 30}
_CACHE, _DATA_CACHES = 2, (0, 2)  # of Windows: LOGICAL_PROCESSOR_RELATIONSHIP, PROCESSOR_CACHE_TYPE


class Cache(NamedTuple):
    """A cache of a core that holds data.

    Attributes:
        level: 1 is the nearest.
        nbytes: its size.
        ways: places that a line of memory may have; 0 where that is not told.
    """

    level: int
    nbytes: int
    ways: int


def processor_field(name: str) -> str:
    """What Linux tells of the first core under a name, such as "flags"; "" elsewhere."""
    try:
        lines = _PROCESSOR.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def processor_name() -> str:
    """As its maker calls it; "" where that is not told."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string").rstrip(b"\0").decode("ascii", "replace")
    return processor_field("model name")


def memory_fields() -> dict[str, int]:
    """Bytes by name, as Linux has them: MemTotal and MemAvailable elsewhere, too, as far as the system tells."""
    if sys.platform == "darwin":
        total = _number(_sysctl("hw.memsize"))
        return {"MemTotal": total} if total else {}
    if sys.platform == "win32":
        status = bytearray(struct.pack("<II", 64, 0) + bytes(56))
        if not _asked("GlobalMemoryStatusEx", (ctypes.c_char * 64).from_buffer(status)):
            return {}
        return dict(zip(("MemTotal", "MemAvailable"), struct.unpack_from("<QQ", status, 8), strict=True))
    try:
        lines = [line.partition(":") for line in _MEMORY.read_text(encoding="ascii").splitlines()]
        return {name: int(rest.split()[0]) << 10 for name, _, rest in lines}
    except (OSError, ValueError, IndexError):
        return {}


def affinity() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    masks = ctypes.c_size_t(), ctypes.c_size_t()
    current = ctypes.c_void_p(-1)  # a handle that stands for this process
    if sys.platform == "win32" and _asked("GetProcessAffinityMask", current, *map(ctypes.byref, masks)):
        return masks[0].value.bit_count()
    return os.cpu_count() or 1


def caches() -> tuple[Cache, ...]:
    """Those of the first core; none where the system does not tell."""
    return tuple({"darwin": _caches_of_macos, "win32": _caches_of_windows}.get(sys.platform, _caches_of_linux)())


def _caches_of_linux() -> Iterator[Cache]:
    for folder in sorted(_CACHES.glob("index*")):
        kind, level, size, ways = (
            _text_of(folder / name) for name in ("type", "level", "size", "ways_of_associativity")
        )
        if kind != "Instruction" and level.isdigit() and size[:-1].isdigit() and size[-1] in _UNITS:
            yield Cache(int(level), int(size[:-1]) << _UNITS[size[-1]], int(ways) if ways.isdigit() else 0)


def _text_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):
        return ""


def _caches_of_macos() -> Iterator[Cache]:
    for level, name in enumerate(("l1dcachesize", "l2cachesize", "l3cachesize"), 1):
        nbytes = _number(_sysctl(f"hw.perflevel0.{name}")) or _number(_sysctl(f"hw.{name}"))
        if nbytes:
            yield Cache(level, nbytes, 0)


def _caches_of_windows() -> Iterator[Cache]:
    size = ctypes.c_uint32()
    _asked("GetLogicalProcessorInformation", None, ctypes.byref(size))  # says how much there is
    told = bytearray(size.value)
    if not size.value or not _asked(
        "GetLogicalProcessorInformation", (ctypes.c_char * size.value).from_buffer(told), ctypes.byref(size)
    ):
        return
    for cores, relation, level, ways, nbytes, kind in struct.iter_unpack("<QI4xBB2xII4x", told):
        if relation == _CACHE and cores & 1 and kind in _DATA_CACHES:
            yield Cache(level, nbytes, ways if ways != 0xFF else 0)


def _sysctl(name: str) -> bytes:
    """What macOS tells under a name; nothing where it does not."""
    value, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    try:
        status = _library().sysctlbyname(name.encode(), value, ctypes.byref(size), None, ctypes.c_size_t())
    except (OSError, AttributeError) as error:
        logger.debug("sysctl %s: %s", name, error)
        return b""
    return b"" if status else value.raw[: size.value]


def _number(text: bytes) -> int:
    return int.from_bytes(text, "little")


def _asked(name: str, *arguments: Any) -> bool:
    """Whether a function of Windows' kernel says that it did what it was asked."""
    try:
        return bool(getattr(_library(), name)(*arguments))
    except (OSError, AttributeError) as error:
        logger.debug("%s: %s", name, error)
        return False


@cache
def _library() -> Any:
    """The C library, or Windows' kernel."""
    return ctypes.CDLL("kernel32" if sys.platform == "win32" else None)
