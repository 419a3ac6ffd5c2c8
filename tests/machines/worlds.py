"""Models of worlds around a machine: what may happen is done to copies of the machine itself.

So nothing of a machine is written down a second time. Two states are one when the keys of their worlds are equal.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from dagexec.scheduler.exploration.state_search import ModelFault, SearchResult, search

Event = tuple[Hashable, ...]


class World(Protocol):
    """A machine, and the little world around it that has events happen. It can be pickled."""

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
    """A state of a world."""

    key: Hashable
    world: bytes = field(compare=False)
    is_over: bool = field(compare=False)


class Worlds:
    """A model of the worlds that `new` makes."""

    def __init__(self, new: Callable[[], World]) -> None:
        self._new = new

    def begin(self) -> Iterable[Reached]:
        yield _reached(self._new())

    def steps(self, state: Reached) -> Iterable[tuple[str, Reached]]:
        for event in list(_copy(state).events()):
            world, label = _copy(state), " ".join(map(str, event))
            try:
                world.do(event)
                fault = world.fault()  # here, as a wrong state may have the key of a right one
            except ModelFault as error:
                raise ModelFault(str(error), label) from None
            except Exception as error:
                raise ModelFault(f"the machine fails: {type(error).__name__}: {error}", label) from error
            if fault is not None:
                raise ModelFault(fault, label)
            yield label, _reached(world)

    def fault(self, state: Reached) -> str | None:
        return None  # `steps` has looked

    def is_end(self, state: Reached) -> bool:
        return state.is_over

    def canonical(self, state: Reached) -> Reached:
        return state


def _reached(world: World) -> Reached:
    return Reached(world.key(), pickle.dumps(world, protocol=5), world.is_over())


def _copy(state: Reached) -> World:
    world: World = pickle.loads(state.world)
    return world


def with_other_futures(new: Callable[[], World], most: int) -> list[Hashable]:
    """Keys that were reached twice and after which not the same may follow: they leave something out."""
    model = Worlds(new)
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
            elif first.world != state.world and following(first) != following(state):
                differ.append(state.key)
    return differ


def searched(new: Callable[[], World], *, seconds: float | None = None, most: int | None = None) -> SearchResult:
    """Every state of the worlds that `new` makes."""
    return search(Worlds(new), seconds=seconds, most=most)
