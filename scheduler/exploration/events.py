"""Event: what a thread of a controlled schedule does in one step, from one decision point to the next."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["begin", "acquire", "try", "release", "start", "join", "wait", "wake", "advance", "timeout", "point"]
"""What a step begins with. One that begins with `release` is what follows it: another thread may go on before."""

_NOTHING: frozenset[str] = frozenset()
_PHRASES = {"try": "try to acquire", "wait": "wait for", "advance": "go on with", "timeout": "timeout of"}


class Event(NamedTuple):
    """One step, made or to be made.

    Attributes:
        thread: whose it is; that of a timer or stream is named after it.
        kind: what the step begins with.
        resource: of that: a lock or gate by its number and the place that made it, a thread, stream or timer.
        reads: what it read of the state that threads share, by name; only of steps made, in schedules that observe it.
        writes: what it changed of it.
        merges: sets and lists of which it only put in or took out elements; those are in `writes`, so that two such
            steps can be swapped.
        keeps: locks that it took and did not let go.
    """

    thread: str
    kind: Kind
    resource: str = ""
    reads: frozenset[str] = _NOTHING
    writes: frozenset[str] = _NOTHING
    merges: frozenset[str] = _NOTHING
    keeps: frozenset[str] = _NOTHING

    def __str__(self) -> str:
        """What is done, without who does it."""
        if self.kind == "point":
            return self.resource
        return f"{_PHRASES.get(self.kind, self.kind)} {self.resource}".removesuffix(" of ").strip()
