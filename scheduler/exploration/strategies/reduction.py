"""Reduction: of schedules that differ only in the order of independent steps, one is run.

Source sets ("Optimal Dynamic Partial Order Reduction", Abdulla, Aronis, Jonsson and Sagonas, POPL 2014) say which
threads to try at a node of the tree of schedules: races of those that were run show what else has to come first. Sleep
sets (Godefroid, "Partial-Order Methods for the Verification of Concurrent Systems", 1996) keep what was tried from
being tried again behind a step that it can be swapped with. A step begins at a decision point, so that a critical
section is one, and two of a lock are independent unless one changes what the other touches (LAPOR, OOPSLA 2019).

A scenario may say from where on schedules are searched (`BEGIN`): before, there is one order.

Where a deadline may pass although something else could go on, everything is tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dagexec.errors import DagexecError, DeadlockError
from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.races import Step, conflict, reversals
from dagexec.scheduler.exploration.strategies.strategy import Candidate, Strategy
from dagexec.scheduler.exploration.watching import Watch

Sleep = Mapping[str, Event]
"""Candidates that need not be tried now, with the step that each would make."""

TIMEOUT = " (timeout)"

BEGIN = "begin what is searched"
"""A point up to which schedules are all alike."""


class CutError(DagexecError):
    """A schedule is given up: what is left of it was run in another order."""


class PathStrategy(Strategy):
    """Follows a path, and then goes on with the first candidate who is not asleep.

    Attributes:
        path: names of candidates to choose first.
        asleep: who need not be tried in place of the path's last, with the step that each would make.
        pending: when the schedule has ended, the steps that threads had yet to make; none if it was given up.
        ends_all: it has ended although threads could go on.
    """

    name = "reduction"
    searches = True

    def __init__(self, path: Sequence[str], asleep: Sleep, *, race_free: bool = False, timeouts: bool = False) -> None:
        self.path = path
        self.asleep = asleep
        self.timeouts = timeouts
        self.watch = Watch(race_free=race_free)
        self.pending: Sequence[Event] = ()
        self.ends_all = False
        self._awake_but = asleep
        self._made: list[tuple[str, tuple[str, ...]]] = []

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """Raises CutError where everybody is asleep, DagexecError where the scenario does not repeat itself."""
        names = tuple(candidate.name for candidate in candidates)
        position = len(self._made)
        if position < len(self.path):
            if self.path[position] not in names:
                raise DagexecError(
                    f"the scenario cannot be searched: at step {position} {self.path[position]} could go on before, "
                    f"and now only {', '.join(names)}; it depends on something other than its schedule"
                )
            choice = names.index(self.path[position])
        else:
            if position:
                self._awake_but = _still_asleep(self._awake_but, self.trace[-1])
            choice = next((number for number, name in enumerate(names) if name not in self._awake_but), -1)
            if choice < 0:
                raise CutError("all who can go on are asleep")
        self._made.append((names[choice], names))
        return choice

    def end(self, pending: Sequence[Event], failure: BaseException | None) -> None:
        """Note what was left."""
        if not isinstance(failure, CutError):
            self.pending = pending
            self.ends_all = not isinstance(failure, DeadlockError)

    def steps(self) -> tuple[Step, ...]:
        """Those that were made."""
        return tuple(Step(who, event, names) for (who, names), event in zip(self._made, self.trace, strict=True))


class _Node:
    """A place in the schedule that was run last.

    Attributes:
        enabled: who could go on there.
        asleep: who need not be tried.
        tried: who was, with the step that was made.
        to_try: who has to be.
    """

    __slots__ = ("asleep", "enabled", "to_try", "tried")

    def __init__(self, enabled: tuple[str, ...], asleep: Sleep) -> None:
        self.enabled = enabled
        self.asleep = asleep
        self.tried: dict[str, Event] = {}
        self.to_try: set[str] = set()


class Reduction:
    """The tree of schedules, depth first: what has yet to be tried at the places of the one that was run last.

    Attributes:
        exhausted: nothing has.
    """

    def __init__(self, *, race_free: bool = False, timeouts: bool = False) -> None:
        self.exhausted = False
        self._race_free = race_free
        self._timeouts = timeouts
        self._nodes: list[_Node] = []
        self._path: list[str] = []

    def strategies(self) -> Iterator[PathStrategy]:
        """For one schedule after the other, each to be run before the next is asked for."""
        path: tuple[str, ...] = ()
        asleep: Sleep = {}
        while True:
            strategy = PathStrategy(path, asleep, race_free=self._race_free, timeouts=self._timeouts)
            yield strategy
            self._add(strategy)
            while self._nodes and not self._left():
                self._nodes.pop()
            if not self._nodes:
                self.exhausted = True
                return
            node = self._nodes[-1]
            path = (*self._path[: len(self._nodes) - 1], min(self._left(), key=node.enabled.index))
            asleep = {**node.asleep, **node.tried}

    def _left(self) -> set[str]:
        """Who has yet to be tried at the last place."""
        node = self._nodes[-1]
        return node.to_try - node.tried.keys() - node.asleep.keys()

    def _add(self, strategy: PathStrategy) -> None:
        """A schedule was run."""
        steps, asleep = strategy.steps(), strategy.asleep
        for position in range(max(0, len(strategy.path) - 1), len(steps)):
            who, event, enabled = steps[position]
            if position == len(self._nodes):
                self._nodes.append(_Node(enabled, asleep))
            node = self._nodes[position]
            node.tried[who] = event
            if any(name.endswith(TIMEOUT) for name in enabled):
                node.to_try.update(enabled)
            asleep = _still_asleep(asleep, event)
        self._path = [step.who for step in steps]
        if strategy.ends_all and steps:  # what others had yet to do is not known, so let them do it before
            self._nodes[-1].to_try.update(steps[-1].enabled)
        begin = next((at for at, step in enumerate(steps) if step.event[1:3] == ("point", BEGIN)), -1)
        for position, initials in reversals(steps, strategy.pending):
            node = self._nodes[position]
            if position > begin and initials.isdisjoint({*node.to_try, *node.tried, *node.asleep}):
                node.to_try.add(min(initials, key=node.enabled.index))


def _still_asleep(asleep: Sleep, event: Event) -> Sleep:
    """Who is asleep after a step, too."""
    return {who: step for who, step in asleep.items() if not conflict(step, event)}
