"""ControlledThreads: locks, threads and time under which a strategy decides who continues, and can decide so again.

The threads are real, but one baton passes between them and only its holder runs. Where a thread takes or releases a
lock, starts, joins or ends, it reaches a *decision point*: the strategy chooses among all threads that can go on, and
the choice is noted. What happens between two decision points is one step of the schedule.

Time is virtual. Each thread has its own clock (that of `dagexec.devices.sim.clock`), a lock hands the time of the
thread that releases it to the next that takes it, and a deadline passes when the strategy says so.
"""

from __future__ import annotations

import sys
import threading
from _thread import allocate_lock
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import PurePath
from types import FrameType, TracebackType

from dagexec.devices.sim.clock import host_time, host_waited_until, set_host_time
from dagexec.errors import DagexecError, DeadlockError
from dagexec.platform.locks import Lock, Mutex
from dagexec.platform.threads import Threads, ThreadsEndedError, Timer
from dagexec.scheduler.exploration.events import Event, Kind
from dagexec.scheduler.exploration.notes import Notes, Waiting
from dagexec.scheduler.exploration.strategies import Candidate, Strategy

Ready = Callable[[], bool]

MAX_STEPS = 1_000_000
MACHINERY = {__file__, threading.__file__, sys.modules[Threads.__module__].__file__}
"""Files whose frames are not part of the scenario's code."""

_here = threading.local()


def current_world() -> ControlledThreads | None:
    """The schedule whose thread is calling, even when it has ended; None in any other thread."""
    return getattr(_here, "world", None)


class ControlledThread(threading.Thread):
    """A thread that runs only while it holds the baton.

    Attributes:
        number: in the order of starts.
        event: what it is about to do.
        ready: whether it can go on; None when it can at once.
        deadline: the virtual time at which it gives up waiting; None for never.
        timed_out: it has given up.
        time: its virtual time at its last decision point.
        ended: it has nothing left to do.
        place: the code of its last decision point, if notes are taken; empty before the first.
        start_of_next: for a thread that does a stream's work, when the next command can start.
    """

    def __init__(self, world: ControlledThreads, target: Callable[[], object], name: str, number: int) -> None:
        super().__init__(name=name, daemon=True)
        self.number = number
        self.event = Event(name, "begin")
        self.ready: Ready | None = None
        self.waits_for: object = None
        self.deadline: float | None = None
        self.timed_out = False
        self.time = host_time()
        self.ended = False
        self.place = ""
        self.baton = allocate_lock()
        self.baton.acquire()
        self._world = world
        self._aim = target
        self.start_of_next: Callable[[], float] | None = None

    def when(self) -> float:
        """Its virtual time, or `start_of_next`."""
        return self.time if self.start_of_next is None else self.start_of_next()

    def run(self) -> None:
        """Execute the target, once the thread is first chosen."""
        world = _here.world = self._world
        self.baton.acquire()
        self.ready = None
        set_host_time(self.time)
        if world.watch is not None:
            world.watch.has_identities((self.ident, self.native_id), self.name)
            sys.setprofile(world.watch.profile)
            world.watch.touches(f"thread {self.name}", lambda: self.ended)
            world.watch.going_on = not world.ended
        error: BaseException | None = None
        try:
            if not world.ended:
                self._aim()
        except ThreadsEndedError:
            pass
        except BaseException as caught:
            error = caught
        finally:
            if world.watch is not None:
                sys.setprofile(None)
            world.touches(f"thread {self.name}", lambda: self.ended)
            self.ended = True
            world.leave(self, error)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it ends, in virtual time."""
        self._world.wait(lambda: self.ended, timeout, self, "join", self.name)
        self._world.touches(f"thread {self.name}", lambda: self.ended)

    def is_alive(self) -> bool:
        self._world.touches(f"thread {self.name}", lambda: self.ended)
        return not self.ended

    def join_really(self, timeout: float) -> None:
        """Wait for the system's thread, from outside the schedule."""
        super().join(timeout)


class _Timer:
    """A call that a thread of its own will make at `deadline`."""

    def __init__(self, world: ControlledThreads, deadline: float, function: Callable[[], object], number: int) -> None:
        self.name = f"timer {number}"
        self.event = Event(self.name, "timeout")
        self.deadline = deadline
        self.function = function
        self._world = world

    def when(self) -> float:
        """When it is due."""
        return self.deadline

    def cancel(self) -> None:
        """Do not make the call."""
        self._world.forget(self)


class _Timeout:
    """A waiting thread as a candidate that gives up waiting."""

    def __init__(self, thread: ControlledThread, deadline: float) -> None:
        self.name = f"{thread.name} (timeout)"
        self.event = Event(thread.name, "timeout", thread.event.resource)
        self.thread = thread
        self.deadline = deadline

    def when(self) -> float:
        """When it gives up."""
        return self.deadline


class ControlledLock:
    """A lock or gate whose holder the schedule knows."""

    __slots__ = ("_owned", "_world", "holder", "name", "time")
    is_controlled = True

    def __init__(self, world: ControlledThreads, name: str, owned: bool) -> None:
        self.name = name
        self.holder: ControlledThread | None = None
        self.time = 0.0
        self._world = world
        self._owned = owned

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take it when the strategy says so."""
        world = self._world
        me = world.calling_thread()
        if me is None:  # the schedule has ended
            if self.holder is not None:
                raise ThreadsEndedError(f"{self.name}: the schedule has ended")
            return True
        if not blocking or timeout == 0:
            world.come_to("try", self.name)
            world.touches_lock(self)
            if self.holder is not None:
                return False
        elif not world.wait(self._is_free, None if timeout < 0 else timeout, self, "acquire", self.name):
            return False
        world.touches_lock(self)
        self.holder = me
        host_waited_until(self.time)
        return True

    def release(self) -> None:
        """Let it go. Raises RuntimeError when nobody holds it, or it is an owned lock that another thread holds."""
        world = self._world
        me = world.calling_thread()
        if me is None:
            self.holder = None
            return
        if self.holder is None:
            raise RuntimeError("release unlocked lock")
        if self._owned and self.holder is not me:
            raise RuntimeError("cannot release un-acquired lock")
        world.touches_lock(self)
        self.holder = None
        self.time = host_time()
        world.come_to("release", self.name)

    def locked(self) -> bool:
        """True while it is held."""
        self._world.touches_lock(self)
        return self.holder is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        self.release()

    def _is_free(self) -> bool:
        return self.holder is None

    def _is_owned(self) -> bool:
        """Asked by `threading.Condition`, which would otherwise try to acquire the lock, a decision point."""
        me = self._world.calling_thread()
        return me is None or self.holder is me


class ControlledThreads(Threads):
    """One schedule: its threads and the decisions that were made. It is used once.

    Attributes:
        decisions: the candidate chosen wherever there were several.
        choices: how many candidates there were.
        trace: the steps that were made.
        failure: what ended the schedule early: an exception that a thread did not catch, or a DeadlockError.
        ended: no thread continues any more; those that still wait are unwound.
        cleanup: closed when all threads are unwound.
        watch: notes what steps read and write; None without one.
    """

    concurrent = False

    def __init__(self, strategy: Strategy, notes: Notes | None = None) -> None:
        """With `notes`, what happens is written down there."""
        self.watch = strategy.watch
        self.decisions: list[int] = []
        self.choices: list[int] = []
        self.trace: list[Event] = []
        self.failure: BaseException | None = None
        self.ended = False
        self.left: tuple[str, ...] = ()
        self.cleanup = ExitStack()
        self.over = allocate_lock()
        self.over.acquire()
        self._notes = notes
        self._strategy = strategy
        strategy.begin(self.trace)
        self._named: Counter[str] = Counter()
        self._threads: list[ControlledThread] = []
        self._timers: list[_Timer] = []
        self._running: ControlledThread | None = None
        self._locks = 0
        self._made = 0
        self._main: ControlledThread | None = None

    # What `Threads` asks for

    def lock(self) -> Lock:
        """A lock named by its number and the place that made it."""
        return self._new_lock(owned=False)

    def owned_lock(self) -> Mutex:
        """A lock that only its holder can release."""
        return self._new_lock(owned=True)

    def holds(self, lock: Mutex) -> bool:
        """True also after the end of the schedule, when nobody asks for locks any more."""
        assert isinstance(lock, ControlledLock)
        me = self.calling_thread()
        return me is None or lock.holder is me

    def start(self, target: Callable[[], object], name: str) -> ControlledThread:
        """A thread that begins when the strategy chooses it. RuntimeError once the schedule has ended."""
        if self.ended:
            raise RuntimeError("can't start new thread: the schedule has ended")
        thread = self._new_thread(target, name)
        self.come_to("start", thread.name)
        return thread

    def monotonic(self) -> float:
        """The calling thread's virtual time."""
        return host_time()

    def call_later(self, seconds: float, function: Callable[[], object]) -> Timer:
        """A call that is made when its time comes, by the strategy's choice."""
        self._made += 1
        self.writes("timers")
        timer = _Timer(self, host_time() + seconds, function, self._made)
        self._timers.append(timer)
        return timer

    # What belongs to exploration

    def touches(self, field: str, look: Callable[[], object]) -> None:
        """The step reads `field`, and may change what `look` returns."""
        if self.watch is not None:
            self.watch.touches(field, look)

    def touches_lock(self, lock: ControlledLock) -> None:
        """The step looks at a lock, takes it or lets it go."""
        if self.watch is not None:
            self.watch.touches_lock(lock)

    def writes(self, field: str) -> None:
        """The step changes `field`."""
        if self.watch is not None:
            self.watch.writes(field)

    def begin(self, scenario: Callable[[], object]) -> None:
        """Start the first thread; the schedule ends with it. `over` is released then."""
        self._main = self._running = self._new_thread(scenario, "main")
        self._main.time = 0.0
        self._main.baton.release()

    def add_actor(self, body: Callable[[], object], name: str, ready: Ready, when: Callable[[], float]) -> None:
        """A thread that waits for `ready` before it begins, in place of a stream. This is no decision point."""
        if not self.ended:
            actor = self._new_thread(body, name)
            actor.ready = ready
            actor.event = Event(actor.name, "advance", name)
            actor.start_of_next = when

    def finish(self, patience: float) -> None:
        """Unwind the remaining threads, one after another. Called from outside, when the schedule has ended."""
        self.ended = True
        last = self._running
        if last is not None:
            last.join_really(patience)
        for thread in tuple(self._threads):
            if thread is not last:
                thread.baton.release()
                thread.join_really(patience)
        self.cleanup.close()

    def let_go(self) -> None:
        """Drop all references; pools and locks that outlive the schedule still refer to it."""
        self._threads.clear()
        self._timers.clear()
        self._main = self._running = self.failure = None

    def stuck(self) -> str:
        """Which thread holds the baton without reaching a decision point, and where it is."""
        thread = self._running
        return "no thread" if thread is None else f"{thread.name}, at {_place_of(thread)}"

    def calling_thread(self) -> ControlledThread | None:
        """The calling thread; None when the schedule has ended. DagexecError for a thread from outside the schedule."""
        if self.ended:
            return None
        running = self._running
        if running is None or running.ident != threading.get_ident():
            raise DagexecError(
                f"thread {threading.current_thread().name} uses a lock or thread of a controlled schedule and is not "
                "one of its threads: start threads with dagexec.platform.threads.threads().start"
            )
        return running

    def point(self, doing: str) -> None:
        """A decision point that belongs to no lock or thread."""
        self.come_to("point", doing)

    def note(self, what: object) -> None:
        """Write it down, if notes are taken."""
        if self._notes is not None and not self.ended:
            self._notes.acts.append((len(self.trace) - 1, threading.current_thread().name, what))

    def come_to(self, kind: Kind, resource: str) -> None:
        """A decision point at which the calling thread could go on."""
        me = self.calling_thread()
        if me is not None:
            self._end_step()
            me.event = Event(me.name, kind, resource)
            me.time = host_time()
            self._pass_on(me)

    def wait(self, ready: Ready, timeout: float | None, what: object, kind: Kind, resource: str) -> bool:
        """A decision point at which the calling thread can go on when `ready()`; False if the deadline passed first."""
        me = self.calling_thread()
        if me is None:
            if not ready():
                raise ThreadsEndedError("the schedule has ended") from self.failure
            return True
        self._end_step()
        me.event = Event(me.name, kind, resource)
        me.time = host_time()
        me.ready = ready
        me.waits_for = what
        me.deadline = None if timeout is None else me.time + timeout
        me.timed_out = False
        self._pass_on(me)
        me.ready = me.deadline = me.waits_for = None
        return not me.timed_out

    def forget(self, timer: _Timer) -> None:
        """A timer was cancelled."""
        self.writes("timers")
        if timer in self._timers:
            self._timers.remove(timer)

    def leave(self, me: ControlledThread, error: BaseException | None) -> None:
        """The thread that calls has come to its end."""
        if self.ended:
            return
        self._threads.remove(me)
        if error is not None:
            self._end(error)
        elif me is self._main:
            self._end(None)
        else:
            me.time = host_time()
            try:
                chosen = self._choose(me, gone=True)
            except ThreadsEndedError:
                return
            self._running = chosen
            chosen.baton.release()

    def _end(self, failure: BaseException | None) -> None:
        self._end_step()
        self.failure = failure
        self.left = tuple(thread.name for thread in self._threads if thread.start_of_next is None and not thread.ended)
        self._strategy.end([thread.event for thread in self._threads if not thread.ended], failure)
        self.ended = True
        self.over.release()

    def _new_lock(self, owned: bool) -> ControlledLock:
        self._locks += 1
        return ControlledLock(self, f"lock {self._locks} ({_caller()})", owned)

    def _new_thread(self, target: Callable[[], object], name: str) -> ControlledThread:
        self._made += 1
        self.writes(f"threads named {name}")
        self._named[name] += 1
        if self._named[name] > 1:  # a trace and a saved schedule know threads by their names
            name = f"{name} ({self._named[name]})"
        self.writes(f"thread {name}")
        inside, _here.world = current_world(), None  # the system's thread has locks of the system
        watched = self.watch is not None and self.watch.going_on
        self._watch_on(False)
        try:
            thread = ControlledThread(self, target, name, self._made)
            self._threads.append(thread)
            threading.Thread.start(thread)
        finally:
            _here.world = inside
            self._watch_on(watched)
        return thread

    def _pass_on(self, me: ControlledThread) -> None:
        if self._notes is not None:
            me.place = _caller()
        chosen = self._choose(me)
        if chosen is not me:
            self._running = chosen
            chosen.baton.release()
            me.baton.acquire()
            if self.ended:
                raise ThreadsEndedError("the schedule has ended") from self.failure
        if me.timed_out and me.deadline is not None:
            host_waited_until(me.deadline)

    def _choose(self, me: ControlledThread, gone: bool = False) -> ControlledThread:
        """The thread that continues. Raises ThreadsEndedError when none can, which ends the schedule."""
        self._end_step()
        current = not gone and (me.ready is None or me.ready())
        candidates: list[Candidate] = [me] if current else []
        candidates += self._others(me)
        if self._strategy.timeouts or not candidates:
            candidates += self._due(candidates)
        if not candidates:
            if self._notes is not None:
                self._notes.waiting = self._waiting()
            self._end(DeadlockError(self._who_waits()))
            raise ThreadsEndedError("deadlock") from self.failure
        if len(self.trace) >= MAX_STEPS:
            self._end(DeadlockError(f"no end after {MAX_STEPS} steps; going on: {_names(candidates)}"))
            raise ThreadsEndedError("no end") from self.failure
        number = 0
        if len(candidates) > 1 or self._strategy.searches:
            try:
                number = self._strategy.choose(candidates, current)
            except DagexecError as error:
                self._end(error)
                raise ThreadsEndedError("no decision") from None
        if len(candidates) > 1:
            self.decisions.append(number)
            self.choices.append(len(candidates))
        chosen = candidates[number]
        if self._notes is not None:
            waiting = chosen.thread if isinstance(chosen, _Timeout) else chosen
            self._notes.places.append(waiting.place if isinstance(waiting, ControlledThread) else "")
        self._strategy.took(chosen.event)
        self.trace.append(chosen.event)
        thread = self._thread_of(chosen)
        self._watch_on(True)
        return thread

    def _thread_of(self, chosen: Candidate) -> ControlledThread:
        """The thread that makes the chosen step."""
        if isinstance(chosen, _Timeout):
            chosen.thread.timed_out = True
            return chosen.thread
        if isinstance(chosen, _Timer):
            self._timers.remove(chosen)
            thread = self._new_thread(chosen.function, chosen.name)
            thread.time = max(thread.time, chosen.deadline)
            return thread
        assert isinstance(chosen, ControlledThread)
        return chosen

    def _watch_on(self, going_on: bool) -> None:
        if self.watch is not None:
            self.watch.going_on = going_on

    def _end_step(self) -> None:
        """Note what the step read and wrote."""
        if self.watch is not None and self.watch.going_on:
            done = self.watch.end_step(self.trace[-1] if self.trace else Event("main", "begin"), self._running)
            self.trace[-1:] = [done] if self.trace else []

    def _others(self, me: ControlledThread) -> list[ControlledThread]:
        """Threads other than `me` that can go on, in turn after it."""
        after: list[ControlledThread] = []
        before: list[ControlledThread] = []
        for thread in self._threads:
            if thread is not me and (thread.ready is None or thread.ready()):
                (after if thread.number > me.number else before).append(thread)
        return after + before

    def _due(self, ready: Sequence[Candidate]) -> list[Candidate]:
        """The earliest deadline of a waiting thread or timer, if there is one."""
        deadlines: list[Candidate] = [
            _Timeout(thread, thread.deadline)
            for thread in self._threads
            if thread.deadline is not None and not thread.ended and thread not in ready
        ]
        deadlines += self._timers
        return [min(deadlines, key=lambda candidate: candidate.when())] if deadlines else []

    def _waiting(self) -> tuple[Waiting, ...]:
        waiting = []
        for thread in self._threads:
            lock = thread.waits_for if isinstance(thread.waits_for, ControlledLock) else None
            holder = "" if lock is None or lock.holder is None else lock.holder.name
            waiting.append(Waiting(thread.name, thread.event, holder, _place_of(thread)))
        return tuple(waiting)

    def _who_waits(self) -> str:
        return "deadlock: " + ("; ".join(map(str, self._waiting())) or "no thread is left")


def _names(candidates: Sequence[Candidate]) -> str:
    return ", ".join(candidate.name for candidate in candidates)


def _caller() -> str:
    frame: FrameType | None = sys._getframe(1)
    return _outside(frame)


def _place_of(thread: ControlledThread) -> str:
    return _outside(sys._current_frames().get(thread.ident or -1))


def _outside(frame: FrameType | None) -> str:
    """File and line of the innermost frame that is not of this machinery."""
    while frame is not None:
        if frame.f_code.co_filename not in MACHINERY:
            return f"{PurePath(frame.f_code.co_filename).name}:{frame.f_lineno}"
        frame = frame.f_back
    return "its start"
