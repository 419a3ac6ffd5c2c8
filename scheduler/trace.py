"""Trace: when each operator of a run ran and on which thread, written as a file that chrome://tracing and Perfetto
open.

A trace is taken by running wrapped steps; a run without one calls the plain steps and pays nothing.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dagexec.core.graph import Graph
from dagexec.core.net_file import write_atomically
from dagexec.core.operator import Step


@dataclass(frozen=True, slots=True)
class Span:
    """One execution of an operator: times in nanoseconds of `time.perf_counter_ns`."""

    operator: int
    thread: str
    start: int
    end: int

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
            step()
            spans.append(Span(operator, threading.current_thread().name, start, time.perf_counter_ns()))

        return traced

    def operator_seconds(self, count: int) -> list[float]:
        """The median time of each of `count` operators over the runs traced; 0 for one that never ran."""
        times: list[list[float]] = [[] for _ in range(count)]
        for span in self.spans:
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
        for name, number in threads.items():
            events.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": number, "args": {"name": name}})
        for span in self.spans:
            definition = graph.operators[span.operator]
            events.append(
                {
                    "name": definition.type,
                    "cat": "operator",
                    "ph": "X",
                    "pid": 0,
                    "tid": threads[span.thread],
                    "ts": (span.start - origin) / 1e3,
                    "dur": (span.end - span.start) / 1e3,
                    "args": {
                        "index": span.operator,
                        "chain": chain_of[span.operator],
                        "inputs": list(definition.input),
                        "outputs": list(definition.output),
                    },
                }
            )
        content = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
        write_atomically(Path(path), content.encode())
