"""Trace: an observer that keeps the spans of its runs (`spans`), on workers and on streams.

`Trace.write` turns them into a file that Perfetto and chrome://tracing open (`trace_file`). Where the layout of a
tensor is converted for an operator, the conversion has a span of its own within the operator's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dagexec.core.conversion import Conversion
from dagexec.core.drawing.names import operator_title
from dagexec.core.drawing.pictures import lanes_picture, summary, table
from dagexec.scheduler.observe.observed_run import ObservedRun, RunsUnderWay
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.observe.spans import (
    Arrow,
    ChainSpan,
    EventWait,
    KernelSpan,
    PieceSpan,
    RunFailure,
    Span,
    Spans,
    StreamTrack,
    StreamWait,
    TracedRun,
)

if TYPE_CHECKING:
    from dagexec.core.stream import Event, Kernel, Stream


class Trace(Spans, Observer):
    """An observer that keeps spans."""

    def __init__(self) -> None:
        super().__init__()
        self._under_way = RunsUnderWay()
        self._numbers: dict[ObservedRun, int] = {}  # of the runs under way, their places in `runs`
        self._records: dict[int, tuple[Event, StreamTrack, int]] = {}  # by the id of the event, its last record

    def _repr_html_(self) -> str:
        """What a notebook shows: the workers of the last run as lanes, and its slowest operators."""
        if not self.runs:
            return summary("Trace: no runs")
        number = len(self.runs) - 1
        run = self.runs[number]
        work = self.work_of(number)
        spans = [span for span in self.spans if span.run == number and span.is_whole]
        label = list(map(operator_title, run.graph.operators))
        lanes = [
            (
                thread,
                [
                    (one.start - run.started, one.end - run.started, label[one.operator], one.operator)
                    for one in work
                    if one.thread == thread
                ],
            )
            for thread in sorted({span.thread for span in work})
        ]
        slowest = sorted(spans, key=lambda span: span.start - span.end)[:10]
        rows = [(label[one.operator], one.thread, f"{one.seconds * 1e6:.1f}") for one in slowest]
        title = f"Trace of {run.graph.name}: {len(self.runs)} runs, {len(spans)} operators in the last"
        return summary(title, lanes_picture(lanes), table(("slowest", "worker", "us"), rows))

    def write(self, path: Path) -> None:
        """Write the file. Raises OutputError if it cannot be written."""
        from dagexec.scheduler.observe.trace_file import write_trace

        write_trace(self, path)

    def run_started(self, run: ObservedRun) -> None:
        """Keep what the file needs of the run; not its operators, which hold tensors."""
        with self._lock:
            self._numbers[run] = len(self.runs)
            self.runs.append(TracedRun(run.graph, run.chains, run.parents, run.started))
        self._under_way.add(run)

    def run_stopped(self, run: ObservedRun, end: int, error: BaseException | None) -> None:
        """Let go of the run; keep its error."""
        self._under_way.remove(run)
        with self._lock:
            number = self._numbers.pop(run)
            if error is not None:
                self.failures.append(RunFailure(number, end, type(error).__name__, str(error)))

    def chain_stopped(
        self, run: ObservedRun, chain: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        self.chains.append(ChainSpan(chain, worker, run.ready(chain), start, end, self._numbers[run]))

    def event_waited(self, run: ObservedRun, chain: int, worker: str, start: int, end: int) -> None:
        self.event_waits.append(EventWait(chain, worker, start, end, self._numbers[run]))

    def converted(
        self, run: ObservedRun, operator: int, worker: str, conversion: Conversion, start: int, end: int
    ) -> None:
        self.spans.append(Span(operator, worker, start, end, conversion, self._numbers[run]))

    def inner_stopped(
        self,
        run: ObservedRun,
        operator: int,
        inner: str,
        worker: str,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        name = None if error is None else type(error).__name__
        self.spans.append(Span(operator, worker, start, end, None, self._numbers[run], name, inner))

    def piece_stopped(
        self,
        run: ObservedRun,
        operator: int,
        phase: int,
        piece: int,
        worker: str,
        start: int,
        end: int,
        error: BaseException | None,
    ) -> None:
        name = None if error is None else type(error).__name__
        self.pieces.append(PieceSpan(operator, phase, piece, worker, start, end, self._numbers[run], name))

    def operator_stopped(
        self, run: ObservedRun, operator: int, worker: str, start: int, end: int, error: BaseException | None
    ) -> None:
        name = None if error is None else type(error).__name__
        self.spans.append(Span(operator, worker, start, end, None, self._numbers[run], name))

    def launched(self, stream: Stream, kernel: Kernel) -> None:
        """Keep the order of launches."""
        self._track(stream).launched.append(kernel)

    def recorded(self, stream: Stream, event: Event) -> None:
        track = self._track(stream)
        self._records[id(event)] = (event, track, len(track.launched) - 1)

    def waits(self, stream: Stream, event: Event) -> None:
        """Keep an arrow, from the kernel before the event to the next one here."""
        record = self._records.get(id(event))
        if record is not None:
            track = self._track(stream)
            self.arrows.append(Arrow(event.owner, record[1], record[2], track, len(track.launched)))

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        found = self._under_way.find(kernel)
        run, operator = (None, None) if found is None else (self._numbers.get(found[0]), found[1])
        self._track(stream).add(kernel, KernelSpan(kernel.label, start, end, operator, run))

    def waited(self, stream: Stream, event: Event, start: float, end: float) -> None:
        self._track(stream).waits.append(StreamWait(event.owner, start, end))

    def _track(self, stream: Stream) -> StreamTrack:
        track = self._tracks.get(id(stream))
        if track is None:
            with self._lock:
                track = self._tracks.setdefault(id(stream), StreamTrack(stream))
        return track
