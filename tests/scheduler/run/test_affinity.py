"""Workers wake up on cores that nobody holds; nothing that they start is confined to one."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dagexec.platform.processor import available_cores
from dagexec.platform.threads import SystemThreads
from dagexec.scheduler.run import affinity
from dagexec.scheduler.run.affinity import CoreWakeUp
from dagexec.scheduler.run.pool import WorkerPool
from tests.scheduler.run.test_pool import PATIENCE, run_of

pytestmark = pytest.mark.skipif(
    affinity.current_core is None or len(os.sched_getaffinity(0)) < 2,
    reason="choosing cores needs Linux and two cores; elsewhere it does nothing",
)


def _gomp() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libgomp.so.1")
    except OSError:
        return None


GOMP = _gomp()


class AnnouncingGate:
    """A lock that calls `announce` before it blocks."""

    def __init__(self, announce: Callable[[], object]) -> None:
        self._lock = threading.Lock()
        self._announce = announce

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if self._lock.acquire(False):
            return True
        self._announce()
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        self._lock.release()


class OneWorker:
    """A thread that waits once to be woken, and tells which core it holds then and where it may run."""

    def __init__(self) -> None:
        self.waits = threading.Event()
        self._ready = threading.Event()
        self._wake_up: list[CoreWakeUp] = []
        self.held: int | None = None
        self.mask: set[int] = set()
        self._thread = threading.Thread(target=self._live)
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        assert self.waits.wait(PATIENCE)

    def _live(self) -> None:
        source = SystemThreads()
        source.lock = lambda: AnnouncingGate(self.waits.set)  # type: ignore[method-assign, assignment, return-value]
        me = CoreWakeUp(placed=True, source=source)
        self._wake_up.append(me)
        self._ready.set()
        me.wait()
        self.held, self.mask = me._core, os.sched_getaffinity(0)
        me.leave()

    def wake(self) -> None:
        self._wake_up[0].wake()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@pytest.fixture
def held() -> set[int]:
    """The cores that workers hold: none, as no pool is working."""
    assert affinity._held == set()
    return affinity._held


def test_a_worker_wakes_up_on_a_core_that_nobody_holds(held: set[int]) -> None:
    everywhere = os.sched_getaffinity(0)
    for free in sorted(everywhere):
        worker = OneWorker()
        held.update(everywhere - {free})
        try:
            worker.wake()
        finally:
            held.clear()
        assert worker.held == free
        assert worker.mask == everywhere


def test_a_worker_that_is_awake_is_not_confined_by_another_wake_up(held: set[int]) -> None:
    everywhere = os.sched_getaffinity(0)
    me = CoreWakeUp(placed=True)
    held.add(min(everywhere))
    try:
        me.wake()  # two who both found something to do
        me.wake()
        assert os.sched_getaffinity(0) == everywhere
        me.wait()
        assert os.sched_getaffinity(0) == everywhere
        me.leave()
    finally:
        held.clear()


def test_working_workers_may_run_everywhere_and_give_their_cores_back(held: set[int]) -> None:
    everywhere = os.sched_getaffinity(0)
    both_inside = threading.Barrier(2)
    seen: list[tuple[set[int], int]] = []

    def note() -> None:
        both_inside.wait(PATIENCE)
        seen.append((os.sched_getaffinity(0), available_cores()))
        both_inside.wait(PATIENCE)

    cores = available_cores()
    with WorkerPool(2) as pool:
        for _ in range(5):
            done = threading.Event()
            pool.submit(run_of([[], []], {0: note, 1: note}, done))
            assert done.wait(PATIENCE)
    assert seen == [(everywhere, cores)] * 10
    assert held == set()


def test_a_single_worker_or_more_workers_than_cores_are_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    restricted: list[set[int]] = []
    monkeypatch.setattr(affinity, "_restrict", lambda _thread, cores: restricted.append(cores))
    for workers in (1, len(os.sched_getaffinity(0)) + 1):
        done = threading.Event()
        with WorkerPool(workers) as pool:
            pool.submit(run_of([[], []], {}, done))
            assert done.wait(PATIENCE)
    assert restricted == []


def test_a_worker_that_may_not_be_moved_works_all_the_same(held: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_thread: int, _cores: set[int]) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    worker = OneWorker()
    held.add(min(os.sched_getaffinity(0)))
    try:
        worker.wake()
    finally:
        held.clear()
    assert worker.mask == os.sched_getaffinity(0)


def mask_here() -> str:
    """Where the calling thread may run."""
    lines = Path(f"/proc/self/task/{threading.get_native_id()}/status").read_text().splitlines()
    return next(line for line in lines if line.startswith("Cpus_allowed_list"))


def inside_two_workers(step: Callable[[], object]) -> None:
    """Have both workers of a pool, each woken beside the other, call `step` at once; three times."""
    both_inside = threading.Barrier(2)

    def meet() -> None:
        both_inside.wait(PATIENCE)
        step()
        both_inside.wait(PATIENCE)

    with WorkerPool(2) as pool:
        for _ in range(3):
            done = threading.Event()
            pool.submit(run_of([[], []], {0: meet, 1: meet}, done))
            assert done.wait(PATIENCE)


def test_a_subprocess_of_an_operator_may_run_wherever_the_process_may() -> None:
    found: list[str] = []

    def start_a_process() -> None:
        command = ["grep", "Cpus_allowed_list", "/proc/self/status"]
        found.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())

    inside_two_workers(start_a_process)
    assert found == [mask_here()] * 6


def test_a_thread_of_an_operator_may_run_wherever_the_process_may() -> None:
    found: list[str] = []

    def start_a_thread() -> None:
        thread = threading.Thread(target=lambda: found.append(mask_here()))
        thread.start()
        thread.join()

    inside_two_workers(start_a_thread)
    assert found == [mask_here()] * 6


@pytest.mark.skipif(GOMP is None, reason="needs libgomp")
def test_the_openmp_teams_of_workers_may_run_wherever_the_process_may() -> None:
    assert GOMP is not None
    found: list[tuple[int, str]] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append((threading.get_native_id(), mask_here())))
    team = partial(GOMP.GOMP_parallel, note, None, 2, 0)
    inside_two_workers(team)
    assert len({thread for thread, _ in found}) >= 4  # two workers, and a thread of OpenMP for each
    assert {mask for _, mask in found} == {mask_here()}
