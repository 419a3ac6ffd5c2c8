"""Which pairs of nodes of a large acyclic graph a path joins.

No index of all pairs is kept, as n nodes have n * n / 2. The pairs in question are known from the start, so the nodes
where they begin are taken in batches, and one sweep over the nodes finds for each node which of the batch lead to it,
as the bits of an integer. Pairs of a similar distance share a batch; as most join neighbors, most sweeps are short. At
worst there are n / 4096 sweeps, each over n integers of 512 bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_BATCH = 4096


def joined(predecessors: Sequence[Sequence[int]], pairs: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    """Those of `pairs` (a, b) for which a path leads from node a to another node b.

    `predecessors` are those of each node, all with smaller numbers: the nodes are in topological order.
    """
    ends: dict[int, list[int]] = {}
    result = set()
    path = _paths(predecessors)
    for pair in pairs:
        first, last = pair
        if first in predecessors[last] or (path[first] == path[last] and first < last):
            result.add(pair)
        elif first < last:
            ends.setdefault(first, []).append(last)
    firsts = sorted(ends, key=lambda first: ((max(ends[first]) - first).bit_length(), first))
    for place in range(0, len(firsts), _BATCH):
        result |= _sweep(predecessors, ends, sorted(firsts[place : place + _BATCH]))
    return result


def _paths(predecessors: Sequence[Sequence[int]]) -> list[int]:
    """A number for each node, the same for nodes of one path: such pairs need no sweep."""
    path = list(range(len(predecessors)))
    goes_on = bytearray(len(predecessors))
    for node, row in enumerate(predecessors):
        for before in reversed(row):
            if not goes_on[before]:
                goes_on[before] = 1
                path[node] = path[before]
                break
    return path


def _sweep(
    predecessors: Sequence[Sequence[int]], ends: dict[int, list[int]], firsts: Sequence[int]
) -> set[tuple[int, int]]:
    """The pairs from `firsts` to their `ends` that are joined."""
    low, high = firsts[0], max(max(ends[first]) for first in firsts)
    bits = {first: 1 << bit for bit, first in enumerate(firsts)}
    leading = [0] * (high - low + 1)  # by node, from `low` on: the batch's nodes that lead to it, itself one of them
    for node in range(low, high + 1):
        reached = bits.get(node, 0)
        for before in predecessors[node]:
            if before >= low:
                reached |= leading[before - low]
        leading[node - low] = reached
    return {(first, last) for first in firsts for last in ends[first] if leading[last - low] & bits[first]}
