"""OpenTelemetry metrics: they say what statistics say, and add up over executors and processes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import Histogram, InMemoryMetricReader, Sum

import dagexec
from dagexec.errors import ClosedError, DagexecError, FeedError, OperatorError, QueueFullError, RunTimeoutError
from dagexec.executor.requests.call import PLAIN
from dagexec.executor.telemetry.metrics import BATCH_BOUNDARIES, BOUNDARIES
from tests.held import PATIENCE, Held, doubled_model, rows

ROOT = Path(__file__).parents[2]


class Collected:
    """A meter, and what it has recorded."""

    def __init__(self) -> None:
        self._reader = InMemoryMetricReader()
        self._provider = MeterProvider([self._reader])

    @property
    def meter(self) -> Meter:
        return self._provider.get_meter("test")

    def instruments(self) -> dict[str, Any]:
        found = self._reader.get_metrics_data()
        if found is None:
            return {}
        metrics = found.resource_metrics[0].scope_metrics[0].metrics
        assert len({metric.name for metric in metrics}) == len(metrics)
        return {metric.name: metric for metric in metrics}

    def requests(self) -> dict[str, int]:
        points = self.instruments()["dagexec.requests"].data.data_points
        return {str(point.attributes["dagexec.outcome"]): point.value for point in points}


@pytest.fixture
def collected() -> Iterator[Collected]:
    found = Collected()
    yield found
    found._provider.shutdown()


async def test_every_outcome_is_counted_as_in_the_statistics(collected: Collected, held: Held) -> None:
    async with dagexec.compile_async(
        doubled_model("Held"), num_workers=1, max_queued=1, when_full="reject", metrics=collected.meter
    ) as executor:

        async def ends_with(error: type[Exception], number: int, timeout: float | None = None) -> None:
            with pytest.raises(error):
                await executor.run_async({"x": rows(number)}, timeout=timeout)

        held.failing = {1}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ends_with, OperatorError, 1)
            await anyio.to_thread.run_sync(held.wait_inside)
            await ends_with(RunTimeoutError, 2, 0)
            tasks.start_soon(ends_with, ClosedError, 3)
            while not executor.statistics().queued:
                await anyio.lowlevel.checkpoint()
            await ends_with(QueueFullError, 4)
            executor._dispatcher.abandon_queue()
            held.go_on.release(2)
        with pytest.raises(FeedError):
            await executor.run_async({"z": rows(1)})
        await executor.run_async({"x": rows(2)}, timeout=PATIENCE)
        statistics = executor.statistics()
    expected = {
        name: getattr(statistics, name) for name in ("completed", "cancelled", "timed_out", "rejected", "invalid")
    }
    assert collected.requests() == {**expected, "failed": 1}
    assert set(expected.values()) == {1}
    for name in ("dagexec.queue.duration", "dagexec.run.duration"):
        [point] = collected.instruments()[name].data.data_points
        assert point.count == statistics.completed
    [failed] = [
        point.attributes
        for point in collected.instruments()["dagexec.requests"].data.data_points
        if "error.type" in point.attributes
    ]
    assert failed["error.type"] == "OperatorError"


def test_inline_runs_are_counted_and_timed(collected: Collected) -> None:
    with dagexec.compile(doubled_model(), num_workers=1, metrics=collected.meter) as executor:
        for _ in range(3):
            executor.run({"x": rows(1)})
        assert executor.statistics().completed == 3
    assert collected.requests() == {"completed": 3}
    found = collected.instruments()
    for name in ("dagexec.queue.duration", "dagexec.run.duration"):
        [point] = found[name].data.data_points
        assert (point.count, found[name].unit) == (3, "s")
        assert dict(point.attributes) == {"dagexec.net": "doubled", "dagexec.net_type": executor.net_type}


def test_times_are_what_the_clock_says(collected: Collected, monkeypatch: pytest.MonkeyPatch) -> None:
    with dagexec.compile(doubled_model(), optimize=False, num_workers=1, metrics=collected.meter) as executor:
        moments = iter([1.0, 3.0, 7.0])
        dispatcher = executor._dispatcher
        request = executor._callers.request({"x": rows(1)}, ("y",), PLAIN, _NoWait())  # type: ignore[arg-type]
        replica = dispatcher.state.idle.popleft()
        monkeypatch.setattr(dispatcher, "_now", lambda: next(moments))
        assert not dispatcher.admit(request)  # at 1; waits as no replica is idle
        with dispatcher._lock:
            dispatcher.state.assign(replica, request, dispatcher._now())
            request.queue.remove(request)  # type: ignore[union-attr]
        dispatcher.end(request, {}, None)
        monkeypatch.undo()
    found = collected.instruments()
    assert found["dagexec.queue.duration"].data.data_points[0].sum == 2.0
    assert found["dagexec.run.duration"].data.data_points[0].sum == 4.0


class _NoWait:
    def notify(self) -> None:
        pass


def test_batch_sizes_are_those_of_the_statistics(collected: Collected) -> None:
    with dagexec.compile(doubled_model(), metrics=collected.meter) as executor:
        executor.run({"x": rows(1)}, timeout=PATIENCE)
    assert "dagexec.batch.size" not in collected.instruments()
    with dagexec.compile(doubled_model(), metrics=collected.meter, max_batch=4, warm_start={"x": (2, 3)}) as executor:
        for count in (2, 3, 3):
            executor.run({"x": rows(1, count)})
        assert executor.statistics().batch_sizes == {2: 1, 3: 2}
    [point] = collected.instruments()["dagexec.batch.size"].data.data_points
    assert (point.count, point.sum, point.min, point.max) == (3, 8, 2, 3)


def test_all_of_it_adds_up(collected: Collected) -> None:
    """Sums and histograms of fixed buckets: never a last value, which a collector could not add."""
    with dagexec.compile(doubled_model(), metrics=collected.meter, warm_start={"x": (2, 3)}, max_batch=4) as executor:
        executor.run({"x": rows(1)})
        found = collected.instruments()
    names = {"requests", "queue.duration", "run.duration", "batch.size", "arena.usage"}
    assert found.keys() == {f"dagexec.{name}" for name in names}
    for name, metric in found.items():
        if isinstance(metric.data, Histogram):
            bounds = BATCH_BOUNDARIES if name == "dagexec.batch.size" else BOUNDARIES
            assert {tuple(point.explicit_bounds) for point in metric.data.data_points} == {bounds}
        else:
            assert isinstance(metric.data, Sum)
            assert metric.data.is_monotonic == (name == "dagexec.requests")


_CHILD = """
import sys
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
import dagexec
from dagexec.executor.requests.call import PLAIN
from tests.held import PATIENCE, doubled_model, rows

reader = InMemoryMetricReader()
meter = MeterProvider([reader]).get_meter("child")
with dagexec.compile(doubled_model(), metrics=meter, max_batch=4, warm_start={"x": (2, 3)}) as executor:
    for count in map(int, sys.argv[1:]):
        executor.run({"x": rows(1, count)}, timeout=PATIENCE)
    print(reader.get_metrics_data().to_json(indent=None))
"""


@pytest.mark.slow
def test_what_two_processes_report_adds_up_to_what_one_would() -> None:
    def reported(*counts: int) -> dict[str, Any]:
        call = [sys.executable, "-c", _CHILD, *map(str, counts)]
        data = json.loads(subprocess.run(call, capture_output=True, text=True, check=True, cwd=ROOT).stdout)
        [scope] = data["resource_metrics"][0]["scope_metrics"]
        return {metric["name"]: metric["data"]["data_points"] for metric in scope["metrics"]}

    first, second, both = reported(2, 3), reported(2, 2, 4), reported(2, 3, 2, 2, 4)
    for name, points in both.items():
        assert len(points) == len(first[name]) == len(second[name]) == 1, name
        [one], [other], [total] = first[name], second[name], points
        assert one["attributes"] == other["attributes"] == total["attributes"]
        if name == "dagexec.requests":
            assert (one["value"], other["value"], total["value"]) == (2, 3, 5)
        elif name == "dagexec.arena.usage":
            assert one["value"] > 0
            assert other["value"] > 0
        else:
            assert one["explicit_bounds"] == other["explicit_bounds"] == total["explicit_bounds"]
            assert one["count"] + other["count"] == total["count"] == 5
    [sizes], [rest], [whole] = (found["dagexec.batch.size"] for found in (first, second, both))
    added = [a + b for a, b in zip(sizes["bucket_counts"], rest["bucket_counts"], strict=True)]
    assert added == whole["bucket_counts"]
    assert sizes["sum"] + rest["sum"] == whole["sum"] == 13


def test_arenas_of_executors_on_one_pool_are_reported_and_given_back(collected: Collected) -> None:
    def usage() -> int:
        [point] = collected.instruments()["dagexec.arena.usage"].data.data_points
        return int(point.value)

    with (
        dagexec.Pool(1) as pool,
        dagexec.compile(doubled_model(), pool=pool, metrics=collected.meter) as first,
        dagexec.compile(doubled_model(), pool=pool, metrics=collected.meter) as second,
    ):
        first.run({"x": rows(1)})
        alone = usage()
        second.run({"x": rows(1)})
        assert usage() == 2 * alone > 0


@pytest.mark.slow
def test_arenas_of_all_executors_of_a_meter_are_added_and_forgotten_with_them(collected: Collected) -> None:
    def usage() -> dict[str, int]:
        found = collected.instruments()
        points = found["dagexec.arena.usage"].data.data_points if found else ()
        return {str(point.attributes["dagexec.net"]): point.value for point in points}

    executors = [
        dagexec.compile(model, metrics=collected.meter, warm_start=True, num_workers=1, net_type="simple", replicas=2)
        for model in ("zoo:lenet", "zoo:lenet", doubled_model())
    ]
    one = sum(row.arena_bytes for row in executors[0].statistics().preparations)
    assert one > 0
    expected = sum(row.arena_bytes for row in executors[2].statistics().preparations)
    assert usage() == {"lenet": 2 * one, "doubled": expected}
    executors.pop(0).close()
    gc.collect()
    assert usage() == {"lenet": one, "doubled": expected}
    for executor in executors:
        executor.close()
    executors.clear()
    del executor
    gc.collect()
    assert usage() == {}


def test_true_takes_the_global_provider_and_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with dagexec.compile(doubled_model(), metrics=True, warm_start=True) as executor:
        monkeypatch.setattr(executor._metrics, "record", pytest.fail)
        executor.warm_up()


def test_a_meter_that_raises_is_logged_and_no_run_fails_of_it(
    collected: Collected, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with dagexec.compile(doubled_model(), metrics=collected.meter) as executor:
        assert executor._metrics is not None
        monkeypatch.setattr(executor._metrics._instruments, "requests", None)
        assert executor.run({"x": rows(1)})["y"].tolist() == rows(2).tolist()
    assert "the metrics of a run could not be recorded" in caplog.text


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(DagexecError, match="pip install 'opentelemetry-api>="):
        dagexec.compile(doubled_model(), metrics=True)
