"""A small world around the machine of a deployment: callers, processes that start, compute, die and fall silent, and
messages that come late, twice, or never.

What the machine asks for is carried out in any order, as several threads do that.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dagexec.cluster.autoscaling import Autoscaling
from dagexec.cluster.state import Ask, Attempt, DeploymentState, Instruction, Member, Phase, Send, Start, Stop
from dagexec.errors import (
    ClosedError,
    DagexecError,
    QueueFullError,
    ReplicaError,
    RunCancelledError,
    RunTimeoutError,
)
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Request
from dagexec.scheduler.exploration.state_search import ModelFault
from tests.machines.worlds import Event


class Kind(NamedTuple):
    """What a request is like: its priority, and ticks until its caller gives it up, 0 for none."""

    priority: int = 0
    timeout: int = 0


@dataclass(frozen=True)
class Setting:
    """How large a world is.

    Attributes:
        deaths: how many processes may die.
        refusals: how many may end before they are ready, for good where `for_good`.
        silences: how many may stop to answer.
        doubles: how many messages may come twice.
        closes: the deployment may be closed.
        cancels: callers may give up what they asked for, whenever they like.
    """

    replicas: int
    kinds: tuple[Kind, ...]
    max_outstanding: int = 1
    max_queued: int | None = None
    retries: bool = True
    autoscaling: Autoscaling | None = None
    answer_seconds: float = math.inf
    deaths: int = 0
    refusals: int = 0
    for_good: bool = False
    silences: int = 0
    doubles: int = 0
    closes: bool = False
    cancels: bool = True

    def world(self) -> ClusterWorld:
        """At the beginning."""
        return ClusterWorld(self)


class _Process:
    """A process of a replica, of one life. It may outlive what the deployment thinks of it."""

    def __init__(self, life: int) -> None:
        self.life = life
        self.is_ready = self.is_dead = self.is_silent = False
        self.runs: list[Attempt] = []
        self.asked: list[int] = []


Message = tuple[Hashable, ...]


class ClusterWorld:
    """What there is at one moment."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.state = DeploymentState(
            "net",
            max_outstanding=setting.max_outstanding,
            max_queued=setting.max_queued,
            retries=setting.retries,
            autoscaling=setting.autoscaling,
            answer_seconds=setting.answer_seconds,
        )
        self.now = 0.0
        self.left = Counter(setting.kinds)
        self.budget = {name: getattr(setting, name) for name in ("deaths", "refusals", "silences", "doubles")}
        self.live: list[Request] = []
        self.given_up: set[Request] = set()
        self.runs: Counter[Request] = Counter()  # how often each was run
        self.processes: dict[Member, list[_Process]] = {}
        self.todo: list[Instruction] = []
        self.asked: set[tuple[Member, int]] = set()
        self.messages: list[Message] = []
        self.due = math.inf
        self.closing: list[str] = []
        self.is_empty = False
        for _ in range(setting.replicas):
            self.state.add_member()
        self._look()

    # what may happen

    def events(self) -> Iterator[Event]:
        yield from self._progress()
        if "shut" not in self.closing:
            yield from (("submit", kind) for kind, count in self.left.items() if count)
        for place, request in enumerate(self.live):
            if request not in self.given_up:
                if self.setting.cancels:
                    yield "cancel", place
                if self.now >= request.deadline:
                    yield "timeout", place
        for place, (_, process) in enumerate(self._all()):
            if process.is_dead:
                continue
            if process.is_ready and self.budget["deaths"]:
                yield "die", place
            if not process.is_ready and self.budget["refusals"]:
                yield "refuse", place
            if process.is_ready and not process.is_silent and self.budget["silences"]:
                yield "fall silent", place
        if self.budget["doubles"]:
            yield from (("twice", place) for place in range(len(self.messages)))
        if self.setting.closes and not self.closing:
            yield ("shut",)
        if self.closing == ["shut"] and self.live:
            yield ("abandon",)
        if any(math.inf > request.deadline > self.now for request in self.live):
            yield ("time",)

    def _progress(self) -> Iterator[Event]:
        """What happens by itself if one only waits."""
        yield from (("carry out", place) for place in range(len(self.todo)))
        yield from (("deliver", place) for place in range(len(self.messages)))
        for place, (_, process) in enumerate(self._all()):
            if process.is_dead or process.is_silent:
                continue
            if not process.is_ready:
                yield "get ready", place
            yield from (("answer", place, run) for run in range(len(process.runs)))
            if process.asked:
                yield "say so", place
        if self.now < self.due < math.inf:
            yield ("time",)
        elif self.due <= self.now:
            yield ("keep time",)
        if self.closing and self.is_empty and "end" not in self.closing:
            yield ("end",)

    def _all(self) -> list[tuple[Member, _Process]]:
        return [(member, process) for member, processes in self.processes.items() for process in processes]

    def do(self, event: Event) -> None:
        what, *rest = event
        getattr(self, "_" + str(what).replace(" ", "_"))(*rest)

    # callers

    def _submit(self, kind: Kind) -> None:
        self.left[kind] -= 1
        request = Request({}, call=Call(timeout=kind.timeout or None, priority=kind.priority))
        request.notify = partial(self._tell, request)
        request.time_out(self.now)
        self.live.append(request)
        try:
            self.state.submit(request, self.now)
        except (QueueFullError, ClosedError, ReplicaError) as error:
            self.live.remove(request)
            full = self.setting.max_queued is not None and len(self.state.queue) >= self.setting.max_queued
            nobody = all(one.phase is Phase.LEAVING for one in self.state.members.values())
            self._expect({QueueFullError: full, ClosedError: False, ReplicaError: nobody}[type(error)], "refused")
        self._look()

    def _cancel(self, place: int) -> None:
        self._give_up(self.live[place], RunCancelledError("given up"))

    def _timeout(self, place: int) -> None:
        self._give_up(self.live[place], RunTimeoutError("late"))

    def _give_up(self, request: Request, error: DagexecError) -> None:
        self.given_up.add(request)
        self.state.give_up(request, error, self.now)
        self._expect(request.over, "a request that is given up is not over")
        self._look()

    def _tell(self, request: Request) -> None:
        self._expect(request in self.live, "a request ends twice")
        self.live.remove(request)
        needed = 2 if self.setting.retries else 1
        lost = isinstance(request.error, ReplicaError) and self._may_serve()
        self._expect(not lost or self.runs[request] >= needed, "a request is given up that might be run once more")

    def _may_serve(self) -> bool:
        return any(one.phase is not Phase.LEAVING for one in self.state.members.values())

    # processes

    def _get_ready(self, place: int) -> None:
        member, process = self._all()[place]
        process.is_ready = True
        self.messages.append(("started", member, process.life))

    def _refuse(self, place: int) -> None:
        self.budget["refusals"] -= 1
        member, process = self._all()[place]
        process.is_dead = True
        self.messages.append(("refused", member, process.life))
        self._tidy()

    def _die(self, place: int) -> None:
        self.budget["deaths"] -= 1
        self._end_process(*self._all()[place])

    def _end_process(self, member: Member, process: _Process) -> None:
        process.is_dead = True
        self.messages += [("lost", member, attempt) for attempt in process.runs]
        process.runs.clear()
        self._tidy()

    def _tidy(self) -> None:
        """A process that is dead counts only while it is its replica's latest."""
        for member, processes in self.processes.items():
            self.processes[member] = [one for one in processes[:-1] if not one.is_dead] + processes[-1:]

    def _fall_silent(self, place: int) -> None:
        self.budget["silences"] -= 1
        self._all()[place][1].is_silent = True

    def _answer(self, place: int, run: int) -> None:
        member, process = self._all()[place]
        self.messages.append(("answered", member, process.runs.pop(run)))

    def _say_so(self, place: int) -> None:
        member, process = self._all()[place]
        self.messages.append(("there", member, process.asked.pop()))

    def _twice(self, place: int) -> None:
        self.budget["doubles"] -= 1
        self.messages.append(self.messages[place])

    # the dispatcher

    def _deliver(self, place: int) -> None:
        what, member, about = self.messages.pop(place)
        assert isinstance(member, Member)
        state, now = self.state, self.now
        is_well = member.phase is Phase.UP and any(
            one.life == member.life and not one.is_dead for one in self.processes.get(member, [])
        )
        if what == "started":
            state.started(member, about, now)  # type: ignore[arg-type]
        elif what == "refused":
            again = not self.setting.for_good
            state.failed_to_start(member, about, ReplicaError("refused"), again=again, now=now)  # type: ignore[arg-type]
        elif what == "there":
            state.is_there(member, about, now)  # type: ignore[arg-type]
        elif what == "lost":
            state.lost(about, "process", "it died", now)  # type: ignore[arg-type]
            self._expect(not is_well or member.phase is Phase.UP, "a replica is lost that is well")
        else:
            state.answered(about, {}, None, now)  # type: ignore[arg-type]
        self._look()

    def _look(self) -> None:
        """As whoever has the lock does in the end."""
        before = {member: member.life for member in self.state.members.values()}
        self.due = self.state.keep_time(self.now, lambda _: "process")
        for member, life in before.items():
            self._expect(member.life == life or (member, life) in self.asked, "a replica is lost that was not asked")
        instructions = self.state.take_instructions()
        self.asked |= {(one.member, one.life) for one in instructions if isinstance(one, Ask)}
        self.todo += instructions
        if self.closing and not self.state.unfinished:
            self.is_empty = True

    def _carry_out(self, place: int) -> None:
        instruction = self.todo.pop(place)
        member = instruction.attempt.member if isinstance(instruction, Send) else instruction.member
        processes = self.processes.get(member, [])
        latest = processes[-1] if processes else None
        if isinstance(instruction, Start):
            if member.phase is Phase.STARTING and member.life == instruction.life:
                self.processes.setdefault(member, []).append(_Process(instruction.life))
                self._tidy()
        elif isinstance(instruction, Ask) and latest is not None and not latest.is_dead:
            latest.asked.append(instruction.life)
        elif isinstance(instruction, Stop):
            for process in self.processes.get(member, []):
                self._end_process(member, process)
            self.processes.pop(member, None)
        elif isinstance(instruction, Send):
            self._send(instruction.attempt, latest)
        self._look()

    def _send(self, attempt: Attempt, process: _Process | None) -> None:
        request = attempt.request
        if not self.state.may_send(attempt, self.now):
            return
        self.runs[request] += 1
        most = 2 if self.setting.retries else 1
        self._expect(self.runs[request] <= most, "a request is run too often")
        if process is None or process.is_dead or not process.is_ready:
            self.messages.append(("lost", attempt.member, attempt))
            return
        process.runs.append(attempt)
        self._expect(len(process.runs) <= self.setting.max_outstanding, "a replica has too many requests")
        self.state.sent(attempt, None)  # type: ignore[arg-type]

    def _time(self) -> None:
        deadlines = (one.deadline for one in self.live)
        self.now = min(moment for moment in (*deadlines, self.due) if moment > self.now)

    def _keep_time(self) -> None:
        self._look()
        self._expect(self.due > self.now, "it looks again at once")

    def _shut(self) -> None:
        self.closing.append("shut")
        self.state.shut()
        self.state.abandon_queue(self.now)
        self._look()

    def _abandon(self) -> None:
        self.closing.append("abandon")
        self.state.abandon_all(self.now)
        self._look()

    def _end(self) -> None:
        self.closing.append("end")
        self.state.end_members()
        self._look()
        self.due = math.inf

    # what has to hold

    @staticmethod
    def _expect(holds: bool, text: str) -> None:
        if not holds:
            raise ModelFault(text)

    def fault(self) -> str | None:
        state = self.state
        waiting = [*state.queue, *state.again, *state.attempts]
        if Counter(map(id, waiting)) != Counter(map(id, self.live)):
            return "a request is lost, or in two places"
        for member in state.members.values():
            if len(member.outstanding) > self.setting.max_outstanding:
                return "a replica has too many requests"
            if member.phase is Phase.LEAVING and not member.outstanding:
                return "a replica leaves and has nothing to do"
            room = len(member.outstanding) < self.setting.max_outstanding
            if member.phase is Phase.UP and room and (state.queue or state.again):
                return "somebody waits although a replica has room"
        if (state.queue or state.again) and not self._may_serve():
            return "somebody waits although no replica will come"
        if self.setting.max_queued is not None and len(state.queue) > self.setting.max_queued:
            return "the queue is longer than it may be"
        is_still = not any(True for _ in self._progress())
        if self.live and is_still:
            return "somebody waits for ever"
        if is_still and "end" in self.closing and (state.members or self._all()):
            return "a replica is left behind"
        if is_still and self.closing and "end" not in self.closing:
            return "it is never known that nobody is left"
        return None

    def is_over(self) -> bool:
        return not self.live

    def key(self) -> Hashable:
        def name(request: Request) -> Hashable:
            if request not in self.live:
                return "over"
            left = None if request.deadline == math.inf else max(0.0, request.deadline - self.now)
            return self.live.index(request), request.call.priority, left, request in self.given_up, self.runs[request]

        def run(attempt: Attempt) -> Hashable:
            return (
                name(attempt.request),
                self.state.attempts.get(attempt.request) is attempt,
                age(attempt.life, attempt.member),
            )

        def age(life: int, member: Member) -> int:
            return member.life - life

        def about(member: Member) -> Hashable:
            processes = tuple(
                (age(one.life, member), one.is_ready, one.is_dead, one.is_silent,
                 frozenset(Counter(map(run, one.runs)).items()), tuple(age(life, member) for life in one.asked))
                for one in self.processes.get(member, [])
            )  # fmt: skip
            messages = Counter(
                (what, age(arg, member) if isinstance(arg, int) else run(arg))  # type: ignore[arg-type]
                for what, whose, arg in self.messages if whose is member
            )  # fmt: skip
            todo = Counter(
                (
                    type(one).__name__,
                    run(one.attempt) if isinstance(one, Send) else age(getattr(one, "life", 0), member),
                )
                for one in self.todo
                if (one.attempt.member if isinstance(one, Send) else one.member) is member
            )
            return (member, member.life) in self.asked, processes, frozenset(messages.items()), frozenset(todo.items())

        gone = [one for one in (*self.processes, *self._mentioned()) if one.number not in self.state.members]
        return (
            self.state.state(self.now, name, about),
            frozenset(Counter(map(about, dict.fromkeys(gone))).items()),
            frozenset((+self.left).items()),
            tuple(self.budget.values()),
            self.due - self.now,
            (tuple(self.closing), self.is_empty),
        )

    def _mentioned(self) -> list[Member]:
        in_todo = [one.attempt.member if isinstance(one, Send) else one.member for one in self.todo]
        return in_todo + [member for _, member, _ in self.messages if isinstance(member, Member)]
