"""What a dispatcher decides about requests that may be joined, as a machine, over random histories."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dagexec.errors import DagexecError, QueueFullError, RunCancelledError
from dagexec.executor.dispatch.ledger import ALONE_AGAIN, members_of
from dagexec.executor.dispatch.state import DispatchState
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Batch, Group, Request
from dagexec.options import CompileOptions
from tests.executor.test_dispatch_state import replicas

GROUPS = (None, Group({}, {}), Group({}, {}))
MAX_BATCH = 4
MAX_WAIT = 3.0


def test_after_enough_requests_in_a_row_found_nobody_here_they_do_not_wait_for_others() -> None:
    state = DispatchState("net", replicas(1), CompileOptions(max_batch=MAX_BATCH, max_wait=MAX_WAIT))

    def came(now: float) -> Request:
        request = joinable(1, now)
        state.arrive(request, now)
        return request

    for number in range(ALONE_AGAIN - 1):
        waits = came(4.0 * number)
        assert waits.queue is state.queue
        assert state.start(waits.created + MAX_WAIT) is waits
        end(state, waits, None, waits.created + MAX_WAIT)
    alone, second = came(100.0), came(100.5)
    assert alone.replica is state.replicas[0]
    end(state, alone, None, 101.0)
    assert second.queue is state.queue
    assert state.start(second.created + MAX_WAIT) is second


def test_who_was_let_in_behind_a_younger_one_waits_for_others_no_longer_than_it_may() -> None:
    options = CompileOptions(max_batch=MAX_BATCH, max_wait=MAX_WAIT, max_queued=3)
    state = DispatchState("net", replicas(1), options)
    requests = [Request({}, call=Call(priority=int(place == 5))) for place in range(6)]
    served, *queued, older, younger = requests
    older.group = younger.group = GROUPS[1]
    for moment, one in enumerate(requests):
        one.created = float(moment)
        state.arrive(one, one.created)
    for one in queued:
        state.cancel(one, RunCancelledError("left"), 6.0)
    end(state, served, None, 6.0)
    assert (list(state.queue), state.next_due()) == ([younger, older], older.created + MAX_WAIT)


events = st.lists(
    st.tuples(st.sampled_from(["arrive", "end", "fail", "cancel", "wait", "shut"]), st.integers(0, 23)), max_size=100
)


def joinable(number: int, now: float) -> Request:
    """A request of one of three groups, or of none, with one to four rows and one of two priorities."""
    request = Request({}, call=Call(priority=number % 2))
    request.group, request.rows, request.created = GROUPS[number % 3], 1 + number % 4, now
    return request


def end(state: DispatchState, served: Request, error: DagexecError | None, now: float) -> None:
    for member in members_of(served):
        member.result = {}
    state.end(served, {}, error, now)


def cancel(state: DispatchState, request: Request, now: float) -> None:
    error, batch = RunCancelledError("left"), request.batch
    if request.queue is not None or batch is not None:
        state.cancel(request, error, now)
    if batch is not None and not batch.left:
        end(state, batch, error, now)


@given(events, st.integers(1, 3), st.sampled_from([None, 0, 1, 3]))
def test_after_any_events_each_request_is_in_one_place_and_none_waits_longer_than_it_may(
    history: list[tuple[str, int]], count: int, limit: int | None
) -> None:
    when_full = "wait" if limit != 3 else "reject"
    options = CompileOptions(max_queued=limit, max_batch=MAX_BATCH, max_wait=MAX_WAIT, when_full=when_full)
    state = DispatchState("net", replicas(count), options)
    known: list[Request] = []
    now = 0.0
    for event, number in history:
        if event == "arrive" and not state.shut:
            one = joinable(number, now)
            try:
                state.arrive(one, now)
            except QueueFullError:
                continue
            known.append(one)
        elif event == "wait":
            now += number / 8
        elif event == "shut":
            state.shut = number == 0
        elif event == "cancel" and known:
            cancel(state, known[number % len(known)], now)
        elif event in ("end", "fail") and state.running:
            served = list(state.running.values())[number % len(state.running)]
            end(state, served, RunCancelledError("failed") if event == "fail" else None, now)
        while state.start(now) is not None:
            pass
        known = [one for one in known if not one.over]
        check(state, known, now, limit)


def check(state: DispatchState, known: list[Request], now: float, limit: int | None) -> None:
    serving = list(state.running.values())
    places = [one for served in serving for one in members_of(served)]
    waiting = [*state.queue, *state.awaiting_admission, *state.again]
    assert sorted(map(id, (*places, *waiting))) == sorted(map(id, known))
    assert sorted(one.replica.number for one in serving if one.replica) == sorted(
        set(range(len(state.replicas))) - {replica.number for replica in state.idle}
    )
    for batch in serving:
        members = members_of(batch)
        assert sum(one.rows for one in members) <= MAX_BATCH
        assert len({one.group for one in members}) == 1
        assert len(members) == 1 or members[0].group is not None or not isinstance(batch, Batch)
    assert limit is None or len(state.queue) <= limit
    if state.idle:
        assert not state.again
        assert not state.awaiting_admission
        assert not (waiting and state.shut)
        assert all(now < one.created + MAX_WAIT for one in waiting)
        assert all(one.group is not None for one in waiting)
    due = state.next_due()
    assert (due is None) == (not (state.idle and waiting))
