"""What memory may still be taken: of the machine, of control groups that are made up, of the address space."""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dagexec.errors import ResourceError
from dagexec.platform import cgroups, host_memory
from dagexec.platform.host_memory import (
    CommittedMemory,
    Limit,
    aligned_bytes,
    check_fits,
    commit,
    decommit,
    limits,
    physical_bytes,
    reserve,
)
from tests.forked import passed_alone
from tests.free_threading import not_free_threaded
from tests.memory_limits import leave

MIB = 1 << 20


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A made-up tree of control groups: the process is in `/outer/inner` of version 2 and in `/one` of version 1."""
    membership = tmp_path / "membership"
    membership.write_text("0::/outer/inner\n4:cpu,cpuacct:/cpus\n5:memory:/one\n")
    monkeypatch.setattr(cgroups, "_ROOT", tmp_path / "groups")
    monkeypatch.setattr(cgroups, "_MEMBERSHIP", membership)
    monkeypatch.setattr(host_memory, "_committed_memory", CommittedMemory())
    for folder in ("outer/inner", "unified/outer/inner", "memory/one", "cpu,cpuacct/cpus"):
        (tmp_path / "groups" / folder).mkdir(parents=True)
    return tmp_path / "groups"


def set_limit(folder: Path, limit: int | str, used: int, cache: int = 0) -> None:
    """Make the folder one of version 2 with these numbers."""
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\nfile 7\ninactive_file {cache}\nactive_file 0\n")


def set_old_limit(folder: Path, limit: int, used: int, cache: int = 0) -> None:
    """Make the folder one of version 1 with these numbers."""
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"cache 1\ninactive_file 3\ntotal_active_file {cache}\ntotal_inactive_file 0\n")


def left_of_groups() -> dict[str, int]:
    return {limit.owner: limit.left for limit in limits() if "control group" in limit.owner}


def test_without_limits_the_machine_is_the_limit(groups: Path) -> None:
    set_limit(groups / "outer", "max", 100)
    [machine] = limits()
    assert machine.owner == "this machine"
    assert 0 < machine.left <= physical_bytes()


@pytest.mark.parametrize("folder", ["", "outer", "outer/inner", "unified", "unified/outer"])
def test_every_group_around_the_process_bounds_it(groups: Path, folder: str) -> None:
    set_limit(groups / folder, 10 * MIB, 4 * MIB)
    assert list(left_of_groups().values()) == [6 * MIB]
    with pytest.raises(ResourceError, match=r"y needs 6,291,457 bytes; the control group .* has 6,291,456 left"):
        check_fits(6 * MIB + 1, "y")
    check_fits(6 * MIB, "y")


@pytest.mark.parametrize("folder", ["memory", "memory/one"])
def test_a_group_of_version_1_bounds_it(groups: Path, folder: str) -> None:
    set_old_limit(groups / folder, 10 * MIB, 4 * MIB)
    assert list(left_of_groups().values()) == [6 * MIB]


def test_groups_of_other_processes_and_controllers_do_not(groups: Path) -> None:
    (groups / "other").mkdir()
    for folder in ("other", "cpu,cpuacct/cpus"):
        set_limit(groups / folder, 10, 4)
    assert left_of_groups() == {}


def test_the_least_that_is_left_counts(groups: Path) -> None:
    set_limit(groups / "outer", 100 * MIB, 98 * MIB)
    set_limit(groups / "outer" / "inner", 50 * MIB, MIB)
    with pytest.raises(ResourceError, match=r"outer \(limit 104,857,600\) has 2,097,152 left"):
        check_fits(3 * MIB, "y")


def test_pages_of_files_are_free_for_the_taking(groups: Path) -> None:
    set_limit(groups / "outer", 10 * MIB, 9 * MIB, cache=5 * MIB)
    set_old_limit(groups / "memory", 10 * MIB, 9 * MIB, cache=4 * MIB)
    assert sorted(left_of_groups().values()) == [5 * MIB, 6 * MIB]


@pytest.mark.parametrize("content", ["", "max", "many", "9223372036854771712"])
def test_a_file_that_says_no_limit_bounds_nothing(groups: Path, content: str) -> None:
    set_limit(groups / "outer", content, 5)
    assert left_of_groups() == {}


def test_a_group_that_does_not_say_what_it_uses_bounds_nothing(groups: Path) -> None:
    (groups / "outer" / "memory.max").write_text("1000")
    assert left_of_groups() == {}


def test_a_group_that_uses_more_than_its_limit_has_nothing_left(groups: Path) -> None:
    set_limit(groups / "outer", 1000, 2000)
    assert list(left_of_groups().values()) == [0]


@pytest.fixture
def address_space() -> Iterator[int]:
    """Within the test, the process has 64 MiB of addresses left; gives the limit."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    limit = used + 64 * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield limit
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_limit_of_the_address_space_counts(groups: Path, address_space: int) -> None:
    with pytest.raises(ResourceError, match=rf"the address space of this process \(limit {address_space:,}\) has "):
        check_fits(65 * MIB, "y")
    check_fits(16 * MIB, "y")


@pytest.mark.slow
def test_memory_that_was_asked_for_and_not_touched_yet_is_taken_off(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if passed_alone(request):
        return
    leave(monkeypatch, 100 * MIB)
    first = aligned_bytes(60 * MIB, "x")  # so large that it is no memory which was used before
    check_fits(30 * MIB, "y")
    for _ in range(2):  # malloc may have touched the first page of x, which is of 2 MiB where pages are huge
        with pytest.raises(ResourceError, match=r"y needs 62,914,560 bytes; this machine has 4[1-3],"):
            aligned_bytes(60 * MIB, "y")
    del first
    aligned_bytes(60 * MIB, "y")


def test_memory_that_was_touched_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 100 * MIB)
    first = aligned_bytes(60 * MIB, "x")
    first.fill(1)  # the machine says that it has 100 MiB left beside these
    check_fits(100 * MIB - 2 * mmap.PAGESIZE, "y")
    assert first[-1] == 1


def test_memory_that_was_given_back_is_there_for_others_and_for_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    leave(monkeypatch, 100 * MIB)
    first = reserve(60 * MIB)
    assert first is not None
    commit(first, 60 * MIB)
    first[: 2 * MIB] = 1
    with pytest.raises(ResourceError):
        check_fits(60 * MIB, "y")
    decommit(first, 60 * MIB)
    check_fits(60 * MIB, "y")
    assert not first[: 2 * MIB].any()
    first[: 2 * MIB] = 2
    commit(first, 60 * MIB)
    with pytest.raises(ResourceError):
        check_fits(60 * MIB, "y")


def test_numbers_are_looked_up_anew_when_they_are_old_or_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted() -> Iterator[Limit]:
        asked.append(1)
        yield Limit(100 * len(asked), "this machine")

    now = [5.0]
    leave(monkeypatch, 0)
    monkeypatch.setattr(host_memory, "limits", counted)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for nbytes, readings in ((100, 1), (50, 1), (200, 2), (200, 2)):
        check_fits(nbytes, "x")
        assert len(asked) == readings
    now[0] += 1.0
    check_fits(50, "x")
    assert len(asked) == 3


def test_blocks_begin_on_a_cache_line() -> None:
    for nbytes in (1, 1 << 17):
        block = aligned_bytes(nbytes, "x")
        assert block.nbytes == nbytes
        assert block.ctypes.data % 64 == 0


def test_memory_that_the_system_refuses_is_a_resource_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", refuse)
    with pytest.raises(ResourceError, match="x of 1,000 bytes: the system refused the allocation"):
        aligned_bytes(1000, "x")


def test_the_machine_has_less_left_than_it_has() -> None:
    [machine, *_] = limits()
    assert machine.left < os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@not_free_threaded("its objects are not in the memory of the C library")
def test_memory_that_is_free_between_blocks_in_use_is_given_back() -> None:
    blocks = [bytes(1000) for _ in range(64 << 10)]
    last = blocks[-1]
    full = host_memory._used(1)
    del blocks
    given = host_memory.give_back_free_memory(64 << 20)
    left = host_memory._used(1)
    assert last
    if not given or full is None or left is None:
        pytest.skip("the C library keeps what it has")
    assert full - left > 32 << 20
