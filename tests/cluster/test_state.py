"""What a deployment decides, event by event: no threads, no clock, no transport."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from functools import partial

import numpy as np
import pytest

from dagexec.cluster.autoscaling import Autoscaling
from dagexec.cluster.state import MAX_STARTS, Ask, Attempt, DeploymentState, Member, Phase, Send, Start, Stop
from dagexec.errors import ClosedError, DagexecError, QueueFullError, ReplicaError, RunCancelledError, RunTimeoutError
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Request
from dagexec.executor.requests.waiting import EventLoop
from dagexec.scheduler.observe.run_times import Phases, RunTimes


def state_with(replicas: int, *, max_outstanding: int = 1, **options: object) -> tuple[DeploymentState, list[Member]]:
    """A state whose replicas are up, and nothing is left to be done."""
    state = DeploymentState("net", max_outstanding=max_outstanding, **options)
    members = [state.add_member() for _ in range(replicas)]
    for member in members:
        state.started(member, 0, 0.0)
    assert [type(one) for one in state.take_instructions()] == [Start] * replicas
    return state, members


def submitted(state: DeploymentState, *, priority: int = 0, now: float = 0.0) -> Request:
    request = Request({"x": np.zeros(1)}, call=Call(priority=priority))
    state.submit(request, now)
    return request


def sends(state: DeploymentState) -> list[Attempt]:
    taken = state.take_instructions()
    assert all(isinstance(one, Send) for one in taken)
    return [carried_out(state, one) for one in taken if isinstance(one, Send)]


def carried_out(state: DeploymentState, send: Send) -> Attempt:
    """The attempt, which is sent at once."""
    assert state.may_send(send.attempt, send.attempt.request.begun)
    return send.attempt


def error_of(request: Request) -> BaseException | None:
    assert request.over
    return request.error


def test_requests_go_to_the_replica_with_the_fewest_outstanding() -> None:
    state, members = state_with(3, max_outstanding=4)
    requests = [submitted(state) for _ in range(6)]
    attempts = sends(state)
    assert Counter(one.member.number for one in attempts) == {0: 2, 1: 2, 2: 2}
    for attempt in [one for one in attempts if one.member is members[1]]:
        state.answered(attempt, {}, None, 1.0)
    more = [submitted(state) for _ in range(2)]
    assert [one.member.number for one in sends(state)] == [1, 1]
    assert [one.over for one in requests].count(True) == 2
    assert not any(one.over for one in more)


def test_what_requests_wait_and_what_replicas_take_is_added_up() -> None:
    times = RunTimes()
    state, _ = state_with(1, run_times=times)
    for _ in range(3):
        submitted(state)
    for now, error in ((2.0, None), (5.0, None), (9.0, DagexecError("fails"))):
        [attempt] = sends(state)
        state.answered(attempt, {}, error, now)
    assert times.totals.requests == times.totals.runs[1] == Phases(count=2, ran=2.0 + 3.0)
    assert (times.totals.waited, times.totals.rows) == (2.0, 2)


def test_what_finds_no_room_waits_and_the_most_urgent_goes_first() -> None:
    state, _ = state_with(1)
    first, low, high = submitted(state), submitted(state, priority=-1), submitted(state, priority=5)
    [attempt] = sends(state)
    assert attempt.request is first
    state.answered(attempt, {}, None, 1.0)
    [attempt] = sends(state)
    assert attempt.request is high
    state.answered(attempt, {}, None, 2.0)
    assert [one.request for one in sends(state)] == [low]


def test_a_request_that_comes_at_its_deadline_is_sent_to_nobody_and_an_answer_after_it_comes_too_late() -> None:
    state, _ = state_with(1)
    late = Request({"x": np.zeros(1)}, call=Call(timeout=0.0))
    late.time_out(3.0)
    with pytest.raises(RunTimeoutError, match=r"net 'net': not done within 0\.0 seconds"):
        state.submit(late, 3.0)
    assert (sends(state), state.unfinished, state.outcomes["timed_out"]) == ([], 0, 1)
    for answer, outcome in ((7.999, "completed"), (8.0, "timed_out")):
        request = Request({"x": np.zeros(1)}, call=Call(timeout=5.0))
        request.time_out(3.0)
        state.submit(request, 3.0)
        [attempt] = sends(state)
        before = state.outcomes[outcome]
        state.answered(attempt, {}, None, answer)
        assert (state.outcomes[outcome], isinstance(request.error, RunTimeoutError)) == (before + 1, answer == 8.0)


def questions(state: DeploymentState, now: float, place: str = "process 7 on host") -> tuple[list[Member], float]:
    """Whom `keep_time` asks at a moment, and when it wants to be called again."""
    due = state.keep_time(now, lambda _: place)
    instructions = state.take_instructions()
    taken = [one for one in instructions if isinstance(one, Ask)]
    state.instructions = [one for one in instructions if one not in taken]
    assert all(one.life == one.member.life for one in taken)
    return [one.member for one in taken], due


def test_a_replica_with_requests_that_is_silent_is_asked_once_and_lost_when_it_does_not_answer() -> None:
    state, [one, other] = state_with(2, max_outstanding=2, answer_seconds=20.0)
    assert questions(state, 1000.0) == ([], math.inf)  # who has no requests need not say anything
    first, second = submitted(state, now=1000.0), submitted(state, now=1004.0)
    attempts = {attempt.member: attempt for attempt in sends(state)}
    assert (attempts[one].request, attempts[other].request) == (first, second)
    assert questions(state, 1009.9) == ([], 1010.0)
    assert questions(state, 1010.0) == ([one], 1014.0)
    assert questions(state, 1013.0) == ([], 1014.0)
    state.answered(attempts[other], {}, None, 1013.5)
    assert (questions(state, 1019.9), one.phase) == (([], 1020.0), Phase.UP)
    questions(state, 1020.0)
    assert (one.phase, one.life, list(one.outstanding), state.lost_replicas) == (Phase.STARTING, 1, [], 1)
    start, send = state.take_instructions()
    assert start == Start(one, 1)
    assert isinstance(send, Send)
    assert (send.attempt.request, send.attempt.member) == (first, other)
    carried_out(state, send)
    state.answered(attempts[one], {"late": np.zeros(1)}, None, 1021.0)  # of its earlier life
    assert not first.over
    state.is_there(one, 0, 1021.0)
    assert (one.phase, one.heard) == (Phase.STARTING, 1000.0)
    state.answered(send.attempt, {}, None, 1022.0)
    assert (first.result, state.retried) == ({}, 1)


def test_a_replica_that_says_that_it_is_there_may_take_any_time() -> None:
    state, [member] = state_with(1, answer_seconds=20.0)
    request = submitted(state)
    [attempt] = sends(state)
    for moment in range(10, 1000, 11):
        assert questions(state, float(moment)) == ([member], moment + 10.0)
        state.is_there(member, 0, moment + 1.0)
        assert questions(state, moment + 10.9)[0] == []
    state.answered(attempt, {}, None, 1001.0)
    assert request.result == {}


def test_a_silent_replica_is_lost_with_all_that_it_has_and_names_itself_in_the_second_loss() -> None:
    state, [member] = state_with(1, max_outstanding=2, answer_seconds=4.0)
    requests = [submitted(state), submitted(state)]
    given_up = sends(state)[1].request
    state.give_up(given_up, RunTimeoutError("late"), 1.0)
    assert questions(state, 2.0) == ([member], 4.0)
    questions(state, 4.0)
    [start] = state.take_instructions()
    state.started(member, 1, 5.0)
    [again] = sends(state)
    assert (start, again.request) == (Start(member, 1), requests[0])
    assert questions(state, 7.0) == ([member], 9.0)
    questions(state, 9.0, "process 8 on host")
    error = error_of(requests[0])
    assert isinstance(error, ReplicaError)
    for process in (7, 8):
        assert f"replica 0 (process {process} on host) was lost while it ran the request: it has not answered" in str(
            error
        )
    assert isinstance(error_of(given_up), RunTimeoutError)


def test_a_silent_replica_that_is_leaving_is_ended() -> None:
    state, [member] = state_with(1, answer_seconds=4.0, retries=False)
    request = submitted(state)
    sends(state)
    state.retire(member)
    assert questions(state, 2.0) == ([member], 4.0)
    questions(state, 4.0)
    assert state.take_instructions() == [Stop(member)]
    assert isinstance(error_of(request), ReplicaError)


def test_a_request_of_a_lost_replica_is_sent_once_more_before_all_others() -> None:
    state, [one, other] = state_with(2)
    first, second, waiting = submitted(state), submitted(state), submitted(state)
    attempts = sends(state)
    state.lost(attempts[0], "process 7", "killed", 1.0)
    assert one.phase is Phase.STARTING
    [start] = state.take_instructions()
    assert isinstance(start, Start)
    assert (start.member, start.life) == (one, 1)
    state.answered(attempts[1], {}, None, 2.0)
    [again] = sends(state)
    assert (again.request, again.member) == (first, other)
    state.answered(again, {"y": np.ones(1)}, None, 3.0)
    assert error_of(first) is None
    assert [found.request for found in sends(state)] == [waiting]
    assert state.retried == 1
    assert second.over


def test_a_second_loss_ends_the_request_and_names_both_replicas() -> None:
    state, _ = state_with(2)
    request = submitted(state)
    [attempt] = sends(state)
    state.lost(attempt, "process 7", "killed", 1.0)
    [again] = [carried_out(state, one) for one in state.take_instructions() if isinstance(one, Send)]
    assert again.member is not attempt.member
    state.lost(again, "process 8", "gone", 2.0)
    error = error_of(request)
    assert isinstance(error, ReplicaError)
    for text in ("replica 0 (process 7)", "replica 1 (process 8)", "killed", "gone", "'net'"):
        assert text in str(error)


def test_a_run_with_effects_is_not_sent_again() -> None:
    state, _ = state_with(2, retries=False)
    request = submitted(state)
    [attempt] = sends(state)
    state.lost(attempt, "process 7", "killed", 1.0)
    assert isinstance(error_of(request), ReplicaError)
    assert "replica 0 (process 7)" in str(error_of(request))
    assert [type(one) for one in state.take_instructions()] == [Start]


def test_what_is_told_of_an_earlier_life_does_not_take_the_replica_down_again() -> None:
    state, [member] = state_with(1, max_outstanding=2)
    submitted(state), submitted(state)
    one, other = sends(state)
    state.lost(one, "process 7", "killed", 1.0)
    state.take_instructions()
    state.started(member, 0, 2.0)  # of the life before
    assert member.phase is Phase.STARTING
    state.started(member, 1, 2.0)
    assert len(sends(state)) == 1  # the one that was told of as lost
    state.lost(other, "process 7", "killed", 3.0)
    assert (member.phase, member.life) == (Phase.UP, 1)
    assert len(sends(state)) == 1
    assert state.lost_replicas == 1
    assert len(member.outstanding) == 2


def test_a_request_that_was_given_up_is_over_but_its_replica_stays_busy_until_it_answers() -> None:
    state, _ = state_with(1)
    request, waiting = submitted(state), submitted(state)
    [attempt] = sends(state)
    given_up = RunTimeoutError("late")
    assert state.give_up(request, given_up, 1.0) is attempt
    assert error_of(request) is given_up
    assert sends(state) == []
    assert state.unfinished == 1
    state.answered(attempt, None, RunCancelledError("stopped"), 2.0)
    assert error_of(request) is given_up
    assert [one.request for one in sends(state)] == [waiting]
    assert state.outcomes["timed_out"] == 1
    assert state.outcomes["cancelled"] == 0
    assert state.give_up(request, RunCancelledError("again"), 3.0) is None


def test_a_lost_attempt_whose_caller_gave_up_is_not_sent_again() -> None:
    state, _ = state_with(2)
    request = submitted(state)
    [attempt] = sends(state)
    state.give_up(request, RunCancelledError("cancelled"), 1.0)
    state.lost(attempt, "process 7", "killed", 2.0)
    assert [type(one) for one in state.take_instructions()] == [Start]
    assert state.retried == 0


def test_a_waiting_request_can_be_given_up_in_the_queue_and_before_its_second_try() -> None:
    state, [member] = state_with(1)
    first, queued = submitted(state), submitted(state)
    [attempt] = sends(state)
    assert state.give_up(queued, RunCancelledError("x"), 1.0) is None
    assert queued.over
    state.lost(attempt, "process 7", "killed", 1.0)
    late = RunTimeoutError("late")
    assert state.give_up(first, late, 2.0) is None
    assert "replica 0 (process 7)" in late.__notes__[0]
    state.take_instructions()
    state.started(member, 1, 3.0)
    assert sends(state) == []
    assert state.unfinished == 0


def test_a_replica_whose_process_keeps_ending_is_given_up_and_the_last_one_takes_all_requests_along() -> None:
    state = DeploymentState("net", max_outstanding=1)
    member = state.add_member()
    request = submitted(state)
    for life in range(MAX_STARTS):
        [start] = state.take_instructions()
        assert isinstance(start, Start)
        assert start.life == life
        state.failed_to_start(member, life, ReplicaError(f"ended {life}"), again=True, now=1.0)
    assert [type(one) for one in state.take_instructions()] == [Stop]
    assert str(error_of(request)) == f"ended {MAX_STARTS - 1}"
    lengths = []
    for _ in range(3):
        with pytest.raises(ReplicaError, match="ended") as caught:
            submitted(state)
        lengths.append(len(caught.traceback))
    assert len(set(lengths)) == 1  # the one error, raised again and again, does not keep all frames that it ever saw


def test_an_error_of_the_model_is_not_tried_again() -> None:
    state = DeploymentState("net", max_outstanding=1)
    member = state.add_member()
    told: list[int] = []
    state.when_started(lambda: told.append(1))
    state.take_instructions()
    state.failed_to_start(member, 0, DagexecError("bad"), again=False, now=0.0)
    assert [type(one) for one in state.take_instructions()] == [Stop]
    assert told == [1]


def test_a_request_that_nobody_can_wait_for_is_sent_to_no_replica() -> None:
    """The event loop of its caller is closed."""
    state, _ = state_with(1)
    submitted(state)
    [attempt] = sends(state)
    lost, waiting = submitted(state), submitted(state)
    loop = asyncio.new_event_loop()
    lost.waits_on = EventLoop(loop, is_asyncio=True)
    loop.close()
    state.answered(attempt, {}, None, 1.0)
    [after] = sends(state)
    assert after.request is waiting
    assert isinstance(error_of(lost), RunCancelledError)
    assert (state.outcomes["completed"], state.outcomes["cancelled"]) == (1, 1)


def test_a_retired_replica_answers_what_it_has_and_ends() -> None:
    state, [one, other] = state_with(2)
    first, _ = submitted(state), submitted(state)
    attempts = sends(state)
    state.retire(one)
    assert state.take_instructions() == []
    waiting = submitted(state)
    assert sends(state) == []
    state.answered(attempts[0], {}, None, 1.0)
    assert first.over
    [stop] = state.take_instructions()
    assert isinstance(stop, Stop)
    assert stop.member is one
    state.answered(attempts[1], {}, None, 1.0)
    assert [found.member for found in sends(state)] == [other]
    assert not waiting.over


def test_a_retired_replica_that_is_lost_is_not_started_again() -> None:
    state, [one, other] = state_with(2)
    request = submitted(state)
    [attempt] = sends(state)
    state.retire(one)
    state.lost(attempt, "process 7", "killed", 1.0)
    kinds = Counter(type(found) for found in state.take_instructions())
    assert kinds == {Stop: 1, Send: 1}
    assert not request.over
    assert len(other.outstanding) == 1


def test_a_full_queue_refuses_and_says_how_full_it_is() -> None:
    state, _ = state_with(1, max_queued=1)
    submitted(state), submitted(state)
    with pytest.raises(QueueFullError) as caught:
        submitted(state)
    assert (caught.value.limit, caught.value.queued, caught.value.running) == (1, 1, 1)
    assert state.outcomes["rejected"] == 1


def test_no_queue_at_all_still_serves_idle_replicas() -> None:
    state, _ = state_with(1, max_queued=0)
    submitted(state)
    with pytest.raises(QueueFullError):
        submitted(state)


def test_closing_ends_what_waits_and_lets_finish_what_runs() -> None:
    state, _ = state_with(1)
    running, waiting = submitted(state), submitted(state)
    [attempt] = sends(state)
    told: list[int] = []
    state.shut()
    state.abandon_queue(1.0)
    state.when_empty(lambda: told.append(1))
    assert isinstance(error_of(waiting), ClosedError)
    assert told == []
    with pytest.raises(ClosedError):
        submitted(state)
    state.answered(attempt, {}, None, 2.0)
    assert told == [1]
    assert error_of(running) is None


BOUNDS = Autoscaling(min_replicas=1, max_replicas=3, target_outstanding=1, downscale_seconds=10)


def test_replicas_come_with_requests_and_go_when_they_are_not_needed_for_a_while() -> None:
    state, [one] = state_with(1, autoscaling=BOUNDS)
    requests = [submitted(state) for _ in range(5)]
    assert state.scale(0.0) == 10.0
    started = [found.member for found in state.take_instructions() if isinstance(found, Start)]
    assert [member.number for member in started] == [1, 2]
    state.started(started[0], 0, 1.0)
    state.scale(1.0)
    attempts = list(state.attempts.values())
    assert len(attempts) == 2
    state.take_instructions()
    while attempts:
        state.answered(attempts[0], {}, None, 2.0)
        attempts = list(state.attempts.values())
    assert all(request.over for request in requests)
    state.take_instructions()
    assert state.scale(9.0) == 11.0  # 5 were outstanding until 1.0
    assert state.take_instructions() == []
    assert state.scale(11.0) is None
    stopped = {found.member for found in state.take_instructions() if isinstance(found, Stop)}
    assert stopped == {started[1], started[0]}  # the one that was still starting, and of those that idle the last
    assert one.phase is Phase.UP


def test_the_busiest_replica_stays_and_one_that_leaves_answers_first() -> None:
    state, members = state_with(3, max_outstanding=4, autoscaling=BOUNDS)
    requests = [submitted(state) for _ in range(3)]
    assert [found.member for found in sends(state)] == members
    state.scale(0.0)
    for place in (0, 1):
        state.answered(state.attempts[requests[place]], {}, None, 1.0)
    assert state.scale(1.0) == 10.0
    assert state.scale(10.0) is None
    assert {found.member for found in state.take_instructions() if isinstance(found, Stop)} == set(members[:2])
    assert state.members.keys() == {2}


def test_no_replica_is_started_after_one_that_failed_or_when_the_deployment_closes() -> None:
    state, _ = state_with(1, autoscaling=BOUNDS)
    submitted(state), submitted(state)
    state.scale(0.0)
    [_, start] = state.take_instructions()
    assert isinstance(start, Start)
    state.failed_to_start(start.member, 0, DagexecError("no memory"), again=False, now=1.0)
    state.take_instructions()
    state.scale(1.0)
    assert state.take_instructions() == []
    state.shut()
    assert state.scale(2.0) is None


@pytest.mark.parametrize("seed", range(40))
def test_no_request_is_forgotten_or_answered_twice_whatever_happens_in_which_order(seed: int) -> None:
    """Random events: at the end each request that was taken is over, once, and no replica has more than it may."""
    chance = random.Random(seed)
    most = chance.choice((1, 2, 3))
    state = DeploymentState("net", max_outstanding=most)
    told: Counter[int] = Counter()
    requests: list[Request] = []
    flying: list[Attempt] = []
    starting: list[Start] = []
    stopped: set[Member] = set()
    sent: Counter[Request] = Counter()
    for _ in range(3):
        state.add_member()

    def take() -> None:
        for one in state.take_instructions():
            if isinstance(one, Send):
                assert one.attempt.member not in stopped
                assert one.attempt.member.phase is Phase.UP
                assert len(one.attempt.member.outstanding) <= most
                sent[one.attempt.request] += 1
                flying.append(carried_out(state, one))
            elif isinstance(one, Start):
                starting.append(one)
            else:
                assert one.member not in stopped
                stopped.add(one.member)

    def answer(now: float) -> None:
        attempt = flying.pop(chance.randrange(len(flying)))
        if attempt.member.life != attempt.life or chance.random() < 0.2:
            state.lost(attempt, "somewhere", "killed", now)
        else:
            state.answered(attempt, {}, None, now)

    def start(now: float) -> None:
        one = starting.pop(chance.randrange(len(starting)))
        if chance.random() < 0.1:
            state.failed_to_start(one.member, one.life, ReplicaError("ended"), again=True, now=now)
        else:
            state.started(one.member, one.life, now)

    for step in range(300):
        now = float(step)
        take()
        what = chance.random()
        if what < 0.35:
            request = Request({}, call=Call(priority=chance.randrange(3)), notify=partial(told.update, [len(requests)]))
            try:
                state.submit(request, now)
            except ReplicaError:
                state.add_member()
            else:
                requests.append(request)
        elif what < 0.75 and flying:
            answer(now)
        elif what < 0.9 and starting:
            start(now)
        elif what < 0.95 and requests:
            state.give_up(chance.choice(requests), RunCancelledError("cancelled"), now)
        elif what < 0.96:
            state.add_member()
        elif what < 0.97 and len(state.members) > 1:
            state.retire(chance.choice(list(state.members.values())))
    state.shut()
    take()
    while flying or starting:
        answer(400.0) if flying else start(400.0)
        take()
    if state.unfinished:  # no replica was left to serve them
        assert not any(member.phase is not Phase.LEAVING for member in state.members.values())
        state.abandon_queue(500.0)
        for request in list(state.again):
            state.give_up(request, RunCancelledError("closed"), 500.0)
    assert state.unfinished == 0
    assert all(request.over for request in requests)
    assert told == dict.fromkeys(range(len(requests)), 1)
    assert max(sent.values(), default=0) <= 2
    state.end_members()
    take()
    assert not state.members
