"""The end of an executor: it admits no more requests, waits for those that there are, and lets go of what it holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.requests.waiting import TaskWait, on_a_thread
from dagexec.executor.runs.pooled import PooledRuns
from dagexec.scheduler.run.run import waiting_time
from dagexec.scheduler.workers.place import Place


class Shutdown:
    """Of one executor. Does nothing in a forked child."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pooled: PooledRuns,
        place: Place,
        close_others: Callable[[], object],
        close_nets: Callable[[], object],
        finalizer: weakref.finalize[..., Any],
        *,
        has_turns: bool,
    ) -> None:
        """`close_others` closes executors beside it, `close_nets` its own nets, which `finalizer` would do otherwise.

        `has_turns` where requests may wait for the turns of an event loop.
        """
        self._dispatcher, self._pooled, self._place = dispatcher, pooled, place
        self._close_others, self._close_nets, self._finalizer = close_others, close_nets, finalizer
        self._has_turns = has_turns

    def admit_no_more(self) -> None:
        """Raises DagexecError when called by one of the executor's own workers."""
        self._dispatcher.check_caller("close")
        self._dispatcher.shut()

    def drain(self, timeout: float | None) -> bool:
        """Wait for all requests, and stop those that take longer; whether none did."""
        if self._dispatcher.forked:
            return True
        longest = waiting_time(timeout)
        self.admit_no_more()
        return self._stop_unless(self._wait_until_empty(longest))

    async def drain_async(self, timeout: float | None) -> bool:
        """As `drain`, for a task."""
        if self._dispatcher.forked:
            return True
        waiting_time(timeout)
        self.admit_no_more()
        wait = TaskWait()
        self._when_empty(wait.notify)
        return self._stop_unless(await wait.wait(timeout))

    def close(self, drain: bool) -> None:
        """Wait for requests that run, and with `drain` for those that are queued; then let go of everything."""
        if not self._begin(drain):
            return
        self._wait_until_empty(-1)
        self._release()

    async def close_async(self, drain: bool) -> None:
        """As `close`, for a task; a cancellation does not interrupt it."""
        if not self._begin(drain):
            return
        wait = TaskWait()
        self._when_empty(wait.notify)
        try:
            await wait.wait_out()
        finally:
            await on_a_thread(f"dagexec-{self._place.model}-closing", self._release)  # as it joins others

    def _stop_unless(self, in_time: bool) -> bool:
        """End the requests that there still are, unless all were over in time; whether they were."""
        if not in_time:
            self._dispatcher.abandon_queue()
            self._dispatcher.stop_running()
        return in_time

    def _begin(self, drain: bool) -> bool:
        """False in a forked child, which closes nothing."""
        if self._dispatcher.forked:
            return False
        self.admit_no_more()
        if not drain:
            self._dispatcher.abandon_queue()
        return True

    def _when_empty(self, callback: Callable[[], object]) -> None:
        """Call `callback` once there are no requests. They do not wait for others any more."""
        self._dispatcher.when_empty(callback)
        self._pooled.start_waiting()
        if self._has_turns:
            self._pooled.give_up_turns()

    def _wait_until_empty(self, seconds: float) -> bool:
        wait = self._place.workers.new_wait(self._dispatcher.share)
        self._when_empty(wait.notify)
        return wait.wait(seconds)

    def _release(self) -> None:
        self._close_others()
        self._place.leave()
        self._dispatcher.give_back_arenas()
        self._close_nets()
        self._finalizer.detach()  # it would keep the nets, and with their last failure the executor
