"""The spans of traced runs: when each operator, chain and wait took place, on workers and on streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from dagexec.core.conversion import Conversion
from dagexec.core.drawing.names import operator_name
from dagexec.core.graph import Graph
from dagexec.platform.extras import require_pandas
from dagexec.platform.records import dataclass
from dagexec.platform.threads import threads

if TYPE_CHECKING:
    import pandas

    from dagexec.core.stream import Kernel, Stream


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


class Spans:
    """The spans of one or several runs. Workers add to them at the same time (`list.append` is atomic)."""

    def __init__(self) -> None:
        self.runs: list[TracedRun] = []
        self.spans: list[Span] = []
        self.pieces: list[PieceSpan] = []
        self.chains: list[ChainSpan] = []
        self.event_waits: list[EventWait] = []
        self.arrows: list[Arrow] = []
        self.failures: list[RunFailure] = []
        self._lock = threads().lock()
        self._tracks: dict[int, StreamTrack] = {}  # by the id of the stream

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
