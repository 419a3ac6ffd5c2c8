"""What the live page shows: the state of the models, what threads did in the last seconds, and requests that were slow.

Of each model's requests of the last minutes the slowest are kept. Threads are looked at only while somebody asks for
the state.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from threading import current_thread
from typing import Any, NamedTuple

from dagexec.executor.dispatch.statistics import OUTCOMES
from dagexec.executor.executor import Executor
from dagexec.executor.requests.timeline import TimedRun, Timeline
from dagexec.platform.processor import available_cores
from dagexec.scheduler.observe.lanes import Lanes
from dagexec.server.repository_state import ModelState
from dagexec.server.version import LoadedVersion

Json = dict[str, Any]

SLOWEST = 10
"""Requests that are kept of each model."""

SLOW_SECONDS = 600.0
"""For how long."""

_MOST_TEXT = 300  # characters of what clients and errors say


class SlowRequest(NamedTuple):
    """One that is over; the larger is the slower.

    Attributes:
        seconds: from its arrival to its results.
        number: counts those of the server that were kept.
        began: when it came, by the monotonic clock.
        id: the client's.
        outcome: completed, failed, invalid, rejected, timed_out or cancelled.
        error: what the client was told.
        runs: those that it had, and `more` without their times.
    """

    seconds: float
    number: int
    began: float
    model: str
    version: str
    id: str
    outcome: str
    error: str
    runs: tuple[TimedRun, ...]
    more: int


class _Slowest:
    """Of one model.

    Attributes:
        requests: the fastest first.
        least: what one has to take more than, in seconds, to be among them.
        until: when the first of them has been there for long enough.
    """

    __slots__ = ("least", "requests", "until")

    def __init__(self) -> None:
        self.requests: list[SlowRequest] = []
        self.changed()

    def changed(self) -> None:
        """Some came or went."""
        self.least = self.requests[0].seconds if len(self.requests) == SLOWEST else -1.0
        self.until = min((one.began for one in self.requests), default=math.inf) + SLOW_SECONDS

    def forget(self, now: float) -> None:
        """Let go of what was long ago."""
        if now > self.until:
            self.requests = [one for one in self.requests if now <= one.began + SLOW_SECONDS]
            self.changed()


class SlowRequests:
    """The slowest of each model."""

    def __init__(self) -> None:
        self._by_model: dict[str, _Slowest] = {}
        self._number = 0

    def add(
        self, model: str, version: str, id: str, began: float, seconds: float, outcome: str, error: str, runs: Timeline
    ) -> None:
        """A request is over."""
        slowest = self._by_model.get(model)
        if slowest is None:
            slowest = self._by_model[model] = _Slowest()
        slowest.forget(began + seconds)
        if seconds <= slowest.least:
            return
        if slowest.least >= 0:
            del slowest.requests[0]
        self._number += 1
        texts = id[:_MOST_TEXT], outcome, error[:_MOST_TEXT]
        kept = SlowRequest(seconds, self._number, began, model, version, *texts, tuple(runs.runs), runs.more)
        insort(slowest.requests, kept)
        slowest.changed()

    def since(self, number: int, now: float) -> tuple[int, list[int], list[SlowRequest]]:
        """The latest number, those of all that are kept, and the requests behind `number`."""
        for slowest in self._by_model.values():
            slowest.forget(now)
        kept = [one for slowest in self._by_model.values() for one in slowest.requests]
        return self._number, [one.number for one in kept], [one for one in kept if one.number > number]


class Live:
    """What is seen of one server.

    Attributes:
        slow: its slowest requests.
        lanes: what threads did.
    """

    def __init__(self) -> None:
        self.slow = SlowRequests()
        self.lanes = Lanes()
        self._started = time.time()
        self._version = version("dagexec")

    def state(
        self, name: str, models: Iterable[ModelState], loaded: Sequence[LoadedVersion], stretch: int, request: int
    ) -> Json:
        """The state of a server that is called `name`, as JSON has it.

        Of what threads did, and of slow requests, there is what came after the numbers `stretch` and `request` that an
        earlier state has. A number that is not of this server stands for 0.
        """
        self.lanes.look()
        for one in loaded:
            if isinstance(one.runner, Executor):
                one.runner.watch(self.lanes, one.config.name)
        now = time.monotonic()
        last_request, kept, requests = self.slow.since(request, now)
        if request > last_request:
            _, kept, requests = self.slow.since(0, now)
        last_stretch, lanes = self.lanes.since(stretch)
        if stretch > last_stretch:
            _, lanes = self.lanes.since(0)
        texts: dict[tuple[str, str], int] = {}  # names of what lanes do, by their places
        here = current_thread().name
        spans = {
            ("event loop" if lane == here else lane): [
                (one.start, one.end, one.busy, one.times, texts.setdefault((one.label, one.doing), len(texts)))
                for one in stretches
            ]
            for lane, stretches in lanes.items()
        }
        return {
            "server": name,
            "version": self._version,
            "started": self._started,
            "now": now,
            "time": time.time(),
            "process": {"cpu": time.process_time(), "memory": _resident_bytes(), "cores": available_cores()},
            "models": [*map(_of_version, loaded), *(_of_model(one) for one in models if not one.version)],
            "lanes": spans,
            "doing": list(texts),
            "slow": [one._asdict() for one in requests],
            "kept": kept,
            "stretch": last_stretch,
            "request": last_request,
        }


def _of_model(row: ModelState) -> Json:
    """A model of which no version serves, or another one is being loaded."""
    return {"name": row.name, "version": "", "state": row.state, "reason": row.reason}


def _of_version(loaded: LoadedVersion) -> Json:
    """A version that serves."""
    found: Json = {
        "name": loaded.config.name,
        "version": loaded.version,
        "state": "READY",
        "reason": "",
        "running": loaded.running,
        "success": loaded.answered["success"],
        "fail": loaded.answered["fail"],
        "sequences": loaded.sequences.open,
    }
    ask = getattr(loaded.runner, "statistics", None)
    if ask is None:
        return found
    statistics = ask()
    found |= {
        "running": statistics.running,
        "queued": statistics.queued + getattr(statistics, "awaiting_admission", 0),
        "most_queued": loaded.config.options.max_queued,
        "outcomes": {name: getattr(statistics, name) for name in OUTCOMES},
        "retried": statistics.retried,
        "latency": (statistics.median_latency, statistics.p99_latency),
        "waited": (statistics.queue_wait.median, statistics.queue_wait.p99),
        "ran": (statistics.run_time.median, statistics.run_time.p99),
    }
    if isinstance(statistics.replicas, int):
        found["replicas"] = statistics.replicas
        found["most_rows"] = loaded.config.options.max_batch
        found["batches"] = _texts(statistics.batch_sizes)
        found["arena_bytes"] = sum(one.arena_bytes for one in statistics.preparations)
    else:
        found["replicas"] = len(statistics.replicas)
        found["places"] = [asdict(one) for one in statistics.replicas]
        found["lost"] = statistics.lost
    return found


def _texts(runs: Mapping[int, int]) -> dict[str, int]:
    """Runs by their rows, as JSON has names."""
    return {str(rows): count for rows, count in runs.items()}


def _resident_bytes() -> int | None:
    """The memory of this process, where the system tells it."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    import resource

    return pages * resource.getpagesize()
