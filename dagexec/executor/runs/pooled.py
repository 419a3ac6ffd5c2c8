"""Pooled runs: a request is fed to its replica, run by the workers of a pool, and its results are fetched.

Feeding includes preparation where shapes are new: the caller's thread does it for its own request, a worker for all
others and for requests with a timeout. A request that is abandoned meanwhile is over at once; preparation goes on, for
later requests.
The last worker to leave a run fetches, and continues with the request that has the replica next.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from dagexec.binding.io_binding import Outputs
from dagexec.binding.replicas import Replica
from dagexec.core.operator import nothing_to_do
from dagexec.errors import ClosedError, QueueFullError, WorkerLostError
from dagexec.executor.batching.row_blocks import RowBlocks
from dagexec.executor.dispatch.dispatcher import Dispatcher
from dagexec.executor.dispatch.keeping import KEPT_SECONDS
from dagexec.executor.dispatch.ledger import members_of
from dagexec.executor.requests.request import Request, abandoned
from dagexec.platform.threads import ThreadsEndedError, is_interruptible, threads
from dagexec.scheduler.run.inline import run_inline
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task


class PooledRuns:
    """Has requests served on the replicas that `dispatcher` gives them, by the workers of `pool`."""

    def __init__(self, dispatcher: Dispatcher, pool: WorkerPool, width: int, row_blocks: RowBlocks) -> None:
        """A run has up to `width` workers at once."""
        self._row_blocks = row_blocks
        self._dispatcher = dispatcher
        self._pool = pool
        self._width = width
        self._joins = dispatcher.state.joins
        self._watches = False  # kept replicas will be checked

    def submit(self, request: Request, *, start_here: bool) -> None:
        """Take a request on; with `start_here` the calling thread feeds the replica, if one is free.

        Raises what `Dispatcher.admit` raises.
        """
        try:
            served = self._dispatcher.admit(request)
            if served is request and start_here and (request.deadline == math.inf or request.is_prepared):
                self._serve(request)
            else:
                self.see_to(request, served)
        except (ClosedError, QueueFullError):
            raise
        except BaseException as error:  # KeyboardInterrupt, perhaps before anything could be done with the replica
            batch = request.batch
            if request.replica is not None and not request.fed and request.run is None:
                self._end(request, None, error)
            elif batch is not None and batch.replica is not None and not batch.fed and batch.run is None:
                self.serve_on_worker(batch)  # for the other members; this one leaves it
            raise

    def see_to(self, request: Request, served: Request | None) -> None:
        """`request` came: have `served` served, which has a replica since, and requests that need not wait any more."""
        if served is not None:
            self.serve(served)
        if request.queue is None:
            return
        if self._joins:
            self._see_to_waiting()
        elif self._dispatcher.state.idle and not self._dispatcher.have_turns():
            self.give_up_turns()

    def start_waiting(self) -> None:
        """Have requests served that need not wait for others any more, now and when their time comes."""
        if not self._joins:
            return
        if is_interruptible():
            self._see_to_waiting()
            return
        for request in self._dispatcher.start_waiting():
            self.serve_on_worker(request)
        self._see_to_later()

    def _see_to_waiting(self) -> None:
        """`start_waiting` in a thread that Ctrl-C may interrupt: a worker takes requests of others out of the queue."""
        if is_interruptible() and self._dispatcher.may_start():
            name = f"starting joined requests of {self._dispatcher.name}"
            with suppress(ClosedError):
                self._pool.submit(task(name, self.start_waiting, share=self._dispatcher.share))
        self._see_to_later()

    def _see_to_later(self) -> None:
        due = self._dispatcher.new_due()
        if due is not None:
            self._wait_until(due)

    def give_up_turns(self) -> None:
        """Have workers serve the requests that wait for a turn of an event loop."""
        if not self._dispatcher.state.queue.waiting:
            return
        if is_interruptible():  # a worker takes requests of others out of the queue
            name = f"starting requests of {self._dispatcher.name}"
            with suppress(ClosedError):
                self._pool.submit(task(name, self.give_up_turns, share=self._dispatcher.share))
            return
        for request in self._dispatcher.give_up_turns():
            self.serve(request)

    def end_early(self, request: Request, error: BaseException) -> None:
        """The thread that was about to run `request` itself got `error`; end the request unless it is over."""
        if request.caller:
            request.notify()
        elif not request.over and request.replica is not None and request.run is None:
            self._end(request, None, error)

    def run_here(self, request: Request) -> None:
        """Run `request`, which has a replica that is prepared for its shapes, in the calling thread."""
        result: Outputs | None = None
        error: BaseException | None = None
        request.fed = True
        try:
            result = self._computed(request)
        except ThreadsEndedError:
            raise
        except BaseException as caught:
            error = caught
        request.steps = None
        self._dispatcher.ran_here(request, threads().monotonic())
        self._end(request, result, error)
        try:
            if error is not None and not isinstance(error, Exception):
                raise error
        finally:
            del error  # its traceback has this frame

    def _computed(self, request: Request) -> Outputs:
        """The results of `request`, computed in the calling thread."""
        replica = request.replica
        assert replica is not None
        request.feed_replica()
        self._dispatcher.note_fed(request)
        binding = replica.io_binding
        assert binding is not None
        request.steps = binding.steps
        if request.cancelled is None:
            replica.arithmetic.run(run_inline, replica.net.name, binding.steps, binding.name_step)
        if request.cancelled is not None:
            raise request.cancelled
        self._dispatcher.note_ran(request)
        return request.fetch()

    def _wait_until(self, due: float) -> None:
        try:
            threads().call_briefly(max(0.0, due - threads().monotonic()), partial(self._on_time, due))
        except RuntimeError:  # the system starts no more threads
            self._dispatcher.hurry()
            self.start_waiting()

    def _on_time(self, due: float) -> None:
        if self._dispatcher.rings(due):
            self.start_waiting()

    def is_worker(self) -> bool:
        """True on a worker of the pool."""
        return self._pool.is_worker()

    def hand_on(self, request: Request) -> None:
        """The inline run of `request` is over: give its replica to the next request, and have that served.

        A worker does so in place of a thread that Ctrl-C may interrupt.
        """

        def hand_on() -> None:
            self._dispatcher.hand_on(request)
            self.start_waiting()
            self._pass_on(request)

        if not is_interruptible():
            hand_on()
            return
        name = f"handing on a replica of {self._dispatcher.name}"
        self._pool.submit(task(name, hand_on, share=self._dispatcher.share))

    def watch_kept(self) -> None:
        """Threads keep replicas: take them back in a moment from threads that do not call again."""
        if self._watches:
            return
        self._watches = True
        try:
            threads().call_briefly(KEPT_SECONDS, self._take_back)
        except RuntimeError:  # the system starts no more threads
            self._take_back(math.inf)

    def _take_back(self, now: float | None = None) -> None:
        self._watches = False
        for request in self._dispatcher.take_back(now):
            self.serve(request)
        if self._dispatcher.state.kept.by_thread:
            self.watch_kept()

    def serve(self, request: Request) -> None:
        """Have `request`, which was given a replica, served: by the thread that waits to do so, or by a worker."""
        if request.caller:
            request.notify()
        else:
            self.serve_on_worker(request)

    def serve_on_worker(self, request: Request) -> None:
        """Have a worker feed the replica that `request` was given, and start its run."""
        dispatcher = self._dispatcher
        feeding = task(
            f"feeding {dispatcher.name}", lambda: self._serve(request), request.call.priority, dispatcher.share
        )

        def fed() -> None:
            """An error with nothing fed means that it was cancelled before its turn."""
            if feeding.error is not None and not request.fed:
                self._end(request, None, feeding.error)

        feeding.finished = fed
        cancelled = dispatcher.started(request, feeding)
        if cancelled is None:
            try:
                self._pool.submit(feeding)
                return
            except ClosedError as error:  # it was cancelled and ended meanwhile, so the pool could be closed
                cancelled = error
        self._pool.stop(feeding, cancelled)

    def _serve(self, request: Request) -> None:
        """Start the run of `request`; when it cannot be started, end it and have the next one served.

        Raises an interrupt of the calling thread if the run is on the pool already; the caller then stops the run.
        """
        while self._ended_early(request):
            following = request.following
            if following is None or following.caller or not self._pool.is_worker():
                self._pass_on(request)
                return
            request.following = None
            request = following

    def _ended_early(self, request: Request) -> bool:
        """Start the run of `request`, unless it was started; True when it ended without a run."""
        if request.fed:
            return False
        request.fed = True
        request.run = None
        result: Outputs | None = None
        error: BaseException | None = None
        try:
            if self._start(request):
                return False
            result = {}
        except ThreadsEndedError:
            raise
        except BaseException as caught:
            error = self._reported(caught)
            run = request.run
            if run is not None or request.replica is None:  # it may be on the pool, or was stopped and ended
                if not isinstance(error, Exception):
                    raise
                if run is not None:
                    self._pool.stop(run, error)
                return False
        self._dispatcher.end(request, result, error)
        self.start_waiting()
        return True

    def _start(self, request: Request) -> bool:
        """Feed the replica and hand its run to the pool; False when there is nothing to run.

        Once the dispatcher knows the run, the request is ended by stopping the run.
        """
        replica = request.replica
        assert replica is not None
        if request.waits_on is not None or self._joins:
            self._drop_abandoned(request)
        self.feed(request)
        if request.block == 0:
            self._dispatcher.note_fed(request)
        if not request.run_net:
            replica.net.prepared()
            return False
        self._pool.submit(self._begun(request, replica, partial(self._over, request, request.block)))
        return True

    def feed(self, request: Request) -> None:
        """Put its inputs, or those of its next block, where its replica reads them, and prepare that for them.

        Raises what `Replica.feed` does.
        """
        if request.block == 0 and request.run_net:
            request.blocks = self._row_blocks.of(request)
        request.feed_replica()

    def _begun(self, request: Request, replica: Replica, finished: Callable[[], object]) -> Run:
        """The run of `request`, whose replica is fed. Raises the reason if it was cancelled."""
        run = replica.net.new_run(finished, request.call.trace)
        run.priority = request.call.priority
        run.share = self._dispatcher.share
        run.width = self._width if run.work.is_shared else 1
        cancelled = self._dispatcher.started(request, run)
        if cancelled is not None:
            raise cancelled
        return run

    def run_with_help(self, request: Request, replica: Replica) -> None:
        """Run `request`, whose replica is fed, in the calling thread; idle workers help.

        Raises the run's error, and an interrupt of the thread after the last worker has left the run.
        """
        run = self._begun(request, replica, nothing_to_do)
        replica.arithmetic.run(self._pool.run_here, run)
        run.check_complete()
        run.raise_error()
        assert replica.io_binding is not None
        replica.io_binding.ran(run)

    def _drop_abandoned(self, request: Request) -> None:
        """End requests whose callers cannot wait any more. Raises RunCancelledError if none is left of `request`."""
        for member in members_of(request):
            if not member.is_abandoned():
                continue
            if member is request:
                raise abandoned(self._dispatcher.name)
            self._dispatcher.cancel(member, abandoned(self._dispatcher.name))
        if request.cancelled is not None:
            raise request.cancelled

    def _over(self, request: Request, block: int) -> None:
        """The end of a run, on the thread that left it last: fetch, then serve the next request with the replica.

        The pool calls it again if that thread died in it. A request of several blocks goes on with the next.
        """
        if request.over and request.replica is None:
            self._dispatcher.notify(request)
            self._pass_on(request)
            return
        result: Outputs | None = None
        error: BaseException | None = None
        try:
            if block != request.block:
                raise WorkerLostError(f"net {self._dispatcher.name!r}: a worker was ended between two blocks")
            assert request.run is not None
            request.run.check_complete()
            request.run.raise_error()
            if request.replica is not None and request.replica.io_binding is not None:
                request.replica.io_binding.ran(request.run)
            if request.end_block():
                request.block += 1
                request.run = None
                self._start(request)
                return
            self._dispatcher.note_ran(request)
            self._dispatcher.take(request)
            result = request.fetch()
        except ThreadsEndedError:
            raise
        except BaseException as caught:
            error = self._reported(caught)
            run = request.run
            if block != request.block and (run is not None or request.replica is None):  # as in `_ended_early`
                if run is not None:
                    self._pool.stop(run, error)
                return
        try:
            self._end(request, result, error)
        finally:
            del error  # its traceback has this frame

    def _reported(self, error: BaseException) -> BaseException:
        """The error that the caller of a request gets for `error`: not one that would end the caller's own thread."""
        if isinstance(error, Exception) or not self._pool.is_worker():
            return error
        lost = WorkerLostError(f"net {self._dispatcher.name!r}: a worker was ended: {type(error).__name__}: {error}")
        lost.__cause__ = error
        return lost

    def _end(self, request: Request, result: Outputs | None, error: BaseException | None) -> None:
        self._dispatcher.end(request, result, error)
        self.start_waiting()
        if request.following is not None:
            self._pass_on(request)

    def _pass_on(self, ended: Request) -> None:
        """Have the request after `ended`, if any, served: a caller's thread does not feed and prepare for others."""
        following = ended.following
        if following is not None:
            if not following.caller and self._pool.is_worker():
                self._serve(following)
            else:
                self.serve(following)
            ended.following = None
