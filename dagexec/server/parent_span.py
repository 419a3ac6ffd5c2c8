"""parent_span: the span of another process under which a run stands, as W3C's Trace Context writes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager


@contextmanager
def parent_span(headers: Iterable[tuple[str, str]]) -> Iterator[None]:
    """Spans that begin inside are children of the span that `headers` name, if OpenTelemetry is installed."""
    try:
        from opentelemetry import context, propagate
    except ImportError:
        yield
        return
    token = context.attach(propagate.extract(dict(headers)))
    try:
        yield
    finally:
        context.detach(token)
