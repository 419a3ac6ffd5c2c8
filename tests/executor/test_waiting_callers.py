"""Threads that wait for a replica and then compute with it themselves: in what order, and how such a wait may end."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

import dagexec
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, OperatorError, QueueFullError
from dagexec.executor.dispatch import keeping
from dagexec.executor.requests.request import Request
from dagexec.platform.threads import threads
from dagexec.scheduler.exploration import explore_seeds
from tests.executor.test_embedding_exploration import X, pausing
from tests.executor.test_executor_inline import warm, warm_held
from tests.held import PATIENCE, Held, rows
from tests.interrupts import InterruptedAtPoints
from tests.nets import net_of, temporary_operator


def queue_behind(
    executor: dagexec.Executor, pool: ThreadPoolExecutor, value: float, priority: int = 0
) -> Future[object]:
    """A request of another thread, which waits when this returns."""
    waiting = executor._dispatcher.state.queue
    before = len(waiting)
    call = pool.submit(executor.run, {"x": rows(value)}, priority=priority)
    while len(waiting) == before:
        pass
    return call


def test_a_thread_that_waited_computes_itself_the_most_urgent_first(held: Held) -> None:
    ran: list[tuple[float, str]] = []

    class Noting(list[float]):
        def append(self, value: float) -> None:
            ran.append((value, threading.current_thread().name))

    with warm_held(held, num_workers=1) as executor, ThreadPoolExecutor(5, "caller") as pool:
        held.seen = Noting()
        first = pool.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        others = [queue_behind(executor, pool, value, priority) for value, priority in ((2, 0), (3, 9), (4, 0))]
        held.go_on.release(4)
        for call in (first, *others):
            np.testing.assert_array_equal(call.result(PATIENCE)["y"], [2, 2, 2])
        assert [value for value, _ in ran] == [1, 3, 2, 4]
        assert len({name for _, name in ran if name.startswith("caller")}) == 4
        moment = executor.statistics()
        assert (moment.completed, moment.queued, moment.running) == (4, 0, 0)
        assert moment.queue_wait.p99


def test_who_waits_when_the_executor_is_closed_is_told_and_when_it_is_drained_is_served(held: Held) -> None:
    for drain in (False, True):
        with warm_held(held, num_workers=1) as executor, ThreadPoolExecutor(3) as pool:
            first = pool.submit(executor.run, {"x": rows(1)})
            held.wait_inside()
            waits = queue_behind(executor, pool, 2)
            closing = pool.submit(executor.close, drain=drain)
            if not drain:
                with pytest.raises(ClosedError):
                    waits.result(PATIENCE)
            held.go_on.release(2)
            first.result(PATIENCE)
            closing.result(PATIENCE)
            if drain:
                assert waits.result(PATIENCE)
            held.go_on.acquire(blocking=False)
            held.wait_inside(int(drain))


def test_a_run_that_fails_after_a_wait_fails_for_its_caller_alone(held: Held) -> None:
    held.failing.add(2)
    with warm_held(held, num_workers=1) as executor, ThreadPoolExecutor(3) as pool:
        first = pool.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        fails, succeeds = queue_behind(executor, pool, 2), queue_behind(executor, pool, 3)
        held.go_on.release(3)
        with pytest.raises(OperatorError, match="told to fail at 2"):
            fails.result(PATIENCE)
        first.result(PATIENCE)
        succeeds.result(PATIENCE)


def test_limits_of_the_queue_hold_for_threads_that_would_compute_themselves(held: Held) -> None:
    with (
        warm_held(held, num_workers=1, max_queued=1, when_full="reject") as executor,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        waits = queue_behind(executor, pool, 2)
        with pytest.raises(QueueFullError, match="1 queued, limit 1"):
            executor.run({"x": rows(3)})
        held.go_on.release(2)
        first.result(PATIENCE)
        waits.result(PATIENCE)
        assert executor.statistics().rejected == 1


def test_ctrl_c_at_any_point_of_a_wait_leaves_the_replica_to_others(held: Held) -> None:
    with warm_held(held, num_workers=1) as executor, ThreadPoolExecutor(2) as pool:
        state = executor._dispatcher.state

        def let_go(over: threading.Event) -> None:
            while not (state.queue.waiting or over.is_set()):
                pass
            held.go_on.release(2)

        def run() -> None:
            """The main thread waits for another's run to end, if it is not interrupted before."""
            over = threading.Event()
            other = pool.submit(executor.run, {"x": rows(2)})
            held.wait_inside()
            letting = pool.submit(let_go, over)
            try:
                interrupted.look(lambda: executor.run({"x": rows(1)}))
            finally:
                over.set()
                letting.result(PATIENCE)
                np.testing.assert_array_equal(other.result(PATIENCE)["y"], [2, 2, 2])
                while state.running:
                    pass
                assert (len(state.idle), len(state.queue)) == (1, 0), f"point {interrupted.point}"
                for gate in (held.go_on, held.inside):
                    while gate.acquire(blocking=False):
                        pass

        interrupted = InterruptedAtPoints("dagexec/")
        interrupted(run)
        assert executor._inline is not None
        assert executor._inline.takes(Request({"x": rows(1)}))  # it still knows that threads may wait


def test_a_thread_that_calls_again_at_once_keeps_its_replica_and_gives_it_up_when_it_does_not(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BACK_SECONDS", "KEPT_SECONDS"):
        monkeypatch.setattr(keeping, name, PATIENCE)
    with (
        warm_held(held, num_workers=1) as executor,
        ThreadPoolExecutor(1) as eager,
        ThreadPoolExecutor(2) as patient,
    ):
        state = executor._dispatcher.state
        taking_back: list[bool] = []
        monkeypatch.setattr(executor._pooled, "watch_kept", lambda: taking_back.append(True))
        first = eager.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        other = queue_behind(executor, patient, 2)
        held.go_on.release()
        first.result(PATIENCE)
        held.wait_inside()
        again = queue_behind(executor, eager, 3)  # it comes back, and waits
        waits = queue_behind(executor, patient, 4)
        held.go_on.release()
        other.result(PATIENCE)
        held.wait_inside()
        held.go_on.release()
        again.result(PATIENCE)
        assert (len(state.kept.by_thread), len(state.idle)) == (1, 0)
        assert taking_back
        once_more = eager.submit(executor.run, {"x": rows(5)})
        held.wait_inside()
        held.go_on.release()
        once_more.result(PATIENCE)
        assert not waits.done()
        held.go_on.release()
        executor._pooled._take_back(float("inf"))
        waits.result(PATIENCE)
        assert held.seen[-5:] == [1, 2, 3, 5, 4]
        assert not state.kept.by_thread


ended: Counter[str] = Counter()


def callers_that_come_again() -> None:
    """Threads of which each calls several times, whose replica is kept at times, and somebody who closes meanwhile."""
    model = Model("pausing", net_of([[], [0]], op_type="Pausing"), inputs={"x": InputInfo()}, outputs=("b1",))
    executor = dagexec.compile(model, replicas=1, net_type="simple", num_workers=1)
    executor.run({"x": X})
    ends: list[str] = []

    def call() -> None:
        for _ in range(3):
            try:
                executor.run({"x": X})
                ends.append("completed")
            except ClosedError:
                ends.append("closed")

    def call_and_close() -> None:
        call()
        executor.close()

    callers = [threads().start(call, f"caller {number}") for number in range(2)]
    closing = threads().start(call_and_close, "closing")
    for thread in (*callers, closing):
        thread.join()
    statistics = executor.statistics()
    assert len(ends) == 9
    assert ends.count("completed") + 1 == statistics.completed == sum(statistics.runs_per_replica)
    assert statistics.running == statistics.queued == 0
    ended.update(ends)


@pytest.mark.parametrize("seconds", [-1.0, keeping.BACK_SECONDS], ids=["never kept", "kept"])
def test_threads_that_wait_and_come_again_are_all_served_or_told_in_any_order(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "BACK_SECONDS", seconds)
    kept: list[bool] = []
    leave = keeping.KeptReplicas.leave

    def noted(self: keeping.KeptReplicas, *arguments: object) -> bool:
        kept.append(leave(self, *arguments))  # type: ignore[arg-type]
        return kept[-1]

    monkeypatch.setattr(keeping.KeptReplicas, "leave", noted)
    ended.clear()
    with temporary_operator("Pausing", pausing):
        explore_seeds(callers_that_come_again, range(25)).raise_failure()
    assert set(ended) == {"completed", "closed"}
    assert True in kept or seconds < 0
    assert False in kept


def test_an_operator_on_a_worker_does_not_wait_in_its_thread() -> None:
    """It would hold what the run that it waits for needs."""
    found: list[bool] = []

    def ask(operator: Operator) -> None:
        operator.y(0)[...] = 1
        assert other._inline is not None
        found.append(other._inline.takes(Request({"x": rows(1)})))

    with (
        temporary_operator("Asking", ask),
        dagexec.Pool(workers=1) as pool,
        warm(pool=pool, intra_op_threads=1) as other,
        warm("dag", "Asking", pool=pool) as executor,
    ):
        other.run({"x": rows(1)})
        assert other._inline is not None
        assert other._inline.takes(Request({"x": rows(1)})) is not None
        executor.run({"x": rows(1)}, timeout=PATIENCE)
    assert found[-1] is False
