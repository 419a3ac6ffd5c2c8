"""Machine code on systems that this machine is none of: what each is asked for, in order, as functions record it."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
from collections.abc import Iterator
from typing import Any

import pytest

from dagexec.errors import ResourceError
from dagexec.platform import machine_code

CODE = bytes(range(64))
SIZE = mmap.PAGESIZE


class Memory:
    """A C library that gives a buffer, and records what is called."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(SIZE)
        self.address = ctypes.addressof(self.buffer)
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = ""

    def mmap(self, _place: None, size: ctypes.c_size_t, protection: int, flags: int, *_rest: object) -> int | None:
        self.calls.append(("mmap", size.value, protection, flags & machine_code._MAP_JIT))
        return self._failed() if self.refuses == "mmap" else self.address

    def mprotect(self, address: ctypes.c_void_p, size: ctypes.c_size_t, protection: int) -> int:
        self.calls.append(("mprotect", address.value == self.address, size.value, protection, self.buffer.raw[:64]))
        return -1 if self.refuses == "mprotect" else 0

    def pthread_jit_write_protect_np(self, is_protected: int) -> None:
        self.calls.append(("protect", is_protected, self.buffer.raw[:64]))

    def sys_icache_invalidate(self, address: ctypes.c_void_p, size: ctypes.c_size_t) -> None:
        self.calls.append(("flush", address.value == self.address, size.value))

    def clear_cache(self, start: ctypes.c_void_p, end: ctypes.c_void_p) -> None:
        assert start.value is not None
        assert end.value is not None
        self.calls.append(("flush", start.value == self.address, end.value - start.value))

    def _failed(self) -> int | None:
        ctypes.set_errno(errno.ENOMEM)
        return machine_code._FAILED


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Memory]:
    library = Memory()
    monkeypatch.setattr(machine_code, "_with_errors", lambda: library)
    monkeypatch.setattr(machine_code, "_flush", lambda: library.clear_cache)
    machine_code.is_supported.cache_clear()
    yield library
    machine_code.is_supported.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(machine_code.sys, "platform", system)
    monkeypatch.setattr(machine_code.platform, "machine", lambda: machine)


READ_WRITE, READ_EXECUTE = mmap.PROT_READ | mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_EXEC


@pytest.mark.parametrize(("system", "machine"), [("linux", "x86_64"), ("darwin", "x86_64"), ("linux", "aarch64")])
def test_memory_is_written_before_it_is_executable(
    system: str, machine: str, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(monkeypatch, system, machine)
    assert machine_code.executable(CODE) == memory.address
    flushed = [("flush", True, SIZE)] if machine == "aarch64" else []
    assert memory.calls == [
        ("mmap", SIZE, READ_WRITE, 0),
        ("mprotect", True, SIZE, READ_EXECUTE, CODE),
        *flushed,
    ]


def test_macos_on_arm_switches_a_thread_to_writing_and_back(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "darwin", "arm64")
    assert machine_code.executable(CODE) == memory.address
    assert memory.calls == [
        ("mmap", SIZE, READ_WRITE | mmap.PROT_EXEC, machine_code._MAP_JIT),
        ("protect", 0, bytes(64)),
        ("protect", 1, CODE),
        ("flush", True, SIZE),
    ]


def test_windows_says_why_it_has_none(
    memory: Memory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on(monkeypatch, "win32", "AMD64")
    with caplog.at_level(logging.INFO, "dagexec"):
        assert [machine_code.executable(CODE) for _ in range(2)] == [None, None]
    assert [record.message for record in caplog.records] == [
        "no machine code is written for the calling convention of win32"
    ]
    assert memory.calls == []


def test_what_a_system_refuses(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "linux", "aarch64")
    memory.refuses = "mprotect"
    ctypes.set_errno(errno.EACCES)
    assert machine_code.executable(CODE) is None
    memory.refuses = "mmap"
    with pytest.raises(ResourceError, match="4,096 bytes for machine code: the system refused the allocation"):
        machine_code.executable(CODE)
