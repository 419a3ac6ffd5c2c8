"""Work: the steps of chains as tasks with pieces, which workers are handed out.

Consecutive native calls of a chain on one thread are one task; so are consecutive steps of Python. A phase of several
pieces is a task of its own, whose pieces several workers may take.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from dagexec.core.native import Piece, grouped, may_merge, phases_of, piece_step
from dagexec.core.native_tables import AlikeStep, JoinedCalls, NativePart, calls_in
from dagexec.core.operator import Step, parts_of
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.preparation import LONGEST_SECONDS
from dagexec.scheduler.plan.task_graph import Dependencies, TaskGraph, chain_tasks
from dagexec.scheduler.run import engine
from dagexec.scheduler.run.engine_layout import Kind
from dagexec.scheduling.planned import PlannedPolicy

if TYPE_CHECKING:
    from dagexec.scheduler.observe.observed_run import Pieces

ChainSteps = Sequence[tuple[Step, ...]]


SHORT_SECONDS = 1.5e-6
"""Estimate for Python steps that are handed out several at a time; NumPy takes many times its estimates."""

WIDE, SHORT_PHASE_SECONDS = 2, 40e-6
"""Where all chains take this many times as long as the longest path, workers have enough to do without the pieces of
phases shorter than this: NASNet took 3 to 10% longer with these, beside other processes."""


@dataclass(frozen=True)
class SingleChain:
    """The dependencies of a single chain."""

    children: tuple[tuple[int, ...], ...] = ((),)
    parent_counts: tuple[int, ...] = (0,)
    policy: PlannedPolicy | None = None


@dataclass(frozen=True, eq=False)
class Work:
    """Tasks, and what workers execute for them.

    Attributes:
        graph: the tasks.
        steps: of each task and piece, the steps to call.
        native: the same as memory, for runs in machine code; None where workers call the steps.
        shares: of each task, steps of the chain, and the part of each that it does; empty where it does all of each.
    """

    graph: TaskGraph
    steps: Sequence[Pieces]
    native: engine.NativeTasks | None = None
    shares: Sequence[Sequence[tuple[Step, float]]] = ()

    @cached_property
    def calls(self) -> Sequence[tuple[Step, ...]]:
        """The steps of each task in Python."""
        return [pieces[0] if pieces else () for pieces in self.steps]

    @cached_property
    def is_shared(self) -> bool:
        """True when there may be work for more than one worker."""
        graph = self.graph
        return (
            any(count > 1 for count in graph.pieces)
            or any(len(row) > 1 for row in graph.children)
            or (sum(not count for count in graph.parent_counts) > 1)
        )


def chain_work(plan: Dependencies, steps: ChainSteps) -> Work:
    """A task for each chain, whose steps a worker calls."""
    return Work(chain_tasks(plan), [(chain,) for chain in steps])


def emptied(work: Work) -> Work:
    """The same tasks without any steps."""
    native = None if work.native is None else work.native.without_calls()
    return Work(work.graph, [[()] * count for count in work.graph.pieces], native)


def observed_work(plan: Dependencies, chains: Sequence[Sequence[Pieces]]) -> Work:
    """The tasks of each chain, whose pieces are steps that workers call."""
    graph = _chained(plan, [list(map(len, tasks)) for tasks in chains])
    return Work(graph, [pieces for tasks in chains for pieces in tasks])


def _chained(plan: Dependencies, pieces: Sequence[Sequence[int]]) -> TaskGraph:
    """The tasks of each chain, one after another, with the given numbers of `pieces`."""
    first = [0, *accumulate(map(len, pieces))]
    children: list[list[int]] = []
    parent_counts: list[int] = []
    for chain, row in enumerate(pieces):
        after = [first[child] for child in plan.children[chain]]
        children += [*([task + 1] for task in range(first[chain], first[chain + 1] - 1)), after]
        parent_counts += [plan.parent_counts[chain], *[1] * (len(row) - 1)]
    chains = [chain for chain, row in enumerate(pieces) for _ in row]
    return TaskGraph([count for row in pieces for count in row], children, parent_counts, chains, plan.policy)


def pieces_of_chains(
    plan: Dependencies,
    steps: ChainSteps,
    seconds: Sequence[Sequence[float]],
    most: Sequence[int],
    *,
    in_machine_code: bool,
    shortest: float = 0.0,
) -> Work:
    """The tasks of the chains, native calls in pieces, of which each chain has up to `most` of one phase.

    `seconds` are estimates for each step; a phase that takes less than `shortest` is one piece. Without
    `in_machine_code`, or with a policy that decides in runs, workers call steps for the pieces, too.
    """
    native = in_machine_code and plan.policy is None and may_merge() and engine.can_run()
    by_chain = [_stretches(chain, seconds[number], most[number], shortest) for number, chain in enumerate(steps)]
    stretches = [stretch for row in by_chain for stretch in row]
    graph = _chained(plan, [[stretch.count for stretch in row] for row in by_chain])
    shares = [stretch.shares for stretch in stretches]
    if not native:
        return Work(graph, [stretch.as_steps() for stretch in stretches], None, shares)
    memory = engine.native_tasks(
        graph, [stretch.as_native() for stretch in stretches], [stretch.seconds for stretch in stretches]
    )
    called = [(tuple(stretch.steps),) if stretch.steps else () for stretch in stretches]
    return Work(graph, called, memory, shares)


class _Stretch:
    """A task under construction: steps of Python, native calls on one thread, or pieces of a phase."""

    __slots__ = ("joined", "pieces", "seconds", "shares", "steps")

    def __init__(self, pieces: Sequence[Piece] = ()) -> None:
        self.steps: list[Step] = []
        self.joined: list[NativePart] = []
        self.pieces = pieces
        self.shares: list[tuple[Step, float]] = []
        self.seconds = 0.0

    @property
    def count(self) -> int:
        """Pieces that workers may take."""
        return len(self.pieces) or 1

    def as_native(self) -> Sequence[Piece | JoinedCalls] | Kind:
        """The task in machine code."""
        if self.steps:
            return Kind.SHORT_PYTHON if self.seconds <= SHORT_SECONDS else Kind.PYTHON
        return self.pieces or [JoinedCalls(self.joined)]

    def as_steps(self) -> Pieces:
        """Steps that workers call."""
        if self.steps:
            return [tuple(self.steps)]
        pieces = self.pieces or [tuple(call for part in self.joined for call in calls_in(part))]
        return [(piece_step(piece),) if piece else () for piece in pieces]


def _stretches(chain: Sequence[Step], seconds: Sequence[float], most: int, shortest: float) -> list[_Stretch]:
    """The tasks of one chain, at least one."""
    tasks: list[_Stretch] = []
    last: _Stretch | None = None
    for step, estimate in zip(chain, seconds, strict=True):
        if isinstance(step, AlikeStep):
            last = _following(tasks, last, estimate)
            last.joined.append(step)
            last.seconds += estimate
            last.shares.append((step, 1.0))
            continue
        parts = parts_of(step)
        for part in parts:
            phases = phases_of(part)
            if phases is None:
                if last is None or not last.steps:
                    last = _Stretch()
                    tasks.append(last)
                last.steps.append(part)
                last.seconds += estimate / len(parts)
                last.shares.append((step, 1 / len(parts)))
                continue
            for phase in phases:
                share = 1 / len(phases) / len(parts)
                pieces = grouped(phase, most if estimate * share >= shortest else 1)
                if len(pieces) == 1:
                    last = _following(tasks, last, estimate * share)
                    last.joined.append(pieces[0])
                else:
                    last = _Stretch(pieces)
                    tasks.append(last)
                last.seconds += estimate * share
                last.shares.append((step, share))
    return tasks or [_Stretch()]


def _following(tasks: list[_Stretch], last: _Stretch | None, seconds: float) -> _Stretch:
    """`last`, where calls that take `seconds` may follow in it, or a new task."""
    if last is None or last.steps or last.pieces or (last.joined and last.seconds + seconds > LONGEST_SECONDS):
        last = _Stretch()
        tasks.append(last)
    return last
