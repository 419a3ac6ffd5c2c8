"""Strategy: who continues at a decision point of a controlled schedule.

A decision is the number of a candidate. Candidate 0 is the thread that has come to the point, if it can go on; the
others follow in the order of their numbers, round from there. So a schedule of zeros has no preemption at all.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.watching import Watch


class Candidate(Protocol):
    """A thread or stream that can go on, or a wait that can be given up."""

    @property
    def name(self) -> str:
        """How traces name it."""

    @property
    def event(self) -> Event:
        """What it does if it is chosen; what that reads and writes is not known yet."""

    def when(self) -> float:
        """Its virtual time in seconds: that of the thread, the start of the stream's next command, or the deadline."""


class Strategy(ABC):
    """Decides. Each schedule needs a new one, or a search that has been advanced.

    Attributes:
        name: the strategy's, for reports.
        seed: what its choices follow from, None where that is no seed.
        timeouts: a deadline may pass although something else could go on; otherwise only when nothing can.
        trace: the steps that were made so far.
        searches: it is asked where there is one candidate, too.
        watch: notes what steps read and write, within `watching()`; None where that is not asked for.
        estimates: it has to `learn` before the schedule begins.
    """

    name: str = ""
    seed: int | None = None
    timeouts: bool = False
    trace: Sequence[Event] = ()
    searches: bool = False
    watch: Watch | None = None
    estimates: bool = False

    def begin(self, trace: Sequence[Event]) -> None:
        """A schedule begins, of which `trace` will have the steps."""
        self.trace = trace

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """The number of one of two or more `candidates`. With `current`, candidate 0 is the thread that asks."""

    def learn(self, trace: Sequence[Event]) -> None:  # noqa: B027
        """What some other schedule does: for estimates of how many steps there are."""

    def end(self, pending: Sequence[Event], failure: BaseException | None) -> None:  # noqa: B027
        """The schedule has ended, when `pending` were the steps that threads had yet to make."""

    def took(self, event: Event) -> None:  # noqa: B027
        """A step is made, chosen or the only one that can be."""


class SampledStrategy(Strategy):
    """One whose choices follow from a seed."""

    def __init__(self, seed: int, *, timeouts: bool = False) -> None:
        self.seed = seed
        self.timeouts = timeouts
        self._random = random.Random(seed)
