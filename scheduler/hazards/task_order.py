"""Which tasks of a run must have ended when a task begins, by what their operators read and write.

It knows nothing of dependencies: `dagexec check --exhaustive` asks of every state of a run whether what begins there
finds these ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from dagexec.core.graph import Hazard
from dagexec.scheduler.hazards.accesses import prepared_accesses, touched_memory
from dagexec.scheduler.hazards.check import Pair, conflicts
from dagexec.scheduler.nets.net import BaseNet


def tasks_before(net: BaseNet) -> list[dict[int, str]]:
    """Of each task of `net`, on the host, those that must have ended when it begins, and what both touch.

    Operators may be several tasks, a task several operators, and one that does nothing is in none: what comes after it
    then comes after those before it.
    """
    preparation, tasks = net.prepared(), net.tasks()
    touched = touched_memory(net.graph, net.operators, preparation.prepared)
    accesses = prepared_accesses(net.graph, net.operators, preparation.prepared, touched)
    tasks_of: list[list[int]] = [[] for _ in net.operators]
    for task, row in enumerate(tasks.shares):
        for operator, _ in row:
            tasks_of[operator].append(task)
    earlier: list[dict[int, str]] = [{} for _ in net.operators]
    guards = net.guards()
    for number, (resource, users) in enumerate(zip(accesses.resources, accesses.users(), strict=True)):
        found = _turns(users, guards) if resource.exclusive else conflicts(users, number, accesses)
        for one, other, kind in found:
            earlier[other].setdefault(one, f"{kind.name} on {resource.name}")
    before: list[dict[int, str]] = [{} for _ in tasks.work.graph.pieces]
    inherited: list[dict[int, str]] = [{} for _ in net.operators]
    for operator, others in enumerate(earlier):
        for other, why in others.items():
            inherited[operator] |= dict.fromkeys(tasks_of[other], why) if tasks_of[other] else inherited[other]
        for task in tasks_of[operator]:
            before[task] |= {other: why for other, why in inherited[operator].items() if other != task}
    return before


def _turns(users: Sequence[int], guards: Sequence[tuple[str, ...]]) -> list[Pair]:
    """Users of working memory that no mutex keeps apart: plans have them in the order of the net."""
    pairs = combinations(users, 2)
    return [(one, other, Hazard.WAW) for one, other in pairs if not set(guards[one]) & set(guards[other])]
