"""Metrics: what Prometheus asks for at /metrics.

| metric | kind | labels |
|---|---|---|
| `dagexec_requests_total` | counter: requests that are over | model, version, outcome |
| `dagexec_error_answers_total` | counter: answers that are errors, with or without a model | transport, status |
| `dagexec_request_seconds` | histogram: from a request to its results, where there are any | model, version |
| `dagexec_requests_running` | gauge: requests that run | model, version |
| `dagexec_requests_queued` | gauge: requests that wait for their turn | model, version |
| `dagexec_batch_rows` | histogram: rows of each run, where requests are joined | model, version |
| `dagexec_arena_bytes` | gauge: memory for intermediate results | model, version |
| `dagexec_replicas` | gauge: runs that there may be at one time | model, version |
| `dagexec_sequences_open` | gauge: sequences of requests | model, version |
| `dagexec_sequences_bytes` | gauge: memory that sequences keep between requests | model, version |
| `dagexec_sequences_expired_total` | counter: sequences that ended because they were idle | model, version |

and those of prometheus-client about the process (`process_resident_memory_bytes`, `process_open_fds`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from dagexec.server.repository import Outcome
from dagexec.server.version import LoadedVersion

_LABELS = ("model", "version")
_SECONDS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0
)  # fmt: skip
_ROWS = tuple(1 << exponent for exponent in range(11))


class Metrics:
    """The metrics of one server; an Observer of its repository."""

    def __init__(self, loaded: Callable[[], Iterable[LoadedVersion]]) -> None:
        """`loaded` gives the versions that serve at the time of a scrape."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "dagexec_requests", "Requests that are over.", (*_LABELS, "outcome"), registry=self._registry
        )
        self._errors = Counter(
            "dagexec_error_answers", "Answers that are errors.", ("transport", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "dagexec_request_seconds",
            "Seconds from the arrival of a request to its results.",
            _LABELS,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._registry.register(_States(loaded))
        ProcessCollector(registry=self._registry)

    def finished(self, model: str, version: str, outcome: Outcome, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(model, version, outcome).inc()
        if outcome == "completed":
            self._seconds.labels(model, version).observe(seconds)

    def error_answered(self, transport: str, status: int) -> None:
        """Count an answer that is an error: below 500 the client's mistake, as HTTP has it, for gRPC too."""
        self._errors.labels(transport, status).inc()

    def page(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format of Prometheus or of OpenMetrics, whichever a client accepts, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type


class _States:
    """What executors and deployments say of themselves at the time of a scrape."""

    def __init__(self, loaded: Callable[[], Iterable[LoadedVersion]]) -> None:
        self._loaded = loaded

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering asks no model."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All gauges, and how many rows runs had."""
        gauges = {
            name: GaugeMetricFamily(f"dagexec_{name}", text, labels=_LABELS)
            for name, text in (
                ("requests_running", "Requests that run."),
                ("requests_queued", "Requests that wait for their turn."),
                ("arena_bytes", "Memory for intermediate results."),
                ("replicas", "Runs that there may be at one time."),
                ("sequences_open", "Sequences of requests."),
                ("sequences_bytes", "Memory that sequences keep between requests."),
            )
        }
        rows = HistogramMetricFamily(
            "dagexec_batch_rows", "Rows of a run that requests may be joined in.", labels=_LABELS
        )
        expired = CounterMetricFamily(
            "dagexec_sequences_expired", "Sequences that ended because they were idle.", labels=_LABELS
        )
        for version in self._loaded():
            labels = (version.config.name, version.version)
            gauges["sequences_open"].add_metric(labels, version.sequences.open)
            gauges["sequences_bytes"].add_metric(labels, version.sequences.nbytes)
            expired.add_metric(labels, version.sequences.expired)
            found = _statistics(version)
            gauges["requests_running"].add_metric(labels, found.running if found else version.running)
            if found is None:
                continue
            gauges["requests_queued"].add_metric(labels, found.queued + getattr(found, "awaiting_admission", 0))
            replicas = found.replicas
            gauges["replicas"].add_metric(labels, replicas if isinstance(replicas, int) else len(replicas))
            if preparations := getattr(found, "preparations", ()):
                gauges["arena_bytes"].add_metric(labels, sum(one.arena_bytes for one in preparations))
            if sizes := getattr(found, "batch_sizes", {}):
                _add_rows(rows, labels, sizes)
        yield from gauges.values()
        yield expired
        yield rows


def _statistics(version: LoadedVersion) -> Any:
    """Those of an executor or a deployment, which lack some of each other's; None of what has none."""
    ask = getattr(version.runner, "statistics", None)
    return None if ask is None else ask()


def _add_rows(family: HistogramMetricFamily, labels: tuple[str, str], runs_of: Mapping[int, int]) -> None:
    """Add how many runs had how many rows."""
    counts = [0] * (len(_ROWS) + 1)
    for rows, runs in runs_of.items():
        counts[next((place for place, most in enumerate(_ROWS) if rows <= most), len(_ROWS))] += runs
    names = [*(f"{most}.0" for most in _ROWS), "+Inf"]
    buckets = list(zip(names, accumulate(counts), strict=True))
    family.add_metric(labels, buckets, sum_value=sum(rows * runs for rows, runs in runs_of.items()))
