"""The lower bound: the most bytes that are alive at once, below which no offsets can stay.

Buffers of which none is done with before another begins must all lie apart. They are an antichain of the order
`Lifetimes.precedes`, and the heaviest antichain is the bound. By Dilworth's theorem with weights it is the least number
of chains that cover every buffer as often as its weight says: the total weight, less what chains can pass on from the
end of one buffer to the beginning of a later one, a maximum flow (Fulkerson 1956).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.graph import transitive_reduction
from dagexec.core.maximum_flow import UNLIMITED, MaximumFlow
from dagexec.scheduler.memory.lifetime import Flags


def heaviest_antichain(weights: Sequence[int], precedes: Flags) -> int:
    """The largest total weight of elements of which none precedes another. `precedes` is a strict partial order."""
    count = len(weights)
    rank = np.argsort(precedes.sum(axis=0), kind="stable")  # elements that precede others come before them
    ordered = precedes[np.ix_(rank, rank)]
    reduced = transitive_reduction([np.flatnonzero(ordered[:, later]).tolist() for later in range(count)])
    source, sink = 2 * count, 2 * count + 1
    flow = MaximumFlow(2 * count + 2)
    for element in range(count):
        weight = int(weights[rank[element]])
        flow.connect(source, 2 * element + 1, weight)  # its end passes on as much
        flow.connect(2 * element, sink, weight)  # and its beginning takes as much
        flow.connect(2 * element, 2 * element + 1, UNLIMITED)  # what passes by it
        for earlier in reduced[element]:
            flow.connect(2 * earlier + 1, 2 * element, UNLIMITED)
    return sum(map(int, weights)) - flow.run(source, sink)
