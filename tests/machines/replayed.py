"""Models whose states are reached by calling the machine itself: a state is the events that lead there.

So nothing of a machine is written down a second time, and nothing has to be copied. Two states are one when the keys
of their worlds are equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from dagexec.scheduler.exploration.state_search import ModelFault, SearchResult, search

Event = tuple[Hashable, ...]


class World(Protocol):
    """A machine, and the little world around it that has events happen."""

    def events(self) -> Iterable[Event]:
        """What may happen next."""

    def do(self, event: Event) -> None:
        """It happens. Raises ModelFault where something does that must not."""

    def fault(self) -> str | None:
        """What is wrong now, if something is."""

    def is_over(self) -> bool:
        """It is right that nothing happens any more."""

    def key(self) -> Hashable:
        """All that what comes next depends on, the same for symmetric worlds."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A state of a world: the first events that led there."""

    key: Hashable
    path: tuple[Event, ...] = field(compare=False)
    is_over: bool = field(compare=False)


class Replayed:
    """A model of the worlds that `new` makes."""

    def __init__(self, new: Callable[[], World]) -> None:
        self._new = new

    def begin(self) -> Iterable[Reached]:
        yield self._reached(self._new(), ())

    def steps(self, state: Reached) -> Iterable[tuple[str, Reached]]:
        for event in list(self._at(state.path).events()):
            label = " ".join(map(str, event))
            world = self._at(state.path)
            try:
                world.do(event)
            except ModelFault as error:
                raise ModelFault(str(error), label) from None
            except Exception as error:
                raise ModelFault(f"the machine fails: {type(error).__name__}: {error}", label) from error
            if (fault := world.fault()) is not None:  # here, as a wrong state may have the key of a right one
                raise ModelFault(fault, label)
            yield label, self._reached(world, (*state.path, event))

    def fault(self, state: Reached) -> str | None:
        return None  # `steps` has looked

    def is_end(self, state: Reached) -> bool:
        return state.is_over

    def canonical(self, state: Reached) -> Reached:
        return state

    def _at(self, path: Iterable[Event]) -> World:
        world = self._new()
        for event in path:
            world.do(event)
        return world

    def _reached(self, world: World, path: tuple[Event, ...]) -> Reached:
        return Reached(world.key(), path, world.is_over())


def with_other_futures(new: Callable[[], World], most: int) -> list[tuple[tuple[Event, ...], tuple[Event, ...]]]:
    """Pairs of histories with equal keys after which not the same may follow: what a key leaves out."""
    model = Replayed(new)
    level = list(model.begin())
    seen = {state: state for state in level}
    differ = []

    def following(state: Reached) -> Counter[Reached]:
        return Counter(after for _, after in model.steps(state))

    while level and len(seen) < most:
        after = [one for state in level for _, one in model.steps(state)]
        level = []
        for state in after:
            first = seen.setdefault(state, state)
            if first is state:
                level.append(state)
            elif first.path != state.path and following(first) != following(state):
                differ.append((first.path, state.path))
    return differ


def searched(new: Callable[[], World], **limits: float) -> SearchResult:
    """Every state of the worlds that `new` makes."""
    return search(Replayed(new), **limits)  # type: ignore[arg-type]
