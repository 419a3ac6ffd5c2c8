"""Mixed plans: own kernels compute the parts of a net where they are faster, islands the others.

The list of operators is cut where own kernels, fused as they are, have everything that crosses the cut: what lies
between two cuts is computed by a number of operators of the compiled net, whose times are its time. A net with an
island for each such segment tells the runtimes' times, with what it costs to enter and to leave them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from dagexec.compiler.islands.plans import Plan, PlanPart
from dagexec.compiler.islands.regions import IslandSource
from dagexec.core.graph import build_graph
from dagexec.core.model import Model
from dagexec.foreign import IslandRuntime

_MOST_SEGMENTS = 12
_MOST_CROSSING = 8  # blobs: each is an output of one island and an input of another
_GAIN, _GAIN_SECONDS = 0.9, 2e-5  # of a segment, for a runtime to get it: entering an island has its cost


def find_cuts(source: IslandSource, own: Model) -> dict[int, frozenset[str]]:
    """What crosses the places where the list of operators may be cut, by place: floats that `own` computes as well.

    Numbers that are no floats do not count, as own kernels may have no use for them: they are parts of shapes.
    """
    computed = {name for definition in own.program.op for name in definition.output}
    operators = source.model.program.op
    last_read = {name: index for index, definition in enumerate(operators) for name in definition.input}
    crossing: set[str] = set()
    found: dict[int, frozenset[str]] = {}
    for index, definition in enumerate(operators[:-1]):
        crossing = {name for name in crossing if last_read[name] > index}
        crossing |= {name for name in definition.output if last_read.get(name, -1) > index and _counts(source, name)}
        if crossing and len(crossing) <= _MOST_CROSSING and crossing <= computed:
            found[index + 1] = frozenset(crossing)
    return found


def _counts(source: IslandSource, name: str) -> bool:
    return name not in source.types or source.types[name].meta.is_float


def segment_seconds(model: Model, seconds: Sequence[float], cuts: Sequence[Collection[str]]) -> list[float]:
    """The time between cuts of a compiled net whose operators take so many `seconds`, one more than there are cuts.

    An operator counts before the first cut that something of it crosses, directly or through others.
    """
    graph = build_graph(model.program, {*model.parameters, *model.inputs}.__contains__)
    writers = {name: index for index, definition in enumerate(model.program.op) for name in definition.output}
    segment: dict[int, int] = {}
    for number, cut in enumerate(cuts):
        waiting = [writers[name] for name in cut if name in writers]
        while waiting:
            index = waiting.pop()
            if index not in segment:
                segment[index] = number
                waiting += graph.parents[index]
    found = [0.0] * (len(cuts) + 1)
    for index, took in enumerate(seconds):
        found[segment.get(index, len(cuts))] += took
    return found


def coarse_cuts(places: Sequence[int], seconds: Sequence[float]) -> list[int]:
    """Those of the places between which segments take a fair part of the time; `seconds` are of the finest ones."""
    least = sum(seconds) / _MOST_SEGMENTS
    found: list[int] = []
    took = 0.0
    for place, one in zip(places, seconds, strict=False):
        took += one
        if took >= least:
            found.append(place)
            took = 0.0
    return found


def mixed_plan(
    places: Sequence[int], count: int, own: Sequence[float], others: Mapping[IslandRuntime, Sequence[float]]
) -> Plan:
    """Each segment between the places, of `count` operators, for who computes it fastest; neighbors are joined."""
    ends = [0, *places, count]
    chosen: list[IslandRuntime | None] = []
    for number, mine in enumerate(own):
        best = min(others, key=lambda name: others[name][number], default=None)
        limit = min(mine * _GAIN, mine - _GAIN_SECONDS)
        chosen.append(best if best is not None and others[best][number] < limit else None)
    parts: list[PlanPart] = []
    for runtime, numbers in itertools.groupby(range(len(own)), key=chosen.__getitem__):
        row = list(numbers)
        if runtime is not None:
            parts.append(PlanPart(runtime, ends[row[0]], ends[row[-1] + 1]))
    return tuple(parts)
