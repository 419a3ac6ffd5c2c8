"""Which replica gets the next request: routers without transport, the same in a deployment and in its simulation.

A router knows the replicas only by names of the caller's, and the requests only as counts: those that it sent to a
replica and that are not answered yet. Its owner calls it from one thread, or under a lock of its own.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from dagexec.errors import SettingError

Replica = TypeVar("Replica", bound=Hashable)


class Router(ABC, Generic[Replica]):
    """Counts the outstanding requests of each replica, of which there are at most `max_outstanding`; None: any number.

    All operations take constant time, but for those said to look at each replica.
    """

    def __init__(self, replicas: Iterable[Replica] = (), max_outstanding: int | None = None) -> None:
        if max_outstanding is not None and max_outstanding < 1:
            raise SettingError(f"max_outstanding is at least 1, found {max_outstanding}")
        self.max_outstanding = max_outstanding
        self._outstanding: dict[Replica, int] = {}
        for replica in replicas:
            self.add(replica)

    def acquire(self) -> Replica | None:
        """The replica for a request, which is outstanding from now on; None if no replica may have more."""
        replica = self._choose()
        if replica is not None:
            self._outstanding[replica] += 1
            self._moved(replica)
        return replica

    def release(self, replica: Replica) -> None:
        """A request of `replica` is answered, or given up. Nothing happens if the replica was removed meanwhile."""
        if replica in self._outstanding:
            if not self._outstanding[replica]:
                raise ValueError(f"replica {replica!r} has no outstanding request to release")
            self._outstanding[replica] -= 1
            self._moved(replica)

    def add(self, replica: Replica) -> None:
        """Requests may be sent to `replica` from now on."""
        if replica in self._outstanding:
            raise ValueError(f"replica {replica!r} is there already")
        self._outstanding[replica] = 0
        self._added(replica)

    def remove(self, replica: Replica) -> None:
        """No request is sent to `replica` any more; those that are outstanding are no longer counted."""
        self._removed(replica)
        del self._outstanding[replica]

    def outstanding(self, replica: Replica) -> int:
        """Requests that were sent to `replica` and not released."""
        return self._outstanding[replica]

    def __len__(self) -> int:
        return len(self._outstanding)

    def __contains__(self, replica: object) -> bool:
        return replica in self._outstanding

    def _is_full(self, replica: Replica) -> bool:
        return self.max_outstanding is not None and self._outstanding[replica] >= self.max_outstanding

    @abstractmethod
    def _choose(self) -> Replica | None:
        """The replica for the next request, not full; None without one."""

    @abstractmethod
    def _added(self, replica: Replica) -> None:
        """`replica` is there, with no outstanding request."""

    @abstractmethod
    def _removed(self, replica: Replica) -> None:
        """`replica` is about to be forgotten."""

    def _moved(self, replica: Replica) -> None:
        """The count of `replica` is another one."""


class LeastOutstanding(Router[Replica]):
    """The replica with the fewest outstanding requests; of several, the one whose count has stood for the longest.

    With equal speeds that is joining the shortest queue, which is optimal if times are exponential and nothing is
    known of them (Winston 1977). The rule follows from counts alone, so a run of it can be replayed.
    """

    def __init__(self, replicas: Iterable[Replica] = (), max_outstanding: int | None = None) -> None:
        self._by_count: list[OrderedDict[Replica, None]] = [OrderedDict()]
        self._count: dict[Replica, int] = {}  # in which of them a replica is
        self._least = 0  # no replica has fewer
        super().__init__(replicas, max_outstanding)

    def turn(self, replica: Replica) -> tuple[int, int] | None:
        """When it is its turn: its count, and how many with this count go before it. None when it is not there."""
        count = self._count.get(replica)
        return None if count is None else (count, list(self._by_count[count]).index(replica))

    def _choose(self) -> Replica | None:
        if not self._count:
            return None
        while not self._by_count[self._least]:
            self._least += 1
        if self.max_outstanding is not None and self._least >= self.max_outstanding:
            return None
        return next(iter(self._by_count[self._least]))

    def _added(self, replica: Replica) -> None:
        self._count[replica] = 0
        self._by_count[0][replica] = None
        self._least = 0

    def _removed(self, replica: Replica) -> None:
        del self._by_count[self._count.pop(replica)][replica]

    def _moved(self, replica: Replica) -> None:
        count = self._outstanding[replica]
        del self._by_count[self._count[replica]][replica]
        self._count[replica] = count
        if count == len(self._by_count):
            self._by_count.append(OrderedDict())
        self._by_count[count][replica] = None
        self._least = min(self._least, count)


class RoundRobin(Router[Replica]):
    """One replica after another, whatever each has to do; full ones are passed over."""

    def __init__(self, replicas: Iterable[Replica] = (), max_outstanding: int | None = None) -> None:
        self._turns: deque[Replica] = deque()
        super().__init__(replicas, max_outstanding)

    def _choose(self) -> Replica | None:
        for _ in range(len(self._turns)):
            self._turns.rotate(-1)
            if not self._is_full(self._turns[-1]):
                return self._turns[-1]
        return None

    def _added(self, replica: Replica) -> None:
        self._turns.append(replica)

    def _removed(self, replica: Replica) -> None:
        self._turns.remove(replica)


class RandomChoice(Router[Replica]):
    """Any replica that is not full, each as likely as the others; looks at each of them only if it meets a full one."""

    def __init__(
        self, replicas: Iterable[Replica] = (), max_outstanding: int | None = None, seed: int | None = None
    ) -> None:
        self._random = random.Random(seed)
        self._replicas: list[Replica] = []
        super().__init__(replicas, max_outstanding)

    def _choose(self) -> Replica | None:
        if not self._replicas:
            return None
        chosen = self._replicas[int(self._random.random() * len(self._replicas))]
        if not self._is_full(chosen):
            return chosen
        free = [replica for replica in self._replicas if not self._is_full(replica)]
        return self._random.choice(free) if free else None

    def _added(self, replica: Replica) -> None:
        self._replicas.append(replica)

    def _removed(self, replica: Replica) -> None:
        self._replicas.remove(replica)


Routing = Callable[[Iterable[int], int | None, int], Router[int]]

ROUTERS: dict[str, Routing] = {
    "least": lambda replicas, limit, seed: LeastOutstanding(replicas, limit),
    "round_robin": lambda replicas, limit, seed: RoundRobin(replicas, limit),
    "random": lambda replicas, limit, seed: RandomChoice(replicas, limit, seed),
}
