"""OpenTelemetry: one span a run with its outcome; nothing of it, not even an import, unless it is asked for."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import dagexec
from dagexec.errors import ClosedError, DagexecError, FeedError, OperatorError, QueueFullError, RunTimeoutError
from tests.held import PATIENCE, doubled_model, held_operators, rows


class Spans:
    """A tracer, and the spans it made."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("test")

    def finished(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())


@pytest.fixture
def spans() -> Spans:
    return Spans()


async def test_a_run_is_a_span_with_its_net_its_wait_and_its_outcome_under_the_caller_s_span(spans: Spans) -> None:
    with (
        dagexec.compile(doubled_model(), optimize=False, net_type="async_dag", telemetry=spans.tracer) as executor,
        spans.tracer.start_as_current_span("request"),
    ):
        await executor.run_async({"x": rows(1)}, priority=3)
    run, request = spans.finished()
    assert run.name == "dagexec.run"
    assert run.parent is not None
    assert request.context is not None
    assert run.parent.span_id == request.context.span_id
    attributes = dict(run.attributes or {})
    assert attributes.pop("dagexec.queue_wait") >= 0  # type: ignore[operator]
    assert attributes == {
        "dagexec.net": "doubled",
        "dagexec.net_type": "async_dag",
        "dagexec.priority": 3,
        "dagexec.outcome": "completed",
    }
    assert run.status.status_code is trace.StatusCode.UNSET


def test_a_joined_run_is_a_span_of_its_own_that_links_to_those_of_its_members(spans: Spans) -> None:
    options = {"optimize": False, "num_workers": 2, "max_batch": 2, "telemetry": spans.tracer}
    with (
        held_operators() as held,
        ThreadPoolExecutor(3) as threads,
        dagexec.compile(doubled_model("HeldRows"), max_wait=PATIENCE, **options) as executor,
    ):
        held.failing = {3, 4}
        for values in ((1, 2), (3, 4)):
            held.go_on.release(3)
            asked = [threads.submit(executor.run, {"x": rows(value, 1)}) for value in values]
            assert [one.exception(PATIENCE) is None for one in asked] == [value < 3 for value in values]
    batches = [span for span in spans.finished() if span.name == "dagexec.batch"]
    members = [span for span in spans.finished() if span.name == "dagexec.run"]
    assert len(members) == 4
    linked = [{link.context.span_id for link in batch.links} for batch in batches]
    assert set().union(*linked) == {member.context.span_id for member in members if member.context is not None}
    assert [len(one) for one in linked] == [2, 2]
    assert all(batch.parent is None for batch in batches)
    assert [dict(batch.attributes or {}) for batch in batches] == [
        {
            "dagexec.net": "doubled",
            "dagexec.net_type": "dag",
            "dagexec.batch.size": 2,
            "dagexec.outcome": outcome,
        }
        for outcome in ("completed", "failed")
    ]
    assert [bool(batch.events) for batch in batches] == [False, True]


def test_every_outcome_ends_its_span_and_errors_are_recorded(spans: Spans) -> None:
    with (
        held_operators() as held,
        ThreadPoolExecutor(4) as threads,
        dagexec.compile(
            doubled_model("Held"),
            optimize=False,
            num_workers=1,
            max_queued=1,
            when_full="reject",
            telemetry=spans.tracer,
        ) as executor,
    ):
        held.failing = {1}
        failing = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        with pytest.raises(RunTimeoutError):
            executor.run({"x": rows(2)}, timeout=0)
        queued = threads.submit(executor.run, {"x": rows(3)})
        while not executor.statistics().queued:
            pass
        with pytest.raises(QueueFullError):
            executor.run({"x": rows(4)})
        closing = threads.submit(executor.close)
        with pytest.raises(ClosedError):
            queued.result(PATIENCE)
        held.go_on.release()
        with pytest.raises(OperatorError):
            failing.result(PATIENCE)
        closing.result(PATIENCE)
    found = spans.finished()
    assert [dict(span.attributes or {})["dagexec.outcome"] for span in found] == [
        "timed_out",
        "rejected",
        "cancelled",
        "failed",
    ]
    assert {span.status.status_code for span in found} == {trace.StatusCode.ERROR}
    [event] = found[-1].events
    assert "told to fail at 1" in str(dict(event.attributes or {})["exception.message"])


@pytest.mark.parametrize("max_batch", [1, 4])
def test_inputs_that_do_not_fit_are_an_outcome(spans: Spans, max_batch: int) -> None:
    """Wherever that is noticed, each is counted once, and no run begins."""
    with dagexec.compile(doubled_model(), max_batch=max_batch, telemetry=spans.tracer) as executor:
        for given in (
            [1, 2],
            {"z": rows(1)},
            {},
            {"x": rows(1).astype(np.int32)},
            {"x": np.zeros((2, 4), np.float32)},
        ):
            with pytest.raises(FeedError) as caught:
                executor.run(given)  # type: ignore[arg-type]
        with pytest.raises(FeedError):
            executor.run({"x": rows(1)}, outputs=["z"])
        with pytest.raises(FeedError):
            executor.run({"x": rows(1)}, out={"z": rows(1)})
        statistics = executor.statistics()
    assert (statistics.invalid, statistics.failed, sum(statistics.runs_per_replica)) == (7, 0, 0)
    found = spans.finished()
    assert [dict(span.attributes or {})["dagexec.outcome"] for span in found] == ["invalid"] * 7
    assert {span.status.status_code for span in found} == {trace.StatusCode.ERROR}
    assert str(caught.value) in str(dict(found[4].events[0].attributes or {})["exception.message"])


def test_the_wait_in_the_queue_is_what_the_clock_says(spans: Spans, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        held_operators() as held,
        ThreadPoolExecutor(2) as threads,
        dagexec.compile(doubled_model("Held"), optimize=False, num_workers=1, telemetry=spans.tracer) as executor,
    ):
        clock = [0.0]
        monkeypatch.setattr(executor._dispatcher, "_now", lambda: clock[0])
        first = threads.submit(executor.run, {"x": rows(1)})
        held.wait_inside()
        second = threads.submit(executor.run, {"x": rows(2)})
        while not executor.statistics().queued:
            pass
        clock[0] = 5.0
        held.go_on.release(2)
        first.result(PATIENCE)
        second.result(PATIENCE)
    assert [dict(span.attributes or {})["dagexec.queue_wait"] for span in spans.finished()] == [0.0, 5.0]


def test_warm_up_runs_have_no_span(spans: Spans) -> None:
    with dagexec.compile(doubled_model(), optimize=False, warm_start=True, telemetry=spans.tracer):
        pass
    assert spans.finished() == []


def test_true_takes_the_global_provider() -> None:
    with dagexec.compile(
        doubled_model(), optimize=False, telemetry=True
    ) as executor:  # no provider is set: spans that do nothing
        executor.run({"x": rows(1)})


@pytest.mark.slow
def test_opentelemetry_is_not_imported_unless_asked_for() -> None:
    program = (
        "import sys, dagexec, numpy\n"
        "with dagexec.compile('zoo:lenet', optimize=False) as executor:\n"
        "    executor.warm_up()\n"
        "assert not any(name.startswith('opentelemetry') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_without_opentelemetry_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(DagexecError, match="pip install 'opentelemetry-api>="):
        dagexec.compile(doubled_model(), optimize=False, telemetry=True)


class FailingProcessor(SpanProcessor):
    """Raises at the start or at the end of a span."""

    def __init__(self, when: str) -> None:
        self._when = when

    def on_start(self, span: object, parent_context: object = None) -> None:
        if self._when == "start":
            raise ValueError("no start")

    def on_end(self, span: object) -> None:
        if self._when == "end":
            raise ValueError("no end")


@pytest.mark.parametrize("when", ["start", "end"])
async def test_a_span_processor_that_raises_is_logged_and_no_run_fails_of_it(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    provider = TracerProvider()
    provider.add_span_processor(FailingProcessor(when))
    with dagexec.compile(doubled_model(), optimize=False, telemetry=provider.get_tracer("failing")) as executor:
        assert executor.run({"x": rows(1)}, timeout=PATIENCE)["y"].tolist() == rows(2).tolist()
        assert (await executor.run_async({"x": rows(1)}, timeout=PATIENCE))["y"].tolist() == rows(2).tolist()
        assert executor.statistics().completed == 2
    found = [record for record in caplog.records if f"the span of a run could not be {when}ed" in record.getMessage()]
    assert len(found) == 2
