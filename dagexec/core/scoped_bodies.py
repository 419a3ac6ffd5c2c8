"""Bodies of operators that would write what they are given: nets as `dagexec.core.body` has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from dagexec.core.node import Node, new_node
from dagexec.core.proto import NetDef

STACK = ":stack/"
"""In the names of sequences of what a blob held in turn."""


_ADDED = re.compile(":[a-z]")


def is_added(name: str) -> bool:
    """True for a blob that no message names: it was added to an operator that runs nets."""
    return _ADDED.search(name) is not None


def body_of(
    name: str, nodes: list[Node], inside: Mapping[str, str], given: Sequence[str], results: Sequence[str]
) -> NetDef:
    """A net that takes `given` and captures what blobs are called `inside`, and results in `results`.

    What it is given it may not write: what it reads before it writes it, it has copied first.
    """
    writes, reads = written(nodes), read_first(nodes)
    starts = [copy_of(inside[one], one) for one in reads if one in writes]
    kept = {one: other for one, other in inside.items() if one not in writes}
    operators = [*starts, *(node.renamed(kept) for node in nodes)]
    passed = [kept.get(one, one) for one in results]
    read = {one for node in operators for one in node.input}.union(passed)
    return NetDef(
        name=name,
        op=[node.message() for node in operators],
        external_input=[*given, *(one for one in inside.values() if one in read and one not in given)],
        external_output=passed,
    )


def copy_of(source: str, target: str) -> Node:
    """The operator that copies one blob to another."""
    return new_node("CopyValue" if STACK in source else "Copy", [source], [target])


def number(target: str, value: int) -> Node:
    """The operator that sets a blob to an integer."""
    return new_node("GivenTensorIntFill", [], [target], arg={"shape": [1], "values": [value]})


def written(nodes: Iterable[Node]) -> dict[str, None]:
    """What the operators write."""
    return dict.fromkeys(name for node in nodes for name in node.output)


def read_first(nodes: Iterable[Node]) -> dict[str, None]:
    """What the operators read before one of them writes it."""
    seen: set[str] = set()
    found: dict[str, None] = {}
    for node in nodes:
        found.update((name, None) for name in node.input if name not in seen)
        seen.update(node.output)
    return found
