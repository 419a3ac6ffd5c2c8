"""Plans: which runtime computes which operators of a net, and what is kept of a plan from one process to the next."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import cast

from dagexec.compiler.islands.regions import IslandSource, with_islands
from dagexec.core.model import Model
from dagexec.foreign import IslandRuntime
from dagexec.platform.records import dataclass

_PART = re.compile(r"(\w+) (\d+)-(\d+)")


@dataclass(frozen=True)
class PlanPart:
    """The operators from `start` to `stop` in the list, of which a runtime computes all that it can.

    Any such range is convex, as operators only read what was written before them.
    """

    runtime: IslandRuntime
    start: int
    stop: int


Plan = tuple[PlanPart, ...]
"""Parts that have no operator in common, in order; own kernels compute what is in none."""


def plan_text(plan: Plan) -> str:
    """The plan in words: "own" for one without parts."""
    return ", ".join(f"{part.runtime} {part.start}-{part.stop}" for part in plan) or "own"


def plan_from_text(text: str, runtimes: Collection[IslandRuntime], count: int) -> Plan | None:
    """The plan for a net of so many operators; None for what is none, or names a runtime that is not there."""
    if text == "own":
        return ()
    found = [_PART.fullmatch(part) for part in text.split(", ")]
    parts = [
        PlanPart(cast(IslandRuntime, one[1]), int(one[2]), int(one[3]))
        for one in found
        if one is not None and one[1] in runtimes
    ]
    ends = [end for part in parts for end in (part.start, part.stop)]
    in_order = ends == sorted(ends) and max(ends, default=0) <= count
    return tuple(parts) if len(parts) == len(found) and in_order else None


def whole_plan(runtime: IslandRuntime, source: IslandSource) -> Plan:
    """All that the runtime can compute."""
    return (PlanPart(runtime, 0, len(source.graph)),)


def with_plan(source: IslandSource, plan: Sequence[PlanPart], versions: Mapping[IslandRuntime, str]) -> Model:
    """The net with islands in place of what the parts hold; the source's own model if that is nothing."""
    placed = [(region, part.runtime) for part in plan for region in source.regions(part.start, part.stop)]
    return with_islands(source, placed, versions)
