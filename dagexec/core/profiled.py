"""A step that can say where its time went: that of an operator which another runtime computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class StepPart:
    """A part of what a step did. Times are nanoseconds of `time.perf_counter_ns`."""

    label: str
    start: int
    end: int


Profiled = Callable[[], Sequence[StepPart]]
"""Runs a step once, and says what its parts took, in the order in which they began."""


class ProfiledStep:
    """A step, and a way to run it that tells of its parts.

    Attributes:
        step: runs it.
        profiling: makes what runs it once and tells of its parts. That may take much longer than a run, which is then
            not slowed down by it.
    """

    __slots__ = ("profiling", "step")

    def __init__(self, step: Callable[[], object], profiling: Callable[[], Profiled]) -> None:
        self.step = step
        self.profiling = profiling

    def __call__(self) -> None:
        """Run it."""
        self.step()
