"""OpenTelemetry metrics of executors: outcomes of requests, and the memory that runs share.

| instrument | kind, unit | attributes |
|---|---|---|
| `dagexec.requests` | counter, `{request}` | `dagexec.outcome`, `error.type` where a request failed |
| `dagexec.queue.duration` | histogram, `s` | |
| `dagexec.run.duration` | histogram, `s` | |
| `dagexec.batch.size` | histogram, `{row}` | |
| `dagexec.arena.usage` | observable up-down counter, `By` | |

All have `dagexec.net` and `dagexec.net_type`, too. Every one is a sum, or a histogram with the same buckets in every
process, so that a collector adds up what several processes report. `error.type`, the units and the endings of the
names are those of OpenTelemetry's semantic conventions, which have no names for the rest. OpenTelemetry is imported
only when metrics are requested; an error of a meter is logged, and fails no run.
"""

from __future__ import annotations

import logging
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

from dagexec.errors import DagexecError
from dagexec.executor.requests.request import outcome_name
from dagexec.platform.extras import install_command
from dagexec.platform.locks import new_lock

if TYPE_CHECKING:
    from opentelemetry.metrics import Meter, Observation

logger = logging.getLogger("dagexec")

BOUNDARIES = tuple(factor * scale for scale in (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0) for factor in (1.0, 2.5, 5.0))
"""Upper ends of the histograms' buckets, in seconds: from a run of a small net to a wait under overload."""

BATCH_BOUNDARIES = tuple(1 << power for power in range(11))
"""Those of numbers of rows."""


class HasArenas(Protocol):
    """Something with arenas, whose bytes are read whenever metrics are collected."""

    def arena_bytes(self) -> int:
        """The bytes of all of them now."""


def require_metrics() -> Any:
    """The module `opentelemetry.metrics`. Raises DagexecError when opentelemetry-api is not installed."""
    try:
        from opentelemetry import metrics
    except ImportError:
        raise DagexecError(f"metrics need opentelemetry-api; install it with: {install_command('telemetry')}") from None
    return metrics


class _Instruments:
    """The instruments of one meter, which all executors with that meter share."""

    def __init__(self, meter: Meter) -> None:
        self._observation = require_metrics().Observation
        self._lock = new_lock()
        self._arenas: WeakKeyDictionary[HasArenas, tuple[tuple[str, str], ...]] = WeakKeyDictionary()
        self.requests = meter.create_counter("dagexec.requests", "{request}", "requests that are over, by outcome")
        self.queue = meter.create_histogram(
            "dagexec.queue.duration",
            "s",
            "from the call to a free replica, of completed requests",
            explicit_bucket_boundaries_advisory=BOUNDARIES,
        )
        self.run = meter.create_histogram(
            "dagexec.run.duration",
            "s",
            "from then on to the result: feeding, running, fetching",
            explicit_bucket_boundaries_advisory=BOUNDARIES,
        )
        self.batch = meter.create_histogram(
            "dagexec.batch.size",
            "{row}",
            "rows of each run, where requests may be joined",
            explicit_bucket_boundaries_advisory=BATCH_BOUNDARIES,
        )
        meter.create_observable_up_down_counter(
            "dagexec.arena.usage", [self._usage], "By", "memory that the tensors of runs share"
        )

    def observe(self, arenas: HasArenas, attributes: dict[str, str]) -> None:
        """Report the bytes of `arenas` from now on, as long as others refer to it."""
        with self._lock:
            self._arenas[arenas] = tuple(attributes.items())

    def _usage(self, _options: object) -> list[Observation]:
        with self._lock:
            observed = list(self._arenas.items())
        nbytes: Counter[tuple[tuple[str, str], ...]] = Counter()
        for arenas, attributes in observed:
            nbytes[attributes] += arenas.arena_bytes()
        return [self._observation(total, dict(attributes)) for attributes, total in nbytes.items()]


_lock = new_lock()
_of_meters: WeakKeyDictionary[Meter, _Instruments] = WeakKeyDictionary()


def _instruments(meter: Meter) -> _Instruments:
    with _lock:
        instruments = _of_meters.get(meter)
        if instruments is None:
            instruments = _of_meters[meter] = _Instruments(meter)
        return instruments


@lru_cache(maxsize=1)
def _global_meter() -> Meter:
    """The meter "dagexec" of the global provider, also if that is set later."""
    meter: Meter = require_metrics().get_meter("dagexec")
    return meter


class Metrics:
    """Records the requests of one executor."""

    def __init__(self, net: str, net_type: str, meter: Meter | None) -> None:
        """`meter` defaults to that of the global provider. Raises what `require_metrics` does."""
        require_metrics()
        self._instruments = _instruments(meter or _global_meter())
        self._attributes = {"dagexec.net": net, "dagexec.net_type": net_type}

    def observe(self, arenas: HasArenas) -> None:
        """Report the bytes of `arenas` whenever metrics are collected."""
        self._instruments.observe(arenas, self._attributes)

    def record(self, error: BaseException | None, waited: float, ran: float) -> None:
        """A request is over, after so many seconds in the queue and on a replica."""
        outcome = outcome_name(error)
        attributes = {**self._attributes, "dagexec.outcome": outcome}
        if outcome == "failed":
            attributes["error.type"] = type(error).__qualname__
        try:
            self._instruments.requests.add(1, attributes)
            if error is None:
                self._instruments.queue.record(waited, self._attributes)
                self._instruments.run.record(ran, self._attributes)
        except Exception:
            self._log()

    def record_batch(self, rows: int) -> None:
        """A run of so many rows is over, where requests may be joined."""
        try:
            self._instruments.batch.record(rows, self._attributes)
        except Exception:
            self._log()

    def _log(self) -> None:
        logger.exception("net %s: the metrics of a run could not be recorded", self._attributes["dagexec.net"])
