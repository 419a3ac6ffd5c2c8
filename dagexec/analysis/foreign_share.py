"""How much of the operators' time other runtimes take: those that compute what dagexec has no operators for."""

from __future__ import annotations

from collections.abc import Sequence

from dagexec.core.graph import Graph


def foreign_share(graph: Graph, operator_seconds: Sequence[float]) -> float | None:
    """The share, from 0 to 1, of foreign operators in the time of all; None when there are none."""
    foreign = [index for index, schema in enumerate(graph.schemas) if schema.foreign]
    total = sum(operator_seconds)
    if not foreign:
        return None
    return sum(operator_seconds[index] for index in foreign) / total if total else 0.0


def in_words(share: float) -> str:
    """A line for the user."""
    return f"{share:.1%} of the operators' time was spent in other runtimes, for nodes without an operator of dagexec"
