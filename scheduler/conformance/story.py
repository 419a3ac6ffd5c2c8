"""RunStory: what was done in one run, event after event, in the order in which the machine saw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from dagexec.platform.records import dataclass
from dagexec.scheduler.run.machine import TaskGraph

NOTHING, REFUSED = -1, -2
"""In place of a task that was taken: there was none; the machine raised, because of its policy."""

_EVENTS_TOLD = 12


class Kind(IntEnum):
    """What happens. All but STEP, TELL and TOLD happen with the lock that guards the machine."""

    ENTER = 16  # a worker goes into the run
    LEAVE = 17
    TAKE = 18  # it asks for something to do, and gets a piece of a task
    STEP = 19  # it comes to a step of a piece, or behind the last one
    END = 20  # it has done with a piece
    STOPPING = 21  # from here on, whoever asks may get nothing
    STOPPED = 22  # nobody gets anything any more
    TELL = 23  # it begins to tell the owner that the run is over
    TOLD = 24  # the owner knows


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a worker did in a run.

    Attributes:
        kind: what.
        worker: the name of its thread.
        task, piece: of TAKE, what was given, or NOTHING or REFUSED; of STEP and END, what it is about.
        last: of TAKE, the task whose next piece the worker would like best; -1 for none.
        from_last: of TAKE, it would like the last piece.
        step: of STEP, its number.
        locked: it happens with the lock that guards the machine, as all must but STEP, TELL and TOLD.
    """

    kind: Kind
    worker: str
    task: int = -1
    piece: int = -1
    last: int = -1
    from_last: bool = False
    step: int = 0
    locked: bool = True


@dataclass(frozen=True)
class RunStory:
    """One run.

    Attributes:
        name: of its net.
        graph: its tasks.
        width: how many may be inside.
        events: what was done.
        steps: of a task and piece, how many steps it has.
        label: of a task, its operators.
        whole: the pool has done all that it will; else the run may be under way still.
        at_rest: the run may be under way, but nothing happens any more: no thread can go on.
    """

    name: str
    graph: TaskGraph
    width: int
    events: Sequence[Event]
    steps: Callable[[int, int], int]
    label: Callable[[int], str]
    whole: bool = True
    at_rest: bool = False

    def piece(self, task: int, piece: int) -> str:
        """A piece, in the net's words."""
        count = self.graph.pieces[task] if 0 <= task < len(self.graph.pieces) else 0
        if not 0 <= piece < count:
            return f"piece {piece} of task {task}, which there is not"
        what = self.label(task)
        return f"task {task} ({what})" if count == 1 else f"piece {piece} of {count} of task {task} ({what})"

    def say(self, event: Event) -> str:
        """An event as a sentence."""
        who, kind = event.worker, event.kind
        if kind in (Kind.ENTER, Kind.LEAVE):
            return f"{who} {'enters' if kind == Kind.ENTER else 'leaves'}"
        if kind in (Kind.STOPPING, Kind.STOPPED):
            return f"{who} {'is about to stop' if kind == Kind.STOPPING else 'has stopped'} the run"
        if kind in (Kind.TELL, Kind.TOLD):
            return f"{who} {'tells' if kind == Kind.TELL else 'has told'} the owner that the run is over"
        if kind == Kind.TAKE and event.task == NOTHING:
            return f"{who} finds nothing to take"
        if kind == Kind.TAKE and event.task == REFUSED:
            return f"{who} asks, and the policy fails"
        what = self.piece(event.task, event.piece)
        if kind == Kind.STEP:
            count = self.steps(event.task, event.piece)
            if event.step < count:
                return f"{who} comes to step {event.step} of {what}"
            return f"{who} {'is done with' if count else 'executes'} {what}"
        return f"{who} {'takes' if kind == Kind.TAKE else 'ends'} {what}"


@dataclass(frozen=True)
class Deviation:
    """What was done is not what the machine allows.

    Attributes:
        where: the net, or the pool.
        done: what happened.
        right: what the machine says.
        before: what had happened until then.
    """

    where: str
    done: str
    right: str
    before: Sequence[str] = ()

    def __str__(self) -> str:
        told = "".join(f"\n    {line}" for line in self.before[-_EVENTS_TOLD:])
        return (
            f"{self.where}: threads did what the machine does not allow\n  done:    {self.done}"
            f"\n  machine: {self.right}" + (f"\n  before that:{told}" if told else "")
        )
