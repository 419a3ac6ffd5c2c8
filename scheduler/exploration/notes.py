"""Notes: what is written down of a schedule whose story is to be told."""

from __future__ import annotations

from dataclasses import field
from typing import NamedTuple

from dagexec.platform.records import dataclass
from dagexec.scheduler.exploration.events import Event


class Waiting(NamedTuple):
    """A thread that could not go on in a deadlock.

    Attributes:
        thread: its name.
        event: what it would have done next.
        holder: the holder of the lock that it waits for, empty for none; of a gate, the thread that closed it.
        place: where it waits in the code.
    """

    thread: str
    event: Event
    holder: str
    place: str

    def __str__(self) -> str:
        waits = str(self.event)
        if self.event.kind == "acquire":
            waits = f"{self.event.resource}, held by {self.holder or 'nobody'}"
        return f"{self.thread} waits for {waits}, at {self.place}"


@dataclass
class Notes:
    """What is noted beside the steps of a schedule.

    Attributes:
        places: for each step, where its thread came to the decision point before it; empty for a start.
        acts: what threads say that they do (`Threads.note`): number of the step, name of the thread, and what.
        waiting: in a deadlock, the threads that wait.
    """

    places: list[str] = field(default_factory=list)
    acts: list[tuple[int, str, object]] = field(default_factory=list)
    waiting: tuple[Waiting, ...] = ()
