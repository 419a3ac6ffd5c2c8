"""The tasks that a run hands out: stretches of chains, or their pieces, and what waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from dagexec.platform.records import dataclass
from dagexec.scheduling.planned import PlannedPolicy


class Dependencies(Protocol):
    """The part of a plan that tasks are made from."""

    @property
    def children(self) -> Sequence[Sequence[int]]:
        """Chains that wait for each chain."""

    @property
    def parent_counts(self) -> Sequence[int]:
        """How many chains each chain waits for."""

    @property
    def policy(self) -> PlannedPolicy | None:
        """Decides in runs; None for the order of the chains."""


@dataclass(frozen=True, eq=False)
class TaskGraph:
    """The tasks of a plan.

    Attributes:
        pieces: of each task; at least one.
        children: tasks that wait for a task, ascending.
        parent_counts: how many tasks a task waits for.
        chains: the chain that a task is of.
        policy: decides in runs; None for the order of the tasks (see `policy_machine`).
    """

    pieces: Sequence[int]
    children: Sequence[Sequence[int]]
    parent_counts: Sequence[int]
    chains: Sequence[int]
    policy: PlannedPolicy | None = None


def chain_tasks(plan: Dependencies) -> TaskGraph:
    """A task of one piece for each chain."""
    count = len(plan.parent_counts)
    return TaskGraph([1] * count, plan.children, plan.parent_counts, range(count), plan.policy)
