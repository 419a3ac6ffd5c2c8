"""Races of a schedule that was run: which of its steps could have been made in the other order, and how.

Two steps of two threads race if they conflict and nothing else makes one wait for the other. A race is reversible if
the second step is possible without the first. It is not if it takes a lock that the first releases; then the step that
took the lock is looked at instead.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dagexec.scheduler.exploration.events import Event


class Step(NamedTuple):
    """A step that was made.

    Attributes:
        who: the chosen candidate: a thread, or "NAME (timeout)".
        event: what it did.
        enabled: all candidates.
    """

    who: str
    event: Event
    enabled: tuple[str, ...]


class Reversal(NamedTuple):
    """What to try to reverse a race.

    Attributes:
        position: of the step before which something else could be made.
        initials: the candidates of which one has to be tried there.
    """

    position: int
    initials: frozenset[str]


def conflict(first: Event, second: Event) -> bool:
    """False if the steps can be swapped wherever both are possible."""
    if first.thread == second.thread or "timeout" in (first.kind, second.kind):
        return True
    return (
        not first.writes.isdisjoint(second.writes | second.merges | second.reads)
        or not first.merges.isdisjoint(second.writes | second.reads)
        or not first.reads.isdisjoint(second.writes | second.merges)
    )


def reversals(steps: Sequence[Step], pending: Sequence[Event]) -> Iterator[Reversal]:
    """The reversals of all races among `steps`, and of theirs with `pending` steps, as far as these are known."""
    trail = _Trail()
    for step in steps:
        yield from trail.races(step.event)
        trail.append(step)
    for event in pending:
        resource = f"thread {event.resource}" if event.kind == "join" else event.resource
        yield from trail.races(event._replace(reads=frozenset([resource])))


class _Trail:
    """Steps, each with the set of steps that happen before it: positions, as bits of a number."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._before: list[int] = []
        self._last: dict[str, int] = {}  # of each thread
        self._accesses: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)  # of each field

    def append(self, step: Step) -> None:
        """The next step."""
        position, event = len(self._steps), step.event
        before = self._known(event.thread)
        others = range(position) if event.kind == "timeout" else self._conflicts(event)
        for other in others:
            before |= self._before[other] | 1 << other
        self._steps.append(step)
        self._before.append(before)
        self._last[event.thread] = position
        for how, fields in _accesses(event):
            for field in fields:
                self._accesses[field].append((position, how))

    def races(self, event: Event) -> Iterator[Reversal]:
        """The races of `event`, which comes next or could, with the steps so far."""
        if event.kind == "timeout":
            return  # where a deadline may pass before other steps, all is tried
        earlier = self._known(event.thread)
        for other in sorted(self._conflicts(event), reverse=True):
            if earlier >> other & 1:
                continue
            reversal = self._reversal(other, event, earlier)
            if reversal is not None:
                earlier |= self._before[other]  # what happens before it is no race
                yield reversal

    def _known(self, thread: str) -> int:
        """The steps that happen before whatever a thread does next."""
        last = self._last.get(thread)
        if last is None:  # the step that started it
            last = next(
                (position for position, how in self._accesses.get(f"thread {thread}", ()) if how == "write"), None
            )
        return 0 if last is None else self._before[last] | 1 << last

    def _conflicts(self, event: Event) -> set[int]:
        """The steps of other threads that cannot be swapped with it."""
        positions = {position for position, step in enumerate(self._steps) if step.event.kind == "timeout"}
        for how, fields in _accesses(event):
            for field in fields:
                for position, how_before in self._accesses.get(field, ()):
                    if how == "write" or how != how_before:
                        positions.add(position)
        return positions

    def _reversal(self, position: int, event: Event, earlier: int) -> Reversal | None:
        """How `event` can precede the step at `position`; None if it cannot."""
        first = self._steps[position]
        if first.event.kind == "timeout":
            return None
        rest = [other for other in range(position + 1, len(self._steps)) if not self._before[other] >> position & 1]
        if not self._can_be_made(event, position, rest):
            return None
        within = sum(1 << other for other in rest)
        initials = {self._steps[other].who for other in rest if not self._before[other] & within}
        needs = earlier | sum(1 << other for other in self._conflicts(event))
        if not needs & within and event.thread in first.enabled:
            initials.add(event.thread)
        return Reversal(position, frozenset(initials)) if initials else None

    def _can_be_made(self, event: Event, position: int, rest: Sequence[int]) -> bool:
        """False if it waits for something that the steps before `position` and those of `rest` do not bring about."""
        events = [self._steps[other].event for other in (*range(position), *rest)]
        if event.kind == "acquire":
            last = next((step for step in reversed(events) if event.resource in step.writes), None)
            return last is None or event.resource not in last.keeps
        if event.kind == "join":
            return any(step.thread == event.resource and f"thread {event.resource}" in step.writes for step in events)
        return True


def _accesses(event: Event) -> tuple[tuple[str, frozenset[str]], ...]:
    return ("read", event.reads), ("merge", event.merges), ("write", event.writes)
