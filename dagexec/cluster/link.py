"""What a deployment asks of its transport: replicas that start, run requests one beside the other, and stop.

`ray_replica` has the one of Ray; tests have replicas that do what the test says, in the order that it says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from dagexec.binding.io_binding import Array, Outputs
from dagexec.errors import DagexecError
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class Lost:
    """Instead of an answer: the process of the replica ended, or cannot be reached. It may run again later."""

    reason: str


Answer = Outputs | DagexecError | Lost
Started = DagexecError | Lost | None
"""None when it is ready; an error that would come again; or the process ended before it was."""


class Call(Protocol):
    """A request that a replica was sent."""

    def cancel(self) -> None:
        """Have the replica stop the run before its next operator, if it has not ended. Does not wait."""


class ReplicaLink(Protocol):
    """One replica, wherever it runs. No method blocks for longer than it takes to hand something over."""

    @property
    def place(self) -> str:
        """Where it runs or ran last, for messages."""

    def start(self, done: Callable[[Started], object]) -> None:
        """Have it run, again after it was lost; `done` is called once, from any thread, when it is ready or failed."""

    def run(
        self,
        feeds: Mapping[str, Array],
        names: Sequence[str],
        priority: int,
        timeout: float | None,
        done: Callable[[Answer], object],
    ) -> Call:
        """Send it a request; `done` is called once, from any thread. Raises DagexecError for what cannot be sent."""

    def ask(self, done: Callable[[], object]) -> None:
        """Ask whether it is there; `done` is called from any thread when it answers, also while it computes."""

    def stop(self) -> None:
        """End its process, whatever it does."""
