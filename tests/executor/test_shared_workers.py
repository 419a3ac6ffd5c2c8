"""The workers that a process has for executors which are told nothing of workers, and who does not get them."""

from __future__ import annotations

import gc
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import numpy as np
import pytest

import dagexec
from dagexec.errors import ResourceError
from dagexec.executor.executor import Executor
from dagexec.platform.threads import SystemThreads
from dagexec.scheduler.workers.place import SharedWorkers
from dagexec.tracing import Trace
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.new_threads import new_threads

CORES = 4


@pytest.fixture(autouse=True)
def _cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.platform.processor.available_cores", lambda: CORES)
    monkeypatch.setattr(
        "dagexec.executor.source.options.shared_workers", SharedWorkers()
    )  # others may have dropped theirs


def compiled(**options: object) -> Executor:
    return dagexec.compile(doubled_model(), optimize=False, **options)  # type: ignore[arg-type]


def test_threads_come_with_work_up_to_the_cores_and_end_with_the_last() -> None:
    count = new_threads()
    executors, counts = [], []
    for number in range(2 * CORES):
        executors.append(compiled(net_type="simple"))
        counts.append(executors[-1]._pool.num_workers)
        executors[-1].run({"x": rows(number)})
    assert counts == [1, 2, 3, 4, 4, 4, 4, 4]
    assert {executor.num_workers for executor in executors} == {1}
    assert count() == 0
    for number, executor in enumerate(executors):
        np.testing.assert_array_equal(executor.run({"x": rows(number)}, timeout=PATIENCE)["y"], rows(2 * number))
        assert 0 < count() <= CORES
        executor.close()
    assert count() == 0
    with compiled(net_type="simple") as again:
        np.testing.assert_array_equal(again.run({"x": rows(3)}, timeout=PATIENCE)["y"], rows(6))
        assert count() == 1


def test_a_run_ends_with_an_error_where_the_system_starts_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with compiled() as executor:
        with monkeypatch.context() as patched:
            patched.setattr(SystemThreads, "start", refused)
            np.testing.assert_array_equal(executor.run({"x": rows(1)})["y"], rows(2))  # in the caller's thread
            with pytest.raises(ResourceError, match="dagexec-shared: no thread for a run: can't start new thread"):
                executor.run({"x": rows(1)}, trace=Trace())
        np.testing.assert_array_equal(executor.run({"x": rows(2)}, trace=Trace())["y"], rows(4))


def test_executors_that_were_dropped_leave_no_thread() -> None:
    started = new_threads()
    for _ in range(3):
        compiled().run({"x": rows(1)})
    gc.collect()
    assert any(started() == 0 for _ in range(1_000_000))


@pytest.mark.parametrize("options", [{"num_workers": 2}, {"pool": "own"}], ids=str)
def test_who_asks_for_workers_gets_their_own(options: dict[str, object]) -> None:
    with compiled() as shared, compiled(**options) as own, compiled() as another:
        assert own._pool is not shared._pool is another._pool


def test_an_operator_of_the_application_does_not_hold_a_shared_worker(held: Held) -> None:
    with dagexec.compile(doubled_model("Held"), optimize=False) as own, compiled() as shared:
        assert own._pool is not shared._pool
        with ThreadPoolExecutor(CORES) as threads:
            running = threads.submit(own.run, {"x": rows(1)}, timeout=PATIENCE)
            assert held.inside.acquire(timeout=PATIENCE)
            np.testing.assert_array_equal(shared.run({"x": rows(2)}, timeout=PATIENCE)["y"], rows(4))
            held.go_on.release()
            running.result(PATIENCE)


def test_a_child_has_shared_workers_of_its_own() -> None:
    with compiled() as executor:
        executor.run({"x": rows(1)})
        child = os.fork()
        if not child:
            try:
                signal.alarm(PATIENCE)
                executor.reopen()
                with compiled() as new:
                    right = all(np.array_equal(one.run({"x": rows(3)})["y"], rows(6)) for one in (executor, new))
                    shared = executor._pool is new._pool
                executor.close()
                os._exit(0 if right and shared and threading.active_count() == 1 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        np.testing.assert_array_equal(executor.run({"x": rows(2)}, timeout=PATIENCE)["y"], rows(4))


def test_requests_of_many_executors_are_served_by_few_workers() -> None:
    executors = [compiled(replicas=2) for _ in range(6)]
    with ThreadPoolExecutor(12) as threads:
        runs = [
            threads.submit(executors[number % 6].run, {"x": rows(number)}, timeout=PATIENCE) for number in range(240)
        ]
        for number, run in enumerate(runs):
            np.testing.assert_array_equal(run.result(PATIENCE)["y"], rows(2 * number))
    for executor in executors:
        executor.close()
