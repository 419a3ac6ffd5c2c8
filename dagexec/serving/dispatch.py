"""The dispatcher: takes requests on, gives each a replica when it is its turn, and ends it.

What it decides is in `dispatch_state`; here are the lock around that, the clock, spans, and what callers are told.
Whoever has a request served, on workers (`pooled`) or in its caller's thread (`inline`), says when it ended, and learns
which request has the replica next.

The dispatcher's lock guards its state and what changes in a request. It is never held while anything is fed, prepared,
run, fetched or told, and no other lock is taken under it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import get_ident

from dagexec.binding.io_binding import IOBinding, Outputs
from dagexec.binding.replicas import Replica
from dagexec.core.runtime import RuntimeStatistics
from dagexec.core.stream import at_work
from dagexec.errors import ClosedError, DagexecError, QueueFullError
from dagexec.options import CompileOptions
from dagexec.platform.deadline import Deadline
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.shutdown import hold_daemon, stop_at_exit
from dagexec.platform.threads import ThreadWait, threads
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run
from dagexec.serving.dispatch_state import DispatchState
from dagexec.serving.metrics import Metrics
from dagexec.serving.requests import Request, RequestQueue, outcome_name
from dagexec.serving.statistics import OUTCOMES, ExecutorStatistics, Latencies
from dagexec.serving.telemetry import Telemetry


class Dispatcher:
    """Who is served when, by the replicas of one executor."""

    def __init__(
        self,
        name: str,
        replicas: Iterable[Replica],
        pool: WorkerPool,
        options: CompileOptions,
        telemetry: Telemetry | None,
        metrics: Metrics | None = None,
        share: Share | None = None,
    ) -> None:
        """`name` is the model's, for messages; the workers of `pool` serve, and charge `share` if others use them."""
        self.name = name
        self.share = share
        self.state = DispatchState(name, tuple(replicas), options)
        self.forked = False
        self._pool = pool
        self._telemetry = telemetry
        self._metrics = metrics
        if metrics is not None:
            metrics.observe(self)
        self._now = threads().monotonic
        self._lock = threads().lock()
        self._when_empty: list[Callable[[], object]] = []
        reset_after_fork(self, Dispatcher._in_child)
        if threads().concurrent:
            stop_at_exit(self, Dispatcher._stop_at_exit)

    def admit(self, request: Request) -> bool:
        """Take a request on. True when it has its replica, and the caller has it served now.

        Raises ClosedError when no more are admitted, QueueFullError, and what `check_caller` raises.
        """
        self.check_caller("run")
        now = request.created = self._now()
        if self._telemetry is not None and request.pinned is None:
            self._telemetry.start(request)
        try:
            with self._lock:
                return self.state.arrive(request, now)
        except (ClosedError, QueueFullError) as error:
            self._end_span(request, error, 0.0)
            if self._metrics is not None and isinstance(error, QueueFullError):
                self._metrics.record(error, 0.0, 0.0)
            raise

    def admit_inline(self, request: Request, binding: IOBinding) -> bool:
        """Give `request` an idle replica that is fed as `binding` does; False when there is none.

        False also for a thread that is in a run here, as an operator's is, or whose last one is still to be handed on.
        Call `end_inline` afterwards, also when this is interrupted. Raises what `check_caller` raises.
        """
        caller, now = get_ident(), self._now()
        if caller in self._pool.workers:
            self.check_caller("run")
        with self._lock:
            return self.state.arrive_inline(request, binding, caller, now)

    def started(self, request: Request, run: Run) -> DagexecError | None:
        """From here on, whoever cancels `request` stops `run`. Why it was cancelled before, if it was."""
        with self._lock:
            request.run = run
            return request.cancelled

    def end(self, request: Request, result: Outputs | None, error: BaseException | None) -> None:
        """Settle a request that had a replica, and tell its caller; `following` is who has the replica now."""
        replica = request.replica
        assert replica is not None
        replica.unbind()
        with self._lock:
            now = self._now()
            if error is None and replica.io_binding is not None:
                replica.io_binding.took(now - request.begun)
            request.following = self.state.release(request, now)
            self.state.settle(request, result, error, now)
        self._record(request, error, now)
        self.notify(request)

    def end_inline(self, request: Request, error: BaseException | None = None) -> bool:
        """The inline run of `request`, if it has one, is over. True when a worker has to `hand_on` its replica.

        Called again after an interrupt, it does what is left to do.
        """
        if request.replica is None:
            return False
        if error is not None and not request.over:
            request.replica.unbind()
        outcome, now = "completed" if error is None else outcome_name(error), self._now()
        if self._metrics is not None and not request.over:
            self._metrics.record(error, 0.0, now - request.begun)
        with self._lock:
            return not self.state.leave_inline(request, outcome, now, bool(self._when_empty))

    def hand_on(self, request: Request) -> None:
        """On a worker: the replica of an inline run that is over goes to the request that has it next, `following`."""
        with self._lock:
            if request.replica is None:
                return
            request.following = self.state.release(request, self._now())
        if self._when_empty:
            self._announce_empty()

    def add(self, replica: Replica, lone: Replica | None) -> tuple[bool, Request | None]:
        """A replica that was made later: whether it is taken on, and the request that has it now.

        With `lone`, an older one is for requests that come one at a time from here on.
        """
        with self._lock:
            if self.state.shut:
                return False, None
            return True, self.state.add(replica, lone, self._now())

    def cancel(self, request: Request, error: DagexecError) -> bool:
        """End `request` with `error` as soon as no worker needs its replica.

        False when there is no end to wait for: it was never taken on, or is over already.
        """
        with self._lock:
            waiting = request.queue is not None
            if not waiting and request.replica is None:
                return False
            if request.cancelled is None:
                request.cancelled = error
            run = request.run
            if request.steps is not None:
                request.steps.clear()
            if waiting:
                now = self._now()
                self.state.withdraw(request)
                self.state.settle(request, None, error, now)
        if waiting:
            self._record(request, error, now)
            self.notify(request)
        elif run is not None:
            self._pool.stop(run, error)
        return True

    def check_caller(self, doing: str) -> None:
        """Raise where `run` or `close` would wait forever: DagexecError on a worker, ClosedError in a forked child."""
        hold_daemon()
        if self.forked:
            raise ClosedError(
                f"net {self.name!r}: the process was forked, and the workers stayed in the parent; "
                "call reopen() in the child, or compile the model again there"
            )
        here = self.state.running.get(get_ident())
        members = self.state.replicas
        on_device = at_work.stream is not None and any(one.net.would_wait_for_its_device() for one in members)
        if on_device or self._is_on_worker() or (here is not None and not here.over):
            raise DagexecError(
                f"net {self.name!r}: an operator cannot {doing} the executor that runs it; it would wait for itself"
            )

    def _is_on_worker(self) -> bool:
        """True in an operator that a worker calls for this executor. Workers of its own work for nobody else."""
        return self._pool.is_worker() if self.share is None else self._pool.works_for(self.share)

    def shut(self) -> None:
        """Take no more requests; those that await admission end with ClosedError. Idempotent."""
        with self._lock:
            self.state.shut = True
        self._end_waiting(self.state.awaiting_admission)

    def abandon_queue(self) -> None:
        """End all requests that wait, in the queue or for a certain replica, with ClosedError; after `shut`."""
        self._end_waiting(self.state.queue)
        self._end_waiting(self.state.pinned)

    def stop_running(self) -> None:
        """Have the runs under way stop at the next chain boundary, and end with ClosedError."""
        with self._lock:
            running = list(self.state.running.values())
        for request in running:
            self.cancel(request, self._closed())

    def unfinished(self) -> int:
        """How many requests are not over."""
        with self._lock:
            state = self.state
            return sum(len(queue) for queue in (state.queue, state.awaiting_admission, state.pinned)) + len(
                state.running
            )

    def when_empty(self, callback: Callable[[], object]) -> None:
        """Call `callback` once no request is left, at once if none is."""
        with self._lock:
            self._when_empty.append(callback)
        self._announce_empty()

    def statistics(self, streams: RuntimeStatistics | None) -> ExecutorStatistics:
        """Counts at this moment; `streams` are those of the device."""
        pool = self._pool.statistics()
        with self._lock:
            state = self.state
            times = list(state.times)
            counts = {name: state.outcomes[name] for name in OUTCOMES}
            places = len(state.running), len(state.queue), len(state.awaiting_admission)
            begun = tuple(state.begun)
        total = Latencies.of(wait + run for wait, run in times)
        return ExecutorStatistics(
            len(begun),
            *places,
            **counts,
            median_latency=total.median,
            p99_latency=total.p99,
            queue_wait=Latencies.of(wait for wait, _ in times),
            run_time=Latencies.of(run for _, run in times),
            runs_per_replica=begun,
            busy_workers=pool.busy,
            pool=pool,
            preparations=tuple(replica.net.preparation_statistics() for replica in state.replicas),
            streams=streams,
        )

    def notify(self, request: Request) -> None:
        """Let the caller of a settled request go on, and whoever waits for the last one."""
        if self._telemetry is not None:
            self._end_span(request, request.error, request.begun - request.created)
        request.notify()
        if self._when_empty:
            self._announce_empty()

    def arena_bytes(self) -> int:
        """The bytes that the tensors of the replicas share."""
        return sum(replica.net.preparation_statistics().arena_bytes for replica in self.state.replicas)

    def _record(self, request: Request, error: BaseException | None, now: float) -> None:
        if self._metrics is not None and request.pinned is None:
            self._metrics.record(error, request.begun - request.created, now - request.begun)

    def _end_span(self, request: Request, error: BaseException | None, waited: float) -> None:
        if self._telemetry is not None and request.pinned is None:
            self._telemetry.end(request, outcome_name(error), error, waited)

    def _announce_empty(self) -> None:
        with self._lock:
            if self.state.running:  # nothing waits while a replica is idle, so this is all there is
                return
            told, self._when_empty = self._when_empty, []
        for callback in told:
            callback()

    def _end_waiting(self, queue: RequestQueue) -> None:
        with self._lock:
            ended, now = queue.clear(), self._now()
            for request in ended:
                self.state.settle(request, None, self._closed(), now)
        for request in ended:
            self._record(request, request.error, now)
            self.notify(request)

    def _closed(self) -> ClosedError:
        return ClosedError(f"net {self.name!r}: the executor was closed")

    def _stop_at_exit(self) -> Callable[[Deadline], object]:
        self.shut()
        self.abandon_queue()
        self.stop_running()
        wait = ThreadWait()
        self.when_empty(wait.notify)
        return lambda deadline: wait.wait(max(0.0, deadline.left()))

    def _in_child(self) -> None:
        """In a child made by `os.fork`: the workers are the parent's, and so is whoever holds the lock."""
        self.forked = self.state.shut = True
        self._lock = threads().lock()
        self.state.forget_requests()
        self._when_empty.clear()
