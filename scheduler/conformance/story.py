"""RunStory: the events of one run, in the order in which the machine saw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.task_graph import TaskGraph

NOTHING, REFUSED = -1, -2
"""In place of a task: there was nothing to take; the policy raised an error."""

_EVENTS_TOLD = 12


class Kind(IntEnum):
    """The kinds of events. All but STEP, TELL and TOLD happen under the lock that guards the machine."""

    ENTER = 16  # a worker goes into the run
    LEAVE = 17
    TAKE = 18  # it asks for work, and gets a piece of a task
    STEP = 19  # it reaches a step of a piece, or the end of its last one
    END = 20  # it has finished a piece
    STOPPING = 21  # from here on, a worker that asks may get nothing
    STOPPED = 22  # no worker gets anything any more
    TELL = 23  # it begins to tell the owner that the run is over
    TOLD = 24  # the owner knows


@dataclass(frozen=True, slots=True)
class Event:
    """An action of a worker in a run.

    Attributes:
        kind: what the worker does.
        worker: the name of its thread.
        task, piece: of TAKE, the answer (or NOTHING or REFUSED); of STEP and END, what is executed.
        last: of TAKE, the task whose next piece the worker prefers; -1 for none.
        from_last: of TAKE, the worker takes a task's pieces from the last one on.
        step: of STEP, its number.
        locked: the thread holds the lock that guards the machine, as it must except for STEP, TELL and TOLD.
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
        width: how many workers may be inside.
        events: in order.
        steps: the number of steps of a task's piece.
        label: the operators of a task.
        whole: the pool is done with the run; otherwise it may still be under way.
        at_rest: the run may be under way, but no thread can go on.
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
        """A piece, in words."""
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
    """An event that the machine does not allow.

    Attributes:
        where: the net, or the pool.
        done: what happened.
        right: what the machine says instead.
        before: the events until then.
    """

    where: str
    done: str
    right: str
    before: Sequence[str] = ()

    def __str__(self) -> str:
        earlier = "".join(f"\n    {line}" for line in self.before[-_EVENTS_TOLD:])
        return (
            f"{self.where}: threads did what the machine does not allow\n  done:    {self.done}"
            f"\n  machine: {self.right}" + (f"\n  before that:{earlier}" if earlier else "")
        )
