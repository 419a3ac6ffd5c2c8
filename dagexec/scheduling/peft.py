"""PEFT: like HEFT, looking ahead: a task goes where its end and the least that must follow are earliest.

Arabnejad, Barbosa: List scheduling algorithm for heterogeneous systems by an optimistic cost table. IEEE TPDS 25
(2014). With equal workers the table is the longest path behind a task, so that the order differs from HEFT's where
tasks take unequally long.
"""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.scheduling.placement import Costs, Placement, Placing, costs_of, place
from dagexec.scheduling.policy import Chains


def optimistic_costs(costs: Costs) -> Sequence[Sequence[float]]:
    """Of each task on each worker, the longest path behind it, where each task of that takes the worker best for it."""
    workers = range(costs.workers)
    table = [[0.0] * costs.workers for _ in costs.children]
    for task in reversed(range(len(table))):
        for child in costs.children[task]:
            there = [table[child][worker] + costs.seconds[child][worker] for worker in workers]
            least = min(there) + costs.transfer.get((task, child), 0.0)
            for worker in workers:  # on the same worker without a transfer, or on the best of the others
                table[task][worker] = max(table[task][worker], min(there[worker], least))
    return table


class Peft(Placing):
    """Predict earliest finish time."""

    name = "peft"

    def place(self, chains: Chains) -> Placement:
        """By the averages of the table."""
        costs = costs_of(chains)
        table = optimistic_costs(costs)
        return place(costs, [sum(row) / costs.workers for row in table], table)
