"""Deployments on replicas that do what the test says: threads, tasks and cancellations, without Ray or sleeps."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import numpy as np
import pytest
import trio

import dagexec
from dagexec.cluster.autoscaling import Autoscaling
from dagexec.cluster.deployment import Deployment
from dagexec.cluster.dispatcher import Dispatcher
from dagexec.cluster.link import Answer, Call
from dagexec.cluster.state import DeploymentState
from dagexec.core.dtypes import FLOAT32
from dagexec.errors import ClosedError, DagexecError, FeedError, QueueFullError, ReplicaError, RunTimeoutError
from dagexec.executor.source.types import GivenTypes
from dagexec.platform.threads import SystemThreads, ThreadWait, Timer, installed
from dagexec.tracing import Trace
from tests.cluster.simulated import SimulatedCall, SimulatedReplica

SECONDS = 30
X = {"x": np.arange(3, dtype=np.float32)}
Y = {"y": np.arange(3, dtype=np.float32) * 2}


def model() -> dagexec.Model:
    net = dagexec.NetDef(name="double", op=[dagexec.op("Add", ["x", "x"], ["y"])])
    return dagexec.Model("double", net, inputs={"x": dagexec.InputInfo(FLOAT32, (3,))}, outputs=("y",))


class Simulation:
    """A deployment, and its replicas by number; `most` requests go to one at a time."""

    def __init__(
        self,
        replicas: int,
        *,
        most: int = 1,
        max_queued: int | None = None,
        autoscaling: Autoscaling | None = None,
        answer_seconds: float = math.inf,
    ) -> None:
        self.replicas: list[SimulatedReplica] = []
        self.released: list[int] = []
        self.new_replica: Callable[[int], SimulatedReplica] = SimulatedReplica
        state = DeploymentState(
            "double",
            max_outstanding=most,
            max_queued=max_queued,
            autoscaling=autoscaling,
            answer_seconds=answer_seconds,
        )
        self.dispatcher = Dispatcher("double", state, self._new_link)
        self.deployment = Deployment(model(), GivenTypes.of(model()), self.dispatcher, lambda: self.released.append(1))
        self.dispatcher.add_members(replicas)
        for replica in self.replicas:
            replica.be_ready()

    def _new_link(self, number: int) -> SimulatedReplica:
        self.replicas.append(self.new_replica(number))
        return self.replicas[-1]

    def settle(self) -> None:
        """Return when the deployment's thread has done what there was to do."""
        done = ThreadWait()
        self.dispatcher._tasks.put(done.notify)
        assert done.wait(SECONDS)

    def in_thread(self, **options: object) -> InThread:
        """A thread that calls `run`, once its request is there."""
        before = self.dispatcher.read(lambda state, _: state.unfinished)
        started = InThread(lambda: self.deployment.run(X, **options))
        while self.dispatcher.read(lambda state, _: state.unfinished) == before and started.thread.is_alive():
            pass
        self.settle()
        return started


class InThread:
    """What a call in a thread of its own gives or raises."""

    def __init__(self, call: Callable[[], dict[str, np.ndarray]]) -> None:
        self.results: list[dict[str, np.ndarray]] = []
        self.errors: list[BaseException] = []

        def body() -> None:
            try:
                self.results.append(call())
            except BaseException as error:
                self.errors.append(error)

        self.thread = threading.Thread(target=body, daemon=True)
        self.thread.start()

    def outcome(self) -> dict[str, np.ndarray] | BaseException:
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        return (self.results or self.errors)[0]


@contextmanager
def simulation(replicas: int, **options: Any) -> Iterator[Simulation]:
    found = Simulation(replicas, **options)
    try:
        yield found
    finally:
        for replica in found.replicas:
            for call in replica.calls:
                call.done(DagexecError("the test is over"))
            replica.calls.clear()
        found.deployment.close()
        assert all(replica.stopped for replica in found.replicas)
        assert found.released == [1]
        assert not [one.name for one in threading.enumerate() if one.name == "dagexec-double-cluster"]


def test_answers_reach_the_callers_whatever_their_order() -> None:
    with simulation(2) as simulated:
        one, other = simulated.in_thread(), simulated.in_thread()
        assert [len(replica.calls) for replica in simulated.replicas] == [1, 1]
        simulated.replicas[1].calls.pop().done({"y": np.ones(3, np.float32)})
        assert np.array_equal(other.outcome()["y"], np.ones(3))
        assert one.thread.is_alive()
        simulated.replicas[0].calls.pop().done(Y)
        found = one.outcome()["y"]
        assert np.array_equal(found, Y["y"])
        assert not np.shares_memory(found, Y["y"])  # what the store holds is let go


def test_the_next_request_is_sent_when_a_replica_answers() -> None:
    with simulation(1) as simulated:
        [replica] = simulated.replicas
        one, low, high = simulated.in_thread(), simulated.in_thread(priority=-1), simulated.in_thread(priority=3)
        assert len(replica.calls) == 1
        replica.calls.pop().done(Y)
        simulated.settle()
        assert [call.priority for call in replica.calls] == [3]
        replica.calls.pop().done(Y)
        simulated.settle()
        replica.calls.pop().done(Y)
        assert all(np.array_equal(found.outcome()["y"], Y["y"]) for found in (one, low, high))


def test_a_lost_replica_is_started_again_and_its_request_runs_elsewhere() -> None:
    with simulation(2) as simulated:
        one = simulated.in_thread()
        simulated.replicas[0].die()
        simulated.settle()
        assert len(simulated.replicas[0].starting) == 1
        simulated.replicas[1].calls.pop().done(Y)
        assert np.array_equal(one.outcome()["y"], Y["y"])
        found = simulated.deployment.statistics()
        assert (found.retried, found.lost, found.up, found.completed) == (1, 1, 1, 1)
        simulated.replicas[0].be_ready()
        assert simulated.deployment.statistics().up == 2


def test_a_request_that_lost_two_replicas_names_them() -> None:
    with simulation(2) as simulated:
        one = simulated.in_thread()
        for replica in simulated.replicas:
            replica.place = f"process {7 + replica.number} on host"
            replica.die("no heartbeat")
            simulated.settle()
        error = one.outcome()
        assert isinstance(error, ReplicaError)
        assert "replica 0 (process 7 on host)" in str(error)
        assert "replica 1 (process 8 on host)" in str(error)


def test_all_replicas_being_lost_a_call_ends_at_its_timeout_and_says_what_happened() -> None:
    with simulation(1) as simulated:
        one = simulated.in_thread(timeout=0.2)
        simulated.replicas[0].die()
        error = one.outcome()
        assert isinstance(error, RunTimeoutError)
        assert "replica 0" in error.__notes__[0]
        simulated.settle()
        simulated.replicas[0].be_ready()
        simulated.settle()
        assert simulated.replicas[0].calls == []  # nobody waits for it


def test_a_call_that_times_out_returns_at_once_and_has_the_replica_stop() -> None:
    with simulation(1) as simulated:
        with pytest.raises(RunTimeoutError, match=r"net 'double': not done within 0.05 seconds"):
            simulated.deployment.run(X, timeout=0.05)
        [call] = simulated.replicas[0].calls
        assert call.cancelled
        assert 0 < call.timeout <= 0.05
        waiting = simulated.in_thread()
        assert len(simulated.replicas[0].calls) == 1  # it is busy until it answers
        simulated.replicas[0].calls.pop().done(DagexecError("stopped"))
        simulated.settle()
        simulated.replicas[0].calls.pop().done(Y)
        assert np.array_equal(waiting.outcome()["y"], Y["y"])


def test_a_replica_that_does_not_answer_is_replaced_and_its_call_is_answered_by_another() -> None:
    with simulation(2, answer_seconds=0.1) as simulated:
        one = simulated.in_thread()
        first, second = simulated.replicas
        while not second.calls:
            for asked in second.questions:
                asked()
        assert len(first.questions) == 1
        assert (len(first.starting), simulated.deployment.statistics().lost) == (1, 1)
        second.calls.pop().done(Y)
        assert np.array_equal(one.outcome()["y"], Y["y"])
        first.calls.pop().done(Y)  # it was only late
        first.be_ready()
        assert simulated.deployment.statistics().up == 2


class GivenUpWhileSent(SimulatedReplica):
    """Whose caller gives up while its request is being sent."""

    give_up: Callable[[], object] = staticmethod(lambda: None)

    def run(self, *arguments: object) -> Call:
        call = super().run(*arguments)
        self.give_up()
        return call


def test_a_request_that_is_given_up_while_it_is_sent_is_cancelled_once_it_is() -> None:
    simulated = Simulation(0)
    simulated.new_replica = GivenUpWhileSent
    simulated.dispatcher.add_members(1)
    [replica] = simulated.replicas
    replica.be_ready()

    def give_up() -> None:
        [request] = simulated.dispatcher.read(lambda state, _: list(state.attempts))
        simulated.dispatcher.give_up(request, DagexecError("nobody waits"))

    replica.give_up = give_up
    with pytest.raises(DagexecError, match="nobody waits"):
        simulated.deployment.run(X)
    [call] = replica.calls
    assert call.cancelled
    simulated.deployment.close()


class AnswersAtOnce(SimulatedReplica):
    """That has answered before it is known that it was asked."""

    answer: Answer = Y

    def run(self, *arguments: object) -> Call:
        call: SimulatedCall = super().run(*arguments)
        self.calls.remove(call)
        call.done(self.answer)
        return call


@pytest.mark.parametrize("count", [1, 3])
def test_an_answer_may_come_before_the_request_is_known_to_be_sent(count: int) -> None:
    simulated = Simulation(0)
    simulated.new_replica = AnswersAtOnce
    simulated.dispatcher.add_members(count)
    for replica in simulated.replicas:
        replica.be_ready()
    for _ in range(5):
        assert np.array_equal(simulated.deployment.run(X)["y"], Y["y"])
    simulated.settle()
    assert [one.outstanding for one in simulated.deployment.statistics().replicas] == [0] * count
    simulated.deployment.close()


def test_what_cannot_be_sent_is_the_callers_error_and_the_replica_goes_on() -> None:
    with simulation(1) as simulated:
        simulated.replicas[0].refuses = FeedError("too large")
        with pytest.raises(FeedError, match="too large"):
            simulated.deployment.run(X)
        simulated.replicas[0].refuses = None
        one = simulated.in_thread()
        simulated.replicas[0].calls.pop().done(Y)
        assert np.array_equal(one.outcome()["y"], Y["y"])


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancelled_task_has_the_replica_stop() -> None:
    with simulation(1) as simulated:
        task = asyncio.create_task(simulated.deployment.run_async(X))
        while not simulated.replicas[0].calls:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert simulated.replicas[0].calls[0].cancelled
        found = simulated.deployment.statistics()
        assert (found.cancelled, found.running, found.replicas[0].outstanding) == (1, 0, 1)


def test_tasks_of_trio_are_served_cancelled_and_timed_out() -> None:
    async def main(simulated: Simulation) -> None:
        results: list[dict[str, np.ndarray]] = []

        async def one() -> None:
            results.append(await simulated.deployment.run_async(X))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(one)
            while not simulated.replicas[0].calls:
                await trio.lowlevel.checkpoint()
            simulated.replicas[0].calls.pop().done(Y)
        assert np.array_equal(results[0]["y"], Y["y"])
        with anyio.move_on_after(0):
            await simulated.deployment.run_async(X)
        with pytest.raises(RunTimeoutError):
            await simulated.deployment.run_async(X, timeout=0.05)
        assert [call.cancelled for call in simulated.replicas[0].calls] == [True, True]

    with simulation(1, most=2) as simulated:
        trio.run(main, simulated)


def test_closing_ends_what_waits_and_waits_for_what_runs() -> None:
    with simulation(1) as simulated:
        running, waiting = simulated.in_thread(), simulated.in_thread()
        closing = InThread(lambda: simulated.deployment.close() or {})
        assert isinstance(waiting.outcome(), ClosedError)
        assert closing.thread.is_alive()
        simulated.replicas[0].calls.pop().done(Y)
        assert np.array_equal(running.outcome()["y"], Y["y"])
        assert closing.outcome() == {}
        with pytest.raises(ClosedError):
            simulated.deployment.run(X)


def test_a_drain_that_takes_too_long_ends_all_that_is_left() -> None:
    with simulation(1) as simulated:
        running, waiting = simulated.in_thread(), simulated.in_thread()
        assert not simulated.deployment.drain(timeout=0)
        assert simulated.replicas[0].calls[0].cancelled
        assert isinstance(running.outcome(), ClosedError)
        assert isinstance(waiting.outcome(), ClosedError)


def test_a_replica_that_is_lost_while_the_deployment_drains_is_replaced_for_what_is_left() -> None:
    with simulation(1) as simulated:
        running = simulated.in_thread()
        draining = InThread(lambda: {"in time": np.array(simulated.deployment.drain())})
        simulated.replicas[0].die()
        simulated.settle()
        simulated.replicas[0].be_ready()
        simulated.settle()
        simulated.replicas[0].calls.pop().done(Y)
        assert np.array_equal(running.outcome()["y"], Y["y"])
        assert draining.outcome()["in time"]


def test_bad_calls_are_refused_before_anything_is_sent() -> None:
    with simulation(1, max_queued=0) as simulated:
        deployment = simulated.deployment
        with pytest.raises(FeedError, match="missing"):
            deployment.run({})
        with pytest.raises(FeedError, match="trace"):
            deployment.run(X, trace=Trace())
        with pytest.raises(FeedError, match="in common with input"):
            deployment.run(X, out={"y": X["x"]})
        with pytest.raises(ValueError, match="timeout"):
            deployment.run(X, timeout=-1)
        assert simulated.replicas[0].calls == []
        one = simulated.in_thread()
        with pytest.raises(QueueFullError):
            deployment.run(X)
        simulated.replicas[0].calls.pop().done(Y)
        one.outcome()
        assert deployment.statistics().rejected == 1


class JumpingClock(SystemThreads):
    """Time that stands still until the test says otherwise; calls to be made later are made then."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    def call_briefly(self, seconds: float, function: Callable[[], object]) -> Timer:
        entry = (self.now + seconds, function)
        self.calls.append(entry)
        return _Entry(self.calls, entry)

    def jump(self, seconds: float) -> None:
        self.now += seconds
        due = [one for one in self.calls if one[0] <= self.now]
        self.calls[:] = [one for one in self.calls if one[0] > self.now]
        for _, function in due:
            function()


class _Entry:
    def __init__(self, calls: list[Any], entry: object) -> None:
        self._calls, self._entry = calls, entry

    def cancel(self) -> None:
        if self._entry in self._calls:
            self._calls.remove(self._entry)


def test_replicas_come_with_load_and_go_when_the_clock_says_so() -> None:
    clock = JumpingClock()
    bounds = Autoscaling(min_replicas=1, max_replicas=2, target_outstanding=1, downscale_seconds=10)
    with installed(clock), simulation(1, autoscaling=bounds) as simulated:
        one, other = simulated.in_thread(), simulated.in_thread()
        assert len(simulated.replicas) == 2
        simulated.replicas[1].be_ready()
        simulated.settle()
        for replica in simulated.replicas:
            replica.calls.pop().done(Y)
        assert all(np.array_equal(found.outcome()["y"], Y["y"]) for found in (one, other))
        clock.jump(9)
        simulated.settle()
        assert simulated.deployment.statistics().up == 2
        clock.jump(1.5)
        clock.jump(10)
        simulated.settle()
        assert simulated.deployment.statistics().up == 1
        assert sorted(replica.stopped for replica in simulated.replicas) == [False, True]
    assert clock.calls == []
