"""Trace: when each operator of a run ran and on which thread, written as a file that chrome://tracing and Perfetto
open.

A trace is taken by running wrapped steps; a run without one calls the plain steps and pays nothing. Where the layout
of a tensor is converted for an operator, the conversion has a span of its own within the operator's.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagexec.core.conversion import Conversion, ConvertedStep
from dagexec.core.graph import Graph
from dagexec.core.net_file import write_atomically
from dagexec.core.operator import Step
from dagexec.scheduler.preparation import CheckedStep


@dataclass(frozen=True, slots=True)
class Span:
    """One execution of an operator, or of a `conversion` for it: times in nanoseconds of `time.perf_counter_ns`."""

    operator: int
    thread: str
    start: int
    end: int
    conversion: Conversion | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


class Trace:
    """The spans of one or several runs. Workers add to it at the same time (`list.append` is atomic)."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def wrap(self, operator: int, step: Step) -> Step:
        """A step that runs `step` and records when."""
        spans = self.spans

        def traced() -> None:
            start = time.perf_counter_ns()
            current = step.current() if isinstance(step, CheckedStep) else step
            if isinstance(current, ConvertedStep):
                self._convert(operator, current.before)
                current.step()
                self._convert(operator, current.after)
            else:
                current()
            spans.append(Span(operator, threading.current_thread().name, start, time.perf_counter_ns()))

        return traced

    def _convert(self, operator: int, conversions: Sequence[Conversion]) -> None:
        for conversion in conversions:
            start = time.perf_counter_ns()
            conversion.copy()
            end = time.perf_counter_ns()
            self.spans.append(Span(operator, threading.current_thread().name, start, end, conversion))

    def operator_seconds(self, count: int) -> list[float]:
        """The median time of each of `count` operators, with conversions, over the runs traced; 0 if it never ran."""
        times: list[list[float]] = [[] for _ in range(count)]
        for span in self.spans:
            if span.conversion is None:
                times[span.operator].append(span.seconds)
        return [sorted(row)[len(row) // 2] if row else 0.0 for row in times]

    def write(self, path: Path, graph: Graph, chain_of: Sequence[int]) -> None:
        """Write the trace of a run of `graph` as Chrome trace events, one track a thread; times in microseconds.

        Format: "Trace Event Format" (Google, 2016), complete events. Raises ModelFormatError if it cannot be written.
        """
        threads = {name: number for number, name in enumerate(sorted({span.thread for span in self.spans}))}
        origin = min((span.start for span in self.spans), default=0)
        events: list[dict[str, object]] = [
            {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": f"net {graph.name}"}}
        ]
        for thread, number in threads.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": thread}})
        for span in self.spans:
            name, category, arguments = _described(span, graph, chain_of)
            events.append(
                {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "pid": 0,
                    "tid": threads[span.thread],
                    "ts": (span.start - origin) / 1e3,
                    "dur": (span.end - span.start) / 1e3,
                    "args": arguments,
                }
            )
        content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        write_atomically(Path(path), content.encode())


def _described(span: Span, graph: Graph, chain_of: Sequence[int]) -> tuple[str, str, dict[str, object]]:
    """Name, category and arguments of the event of `span`."""
    definition = graph.operators[span.operator]
    found: dict[str, object] = {"index": span.operator, "chain": chain_of[span.operator]}
    if span.conversion is None:
        found |= {"inputs": list(definition.input), "outputs": list(definition.output)}
        return definition.type, "operator", found
    blob, source, target = span.conversion.blob, span.conversion.source, span.conversion.target
    found |= {"blob": blob, "shape": list(source.shape), "from": source.layout, "to": target.layout}
    return f"convert {blob}", "conversion", found
