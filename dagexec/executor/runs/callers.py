"""Callers make requests, wait for them as threads or tasks, and cancel those that they cannot wait for any longer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt

from dagexec.binding.io_binding import Outputs
from dagexec.binding.parameters import Parameters
from dagexec.binding.replicas import Replicas
from dagexec.core.feeds import Feeds, check_feeds
from dagexec.core.model import Model
from dagexec.errors import DagexecError, FeedError, RunCancelledError
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.dispatch.growth import Growth
from dagexec.executor.interface import Interface
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Request, timed_out
from dagexec.executor.requests.waiting import TaskWait
from dagexec.executor.runs.pooled import PooledRuns
from dagexec.platform.threads import ThreadWait, threads
from dagexec.scheduler.run.run import waiting_time

if TYPE_CHECKING:
    from dagexec.executor.batching.joining import Batching


class Callers:
    """Of one executor."""

    def __init__(
        self,
        model: Model,
        interface: Interface,
        replicas: Replicas,
        parameters: Parameters,
        batching: Batching | None,
        dispatcher: Dispatcher,
        pooled: PooledRuns,
        growth: Growth | None,
    ) -> None:
        """`growth` decides the number of replicas, None where it is given."""
        self._model, self._interface, self._replicas, self._parameters = model, interface, replicas, parameters
        self._batching, self._dispatcher, self._pooled, self._growth = batching, dispatcher, pooled, growth
        self._now = threads().monotonic

    def asked(self, feeds: Feeds | npt.ArrayLike, call: Call) -> tuple[Feeds, Sequence[str]]:
        """See `Interface.asked`."""
        try:
            return self._interface.asked(feeds, call, self._replicas, self._parameters)
        except FeedError as error:
            self._dispatcher.refuse(error)
            raise

    def request(self, feeds: Feeds, names: Sequence[str], call: Call, wait: ThreadWait | TaskWait) -> Request:
        """The checked request. Its timeout starts now."""
        waiting_time(call.timeout)
        began = self._now()
        checked = (self._batching or self._replicas).fitting(feeds)
        try:
            if checked is None:
                checked = check_feeds(self._model, feeds, self._interface.needed)
            request = Request(checked, names, call, notify=wait.notify)
            if self._batching is not None:
                self._batching.place(request)
        except FeedError as error:
            self._dispatcher.refuse(error)
            raise
        request.time_out(began)
        if isinstance(wait, TaskWait):
            request.waits_on = wait.loop
        return request

    def served(self, request: Request, wait: ThreadWait) -> Outputs:
        """The outputs of `request`, which is cancelled at its deadline."""
        try:
            self._pooled.submit(request, start_here=True)
            if request.queue is not None:
                self.grow(of_thread=True)
            in_time = wait.wait(waiting_time(request.seconds_left(self._now())))
            if not in_time and self._cancel(request, timed_out(self._model.name, request)):
                wait.wait()
        except BaseException as error:  # KeyboardInterrupt: the run must not go on without its caller
            if self._cancel(request, self._cancelled("the calling thread was interrupted")):
                wait.wait()
            request.attach_secondary(error)
            raise
        return request.outcome()

    async def served_async(self, request: Request, wait: TaskWait) -> Outputs:
        """Like `served`, for a task."""
        try:
            self._pooled.submit(request, start_here=False)
            if request.queue is not None:
                self.grow(of_thread=False)
            in_time = await wait.wait(request.seconds_left(self._now()))
        except GeneratorExit:  # the coroutine was dropped: it cannot wait any more
            self._cancel(request, self._cancelled("the awaiting coroutine was dropped"))
            raise
        except BaseException as error:
            if self._cancel(request, self._cancelled("the awaiting task was cancelled")):
                await wait.wait_out()
            request.attach_secondary(error)
            raise
        if not in_time and self._cancel(request, timed_out(self._model.name, request)):
            await wait.wait_out()
        return request.outcome()

    def grow(self, *, of_thread: bool) -> None:
        """A request of a thread or a task waits: make one more replica, if the executor decides their number."""
        if self._growth is not None:
            self._growth.consider(of_thread=of_thread)

    def _cancel(self, request: Request, error: DagexecError) -> bool:
        """As `Dispatcher.cancel`; the request may have been interrupted before waiting ones were served."""
        ends = self._dispatcher.cancel(request, error)
        self._pooled.start_waiting()
        return ends

    def _cancelled(self, why: str) -> RunCancelledError:
        return RunCancelledError(f"net {self._model.name!r}: {why}")
