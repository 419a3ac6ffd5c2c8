"""Checking: replays the record of a run beside the machine, which must allow each event and give the same answer.

The machine says who may take what, and when the run is over. Its answers must also be carried out: a worker executes
every step of its piece once, ends the piece, and leaves with none unended; it begins no further step of a stopped run;
and the owner is told once, when nothing is left to do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial

from dagexec.errors import PolicyError
from dagexec.platform.records import dataclass
from dagexec.scheduler.conformance.story import NOTHING, REFUSED, Deviation, Event, Kind, RunStory
from dagexec.scheduler.run.policy_machine import machine_of

Piece = tuple[int, int]


def check(story: RunStory) -> Deviation | None:
    """The first event that the machine does not allow; None where it allows all."""
    try:
        _Replay(story).run()
    except _DeviationError as error:
        return error.deviation
    return None


class _DeviationError(Exception):
    def __init__(self, deviation: Deviation) -> None:
        super().__init__(str(deviation))
        self.deviation = deviation


@dataclass
class _Visit:
    """A worker's stay in the run, since it entered.

    Attributes:
        held: the pieces that it took and has not ended, each with the number of its steps that were begun.
        after_stop: steps that it began after the run was stopped.
    """

    held: dict[Piece, int] = field(default_factory=dict)
    after_stop: int = 0


class _Replay:
    def __init__(self, story: RunStory) -> None:
        self._story = story
        self._machine = machine_of(story.graph)
        self._inside: dict[str, list[_Visit]] = {}
        self._takers: dict[Piece, str] = {}
        self._ended: dict[Piece, str] = {}
        self._stopping = self._told = False
        self._telling = ""  # who tells the owner; another worker does so again if that one dies
        self._place = 0
        self._unless_stopped: Callable[[], _DeviationError] | None = None  # allowed only if the run is stopped

    def run(self) -> None:
        replays = {
            Kind.ENTER: self._enter, Kind.LEAVE: self._leave, Kind.TAKE: self._take, Kind.STEP: self._step,
            Kind.END: self._end, Kind.STOPPING: self._stop, Kind.STOPPED: self._stop, Kind.TELL: self._tell,
            Kind.TOLD: self._tell,
        }  # fmt: skip
        for place, event in enumerate(self._story.events):
            self._place = place
            if not event.locked:
                raise self._deviation("that is done with the lock of the run, which nobody holds")
            replays[event.kind](event)
        if self._story.whole:
            self._check_end()
        elif self._story.at_rest:
            self._check_rest()

    def _deviation(self, right: str, done: str = "", place: int | None = None) -> _DeviationError:
        """The error for the event at `place`, by default the one that is replayed."""
        say, events = self._story.say, self._story.events
        place = self._place if place is None else place
        before = [f"{number} {say(event)}" for number, event in enumerate(events[:place], 1)]
        return _DeviationError(Deviation(f"net {self._story.name!r}", done or say(events[place]), right, before))

    def _enter(self, event: Event) -> None:
        if self._telling:
            raise self._deviation("the run is over")
        if sum(map(len, self._inside.values())) >= self._story.width:
            raise self._deviation(f"no more than {self._story.width} may be inside")
        self._inside.setdefault(event.worker, []).append(_Visit())

    def _leave(self, event: Event) -> None:
        visits = self._inside.get(event.worker)
        if not visits:
            raise self._deviation("it is not inside")
        for piece in visits.pop().held:
            self._remember(partial(self._has_still, piece))

    def _visit(self, event: Event) -> _Visit:
        visits = self._inside.get(event.worker)
        if not visits:
            raise self._deviation("it is not inside")
        return visits[-1]

    def _take(self, event: Event) -> None:
        visit = self._visit(event)
        begun = [piece for piece, steps in visit.held.items() if steps]
        if begun:
            raise self._deviation(f"it is to end {self._story.piece(*begun[0])} first")
        try:
            answer = self._machine.take(event.last, from_last=event.from_last)
        except PolicyError as error:
            if event.task != REFUSED:
                raise self._deviation(f"the policy fails: {error}") from error
            return
        if event.task == REFUSED:
            raise self._deviation("the policy decides" + self._why_not_so())
        if event.task == NOTHING:
            if answer is not None:
                raise self._deviation(f"there is {self._story.piece(*answer)}" + self._why_not_so())
            return
        piece = event.task, event.piece
        if answer != piece:
            right = "there is nothing to take" if answer is None else f"it is to take {self._story.piece(*answer)}"
            raise self._deviation(f"{right}; {self._state_of(*piece)}" + self._why_not_so())
        self._takers[piece] = event.worker
        visit.held[piece] = 0

    def _why_not_so(self) -> str:
        """Says that a policy which looks beyond the run cannot be replayed."""
        policy = self._story.graph.policy
        return "" if policy is None else " (if the policy decides the same whenever it is asked the same)"

    def _state_of(self, task: int, piece: int) -> str:
        """Why a piece cannot be taken."""
        if self._machine.stopped:
            return "the run is stopped"
        graph = self._story.graph
        waits = [
            parent
            for parent, children in enumerate(graph.children)
            if task in children and any((parent, number) not in self._ended for number in range(graph.pieces[parent]))
        ]
        if waits:
            return f"task {task} waits for {', '.join(f'{number} ({self._story.label(number)})' for number in waits)}"
        taker = self._takers.get((task, piece))
        return "that piece is free, and comes later" if taker is None else f"{taker} has taken that piece before"

    def _step(self, event: Event) -> None:
        visit, piece = self._visit(event), (event.task, event.piece)
        if piece not in visit.held:
            held = ", ".join(self._story.piece(*other) for other in visit.held) or "none"
            raise self._deviation(f"the piece that it was given is another: {held}")
        if visit.held[piece] != event.step:
            raise self._deviation(f"step {visit.held[piece]} of that piece is next")
        visit.held[piece] += 1
        visit.after_stop += self._machine.stopped
        if visit.after_stop > 1:
            raise self._deviation("the run is stopped, and one step was begun since")

    def _end(self, event: Event) -> None:
        visit, piece = self._visit(event), (event.task, event.piece)
        if piece in self._ended:
            raise self._deviation(f"{self._ended[piece]} has ended it before")
        if piece not in visit.held:
            taker = self._takers.get(piece)
            raise self._deviation("nobody has taken it" if taker is None else f"it is {taker} that has it")
        steps, begun = self._story.steps(*piece), visit.held.pop(piece)
        if begun <= steps:
            self._remember(lambda: f"of its {steps} steps it came to {begun}")
        self._ended[piece] = event.worker
        self._machine.end(*piece)

    def _has_still(self, piece: Piece) -> str:
        return f"it has {self._story.piece(*piece)}, which nobody else can end"

    def _remember(self, right: Callable[[], str]) -> None:
        """Accept the event only if the run is stopped by its end; `right` says what should have happened instead."""
        if not self._stopping and self._unless_stopped is None:
            place = self._place
            self._unless_stopped = lambda: self._deviation(right(), place=place)

    def _stop(self, event: Event) -> None:
        self._stopping = True
        self._unless_stopped = None
        if event.kind == Kind.STOPPED:
            self._machine.stop()

    def _tell(self, event: Event) -> None:
        if event.kind == Kind.TOLD:
            self._told = True
            return
        if self._told or (self._telling and self._telling != event.worker):
            raise self._deviation(f"{self._telling} has told the owner")
        self._telling = event.worker
        self._check_over()

    def _check_over(self) -> None:
        if self._unless_stopped is not None:
            raise self._unless_stopped()
        if self._machine.remaining and not self._stopping:
            raise self._deviation(f"{self._machine.remaining} tasks have not ended, and nobody has stopped the run")
        if self._machine.remaining and self._who_is_inside():
            raise self._deviation(f"{self._who_is_inside()} may have something to do in it still")

    def _check_end(self) -> None:
        if self._unless_stopped is not None:
            raise self._unless_stopped()
        if not self._told:
            raise self._deviation("the owner of the run is told at its end", "the owner was never told")
        if self._who_is_inside():
            raise self._deviation("whoever enters leaves", f"{self._who_is_inside()} never left")

    def _check_rest(self) -> None:
        """No thread goes on: right only if those inside the run wait for something else."""
        if self._unless_stopped is not None:
            raise self._unless_stopped()
        if self._telling or self._who_is_inside():
            return
        right = "the owner is told"
        if self._machine.remaining and not self._stopping:
            right = f"somebody goes in: {self._machine.available} tasks have something to take"
        raise self._deviation(right, "nothing happens any more, and nobody is inside")

    def _who_is_inside(self) -> str:
        return ", ".join(worker for worker, visits in self._inside.items() if visits)
