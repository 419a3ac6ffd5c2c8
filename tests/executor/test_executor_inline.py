"""Runs in the thread of their caller: where they happen, and that nothing else about them is different."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dagexec
from dagexec.core.operator import Operator
from dagexec.errors import ClosedError, DagexecError, FeedError, OperatorError
from dagexec.scheduler.observe.trace import Trace
from tests.held import PATIENCE, Held, doubled_model, rows
from tests.interrupts import InterruptedAtPoints
from tests.nets import temporary_operator
from tests.ops.running import operator_def


def warm(net_type: str = "simple", op_type: str = "Relu", **options: object) -> dagexec.Executor:
    """An executor whose replicas are prepared for two rows."""
    model = doubled_model(op_type)
    return dagexec.compile(model, optimize=False, net_type=net_type, warm_start={"x": (2, 3)}, **options)  # type: ignore[arg-type]


class Threads:
    """Notes the thread in which each operator of type Noted runs."""

    def __init__(self) -> None:
        self.seen: list[threading.Thread] = []

    def __call__(self, operator: Operator) -> None:
        self.seen.append(threading.current_thread())
        operator.y(0)[...] = 1


def runs_here(executor: dagexec.Executor, noted: Threads, **options: object) -> bool:
    noted.seen.clear()
    executor.run({"x": rows(1)}, **options)  # type: ignore[arg-type]
    return noted.seen == [threading.current_thread()]


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_a_run_for_an_idle_replica_of_a_single_worker_is_in_the_callers_thread(net_type: str) -> None:
    noted = Threads()
    with temporary_operator("Noted", noted), warm(net_type, "Noted", num_workers=1) as executor:
        assert runs_here(executor, noted)
        assert runs_here(executor, noted, priority=3)
        assert not runs_here(executor, noted, timeout=PATIENCE)
        assert not runs_here(executor, noted, trace=Trace())


def test_workers_run_what_telemetry_or_too_many_replicas_ask_for() -> None:
    noted = Threads()
    with temporary_operator("Noted", noted):
        for options in ({"replicas": 2, "num_workers": 1}, {"telemetry": True}):
            with warm("simple", "Noted", **options) as executor:
                assert not runs_here(executor, noted), options
        with warm("simple", "Noted", replicas=2, num_workers=2) as executor:
            assert runs_here(executor, noted)


def test_as_many_callers_as_replicas_run_side_by_side(held: Held) -> None:
    with warm_held(held, replicas=2, num_workers=2) as executor, ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(executor.run, {"x": rows(value)}) for value in (1, 2)]
        held.wait_inside(2)
        assert executor.statistics().busy_workers == 0
        assert executor.statistics().running == 2
        held.go_on.release(2)
        for run in runs:
            np.testing.assert_array_equal(run.result(PATIENCE)["y"], [2, 2, 2])
        assert executor.statistics().runs_per_replica == (2, 2)  # with those that warmed them up


def test_feeds_of_another_shape_or_kind_take_the_usual_way() -> None:
    with warm(num_workers=1) as executor:
        numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
        for feed in (rows(1, 5), np.asfortranarray(numbers), numbers[::-1], numbers.view(np.matrix), numbers):
            np.testing.assert_array_equal(executor.run({"x": feed})["y"], 2 * np.asarray(feed))
        with pytest.raises(FeedError, match="missing"):
            executor.run({})
        with pytest.raises(FeedError, match="unknown"):
            executor.run({"z": rows(1)})
        with pytest.raises(FeedError, match="must be float32, found float64"):
            executor.run({"x": rows(1).astype(np.float64)})
        with pytest.raises(TypeError):
            executor.run({"x": rows(1)}, priority=0.5)  # type: ignore[arg-type]


def test_values_fed_one_after_the_other_give_their_own_results() -> None:
    with warm(num_workers=1) as executor:
        results = [executor.run({"x": rows(value)})["y"] for value in range(5)]
        assert [result[0, 0] for result in results] == [0, 2, 4, 6, 8]
        assert executor.run({"x": rows(3)}, outputs=["h", "x"]).keys() == {"h", "x"}
        assert executor.run({"x": rows(3)}, outputs=["h"])["h"].tolist() == rows(3).tolist()


def test_a_net_that_was_fed_by_other_hands_is_prepared_again() -> None:
    with warm(num_workers=1) as executor:
        net = executor.net()
        net.workspace.feed_blob("x", rows(1, 7))
        net.run()
        for count in (2, 7, 2):
            np.testing.assert_array_equal(executor.run({"x": rows(4, count)})["y"], rows(8, count))


def test_a_replica_that_was_fed_with_another_shape_since_it_was_looked_at_is_fed_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with warm(num_workers=2, replicas=2) as executor:
        other, next_one = executor._dispatcher.state.idle
        next_one.feed({"x": rows(7, 1)})
        assert executor._inline is not None
        monkeypatch.setattr(executor._inline, "_idle", [other])
        np.testing.assert_array_equal(executor.run({"x": rows(1)})["y"], rows(2))  # by the one looked at
        np.testing.assert_array_equal(executor.run({"x": rows(2)})["y"], rows(4))
        np.testing.assert_array_equal(executor.run({"x": rows(3)})["y"], rows(6))


def test_statistics_count_runs_in_their_callers_threads() -> None:
    found: list[dagexec.Executor] = []

    def body(operator: Operator) -> None:
        if found:
            moment = found[0].statistics()
            assert (moment.running, moment.queued, moment.busy_workers) == (1, 0, 0)
        if operator.x(0)[0, 0] < 0:
            raise ValueError("negative")
        operator.y(0)[...] = 1

    with temporary_operator("Counted", body), warm("simple", "Counted", num_workers=1) as executor:
        found.append(executor)
        executor.run({"x": rows(1)})
        with pytest.raises(OperatorError, match=r"Counted 'h' \(operator 0\).*ValueError: negative.*MainThread"):
            executor.run({"x": rows(-1)})
        executor.run({"x": rows(2)})
        moment = executor.statistics()
    assert (moment.completed, moment.failed, moment.running) == (2, 1, 0)
    assert moment.runs_per_replica == (4,)  # with the one that warmed it up
    assert moment.median_latency is not None
    assert moment.queue_wait.median == 0.0


def test_whoever_waits_is_served_by_a_worker_when_the_run_of_another_caller_ends(held: Held) -> None:
    with warm_held(held, num_workers=1) as executor, ThreadPoolExecutor(3) as threads:
        first = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        others = [threads.submit(executor.run, {"x": rows(value)}) for value in (2, 3)]
        while executor.statistics().queued < 2:
            pass
        held.go_on.release(3)
        for run in (first, *others):
            np.testing.assert_array_equal(run.result(PATIENCE)["y"], [2, 2, 2])
        assert (executor.statistics().completed, executor.statistics().running) == (3, 0)
        assert executor.statistics().median_latency is not None


def test_closing_waits_for_a_run_in_its_callers_thread(held: Held) -> None:
    with warm_held(held, num_workers=1) as executor, ThreadPoolExecutor(2) as threads:
        running = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        closing = threads.submit(executor.close)
        while not executor._dispatcher._when_empty:
            pass
        assert not closing.done()
        with pytest.raises(ClosedError):
            executor.run({"x": rows(2)})
        held.go_on.release()
        np.testing.assert_array_equal(running.result(PATIENCE)["y"], [2, 2, 2])
        closing.result(PATIENCE)


@pytest.mark.parametrize("end", [lambda executor: executor.close(), lambda executor: executor.drain()])
def test_a_closed_executor_runs_nothing_in_its_callers_thread(end: Callable[[dagexec.Executor], object]) -> None:
    with warm(num_workers=1) as executor:
        executor.run({"x": rows(1)})
        end(executor)
        with pytest.raises(ClosedError, match="the executor is closed"):
            executor.run({"x": rows(1)})
        assert executor.statistics().completed == 1


def test_a_drain_whose_time_is_over_stops_a_run_before_its_next_operator(held: Held) -> None:
    after: list[Operator] = []
    with temporary_operator("After", after.append):
        model = doubled_model("Held")
        model.net.op.append(operator_def("After", ["y"], ["z"]))
        with dagexec.compile(model, optimize=False, net_type="simple", num_workers=1) as executor:
            held.go_on.release()
            executor.run({"x": rows(1)})
            held.wait_inside()
            after.clear()
            with ThreadPoolExecutor(2) as threads:
                running = threads.submit(executor.run, {"x": rows(1)})
                held.wait_inside()
                draining = threads.submit(executor.drain, 0)
                (request,) = executor._dispatcher.state.running.values()
                while request.cancelled is None:
                    pass
                held.go_on.release()
                with pytest.raises(ClosedError):
                    running.result(PATIENCE)
                assert draining.result(PATIENCE) is False
            assert after == []
            assert executor.statistics().cancelled == 1


@pytest.mark.parametrize("act", [lambda executor: executor.run({"x": rows(1)}), lambda executor: executor.close()])
def test_an_operator_cannot_use_the_executor_that_runs_it(act: Callable[[dagexec.Executor], object]) -> None:
    found: list[dagexec.Executor] = []

    def body(operator: Operator) -> None:
        operator.y(0)[...] = 1
        if found:
            act(found.pop())

    with temporary_operator("Calling", body), warm("simple", "Calling", num_workers=2, replicas=2) as executor:
        found.append(executor)
        with pytest.raises(OperatorError, match="the executor that runs it; it would wait for itself"):
            executor.run({"x": rows(1)})
        executor.run({"x": rows(1)})


def test_an_operator_that_was_refused_the_executor_that_runs_it_keeps_its_replica() -> None:
    found: list[dagexec.Executor] = []
    seen: list[tuple[int, int]] = []

    def body(operator: Operator) -> None:
        operator.y(0)[...] = 1
        for executor in found:
            with pytest.raises(DagexecError, match="would wait for itself"):
                executor.run({"x": rows(1)})
            seen.append((executor.statistics().running, len(executor._dispatcher.state.idle)))

    with temporary_operator("Trying", body), warm("simple", "Trying", num_workers=2, replicas=2) as executor:
        found.append(executor)
        executor.run({"x": rows(1)})
        assert seen == [(1, 1)]
        assert (executor.statistics().completed, executor.statistics().failed) == (1, 0)


def test_a_caller_whose_last_replica_is_still_to_be_passed_on_runs_again(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        warm_held(held, num_workers=2, replicas=2) as executor,
        ThreadPoolExecutor(1) as caller,
        ThreadPoolExecutor(1) as other,
    ):
        dispatcher = executor._dispatcher
        late: list[object] = []
        pinned = dispatcher.state.idle[0]
        first = caller.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        waiting = other.submit(executor._warm, pinned, {"x": rows(2)})
        while not dispatcher.state.pinned.waiting:
            pass
        monkeypatch.setattr(dispatcher._pool, "submit", late.append)
        held.go_on.release()
        first.result(PATIENCE)
        assert len(late) == 1
        monkeypatch.undo()
        held.go_on.release(2)
        again = caller.submit(executor.run, {"x": rows(3)})
        np.testing.assert_array_equal(again.result(PATIENCE)["y"], [2, 2, 2])
        dispatcher._pool.submit(late[0])
        waiting.result(PATIENCE)
        while executor.statistics().running:
            pass
        assert sorted(replica.number for replica in dispatcher.state.idle) == [0, 1]


def test_an_operator_may_use_another_executor() -> None:
    results: list[np.ndarray] = []
    with warm(num_workers=1) as other:

        def body(operator: Operator) -> None:
            operator.y(0)[...] = 1
            results.append(other.run({"x": rows(3)})["y"])

        with temporary_operator("Nesting", body), warm("simple", "Nesting", num_workers=1) as executor:
            executor.run({"x": rows(1)})
    np.testing.assert_array_equal(results[-1], rows(6))


def test_ctrl_c_at_any_point_of_a_run_in_the_callers_thread_loses_no_replica() -> None:
    with warm(num_workers=2, replicas=2) as executor:

        def run() -> None:
            interrupted.look(lambda: executor.run({"x": rows(1)}))
            moment = executor.statistics()
            assert moment.running == 0
            assert sorted(replica.number for replica in executor._dispatcher.state.idle) == [0, 1]

        def checked() -> None:
            try:
                run()
            finally:
                assert executor._dispatcher.state.running == {}, f"point {interrupted.point}"
                free = sorted(replica.number for replica in executor._dispatcher.state.idle)
                assert free == [0, 1], f"point {interrupted.point}"
                np.testing.assert_array_equal(executor.run({"x": rows(2)})["y"], rows(4))

        interrupted = InterruptedAtPoints("dagexec/")
        interrupted(checked)


def test_ctrl_c_at_any_point_while_others_wait_leaves_the_replica_to_them(held: Held) -> None:
    with warm_held(held, num_workers=1) as executor, ThreadPoolExecutor(1) as threads:
        others = []

        def run() -> None:
            """Another caller comes while the operator runs, and is waiting when it ends."""
            others.clear()

            def call() -> None:
                executor.run({"x": rows(1)})

            held.go_on.release(2)
            try:
                interrupted.look(call)
            finally:
                for other in others:
                    np.testing.assert_array_equal(other.result(PATIENCE)["y"], [2, 2, 2])
                while executor.statistics().running:
                    pass
                assert len(executor._dispatcher.state.idle) == 1, f"point {interrupted.point}"
                while held.go_on.acquire(blocking=False):
                    pass

        seen = held.seen

        class Queueing(list[float]):
            def append(self, value: float) -> None:
                seen.append(value)
                if value == 1 and not others:
                    others.append(threads.submit(executor.run, {"x": rows(2)}))
                    while not executor._dispatcher.state.queue.waiting:  # calls nothing that could be interrupted
                        pass

        held.seen = Queueing()
        interrupted = InterruptedAtPoints("dagexec/")
        interrupted(run)


def test_an_exception_that_ends_threads_is_an_operators_failure_outside_the_main_thread() -> None:
    def body(operator: Operator) -> None:
        operator.y(0)[...] = 1
        if operator.x(0)[0, 0] > 0:
            raise SystemExit("on purpose")

    with (
        temporary_operator("Exiting", body),
        warm("simple", "Exiting", num_workers=1) as executor,
        ThreadPoolExecutor(1) as threads,
    ):
        with pytest.raises(OperatorError, match="SystemExit: on purpose"):
            threads.submit(executor.run, {"x": rows(1)}).result(PATIENCE)
        with pytest.raises(SystemExit):  # it may have come from a handler of signals
            executor.run({"x": rows(1)})
        assert (executor.statistics().failed, executor.statistics().cancelled) == (1, 1)
        executor.run({"x": rows(0)})


def test_operators_compute_with_their_own_settings_and_leave_the_callers_alone() -> None:
    seen: list[tuple[object, int]] = []

    def body(operator: Operator) -> None:
        seen.append((np.geterr()["divide"], np.getbufsize()))
        np.divide(operator.x(0)[0, :1], 0, out=operator.y(0))

    with (
        temporary_operator("Dividing", body),
        warm("simple", "Dividing", num_workers=1) as executor,
        warnings.catch_warnings(),
        np.errstate(divide="raise"),
    ):
        warnings.simplefilter("error")
        assert executor.run({"x": rows(1)})["y"].tolist() == [np.inf] * 3
        assert seen == [("ignore", 512)] * 2
        assert (np.geterr()["divide"], np.getbufsize()) == ("raise", 8192)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_beside_or_in_a_run_refuses_and_the_parent_goes_on() -> None:
    status: list[int] = []

    def body(operator: Operator) -> None:
        operator.y(0)[...] = 1
        if operator.x(0)[0, 0] == 5:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                child = os.fork()
            if child == 0:
                try:
                    found[0].run({"x": rows(1)})
                except DagexecError:
                    os._exit(7)
                os._exit(1)
            status.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    with temporary_operator("Forking", body), warm("simple", "Forking", num_workers=1) as executor:
        found = [executor]
        np.testing.assert_array_equal(executor.run({"x": rows(5)})["y"], [2, 2, 2])
        assert status == [7]
        np.testing.assert_array_equal(executor.run({"x": rows(1)})["y"], [2, 2, 2])


def warm_held(held: Held, **options: object) -> dagexec.Executor:
    held.go_on.release(2)
    executor = warm("simple", "Held", **options)
    held.wait_inside(executor.statistics().replicas)
    while held.go_on.acquire(blocking=False):
        pass
    held.seen.clear()
    return executor
