"""Which request waits, and which replica runs which: what a deployment decides.

A machine that locks nothing, calls nobody and reads no clock. Events are its methods; what is to be done about them is
appended to `instructions`, which the owner takes and carries out after it has let go of its lock.

A replica is starting until it says that it is ready, then up until it is lost, which makes it a starting one again,
with one more life. What is said of an earlier life no longer counts. A request whose replica was lost is sent once
more, to whoever is up then, unless a run has effects; a second loss ends it with ReplicaError. A request that its
caller gave up is over at once, but its attempt keeps its place at the replica until that has answered, as it is busy
until then.

Whether a replica is well is judged by its answers. One that has requests and has not answered anything for half of
`answer_seconds` is asked whether it is there, which a replica that computes can answer; one that does not answer that
for the other half is lost, whatever became of its process.

Replicas are alike but for what they do, and times count only as far as they lie ahead (`DeploymentState.state`).
`tests/machines` looks at every state of small worlds around it: processes die and fall silent, messages come late or
twice, instructions are carried out in any order.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import field
from enum import Enum

from dagexec.binding.io_binding import Outputs
from dagexec.cluster.autoscaling import Autoscaler, Autoscaling
from dagexec.cluster.link import Call
from dagexec.cluster.routing import LeastOutstanding
from dagexec.errors import ClosedError, DagexecError, QueueFullError, ReplicaError
from dagexec.executor.dispatch.statistics import OUTCOMES, TIMES_KEPT
from dagexec.executor.requests.queue import RequestQueue
from dagexec.executor.requests.request import Request, abandoned, outcome_name, timed_out
from dagexec.platform.records import dataclass
from dagexec.scheduler.observe.run_times import RunTimes

MAX_STARTS = 3
"""How often in a row the process of a replica may end before it is ready; then the replica is given up."""


class Phase(Enum):
    """What a replica is doing."""

    STARTING = "starting"
    UP = "up"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Member:
    """A replica of the deployment.

    Attributes:
        number: its name; never given twice.
        life: how often it was lost.
        failed_starts: how often in a row it ended before it was ready.
        outstanding: what it was sent in this life and has not answered, in that order.
        begun: how many requests it was sent in all lives.
        heard: when it answered something last, or was sent requests after it had none.
        asked: when it was asked whether it is there, and has not answered anything since; infinity when it was not.
    """

    number: int
    phase: Phase = Phase.STARTING
    life: int = 0
    failed_starts: int = 0
    outstanding: dict[Attempt, None] = field(default_factory=dict)
    begun: int = 0
    heard: float = 0.0
    asked: float = math.inf


@dataclass(eq=False, slots=True)
class Attempt:
    """A request on its way to a replica, or running there.

    Attributes:
        life: that of the replica.
        is_sent: it may have run there.
        call: there once it has been sent.
    """

    request: Request
    member: Member
    life: int
    is_sent: bool = False
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Have the replica start."""

    member: Member
    life: int


@dataclass(frozen=True, slots=True)
class Stop:
    """End the replica."""

    member: Member


@dataclass(frozen=True, slots=True)
class Send:
    """Send the request."""

    attempt: Attempt


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the replica whether it is there."""

    member: Member
    life: int


Instruction = Start | Stop | Send | Ask


class DeploymentState:
    """The requests and the replicas of one deployment.

    Attributes:
        members: the replicas that there are, by number.
        queue: requests that wait for a replica.
        again: those that are to be sent a second time, before all others.
        attempts: the latest attempt of each request that is not over and was sent.
        instructions: what is to be done.
        outcomes: how many requests ended in each way.
        times: of the last completed ones, the seconds in the queue, and from then on.
        retried: requests that were sent a second time.
        lost_replicas: how often a replica that was up was lost.
        failure: why the last replica that was given up did not start.
    """

    def __init__(
        self,
        name: str,
        *,
        max_outstanding: int,
        max_queued: int | None = None,
        retries: bool = True,
        autoscaling: Autoscaling | None = None,
        answer_seconds: float = math.inf,
        run_times: RunTimes | None = None,
    ) -> None:
        """`name` is the model's, for messages; with `retries`, a request may run twice.

        `run_times` adds up what requests waited, and what replicas took for them, the ways there and back included.
        """
        self._name = name
        self._patience = answer_seconds / 2
        self._max_queued = max_queued
        self._retries = retries
        self._run_times = run_times
        self._router: LeastOutstanding[int] = LeastOutstanding(max_outstanding=max_outstanding)
        self._scaler = None if autoscaling is None else Autoscaler(autoscaling)
        self._numbers = 0
        self._shut = False
        self._losses: dict[Request, str] = {}
        self._when_empty: list[Callable[[], object]] = []
        self._when_started: list[Callable[[], object]] = []
        self.members: dict[int, Member] = {}
        self.queue = RequestQueue()
        self.again: deque[Request] = deque()
        self.attempts: dict[Request, Attempt] = {}
        self.instructions: list[Instruction] = []
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.times: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        self.retried = 0
        self.lost_replicas = 0
        self.failure: DagexecError | None = None

    def take_instructions(self) -> list[Instruction]:
        """What is to be done, in order; it is taken for done from now on."""
        taken, self.instructions = self.instructions, []
        return taken

    @property
    def up(self) -> int:
        """Replicas that requests may be sent to."""
        return len(self._router)

    @property
    def unfinished(self) -> int:
        """Requests whose callers wait."""
        return len(self.queue) + len(self.again) + len(self.attempts)

    def add_member(self) -> Member:
        """There is to be one more replica."""
        member = self.members[self._numbers] = Member(self._numbers)
        self._numbers += 1
        self.instructions.append(Start(member, 0))
        return member

    def retire(self, member: Member) -> None:
        """There is to be one less: it gets no more requests, and ends when it has answered those that it has."""
        if member.phase is Phase.UP:
            self._router.remove(member.number)
        member.phase = Phase.LEAVING
        self._end_if_idle(member)
        self._tell_started()

    def scale(self, now: float) -> float | None:
        """Have as many replicas as are wanted now. When to call it again, if nothing happens before.

        No more are started while one could not be, and none when the deployment closes.
        """
        if self._scaler is None or self._shut:
            return None
        wanted = self._scaler.replicas(self.unfinished, now)
        there = [member for member in self.members.values() if member.phase is not Phase.LEAVING]
        if self.failure is None:
            for _ in range(wanted - len(there)):
                self.add_member()
        there.sort(key=lambda member: (member.phase is Phase.UP, len(member.outstanding), -member.number))
        for member in there[: max(0, len(there) - wanted)]:
            self.retire(member)
        return self._scaler.next_change()

    def started(self, member: Member, life: int, now: float) -> None:
        """It is ready."""
        if member.phase is not Phase.STARTING or member.life != life:
            return
        member.phase, member.failed_starts, self.failure = Phase.UP, 0, None
        self._router.add(member.number)
        self._send(now)
        self._tell_started()

    def failed_to_start(self, member: Member, life: int, error: DagexecError, *, again: bool, now: float) -> None:
        """It was not ready before it ended; `again` if it may be another time."""
        if member.phase is not Phase.STARTING or member.life != life:
            return
        member.failed_starts += 1
        if again and member.failed_starts < MAX_STARTS:
            member.life += 1
            self.instructions.append(Start(member, member.life))
            return
        self.failure, member.phase = error, Phase.LEAVING
        self._end_if_idle(member)
        if not self._may_serve():
            for request in self._waiting():
                self._settle(request, None, error, now)
        self._tell_started()

    def submit(self, request: Request, now: float) -> None:
        """A request came. Raises ClosedError, QueueFullError, RunTimeoutError for one that is late, and what the last
        replica failed to start with.
        """
        request.created = now
        try:
            if self._shut:
                raise ClosedError(f"net {self._name!r}: the deployment is closed")
            if now >= request.deadline:
                raise timed_out(self._name, request)
            if not self._may_serve() and self.failure is not None:
                raise self.failure.with_traceback(None)  # which would get longer with each call
            full = self._max_queued is not None and len(self.queue) >= self._max_queued
            if full and not self._has_room():
                assert self._max_queued is not None
                raise QueueFullError(
                    f"net {self._name!r}: {len(self.queue)} requests wait for a replica, and no more may",
                    limit=self._max_queued,
                    queued=len(self.queue),
                    running=len(self.attempts),
                )
        except DagexecError as error:
            self.outcomes[outcome_name(error)] += 1
            raise
        self.queue.push(request)
        self._send(now)

    def may_send(self, attempt: Attempt, now: float) -> bool:
        """It is about to be sent. False when its caller has given it up meanwhile, or its replica was lost."""
        if self.attempts.get(attempt.request) is attempt:
            member = attempt.member
            if not any(one.is_sent for one in member.outstanding):
                member.heard, member.asked = now, math.inf
            attempt.is_sent = True
            return True
        self.answered(attempt, None, None, now)
        return False

    def sent(self, attempt: Attempt, call: Call) -> bool:
        """It is on its way. False when its caller has given it up meanwhile, so that it is to be cancelled."""
        attempt.call = call
        return self.attempts.get(attempt.request) is attempt

    def answered(self, attempt: Attempt, result: Outputs | None, error: DagexecError | None, now: float) -> None:
        """The replica has run it, or an `error` ended it."""
        self.is_there(attempt.member, attempt.life, now)
        self._leave(attempt)
        if self.attempts.get(attempt.request) is attempt:
            self._settle(attempt.request, result, error, now)
        self._send(now)
        self._end_if_idle(attempt.member)

    def lost(self, attempt: Attempt, place: str, reason: str, now: float) -> None:
        """The process of the replica, at `place`, ended before it answered."""
        member, request = attempt.member, attempt.request
        self._leave(attempt)
        if member.life == attempt.life and member.phase is Phase.UP:
            self._lose(member)
        if self.attempts.get(request) is attempt:
            self._retry(request, f"replica {member.number} ({place}) was lost while it ran the request: {reason}", now)
        self._send(now)
        self._end_if_idle(member)

    def is_there(self, member: Member, life: int, now: float) -> None:
        """It has answered something."""
        if member.life == life:
            member.heard, member.asked = now, math.inf

    def keep_time(self, now: float, place: Callable[[Member], str]) -> float:
        """Have as many replicas as are wanted, and none that is silent. When to call it again, if nothing happens.

        `place` says where a replica runs.
        """
        silent = [member for member in self._busy() if now >= member.asked + self._patience]
        for member in silent:
            reason = f"it has not answered for {now - member.heard:.3g} seconds"
            for attempt in list(member.outstanding):
                self.lost(attempt, place(member), reason, now)
        fewer = self.scale(now)
        return min(self._watch(now), math.inf if fewer is None else fewer)

    def _watch(self, now: float) -> float:
        """Ask the replicas that have been silent for long. When to look again."""
        due = math.inf
        for member in self._busy():
            if member.asked == math.inf and now >= member.heard + self._patience:
                member.asked = now
                self.instructions.append(Ask(member, member.life))
            due = min(due, self._patience + (member.heard if member.asked == math.inf else member.asked))
        return due

    def give_up(self, request: Request, error: DagexecError, now: float) -> Attempt | None:
        """Its caller waits no longer; the attempt that is to be cancelled, if there is one. Nothing if it is over."""
        if request.over:
            return None
        attempt = self.attempts.get(request)
        if attempt is None and not self._take_out(request):
            return None
        if (loss := self._losses.get(request)) is not None:
            error.add_note(loss)
        self._settle(request, None, error, now)
        return attempt

    def shut(self) -> None:
        """Take no more requests."""
        self._shut = True

    def abandon_queue(self, now: float) -> None:
        """End the requests that no replica was sent."""
        for request in self.queue.clear():
            self._settle(request, None, ClosedError(f"net {self._name!r}: the deployment was closed"), now)

    def abandon_all(self, now: float) -> list[Attempt]:
        """End all requests; the attempts that are to be cancelled."""
        error = ClosedError(f"net {self._name!r}: the deployment was closed before the run was done")
        cut = list(self.attempts.values())
        for request in [*self._waiting(), *self.attempts]:
            self._settle(request, None, error, now)
        return cut

    def end_members(self) -> None:
        """End all replicas, whatever they do."""
        for member in list(self.members.values()):
            if member.phase is Phase.UP:
                self._router.remove(member.number)
            member.phase = Phase.LEAVING
            member.outstanding.clear()
            self._end_if_idle(member)
        self._tell_started()

    def when_empty(self, notify: Callable[[], object]) -> None:
        """Call `notify` once no request is left."""
        self._when_empty.append(notify)
        self._tell_empty()

    def when_started(self, notify: Callable[[], object]) -> None:
        """Call `notify` once no replica is starting."""
        self._when_started.append(notify)
        self._tell_started()

    def state(self, now: float, name: Callable[[Request], Hashable], about: Callable[[Member], Hashable]) -> Hashable:
        """All that what comes next depends on; times are from `now` on. `name` says which request is which.

        Replicas are alike, but for what `about` knows of one beside what is known here; where there are to be more and
        fewer, of equal ones the youngest leaves first.
        """

        busy = self._busy()

        def left(member: Member, since: float) -> float | None:
            return max(0.0, since + self._patience - now) if member in busy and since < math.inf else None

        def known(member: Member) -> Hashable:
            current = self.attempts.get
            sent = tuple((name(one.request), current(one.request) is one, one.is_sent) for one in member.outstanding)
            older = [one for one in self.attempts.values() if one.member is member and one not in member.outstanding]
            lost = frozenset(name(one.request) for one in older)
            times = left(member, member.heard), left(member, member.asked)
            return member.phase, member.failed_starts, sent, lost, times, self._router.turn(member.number)

        members = [(known(member), about(member)) for member in self.members.values()]
        return (
            frozenset(Counter(members).items()) if self._scaler is None else tuple(members),
            tuple(map(name, self.queue)),
            self.queue.overtaken,
            tuple(map(name, self.again)),
            frozenset(map(name, self._losses)),
            None if self._scaler is None else self._scaler.state(now),
            (self._shut, self.failure is None, bool(self._when_empty), bool(self._when_started)),
        )

    def _busy(self) -> list[Member]:
        return [one for one in self.members.values() if any(attempt.is_sent for attempt in one.outstanding)]

    def _may_serve(self) -> bool:
        return any(member.phase is not Phase.LEAVING for member in self.members.values())

    def _has_room(self) -> bool:
        most = self._router.max_outstanding
        members = (member for member in self.members.values() if member.phase is Phase.UP)
        return not self.queue and any(self._router.outstanding(member.number) < (most or 1) for member in members)

    def _waiting(self) -> list[Request]:
        """Takes all requests that no replica has."""
        waiting = [*self.again, *self.queue.clear()]
        self.again.clear()
        return waiting

    def _send(self, now: float) -> None:
        """Give the requests that wait to replicas, as long as there are both."""
        while self.again or self.queue:
            first = self.again[0] if self.again else self.queue.head()
            assert first is not None
            if first.is_abandoned():
                self._take_out(first)
                self._settle(first, None, abandoned(self._name), now)
                continue
            number = self._router.acquire()
            if number is None:
                return
            request = self.again.popleft() if self.again else self.queue.pop()
            assert request is not None
            request.begun = now
            member = self.members[number]
            attempt = self.attempts[request] = Attempt(request, member, member.life)
            member.outstanding[attempt] = None
            member.begun += 1
            self.instructions.append(Send(attempt))

    def _leave(self, attempt: Attempt) -> None:
        member = attempt.member
        if attempt in member.outstanding:
            del member.outstanding[attempt]
            if member.number in self._router:
                self._router.release(member.number)

    def _lose(self, member: Member) -> None:
        self._router.remove(member.number)
        member.phase = Phase.STARTING
        member.life += 1
        for attempt in member.outstanding:  # what was sent is told of by itself
            if not attempt.is_sent and self.attempts.get(attempt.request) is attempt:
                self.again.append(self.attempts.pop(attempt.request).request)
        member.outstanding.clear()
        self.lost_replicas += 1
        self.instructions.append(Start(member, member.life))

    def _retry(self, request: Request, loss: str, now: float) -> None:
        before = self._losses.get(request)
        if not self._retries:
            loss += "; it was not run again, as the net does more than compute"
        elif before is None:
            self._losses[request] = loss
            del self.attempts[request]
            self.again.append(request)
            self.retried += 1
            if not self._may_serve():
                self.again.remove(request)
                self._settle(request, None, ReplicaError(f"net {self._name!r}: {loss}; no replica is left"), now)
            return
        text = loss if before is None else f"{before}; then {loss}"
        self._settle(request, None, ReplicaError(f"net {self._name!r}: {text}"), now)

    def _take_out(self, request: Request) -> bool:
        """It waits no longer. False if it did not."""
        if request.queue is self.queue:
            self.queue.remove(request)
            return True
        if request in self.again:
            self.again.remove(request)
            return True
        return False

    def _settle(self, request: Request, result: Outputs | None, error: DagexecError | None, now: float) -> None:
        """The request is over. What is not done by its deadline was not done in time, whoever looks first."""
        if error is None and now >= request.deadline:
            result, error = None, timed_out(self._name, request)
        self.attempts.pop(request, None)
        self._losses.pop(request, None)
        request.result, request.error, request.over = result, error, True
        request.feeds = {}
        self.outcomes[outcome_name(error)] += 1
        if error is None:
            waited, ran = request.begun - request.created, now - request.begun
            self.times.append((waited, ran))
            if self._run_times is not None:
                self._run_times.record(1, [(1, waited)], 0.0, ran, 0.0)
        request.notify()
        self._tell_empty()

    def _end_if_idle(self, member: Member) -> None:
        if member.phase is Phase.LEAVING and not member.outstanding and member.number in self.members:
            del self.members[member.number]
            self.instructions.append(Stop(member))

    def _tell_empty(self) -> None:
        if not self.unfinished:
            waiting, self._when_empty = self._when_empty, []
            for notify in waiting:
                notify()

    def _tell_started(self) -> None:
        if all(member.phase is not Phase.STARTING for member in self.members.values()):
            waiting, self._when_started = self._when_started, []
            for notify in waiting:
                notify()
