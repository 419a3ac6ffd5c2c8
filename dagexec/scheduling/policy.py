"""Policy: what decides which chain of a net runs next, and on which worker; and what it is told.

Workers are numbers from 0. Each stands for a thread that is in the run, but for no thread in particular: one that has
nothing to do asks for its own worker first, and then for others whose threads have not come yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any, ClassVar

from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass
from dagexec.scheduling.paths import longest_paths


@dataclass(frozen=True, eq=False)
class Chains:
    """What is known of a net before it runs. Chains have numbers from 0, larger than those of chains they wait for.

    Attributes:
        net: its name.
        names: the first operator of each chain.
        children: chains that wait for each chain, ascending.
        seconds: estimates of what each chain takes.
        workers: how many there are.
    """

    net: str
    names: Sequence[str]
    children: Sequence[Sequence[int]]
    seconds: Sequence[float]
    workers: int

    @cached_property
    def parents(self) -> list[list[int]]:
        """Chains that each chain waits for, ascending."""
        found: list[list[int]] = [[] for _ in self.children]
        for chain, row in enumerate(self.children):
            for child in row:
                found[child].append(chain)
        return found

    @cached_property
    def levels(self) -> list[float]:
        """Seconds from the start of each chain to the end of the net along the longest path."""
        return longest_paths(self.children, self.seconds)


@dataclass(eq=False)
class RunState:
    """What is known of a run.

    Attributes:
        running: chains that have begun and not ended, and the worker of each.
        released_by: of each chain that is ready or running, the worker that ended the last one it waited for; else -1.
        own: what a policy may keep here of its own; None at first.
    """

    running: dict[int, int] = field(default_factory=dict)
    released_by: list[int] = field(default_factory=list)
    own: Any = None


class Policy:
    """Decides which chain runs next, and on which worker. A subclass has an `order` or a `choose`.

    With an `order` alone, runs are decided in machine code; with `choose` they are in Python.
    Several runs may use one policy: what changes in a run belongs into its `RunState`.
    """

    name: ClassVar[str] = ""
    """What messages call it; by default its class."""

    def order(self, chains: Chains) -> Sequence[int]:
        """All chains, the most urgent first: who has nothing to do begins the first of these that is ready."""
        raise NotImplementedError

    def pieces(self, chains: Chains) -> Sequence[int]:
        """Into how many pieces, at most, an operator of each chain is shared; where there are none, into all it has.

        Results have the same bytes whatever the number: pieces are executed together, or apart.
        """
        return ()

    def begin(self, chains: Chains) -> None:
        """Called before `choose`, on a copy of the policy of its own for each net, shapes and number of workers."""

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        """Which of the `ready` chains `worker` begins; None if it shall wait until another chain has ended.

        The chain that became ready first is the first of `ready`. While a worker waits, it helps others with the pieces
        of their operators. Called with a lock of the pool held, so it must not wait for anything.
        """
        raise NotImplementedError


def name_of(policy: Policy) -> str:
    """What messages call `policy`."""
    return policy.name or type(policy).__name__
