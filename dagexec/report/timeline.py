"""The section that shows a run: workers and streams as lanes, what they ran and waited for, and what bounded them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dagexec.analysis.bounds import RunBounds
from dagexec.core.drawing.names import operator_title
from dagexec.platform.records import dataclass
from dagexec.report.document import Json
from dagexec.scheduler.observe.spans import ChainSpan, KernelSpan, StreamTrack, TracedRun
from dagexec.scheduler.observe.trace import Trace

_MICROSECOND = 1e-6
_IN_POOL = re.compile(r"dagexec-.*-\d+")


@dataclass(frozen=True)
class TimelineSection:
    """Run number `run` of `trace`, with what bounds it, which is None for a run without chains on the host.

    `chain_of` has the chain of each operator. Lanes of workers count from the start of the run, those of streams from
    the first kernel, on the device's clock.
    """

    trace: Trace
    run: int
    bounds: RunBounds | None
    chain_of: Sequence[int]
    title: str = "A run"

    kind = "timeline"

    def as_json(self) -> Json:
        """Lanes with spans in microseconds, arrows between lanes, the critical path and idle time."""
        traced = self.trace.runs[self.run]
        chains = sorted((span for span in self.trace.chains if span.run == self.run), key=lambda span: span.start)
        origin = min([traced.started, *(span.start for span in chains)])
        threads = sorted(
            {span.thread for span in (*chains, *self.trace.work_of(self.run))}, key=lambda name: (len(name), name)
        )
        lane_of = {thread: number for number, thread in enumerate(threads)}
        streams = self._streams()
        result: Json = {
            "operators": list(map(operator_title, traced.graph.operators)),
            "chain_of": list(self.chain_of),
            "lanes": [
                self._worker(thread, name, chains, origin)
                for thread, name in zip(threads, _short(threads), strict=True)
            ]
            + [lane for _, lane in streams],
            "arrows": [
                *_chain_arrows(chains, traced, lane_of, origin),
                *self._stream_arrows({id(track): len(threads) + n for n, (track, _) in enumerate(streams)}),
            ],
        }
        return result if self.bounds is None else result | _bounds(self.bounds, origin)

    def _worker(self, thread: str, name: str, chains: Sequence[ChainSpan], origin: int) -> Json:
        of_run = [span for span in self.trace.work_of(self.run) if span.thread == thread]
        waits = [span for span in self.trace.event_waits if span.run == self.run and span.thread == thread]
        return {
            "name": name,
            "clock": "host",
            "chains": [
                [span.chain, *_host(span.start, span.end, origin), round((span.start - span.ready) / 1e3, 2)]
                for span in chains
                if span.thread == thread
            ],
            "spans": [[span.operator, *_host(span.start, span.end, origin)] for span in of_run],
            "waits": [[f"events before chain {span.chain}", *_host(span.start, span.end, origin)] for span in waits],
        }

    def _streams(self) -> list[tuple[StreamTrack, Json]]:
        tracks = sorted(self.trace.tracks, key=lambda one: (str(one.stream.device), len(one.stream.name)))
        origin = self._device_origin()
        lanes: list[tuple[StreamTrack, Json]] = []
        for track in tracks:
            kernels = [one for one in track.kernels if one.run == self.run]
            if not kernels:
                continue
            first, last = kernels[0].start, kernels[-1].end
            waits = [one for one in track.waits if first <= one.end and one.start <= last and one.end > one.start]
            lane: Json = {
                "name": track.stream.name,
                "clock": "device",
                "chains": [],
                "spans": [[one.operator, *_device(one.start, one.end, origin)] for one in kernels],
                "waits": [[f"event of {one.owner}", *_device(one.start, one.end, origin)] for one in waits],
            }
            lanes.append((track, lane))
        return lanes

    def _device_origin(self) -> float:
        kernels = (kernel for track in self.trace.tracks for kernel in track.kernels if kernel.run == self.run)
        return min((kernel.start for kernel in kernels), default=0.0)

    def _stream_arrows(self, lane_of: dict[int, int]) -> Iterator[list[float]]:
        launches = {id(track): track.by_launch() for track in self.trace.tracks if id(track) in lane_of}
        origin = self._device_origin()
        for arrow in self.trace.arrows:
            if arrow.source is arrow.stream or not {id(arrow.source), id(arrow.stream)} <= launches.keys():
                continue
            before, after = launches[id(arrow.source)].get(arrow.before), launches[id(arrow.stream)].get(arrow.after)
            if self._is_of_run(before) and self._is_of_run(after):
                assert before is not None
                assert after is not None
                times = _device(before.end, after.start, origin)
                yield [lane_of[id(arrow.source)], times[0], lane_of[id(arrow.stream)], times[0] + times[1]]

    def _is_of_run(self, kernel: KernelSpan | None) -> bool:
        return kernel is not None and kernel.run == self.run


def _short(threads: Sequence[str]) -> list[str]:
    """Short names of threads: those of a pool by their number; callers' as they are."""
    pools = {thread.rpartition("-")[0] for thread in threads if _IN_POOL.fullmatch(thread)}
    return [
        f"worker {thread.rpartition('-')[2]}" if len(pools) == 1 and _IN_POOL.fullmatch(thread) else thread
        for thread in threads
    ]


def _chain_arrows(
    chains: Sequence[ChainSpan], run: TracedRun, lane_of: dict[str, int], origin: int
) -> Iterator[list[float]]:
    """From the parent that ended last to the chain, where another worker took the chain."""
    spans = {span.chain: span for span in chains}
    for chain in chains:
        parents = [spans[parent] for parent in run.parents[chain.chain] if parent in spans]
        last = max(parents, key=lambda span: span.end, default=chain)
        if last.thread != chain.thread:
            times = _host(last.end, chain.start, origin)
            yield [lane_of[last.thread], times[0], lane_of[chain.thread], times[0] + times[1]]


def _bounds(bounds: RunBounds, origin: int) -> Json:
    return {
        "critical": [step.chain for step in bounds.path],
        "idle": [
            [interval.cause, interval.workers, *_host(interval.start, interval.end, origin)]
            for interval in bounds.intervals
        ],
        "workers": bounds.workers,
        "seconds": bounds.seconds,
        "causes": {
            "computing": bounds.busy,
            "serial bottleneck": bounds.idle.serial,
            "imbalance": bounds.idle.imbalance,
            "overhead": bounds.idle.overhead,
        },
        "slowdown": bounds.slowdown,
    }


def _host(start: int, end: int, origin: int) -> tuple[float, float]:
    """Begin and duration in microseconds."""
    return round((start - origin) / 1e3, 2), round((end - start) / 1e3, 2)


def _device(start: float, end: float, origin: float) -> tuple[float, float]:
    return round((start - origin) / _MICROSECOND, 2), round((end - start) / _MICROSECOND, 2)
