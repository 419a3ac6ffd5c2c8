"""Watching runs: observers of one's own, times, and traces for Perfetto (docs/tracing.md)."""

from dagexec.scheduler.observe.observers import ObservedRun, Observer, RunCountObserver, TimeObserver, together
from dagexec.scheduler.observe.trace import Trace

__all__ = ["ObservedRun", "Observer", "RunCountObserver", "TimeObserver", "Trace", "together"]
