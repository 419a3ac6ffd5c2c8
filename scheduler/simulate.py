"""Predicting a run: list scheduling of a plan on a number of workers, from the time each chain takes.

The policy is the pool's own: a worker that is free takes the ready chain of the highest priority. Nothing is added
for the scheduler itself, so a measured run can reach the prediction but not beat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush

from dagexec.scheduler.plan import Plan, build_plan


def predict_makespan(plan: Plan, workers: int) -> float:
    """Seconds from start to end of one run of `plan` (with its `seconds`) on `workers` workers.

    List scheduling (Graham 1969), at most 2 - 1/workers times the optimum.
    """
    counts = list(plan.parent_counts)
    ready = list(plan.frontier)
    heapify(ready)
    running: list[tuple[float, int]] = []  # (end, chain)
    now = 0.0
    while ready or running:
        while ready and len(running) < workers:
            chain = heappop(ready)
            heappush(running, (now + plan.seconds[chain], chain))
        now, chain = heappop(running)
        for child in plan.children[chain]:
            counts[child] -= 1
            if counts[child] == 0:
                heappush(ready, child)
    return now


def replan(plan: Plan, operator_seconds: Sequence[float]) -> Plan:
    """The plan with measured times in place of estimated ones; priorities change, chains do not."""
    return build_plan(plan.graph, operator_seconds, plan.chains)


def lower_bound(plan: Plan, workers: int) -> float:
    """No schedule on `workers` workers is shorter: max(critical path, work / workers)."""
    return max(plan.critical_path, plan.work / workers)
