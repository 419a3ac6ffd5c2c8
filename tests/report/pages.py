"""Pages that are the same on every machine: a net as it is given, and times that are made up."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from dagexec.analysis.bounds import run_bounds
from dagexec.analysis.comparison import Comparison, PeerResult, RuntimeResult
from dagexec.analysis.statistics import spread, verdicts
from dagexec.analysis.what_if import CostModel, WhatIf
from dagexec.core.graph import build_graph
from dagexec.core.model import Model
from dagexec.core.proto import NetDef
from dagexec.report.comparison import ComparisonSection, WhatIfSection, figures
from dagexec.report.document import Report
from dagexec.report.graph import GraphSection
from dagexec.report.timeline import TimelineSection
from dagexec.scheduler.observe.spans import ChainSpan, Span, TracedRun
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.plan import Plan, build_plan
from dagexec.zoo import build
from tests.nets import net_of

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"


def plan_of(net: NetDef) -> Plan:
    graph = build_graph(net)
    return build_plan(graph, [1e-5] * len(graph))


def googlenet() -> Model:
    return build("googlenet")


def made_up_trace(plan: Plan, workers: Sequence[str] = ("worker 0", "worker 1")) -> Trace:
    """A chain takes 20 us an operator; it goes to the one of two workers that is free first."""
    trace = Trace()
    parents: list[list[int]] = [[] for _ in plan.chains]
    for chain, children in enumerate(plan.children):
        for child in children:
            parents[child].append(chain)
    trace.runs.append(TracedRun(plan.graph, plan.chains, parents, 0))
    ends: dict[int, int] = {}
    free = dict.fromkeys(workers, 0)
    while len(ends) < len(plan.chains):
        ready = {
            chain: max((ends[parent] for parent in row), default=0)
            for chain, row in enumerate(parents)
            if chain not in ends and all(parent in ends for parent in row)
        }
        chain = min(ready, key=lambda one: (ready[one], one))
        worker = min(free, key=lambda name: (max(free[name], ready[chain]), name))
        start = at = max(free[worker], ready[chain]) + 2_000
        for operator in plan.chains[chain]:
            trace.spans.append(Span(operator, worker, at, at + 20_000))
            at += 20_000
        trace.chains.append(ChainSpan(chain, worker, ready[chain], start, at, 0))
        ends[chain] = free[worker] = at
    return trace


def made_up_samples(median: float) -> tuple[float, ...]:
    stride = round(median) % 9 + 1
    return tuple(median * (1 + (number * stride % 11 - 5) / 100) for number in range(15))


def made_up_row(net_type: str, workers: int, median: float) -> RuntimeResult:
    samples = made_up_samples(median)
    quartiles = median * 0.98, median * 1.02
    verdict = verdicts({"simple": made_up_samples(20.0), "this": samples}, "simple")["this"]
    judged = None if net_type == "simple" else verdict
    return RuntimeResult(
        net_type, workers, 49, median, *quartiles, median * 0.97, 0.97, 20 / median, 1.5, 1.6, 0.0, True, samples,
        judged,
    )  # fmt: skip


def made_up_peer() -> PeerResult:
    """It has two speeds."""
    samples = tuple(one * (1.2 if number % 3 else 1.0) for number, one in enumerate(made_up_samples(15.0)))
    times = spread([one / 1e3 for one in samples])
    verdict = verdicts({"simple": made_up_samples(20.0), "this": samples}, "simple")["this"]
    milliseconds = times.median * 1e3, times.low * 1e3, times.high * 1e3
    return PeerResult("onnxruntime", 2, *milliseconds, 1e-7, samples, verdict, times.remarks)


def made_up_comparison() -> Comparison:
    """Of googlenet, with what the predictions and the machine are taken to be."""
    simple = made_up_row("simple", 1, 20.0)
    simple = replace(simple, samples_ms=(*simple.samples_ms, 90.0))  # a run that was interrupted
    rows = simple, made_up_row("dag", 2, 14.0), made_up_row("async_dag", 2, 13.5)
    gains = [1.4 ** min(n, 2) for n in range(7)]
    predictions = tuple(WhatIf(2**n, 0, 20 / gain, gain, 9.0, 18 / gain, 23 / gain) for n, gain in enumerate(gains))
    made_with = {"date": "2026-01-01T00:00:00+00:00", "command": "dagexec compare zoo:googlenet", "cores": 2}
    return Comparison(
        "googlenet", 142, 15, rows, CostModel((19e-6,) * 142), predictions, environment=made_with,
        peers=(made_up_peer(),),
    )  # fmt: skip


def made_up_report() -> Report:
    """A comparison of googlenet."""
    plan = plan_of(googlenet().net)
    trace = made_up_trace(plan)
    bounds = run_bounds(trace, 2, operator_seconds=[19e-6] * len(plan.graph))
    critical = frozenset(operator for step in bounds.path for operator in step.operators)
    comparison = made_up_comparison()
    sections = [
        ComparisonSection(comparison.contenders),
        WhatIfSection(comparison.what_if),
        TimelineSection(trace, 0, bounds, plan.chain_of, "A run: async_dag, 2 workers"),
        GraphSection(plan, None, trace.operator_seconds(len(plan.graph)), critical),
    ]
    lines = comparison.finding, "The times on this page are made up."
    return Report("googlenet", lines, sections, figures(comparison, comparison.rows[-1]), comparison.environment)


def large_report(operators: int) -> Report:
    """A net of many operators in modules."""
    net = net_of([[index - 1] if index else [] for index in range(operators)])
    for index, definition in enumerate(net.op):
        definition.name = f"/encoder/layer.{index // 500}/block.{index % 500 // 50}/op{index}"
    return Report("large", (), [GraphSection(plan_of(net))])


def hostile_report() -> Report:
    """A net whose names are markup."""
    net = net_of([[], [0]], name=HOSTILE)
    net.op[0].name = HOSTILE
    net.op[1].output[0] = HOSTILE
    return Report(HOSTILE, (HOSTILE,), [GraphSection(plan_of(net))])


def data_of(page: str) -> list[dict[str, object]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    sections: list[dict[str, object]] = json.loads(found[1])
    return sections
