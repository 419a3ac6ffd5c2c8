"""The file of a trace, in the "Trace Event Format" (Google, 2016) that Perfetto and chrome://tracing read.

    process                      tracks            what is on them
    one a run, "net NAME, run N" one a worker      chains (X), in them operators, conversions and waits for events
                                                   (X); pieces of operators that workers shared
                                 queue wait        async spans (b, e): a chain from when it is ready till it is taken
                                 chains, operators likewise, where they were shared
    one a device                 one a stream      kernels (X) and waits for events, on the device's clock

Arrows (s, f) lead from the chain that made another ready to that one when a different worker took it, and from the
kernel before an event to the kernel that waited for it on another stream. An instant (i) with the error is where
a run failed.

Processes are numbered from 1 and tracks from there on: Perfetto takes a number for one thread wherever it appears.

Times are microseconds. On the host they count from the start of the first run; on devices, whose clocks may be virtual,
from the first thing seen on any of them.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from dagexec.core.device import CPU, Device
from dagexec.platform.files import write_atomically
from dagexec.scheduler.observe.spans import (
    ChainSpan,
    EventWait,
    KernelSpan,
    PieceSpan,
    Span,
    Spans,
    StreamTrack,
    TracedRun,
)

TraceEvent = dict[str, object]
Place = tuple[int, int, float]
"""A process, a track, and a time in microseconds."""


def write_trace(trace: Spans, path: Path) -> None:
    """Write `trace` to `path`. Raises OutputError if it cannot be written."""
    content = json.dumps({"traceEvents": trace_events(trace), "displayTimeUnit": "ms"})
    write_atomically(Path(path), content.encode())


def trace_events(trace: Spans) -> list[TraceEvent]:
    """The events of `trace`: what names processes and tracks first, then the others by time."""
    arrows = itertools.count(1)
    streams = sorted(trace.tracks, key=_device_and_name)
    tids = itertools.count(len(trace.runs) + len({track.stream.device for track in streams}) + 1)
    events = [*_HostEvents(trace, tids, arrows).events(), *_device_events(trace, streams, tids, arrows)]
    names = [event for event in events if event["ph"] == "M"]
    others = [event for event in events if event["ph"] != "M"]
    return names + sorted(others, key=_time)


def _device_and_name(track: StreamTrack) -> tuple[str, int, str]:
    """Stream 10 after stream 9."""
    return str(track.stream.device), len(track.stream.name), track.stream.name


def _time(event: TraceEvent) -> tuple[float, float]:
    """Outer spans before those that start with them."""
    ts, dur = event["ts"], event.get("dur", 0.0)
    assert isinstance(ts, float)
    assert isinstance(dur, float)
    return ts, -dur


def _name(what: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _arrow(category: str, number: int, source: Place, target: Place) -> Iterator[TraceEvent]:
    """An arrow between two places, each within a span that it is bound to."""
    for phase, (pid, tid, time), binding in (("s", source, {}), ("f", target, {"bp": "e"})):
        event: TraceEvent = {"name": category, "cat": category, "ph": phase, "id": number}
        yield event | {"pid": pid, "tid": tid, "ts": time} | binding


class _HostEvents:
    """The events of the workers of all runs."""

    def __init__(self, trace: Spans, tids: Iterator[int], identifiers: Iterator[int]) -> None:
        self._trace = trace
        self._identifiers = identifiers
        self._origin = min((run.started for run in trace.runs), default=0)
        spans: list[Span | PieceSpan | ChainSpan | EventWait] = [
            *trace.spans, *trace.pieces, *trace.chains, *trace.event_waits,
        ]  # fmt: skip
        self._shared = {(piece.run, piece.operator) for piece in trace.pieces}
        self._threads = {used: next(tids) for used in sorted({(span.run, span.thread) for span in spans})}

    def events(self) -> Iterator[TraceEvent]:
        """All of them."""
        trace = self._trace
        for number, run in enumerate(trace.runs):
            yield _name("process_name", number + 1, number + 1, f"net {run.graph.name}, run {number + 1}")
        for (number, thread), tid in self._threads.items():
            yield _name("thread_name", number + 1, tid, thread)
        for chain in trace.chains:
            yield from self._chain(chain, trace.runs[chain.run])
        for wait in trace.event_waits:
            name, category = _described_wait(wait, trace.runs[wait.run])
            yield self._complete(wait.run, wait.thread, name, category, wait.start, wait.end, {"chain": wait.chain})
        chain_of = [_chain_of(run) for run in trace.runs]
        for span in trace.spans:
            name, category, arguments = _described(span, trace.runs[span.run], chain_of[span.run])
            make = self._across if (span.run, span.operator) in self._shared and span.is_whole else self._within
            yield from make(span.run, span.thread, name, category, span.start, span.end, arguments)
        for piece in trace.pieces:
            name, arguments = _described_piece(piece, trace.runs[piece.run], chain_of[piece.run])
            yield self._complete(piece.run, piece.thread, name, "piece", piece.start, piece.end, arguments)
        for failure in trace.failures:
            yield {
                "name": f"run failed: {failure.name}", "cat": "failure", "ph": "i", "s": "p", "pid": failure.run + 1,
                "tid": failure.run + 1, "ts": self._microseconds(failure.end), "args": {"error": failure.message},
            }  # fmt: skip
        yield from self._arrows()

    def _microseconds(self, nanoseconds: int) -> float:
        return (nanoseconds - self._origin) / 1e3

    def _complete(
        self, run: int, thread: str, name: str, category: str, start: int, end: int, arguments: TraceEvent
    ) -> TraceEvent:
        return {
            "name": name, "cat": category, "ph": "X", "pid": run + 1, "tid": self._threads[run, thread],
            "ts": self._microseconds(start), "dur": (end - start) / 1e3, "args": arguments,
        }  # fmt: skip

    def _within(
        self, run: int, thread: str, name: str, category: str, start: int, end: int, arguments: TraceEvent
    ) -> Iterator[TraceEvent]:
        """A span on the track of a worker."""
        yield self._complete(run, thread, name, category, start, end, arguments)

    def _across(
        self, run: int, thread: str, name: str, category: str, start: int, end: int, arguments: TraceEvent
    ) -> Iterator[TraceEvent]:
        """A span beside the tracks of workers, who did other things, too, while it lasted."""
        number = next(self._identifiers)
        for phase, time in (("b", start), ("e", end)):
            yield {
                "name": name, "cat": category, "ph": phase, "id": number, "pid": run + 1,
                "tid": self._threads[run, thread], "ts": self._microseconds(time), "args": arguments,
            }  # fmt: skip

    def _chain(self, span: ChainSpan, run: TracedRun) -> Iterator[TraceEvent]:
        operators = list(run.chains[span.chain])
        arguments: TraceEvent = {
            "chain": span.chain, "operators": len(operators), "queue wait us": (span.start - span.ready) / 1e3,
        }  # fmt: skip
        shared = any((span.run, operator) in self._shared for operator in operators)
        make = self._across if shared else self._within
        yield from make(span.run, span.thread, f"chain {span.chain}", "chain", span.start, span.end, arguments)
        waited: TraceEvent = {"chain": span.chain}
        yield from self._across(span.run, span.thread, "queue wait", "queue wait", span.ready, span.start, waited)

    def _arrows(self) -> Iterator[TraceEvent]:
        """From the parent that was done last to its child, where another worker took the child."""
        spans = {(span.run, span.chain): span for span in self._trace.chains}
        for child in self._trace.chains:
            found = (spans.get((child.run, parent)) for parent in self._trace.runs[child.run].parents[child.chain])
            parents = [parent for parent in found if parent is not None]
            last = max(parents, key=lambda span: span.end, default=child)
            if last.thread != child.thread:
                pid = child.run + 1
                source, target = self._threads[child.run, last.thread], self._threads[child.run, child.thread]
                before, after = self._microseconds(max(last.start, last.end - 1)), self._microseconds(child.start)
                number = next(self._identifiers)
                yield from _arrow("dependency", number, (pid, source, before), (pid, target, after))


def _described_wait(wait: EventWait, run: TracedRun) -> tuple[str, str]:
    """A worker stands still for a chain on the host; for one on a device it mostly tells a stream what to wait for."""
    if run.graph.device(run.chains[wait.chain][0]) == CPU:
        return f"chain {wait.chain} waits for events", "event wait"
    return f"chain {wait.chain}: stream chosen, events to wait for", "stream"


def _chain_of(run: TracedRun) -> dict[int, int]:
    return {operator: number for number, chain in enumerate(run.chains) for operator in chain}


def _described(span: Span, run: TracedRun, chain_of: dict[int, int]) -> tuple[str, str, TraceEvent]:
    """Name, category and arguments of the event of `span`."""
    definition = run.graph.operators[span.operator]
    found: TraceEvent = {"index": span.operator, "chain": chain_of[span.operator]}
    if definition.name:
        found["operator"] = definition.name
    if span.inner is not None:
        found |= {"inner": span.inner} | ({} if span.error is None else {"failed": span.error})
        return span.inner.split(" ", 1)[0], "inner operator", found
    if span.conversion is None:
        found |= {"inputs": list(definition.input), "outputs": list(definition.output)}
        found |= {} if span.error is None else {"failed": span.error}
        on_device = run.graph.device(span.operator) != CPU
        return (f"launch {definition.type}" if on_device else definition.type), "operator", found
    blob, source, target = span.conversion.blob, span.conversion.source, span.conversion.target
    found |= {"blob": blob, "shape": list(source.shape), "from": source.layout, "to": target.layout}
    return f"convert {blob}", "conversion", found


def _described_piece(piece: PieceSpan, run: TracedRun, chain_of: dict[int, int]) -> tuple[str, TraceEvent]:
    """Name and arguments of the event of `piece`."""
    definition = run.graph.operators[piece.operator]
    found: TraceEvent = {
        "index": piece.operator, "chain": chain_of[piece.operator], "phase": piece.phase, "piece": piece.piece,
    }  # fmt: skip
    if definition.name:
        found["operator"] = definition.name
    return f"{definition.type} {piece.phase}.{piece.piece}", found | (
        {} if piece.error is None else {"failed": piece.error}
    )


def _device_events(
    trace: Spans, tracks: Sequence[StreamTrack], numbers: Iterator[int], identifiers: Iterator[int]
) -> Iterator[TraceEvent]:
    """The events of all streams, on tracks of these numbers."""
    devices = list(dict.fromkeys(track.stream.device for track in tracks))
    starts = [span.start for track in tracks for span in track.kernels]
    origin = min(starts + [wait.start for track in tracks for wait in track.waits], default=0.0)
    pids = {device: number for number, device in enumerate(devices, len(trace.runs) + 1)}
    tids = {id(track): next(numbers) for track in tracks}
    for device, pid in pids.items():
        yield _name("process_name", pid, pid, f"{device}, {_clock(device)}")
    for track in tracks:
        pid, tid = pids[track.stream.device], tids[id(track)]
        yield _name("thread_name", pid, tid, track.stream.name)
        for kernel in track.kernels:
            name, arguments = _kernel(kernel, trace)
            yield _on_stream(name, "kernel", pid, tid, kernel.start - origin, kernel.seconds, arguments)
        for wait in track.waits:
            if wait.end > wait.start:
                where = pid, tid, wait.start - origin, wait.end - wait.start
                yield _on_stream(f"wait for {wait.owner}", "event wait", *where, {})
    launches = {id(track): track.by_launch() for track in tracks}
    for arrow in trace.arrows:
        before = launches[id(arrow.source)].get(arrow.before)
        after = launches[id(arrow.stream)].get(arrow.after)
        if before is not None and after is not None and arrow.source is not arrow.stream:
            yield from _arrow(
                "event",
                next(identifiers),
                _place(pids, tids, arrow.source, max(before.start, before.end - 1e-9) - origin),
                _place(pids, tids, arrow.stream, after.start - origin),
            )


def _clock(device: Device) -> str:
    return "virtual time" if device.kind == "sim" else "device time"


def _place(pids: dict[Device, int], tids: dict[int, int], track: StreamTrack, seconds: float) -> Place:
    return pids[track.stream.device], tids[id(track)], seconds * 1e6


def _on_stream(
    name: str, category: str, pid: int, tid: int, start: float, seconds: float, arguments: TraceEvent
) -> TraceEvent:
    return {
        "name": name, "cat": category, "ph": "X", "pid": pid, "tid": tid, "ts": start * 1e6, "dur": seconds * 1e6,
        "args": arguments,
    }  # fmt: skip


def _kernel(span: KernelSpan, trace: Spans) -> tuple[str, TraceEvent]:
    if span.operator is None or span.run is None:
        return span.label, {}
    definition = trace.runs[span.run].graph.operators[span.operator]
    arguments: TraceEvent = {
        "index": span.operator, "run": span.run + 1, "inputs": list(definition.input),
        "outputs": list(definition.output),
    }  # fmt: skip
    return definition.type, arguments
