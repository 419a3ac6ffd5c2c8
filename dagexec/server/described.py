"""What clients of Triton ask about a model: its configuration and its statistics, in Triton's words.

Both are as JSON has them; the messages of gRPC are made from the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dagexec.scheduler.observe.run_times import Phases, RunTotals
from dagexec.server.datatypes import BYTES
from dagexec.server.inference import TensorMetadata
from dagexec.server.version import PLATFORM, LoadedVersion

_NANOSECONDS = 1_000_000_000


def statistics_of(loaded: LoadedVersion) -> dict[str, Any]:
    """Counts and times of its requests since it was loaded.

    `success` and `fail` are of requests, from their arrival. All else is of runs: one request may be several, of a
    text's tokens, and several may be joined in one. A deployment's requests count as a run each.
    """
    times = loaded.config.options.run_times
    totals = RunTotals() if times is None else times.totals
    of_requests = totals.requests
    answered = {name: _duration(*loaded.answered[name]) for name in ("success", "fail")}
    return {
        "name": loaded.config.name,
        "version": loaded.version,
        "last_inference": loaded.last_milliseconds,
        "inference_count": totals.rows,
        "execution_count": sum(run.count for run in totals.runs.values()),
        "inference_stats": {
            **answered,
            "queue": _duration(of_requests.count, totals.waited),
            **_phases(of_requests),
            "cache_hit": _duration(0, 0.0),
            "cache_miss": _duration(0, 0.0),
        },
        "batch_stats": [{"batch_size": size, **_phases(run)} for size, run in sorted(totals.runs.items())],
    }


def _phases(runs: Phases) -> dict[str, Any]:
    return {
        "compute_input": _duration(runs.count, runs.fed),
        "compute_infer": _duration(runs.count, runs.ran),
        "compute_output": _duration(runs.count, runs.fetched),
    }


def _duration(count: int, seconds: float) -> dict[str, int]:
    return {"count": count, "ns": round(seconds * _NANOSECONDS)}


def config_of(loaded: LoadedVersion) -> dict[str, Any]:
    """Its configuration. Where requests are joined along the first axis of all tensors, their sizes lack it."""
    max_batch = loaded.config.options.max_batch
    tensors = (*loaded.inputs, *loaded.outputs)
    joins = max_batch > 1 and all(tensor.shape is not None and tensor.shape[:1] == (-1,) for tensor in tensors)
    config: dict[str, Any] = {
        "name": loaded.config.name,
        "platform": PLATFORM,
        "backend": "dagexec",
        "version_policy": {"specific": {"versions": [int(loaded.version)]}} if loaded.version.isdecimal() else {},
        "max_batch_size": max_batch if joins else 0,
        "input": _tensors(loaded.inputs, joins),
        "output": _tensors(loaded.outputs, joins),
    }
    if joins:
        config["dynamic_batching"] = {"max_queue_delay_microseconds": round(1e6 * loaded.config.options.max_wait)}
    return config


def _tensors(tensors: Iterable[TensorMetadata], joins: bool) -> list[dict[str, Any]]:
    return [
        {
            "name": tensor.name,
            "data_type": "TYPE_STRING" if tensor.datatype == BYTES else f"TYPE_{tensor.datatype}",
            "dims": list(tensor.shape or ())[joins:],
        }
        for tensor in tensors
    ]
