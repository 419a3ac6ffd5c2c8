"""One pool for many executors: what they share, and what happens when one of them, or the pool, ends."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import dagexec
import dagexec.executor.executor as executor_module
from dagexec.binding.replicas import Replicas
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, DagexecError, OperatorError, RunTimeoutError, SettingError
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.nets import temporary_operator
from tests.new_threads import new_threads


def test_executors_of_one_pool_have_its_workers_and_no_others() -> None:
    started = new_threads()
    with dagexec.Pool(workers=2) as pool:
        executors = [dagexec.compile(doubled_model(), pool=pool, optimize=False) for _ in range(20)]
        assert pool.models == ["doubled"] * 20
        for number, executor in enumerate(executors):
            assert executor.num_workers == pool.workers == 2
            np.testing.assert_array_equal(executor.run({"x": rows(number)}, timeout=PATIENCE)["y"], rows(2 * number))
        assert started() == 2
        for executor in executors:
            executor.close()
        assert pool.models == []
    assert started() == 0


def test_to_close_one_model_does_not_disturb_another(held: Held) -> None:
    with dagexec.Pool(2) as pool, ThreadPoolExecutor(1) as threads:
        first = dagexec.compile(doubled_model("Held"), pool=pool, optimize=False)
        with dagexec.compile(doubled_model(), pool=pool, optimize=False) as second:
            running = threads.submit(first.run, {"x": rows(1)}, timeout=PATIENCE)
            assert held.inside.acquire(timeout=PATIENCE)
            second.close()
            with pytest.raises(ClosedError, match="the executor is closed"):
                second.run({"x": rows(1)})
            held.go_on.release()
            np.testing.assert_array_equal(running.result(PATIENCE)["y"], [2, 2, 2])
        first.close()


def test_a_pool_in_use_is_not_closed_and_says_who_uses_it(held: Held) -> None:
    pool = dagexec.Pool(1, name="shared")
    with (
        dagexec.compile(doubled_model("Held"), pool=pool, optimize=False) as executor,
        dagexec.compile(doubled_model(), pool=pool, optimize=False),
        ThreadPoolExecutor(3) as threads,
    ):
        running = [threads.submit(executor.run, {"x": rows(1)}, timeout=PATIENCE) for _ in range(3)]
        assert held.inside.acquire(timeout=PATIENCE)
        while executor.statistics().queued < 2:
            pass
        expected = r"pool 'shared': 2 executor\(s\) with 3 unfinished request\(s\) are open on it: 'doubled', 'doubled'"
        with pytest.raises(DagexecError, match=expected):
            pool.close()
        for _ in running:
            held.go_on.release()
        assert [np.array_equal(one.result(PATIENCE)["y"], [2, 2, 2]) for one in running] == [True] * 3
        with dagexec.compile(doubled_model(), pool=pool, optimize=False) as another:
            assert another.num_workers == 1, "the refusal changed nothing"
    pool.close()
    pool.close()
    with pytest.raises(ClosedError, match=r"net 'doubled': pool 'shared' of 1 worker.* is closed"):
        dagexec.compile(doubled_model(), pool=pool, optimize=False)


def test_a_pool_is_in_use_as_soon_as_an_executor_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, build = dagexec.Pool(1), executor_module.build_replicas

    def build_while_somebody_closes(*args: Any) -> Replicas:
        with pytest.raises(DagexecError, match=r"1 executor\(s\) with 0 unfinished request\(s\)"):
            pool.close()
        return build(*args)

    monkeypatch.setattr(executor_module, "build_replicas", build_while_somebody_closes)
    with pool, dagexec.compile(doubled_model(), pool=pool, optimize=False, num_workers=1) as executor:
        np.testing.assert_array_equal(executor.run({"x": rows(1)}, timeout=PATIENCE)["y"], rows(2))


def test_an_executor_that_cannot_be_made_leaves_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_module, "build_replicas", lambda *_: 1 / 0)
    with dagexec.Pool(1) as pool:
        with pytest.raises(ZeroDivisionError):
            dagexec.compile(doubled_model(), pool=pool, optimize=False)
        assert pool.models == []


def test_an_error_from_within_the_block_goes_before_executors_that_it_left_open() -> None:
    pool = dagexec.Pool(1)
    executor = dagexec.compile(doubled_model(), pool=pool, optimize=False)
    with pytest.raises(ZeroDivisionError) as caught, pool:
        raise ZeroDivisionError
    assert ["1 executor(s) with 0 unfinished request(s)" in note for note in caught.value.__notes__] == [True]
    executor.close()
    pool.close()


def test_an_executor_that_was_dropped_leaves_its_pool() -> None:
    with dagexec.Pool(1) as pool:
        dagexec.compile(doubled_model(), pool=pool, optimize=False).run({"x": rows(1)})
        gc.collect()
        assert pool.models == []


@pytest.mark.parametrize(
    ("options", "message"),
    [({"num_workers": 3}, r"num_workers=3: pool 'dagexec' has 2"), ({"pool": 2}, r"pool must be .*, not 2")],
)
def test_options_that_contradict_the_pool_are_refused(options: dict[str, object], message: str) -> None:
    with dagexec.Pool(2) as pool, pytest.raises(SettingError, match=message):
        dagexec.compile(doubled_model(), **{"pool": pool, **options})  # type: ignore[arg-type]


def test_a_pool_has_at_least_one_worker() -> None:
    with pytest.raises(SettingError, match="expected 1 to 4096 workers, found 0"):
        dagexec.Pool(0)


def test_in_a_child_all_executors_of_a_pool_are_reopened_on_one() -> None:
    with dagexec.Pool(2) as pool:
        executors = [dagexec.compile(doubled_model(), pool=pool, optimize=False) for _ in range(3)]
        child = os.fork()
        if not child:
            try:
                signal.alarm(PATIENCE)
                for executor in executors:
                    executor.reopen()
                right = all(np.array_equal(one.run({"x": rows(3)})["y"], rows(6)) for one in executors)
                two = threading.active_count() == 3 and pool.models == ["doubled"] * 3
                for executor in executors:
                    executor.close()
                pool.close()
                os._exit(0 if right and two else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        for executor in executors:
            executor.close()


@pytest.fixture
def calling() -> Iterator[list[Callable[[], object]]]:
    """What operators of type Calling call, the one that is created last first."""
    found: list[Callable[[], object]] = []

    def body(operator: Operator) -> None:
        operator.y(0)[...] = 1
        if found:
            found.pop()()

    with temporary_operator("Calling", body):
        yield found


@contextmanager
def two_models(first: str, second: str) -> Iterator[tuple[dagexec.Executor, dagexec.Executor]]:
    """Executors of models with operators of these types, on one worker."""
    with (
        dagexec.Pool(1) as pool,
        dagexec.compile(doubled_model(first), pool=pool, optimize=False) as outer,
        dagexec.compile(doubled_model(second), pool=pool, optimize=False) as inner,
    ):
        yield outer, inner


@pytest.mark.parametrize("known", [True, False], ids=["prepared", "new shape"])
def test_an_operator_runs_another_executor_of_its_pool(calling: list[Callable[[], object]], known: bool) -> None:
    got: list[np.ndarray] = []
    with two_models("Calling", "Relu") as (outer, inner):
        if known:
            inner.run({"x": rows(7)})
        calling.append(lambda: got.append(inner.run({"x": rows(5)}, timeout=PATIENCE)["y"]))
        np.testing.assert_array_equal(outer.run({"x": rows(1)}, timeout=PATIENCE)["y"], [2, 2, 2])
        np.testing.assert_array_equal(got[0], rows(10))


def test_a_worker_that_waits_for_a_replica_runs_the_request_that_has_it(calling: list[Callable[[], object]]) -> None:
    """The pool's only worker is in an operator that waits for a replica, which a request has that nobody works on."""
    got: list[np.ndarray] = []
    with ThreadPoolExecutor(1) as threads, two_models("Calling", "Relu") as (outer, inner):

        def nested() -> None:
            before = threads.submit(inner.run, {"x": rows(3)}, timeout=PATIENCE)
            while not inner.statistics().pool.chains_waiting:
                pass
            got.append(inner.run({"x": rows(4)}, timeout=PATIENCE)["y"])
            got.append(before.result(PATIENCE)["y"])

        calling.append(nested)
        outer.run({"x": rows(1)}, timeout=PATIENCE)
    np.testing.assert_array_equal(got, [rows(8), rows(6)])


def test_models_of_a_pool_cannot_call_each_other_in_a_circle(calling: list[Callable[[], object]]) -> None:
    with two_models("Calling", "Calling") as (outer, inner):
        calling.append(lambda: outer.run({"x": rows(1)}, timeout=PATIENCE))
        calling.append(lambda: inner.run({"x": rows(1)}, timeout=PATIENCE))
        with pytest.raises(OperatorError, match="cannot run the executor that runs it; it would wait for itself"):
            outer.run({"x": rows(1)}, timeout=PATIENCE)
        assert (outer.statistics().failed, inner.statistics().failed) == (1, 1)
        np.testing.assert_array_equal(outer.run({"x": rows(1)}, timeout=PATIENCE)["y"], [2, 2, 2])


def test_an_operator_closes_another_executor_of_its_pool(calling: list[Callable[[], object]]) -> None:
    with two_models("Calling", "Relu") as (outer, inner):
        calling.append(inner.close)
        outer.run({"x": rows(1)}, timeout=PATIENCE)
        with pytest.raises(ClosedError):
            inner.run({"x": rows(1)})


def test_a_nested_run_ends_at_its_timeout(calling: list[Callable[[], object]]) -> None:
    with two_models("Calling", "Relu") as (outer, inner):
        calling.append(lambda: inner.run({"x": rows(1)}, timeout=0))
        with pytest.raises(RunTimeoutError, match="not done within 0 seconds"):
            outer.run({"x": rows(1)}, timeout=PATIENCE)
        assert inner.statistics().timed_out == 1
        assert inner.run({"x": rows(1)}, timeout=PATIENCE)["y"].max() == 2
