"""A process that may not have much memory: a net runs, or ResourceError says what there was no room for."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec.errors import ResourceError
from dagexec.ops.engines.onednn.binding import library
from dagexec.platform import host_memory, machine_code, system
from dagexec.platform.host_memory import check_room

MIB = 1 << 20
FEEDS = {"data": np.zeros((1, 1, 28, 28), np.float32)}

SWEEP = """
import hashlib, mmap, os, resource, sys
import numpy as np
import dagexec
from dagexec.errors import ResourceError

def in_child(kind, mib):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            if mib is not None:
                field = {resource.RLIMIT_AS: 0, resource.RLIMIT_DATA: 5}[kind]
                used = int(open("/proc/self/statm").read().split()[field]) * mmap.PAGESIZE
                resource.setrlimit(kind, (used + (mib << 20), resource.RLIM_INFINITY))
            with dagexec.compile("zoo:squeezenet", intra_op_threads=2, num_workers=1) as executor:
                data = np.linspace(0, 1, 3 * 224 * 224, dtype=np.float32).reshape(1, 3, 224, 224)
                found = b"".join(array.tobytes() for array in executor.run({"data": data}).values())
            os.write(write, hashlib.sha256(found).hexdigest().encode())
        except ResourceError:
            os.write(write, b"ResourceError")
        except BaseException as error:
            os.write(write, repr(error).encode())
        os._exit(0)
    os.close(write)
    status = os.waitpid(child, 0)[1]
    with os.fdopen(read) as file:
        return file.read() or f"ended with status {status}"

kind = getattr(resource, sys.argv[1])
right = in_child(kind, None)
print(len(right))
for mib in (*range(4, 300, 23), 1500):  # below 4, Python has no room for modules that are still to be imported
    found = in_child(kind, mib)
    print(mib, "right" if found == right else found)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits and what is used are Linux's")
@pytest.mark.parametrize("kind", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_with_any_limit_a_net_runs_or_ends_with_a_resource_error(kind: str) -> None:
    done = subprocess.run([sys.executable, "-c", SWEEP, kind], capture_output=True, text=True, check=False)
    first, *lines = done.stdout.splitlines()
    assert (done.returncode, first) == (0, "64"), done.stderr
    found = [line.split(" ", 1)[1] for line in lines]
    assert set(found) == {"right", "ResourceError"}, lines
    assert (found[0], found[-1]) == ("ResourceError", "right")


@contextmanager
def sixteen_mib_more(limit: str) -> Iterator[None]:
    """Within the block, the process may have 16 MiB more."""
    kind, field = getattr(resource, limit), {"RLIMIT_AS": 0, "RLIMIT_DATA": 5}[limit]
    before = resource.getrlimit(kind)
    used = int(Path("/proc/self/statm").read_text().split()[field]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(kind, (used + 16 * MIB, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.skipif(sys.platform != "linux", reason="limits and what is used are Linux's")
@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_DATA"])
def test_a_library_is_called_only_with_room_to_spare(limit: str) -> None:
    with (
        sixteen_mib_more(limit),
        pytest.raises(ResourceError, match=r"x: the \w+ \w+ of this process \(limit [\d,]+\) has .* bytes left"),
    ):
        check_room("x")


def test_a_system_that_promises_no_more_than_it_has_is_asked_what_it_has_promised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "overcommit").write_text("2\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8000000 kB\nMemAvailable: 4000000 kB\nCommitLimit: 5020000 kB\nCommitted_AS: 5000000 kB\nHuge: 0\n"
    )
    monkeypatch.setattr(system, "_MEMORY", tmp_path / "meminfo")
    check_room("x")  # this machine's own settings
    monkeypatch.setattr(host_memory, "_OVERCOMMIT", str(tmp_path / "overcommit"))
    host_memory._counts_promises.cache_clear()
    try:
        with pytest.raises(ResourceError, match="x: what this machine promises has 20,480,000 bytes left"):
            check_room("x")
        assert host_memory.reserve(MIB) is None  # which would count, too
    finally:
        host_memory._counts_promises.cache_clear()


@pytest.mark.skipif(library() is None or sys.platform != "linux", reason="needs oneDNN, and Linux's limits")
def test_a_primitive_that_there_is_no_room_for_names_its_operator_and_the_next_run_is_right() -> None:
    with dagexec.compile("zoo:lenet", num_workers=1) as other, dagexec.compile("zoo:lenet", num_workers=1) as executor:
        with sixteen_mib_more("RLIMIT_AS"), pytest.raises(ResourceError, match=r"'conv1' .*net 'lenet'.* bytes left"):
            executor.run(FEEDS)
        found, expected = executor.run(FEEDS), other.run(FEEDS)
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }


@pytest.mark.skipif(not machine_code.is_supported(), reason="no machine code is written here")
def test_machine_code_without_memory_is_a_resource_error() -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1, before[1]))
    try:
        with pytest.raises(ResourceError, match="4,096 bytes for machine code: the system refused the allocation"):
            machine_code.executable(b"\xc3")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
