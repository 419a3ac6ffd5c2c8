"""The story of a schedule that failed: `explain` shrinks it, and says what went wrong in terms of its nets.

The schedule is run twice (`nondeterminism`), shrunk to the fewest preemptions (`fewest`), and bisected for the moment
from which it could only fail (`inevitable`). Then it is run again with notes: what its runs did (`happenings`) shows
which access, task or wake-up was wrong (`findings`, `deadlocks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dagexec.analysis.deadlocks import deadlock_findings
from dagexec.analysis.findings import Finding, findings
from dagexec.analysis.happenings import RunTold, happenings
from dagexec.errors import DagexecError, DeadlockError
from dagexec.platform.records import dataclass
from dagexec.scheduler.exploration.deviations import Deviation, Point
from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.exploring import ExploredSchedule, compact, explore
from dagexec.scheduler.exploration.fewest import Shrunk, fewest_preemptions
from dagexec.scheduler.exploration.inevitable import Moment, inevitable
from dagexec.scheduler.exploration.nondeterminism import Parting, parting
from dagexec.scheduler.exploration.notes import Notes
from dagexec.scheduler.exploration.strategies import ReplayStrategy

_MOST_TOLD = 12
_MOST_SCHEDULES, _MOST_WITH_FEWER = 1000, 500
_RUNS = 20


@dataclass(frozen=True)
class Step:
    """A step of the story.

    Attributes:
        event: the thread and its action.
        place: where in the code its thread had reached a decision point; empty for a beginning.
        operators: those executed or launched in it; may be empty.
        preempted: the thread that could have gone on instead; empty for a step that was no preemption.
        passed_from: number of the step that let this one go on: a lock released, a thread started; -1 for none.
    """

    event: Event
    place: str
    operators: str
    preempted: str
    passed_from: int

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        doing = f", and {self.operators}" if self.operators else ""
        return f"{self.event.thread}: {self.event}{where}{doing}"


@dataclass(frozen=True)
class Story:
    """Why a schedule failed.

    Attributes:
        failure: what was raised.
        schedule: with the fewest preemptions that were found; it replays exactly.
        deviations: where it departs from the schedule without preemptions.
        preemptions: how many it has; None where it did not fail again.
        fewest: no schedule with fewer fails: all were tried.
        steps: of `schedule`.
        findings: what was wrong, the likeliest cause first.
        moment: from when it could only fail; None if unknown.
        parting: where two runs of it part; None where it repeats itself.
    """

    failure: str
    schedule: ExploredSchedule[Any]
    deviations: tuple[Deviation, ...]
    preemptions: int | None
    fewest: bool
    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    moment: Moment[Any] | None
    parting: Parting | None

    def lines(self) -> Iterator[str]:
        """The story as text."""
        yield self.failure
        if self.parting is not None:
            yield f"It does not repeat itself: {self.parting}"
        yield from (finding.text for finding in self.findings)
        if self.preemptions is None:
            yield "It did not fail again under the same decisions."
            return
        few = "no schedule with fewer fails" if self.fewest else "the fewest that were found"
        yield f"{_counted(self.preemptions, 'preemption')} in {_counted(len(self.steps), 'step')}, {few}:"
        switches = [number for number, step in enumerate(self.steps) if step.preempted]
        for number in switches[:_MOST_TOLD]:
            yield f"  step {number}: {self.steps[number]}, although {self._next_of(number)}"
        if len(switches) > _MOST_TOLD:
            yield f"  and {len(switches) - _MOST_TOLD} more"
        if self.moment is not None:
            yield self._inevitable(self.moment)

    def _next_of(self, number: int) -> str:
        """What the thread that is preempted at a step could have done, and where it was."""
        who = self.steps[number].preempted
        later = next((step for step in self.steps[number:] if step.event.thread == who), None)
        return f"{who} could go on" if later is None else f"{who} could go on ({later.event} at {later.place})"

    def _inevitable(self, moment: Moment[Any]) -> str:
        if moment.step < 0:
            return f"It fails however it goes on: all of {moment.tried} schedules that were tried do."
        exact = "just before it" if moment.possible_until == moment.step else f"before step {moment.possible_until}"
        return (
            f"From step {moment.step} on ({self.steps[moment.step]}) it could only fail, by trial: all of "
            f"{moment.continuations} ways to go on from there fail, and one of those that leave it {exact} does not."
        )

    def as_json(self) -> dict[str, object]:
        """The story as plain data; `steps` are [lane, what, place, operators, preempted], arrows pairs of steps."""
        lanes = list(dict.fromkeys(step.event.thread for step in self.steps))
        moment = self.moment
        return {
            "failure": self.failure,
            "decisions": compact(self.schedule.decisions),
            "preemptions": self.preemptions,
            "fewest": self.fewest,
            "deviations": [one._asdict() for one in self.deviations],
            "findings": [{"kind": one.kind, "text": one.text, "steps": list(one.steps)} for one in self.findings],
            "inevitable": None
            if moment is None
            else {"step": moment.step, "continuations": moment.continuations, "tried": moment.tried},
            "nondeterminism": None if self.parting is None else str(self.parting),
            "text": list(self.lines()),
            "lanes": lanes,
            "steps": [
                [lanes.index(one.event.thread), str(one.event), one.place, one.operators, one.preempted]
                for one in self.steps
            ],
            "arrows": [[one.passed_from, number] for number, one in enumerate(self.steps) if one.passed_from >= 0],
        }


def explain(scenario: Callable[[], object], failed: ExploredSchedule[Any], *, seconds: float = 20.0) -> Story:
    """The story of `failed`, a schedule of `scenario` that failed; `seconds` of real time are the budget, about.

    Raises ValueError for a schedule that did not fail.
    """
    if failed.failure is None:
        raise ValueError("the schedule did not fail, so there is nothing to explain")
    parted = parting(scenario, failed)
    try:
        shrunk = fewest_preemptions(
            scenario, failed, seconds=seconds / 2, most=_MOST_SCHEDULES, most_with_fewer=_MOST_WITH_FEWER
        )
        return _told(scenario, shrunk, parted, seconds / 2)
    except DagexecError:  # it does not fail again
        parted = parted or parting(scenario, failed, _RUNS)
        steps = tuple(Step(event, "", "", "", -1) for event in failed.trace)
        return Story(_text(failed), failed, (), None, False, steps, (), None, parted)


def _told(scenario: Callable[[], object], shrunk: Shrunk[Any], parted: Parting | None, seconds: float) -> Story:
    moment = inevitable(scenario, shrunk.schedule, shrunk.points, seconds=seconds)
    notes, rescued = Notes(), Notes()
    schedule = _noted(scenario, shrunk.schedule, notes)
    rescue = None if moment is None or moment.rescue is None else _noted(scenario, moment.rescue, rescued)
    runs = happenings(notes)
    found = findings(runs, ended=not isinstance(schedule.failure, DeadlockError))
    if notes.waiting:
        found += deadlock_findings(schedule, notes, None if rescue is None else (rescue, rescued))
    return Story(
        failure=_text(shrunk.schedule),
        schedule=shrunk.schedule,
        deviations=shrunk.deviations,
        preemptions=shrunk.preemptions,
        fewest=shrunk.fewest,
        steps=_steps(schedule, notes, runs, shrunk.points),
        findings=tuple(found),
        moment=moment,
        parting=parted,
    )


def _noted(scenario: Callable[[], object], schedule: ExploredSchedule[Any], notes: Notes) -> ExploredSchedule[Any]:
    return explore(scenario, ReplayStrategy(schedule.decisions, timeouts=schedule.timeouts), notes=notes)


def _steps(
    schedule: ExploredSchedule[Any], notes: Notes, runs: tuple[RunTold, ...], points: tuple[Point, ...]
) -> tuple[Step, ...]:
    preempted = {point.step: point.thread for point in points if point.preempts}
    nets = {told.run.name for told in runs if told.made is not None}
    operators: dict[int, list[str]] = {}
    for told in runs:
        for span in told.spans:
            text = span.text.replace(f" of net {told.run.name!r}", "") if len(nets) == 1 else span.text
            operators.setdefault(span.begin, []).append(text)
    passed = _passed_from(schedule.trace)
    return tuple(
        Step(event, place, "; ".join(operators.get(number, ())), preempted.get(number, ""), passed.get(number, -1))
        for number, (event, place) in enumerate(zip(schedule.trace, notes.places, strict=True))
    )


def _passed_from(trace: tuple[Event, ...]) -> dict[int, int]:
    """For each step that a step of another thread let go on, the number of that: it released, started or ended."""
    givers: dict[int, int] = {}
    released: dict[str, int] = {}
    started: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, event in enumerate(trace):
        if event.kind in ("acquire", "wait"):
            giver = released.get(event.resource if event.kind == "acquire" else "the event loop", -1)
        elif event.kind == "join":
            giver = last.get(event.resource, -1)
        else:
            giver = started.get(event.thread, -1) if event.kind == "begin" else -1
        if giver >= 0 and trace[giver].thread != event.thread:
            givers[number] = giver
        last[event.thread] = number
        if event.kind in ("release", "wake"):
            released[event.resource] = number
        elif event.kind == "start":
            started[event.resource] = number
    return givers


def _text(schedule: ExploredSchedule[Any]) -> str:
    """The failure, with its notes, among them deviations of threads from the machine of runs."""
    return "\n".join((f"{type(schedule.failure).__name__}: {schedule.failure}", *_notes(schedule.failure)))


def _notes(failure: BaseException | None) -> tuple[str, ...]:
    return tuple(getattr(failure, "__notes__", ()))


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")
