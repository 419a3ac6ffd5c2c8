"""Timelines: when each of the runs of a request of a server waited, was fed, ran and was fetched.

A server puts a `Timeline` into the context in which it calls an executor; the dispatcher adds the runs of that call.
"""

from __future__ import annotations

from contextvars import ContextVar

MOST_RUNS = 200
"""A timeline keeps so many; of a long text, those of its first tokens."""


TimedRun = tuple[float, float, float | None, float | None, float, int, str]
"""A run on a replica, in times of the dispatcher's clock; plain, as there is one for each request.

When it was asked for; when it got a replica, or ended without one; when that was fed, and when its last step was over,
None where it did not come to that; when it ended. Then the rows of the run, those of other requests included that it
was joined with, and the name of the thread that ended it.
"""


class Timeline:
    """The runs of one request, in the order of their ends.

    Attributes:
        runs: the first ones.
        more: how many followed.
    """

    __slots__ = ("more", "runs")

    def __init__(self) -> None:
        self.runs: list[TimedRun] = []
        self.more = 0

    def add(self, run: TimedRun) -> None:
        """Called by the thread that ends the run, before the caller is told of that."""
        if len(self.runs) < MOST_RUNS:
            self.runs.append(run)
        else:
            self.more += 1


current_timeline: ContextVar[Timeline | None] = ContextVar("current_timeline", default=None)
"""That of the request which the calling task serves."""
