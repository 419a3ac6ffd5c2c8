"""Deployment: replicas of a model in other processes, used like an executor. `dagexec.cluster.deploy` makes one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy.typing as npt

from dagexec.binding.io_binding import Outputs
from dagexec.cluster.dispatcher import Dispatcher
from dagexec.cluster.statistics import DeploymentStatistics, statistics_of
from dagexec.core.feeds import Feeds, HeldMemory, as_arrays, check_feeds, check_out, named_feeds, result_names
from dagexec.core.model import InputInfo, Model
from dagexec.errors import FeedError, RunCancelledError
from dagexec.executor.model_runner import ModelRunner
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Request, timed_out
from dagexec.executor.requests.waiting import TaskWait, on_a_thread
from dagexec.executor.source.types import GivenTypes
from dagexec.platform.threads import ThreadWait, threads
from dagexec.scheduler.run.run import waiting_time


class Deployment(ModelRunner):
    """Runs a model on many replicas; requests go to the one with the fewest outstanding.

        with dagexec.cluster.deploy("model.onnx", replicas=4) as deployment:
            outputs = deployment.run({"data": array})
            outputs = await deployment.run_async({"data": array}, timeout=0.5)

    `run` may be called from many threads and `run_async` from many tasks (asyncio or trio) at the same time. Arguments,
    results and errors are those of an executor's, except that there is no `trace` across processes (FeedError), and
    that a call that ends early does not wait for the replica, which stops before its next operator. ReplicaError when
    the replica was lost, and the one that was asked after it as well.
    """

    def __init__(self, model: Model, types: GivenTypes, dispatcher: Dispatcher, release: Callable[[], object]) -> None:
        """Called by `deploy`. `model` needs no parameters; `types` are its, `release` lets go of the cluster, once."""
        self.model = model
        self._types = types
        self._needed = model.needed_inputs()
        self._dispatcher = dispatcher
        self._release = release
        self._now = threads().monotonic
        self._closed = False

    def output_info(self) -> Mapping[str, InputInfo]:
        """What is known of each result before a run, as of an executor."""
        return self._types.output_info(self.inputs, self.outputs)

    def _run(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        wait = ThreadWait()
        request = self._request(feeds, call, wait)
        self._dispatcher.submit(request)
        try:
            in_time = wait.wait(waiting_time(request.seconds_left(self._now())))
        except BaseException:
            self._give_up(request, "the calling thread was interrupted")
            raise
        if not in_time:
            self._dispatcher.give_up(request, timed_out(self.model.name, request))
        return self._results(request)

    async def _run_async(self, feeds: Feeds | npt.ArrayLike, call: Call) -> Outputs:
        wait = TaskWait()
        request = self._request(feeds, call, wait)
        self._dispatcher.submit(request)
        try:
            in_time = await wait.wait(request.seconds_left(self._now()))
        except BaseException:
            self._give_up(request, "the awaiting task was cancelled")
            raise
        if not in_time:
            self._dispatcher.give_up(request, timed_out(self.model.name, request))
        return self._results(request)

    def statistics(self) -> DeploymentStatistics:
        """Counts and times of requests and replicas so far and at this moment."""
        return self._dispatcher.read(statistics_of)

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests, let those that are there finish, then close.

        After `timeout` seconds they end with ClosedError; the result is then False.
        """
        longest = waiting_time(timeout)
        self._dispatcher.shut(abandon_queue=False)
        in_time = self._dispatcher.wait_until_empty(longest)
        if not in_time:
            self._dispatcher.abandon_all()
        self._end()
        return in_time

    async def drain_async(self, timeout: float | None = None) -> bool:
        """Like `drain`, for a task."""
        waiting_time(timeout)
        self._dispatcher.shut(abandon_queue=False)
        wait = TaskWait()
        self._dispatcher.when_empty(wait.notify)
        in_time = await wait.wait(timeout)
        if not in_time:
            self._dispatcher.abandon_all()
        await self._end_async()
        return in_time

    def close(self, *, drain: bool = False) -> None:
        """End queued requests with ClosedError, let those finish that a replica has, and end the replicas. Idempotent.

        With `drain` queued requests finish as well.
        """
        self._dispatcher.shut(abandon_queue=not drain)
        self._dispatcher.wait_until_empty()
        self._end()

    async def aclose(self, *, drain: bool = False) -> None:
        """Like `close`, for a task. It returns when the deployment is closed, even if the task is cancelled."""
        self._dispatcher.shut(abandon_queue=not drain)
        wait = TaskWait()
        self._dispatcher.when_empty(wait.notify)
        try:
            await wait.wait_out()
        finally:
            await self._end_async()

    def _request(self, feeds: Feeds | npt.ArrayLike, call: Call, wait: ThreadWait | TaskWait) -> Request:
        """The checked request. Its timeout starts now."""
        net = self.model.name
        waiting_time(call.timeout)
        began = self._now()
        try:
            if call.trace is not None:
                raise FeedError(f"net {net!r}: trace: a run in another process cannot be observed")
            named = named_feeds(net, feeds, self._needed)
            names = self.model.outputs if call.outputs is None else result_names(net, call.outputs)
            if call.out is not None:
                named = as_arrays(net, named)
                check_out(net, call.out, names, named, HeldMemory({}))
            checked = check_feeds(self.model, named, self._needed)
        except FeedError as error:
            self._dispatcher.refuse(error)
            raise
        request = Request(checked, tuple(names), call, notify=wait.notify)
        request.time_out(began)
        if isinstance(wait, TaskWait):
            request.waits_on = wait.loop
        return request

    def _results(self, request: Request) -> Outputs:
        """The results, copied out of the object store: they are the caller's, and the store's memory is free again."""
        return request.own(self.model.name, request.outcome())

    def _give_up(self, request: Request, why: str) -> None:
        self._dispatcher.give_up(request, RunCancelledError(f"net {self.model.name!r}: {why}"))

    def _end(self) -> None:
        self._dispatcher.close()
        if not self._closed:
            self._closed = True
            self._release()

    async def _end_async(self) -> None:
        await on_a_thread(f"dagexec-{self.model.name}-closing", self._end)
