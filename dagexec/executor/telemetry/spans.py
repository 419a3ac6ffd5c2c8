"""OpenTelemetry spans, one a request, and one a joined run. OpenTelemetry is imported only when they are requested.

A span begins when `run` or `run_async` is called, in the caller's context, and ends when the caller is told. It has the
attributes `dagexec.net`, `dagexec.net_type`, `dagexec.priority`, `dagexec.queue_wait` (seconds until a replica was
free) and `dagexec.outcome` (completed, failed, cancelled, timed_out, rejected or invalid); a run that raised has status
ERROR and the exception recorded. The span of a joined run, `dagexec.batch`, links to those of its members, and has the
attributes `dagexec.batch.size` (rows) and `dagexec.outcome`. An error of the tracer or of a span processor is logged;
it fails no run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dagexec.errors import DagexecError
from dagexec.executor.requests.request import Batch, Request
from dagexec.platform.extras import install_command

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

logger = logging.getLogger("dagexec")

SPAN_NAME = "dagexec.run"
BATCH_SPAN_NAME = "dagexec.batch"


def require_telemetry() -> Any:
    """The module `opentelemetry.trace`. Raises DagexecError when opentelemetry-api is not installed."""
    try:
        from opentelemetry import trace
    except ImportError:
        raise DagexecError(
            f"telemetry needs opentelemetry-api; install it with: {install_command('telemetry')}"
        ) from None
    return trace


class Telemetry:
    """Makes the spans of one executor."""

    def __init__(self, net: str, net_type: str, tracer: Tracer | None) -> None:
        """`tracer` defaults to "dagexec" of the global provider. Raises what `require_telemetry` does."""
        trace = require_telemetry()
        self._tracer = tracer or trace.get_tracer("dagexec")
        self._error = trace.StatusCode.ERROR
        self._link = trace.Link
        self._no_parent = trace.set_span_in_context(trace.INVALID_SPAN)
        self._net = net
        self._attributes: dict[str, str | int] = {"dagexec.net": net, "dagexec.net_type": net_type}

    def start(self, request: Request) -> None:
        """Begin the span of `request`; called by the thread or task that asks for the run."""
        attributes = {**self._attributes, "dagexec.priority": request.call.priority}
        try:
            request.span = self._tracer.start_span(SPAN_NAME, attributes=attributes)
        except Exception:
            logger.exception("net %s: the span of a run could not be started", self._net)

    def end(self, request: Request, outcome: str, error: BaseException | None, queue_wait: float) -> None:
        self._end(request, {"dagexec.queue_wait": queue_wait, "dagexec.outcome": outcome}, error)

    def start_batch(self, batch: Batch) -> None:
        """Begin the span of a joined run, unless it has one: a root, as its members have parents of their own."""
        if batch.span is not None:
            return
        spans = [member.span for member in batch.requests if member.span is not None]
        attributes = {**self._attributes, "dagexec.batch.size": batch.rows}
        try:
            links = [self._link(span.get_span_context()) for span in spans]
            batch.span = self._tracer.start_span(BATCH_SPAN_NAME, self._no_parent, attributes=attributes, links=links)
        except Exception:
            logger.exception("net %s: the span of a joined run could not be started", self._net)

    def end_batch(self, batch: Batch, outcome: str, error: BaseException | None) -> None:
        """With an `error`, its members run again."""
        self._end(batch, {"dagexec.outcome": outcome}, error)

    def _end(self, request: Request, attributes: Mapping[str, str | float], error: BaseException | None) -> None:
        span, request.span = request.span, None
        if span is None:
            return
        try:
            for name, value in attributes.items():
                span.set_attribute(name, value)
            if error is not None:
                span.record_exception(error)
                span.set_status(self._error, str(error))
            span.end()
        except Exception:
            logger.exception("net %s: the span of a run could not be ended", self._net)
