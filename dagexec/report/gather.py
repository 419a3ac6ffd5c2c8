"""Reports of runs and comparisons, from executors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dagexec.analysis.bounds import RunBounds
from dagexec.analysis.comparison import Comparison
from dagexec.analysis.explanation import TracedRuntime, explain, explained_row, traced_runtime
from dagexec.analysis.memory import planned
from dagexec.core.device import CPU
from dagexec.core.dtypes import from_numpy
from dagexec.core.graph import Graph, build_graph
from dagexec.core.inference import NetTypes, infer_net
from dagexec.core.model import Model
from dagexec.core.schema import TensorType
from dagexec.executor.executor import Executor
from dagexec.report.comparison import ComparisonSection, WhatIfSection, figures
from dagexec.report.document import Report, Section
from dagexec.report.graph import GraphSection
from dagexec.report.memory import MemorySection
from dagexec.report.timeline import TimelineSection
from dagexec.scheduler.plan.plan import Plan, build_plan

Feeds = Mapping[str, npt.NDArray[np.generic]]


def types_of(graph: Graph, model: Model, feeds: Feeds) -> NetTypes:
    """The inferred types of a net of `model` that is fed with `feeds`."""
    arrays = {**model.parameters, **feeds}
    inputs = {name: TensorType(tuple(array.shape), from_numpy(array.dtype)) for name, array in arrays.items()}
    return infer_net(graph, inputs, model.parameters)


def run_report(runtime: TracedRuntime, model: Model, feeds: Feeds, given: Model | None = None) -> Report:
    """A page about a typical run of `model`, which compile made from `given`."""
    graph = runtime.plan.graph
    lines = [f"{len(graph)} operators in {len(runtime.plan.chains)} chains, {runtime.name}"]
    if runtime.net_type == "simple":
        lines.append("SimpleNet runs all operators on one thread as they are listed: the run shows one chain.")
    before = _given_plan(given, graph)
    lines += _joined(before, runtime.plan)
    sections = _run_sections(runtime, types_of(graph, model, feeds), _host_bounds(runtime), before)
    return Report(model.name, lines, sections)


def _given_plan(given: Model | None, graph: Graph) -> Plan | None:
    """The plan of the net before compilation; None where `graph` has the same operators."""
    if given is None:
        return None
    before = build_graph(given.net, lambda _: True)  # it has run: all that it reads exists
    kinds = [[(operator.type, tuple(operator.output)) for operator in net.operators] for net in (before, graph)]
    return None if kinds[0] == kinds[1] else build_plan(before, [0.0] * len(before))


def _joined(before: Plan | None, plan: Plan) -> list[str]:
    """What compile did to the original net, in a sentence."""
    if before is None:
        return []
    fewer = ", and chains with them" if len(plan.chains) < len(before.chains) else ""
    return [
        f"As it is given, the net has {len(before.graph)} operators in {len(before.chains)} chains: compile joined "
        f"operators{fewer}. A button above the drawing shows the net as given."
    ]


class TracedRuntimes:
    """Typical runs of all runtimes of a comparison, for which `compare` calls `add` (its `on_measured`)."""

    def __init__(self, given: Model | None = None) -> None:
        """`given` is the model before compilation, which is shown beside the net that runs."""
        self._given = given
        self._runtimes: dict[tuple[str, int], TracedRuntime] = {}
        self._types: dict[tuple[str, int], NetTypes] = {}
        self._fed: tuple[Model, Feeds]

    def add(self, net_type: str, workers: int, executor: Executor, feeds: Feeds) -> None:
        """Run it a few times."""
        runtime = traced_runtime(net_type, workers, executor, feeds)
        self._runtimes[net_type, workers] = runtime
        self._types[net_type, workers] = types_of(runtime.plan.graph, executor.model, feeds)
        self._fed = executor.model, feeds

    def explanation(self, comparison: Comparison) -> tuple[str, str, str]:
        """The finding in three sentences."""
        runtime, bounds = self._explained(comparison)
        return explain(comparison, bounds, runtime.plan)

    def report(self, comparison: Comparison) -> Report:
        """A page about the comparison and the runtime that is explained."""
        runtime, bounds = self._explained(comparison)
        sections: list[Section] = [ComparisonSection(comparison.contenders)]
        if comparison.what_if:
            sections.append(WhatIfSection(comparison.what_if))
        model, feeds = self._fed
        before = _given_plan(self._given, runtime.plan.graph)
        net_type = runtime.net_type.partition(":")[0]
        with planned(model, net_type, feeds) as preparation:  # in the comparison nets keep all blobs
            planned_runtime = replace(runtime, memory=preparation.memory)
        sections += _run_sections(planned_runtime, self._types[runtime.net_type, runtime.workers], bounds, before)
        lines = comparison.finding, *explain(comparison, bounds, runtime.plan), *_joined(before, runtime.plan)
        large = figures(comparison, explained_row(comparison))
        return Report(comparison.model, lines, sections, large, comparison.environment)

    def _explained(self, comparison: Comparison) -> tuple[TracedRuntime, RunBounds]:
        row = explained_row(comparison)
        runtime = self._runtimes[row.net_type, row.workers]
        return runtime, runtime.bounds(self._runtimes["simple", 1].operator_seconds())


def _host_bounds(runtime: TracedRuntime) -> RunBounds | None:
    """What bounds the run of `runtime`; None where a device computes and chains only launch."""
    graph = runtime.plan.graph
    on_host = all(graph.device(index) == CPU for index in range(len(graph)))
    return runtime.bounds() if on_host else None


def _run_sections(
    runtime: TracedRuntime, types: NetTypes, bounds: RunBounds | None, given: Plan | None = None
) -> list[Section]:
    path = () if bounds is None else tuple(operator for step in bounds.path for operator in step.operators)
    chain_of = runtime.plan.chain_of
    sections: list[Section] = [
        TimelineSection(runtime.trace, runtime.run, bounds, chain_of, f"A run: {runtime.name}"),
        GraphSection(runtime.plan, types, runtime.operator_seconds(), frozenset(path), given=given),
    ]
    if runtime.memory is not None:
        sections.append(MemorySection(runtime.memory, runtime.plan.graph, chain_of))
    return sections
