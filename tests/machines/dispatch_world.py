"""A small world around the dispatcher's machine: callers, workers, timers, event loops, and whoever closes it.

It does what `dispatch`, `pooled`, `inline` and `turns` do with what the machine returns, each step by itself, so that
anything may come between two of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from dagexec.errors import ClosedError, DagexecError, OperatorError, QueueFullError, RunCancelledError, RunTimeoutError
from dagexec.executor.dispatch.keeping import BACK_SECONDS, KEPT_SECONDS
from dagexec.executor.dispatch.ledger import members_of
from dagexec.executor.dispatch.state import Cancelled, DispatchState
from dagexec.executor.requests import queue
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Batch, Group, Request
from dagexec.executor.runs.turns import Visits
from dagexec.options import CompileOptions
from dagexec.scheduler.exploration.state_search import ModelFault
from tests.machines.worlds import Event

Result = TypeVar("Result")


class Kind(NamedTuple):
    """What a request is like. Those of one kind are alike.

    Attributes:
        timeout: ticks until its caller gives it up; 0 for none.
        group: it may be joined with those of this group; "" for none.
        thread: it is of this thread, which may compute; 0 for one that workers compute.
        loop: the event loop that may run it; "" for none.
        pinned: a certain replica has to serve it, whichever.
        starts: it is of a thread that Ctrl-C cannot come to.
    """

    priority: int = 0
    timeout: int = 0
    rows: int = 1
    group: str = ""
    thread: int = 0
    loop: str = ""
    pinned: bool = False
    starts: bool = True

    def __str__(self) -> str:
        given = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return "(" + ", ".join(f"{name}={value}" for name, value in given.items()) + ")"


@dataclass(frozen=True)
class Setting:
    """How large a world is.

    Attributes:
        kinds: the requests that may come, in any order.
        added: replicas that may be made later.
        fails: runs may fail.
        cancels: callers may give up what they asked for, whenever they like.
        prepares: a run is prepared and begun in steps.
        closes: the executor may be closed or drained, in time or not.
        returns: threads that are known to call again at once.
    """

    replicas: int
    kinds: tuple[Kind, ...]
    options: CompileOptions = field(default_factory=CompileOptions)
    added: int = 0
    fails: bool = False
    cancels: bool = True
    prepares: bool = False
    closes: bool = False
    returns: tuple[int, ...] = ()

    def world(self) -> DispatchWorld:
        """At the beginning."""
        return DispatchWorld(self)


class _Run:
    """A run of the pool's, as far as anybody asks."""


class DispatchWorld:
    """What there is at one moment."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.has_turns = any(kind.loop for kind in setting.kinds)
        self.state = DispatchState("net", [self._replica(one) for one in range(setting.replicas)], setting.options)
        self.now: Any = Fraction(0) if any(kind.thread for kind in setting.kinds) else 0
        for thread in setting.returns:
            self.state.kept.leave(thread, self.state.idle[0], self.now, self.now)
            self.state.kept.came(thread, self.now)
        self.left = Counter(setting.kinds)
        self.groups = {kind.group: Group({}, {}) for kind in setting.kinds if kind.group}
        self.added = 0
        self.live: list[Request] = []  # in the order in which they came
        self.kinds: dict[Request, Kind] = {}
        self.given_up: set[Request] = set()
        self.handed: list[Request] = []  # inline runs that are over, whose replicas are to be handed on
        self.starts = False  # somebody is about to ask who need not wait any more
        self.gives_up_turns = False
        self.visits = Visits()
        self.calls: list[str] = []  # of loops that will come by
        self.here: dict[str, str] = {}  # what the loops do that are here
        self.timers: set[Any] = set()
        self.watch: Any = None  # when the kept replicas are looked at
        self.closing: list[str] = []  # what was done to close it
        self.is_empty = False

    def _replica(self, number: int) -> Any:
        shortest = 0.0 if self.has_turns else math.inf
        binding = SimpleNamespace(signature=(), is_shared=False, seconds_at_best=0.0, shortest=shortest)
        return SimpleNamespace(number=number, io_binding=binding, is_preparing=False)

    # what may happen

    def events(self) -> Iterator[Event]:
        yield from self._progress()
        busy = {self.kinds[one].thread for one in self.live}
        for kind, count in self.left.items():
            if count and not (kind.thread and kind.thread in busy):
                yield from (("arrive", kind, one) for one in range(len(self.state.replicas) if kind.pinned else 1))
        for place, request in enumerate(self.live):
            if request not in self.given_up and not (request.caller and request.replica):
                if self.setting.cancels:
                    yield "cancel", place
                if self.now >= request.deadline:
                    yield "timeout", place
        if self.added < self.setting.added and not self.closing:
            yield ("add",)
        if self.setting.closes and not self.closing:
            yield ("shut",)
        if self.closing and not self.is_empty and "abandon" not in self.closing:
            yield ("abandon",)
        if {"wait", "abandon"} <= {*self.closing} and not self.is_empty and "stop" not in self.closing:
            yield ("stop",)
        if any(math.inf > request.deadline > self.now for request in self.live):
            yield ("time",)
        if self._may_come_back():
            yield ("pause",)

    def _progress(self) -> Iterator[Event]:
        """What happens by itself if one only waits."""
        for place, served in enumerate(self.state.running.values()):
            yield from ((what, place) for what in self._next_of(served))
        if self.starts:
            yield ("start",)
        if self.gives_up_turns:
            yield ("give up turns",)
        for loop in sorted({*self.calls} - {*self.here}):
            yield "come", loop
            yield "come late", loop
        for loop, does in self.here.items():
            yield from ((what, loop) for what in (("run one", "leave") if does == "runs" else ("look",)))
        yield from (("ring", due - self.now) for due in sorted(self.timers) if due <= self.now)
        if self.watch is not None and self.watch <= self.now:
            yield ("take back",)
        if any(due > self.now for due in (*self.timers, self.watch or 0)):
            yield ("time",)
        if self.closing and "wait" not in self.closing:
            yield ("wait",)

    def _next_of(self, served: Request) -> Iterator[str]:
        if served in self.handed:
            yield "hand on"
        elif served.caller:
            yield "return"
            if self.setting.fails:
                yield "raise"
        elif served.run is None:
            assert served.replica is not None
            if not served.replica.is_preparing and not isinstance(served, Batch):
                yield "prepare"
            yield "begin"
        else:
            yield "end"
            if served.cancelled:
                yield "stopped"
            if self.setting.fails:
                yield "fail"
            if isinstance(served, Batch) and any(not member.taken for member in served.requests):
                yield "take"

    def _may_come_back(self) -> bool:
        left = (self.state.kept._left(thread) for thread in self.state.kept._habits)
        return any(self.now - one <= BACK_SECONDS for one in left)

    # what does

    def do(self, event: Event) -> None:
        what, *rest = event
        act = getattr(self, "_" + str(what).replace(" ", "_"))
        if what in ("prepare", "begin", "end", "stopped", "fail", "take", "return", "raise", "hand on"):
            act(list(self.state.running.values())[rest[0]])  # type: ignore[call-overload]
        elif what in ("cancel", "timeout"):
            act(self.live[rest[0]])  # type: ignore[call-overload]
        elif what == "ring":
            act(self.now + rest[0])
        else:
            act(*rest)

    def _arrive(self, kind: Kind, number: int) -> None:
        self.left[kind] -= 1
        state, pinned = self.state, self.state.replicas[number] if kind.pinned else None
        request = Request({}, call=Call(timeout=kind.timeout or None, priority=kind.priority), pinned=pinned)
        request.created, request.rows = self.now, kind.rows
        request.group, request.loop = self.groups.get(kind.group), kind.loop or None  # type: ignore[assignment]
        request.time_out(self.now)
        self.kinds[request] = kind
        self.live.append(request)
        if kind.thread and not (state.joins and state.expects_company):
            replica = state.idle[0] if state.idle else state.kept.by_thread.get(kind.thread)
            if replica is not None and replica.io_binding is not None:
                binding = replica.io_binding
                if self._in_order(lambda: state.arrive_inline(request, binding, kind.thread, self.now)):
                    return
        if kind.thread and not state.joins:
            request.caller = kind.thread
        try:
            served = self._in_order(lambda: state.arrive(request, self.now, starts=kind.starts))
        except (QueueFullError, RunTimeoutError, ClosedError) as error:
            right = {QueueFullError: self._is_full(), ClosedError: state.shut, RunTimeoutError: False}
            self._expect(right[type(error)], f"{kind} was refused: {error}")
            self.live.remove(request)
            return
        if served is not None:
            self._serve(served)
        if request.queue is not None:
            self.starts = self.starts or state.joins
            self.gives_up_turns = self.gives_up_turns or not self._have_turns()

    def _is_full(self) -> bool:
        limit = self.setting.options.max_queued
        return limit is not None and len(self.state.queue) >= limit

    def _have_turns(self) -> bool:
        if not (self.has_turns and self.state.idle and self.state.queue.waiting):
            return True
        loop = self.state.queue.only_loop()
        if loop is not None:
            self._call(loop)  # type: ignore[arg-type]
        return loop is not None

    def _call(self, loop: str) -> None:
        if self.visits.wanted(loop):  # type: ignore[arg-type]
            self.calls.append(loop)

    def _serve(self, request: Request) -> None:
        """It was given a replica, and is served by workers or by the thread that waits for that."""
        if not request.caller and not self.setting.prepares:
            request.run = _Run()  # type: ignore[assignment]

    def _prepare(self, served: Request) -> None:
        served.replica.is_preparing = True  # type: ignore[union-attr]

    def _begin(self, served: Request) -> None:
        served.replica.is_preparing = False  # type: ignore[union-attr]
        if served.cancelled is not None:
            self._ended(served, served.cancelled)
        else:
            served.run = _Run()  # type: ignore[assignment]

    def _take(self, served: Request) -> None:
        self.state.take(served)

    def _end(self, served: Request) -> None:
        self.state.take(served)
        for member in members_of(served):
            member.result = {}
        self._ended(served, None)

    def _stopped(self, served: Request) -> None:
        self._ended(served, served.cancelled)

    def _fail(self, served: Request) -> None:
        self._ended(served, OperatorError("it failed"))

    def _ended(self, served: Request, error: DagexecError | None) -> None:
        for one in self._in_order(lambda: self.state.end(served, {}, error, self.now)):
            self._tell(one)
        self._announce()
        self._have_turns()
        self._follow(served)

    def _follow(self, served: Request) -> None:
        self.starts = self.starts or self.state.joins
        if served.following is not None:
            self._serve(served.following)

    def _return(self, request: Request, outcome: str = "completed") -> None:
        state = self.state
        keeps = bool(state.queue.waiting) and self.kinds[request].starts
        is_free = state.leave_inline(request, outcome, self.now, "wait" in self.closing, keeps)
        if not is_free:
            self.handed.append(request)
        elif state.kept.by_thread and self.watch is None:
            self.watch = self.now + Fraction(KEPT_SECONDS)
        self._tell(request)

    def _raise(self, request: Request) -> None:
        self._return(request, "failed")

    def _hand_on(self, request: Request) -> None:
        self.handed.remove(request)
        request.following = self._in_order(lambda: self.state.release(request, self.now))
        self._announce()
        self._have_turns()
        self._follow(request)

    def _cancel(self, request: Request) -> None:
        self._give_up(request, RunCancelledError("given up"))

    def _timeout(self, request: Request) -> None:
        self._give_up(request, RunTimeoutError("late"))

    def _give_up(self, request: Request, error: DagexecError) -> None:
        self.given_up.add(request)
        served = request.batch or request
        runs = served.run if not request.taken else None
        cancelled = self.state.cancel(request, error, self.now)
        self._expect(cancelled is not None, "a request that is not over has no end to wait for")
        assert cancelled is not None
        alone = not isinstance(served, Batch) or not served.left
        self._expect(not (runs and alone) or len(cancelled.stop) == 1, "a run that nobody waits for is not stopped")
        self._see_to(cancelled)
        self.starts = self.starts or self.state.joins

    def _see_to(self, cancelled: Cancelled) -> None:
        for request in cancelled.over:
            self._tell(request)
        self._announce()

    def _start(self) -> None:
        self.starts = False
        while (request := self._in_order(lambda: self.state.start(self.now))) is not None:
            self._serve(request)
        if self.state.timer_due is None and self.state.idle and self.state.queue.waiting:
            due = self.state.new_due()
            self.timers |= set() if due is None else {due}

    def _ring(self, due: Any) -> None:
        self.timers.remove(due)
        if self.state.rings(due):
            self.starts = True

    def _time(self) -> None:
        deadlines = (request.deadline for request in self.live if request.deadline < math.inf)
        self.now = min(one for one in (*deadlines, *self.timers, self.watch or 0) if one > self.now)

    def _pause(self) -> None:
        self.now += 2 * Fraction(BACK_SECONDS)

    def _take_back(self) -> None:
        self.watch = None
        for request in self._in_order(lambda: self.state.take_back(self.now)):
            self._serve(request)
        if self.state.kept.by_thread:
            self.watch = self.now + Fraction(KEPT_SECONDS)

    def _come(self, loop: str, later: float = 0) -> None:
        self.calls.remove(loop)
        self.here[loop] = "runs"
        if not self.visits.begins(self.now + later):
            self._give_up_turns()
            self._leave(loop)

    def _come_late(self, loop: str) -> None:
        self._come(loop, 1)

    def _run_one(self, loop: str) -> None:
        request = self._in_order(lambda: self.state.take_turn(self.now))
        if request is None:
            self._leave(loop)
        else:
            self._serve(request)

    def _leave(self, loop: str) -> None:
        self.here[loop] = "leaves"
        self.visits.is_over()

    def _look(self, loop: str) -> None:
        del self.here[loop]
        if self.state.idle and self.state.queue.waiting:
            self.visits.comes_again(self.now)
            self._call(loop)

    def _give_up_turns(self) -> None:
        self.gives_up_turns = False
        self.state.queue.forget_loops()
        self._start()

    def _add(self) -> None:
        self.added += 1
        replica = self._replica(len(self.state.replicas))
        following = self._in_order(lambda: self.state.add(replica, self.now))
        if following is not None:
            self._serve(following)

    def _shut(self) -> None:
        self.closing.append("shut")
        self._see_to(Cancelled(self.state.shut_down(self.now), ()))

    def _wait(self) -> None:
        self.closing.append("wait")
        self._announce()
        self.starts, self.gives_up_turns = self.state.joins, self.has_turns

    def _abandon(self) -> None:
        self.closing.append("abandon")
        self._see_to(Cancelled(self.state.abandon_queue(self.now), ()))

    def _stop(self) -> None:
        self.closing.append("stop")
        self._see_to(self.state.stop_running(self.now))

    def _announce(self) -> None:
        if "wait" in self.closing and self.state.is_empty:
            self._expect(not (self.live or self.state.running), "the end is announced while somebody waits")
            self.is_empty = True

    def _tell(self, request: Request) -> None:
        self._expect(request in self.live, "a request ends twice")
        self._expect(request.over, "a request is told that is not over")
        self.live.remove(request)

    # what has to hold

    @staticmethod
    def _expect(holds: bool, text: str) -> None:
        if not holds:
            raise ModelFault(text)

    def _in_order(self, call: Callable[[], Result]) -> Result:
        """What `call` returns. Raises ModelFault where it gives a replica to somebody before who should have had it."""
        state = self.state
        before = {request: request.queue for request in self.live}
        was_served = {request for request in self.live if (request.batch or request).replica is not None}
        full = self.setting.options.max_queued is not None and len(state.queue) >= self.setting.options.max_queued
        overtaken = next(iter(state.queue), None) if state.queue.overtaken >= queue.MAX_OVERTAKEN else None
        keepers = set(state.kept.by_thread)
        result = call()
        hurried = full or state._hurried()
        for place, request in enumerate(self.live):
            served = request.batch or request
            is_first = request in was_served or served.replica is None or members_of(served)[0] is not request
            if is_first or request.pinned or before[request] is state.again or request is overtaken:
                continue
            if request.caller in keepers:
                continue
            self._expect(not state.again, "somebody is served before those that run again")
            for other, waits in enumerate(self.live):
                if waits.queue is None or waits.queue is state.pinned or waits in was_served:
                    continue
                urgent = waits.call.priority - request.call.priority or place - other
                aside = before[waits] is state.awaiting_admission and before[request] is state.queue
                if urgent > 0 and not aside and (hurried or not self._waits_for_company(waits)):
                    raise ModelFault(f"{self.kinds[request]} is served before {self.kinds[waits]}")
        return result

    def _waits_for_company(self, request: Request) -> bool:
        """It may wait although a replica is idle."""
        if not self.state.joins or request.group is None or request.queue is not self.state.queue:
            return False
        group = [one for one in self.state.queue if one.group is request.group]
        options = self.setting.options
        is_due = self.now >= min(one.created for one in group) + options.max_wait
        return not is_due and sum(one.rows for one in group) < options.max_batch

    def fault(self) -> str | None:
        state, options = self.state, self.setting.options
        running = list(state.running.values())
        waiting = [one for queue in (state.queue, state.awaiting_admission, state.pinned, state.again) for one in queue]
        served = [one for each in running for one in members_of(each) if not one.over]
        if Counter(map(id, (*waiting, *served))) != Counter(map(id, self.live)):
            return "a request is lost, or in two places"
        held = [one.replica for one in running] + [*state.idle, *state.kept.by_thread.values()]
        if Counter(map(id, held)) != Counter(map(id, state.replicas)):
            return "a replica is lost, or in two places"
        if options.max_queued is not None and len(state.queue) > options.max_queued:
            return "the queue is longer than it may be"
        if self.closing and state.awaiting_admission:
            return "somebody awaits admission although nobody comes in any more"
        if state.awaiting_admission and len(state.queue) < (options.max_queued or 0):
            return "somebody awaits admission although there is room"
        for batch in (one for one in running if isinstance(one, Batch)):
            if batch.rows > options.max_batch or len({one.group for one in batch.members}) > 1:
                return "requests are joined that may not be"
        if state.kept.by_thread and self.watch is None:
            return "nobody takes back what a thread keeps"
        if self.live and not any(True for _ in self._progress()):
            return "somebody waits for ever"
        if self.closing and not (self.live or running or self.is_empty or any(True for _ in self._progress())):
            return "it is never known that nobody is left"
        return self._idle_fault()

    def _idle_fault(self) -> str | None:
        """What is wrong if a replica is idle, and nobody is about to look who may have it."""
        state = self.state
        is_closing = bool(self.closing) and "wait" not in self.closing
        if not state.idle or self.starts or self.gives_up_turns or self.calls or self.here or is_closing:
            return None
        if state.again or state.awaiting_admission or any(one.pinned in state.idle for one in state.pinned):
            return "somebody waits for a replica although one is idle"
        if not state.queue.waiting:
            return None
        rings = state.timer_due in self.timers and state.timer_due <= min(
            one.created + self.setting.options.max_wait for one in state.queue
        )
        if not state.joins or not rings or (self.now < min(self.timers) and state.may_start(self.now)):
            return "somebody waits in the queue although a replica is idle"
        return None

    def is_over(self) -> bool:
        return not (self.live or self.state.running)

    def key(self) -> Hashable:
        def name(request: Request) -> Hashable:
            left = None if request.deadline == math.inf else max(0, request.deadline - self.now)
            preparing = request.replica is not None and request.replica.is_preparing
            return self.kinds.get(request), left, request in self.given_up, preparing

        return (
            self.state.state(self.now, name),
            frozenset((+self.left).items()),
            self.added,
            (self.starts, self.gives_up_turns),
            (self.visits.state(self.now), tuple(sorted(self.calls)), frozenset(self.here.items())),
            frozenset(due - self.now for due in self.timers),
            None if self.watch is None else self.watch - self.now,
            (frozenset(self.closing), self.is_empty),
            frozenset(Counter(map(name, self.handed)).items()),
        )
