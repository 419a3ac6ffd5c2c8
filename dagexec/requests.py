"""Requests: one call of `run` or `run_async`, from the queue to its result, and who waits for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import anyio.lowlevel

from dagexec.core.errors import DagexecError
from dagexec.replicas import Array, Outputs
from dagexec.scheduler.run import Run
from dagexec.scheduler.trace import Trace


class Request:
    """One call of `run` or `run_async`. `notify` is called once, when `outcome` is there to be asked for."""

    __slots__ = ("cancelled", "error", "feeds", "names", "notify", "result", "run", "started", "trace")

    def __init__(self, feeds: Mapping[str, Array], names: Sequence[str], trace: Trace | None) -> None:
        self.feeds = feeds
        self.names = names
        self.trace = trace
        self.started = time.perf_counter()
        self.run: Run | None = None
        self.cancelled: DagexecError | None = None
        self.result: Outputs | None = None
        self.error: BaseException | None = None
        self.notify: Callable[[], object] | None = None

    def outcome(self) -> Outputs:
        """The outputs, or raise what went wrong."""
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


def on_loop(callback: Callable[[], object]) -> Callable[[], None]:
    """A function for any thread that has `callback` called on the event loop of the calling task."""
    native = anyio.lowlevel.current_token().native_token
    schedule = getattr(native, "call_soon_threadsafe", None) or native.run_sync_soon  # type: ignore[attr-defined]

    def notify() -> None:
        try:
            schedule(callback)
        except RuntimeError:
            return  # the loop is gone, and with it everyone who could wait

    return notify
