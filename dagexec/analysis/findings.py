"""Findings: what was wrong in a schedule that failed, from the events of its runs and the waits at its end.

An access before another that it should follow; a task that began before one that it waits for, was lost, or was done
twice; operators that nothing orders and that came in another order than listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Literal

from dagexec.analysis.happenings import NEVER, RunTold, Span
from dagexec.core.graph import Hazard
from dagexec.platform.records import dataclass
from dagexec.scheduler.hazards import check_order, conflicts, prepared_accesses

_MOST = 5


@dataclass(frozen=True)
class Finding:
    """Something that was wrong.

    Attributes:
        kind: what it is about.
        text: in a sentence.
        steps: numbers of the steps in which it shows.
    """

    kind: Literal["order", "lost", "twice", "swapped", "deadlock"]
    text: str
    steps: tuple[int, ...]


def findings(runs: tuple[RunTold, ...], *, ended: bool) -> list[Finding]:
    """What was wrong in `runs`. Unless the schedule `ended` by itself, tasks may be missing at its end.

    Consequences of another finding of a run are left out: at most a few are given, of the first run that has any.
    """
    for told in runs:
        problems = [*_out_of_order(told)] or [*_too_early(told)]
        problems += [*_after_the_end(told), *_twice(told), *_never(told, ended=ended or told.run.over)]
        if problems:
            return problems[:_MOST]
    return [problems for told in runs for problems in _swapped(told)][:_MOST]


def _after_the_end(told: RunTold) -> Iterator[Finding]:
    """Operators that were executed after the owner of the run had been told that it is over."""
    for span in told.spans:
        if told.over is not None and span.order[1] > told.over[0]:
            text = (
                f"{span.where} executed {_short(told, span.text)} (step {span.begin}) after the run was told to be over"
            )
            yield Finding("order", f"{text} (step {told.over[1]})", (span.begin, told.over[1]))


def _out_of_order(told: RunTold) -> Iterator[Finding]:
    """Conflicting accesses that were made in the wrong order, with what is missing in the plan."""
    if told.made is None:
        return
    net, plan, prepared = told.made.net, told.made.plan, told.made.preparation.prepared
    accesses = prepared_accesses(net.graph, net.operators, prepared)
    executed = told.executed()
    proof = check_order(net, plan, accesses)
    missing = {(pair.resource, pair.earlier, pair.later): pair.missing for pair in proof.unordered}
    for number, users in enumerate(accesses.users()):
        resource = accesses.resources[number]
        for earlier, later, kind in () if resource.exclusive else conflicts(users, number, accesses):
            first, second = net.graph.label(earlier), net.graph.label(later)
            if first not in executed or second not in executed:
                continue
            before, after = executed[first][1], executed[second][0]
            if before is not after and after.order[0] < before.order[1]:
                why = missing.get((resource.name, first, second), "the plan orders them, and the run did not")
                text = f"{_accessed(told, resource.name, kind, (second, after), (first, before))}: {why}"
                yield Finding("order", text, (after.begin, min(before.end, before.begin)))


def _accessed(told: RunTold, resource: str, kind: Hazard, later: tuple[str, Span], earlier: tuple[str, Span]) -> str:
    (second, after), (first, before) = later, earlier
    did, should = {
        Hazard.RAW: ("read", "wrote it"),
        Hazard.WAR: ("wrote", "had read it"),
    }.get(kind, ("wrote", "did, which should be first"))
    return (
        f"{_short(told, second)} on {after.where} {did} {resource} (step {after.begin}) before {_short(told, first)} "
        f"on {before.where} {should} ({_until(before)})"
    )


def _until(span: Span) -> str:
    return f"step {span.begin}, which has no end" if span.end == NEVER else f"step {span.end}"


def _too_early(told: RunTold) -> Iterator[Finding]:
    """Tasks that were begun before one that they wait for was done."""
    by_task = _by_task(told)
    for task, children in enumerate(told.run.work.graph.children):
        for child in children:
            if child not in by_task:
                continue
            after = by_task[child][0]
            before = max(by_task.get(task, ()), key=lambda span: span.order[1], default=None)
            if before is None or after.order[0] < before.order[1]:
                done = "was begun" if before is None else f"was done by {before.where} ({_until(before)})"
                text = (
                    f"{after.where} began {_named(told, child)} (step {after.begin}) before {_named(told, task)}, "
                    f"which it waits for, {done}"
                )
                yield Finding("order", text, (after.begin, *(() if before is None else (before.begin,))))


def _twice(told: RunTold) -> Iterator[Finding]:
    """Pieces of tasks that were done more than once."""
    for task, spans in _by_task(told).items():
        pieces = len(told.run.work.steps[task])
        for piece in range(pieces):
            done = [span for span in spans if span.piece == piece]
            if len(done) > 1:
                times = " and ".join(f"by {span.where} (step {span.begin})" for span in done)
                which = f"piece {piece} of {_named(told, task)}" if pieces > 1 else _named(told, task)
                yield Finding("twice", f"{which} was executed {times}", tuple(span.begin for span in done))


def _never(told: RunTold, *, ended: bool) -> Iterator[Finding]:
    """Tasks that were not begun although all that they wait for is done, in a run that did not fail."""
    by_task = _by_task(told)
    work = told.run.work
    for task in range(len(work.steps) if told.run.error is None else 0):
        parents = [number for number, row in enumerate(work.graph.children) if task in row]
        if task in by_task or any(span.end == NEVER for parent in parents for span in by_task.get(parent, ())):
            continue
        if not all(parent in by_task for parent in parents):
            continue
        last = [by_task[parent][-1] for parent in parents]
        done = " and ".join(
            f"{_named(told, parent)} was done by {span.where} ({_until(span)})"
            for parent, span in zip(parents, last, strict=True)
        )
        text = f"{_named(told, task)} was never {'executed' if ended else 'begun'}"
        yield Finding(
            "lost", f"{text}; of those it waits for, {done}" if done else text, tuple(span.begin for span in last)
        )


def _swapped(told: RunTold) -> Iterator[Finding]:
    """Operators that touch the same memory, that nothing orders, and that were not executed in list order."""
    if told.made is None:
        return
    net = told.made.net
    accesses = prepared_accesses(net.graph, net.operators, told.made.preparation.prepared)
    executed = told.executed()
    for number, users in enumerate(accesses.users()):
        for earlier, later in combinations(users, 2):
            first, second = executed.get(net.graph.label(earlier)), executed.get(net.graph.label(later))
            if first is None or second is None or second[0].order[0] > first[0].order[0]:
                continue
            text = (
                f"{_short(told, net.graph.label(later))} on {second[0].where} (step {second[0].begin}) came before "
                f"{_short(told, net.graph.label(earlier))} on {first[0].where} (step {first[0].begin}): nothing orders "
                f"them, and by what they declare both only read {accesses.resources[number].name}; does one write it?"
            )
            yield Finding("swapped", text, (second[0].begin, first[0].begin))


def _by_task(told: RunTold) -> dict[int, list[Span]]:
    by_task: dict[int, list[Span]] = {}
    for span in told.spans:
        if span.task >= 0:
            by_task.setdefault(span.task, []).append(span)
    return by_task


def _named(told: RunTold, task: int) -> str:
    return _short(told, told.name_of(task))


def _short(told: RunTold, label: str) -> str:
    """A label without the net: there is one in most stories."""
    return label.replace(f" of net {told.run.name!r}", "")
