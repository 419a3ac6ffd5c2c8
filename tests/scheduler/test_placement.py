"""Workers hold a core each while they work, and none while they wait."""

import os
import threading

import pytest

from dagexec.scheduler import placement
from dagexec.scheduler.placement import WakeUp
from dagexec.scheduler.pool import WorkerPool
from tests.scheduler.test_pool import PATIENCE, run_of

pytestmark = pytest.mark.skipif(
    placement.current_core is None or len(os.sched_getaffinity(0)) < 2,
    reason="placement needs Linux and two cores; elsewhere it does nothing",
)


def test_two_working_workers_hold_two_cores_and_give_them_back() -> None:
    both_inside = threading.Barrier(2)
    cores: list[set[int]] = []

    def note() -> None:
        both_inside.wait(PATIENCE)
        cores.append(os.sched_getaffinity(0))
        both_inside.wait(PATIENCE)

    with WorkerPool(2) as pool:
        for _ in range(5):
            cores.clear()
            done = threading.Event()
            pool.submit(run_of([[], []], {0: note, 1: note}, done))
            assert done.wait(PATIENCE)
            assert len(cores[0]) == len(cores[1]) == 1
            assert cores[0].isdisjoint(cores[1])
    assert placement._held == set()


def test_a_single_worker_or_more_workers_than_cores_are_left_to_the_system() -> None:
    everywhere = os.sched_getaffinity(0)
    for workers in (1, len(everywhere) + 1):
        found: list[set[int]] = []
        done = threading.Event()
        with WorkerPool(workers) as pool:
            pool.submit(run_of([[]], {0: lambda found=found: found.append(os.sched_getaffinity(0))}, done))
            assert done.wait(PATIENCE)
        assert found == [everywhere]


def test_a_worker_that_may_not_be_moved_works_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(_thread: int, _cores: set[int]) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "sched_setaffinity", forbidden)
    woken = threading.Event()
    waker: list[WakeUp] = []
    ready = threading.Event()

    def worker() -> None:
        me = WakeUp(placed=True)
        waker.append(me)
        ready.set()
        me.wait()
        woken.set()
        me.leave()

    thread = threading.Thread(target=worker)
    thread.start()
    assert ready.wait(PATIENCE)
    waker[0].wake()
    assert woken.wait(PATIENCE)
    thread.join()
    assert placement._held == set()
