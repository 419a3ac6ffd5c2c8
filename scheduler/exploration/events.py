"""Event: what a thread of a controlled schedule does in one step, from one decision point to the next."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["begin", "acquire", "try", "release", "start", "join", "wait", "wake", "advance", "timeout", "point"]
"""What a step begins with. A step that begins with `release` is what follows it: another thread may go on before."""

_NOTHING: frozenset[str] = frozenset()
_PHRASES = {"try": "try to acquire", "wait": "wait for", "advance": "go on with", "timeout": "timeout of"}


class Event(NamedTuple):
    """One step, made or to be made.

    Attributes:
        thread: the thread that makes it; that of a timer or stream is named after it.
        kind: what the step begins with.
        resource: of that: a lock or gate by its number and the place that made it, a thread, stream or timer.
        reads: the names of shared state that it read; only of past steps, in schedules that observe it.
        writes: the names of shared state that it changed.
        merges: sets and lists that it only added elements to or removed them from. `writes` has these elements, so two
            such steps can be swapped.
        keeps: locks that it took and did not release.
    """

    thread: str
    kind: Kind
    resource: str = ""
    reads: frozenset[str] = _NOTHING
    writes: frozenset[str] = _NOTHING
    merges: frozenset[str] = _NOTHING
    keeps: frozenset[str] = _NOTHING

    def __str__(self) -> str:
        """The action, without the thread."""
        if self.kind == "point":
            return self.resource
        return f"{_PHRASES.get(self.kind, self.kind)} {self.resource}".removesuffix(" of ").strip()
