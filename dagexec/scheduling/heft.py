"""HEFT: by the longest path to the end, placed on the worker where it ends earliest, before the run begins.

Topcuoglu, Hariri, Wu: Performance-effective and low-complexity task scheduling for heterogeneous computing. IEEE TPDS
13 (2002). With equal workers, ranks are those of the critical path; other than there, workers keep to their placement.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduling.placement import Costs, Placement, Placing, costs_of, place
from dagexec.scheduling.policy import Chains


def upward_ranks(costs: Costs) -> Sequence[float]:
    """Of each task, the longest path to the end, by what tasks take on average."""
    ranks = [0.0] * len(costs.children)
    for task in reversed(range(len(ranks))):
        after = (costs.transfer.get((task, child), 0.0) + ranks[child] for child in costs.children[task])
        ranks[task] = sum(costs.seconds[task]) / costs.workers + max(after, default=0.0)
    return ranks


class Heft(Placing):
    """Heterogeneous earliest finish time."""

    name = "heft"

    def place(self, chains: Chains) -> Placement:
        """By upward ranks."""
        costs = costs_of(chains)
        return place(costs, upward_ranks(costs))
