"""Carries out what a `DeploymentState` decides: under a lock the decisions, outside of it the calls to replicas.

A request that finds room is sent by the thread that makes it. What follows from an answer is done by a thread of the
deployment, as answers come on a thread of the transport, which may not be held up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from dagexec.cluster.link import Answer, Lost, ReplicaLink, Started
from dagexec.cluster.state import Ask, Attempt, DeploymentState, Instruction, Member, Phase, Send, Start, Stop
from dagexec.errors import DagexecError, FeedError, ReplicaError
from dagexec.executor.requests.request import Request, outcome_name
from dagexec.platform.threads import Thread, ThreadWait, Timer, threads

Answered = TypeVar("Answered")
Task = Callable[[], object]


class Dispatcher:
    """Sends requests to replicas, which `new_link` makes, and starts lost ones again."""

    def __init__(self, name: str, state: DeploymentState, new_link: Callable[[int], ReplicaLink]) -> None:
        """`name` is the model's. Call `close` at the end."""
        self._name = name
        self._state = state
        self._new_link = new_link
        self._links: dict[Member, ReplicaLink] = {}
        self._lock = threads().lock()
        self._now = threads().monotonic
        self._timer: Timer | None = None
        self._due = math.inf  # when it rings
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread: Thread | None = threads().start(self._work, name=f"dagexec-{name}-cluster")

    def submit(self, request: Request) -> None:
        """Have a replica run it. Raises what `DeploymentState.submit` does."""
        with self._lock:
            self._state.submit(request, self._now())
            self._keep_time()
            todo = self._state.take_instructions()
        self._carry_out(todo)

    def refuse(self, error: FeedError) -> None:
        """What a caller gave is no request. It is counted as one that is over."""
        with self._lock:
            self._state.outcomes[outcome_name(error)] += 1

    def give_up(self, request: Request, error: DagexecError) -> None:
        """End it with `error`, unless it is over; the replica stops before its next operator or piece."""
        with self._lock:
            attempt = self._state.give_up(request, error, self._now())
            self._later()
        if attempt is not None:
            _cancel(attempt)

    def add_members(self, count: int) -> None:
        """Start so many replicas more."""
        with self._lock:
            for _ in range(count):
                self._state.add_member()
            todo = self._state.take_instructions()
        self._carry_out(todo)

    def wait_until_started(self, seconds: float) -> bool:
        """Wait until no replica is starting. False when one was after so many seconds."""
        return self._wait(self._state.when_started, seconds)

    def read(self, question: Callable[[DeploymentState, Mapping[Member, ReplicaLink]], Answered]) -> Answered:
        """What `question` finds in the state, which stands still meanwhile."""
        with self._lock:
            return question(self._state, self._links)

    def shut(self, *, abandon_queue: bool) -> None:
        """Take no more requests, and perhaps end those that no replica has."""
        with self._lock:
            self._state.shut()
            if abandon_queue:
                self._state.abandon_queue(self._now())

    def when_empty(self, notify: Callable[[], object]) -> None:
        """Call `notify` once no request is left."""
        with self._lock:
            self._state.when_empty(notify)

    def wait_until_empty(self, seconds: float = -1) -> bool:
        """Wait until no request is left. False when one was after so many seconds; -1: as long as it takes."""
        return self._wait(self._state.when_empty, seconds)

    def abandon_all(self) -> None:
        """End all requests."""
        with self._lock:
            cut = self._state.abandon_all(self._now())
        for attempt in cut:
            _cancel(attempt)

    def close(self) -> None:
        """End all replicas and the thread. No request is left. Idempotent."""
        with self._lock:
            self._state.end_members()
            todo = self._state.take_instructions()
            thread, self._thread = self._thread, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        self._carry_out(todo)
        if thread is not None:
            self._tasks.put(None)
            thread.join()

    def _wait(self, when: Callable[[Callable[[], object]], object], seconds: float) -> bool:
        wait = ThreadWait()
        with self._lock:
            when(wait.notify)
        return wait.wait(seconds)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _carry_out(self, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._send(instruction.attempt)
            elif isinstance(instruction, Start):
                self._start(instruction.member, instruction.life)
            elif isinstance(instruction, Ask):
                self._ask(instruction.member, instruction.life)
            elif isinstance(instruction, Stop):
                self._stop(instruction.member)

    def _later(self) -> None:
        """Have the thread do what there is to do. Called with the lock."""
        self._keep_time()
        if self._state.instructions:
            self._tasks.put(partial(self._carry_out, self._state.take_instructions()))

    def _keep_time(self) -> None:
        """Have as many replicas as are wanted, and none that is silent, now and from then on. Called with the lock."""
        now = self._now()
        due = self._state.keep_time(now, self._place)
        if due >= self._due or self._thread is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = threads().call_briefly(max(0.0, due - now), self._on_time)

    def _on_time(self) -> None:
        with self._lock:
            self._timer, self._due = None, math.inf
            self._later()

    def _send(self, attempt: Attempt) -> None:
        request = attempt.request
        done = partial(self._answered, attempt)
        with self._lock:
            link = self._links.get(attempt.member)
            feeds, timeout = request.feeds, request.seconds_left(self._now())
            is_wanted = self._state.may_send(attempt, self._now())
            self._later()  # from now on it may be silent
        if not is_wanted:
            return
        if link is None:
            done(Lost("it was stopped"))
            return
        try:
            call = link.run(feeds, request.names, request.call.priority, timeout, done)
        except DagexecError as error:
            done(error)
            return
        except BaseException as error:
            done(DagexecError(f"net {self._name!r}: the request could not be sent: {type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise
            return
        with self._lock:
            wanted = self._state.sent(attempt, call)
        if not wanted:
            _cancel(attempt)

    def _answered(self, attempt: Attempt, answer: Answer) -> None:
        """The end of an attempt, on any thread."""
        with self._lock:
            now = self._now()
            if isinstance(answer, Lost):
                self._state.lost(attempt, self._place(attempt.member), answer.reason, now)
            elif isinstance(answer, DagexecError):
                self._state.answered(attempt, None, answer, now)
            else:
                self._state.answered(attempt, answer, None, now)
            self._later()

    def _place(self, member: Member) -> str:
        link = self._links.get(member)
        return "stopped" if link is None else link.place

    def _ask(self, member: Member, life: int) -> None:
        with self._lock:
            link = self._links.get(member)
        if link is not None:
            with suppress(Exception):  # what cannot be asked does not answer
                link.ask(partial(self._is_there, member, life))

    def _is_there(self, member: Member, life: int) -> None:
        with self._lock:
            self._state.is_there(member, life, self._now())
            self._later()

    def _start(self, member: Member, life: int) -> None:
        done = partial(self._started, member, life)
        with self._lock:
            if member.phase is not Phase.STARTING or member.life != life:
                return
            link = self._links.get(member)
            if link is None:
                link = self._links[member] = self._new_link(member.number)
        try:
            link.start(done)
        except DagexecError as error:
            done(error)
        except Exception as error:
            done(ReplicaError(f"net {self._name!r}: replica {member.number} could not be started: {error}"))

    def _started(self, member: Member, life: int, answer: Started) -> None:
        with self._lock:
            if answer is None:
                self._state.started(member, life, self._now())
            else:
                again = isinstance(answer, Lost)
                error = answer if isinstance(answer, DagexecError) else self._not_started(member, answer.reason)
                self._state.failed_to_start(member, life, error, again=again, now=self._now())
            self._later()

    def _not_started(self, member: Member, reason: str) -> ReplicaError:
        return ReplicaError(f"net {self._name!r}: replica {member.number} ended before it was ready: {reason}")

    def _stop(self, member: Member) -> None:
        with self._lock:
            link = self._links.pop(member, None)
        if link is not None:
            link.stop()


def _cancel(attempt: Attempt) -> None:
    if attempt.call is not None:
        with suppress(Exception):  # it is over for its caller, whatever becomes of it
            attempt.call.cancel()
