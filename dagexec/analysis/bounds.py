"""What bounds a run: the path of chains that determined its duration, and why workers stood idle beside it.

The time of a run is workers x duration. The part that no chain used has a cause:

- *serial*: one chain ran, beside which none can ever run: all others come before or after it in the DAG;
- *imbalance*: no other chain was ready, although some could run beside those that ran: branches of different length,
  or too few of them;
- *overhead*: a chain was ready and a worker idle (until it was woken and had taken the chain), or nothing ran: the
  start and the end of the run.

A fourth cause shows in the operators themselves: beside each other they take longer than alone, as cores share caches
and the path to memory (*memory*).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise

from dagexec.errors import ArgumentError
from dagexec.platform.records import dataclass
from dagexec.scheduler.observe.spans import ChainSpan, TracedRun
from dagexec.scheduler.observe.trace import Trace


@dataclass(frozen=True)
class PathStep:
    """A chain on the critical path, which began `waited` seconds after the end of the one before.

    `for_worker` says that it was ready earlier, and waited for its worker, which ran the step before.
    """

    chain: int
    operators: tuple[int, ...]
    seconds: float
    waited: float
    for_worker: bool


@dataclass(frozen=True)
class Idle:
    """Seconds of idle workers, by cause."""

    serial: float
    imbalance: float
    overhead: float

    @property
    def total(self) -> float:
        """The sum over causes."""
        return self.serial + self.imbalance + self.overhead


@dataclass(frozen=True)
class IdleInterval:
    """`workers` workers stood idle from `start` to `end`, nanoseconds of the trace's clock; `cause` is a field of Idle.

    `chain` is the only one that ran, or -1.
    """

    start: int
    end: int
    workers: int
    cause: str
    chain: int


@dataclass(frozen=True)
class RunBounds:
    """What bounds one run.

    Attributes:
        workers: their number.
        seconds: the duration of the run.
        busy: seconds in chains, of all workers together.
        path: the critical path as it happened, from the first chain to the last.
        idle: why workers stood idle.
        intervals: when they did.
        slowdown: time of the operators over their time alone; None if unknown.
    """

    workers: int
    seconds: float
    busy: float
    path: tuple[PathStep, ...]
    idle: Idle
    intervals: tuple[IdleInterval, ...]
    slowdown: float | None

    @property
    def path_seconds(self) -> float:
        """Seconds in chains along the path; the rest of the run is their waits."""
        return sum(step.seconds for step in self.path)


def run_bounds(trace: Trace, workers: int, run: int = -1, operator_seconds: Sequence[float] | None = None) -> RunBounds:
    """What bounds run number `run` of `trace`, by default the last, which `workers` workers could have run.

    `operator_seconds` are those of each operator alone on the machine. Raises ArgumentError for a run of which no chain
    was traced on the host.
    """
    number = range(len(trace.runs))[run]
    traced = trace.runs[number]
    spans = sorted((span for span in trace.chains if span.run == number), key=lambda span: (span.start, span.end))
    if not spans:
        raise ArgumentError(f"net {traced.graph.name!r}: run {number}: the trace has no chain of it")
    start, end = min(traced.started, spans[0].start), max(span.end for span in spans)
    work = list(_by_worker(trace, number, spans))
    intervals = tuple(_idle_intervals(work, spans, start, end, workers, _without_company(traced)))
    seconds = dict.fromkeys(("serial", "imbalance", "overhead"), 0.0)
    for interval in intervals:
        seconds[interval.cause] += (interval.end - interval.start) * interval.workers / 1e9
    slowdown = None
    if operator_seconds is not None:
        alone = sum(operator_seconds[span.operator] for span in trace.spans if span.run == number and span.is_whole)
        actual = sum(span.seconds for span in trace.work_of(number))
        slowdown = actual / alone if alone else None
    busy = sum(interval.end - interval.start for interval in work) / 1e9
    path = tuple(_critical_path(spans, traced))
    return RunBounds(workers, (end - start) / 1e9, busy, path, Idle(**seconds), intervals, slowdown)


@dataclass(frozen=True)
class _Busy:
    """A worker was in a chain."""

    chain: int
    start: int
    end: int


def _by_worker(trace: Trace, run: int, spans: Sequence[ChainSpan]) -> Iterator[_Busy]:
    """When workers were in chains; for a chain with shared operators, in its operators and pieces."""
    chain_of = {operator: number for number, chain in enumerate(trace.runs[run].chains) for operator in chain}
    shared = {chain_of[piece.operator] for piece in trace.pieces if piece.run == run}
    yield from (_Busy(span.chain, span.start, span.end) for span in spans if span.chain not in shared)
    for span in trace.work_of(run):
        if chain_of[span.operator] in shared:
            yield _Busy(chain_of[span.operator], span.start, span.end)


def _without_company(run: TracedRun) -> frozenset[int]:
    """The chains that every other chain comes before or after."""
    count = len(run.chains)
    ancestors, descendants = [0] * count, [0] * count  # sets as bits
    order = _topological(run.parents)
    for chain in order:
        for parent in run.parents[chain]:
            ancestors[chain] |= ancestors[parent] | 1 << parent
    for chain in reversed(order):
        for parent in run.parents[chain]:
            descendants[parent] |= descendants[chain] | 1 << chain
    return frozenset(
        chain for chain in range(count) if (ancestors[chain] | descendants[chain]).bit_count() == count - 1
    )


def _topological(parents: Sequence[Sequence[int]]) -> list[int]:
    return list(TopologicalSorter(dict(enumerate(parents))).static_order())


def _idle_intervals(
    work: Sequence[_Busy],
    spans: Sequence[ChainSpan],
    start: int,
    end: int,
    workers: int,
    without_company: frozenset[int],
) -> Iterator[IdleInterval]:
    """The intervals between moments of change; each has one cause."""
    begins: dict[int, set[int]] = {}  # by time, the numbers of the work
    ends: dict[int, set[int]] = {}
    for number, item in enumerate(work):
        begins.setdefault(item.start, set()).add(number)
        ends.setdefault(item.end, set()).add(number)
    readies: dict[int, set[int]] = {}
    starts: dict[int, set[int]] = {}
    for span in spans:
        readies.setdefault(span.ready, set()).add(span.chain)
        starts.setdefault(span.start, set()).add(span.chain)
    moments = sorted({start, end, *(item for item in (*begins, *ends, *readies, *starts) if start <= item <= end)})
    running: set[int] = set()
    waiting: set[int] = set()
    for moment, following in pairwise(moments):
        waiting |= readies.get(moment, set())
        running |= begins.get(moment, set())
        waiting -= starts.get(moment, set())
        running -= ends.get(moment, set())
        idle = workers - len(running)
        chains = {work[number].chain for number in running}
        only = next(iter(chains)) if len(chains) == 1 else -1
        late = idle if not running else min(idle, len(waiting))
        if late > 0:
            yield IdleInterval(moment, following, late, "overhead", only)
        if idle > late:
            cause = "serial" if only in without_company else "imbalance"
            yield IdleInterval(moment, following, idle - late, cause, only)


def _critical_path(spans: Sequence[ChainSpan], run: TracedRun) -> Iterator[PathStep]:
    """From the chain that ended last back to what each waited for: the parent that ended last, or its worker."""
    by_chain = {span.chain: span for span in spans}
    before: dict[int, ChainSpan] = {}  # by chain, what its worker ran before
    latest: dict[str, ChainSpan] = {}
    for span in spans:
        if span.thread in latest:
            before[span.chain] = latest[span.thread]
        latest[span.thread] = span
    steps: list[PathStep] = []
    cause: ChainSpan | None = max(spans, key=lambda span: span.end)
    while cause is not None:
        span = cause
        parents = [by_chain[parent] for parent in run.parents[span.chain] if parent in by_chain]
        parent = max(parents, key=lambda span: span.end, default=None)
        worker = before.get(span.chain)
        for_worker = worker is not None and (parent is None or worker.end > parent.end)
        cause = worker if for_worker else parent
        ready = run.started if cause is None else cause.end
        operators = tuple(run.chains[span.chain])
        steps.append(
            PathStep(span.chain, operators, (span.end - span.start) / 1e9, max(0, span.start - ready) / 1e9, for_worker)
        )
    return reversed(steps)
