"""Watching runs: observers of one's own, times, and traces for Perfetto (docs/tracing.md)."""

from dagexec.scheduler.observe.counting import RunCountObserver, TimeObserver
from dagexec.scheduler.observe.observed_run import ObservedRun
from dagexec.scheduler.observe.observers import Observer, together
from dagexec.scheduler.observe.run_times import RunTimes
from dagexec.scheduler.observe.trace import Trace

__all__ = ["ObservedRun", "Observer", "RunCountObserver", "RunTimes", "TimeObserver", "Trace", "together"]
