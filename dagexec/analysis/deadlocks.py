"""Which thread waits for which in a deadlock, and which one should have woken it.

Held locks form cycles. A gate has to be opened by another thread: which one is seen in a schedule that agrees with this
one up to the moment from which it could only fail, and that does not fail.
"""

from __future__ import annotations

from collections.abc import Iterator

from dagexec.analysis.findings import Finding
from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.exploring import ExploredSchedule
from dagexec.scheduler.exploration.notes import Notes, Waiting

Rescue = tuple[ExploredSchedule[object], Notes]


def deadlock_findings(schedule: ExploredSchedule[object], notes: Notes, rescue: Rescue | None) -> Iterator[Finding]:
    """For a deadlock, a finding for each cycle of threads, and for each thread that waits in vain for a wake-up."""
    waiting = {one.thread: one for one in notes.waiting}
    for circle in _circles(waiting):
        yield _told_circle(schedule.trace, [waiting[name] for name in circle])
    told: list[str] = []
    name: str | None = "main"
    while name in waiting and name not in told:  # what the first thread waits for in the end; others may be idle
        told.append(name)
        one = waiting[name]
        name = _waits_for(one, waiting)
        if name is None and one.event.kind != "join":
            opener = None if rescue is None else _opener(rescue, one)
            if opener is not None and opener[0] not in told:
                name = opener[0]
            yield _told_wait(schedule.trace, one, opener, waiting, told)


def _waits_for(one: Waiting, waiting: dict[str, Waiting]) -> str | None:
    """The thread that has to act before `one` can go on, if it is known and waits itself."""
    target = one.event.resource if one.event.kind == "join" else one.holder
    return target if target in waiting and target != one.thread else None


def _circles(waiting: dict[str, Waiting]) -> Iterator[list[str]]:
    told: set[str] = set()
    for name in waiting:
        path: list[str] = []
        current: str | None = name
        while current is not None and current not in path and current not in told:
            path.append(current)
            current = _waits_for(waiting[current], waiting)
        if current in path:
            yield path[path.index(current) :]
        told.update(path)


def _told_circle(trace: tuple[Event, ...], circle: list[Waiting]) -> Finding:
    parts, steps = [], []
    for one in circle:
        since = _last(trace, one.holder, "acquire", one.event.resource)
        held = f", which {one.holder} holds since step {since}" if since >= 0 else ""
        parts.append(f"{one.thread} waits for {one.event.resource} at {one.place}{held}")
        steps.append(since if since >= 0 else _last(trace, one.thread))
    return Finding("deadlock", f"a circle: {'; '.join(parts)}", tuple(steps))


def _told_wait(
    trace: tuple[Event, ...],
    one: Waiting,
    opener: tuple[str, str] | None,
    waiting: dict[str, Waiting],
    told: list[str],
) -> Finding:
    since = _last(trace, one.thread)
    if one.event.kind == "advance":
        return Finding("deadlock", f"{one.thread} has nothing that it could do{_after(since)}", (since,))
    text = f"{one.thread} waits for {one.event.resource} at {one.place}{_after(since)}"
    if opener is None or opener[0] in told:
        return Finding("deadlock", f"{text}, and nobody lets it go on", (since,))
    who, place = opener
    last = _last(trace, who)
    then = "waits itself" if who in waiting else "has ended"
    text += f"; where the schedule does not fail, {who} lets it go on at {place}, but here it {then}{_after(last)}"
    return Finding("deadlock", text, (since, last))


def _after(step: int) -> str:
    return f" after step {step}" if step >= 0 else " from the start"


def _opener(rescue: Rescue, one: Waiting) -> tuple[str, str] | None:
    """The thread, and its place, that last released what `one` waits for in a schedule that did not fail."""
    schedule, notes = rescue
    for number in reversed(range(len(schedule.trace))):
        event = schedule.trace[number]
        if event.kind in ("release", "wake") and event.resource == one.event.resource and event.thread != one.thread:
            return event.thread, notes.places[number]
    return None


def _last(trace: tuple[Event, ...], thread: str, kind: str = "", resource: str = "") -> int:
    """The number of the last step of a thread, of a kind and with a resource if given; -1 if there is none."""
    for number in reversed(range(len(trace))):
        event = trace[number]
        if event.thread == thread and kind in ("", event.kind) and resource in ("", event.resource):
            return number
    return -1
