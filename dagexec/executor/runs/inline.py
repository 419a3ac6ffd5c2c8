"""Inline runs: a request in the thread of its caller, when a replica is idle.

Handing a run to a worker and waiting for it costs tens of microseconds, more than a small net takes. Where there is
something for several threads to do in a run, workers that are idle help (`WorkerPool.run_here`). Nothing else is
different: the run has a replica of its own, is counted, is waited for by whoever closes the executor, and can be
stopped between operators, or pieces of them.

On the thread of an event loop that is for short runs, as measured before, of operators that are known to wait for
nothing, one after another. They may have a timeout that is much longer: nothing stops such a run before its end, where
that is looked at.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import cached_property

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
from dagexec.platform.shutdown import hold_daemon
from dagexec.platform.threads import ThreadsEndedError, ThreadWait, threads
from dagexec.scheduler.plan.culprit import NameStep
from dagexec.scheduler.run.inline import InlineSteps, run_inline

AMPLE = 10
"""A timeout of so many times what a run took last is not expected to end it."""


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
        """The outputs; None when the run has to take the usual way, and nothing has been done.

        `feeds` have to be arrays of the names, dtypes and shapes that the next replica is prepared for. Raises what
        `Executor.run` does; RunTimeoutError at the end of a run that took more than its timeout.
        """
        try:
            binding = self._idle[0].io_binding
        except IndexError:
            kept = self._dispatcher.state.kept.by_thread.get(threading.get_ident())
            if kept is None:
                return None
            binding = kept.io_binding
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

        A run that may be stopped in time, is watched or is joined with others is for workers, as is what an operator
        on one of them asks for. A net that is fed sequences has no steps to be called here.
        """
        plain = request.deadline == math.inf and request.call.trace is None and self._batching is None
        variants = any(isinstance(value, Variant) for value in request.feeds.values())
        return plain and not variants and not self._pooled.is_worker()

    def run_when_free(self, request: Request, wait: ThreadWait, when_queued: Callable[[], object]) -> Outputs:
        """The outputs of `request`, which has been checked: in this thread, as soon as it is given a replica.

        `wait` is notified then. `when_queued` is called first if there is none yet. Raises what `Executor.run` does.
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
        """The outputs of `request`, which has a replica. `arrays` are its feeds, if they are those of the signature."""
        replica = request.replica
        assert replica is not None
        names, out = request.names, request.call.out
        known = replica.io_binding
        while True:
            if arrays is None or known is None or not known.take_in(arrays, names, out):
                self._pooled.feed(request)
                known, arrays = replica.io_binding, None
                assert known is not None
            if known.is_shared:
                self._pooled.run_with_help(request, replica)
            else:
                request.steps = known.steps
                if request.cancelled is None:
                    run = _run_stoppable if replica.net.has_bodies else run_inline
                    try:
                        replica.arithmetic.run(run, replica.net.name, known.steps, known.name_step)
                    except RunCancelledError:  # a loop saw that it was; the request knows by whom
                        if request.cancelled is None:
                            raise
            if request.cancelled is not None:
                raise request.cancelled
            if request.blocks is None or not request.end_block():
                break
            request.block += 1
        if request.deadline != math.inf and self._now() >= request.deadline:
            raise timed_out(self._dispatcher.name, request)
        outputs = known.fetch(names, out) if request.blocks is None else request.fetch()
        if known.copied != names:
            known.unbind()
        dispatcher = self._dispatcher
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
        """Like `run`, on the thread of `loop`; None as well where that has no time for it in this turn."""
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
        """Operators may be an application's, have a queue, or a loop without end."""
        return all(map(is_known, self._dispatcher.state.replicas[0].net.graph.operators))


def _run_stoppable(net: str, steps: InlineSteps, name_step: NameStep) -> None:
    """`run_inline` of a net with loops, which end when the list is cleared."""
    with working_for(steps):
        run_inline(net, steps, name_step)
