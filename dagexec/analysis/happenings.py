"""What happened in a schedule, in terms of nets: which operator was executed in which step, and where.

Threads of a controlled schedule announce what they do (`scheduler.exploration.notes`): a worker the pieces of tasks
that it begins and ends, a stream the kernels that it executes, a net the runs that it makes. Here these become spans of
operators.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

from dagexec.core.graph import Graph
from dagexec.core.native import phases_of
from dagexec.core.operator import Step
from dagexec.core.stream import Kernel
from dagexec.platform.records import dataclass
from dagexec.scheduler.conformance import StepNote
from dagexec.scheduler.exploration.device import Advance
from dagexec.scheduler.exploration.notes import Notes
from dagexec.scheduler.nets.net import NetRun, NetRunOver
from dagexec.scheduler.plan.culprit import Failed
from dagexec.scheduler.run.executing import Doing
from dagexec.scheduler.run.run import Run

NEVER = 1 << 60


@dataclass
class Span:
    """A stretch of work.

    Attributes:
        labels: of its operators.
        where: the worker or stream.
        task, piece: its place in the work of its run; -1 for a kernel on a stream.
        begin, end: the steps in which it began and ended; `NEVER` if it did not end.
        order: of its beginning and its end among all events.
        launches: it only put work on a stream.
    """

    labels: tuple[str, ...]
    where: str
    task: int
    piece: int
    begin: int
    end: int
    order: tuple[int, int]
    launches: bool = False

    @property
    def text(self) -> str:
        """Its operators."""
        return f"{'launch ' if self.launches else ''}{', '.join(self.labels)}"


@dataclass
class RunTold:
    """A run of a net, or of a pool's user without one.

    Attributes:
        run: the run.
        made: what its net announced; None for a run without one.
        spans: its stretches of work, in order of the beginnings.
        over: when its owner was told that it is over: the place among all events, and the step; None if never.
    """

    run: Run
    made: NetRun | None
    spans: list[Span] = field(default_factory=list)
    over: tuple[int, int] | None = None

    @property
    def graph(self) -> Graph | None:
        """The operators, if it is a net's."""
        return None if self.made is None else self.made.net.graph

    def name_of(self, task: int) -> str:
        """The operators of a task."""
        return ", ".join(_labels(self.run, self.made, task, self.run.work.steps[task][0]))

    def executed(self) -> dict[str, tuple[Span, Span]]:
        """For each operator that was executed, by its label, the spans that began first and ended last."""
        ends: dict[str, tuple[Span, Span]] = {}
        for span in self.spans:
            if not span.launches:
                for label in span.labels:
                    first, last = ends.get(label, (span, span))
                    ends[label] = (first, max(last, span, key=lambda one: one.order[1]))
        return ends


def happenings(notes: Notes) -> tuple[RunTold, ...]:
    """The runs of a schedule, and what was done in each."""
    return _Reader(notes).runs()


class _Reader:
    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._runs: dict[int, RunTold] = {}
        self._open: dict[tuple[str, int], Span] = {}  # by thread and the run that it is in

    def runs(self) -> tuple[RunTold, ...]:
        for order, (step, thread, what) in enumerate(self._notes.acts):
            match what:
                case NetRun():
                    self._runs[id(what.run)] = RunTold(what.run, what)
                case Run():
                    self._runs.setdefault(id(what), RunTold(what, None))
                case Doing():
                    self._do(order, step, thread, what)
                case NetRunOver(run) if id(run) in self._runs:
                    self._runs[id(run)].over = order, step
                case Advance(_, Kernel() as kernel):
                    self._execute(order, step, thread, kernel)
        return tuple(self._runs.values())

    def _do(self, order: int, step: int, thread: str, doing: Doing) -> None:
        told = self._runs.setdefault(id(doing.run), RunTold(doing.run, None))
        if doing.done:
            span = self._open.pop((thread, id(doing.run)))
            span.end, span.order = step, (span.order[0], order)
            return
        launches = told.made is not None and not told.made.net.on_host
        labels = tuple(_labels(doing.run, told.made, doing.task, doing.steps))
        pieces = doing.run.work.steps[doing.task]
        piece = next(number for number, steps in enumerate(pieces) if steps is doing.steps)
        span = Span(labels, thread, doing.task, piece, step, NEVER, (order, NEVER), launches)
        self._open[thread, id(doing.run)] = span
        told.spans.append(span)

    def _execute(self, order: int, step: int, stream: str, kernel: Kernel) -> None:
        for told in reversed(self._runs.values()):
            if told.made is not None and kernel.operator in told.made.net.operators:
                told.spans.append(Span((kernel.label,), stream, -1, -1, step, step, (order, order)))
                return


def _labels(run: Run, made: NetRun | None, task: int, steps: Sequence[Step]) -> Iterator[str]:
    """The operators of a piece, each once."""
    chain = run.work.graph.chains[task]
    if made is not None and not made.net.on_host:
        yield from map(made.plan.graph.label, made.plan.chains[chain])
        return
    work = (step for step in steps if not isinstance(step, StepNote))
    yield from dict.fromkeys(run.name_step(chain, _call_of(step)) for step in work)


def _call_of(step: Step) -> Failed:
    phases = phases_of(step)
    return step if not phases else next((call for phase in phases for piece in phase for call in piece), step)
