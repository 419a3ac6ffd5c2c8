"""The operators of a net as a tree of modules, so that a page need not draw ten thousand of them at once.

A module is a part of the operators' names, which exporters separate by `/` or `.`: encoder/layer.3/attention. Where no
names tell, operators that follow each other in the list form a group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from dagexec.platform.records import dataclass

MOST_NODES = 200
"""Nodes that a drawing shows well; larger ones are drawn as groups."""

_SEPARATOR = re.compile(r"[/.]+")


@dataclass(frozen=True)
class Group:
    """Operators that are one node of the drawing above, and a drawing of their own.

    Attributes:
        name: the common part of the names, or the first and the last operator.
        members: operators by number, and groups, by the first of their operators.
    """

    name: str
    members: tuple[int | Group, ...]

    def operators(self) -> Iterator[int]:
        """All operators in it."""
        for member in self.members:
            if isinstance(member, Group):
                yield from member.operators()
            else:
                yield member


def module_tree(names: Sequence[str]) -> Group:
    """The operators of these names as a group, in which no group has more than `MOST_NODES` members."""
    paths = [tuple(part for part in _SEPARATOR.split(name) if part) for name in names]
    return Group("", _members(list(range(len(names))), paths, 0))


def _members(operators: list[int], paths: Sequence[tuple[str, ...]], depth: int) -> tuple[int | Group, ...]:
    if len(operators) <= MOST_NODES:
        return tuple(operators)
    depth = _first_difference(operators, paths, depth)
    modules: dict[str, list[int]] = {}
    for operator in operators:
        path = paths[operator]
        modules.setdefault(path[depth] if depth < len(path) - 1 else "", []).append(operator)
    alone = modules.pop("", [])
    members: list[int | Group] = list(alone)
    for part, inside in modules.items():
        before = paths[inside[0]][depth - 1] if depth else ""
        name = f"{before}.{part}" if part.isdigit() and before else part
        members += [Group(name, _members(inside, paths, depth + 1))] if len(inside) > 1 else inside
    return _in_blocks(tuple(sorted(members, key=_first)))


def _first_difference(operators: list[int], paths: Sequence[tuple[str, ...]], depth: int) -> int:
    """How many leading parts all names have in common."""
    first, last = min(paths[operator] for operator in operators), max(paths[operator] for operator in operators)
    while depth < min(len(first), len(last)) - 1 and first[depth] == last[depth]:
        depth += 1
    return depth


def _in_blocks(members: tuple[int | Group, ...]) -> tuple[int | Group, ...]:
    """The members, or groups of those that follow each other, where they are too many."""
    if len(members) <= MOST_NODES:
        return members
    size = max(math.isqrt(len(members)), math.ceil(len(members) / MOST_NODES))
    blocks = [members[start : start + size] for start in range(0, len(members), size)]
    return tuple(Group(f"{_first(block[0])} to {_last(block[-1])}", _in_blocks(block)) for block in blocks)


def _first(member: int | Group) -> int:
    return member if isinstance(member, int) else min(member.operators())


def _last(member: int | Group) -> int:
    return member if isinstance(member, int) else max(member.operators())
