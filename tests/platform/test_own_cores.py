"""Cores that processes share out among themselves."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dagexec.platform.own_cores import OwnCores

GROUP = f"test-{os.getpid()}"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and two cores"
)


@pytest.fixture
def taken() -> Iterator[list[OwnCores]]:
    found: list[OwnCores] = []
    yield found
    for one in found:
        one.close()


def test_each_takes_a_core_that_the_fewest_others_have(taken: list[OwnCores]) -> None:
    cores = len(os.sched_getaffinity(0))
    taken += [OwnCores(1, GROUP) for _ in range(2 * cores)]
    shares = [sorted(core for one in taken[start : start + cores] for core in one.cores) for start in (0, cores)]
    assert shares == [sorted(os.sched_getaffinity(0))] * 2


def test_who_wants_all_cores_takes_none_from_others(taken: list[OwnCores]) -> None:
    taken.append(OwnCores(len(os.sched_getaffinity(0)), GROUP))
    assert taken[0].cores == os.sched_getaffinity(0)
    taken.append(OwnCores(1, GROUP))
    assert taken[1].cores == {min(os.sched_getaffinity(0))}


@pytest.mark.slow
def test_a_process_that_is_killed_has_none_any_more(taken: list[OwnCores]) -> None:
    code = (
        "from dagexec.platform.own_cores import OwnCores; "
        f"taken = OwnCores(1, {GROUP!r}); print(*taken.cores, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        [first] = process.stdout.readline().split()
        taken.append(OwnCores(1, GROUP))
        assert taken[0].cores.isdisjoint({int(first)})
        process.kill()
        process.wait()
        taken.append(OwnCores(1, GROUP))
        assert taken[1].cores == {int(first)}


def test_only_threads_that_use_them_are_bound_to_them(taken: list[OwnCores]) -> None:
    taken.append(OwnCores(1, GROUP))
    found: list[set[int]] = []

    def body() -> None:
        taken[0].use()
        inner = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
        inner.start()
        inner.join()

    before = os.sched_getaffinity(0)
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [taken[0].cores]
    assert os.sched_getaffinity(0) == before
