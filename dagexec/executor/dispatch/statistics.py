"""Statistics of an executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from dagexec.core.runtime import RuntimeStatistics
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.preparation_cache import PreparationStatistics
from dagexec.scheduler.run.worker import PoolStatistics

TIMES_KEPT = 1000

OUTCOMES = ("completed", "failed", "cancelled", "timed_out", "rejected", "invalid")


@dataclass(frozen=True)
class Latencies:
    """Seconds, over the last 1,000 completed runs; None while there is none."""

    median: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latencies:
        """The median and the 99th percentile (nearest rank, from above) of `seconds`."""
        ordered = sorted(seconds)
        if not ordered:
            return cls(None, None)
        return cls(ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100])


def _times(latencies: Latencies) -> str:
    """Milliseconds to be read."""
    if latencies.median is None or latencies.p99 is None:
        return "none"
    return f"median {latencies.median * 1e3:.3g} ms, 99th percentile {latencies.p99 * 1e3:.3g} ms"


@dataclass(frozen=True)
class ExecutorStatistics:
    """A snapshot of an executor. Warm-up runs are not counted.

    Attributes:
        replicas: how many runs may be in flight.
        running: requests that have a replica.
        queued: requests admitted that wait for a replica.
        awaiting_admission: requests that wait to be admitted, as the queue is full.
        completed, failed, cancelled, timed_out, rejected, invalid: requests by outcome. A request ended by `close`
            counts as cancelled, at a full queue as rejected, and with inputs that do not fit as invalid.
        median_latency, p99_latency: seconds from request to result, over the last 1,000 completed runs.
        queue_wait: of that, until a replica was free.
        run_time: of that, from then on: feeding, running, fetching.
        runs_per_replica: runs that each replica has begun, warm-up runs included.
        busy_workers: worker threads that are at work.
        pool: the worker pool.
        preparations: what each replica is prepared for.
        streams: the streams and the memory of the device, for all its users; None on `cpu`.
        batch_sizes: where requests are joined, how many runs had so many rows.
        retried: requests that ran again, alone, as their batch had failed.
    """

    replicas: int
    running: int
    queued: int
    awaiting_admission: int
    completed: int
    failed: int
    cancelled: int
    timed_out: int
    rejected: int
    invalid: int
    median_latency: float | None
    p99_latency: float | None
    queue_wait: Latencies
    run_time: Latencies
    runs_per_replica: tuple[int, ...]
    busy_workers: int
    pool: PoolStatistics
    preparations: tuple[PreparationStatistics, ...]
    streams: RuntimeStatistics | None
    batch_sizes: Mapping[int, int]
    retried: int

    def __repr__(self) -> str:
        """A few lines to be read; `dataclasses.asdict` has everything."""
        ended = [f"{getattr(self, name)} {name.replace('_', ' ')}" for name in (*OUTCOMES, "retried")]
        waiting = f"{self.running} running, {self.queued} queued, {self.awaiting_admission} awaiting admission"
        lines = [
            f"replicas   {self.replicas}: {waiting}",
            f"requests   {', '.join(one for one in ended if not one.startswith('0 ')) or 'none has ended'}",
        ]
        if self.median_latency is not None:
            lines += [
                f"latency    {_times(Latencies(self.median_latency, self.p99_latency))}",
                f"  queued   {_times(self.queue_wait)}",
                f"  running  {_times(self.run_time)}",
            ]
        if self.batch_sizes:
            sizes = (f"{count} of {rows} row{'s'[: rows != 1]}" for rows, count in self.batch_sizes.items())
            lines.append(f"batches    {', '.join(sizes)}")
        kept = sum(one.kept_bytes + one.arena_bytes for one in self.preparations)
        lines.append(f"workers    {self.pool.workers}, {self.busy_workers} of them busy")
        lines.append(f"memory     {kept / 2**20:.1f} MiB of steps and activations, parameters not counted")
        if self.streams is not None:
            lines.append(f"device     {self.streams.allocated_bytes / 2**20:.1f} MiB, {self.streams.streams} streams")
        return "\n".join(lines)

    def with_counts_of(self, other: ExecutorStatistics) -> ExecutorStatistics:
        """The same with the requests that another executor has ended, by outcome, and how they were joined."""
        counts = {name: getattr(self, name) + getattr(other, name) for name in (*OUTCOMES, "retried")}
        sizes = Counter(self.batch_sizes) + Counter(other.batch_sizes)
        return replace(self, batch_sizes=dict(sorted(sizes.items())), **counts)
