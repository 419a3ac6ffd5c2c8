"""A comparison in three sentences: which runtime is fastest, what its critical path is, where its time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dagexec.analysis.bounds import RunBounds, run_bounds
from dagexec.analysis.comparison import Comparison, RuntimeResult
from dagexec.core.drawing.names import operator_name
from dagexec.core.graph import Graph
from dagexec.executor.executor import Executor
from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.plan import MemoryPlan
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.plan import Plan

_ROUNDS = 5

_NOTABLE = 0.01
"""Shares of the time below this are not worth mentioning."""


@dataclass(frozen=True)
class TracedRuntime:
    """A typical run of a runtime: `trace` holds several, of which number `run` took the median time.

    Attributes:
        memory: the plan of its memory, if its net has one.
    """

    net_type: str
    workers: int
    plan: Plan
    trace: Trace
    run: int
    memory: MemoryPlan | None

    @property
    def name(self) -> str:
        """The run in words."""
        return f"{self.net_type}, {self.workers} worker{'s' if self.workers > 1 else ''}"

    def bounds(self, operator_seconds: Sequence[float] | None = None) -> RunBounds:
        """What bounds that run; `operator_seconds` are those of each operator alone on the machine."""
        return run_bounds(self.trace, self.workers, self.run, operator_seconds)

    def operator_seconds(self) -> list[float]:
        """The median time of each operator."""
        return self.trace.operator_seconds(len(self.plan.graph))


def traced_runtime(
    net_type: str, workers: int, executor: Executor, feeds: Mapping[str, npt.NDArray[np.generic]]
) -> TracedRuntime:
    """Run `executor` a few times under a trace."""
    trace = Trace()
    for _ in range(_ROUNDS):
        executor.run(feeds, trace=trace)
    ends = [max((chain.end for chain in trace.chains if chain.run == run), default=0) for run in range(_ROUNDS)]
    lengths = [end - traced.started for end, traced in zip(ends, trace.runs, strict=True)]
    typical = sorted(range(_ROUNDS), key=lengths.__getitem__)[_ROUNDS // 2]
    net = executor.net()
    return TracedRuntime(net_type, workers, net.plan, trace, typical, net.prepared().memory)


def explained_row(comparison: Comparison) -> RuntimeResult:
    """The runtime that an explanation is about: the fastest of several workers, or else the fastest."""
    several = [row for row in comparison.rows if row.workers > 1]
    return max(several or comparison.rows, key=lambda row: row.speed_up)


def explain(comparison: Comparison, bounds: RunBounds, plan: Plan) -> tuple[str, str, str]:
    """Three sentences about the runtime of `explained_row`, whose typical run has these `bounds`."""
    return _speed(comparison, explained_row(comparison)), _path(bounds, plan, comparison), _causes(bounds, plan)


def _speed(comparison: Comparison, row: RuntimeResult) -> str:
    simple = next(other for other in comparison.rows if other.net_type == "simple")
    if row is simple:
        return f"Only SimpleNet was measured: it takes {_ms(simple.median_ms)}."
    said = f"{comparison.repeat} rounds are too few to compare them" if row.verdict is None else row.verdict.sentence
    return (
        f"{row.runtime}, takes {_ms(row.median_ms)} and SimpleNet {_ms(simple.median_ms)}: {said}; the DAG of this net "
        f"allows no more than {row.bound:.2f} on any number of workers."
    )


def _path(bounds: RunBounds, plan: Plan, comparison: Comparison) -> str:
    operators = [operator for step in bounds.path for operator in step.operators]
    if not operators:
        return "The net has no operators."
    seconds = comparison.cost_model.operator_seconds
    slowest = max(operators, key=seconds.__getitem__)
    ends = _label(plan.graph, operators[0]), _label(plan.graph, operators[-1])
    return (
        f"Its critical path, {len(operators)} of {len(plan.graph)} operators from {ends[0]} to {ends[1]}, computes for "
        f"{_ms(bounds.path_seconds * 1e3)} of the {_ms(bounds.seconds * 1e3)} of a traced run; most of that, "
        f"{_ms(seconds[slowest] * 1e3)}, goes to {_label(plan.graph, slowest)}."
    )


def _causes(bounds: RunBounds, plan: Plan) -> str:
    whole = bounds.seconds * bounds.workers
    causes = [
        (bounds.idle.serial, f"nothing can run beside {_most_serial(bounds, plan)} (serial bottleneck)"),
        (bounds.idle.imbalance, "branches differ in length (imbalance)"),
        (bounds.idle.overhead, "chains are handed out and workers woken (overhead)"),
    ]
    shares = [(seconds / whole, why) for seconds, why in sorted(causes, reverse=True) if seconds / whole >= _NOTABLE]
    who = "the worker's time" if bounds.workers == 1 else f"the time of {bounds.workers} workers"
    text = f"Of {who}, {bounds.busy / whole:.0%} is computing"
    if shares:
        text += "; idle are " + ", ".join(f"{share:.0%} while {why}" for share, why in shares)
    if bounds.slowdown is not None and bounds.slowdown >= 1 + _NOTABLE:
        text += (
            f"; beside each other operators take {bounds.slowdown:.2f} times as long as alone "
            "(caches and memory are shared)"
        )
    return text + "."


def _most_serial(bounds: RunBounds, plan: Plan) -> str:
    """The chain on the path that runs alone for the longest time, by its slowest operator."""
    lost: dict[int, int] = {}
    for interval in bounds.intervals:
        if interval.cause == "serial":
            lost[interval.chain] = lost.get(interval.chain, 0) + (interval.end - interval.start) * interval.workers
    if not lost:
        return "one chain"
    operators = plan.chains[max(lost, key=lost.__getitem__)]
    others = f" and {len(lost) - 1} more chains" if len(lost) > 1 else ""
    return f"the chain from {_label(plan.graph, operators[0])}{others}"


def _label(graph: Graph, operator: int) -> str:
    definition = graph.operators[operator]
    return f"{definition.type} {operator_name(definition)!r}"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 100 else f"{milliseconds:.0f} ms"
