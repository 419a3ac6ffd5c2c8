"""SelectivelyUniformWalk: threads by how many interesting events they have left: all their orders are equally likely.

"Selectively Uniform Concurrency Testing" (Zhao, Wolff, Mathur and Roychoudhury, ASPLOS 2025; SURW). The interesting
events of a schedule are those of one lock, gate or thread, drawn from the seed. The thread that makes the next of them
is drawn before it comes to it, by the number that each has left; others wait in front of theirs until then, and
whatever is not interesting goes on at random. The numbers are those of a first schedule.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from dagexec.scheduler.exploration.events import Event
from dagexec.scheduler.exploration.strategies.strategy import Candidate, SampledStrategy

_UNEXPECTED = 0.5


class SelectivelyUniformWalk(SampledStrategy):
    """All orders of the events of one resource with about the same probability."""

    name = "surw"
    estimates = True

    def __init__(self, seed: int, *, timeouts: bool = False) -> None:
        super().__init__(seed, timeouts=timeouts)
        self._resource: str | None = None  # None: all events are interesting
        self._left: Counter[str] = Counter()
        self._children: defaultdict[str, list[str]] = defaultdict(list)  # those that a thread is still to start
        self._intended = ""

    def learn(self, trace: Sequence[Event]) -> None:
        """Draw the resource, and count each thread's events of it."""
        users: defaultdict[str, set[str]] = defaultdict(set)
        for event in trace:
            if event.kind != "release":  # what follows a release is the thread's own
                users[event.resource].add(event.thread)
        shared = sorted(resource for resource, threads in users.items() if resource and len(threads) > 1)
        self._resource = self._random.choice(shared) if shared else None
        for event in trace:
            self._left[event.thread] += self._is_interesting(event)
            if event.kind == "start":
                self._children[event.thread].append(event.resource)

    def choose(self, candidates: Sequence[Candidate], current: bool) -> int:
        """One of those that need not wait for the intended thread; another is intended where that one cannot go on."""
        for candidate in candidates:
            self._is_alive(candidate.event.thread)
        free = self._free(candidates)
        if len(free) < len(candidates) and all(one.event.thread != self._intended for one in candidates):
            weights = [self._weight(one.event.thread) for one in candidates]
            self._intended = self._random.choices(candidates, weights)[0].event.thread
            free = self._free(candidates)
        return free[int(self._random.random() * len(free))]

    def took(self, event: Event) -> None:
        """An interesting event is over, and the next one's thread is drawn."""
        self._is_alive(event.resource if event.kind == "start" else event.thread)
        if not self._is_interesting(event):
            return
        self._left[event.thread] = max(0, self._left[event.thread] - 1)
        names = sorted({*self._left} - {name for started in self._children.values() for name in started})
        self._intended = self._random.choices(names, [self._weight(name) for name in names])[0]

    def _is_alive(self, thread: str) -> None:
        for started in self._children.values():
            if thread in started:
                started.remove(thread)

    def _free(self, candidates: Sequence[Candidate]) -> list[int]:
        return [
            number
            for number, candidate in enumerate(candidates)
            if candidate.event.thread == self._intended or not self._is_interesting(candidate.event)
        ]

    def _is_interesting(self, event: Event) -> bool:
        return self._resource is None or (event.resource == self._resource and event.kind != "release")

    def _weight(self, thread: str) -> float:
        """Its own events that are left, and those of the threads that it is still to start.

        One that has made as many as in the first schedule may make more in this one.
        """
        return (self._left[thread] or _UNEXPECTED) + sum(
            self._weight(child) for child in self._children[thread] if child != thread
        )
