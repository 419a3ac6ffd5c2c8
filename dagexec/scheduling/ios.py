"""IOS: stages, one after another, whose groups run side by side; a dynamic program finds those that take least.

Ding, Zhu, Jia, Pekhimenko, Han: IOS, inter-operator scheduler for CNN acceleration. MLSys 2021, arXiv 2011.01302. As
there, a group has up to 3 chains and a stage up to 8 groups. What stages take is estimated here, not measured.

Where all paths go through one chain, what is before it and what is behind are solved apart. A part with more ways than
`MOST_STAGES` to be cut is too wide: it is one stage, in which workers go by the critical path, and a warning says so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from heapq import heapreplace

from dagexec.platform.records import dataclass
from dagexec.scheduling.policy import Chains, Policy, RunState

logger = logging.getLogger("dagexec")

GROUP_SIZE, STAGE_GROUPS = 3, 8

MOST_STAGES = 50_000
"""Candidates for a stage of a part that are weighed: half a second."""

_MOST_CHAINS = 200
"""Of a part: the program calls itself once a stage."""


class _TooWideError(Exception):
    """There are too many candidates."""


@dataclass(frozen=True)
class _Group:
    """Chains as a set of bits, which follow one another."""

    chains: int
    size: int
    seconds: float


class Ios(Policy):
    """Inter-operator scheduler.

    Attributes:
        stages: of the net, of a policy that has begun: the chains of each.
        too_wide: how many chains are in parts that are too wide.
    """

    name = "ios"

    def begin(self, chains: Chains) -> None:
        """Find the stages."""
        self._levels = chains.levels
        self.stages: list[list[int]] = []
        self.too_wide = 0
        for part in parts_of(chains):
            try:
                self.stages += _Program(chains, part).stages()
            except _TooWideError:
                self.stages.append(list(part))
                self.too_wide += len(part)
        if self.too_wide:
            logger.warning(
                "net %s: %d of %d chains are too wide for policy 'ios' and go by the critical path",
                chains.net, self.too_wide, len(chains.names),
            )  # fmt: skip
        self._stage_of = {chain: number for number, stage in enumerate(self.stages) for chain in stage}

    def choose(self, ready: Sequence[int], worker: int, state: RunState) -> int | None:
        """One of the stage that is under way; None while others finish that."""
        stage = min(self._stage_of[chain] for chain in (*ready, *state.running))
        of_stage = [chain for chain in ready if self._stage_of[chain] == stage]
        return max(of_stage, key=lambda chain: self._levels[chain], default=None)


def parts_of(chains: Chains) -> Iterator[range]:
    """The chains, cut behind each that comes after all before it and before all that follow."""
    first, reach, open_ends = 0, 0, 0
    last_source = max((chain for chain, row in enumerate(chains.parents) if not row), default=0)
    for chain, row in enumerate(chains.children):
        if chain >= last_source and reach <= chain and not open_ends:
            yield range(first, chain + 1)
            first = chain + 1
        open_ends += not row
        reach = max(reach, *row, 0)
    if first < len(chains.children):
        yield range(first, len(chains.children))


class _Program:
    """The stages of one part. Sets of chains are bits, counted from its first one."""

    def __init__(self, chains: Chains, part: range) -> None:
        if len(part) > _MOST_CHAINS:
            raise _TooWideError
        self._first = part.start
        self._seconds = chains.seconds[part.start : part.stop]
        self._after = [
            sum(1 << child - part.start for child in chains.children[chain] if child in part) for chain in part
        ]
        self._workers = chains.workers
        self._weighed = 0
        self._best: dict[int, tuple[float, int]] = {0: (0.0, 0)}  # of a set: its seconds, and its last stage

    def stages(self) -> list[list[int]]:
        """Those that take least. Raises _TooWideError."""
        left = (1 << len(self._after)) - 1
        self._solve(left)
        found: list[list[int]] = []
        while left:
            stage = self._best[left][1]
            found.append([self._first + bit for bit in range(len(self._after)) if stage >> bit & 1])
            left &= ~stage
        return found[::-1]

    def _solve(self, chains: int) -> float:
        known = self._best.get(chains)
        if known is None:
            candidates = ((self._solve(chains & ~stage) + seconds, stage) for stage, seconds in self._endings(chains))
            known = self._best[chains] = min(candidates)
        return known[0]

    def _endings(self, chains: int) -> Iterator[tuple[int, float]]:
        """Sets of `chains` that may be the last stage of these, and what each takes."""
        waiting: list[tuple[int, int, tuple[_Group, ...]]] = [(0, chains.bit_length(), ())]
        while waiting:
            ending, below, groups = waiting.pop()
            for bit in range(below):
                if not chains >> bit & 1 or self._after[bit] & chains & ~ending:
                    continue
                self._weighed += 1
                if self._weighed > MOST_STAGES:
                    raise _TooWideError
                joined = [group for group in groups if group.chains & self._after[bit]]
                group = _Group(
                    1 << bit | sum(one.chains for one in joined),
                    1 + sum(one.size for one in joined),
                    self._seconds[bit] + sum(one.seconds for one in joined),
                )
                if group.size > GROUP_SIZE:
                    continue
                row = (*(one for one in groups if one not in joined), group)
                waiting.append((ending | 1 << bit, bit, row))
                if len(row) <= STAGE_GROUPS:
                    yield ending | 1 << bit, self._seconds_of(row)

    def _seconds_of(self, groups: Sequence[_Group]) -> float:
        """What a stage takes: the longest groups first, each where it can begin first."""
        busy = [0.0] * self._workers
        for group in sorted(groups, key=lambda group: -group.seconds):
            heapreplace(busy, busy[0] + group.seconds)
        return max(busy)
