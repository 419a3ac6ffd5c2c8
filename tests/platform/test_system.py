"""What systems tell of their machines: Linux's own, and macOS and Windows as libraries that answer as theirs do."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dagexec.platform import system
from dagexec.platform.system import Cache


class Macos:
    """The C library of a machine."""

    values = {
        "machdep.cpu.brand_string": b"Apple M2\0",
        "hw.memsize": struct.pack("<Q", 16 << 30),
        "hw.perflevel0.l1dcachesize": struct.pack("<q", 128 << 10),
        "hw.l1dcachesize": struct.pack("<q", 64 << 10),
        "hw.l2cachesize": struct.pack("<q", 4 << 20),
    }

    def sysctlbyname(self, name: bytes, value: Any, size: Any, _new: None, _length: object) -> int:
        told = self.values.get(name.decode())
        if told is None:
            return -1
        value[: len(told)] = told
        size._obj.value = len(told)
        return 0


class Windows:
    """Its kernel, with two cores, of which this process may use one."""

    rows = [(1, 0, 0, 0, 0, 0), (1, 2, 1, 8, 48 << 10, 2), (1, 2, 1, 8, 32 << 10, 1), (3, 2, 3, 0xFF, 30 << 20, 0)]
    rows += [(2, 2, 1, 8, 48 << 10, 2)]

    def GlobalMemoryStatusEx(self, status: Any) -> int:  # noqa: N802
        assert struct.unpack_from("<I", status)[0] == 64
        struct.pack_into("<QQ", status, 8, 8 << 30, 3 << 30)
        return 1

    def GetProcessAffinityMask(self, handle: Any, mask: Any, _system: Any) -> int:  # noqa: N802
        assert handle.value == ctypes.c_void_p(-1).value
        mask._obj.value = 2
        return 1

    def GetLogicalProcessorInformation(self, told: Any, size: Any) -> int:  # noqa: N802
        rows = b"".join(struct.pack("<QI4xBB2xII4x", *row) for row in self.rows)
        enough, size._obj.value = size._obj.value >= len(rows), len(rows)
        if enough:
            told[: len(rows)] = rows
        return enough


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], None]:
    def change(name: str, library: object) -> None:
        monkeypatch.setattr(system.sys, "platform", name)
        monkeypatch.setattr(system, "_library", lambda: library)
        monkeypatch.delattr(os, "sched_getaffinity", raising=False)
        monkeypatch.setattr(system, "_PROCESSOR", Path("/nowhere"))

    return change


def test_macos(on: Callable[[str, object], None]) -> None:
    on("darwin", Macos())
    assert system.processor_name() == "Apple M2"
    assert system.memory_fields() == {"MemTotal": 16 << 30}
    assert system.caches() == (Cache(1, 128 << 10, 0), Cache(2, 4 << 20, 0))
    assert system.affinity() == os.cpu_count()


def test_windows(on: Callable[[str, object], None]) -> None:
    on("win32", Windows())
    assert system.memory_fields() == {"MemTotal": 8 << 30, "MemAvailable": 3 << 30}
    assert system.caches() == (Cache(1, 48 << 10, 8), Cache(3, 30 << 20, 0))
    assert (system.affinity(), system.processor_name()) == (1, "")


@pytest.mark.parametrize("name", ["darwin", "win32"])
def test_what_is_not_told_is_left_out(name: str, on: Callable[[str, object], None]) -> None:
    on(name, object())
    assert (system.memory_fields(), system.caches(), system.processor_name()) == ({}, (), "")
    assert system.affinity() == os.cpu_count()


def test_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a cache of instructions, a core that is described in part, and one that is not."""
    for name, fields in {
        "index0": {"type": "Data", "level": "1", "size": "48K", "ways_of_associativity": "12"},
        "index1": {"type": "Instruction", "level": "1", "size": "32K", "ways_of_associativity": "8"},
        "index2": {"type": "Unified", "level": "2", "size": "2M", "ways_of_associativity": "16"},
        "index3": {"type": "Unified", "level": "3"},
    }.items():
        (tmp_path / name).mkdir()
        for field, value in fields.items():
            (tmp_path / name / field).write_text(value + "\n")
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Some\nflags\t\t: avx2 fma\n")
    (tmp_path / "meminfo").write_text("MemTotal:       1024 kB\nMemAvailable:    512 kB\nHugePages_Total:       0\n")
    for setting, path in (("_CACHES", ""), ("_PROCESSOR", "cpuinfo"), ("_MEMORY", "meminfo")):
        monkeypatch.setattr(system, setting, tmp_path / path)
    monkeypatch.setattr(system.sys, "platform", "linux")
    assert system.caches() == (Cache(1, 48 << 10, 12), Cache(2, 2 << 20, 16))
    assert (system.processor_name(), system.processor_field("flags")) == ("Some", "avx2 fma")
    assert system.memory_fields() == {"MemTotal": 1 << 20, "MemAvailable": 1 << 19, "HugePages_Total": 0}
