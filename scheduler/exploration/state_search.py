"""Every state of a model of a decider, breadth-first: no state is wrong and none is a dead end.

A run of a net has few states and many orders: what its chains did before is forgotten when they have ended. So states
are kept and each is examined once, which suits deciders (machines, queues, rosters); `strategies` tries schedules of
real threads, whose states cannot be compared. Breadth-first search makes the path to a fault a shortest one.

States that differ only in names (which of several equal workers) count as one: `Model.canonical` gives it (Ip, Dill:
Better verification through symmetry, CHDL 1993). Each state is kept with the state before it, without the event; events
are recovered where a path is told, with names that stay the same along it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass

State = TypeVar("State", bound=Hashable)

_COLLECT_EVERY = 10_000
"""States between garbage collections: all are kept, so searching them for garbage more often takes 40% longer."""


class ModelFault(Exception):  # noqa: N818 - no error of dagexec: it is what a search is for
    """Raised by `Model.steps`: the event of that `label` does what it must not, as the text says."""

    def __init__(self, text: str, label: str = "") -> None:
        super().__init__(text)
        self.label = label


class Model(Protocol[State]):
    """What can happen, as states and events. States are immutable, and equal ones have the same future."""

    def begin(self) -> Iterable[State]:
        """The states that it may begin in. May raise ModelFault."""

    def steps(self, state: State) -> Iterable[tuple[str, State]]:
        """The possible next events: the label of each, and the state after it. May raise ModelFault."""

    def fault(self, state: State) -> str | None:
        """What is wrong with a state; None if nothing is."""

    def is_end(self, state: State) -> bool:
        """True where it is right that nothing more happens."""

    def canonical(self, state: State) -> State:
        """The representative of all states that are symmetric to `state`; `state` itself where there is no symmetry."""


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        states: how many, symmetric ones counted once.
        transitions: how many events led to them.
        depth: all paths of so many events were examined.
        waiting: states whose successors were not examined.
        exhausted: there is nothing else to examine; never with a fault.
        fault: what went wrong; None if nothing did.
        path: the labels of the fewest events that lead there.
        seconds: of the search.
    """

    states: int
    transitions: int
    depth: int
    waiting: int
    exhausted: bool
    fault: str | None
    path: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """True when all states were examined and nothing is wrong."""
        return self.exhausted and self.fault is None


def search(
    model: Model[State], *, seconds: float | None = None, most: int | None = None, must_end: bool = False
) -> SearchResult:
    """Examine every state, up to the first fault, for some `seconds` or until there are `most` states.

    With `must_end`, it is also a fault if no end can be reached from a state and events go on for ever. That is checked
    once all states were examined, and takes the memory of all transitions.
    Raises DagexecError where `model` does not repeat itself, or its symmetry is wrong.
    """
    with _seldom_collecting():
        return _Search(model, seconds, most, must_end=must_end).run()


@contextmanager
def _seldom_collecting() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@dataclass
class _FaultError(Exception):
    """What went wrong, and the events that lead there; ends the search."""

    fault: str
    path: tuple[str, ...]


class _Search(Generic[State]):
    def __init__(self, model: Model[State], seconds: float | None, most: int | None, *, must_end: bool) -> None:
        self._model = model
        self._most = most
        self._began = time.perf_counter()
        self._until = None if seconds is None else self._began + seconds
        self._before: dict[State, State | None] = {}  # the state from which each one was seen first
        self._transitions = 0
        self._looked_at = 0
        self._ends: list[State] = []
        self._leading: dict[State, list[State]] | None = {} if must_end else None  # to each state, those before it

    def run(self) -> SearchResult:
        level: list[State] = []
        depth = done = 0
        following: list[State] = []
        try:
            for state in self._model.begin():
                self._see(self._model.canonical(state), None, level)
            while level:
                following = []
                for done, state in enumerate(level):
                    if self._is_spent():
                        return self._result(depth, len(level) - done + len(following))
                    self._expand(state, following)
                level = following
                depth += bool(level)
            self._check_ends()
        except ModelFault as error:
            return self._result(0, len(level), _FaultError(str(error), (error.label,)))
        except _FaultError as found:
            return self._result(depth, len(level) - done + len(following), found)
        return self._result(depth, 0)

    def _expand(self, state: State, following: list[State]) -> None:
        stuck = True
        self._looked_at += 1
        if self._looked_at % _COLLECT_EVERY == 0:
            gc.collect(0)  # objects made since then
        try:
            for _, after in self._model.steps(state):
                stuck = False
                self._transitions += 1
                canonical = self._model.canonical(after)
                self._see(canonical, state, following)
                if self._leading is not None:
                    self._leading.setdefault(canonical, []).append(state)
        except ModelFault as error:
            labels, here = self._path(state)
            raise self._raised(labels, here, error) from None
        if stuck and self._model.is_end(state):
            self._ends.append(state)
        elif stuck:
            labels, _ = self._path(state)
            raise _FaultError("nothing can happen any more, and it is not the end", labels)

    def _check_ends(self) -> None:
        """Check that an end can be reached from every state."""
        if self._leading is None:
            return
        leading, reached = list(self._ends), set(self._ends)
        while leading:
            for state in self._leading.get(leading.pop(), ()):
                if state not in reached:
                    reached.add(state)
                    leading.append(state)
        lost = [state for state in self._before if state not in reached]
        if lost:
            raise _FaultError("things happen for ever, and none leads to an end", self._path(lost[-1])[0])

    def _see(self, canonical: State, before: State | None, level: list[State]) -> None:
        """Add a canonical state to `level`, if it is new."""
        if canonical in self._before:
            return
        self._before[canonical] = before
        level.append(canonical)
        if (fault := self._model.fault(canonical)) is not None:
            labels, here = self._path(canonical)
            raise _FaultError(self._model.fault(here) or fault, labels)

    def _is_spent(self) -> bool:
        if self._most is not None and len(self._before) >= self._most:
            return True
        return self._until is not None and time.perf_counter() >= self._until

    def _path(self, state: State) -> tuple[tuple[str, ...], State]:
        """The labels from the beginning to a state symmetric to `state`, and that state."""
        states = [state]
        while (before := self._before[states[-1]]) is not None:
            states.append(before)
        here = self._symmetric(states.pop(), (("", first) for first in self._model.begin()), ())[1]
        labels: tuple[str, ...] = ()
        while states:
            label, here = self._symmetric(states.pop(), self._model.steps(here), labels)
            labels += (label,)
        return labels, here

    def _symmetric(self, target: State, steps: Iterable[tuple[str, State]], labels: Sequence[str]) -> tuple[str, State]:
        """The one of `steps` that leads to a state symmetric to `target`."""
        for label, state in steps:
            if self._model.canonical(state) == target:
                return label, state
        raise DagexecError(
            f"the model cannot be searched: it does not repeat itself, or symmetric states of it have another future; "
            f"after {len(labels)} events ({', '.join(labels) or 'none'})"
        )

    def _raised(self, labels: tuple[str, ...], state: State, error: ModelFault) -> _FaultError:
        """The fault that an event after `state` raises; after a symmetric state it was `error`."""
        try:
            for _ in self._model.steps(state):
                pass
        except ModelFault as named:
            error = named
        return _FaultError(str(error), (*labels, *([error.label] if error.label else [])))

    def _result(self, depth: int, waiting: int, error: _FaultError | None = None) -> SearchResult:
        seconds = time.perf_counter() - self._began
        fault, path = (None, ()) if error is None else (error.fault, error.path)
        exhausted = not waiting and error is None
        return SearchResult(len(self._before), self._transitions, depth, waiting, exhausted, fault, path, seconds)
