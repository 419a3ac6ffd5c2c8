"""Each single call of each writer and reader fails in turn: the old version is there or the new one, and all goes on.

Short writes (what an interrupting signal leaves) are no failure. Memory runs out at each single allocation, too.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dagexec.errors import DagexecError
from dagexec.platform.disk import installed
from dagexec.stress.simulated_disk import DiskCall, Failure, SimulatedDisk, system_error
from tests.storage.writers import WRITERS, Writer

FAILURES: dict[str, Callable[[], Failure]] = {
    "no room": lambda: Failure(system_error(errno.ENOSPC)),
    "a broken device": lambda: Failure(system_error(errno.EIO), late=True),
    "no memory": lambda: Failure(MemoryError()),
}


class Nth:
    """The n-th call fails, in a way of its own."""

    def __init__(self, number: int, failure: Failure, kind: str | None = None) -> None:
        self.met: DiskCall | None = None
        self._left = number
        self._failure = failure
        self._kind = kind

    def __call__(self, call: DiskCall) -> Failure | None:
        if self._kind is not None and call.kind != self._kind:
            return None
        self._left -= 1
        if self._left:
            return None
        self.met = call
        return self._failure


def opened(folder: Path) -> list[str]:
    """Files below a folder that this process has open, once nothing refers to what has failed."""
    gc.collect()
    return [path for path in map(_target, os.listdir("/proc/self/fd")) if path.startswith(str(folder))]


def _target(handle: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{handle}")
    except OSError:  # that of the list
        return ""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("dagexec"), "disabled", True)


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob(".*")]


def attempted(writer: Writer, folder: Path, version: int) -> BaseException | None:
    """What writing a version raises."""
    try:
        writer.write(folder, version)
    except (DagexecError, MemoryError) as error:
        return error.with_traceback(None)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", WRITERS)
def test_a_call_that_fails_leaves_a_whole_version_and_the_next_writer_succeeds(
    name: str, failure: str, tmp_path: Path
) -> None:
    writer, number, error = WRITERS[name], 0, None
    while True:
        number += 1
        folder = tmp_path / f"{number}"
        folder.mkdir()
        writer.write(folder, 1)
        fault = Nth(number, FAILURES[failure]())
        with installed(SimulatedDisk(folder, fault)):
            error = attempted(writer, folder, 2)
        if fault.met is None:
            break
        found = writer.read(folder)
        assert found == 2 if error is None and not writer.quiet else found in (1, 2), fault.met
        if isinstance(error, DagexecError):
            assert str(folder) in str(error), fault.met
        if fault.met.kind not in ("unlink", "remove_folder"):
            assert hidden(folder) == [], fault.met
        writer.write(folder, 3)
        assert writer.read(folder) == 3, fault.met
        assert hidden(folder) == [], fault.met
    assert opened(tmp_path) == []
    assert error is None
    assert number > 5


@pytest.mark.parametrize("name", WRITERS)
def test_a_short_write_is_continued(name: str, tmp_path: Path) -> None:
    writer, number = WRITERS[name], 0
    while True:
        number += 1
        folder = tmp_path / f"{number}"
        folder.mkdir()
        fault = Nth(number, Failure(None), "write")
        with installed(SimulatedDisk(folder, fault)):
            writer.write(folder, 1)
        assert writer.read(folder) == 1
        if fault.met is None:
            break


@pytest.mark.slow
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", WRITERS)
def test_a_reader_whose_call_fails_says_so_and_succeeds_afterwards(name: str, failure: str, tmp_path: Path) -> None:
    writer, number = WRITERS[name], 0
    writer.write(tmp_path, 1)
    while True:
        number += 1
        fault = Nth(number, FAILURES[failure]())
        with installed(SimulatedDisk(tmp_path, fault)):
            try:
                found = writer.read(tmp_path)
            except (DagexecError, MemoryError):
                found = None
        assert found in (None, 1) or (found == 0 and (writer.quiet or "checkpoint" in name))  # which is taken for lost
        assert writer.read(tmp_path) == 1
        if fault.met is None:
            break
    assert opened(tmp_path) == []


@pytest.mark.slow
def test_memory_that_runs_out_at_any_allocation_leaves_a_whole_version_and_a_process_that_goes_on() -> None:
    pytest.importorskip("_testcapi", reason="lets the n-th allocation of the interpreter fail")
    names = ("net", "results", "cache of choices", "records", "checkpoint", "checkpoint of lmdb", "ONNX in two files")
    program = [sys.executable, "-m", "tests.storage.exhausted_writers", "12", *names]
    found = subprocess.run(program, capture_output=True, text=True, check=True)
    problems = found.stdout.splitlines()
    ends = json.loads(problems.pop())
    assert problems == []
    assert ends["MemoryError"] > 30
