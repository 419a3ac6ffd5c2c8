"""Replicas that do what a test says, in the order that it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dagexec.binding.io_binding import Array
from dagexec.cluster.link import Answer, Lost, Started
from dagexec.errors import DagexecError


@dataclass(eq=False)
class SimulatedCall:
    """A request that a replica was sent: the test answers it."""

    feeds: Mapping[str, Array]
    names: Sequence[str]
    priority: int
    timeout: float | None
    done: Callable[[Answer], object]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(eq=False)
class SimulatedReplica:
    """A `ReplicaLink` that keeps what it is told: `starting` and `calls` are what has no answer yet."""

    number: int
    place: str = "simulated"
    starting: list[Callable[[Started], object]] = field(default_factory=list)
    calls: list[SimulatedCall] = field(default_factory=list)
    stopped: bool = False
    refuses: DagexecError | None = None
    questions: list[Callable[[], object]] = field(default_factory=list)

    def start(self, done: Callable[[Started], object]) -> None:
        assert not self.stopped
        self.starting.append(done)

    def run(
        self,
        feeds: Mapping[str, Array],
        names: Sequence[str],
        priority: int,
        timeout: float | None,
        done: Callable[[Answer], object],
    ) -> SimulatedCall:
        assert not self.stopped
        if self.refuses is not None:
            raise self.refuses
        call = SimulatedCall(feeds, names, priority, timeout, done)
        self.calls.append(call)
        return call

    def ask(self, done: Callable[[], object]) -> None:
        self.questions.append(done)

    def stop(self) -> None:
        assert not self.stopped
        self.stopped = True

    def be_ready(self) -> None:
        self.starting.pop(0)(None)

    def die(self, reason: str = "killed") -> None:
        """Everything that it was asked is lost, as when its process ends."""
        calls, self.calls = self.calls, []
        starting, self.starting = self.starting, []
        for call in calls:
            call.done(Lost(reason))
        for done in starting:
            done(Lost(reason))
