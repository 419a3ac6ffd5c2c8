"""Which tasks of a run must have ended when a task begins, by what their operators read and write.

Dependencies do not matter here: `dagexec check --exhaustive` checks in every state of a run that the tasks which must
have ended before the next one have done so.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from dagexec.core.graph import Hazard
from dagexec.scheduler.hazards.accesses import prepared_accesses, touched_memory
from dagexec.scheduler.hazards.check import Pair, conflicts
from dagexec.scheduler.nets.net import BaseNet


def tasks_before(net: BaseNet) -> list[dict[int, str]]:
    """For each task of `net`, on the host, those that must have ended when it begins, and what both touch.

    An operator may be several tasks, a task several operators. An operator that does nothing is in no task; what comes
    after it then comes after those before it.
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
        pairs = _turns(users, guards) if resource.exclusive else conflicts(users, number, accesses)
        for first, second, kind in pairs:
            earlier[second].setdefault(first, f"{kind.name} on {resource.name}")
    before: list[dict[int, str]] = [{} for _ in tasks.work.graph.pieces]
    inherited: list[dict[int, str]] = [{} for _ in net.operators]
    for operator, others in enumerate(earlier):
        for second, why in others.items():
            inherited[operator] |= dict.fromkeys(tasks_of[second], why) if tasks_of[second] else inherited[second]
        for task in tasks_of[operator]:
            before[task] |= {second: why for second, why in inherited[operator].items() if second != task}
    return before


def _turns(users: Sequence[int], guards: Sequence[tuple[str, ...]]) -> list[Pair]:
    """Users of working memory that no mutex keeps apart; plans have them in the order of the net."""
    pairs = combinations(users, 2)
    return [(first, second, Hazard.WAW) for first, second in pairs if not set(guards[first]) & set(guards[second])]
