"""Inline runs: a request in the thread of its caller, when a replica is idle.

Handing a run to a worker and waiting for it costs tens of microseconds, more than a small net takes. Where a run has
work for several threads, idle workers help (`WorkerPool.run_here`). Nothing else is different: the run has a replica
of its own, is counted, delays the closing of the executor, and can be stopped between operators or pieces of them.

The thread of an event loop runs only nets that were measured to be short, of operators that never block, in sequence.
Their timeouts must be much longer, as they are checked only at the end of the run.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from dagexec.binding.io_binding import Array, Outputs, arrays_like
from dagexec.core.feeds import Feeds
from dagexec.core.purity import is_known
from dagexec.core.variant import Variant
from dagexec.errors import RunCancelledError
from dagexec.executor.batching.joining import Batching
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.requests.call import Call
from dagexec.executor.requests.request import Request, timed_out
from dagexec.executor.requests.waiting import EventLoop
from dagexec.executor.runs.pooled import PooledRuns
from dagexec.platform.blocking import working_for
from dagexec.platform.cached import cached_property
from dagexec.platform.shutdown import hold_daemon
from dagexec.platform.threads import ThreadsEndedError, ThreadWait, threads
from dagexec.scheduler.plan.culprit import NameStep
from dagexec.scheduler.run.inline import InlineSteps, run_inline

AMPLE = 10
"""A timeout of so many times the last run's seconds is not expected to expire."""


class InlineRuns:
    """Runs in their callers' threads, with the idle replicas of `dispatcher`."""

    def __init__(self, dispatcher: Dispatcher, pooled: PooledRuns, batching: Batching | None) -> None:
        """`batching` says how many rows requests have, if they may be joined."""
        self._dispatcher = dispatcher
        self._batching = batching
        self._idle = dispatcher.state.idle
        self._pooled = pooled
        self._now = threads().monotonic

    def run(
        self,
        feeds: Feeds,
        names: Sequence[str],
        call: Call,
    ) -> Outputs | None:
        """The outputs; None when nothing was done and the run has to go through the queue.

        `feeds` must have the names, dtypes and shapes that the next replica is prepared for. Raises what
        `Executor.run` does; RunTimeoutError at the end of a run that exceeded its timeout.
        """
        try:
            binding = self._idle[0].io_binding
        except IndexError:
            own = self._dispatcher.state.kept.by_thread.get(threading.get_ident())
            if own is None:
                return None
            binding = own.io_binding
        if binding is None or feeds.__class__ is not dict:
            return None
        if binding.is_shared and self._pooled.is_worker():
            return None
        arrays = arrays_like(binding.signature, feeds)
        if arrays is None:
            return None
        request = Request(feeds, names, call)
        if call.timeout is not None:
            request.time_out(self._now())
        dispatcher = self._dispatcher
        if self._batching is not None:
            if dispatcher.state.expects_company:
                return None
            request.rows = self._batching.rows(feeds)
        try:
            return self._computed(request, arrays) if dispatcher.admit_inline(request, binding) else None
        except ThreadsEndedError:
            raise
        except BaseException as error:
            self._leave(request, error)
            raise

    def takes(self, request: Request) -> bool:
        """True when the thread that made `request` may wait for a replica and compute with it, prepared or not.

        Runs with timeouts, observed and joined runs are for workers, as are calls of operators on one of them. A net
        that is fed sequences has no steps to call here.
        """
        plain = request.deadline == math.inf and request.call.trace is None and self._batching is None
        variants = any(isinstance(value, Variant) for value in request.feeds.values())
        return plain and not variants and not self._pooled.is_worker()

    def run_when_free(self, request: Request, wait: ThreadWait, when_queued: Callable[[], object]) -> Outputs:
        """The outputs of `request`, which has been checked: in this thread, as soon as it is given a replica.

        `wait` is notified then. `when_queued` is called first if no replica is free. Raises what `Executor.run` does.
        """
        request.caller = threading.get_ident()
        try:
            served = self._dispatcher.admit(request)
            if served is not request:
                self._pooled.see_to(request, served)
                when_queued()
                wait.wait()
            if request.over:
                return request.outcome()
            return self._computed(request, None)
        except ThreadsEndedError:
            raise
        except BaseException as error:
            if request.queue is not None:
                self._dispatcher.cancel(request, RunCancelledError("the calling thread was interrupted"))
            self._leave(request, error)
            raise

    def _computed(self, request: Request, arrays: Sequence[Array] | None) -> Outputs:
        """The outputs of `request`, which has a replica. `arrays` are its feeds, if they match the signature."""
        replica = request.replica
        assert replica is not None
        names, out = request.names, request.call.out
        binding = replica.io_binding
        dispatcher = self._dispatcher
        while True:
            if arrays is None or binding is None or not binding.take_in(arrays, names, out):
                self._pooled.feed(request)
                binding, arrays = replica.io_binding, None
                assert binding is not None
            if dispatcher.run_times is not None and request.block == 0:
                dispatcher.note_fed(request)
            if binding.is_shared:
                self._pooled.run_with_help(request, replica)
            else:
                request.steps = binding.steps
                if request.cancelled is None:
                    run = _run_stoppable if replica.net.has_bodies else run_inline
                    try:
                        replica.arithmetic.run(run, replica.net.name, binding.steps, binding.name_step)
                    except RunCancelledError:  # raised by a loop operator; the request has the reason
                        if request.cancelled is None:
                            raise
            if request.cancelled is not None:
                raise request.cancelled
            if request.blocks is None or not request.end_block():
                break
            request.block += 1
        if dispatcher.run_times is not None:
            dispatcher.note_ran(request)
        if request.deadline != math.inf and self._now() >= request.deadline:
            raise timed_out(self._dispatcher.name, request)
        outputs = binding.fetch(names, out) if request.blocks is None else request.fetch()
        if binding.copied != names:
            binding.unbind()
        if dispatcher.end_inline(request):
            self._pooled.hand_on(request)
        elif dispatcher.state.kept.by_thread:
            self._pooled.watch_kept()
        return outputs

    def _leave(self, request: Request, error: BaseException) -> None:
        """The inline run of `request`, if it has one, is over with `error`."""
        if self._dispatcher.end_inline(request, error):
            self._pooled.hand_on(request)
        elif self._dispatcher.state.kept.by_thread:
            self._pooled.watch_kept()
        hold_daemon()

    def run_in_turn(
        self,
        loop: EventLoop,
        feeds: Feeds,
        names: Sequence[str],
        call: Call,
    ) -> Outputs | None:
        """Like `run`, on the thread of `loop`; None also where its turn has no time left."""
        try:
            binding = self._idle[0].io_binding
        except IndexError:
            return None
        if binding is None or binding.is_shared or self._dispatcher.state.queue.waiting or not self.waits_for_nothing:
            return None
        timeout = call.timeout
        if timeout is not None and not (isinstance(timeout, float | int) and timeout > AMPLE * binding.seconds):
            return None
        if not loop.spend(binding.seconds, alone=not self._dispatcher.state.running):
            return None
        began = self._now()
        outputs = self.run(feeds, names, call)
        if outputs is not None:
            binding.took(self._now() - began)
        return outputs

    @cached_property
    def waits_for_nothing(self) -> bool:
        """Whether no operator can block: an application's may, a queue may, and a loop may be endless."""
        return all(map(is_known, self._dispatcher.state.replicas[0].net.graph.operators))


def _run_stoppable(net: str, steps: InlineSteps, name_step: NameStep) -> None:
    """`run_inline` of a net with loops, which also end when the list is cleared."""
    with working_for(steps):
        run_inline(net, steps, name_step)
