"""Trace: an observer that keeps when each operator, chain and wait of its runs took place, on workers and on streams.

`Trace.write` makes of it a file that Perfetto and chrome://tracing open (`scheduler.trace_file`). Where the layout of a
tensor is converted for an operator, the conversion has a span of its own within the operator's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dagexec.core.conversion import Conversion
from dagexec.core.drawing.names import operator_name, operator_title
from dagexec.core.drawing.pictures import lanes_picture, summary, table
from dagexec.core.graph import Graph
from dagexec.platform.extras import require_pandas
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads
from dagexec.scheduler.observe.observed_run import ObservedRun, RunsUnderWay
from dagexec.scheduler.observe.observers import Observer

if TYPE_CHECKING:
    import pandas

    from dagexec.core.stream import Event, Kernel, Stream


@dataclass(frozen=True, slots=True)
class TracedRun:
    """A run: its operators, the operator indices of its chains, the chains each waits for, and when it was made."""

    graph: Graph
    chains: Sequence[Sequence[int]]
    parents: Sequence[Sequence[int]]
    started: int


@dataclass(frozen=True, slots=True)
class Span:
    """One execution of an operator by a worker, or of a `conversion` for it; on a device the launch of the operator.

    With `inner`, of an operator of that label in a net that the operator runs, or in the session of an island. Of an
    operator whose pieces were shared (`Trace.pieces`), from the first to the last of them; `thread` was one of several.

    Times are nanoseconds of `time.perf_counter_ns`; `run` is the place of the run in `Trace.runs`. `error` is the name
    of what the operator raised.
    """

    operator: int
    thread: str
    start: int
    end: int
    conversion: Conversion | None = None
    run: int = 0
    error: str | None = None
    inner: str | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9

    @property
    def is_whole(self) -> bool:
        """True for a whole operator of the run, not a part of one."""
        return self.conversion is None and self.inner is None


@dataclass(frozen=True, slots=True)
class PieceSpan:
    """One execution of a piece of an operator by a worker; times as of a `Span`."""

    operator: int
    phase: int
    piece: int
    thread: str
    start: int
    end: int
    run: int
    error: str | None = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end - self.start) / 1e9


@dataclass(frozen=True, slots=True)
class RunFailure:
    """A run ended with an error at a time of `time.perf_counter_ns`; what failed on a stream is told of only here."""

    run: int
    end: int
    name: str
    message: str


@dataclass(frozen=True, slots=True)
class RunSeconds:
    """The seconds of all operators of a run together, and those from the start of the first to the end of the last."""

    operators: float
    extent: float


@dataclass(frozen=True, slots=True)
class ChainSpan:
    """One execution of a chain by a worker. It waited in the queue from `ready` to `start`."""

    chain: int
    thread: str
    ready: int
    start: int
    end: int
    run: int


@dataclass(frozen=True, slots=True)
class EventWait:
    """A worker had a chain wait for an event of its parents; it stood still itself where it is longer than a moment."""

    chain: int
    thread: str
    start: int
    end: int
    run: int


@dataclass(frozen=True, slots=True)
class KernelSpan:
    """A kernel on a stream; `start` and `end` are seconds of the device's clock. `operator` is None for copies."""

    label: str
    start: float
    end: float
    operator: int | None
    run: int | None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class StreamWait:
    """A stream stood still for an event, whose owner is named; seconds of the device's clock."""

    owner: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Arrow:
    """Kernel number `after` that was launched on `stream` waited for kernel number `before` of `source`.

    Between them is an event of `owner`, recorded on `source` and waited for on `stream`.
    """

    owner: str
    source: StreamTrack
    before: int
    stream: StreamTrack
    after: int


class StreamTrack:
    """What was seen of one stream.

    Attributes:
        stream: the stream.
        kernels: those that ran, in order.
        waits: for which events it stood still.
        launched: all kernels that were launched, in order; some may not have run.
    """

    __slots__ = ("_ran", "kernels", "launched", "stream", "waits")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.kernels: list[KernelSpan] = []
        self.waits: list[StreamWait] = []
        self.launched: list[Kernel] = []
        self._ran: list[Kernel] = []

    def add(self, kernel: Kernel, span: KernelSpan) -> None:
        """`kernel` ran."""
        self._ran.append(kernel)
        self.kernels.append(span)

    def by_launch(self) -> dict[int, KernelSpan]:
        """The spans of `kernels`, by the place of their launch in `launched`. Streams keep the order of launches."""
        found: dict[int, KernelSpan] = {}
        position = 0
        for kernel, span in zip(self._ran, self.kernels, strict=False):
            place = next((i for i in range(position, len(self.launched)) if self.launched[i] is kernel), None)
            if place is not None:
                found[place] = span
                position = place + 1
        return found


class Trace(Observer):
    """The spans of one or several runs. Workers add to it at the same time (`list.append` is atomic)."""

    def __init__(self) -> None:
        self.runs: list[TracedRun] = []
        self.spans: list[Span] = []
        self.pieces: list[PieceSpan] = []
        self.chains: list[ChainSpan] = []
        self.event_waits: list[EventWait] = []
        self.arrows: list[Arrow] = []
        self.failures: list[RunFailure] = []
        self._lock = threads().lock()
        self._under_way = RunsUnderWay()
        self._numbers: dict[ObservedRun, int] = {}  # of the runs under way, their places in `runs`
        self._tracks: dict[int, StreamTrack] = {}  # by the id of the stream
        self._records: dict[int, tuple[Event, StreamTrack, int]] = {}  # by the id of the event, its last record

    @property
    def tracks(self) -> list[StreamTrack]:
        """The streams that something was seen of."""
        with self._lock:
            return list(self._tracks.values())

    def operator_seconds(self, count: int) -> list[float]:
        """The median time of each of `count` operators over the runs traced, with conversions; 0 if it never ran.

        Of an operator on a device the time on its stream counts.
        """
        host: list[list[float]] = [[] for _ in range(count)]
        device: list[list[float]] = [[] for _ in range(count)]
        for span in self.spans:
            if span.is_whole:
                host[span.operator].append(span.seconds)
        for track in self.tracks:
            for kernel in track.kernels:
                if kernel.operator is not None:
                    device[kernel.operator].append(kernel.seconds)
        rows = (sorted(on_device or on_host) for on_host, on_device in zip(host, device, strict=True))
        return [row[len(row) // 2] if row else 0.0 for row in rows]

    def work_of(self, run: int) -> list[Span | PieceSpan]:
        """What the workers did in a run: its operators, those that were shared by their pieces."""
        return [span for span in self._work() if span.run == run]

    def _work(self) -> Iterator[Span | PieceSpan]:
        shared = {(piece.run, piece.operator) for piece in self.pieces}
        yield from (span for span in self.spans if span.is_whole and (span.run, span.operator) not in shared)
        yield from self.pieces

    def run_seconds(self) -> list[RunSeconds]:
        """What the operators of each run took on the workers, for each run in which one ran."""
        spans: dict[int, list[Span | PieceSpan]] = {}
        for span in self._work():
            spans.setdefault(span.run, []).append(span)
        return [
            RunSeconds(
                sum(span.seconds for span in row),
                (max(span.end for span in row) - min(span.start for span in row)) / 1e9,
            )
            for _, row in sorted(spans.items())
        ]

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each span: run, operator, type, name, thread, start and seconds (from the start of its run).

        Raises DagexecError without pandas.
        """
        rows = [
            {
                "run": span.run,
                "operator": span.operator,
                "type": (definition := self.runs[span.run].graph.operators[span.operator]).type,
                "name": operator_name(definition),
                "thread": span.thread,
                "start": (span.start - self.runs[span.run].started) / 1e9,
                "seconds": span.seconds,
            }
            for span in self.spans
            if span.is_whole
        ]
        columns = ("run", "operator", "type", "name", "thread", "start", "seconds")
        return require_pandas().DataFrame(rows, columns=columns)

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
