"""The section that shows a run: workers and streams as lanes, what they ran and waited for, and what bounded them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from dagexec.analysis.bounds import RunBounds
from dagexec.core.drawing.names import operator_title
from dagexec.platform.records import dataclass
from dagexec.report.document import Json
from dagexec.scheduler.observe.trace import ChainSpan, KernelSpan, StreamTrack, Trace, TracedRun

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
        chains = sorted((one for one in self.trace.chains if one.run == self.run), key=lambda one: one.start)
        origin = min([traced.started, *(one.start for one in chains)])
        threads = sorted(
            {one.thread for one in (*chains, *self.trace.work_of(self.run))}, key=lambda name: (len(name), name)
        )
        lane_of = {thread: number for number, thread in enumerate(threads)}
        streams = self._streams()
        found: Json = {
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
        return found if self.bounds is None else found | _bounds(self.bounds, origin)

    def _worker(self, thread: str, name: str, chains: Sequence[ChainSpan], origin: int) -> Json:
        of_run = [one for one in self.trace.work_of(self.run) if one.thread == thread]
        waits = [one for one in self.trace.event_waits if one.run == self.run and one.thread == thread]
        return {
            "name": name,
            "clock": "host",
            "chains": [
                [one.chain, *_host(one.start, one.end, origin), round((one.start - one.ready) / 1e3, 2)]
                for one in chains
                if one.thread == thread
            ],
            "spans": [[one.operator, *_host(one.start, one.end, origin)] for one in of_run],
            "waits": [[f"events before chain {one.chain}", *_host(one.start, one.end, origin)] for one in waits],
        }

    def _streams(self) -> list[tuple[StreamTrack, Json]]:
        tracks = sorted(self.trace.tracks, key=lambda one: (str(one.stream.device), len(one.stream.name)))
        origin = self._device_origin()
        found: list[tuple[StreamTrack, Json]] = []
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
            found.append((track, lane))
        return found

    def _device_origin(self) -> float:
        kernels = (one for track in self.trace.tracks for one in track.kernels if one.run == self.run)
        return min((one.start for one in kernels), default=0.0)

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
    """Names of threads for a narrow place: those of a pool by their number; the others, which call, as they are."""
    pools = {thread.rpartition("-")[0] for thread in threads if _IN_POOL.fullmatch(thread)}
    return [
        f"worker {thread.rpartition('-')[2]}" if len(pools) == 1 and _IN_POOL.fullmatch(thread) else thread
        for thread in threads
    ]


def _chain_arrows(
    chains: Sequence[ChainSpan], run: TracedRun, lane_of: dict[str, int], origin: int
) -> Iterator[list[float]]:
    """From the parent that ended last to the chain, where another worker took that."""
    spans = {one.chain: one for one in chains}
    for chain in chains:
        parents = [spans[parent] for parent in run.parents[chain.chain] if parent in spans]
        last = max(parents, key=lambda one: one.end, default=chain)
        if last.thread != chain.thread:
            times = _host(last.end, chain.start, origin)
            yield [lane_of[last.thread], times[0], lane_of[chain.thread], times[0] + times[1]]


def _bounds(bounds: RunBounds, origin: int) -> Json:
    return {
        "critical": [step.chain for step in bounds.path],
        "idle": [[one.cause, one.workers, *_host(one.start, one.end, origin)] for one in bounds.intervals],
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
