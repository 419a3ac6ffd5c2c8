"""What a dispatcher decides, as a machine: every request is in one place, and whoever waits is served in turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.errors import ClosedError, QueueFullError, RunCancelledError, RunTimeoutError
from dagexec.executor.dispatch.state import MAX_IN_TURN, MAX_QUEUED, DispatchState
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Request
from dagexec.options import CompileOptions


def replicas(count: int) -> Any:
    """What the machine needs of them: a number, and that they are fed alike."""
    binding = SimpleNamespace(signature=(), is_shared=False)
    return [SimpleNamespace(number=number, io_binding=binding) for number in range(count)]


def request(*, pinned: Any = None, **asked: Any) -> Request:
    return Request({}, call=Call(**asked), pinned=pinned)


def test_idle_replicas_are_given_in_turn_and_then_requests_wait() -> None:
    state = DispatchState("net", replicas(2), CompileOptions())
    first, second, third = request(), request(), request()
    assert [state.arrive(one, 1.0) for one in (first, second, third)] == [first, second, None]
    assert (first.replica, second.replica, third.queue) == (*state.replicas, state.queue)
    assert state.release(second, 2.0) is third
    assert (third.replica, third.begun, second.replica) == (state.replicas[1], 2.0, None)
    assert state.release(first, 3.0) is None
    assert list(state.idle) == [state.replicas[0]]
    assert state.begun == [1, 2]


def test_who_leaves_the_queue_makes_room_for_who_awaits_admission() -> None:
    state = DispatchState("net", replicas(1), CompileOptions(max_queued=1))
    served, queued, outside = request(), request(), request()
    for one in (served, queued, outside):
        state.arrive(one, 0.0)
    assert (queued.queue, outside.queue) == (state.queue, state.awaiting_admission)
    state.withdraw(queued)
    assert (queued.queue, outside.queue) == (None, state.queue)


def test_a_full_queue_refuses_with_its_numbers_where_it_was_told_to() -> None:
    state = DispatchState("net", replicas(1), CompileOptions(max_queued=0, when_full="reject"))
    assert state.arrive(request(), 0.0)
    with pytest.raises(QueueFullError, match=r"1 run\(s\) in flight on 1 replica\(s\), 0 queued, limit 0"):
        state.arrive(request(), 0.0)
    assert state.outcomes["rejected"] == 1


def test_whether_runs_are_short_is_known_of_all_replicas_from_one() -> None:
    """Of those with the same sizes, and of no replica whose runs are long now."""

    def measured(shortest: float, now: float, signature: tuple[int, ...] = (), *, is_shared: bool = False) -> Any:
        return SimpleNamespace(signature=signature, shortest=shortest, seconds_at_best=now, is_shared=is_shared)

    state = DispatchState("net", replicas(2), CompileOptions())
    first, second = state.replicas
    in_a_crowd = 2 * MAX_IN_TURN
    for binding, expected in (
        (measured(MAX_IN_TURN, MAX_IN_TURN), True),
        (measured(in_a_crowd, in_a_crowd), False),
        (measured(MAX_IN_TURN, MAX_IN_TURN, (1,)), False),
        (None, False),
    ):
        first.io_binding, second.io_binding = binding, measured(in_a_crowd, MAX_QUEUED)
        assert state.is_short(second) is expected
    first.io_binding, second.io_binding = measured(MAX_IN_TURN, MAX_IN_TURN), measured(in_a_crowd, 2 * MAX_QUEUED)
    assert not state.is_short(second)
    second.io_binding = measured(MAX_IN_TURN, MAX_IN_TURN, is_shared=True)
    assert not state.is_short(second), "workers help"


def test_a_request_that_comes_at_its_deadline_gets_no_replica_and_one_that_ends_at_it_is_late() -> None:
    state = DispatchState("net", replicas(1), CompileOptions())
    late = request(timeout=0.0)
    late.time_out(3.0)
    with pytest.raises(RunTimeoutError, match=r"net 'net': not done within 0\.0 seconds"):
        state.arrive(late, 3.0)
    assert (list(state.idle), state.outcomes["timed_out"]) == (state.replicas, 1)
    for end, outcome in ((7.999, "completed"), (8.0, "timed_out")):
        one = request(timeout=5.0)
        one.time_out(3.0)
        assert state.arrive(one, 3.0) is one
        state.release(one, end)
        before = state.outcomes[outcome]
        state.settle(one, {}, None, end)
        assert (state.outcomes[outcome], one.result) == (before + 1, {} if end < 8 else None)
        assert isinstance(one.error, RunTimeoutError) is (end == 8)


def test_a_pinned_request_waits_for_its_replica_and_goes_before_the_queue() -> None:
    state = DispatchState("net", replicas(1), CompileOptions())
    served, queued, pinned = request(), request(priority=9), request(pinned=state.replicas[0])
    for one in (served, queued, pinned):
        state.arrive(one, 0.0)
    assert state.release(served, 1.0) is pinned
    assert state.release(pinned, 2.0) is queued


def test_an_inline_run_keeps_its_replica_for_a_worker_to_hand_on_while_somebody_waits() -> None:
    state = DispatchState("net", replicas(1), CompileOptions())
    binding = state.replicas[0].io_binding
    inline, queued = request(), request()
    assert binding is not None
    assert state.arrive_inline(inline, binding, 7, 0.0)
    assert not state.arrive_inline(request(), binding, 7, 0.0)  # the same thread, in an operator
    assert not state.arrive(queued, 0.0)
    assert not state.leave_inline(inline, "completed", 1.0, waited_for=False)
    assert state.release(inline, 1.0) is queued
    assert state.leave_inline(inline, "completed", 1.0, waited_for=False)  # told again: it is over
    assert state.outcomes["completed"] == 1


@pytest.mark.parametrize(("priority", "back", "used", "keeps"), [
    (0, 0.0, 0.0, True), (1, 0.0, 0.0, False), (0, 1.0, 0.0, False), (0, 0.0, 1.0, False),
])  # fmt: skip
def test_a_thread_keeps_its_replica_if_it_calls_at_once_for_a_moment_unless_somebody_more_urgent_waits(
    priority: int, back: float, used: float, keeps: bool
) -> None:
    state = DispatchState("net", replicas(1), CompileOptions())
    binding = state.replicas[0].io_binding
    first, again, other, waits = request(), request(), request(), request(priority=priority)
    again.caller = 7
    assert binding is not None
    state.arrive_inline(first, binding, 7, 0.0)
    state.arrive(other, 0.0)
    assert not state.leave_inline(first, "completed", 0.0, waited_for=False, may_keep=True)
    assert state.release(first, 0.0) is other
    state.arrive(again, back)  # so long after its last run
    assert state.release(other, 2.0) is again
    state.arrive(waits, 2.0)
    assert state.leave_inline(again, "completed", 2.0 + used, waited_for=False, may_keep=True) is keeps
    assert list(state.kept.by_thread) == [7] * keeps


def test_nobody_comes_in_once_it_is_shut() -> None:
    state = DispatchState("net", replicas(1), CompileOptions())
    binding = state.replicas[0].io_binding
    state.shut = True
    assert binding is not None
    assert not state.arrive_inline(request(), binding, 7, 0.0)
    with pytest.raises(ClosedError):
        state.arrive(request(), 0.0)


def test_a_replica_that_is_added_serves_who_waits() -> None:
    first, other = replicas(2)
    state = DispatchState("net", [first], CompileOptions())
    served, waiting = request(), request()
    assert state.arrive(served, 0.0)
    assert not state.arrive(waiting, 0.0)
    assert state.add(other, 1.0) is waiting
    assert waiting.replica is other
    assert state.begun == [1, 1]


events = st.lists(st.tuples(st.sampled_from(["arrive", "inline", "end", "withdraw"]), st.integers(0, 9)), max_size=80)


@pytest.mark.slow
@given(events, st.integers(1, 3), st.sampled_from([None, 0, 1, 2]))
def test_after_any_events_each_request_is_in_one_place_and_no_replica_is_idle_while_one_waits(
    history: list[tuple[str, int]], count: int, limit: int | None
) -> None:
    state = DispatchState("net", replicas(count), CompileOptions(max_queued=limit))
    binding = state.replicas[0].io_binding
    assert binding is not None
    known: list[Request] = []
    callers = iter(range(1, 1000))
    for event, number in history:
        if event in ("arrive", "inline"):
            one = request(priority=number % 3)
            if event == "arrive":
                state.arrive(one, 0.0)
            elif not state.arrive_inline(one, binding, next(callers), 0.0):
                continue
            known.append(one)
        elif known:
            one = known[number % len(known)]
            if event == "end" and one.replica is not None:
                if not (one.caller and state.leave_inline(one, "completed", 1.0, waited_for=False)):
                    state.release(one, 1.0)
                if not one.over:
                    state.settle(one, {}, None, 1.0)
            elif event == "withdraw" and one.queue is not None:
                state.withdraw(one)
                state.settle(one, None, RunCancelledError("withdrawn"), 1.0)
        known = [one for one in known if not one.over]
        waiting = [*state.queue, *state.awaiting_admission]
        assert len(waiting) + len(state.running) == len(known)
        assert {id(one) for one in (*waiting, *state.running.values())} == {id(one) for one in known}
        serving = [one.replica for one in state.running.values()]
        free = {replica.number for replica in (*serving, *state.idle) if replica}
        assert len(free) == len(serving) + len(state.idle)
        assert free == set(range(count))
        assert not (waiting and state.idle)
        assert limit is None or len(state.queue) <= limit
        assert not state.awaiting_admission or len(state.queue) == limit
