"""Recording: pools record what their threads do, each action in the critical section in which it happens.

A `RecordedRoster` replaces a pool's roster. It sees whom the pool admits and wakes, and gives every new run a machine
that records questions and answers; a run in machine code keeps a log. The pool's own code and locks stay the same.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import cast

from dagexec.core.operator import Step
from dagexec.errors import ConformanceError
from dagexec.platform.addresses import address_of
from dagexec.platform.locks import Mutex
from dagexec.platform.threads import ThreadsEndedError, threads
from dagexec.scheduler.conformance.checking import Piece, check
from dagexec.scheduler.conformance.pools import PoolStory
from dagexec.scheduler.conformance.story import NOTHING, REFUSED, Deviation, Event, Kind, RunStory
from dagexec.scheduler.plan.culprit import Failed
from dagexec.scheduler.run import pool
from dagexec.scheduler.run.engine import NativeRun
from dagexec.scheduler.run.engine_layout import Logged
from dagexec.scheduler.run.engine_log import LoggedRun
from dagexec.scheduler.run.machine import Machine
from dagexec.scheduler.run.roster import Roster
from dagexec.scheduler.run.run import Run
from dagexec.scheduler.run.worker import WakeUp, Worker

_KEPT = 64
"""Runs that are over and not checked yet."""


class Conformance:
    """What was recorded, and the deviations in it.

    Attributes:
        runs: how many were checked.
        events: in these runs.
        native: how many of the runs were in machine code.
        cut: runs whose log was too short; what it holds was checked.
        deviations: from what the machine allows.
    """

    def __init__(self) -> None:
        self.runs = self.events = self.native = self.cut = 0
        self.deviations: list[Deviation] = []
        self._recordings: list[_Recording] = []
        self._pools: list[PoolStory] = []

    def raise_found(self, *, at_rest: bool = False) -> None:
        """Check everything recorded so far; `at_rest` says that no thread can go on.

        Raises ConformanceError with all deviations, if there are any.
        """
        self._check(self._recordings, at_rest)
        for story in self._pools:
            if at_rest:
                story.rests()
            self.deviations += story.deviations
        self._recordings, self._pools = [], []
        if self.deviations:
            more = f"\n(and {len(self.deviations) - 1} more)" if len(self.deviations) > 1 else ""
            raise ConformanceError(f"{self.deviations[0]}{more}", tuple(map(str, self.deviations)))

    def new_roster(self, num_workers: int, lock: Mutex) -> Roster:
        """The roster of a pool."""
        story = PoolStory(lambda: threads().holds(lock))
        self._pools.append(story)
        return RecordedRoster(num_workers, self, story)

    def _add(self, recording: _Recording) -> None:
        """Begin to record a run; once many are over, check and forget them."""
        self._recordings.append(recording)
        if len(self._recordings) > _KEPT:
            over = [candidate for candidate in self._recordings[:_KEPT] if candidate.is_over]
            self._recordings = [candidate for candidate in self._recordings if candidate not in over]
            self._check(over)

    def _check(self, recordings: Sequence[_Recording], at_rest: bool = False) -> None:
        for recording in recordings:
            story = replace(recording.story(), at_rest=at_rest)
            self.runs += 1
            self.events += len(story.events)
            self.native += isinstance(recording, _LoggedRecording)
            self.cut += not story.whole and recording.is_over
            deviation = check(story)
            if deviation is not None:
                self.deviations.append(deviation)


@contextmanager
def conforming() -> Iterator[Conformance]:
    """Records pools that are made inside the block; at its end, what their threads did is replayed beside the machine.

    Pools that are closed inside the block must have told the owners of all their runs; of others, the events so far are
    checked. What a run computed with is kept until the run is checked, which may be at the end of the block.

    Raises ConformanceError for deviations; where the block raises, the error gets a note about them.
    """
    conformance = Conformance()
    pool.rosters.append(conformance.new_roster)
    try:
        yield conformance
    except (Exception, ThreadsEndedError) as error:
        try:
            conformance.raise_found(at_rest=isinstance(error, ThreadsEndedError))
        except ConformanceError as found:
            (error.__cause__ or error).add_note(str(found))
        raise
    finally:
        pool.rosters.remove(conformance.new_roster)
    conformance.raise_found()


class RecordedRoster(Roster):
    """A roster that records what the pool asks and tells it."""

    def __init__(self, num_workers: int, conformance: Conformance, story: PoolStory) -> None:
        super().__init__(num_workers)
        self._conformance = conformance
        self._story = story
        self._recordings: dict[Run, _Recording] = {}

    def admit(self, run: Run) -> None:
        """Record the run from here on."""
        self._story.happens("a run comes")
        recording = _recorded(run, self._story, self._is_gone, self._forget)
        self._recordings[run] = recording
        self._conformance._add(recording)
        super().admit(run)

    def next_run(self) -> Run | None:
        """As the roster says."""
        self._story.happens("a worker looks for a run", self._unattended())
        run = super().next_run()
        self._story.next_run = run
        return run

    def begin(self, worker: Worker, run: Run) -> float:
        """Check that the run is the next."""
        self._story.begins(worker.name, run)
        return super().begin(worker, run)

    def enter(self, worker: Worker, run: Run) -> None:
        """A thread enters a run."""
        self._story.happens(f"{worker.name} enters net {run.name!r}")
        super().enter(worker, run)
        self._recordings[run].visitor(Kind.ENTER, worker)

    def leave(self, worker: Worker, run: Run) -> None:
        """A thread leaves a run."""
        self._story.happens(f"{worker.name} leaves net {run.name!r}")
        super().leave(worker, run)
        self._recordings[run].visitor(Kind.LEAVE, worker)
        self._forget(run)

    def sleep(self, worker: Worker) -> bool:
        """A worker goes to sleep, and records who wakes it."""
        self._story.happens(f"{worker.name} goes to sleep", self._unattended())
        wake_up = worker.wake_up
        if wake_up is not None and not isinstance(wake_up, _RecordedWakeUp):
            worker.wake_up = _RecordedWakeUp(worker.name, wake_up, self._story)
        return super().sleep(worker)

    def take_idle(self) -> Worker | None:
        """A worker to be woken."""
        worker = super().take_idle()
        if worker is not None:
            self._story.is_to_wake(worker.name)
        return worker

    def _forget(self, run: Run) -> None:
        """Drop a run that is over, so that what it computed with can be freed while the pool lives."""
        recording = self._recordings.get(run)
        if recording is not None and recording.told and not run.active:
            self._recordings.pop(run, None)

    def _is_gone(self) -> bool:
        """All workers have ended, and no caller is in a run."""
        return not self.workers

    def _unattended(self) -> str:
        """The net of a run with work left that no thread is in and none will notice; empty if there is none."""
        for run in list(self._recordings):
            if not run.listed and not run.active and run.has_place():
                return run.name
        return ""


class _RecordedWakeUp:
    """A worker's wake-up that is recorded."""

    def __init__(self, name: str, plain: WakeUp, story: PoolStory) -> None:
        self._name = name
        self._plain = plain
        self._story = story

    def wake(self, *, as_helper: bool = False) -> None:
        self._story.wakes(self._name)
        self._plain.wake(as_helper=as_helper)

    def leave(self) -> None:
        self._plain.leave()


class _Recording(ABC):
    """What is recorded of a run, whose tasks are those of the plan.

    Attributes:
        told: the owner knows that the run is over.
    """

    def __init__(self, run: Run, is_gone: Callable[[], bool]) -> None:
        """`is_gone` says whether the pool has ended."""
        self._run = run
        self._is_gone = is_gone
        self._graph, self._work = run.work.graph, run.work
        self._width = run.width
        self.told = False

    @property
    def is_over(self) -> bool:
        """Nothing more happens in the run, even if its pool ended before whoever stopped the run told the owner."""
        return (self.told and not self._run.active) or (self._is_gone() and not self._run.over)

    @abstractmethod
    def add(self, kind: Kind, worker: str, task: int = -1, piece: int = -1, step: int = 0) -> None:
        """Record an event of the calling thread."""

    @abstractmethod
    def visitor(self, kind: Kind, worker: Worker) -> None:
        """Record that a worker enters, or leaves."""

    @abstractmethod
    def events(self) -> list[Event]:
        """What happened until now."""

    @abstractmethod
    def steps(self, task: int, piece: int) -> int:
        """How many steps a piece has."""

    def story(self) -> RunStory:
        """Everything recorded so far."""
        return RunStory(
            self._run.name, self._graph, self._width, self.events(), self.steps, self.label, whole=self.is_over
        )

    def label(self, task: int) -> str:
        """The operators of a task."""
        work = self._work
        steps: Sequence[Failed] = work.calls[task]
        if work.shares:
            steps = [step for step, _ in work.shares[task]]
        elif work.native is not None and not steps:
            steps = work.native.calls[task][0]
        ends = [*steps[:1], *steps[-1:]]
        labels = (self._run.name_step(self._graph.chains[task], step) for step in ends)
        names = dict.fromkeys(label.removesuffix(f" of net {self._run.name!r}") for label in labels)
        return " to ".join(names) or "no operator"

    def attach(self, over: Callable[[Run], object]) -> None:
        """Record the run's steps and its end, and call `over` then."""
        run = self._run
        rows = [
            [self._noted(task, piece, steps) for piece, steps in enumerate(row)]
            for task, row in enumerate(self._work.steps)
        ]
        run.work = replace(self._work, steps=rows)
        finished = run.finished

        def told() -> None:
            self.add(Kind.TELL, _here())
            try:
                finished()
            except Exception:
                self._tell_end(over)
                raise
            self._tell_end(over)

        run.finished = told

    def _tell_end(self, over: Callable[[Run], object]) -> None:
        self.add(Kind.TOLD, _here())
        self.told = True
        over(self._run)

    def _noted(self, task: int, piece: int, steps: Sequence[Step]) -> tuple[Step, ...]:
        """The steps of a piece, with a note before each and after the last."""
        noted: list[Step] = []
        for number, step in enumerate(steps):
            noted += [StepNote(self, task, piece, number), step]
        return (*noted, StepNote(self, task, piece, len(steps)))


class StepNote:
    """Called between steps: the worker has reached a step, or the end of the piece."""

    def __init__(self, recording: _Recording, task: int, piece: int, number: int) -> None:
        self._add = partial(recording.add, task=task, piece=piece, step=number)

    def __call__(self) -> None:
        """Record it."""
        self._add(Kind.STEP, _here())


def _here() -> str:
    return threading.current_thread().name


def _recorded(run: Run, story: PoolStory, is_gone: Callable[[], bool], over: Callable[[Run], object]) -> _Recording:
    recording: _Recording
    if isinstance(run.machine, NativeRun):
        recording = _LoggedRecording(run, is_gone, run.machine)
    else:
        recording = _MachineRecording(run, is_gone, run.machine, story)
    recording.attach(over)
    return recording


class _MachineRecording(_Recording):
    """The record of a run in Python."""

    def __init__(self, run: Run, is_gone: Callable[[], bool], machine: Machine, story: PoolStory) -> None:
        super().__init__(run, is_gone)
        self._events: list[Event] = []
        run.machine = cast(Machine, _RecordedMachine(machine, self._events, story, run.name))

    def add(self, kind: Kind, worker: str, task: int = -1, piece: int = -1, step: int = 0) -> None:
        self._events.append(Event(kind, worker, task, piece, step=step))

    def visitor(self, kind: Kind, worker: Worker) -> None:
        self.add(kind, worker.name)

    def events(self) -> list[Event]:
        return list(self._events)

    def steps(self, task: int, piece: int) -> int:
        return len(self._work.steps[task][piece])


class _RecordedMachine:
    """A machine that records questions and answers."""

    def __init__(self, machine: Machine, events: list[Event], story: PoolStory, name: str) -> None:
        self._machine = machine
        self._events = events
        self._story = story
        self._name = name

    @property
    def available(self) -> int:
        return self._machine.available

    @property
    def remaining(self) -> int:
        return self._machine.remaining

    def take(self, last: int = -1, *, from_last: bool = False) -> tuple[int, int] | None:
        self._story.happens(f"the machine of net {self._name!r} is asked what is next")
        task, piece = REFUSED, -1
        try:
            answer = self._machine.take(last, from_last=from_last)
            task, piece = (NOTHING, -1) if answer is None else answer
        finally:
            self._events.append(Event(Kind.TAKE, _here(), task, piece, last, from_last))
        return answer

    def end(self, task: int, piece: int = -1) -> None:
        self._story.happens(f"the machine of net {self._name!r} is told of an end")
        self._events.append(Event(Kind.END, _here(), task, piece))
        self._machine.end(task, piece)

    def stop(self) -> None:
        self._story.happens(f"net {self._name!r} is stopped")
        self._machine.stop()
        self._events.append(Event(Kind.STOPPED, _here()))


class _LoggedRecording(_Recording):
    """The record of a run in machine code."""

    def __init__(self, run: Run, is_gone: Callable[[], bool], machine: NativeRun) -> None:
        super().__init__(run, is_gone)
        self._names: dict[int, str] = {}
        self._numbers: dict[str, int] = {}
        self._native = run.machine = _RecordedNativeRun(machine, self)
        self._tables: dict[int, list[Piece]] = {}
        for task, row in enumerate(machine.tasks.tables):
            for piece, table in enumerate(row):
                self._tables.setdefault(address_of(table), []).append((task, piece))

    def _number(self, worker: str) -> int:
        """The number of a worker in the run, or of another thread."""
        number = self._numbers.get(worker)
        if number is None:
            number = self._numbers[worker] = min(self._names, default=0) - 2
            self._names[number] = worker
        return number

    def add(self, kind: Kind, worker: str, task: int = -1, piece: int = -1, step: int = 0) -> None:
        self._native.tell(kind, self._number(worker), task, piece, step)

    def visitor(self, kind: Kind, worker: Worker) -> None:
        self._names[worker.number] = worker.name
        self._numbers[worker.name] = worker.number
        self.add(kind, worker.name)

    def steps(self, task: int, piece: int) -> int:
        return len(self._work.steps[task][piece]) if self._work.steps[task] else 0

    def story(self) -> RunStory:
        story = super().story()
        return replace(story, whole=False) if self._native.is_cut else story

    def events(self) -> list[Event]:
        events: list[Event] = []
        goes_on: dict[int, int] = {}  # of workers, with which task
        has: dict[int, Piece] = {}
        for line in self._native.lines():
            kind, number, task, piece, from_last, table, lock = line
            worker = self._names[number]
            if kind == Logged.TAKE:
                has[number] = task, piece
                last = goes_on.pop(number, -1)
                events.append(Event(Kind.TAKE, worker, task, piece, last, bool(from_last), locked=bool(lock)))
            elif kind == Logged.NOTHING:
                events.append(Event(Kind.TAKE, worker, NOTHING, from_last=bool(from_last), locked=bool(lock)))
            elif kind == Logged.GO_ON:
                goes_on[number] = task
            elif kind == Logged.EXECUTE:
                tables = self._tables.get(table, [])
                task, piece = has[number] if has.get(number) in tables else (*tables, (-1, -1))[0]
                events.append(Event(Kind.STEP, worker, task, piece))
            elif kind == Logged.END:
                events.append(Event(Kind.END, worker, task, piece, locked=bool(lock)))
            else:
                events.append(Event(Kind(kind), worker, task, piece, step=table))
        return events


class _RecordedNativeRun(LoggedRun):
    """A run in machine code that records when it is stopped."""

    __slots__ = ("_recording",)

    def __init__(self, run: NativeRun, recording: _LoggedRecording) -> None:
        super().__init__(run)
        self._recording = recording

    def stop(self) -> None:
        self._recording.add(Kind.STOPPING, _here())
        super().stop()
        self._recording.add(Kind.STOPPED, _here())
