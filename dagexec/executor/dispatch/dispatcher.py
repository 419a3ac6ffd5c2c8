"""The dispatcher: takes requests on, gives each a replica when it is its turn, and ends it.

`state` decides; this module adds the lock around that, the clock, spans and the notification of callers.
`pooled` (on workers) and `inline` (in the caller's thread) run requests: they report the end of each, and learn which
request has the replica next.

The dispatcher's lock guards its state and the changes of a request. It is never held while a request is fed, prepared,
run or fetched, or a caller notified. Only the lock of an arena budget is taken under it, when idle replicas return
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import current_thread, get_ident
from typing import TYPE_CHECKING

from dagexec.binding.io_binding import IOBinding, Outputs
from dagexec.binding.replicas import Replica
from dagexec.core.runtime import RuntimeStatistics
from dagexec.core.stream import at_work
from dagexec.errors import ClosedError, DagexecError, FeedError, QueueFullError, RunTimeoutError
from dagexec.executor.dispatch.ledger import members_of
from dagexec.executor.dispatch.state import Cancelled, DispatchState
from dagexec.executor.dispatch.statistics import OUTCOMES, ExecutorStatistics, Latencies
from dagexec.executor.requests.request import Batch, Request, outcome_name
from dagexec.executor.requests.timeline import current_timeline
from dagexec.executor.requests.waiting import EventLoop
from dagexec.options import CompileOptions
from dagexec.platform.deadline import Deadline
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.shutdown import hold_daemon, stop_at_exit
from dagexec.platform.threads import ThreadWait, is_interruptible, threads
from dagexec.scheduler.memory.arena_budget import ArenaAccount, ArenaBudget
from dagexec.scheduler.observe.lanes import Lanes
from dagexec.scheduler.observe.run_times import RunTimes
from dagexec.scheduler.run.fair_share import Share
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run

if TYPE_CHECKING:
    from dagexec.executor.telemetry.metrics import Metrics
    from dagexec.executor.telemetry.spans import Telemetry


class Dispatcher:
    """Decides which request is served when, by the replicas of one executor."""

    def __init__(
        self,
        name: str,
        replicas: Iterable[Replica],
        pool: WorkerPool,
        options: CompileOptions,
        telemetry: Telemetry | None,
        metrics: Metrics | None = None,
        share: Share | None = None,
        run_times: RunTimes | None = None,
    ) -> None:
        """`name` is the model's, for messages; the workers of `pool` serve, and charge `share` if others use them."""
        self.name = name
        self.share = share
        self.state = DispatchState(name, tuple(replicas), options)
        self.forked = False
        self._pool = pool
        self._arenas: ArenaBudget | None = None
        self._telemetry = telemetry
        self._metrics = metrics
        self.run_times = run_times
        self._watched: tuple[Lanes, str] | None = None
        if metrics is not None:
            metrics.observe(self)
        self._now = threads().monotonic
        self._lock = threads().lock()
        self._when_empty: list[Callable[[], object]] = []
        self.call_loop: Callable[[EventLoop], object] | None = None  # calls the loop, for whose turns requests wait
        reset_after_fork(self, Dispatcher._in_child)
        if threads().concurrent:
            stop_at_exit(self, Dispatcher._stop_at_exit)

    def admit(self, request: Request) -> Request | None:
        """Take a request on. Returns the request or batch that has a replica now; the caller has that served.

        Raises ClosedError when no more are admitted, QueueFullError, RunTimeoutError for one that is late, and what
        `check_caller` raises.
        """
        self.check_caller("run")
        now = request.created = self._now()
        if self._telemetry is not None and request.pinned is None:
            self._telemetry.start(request)
        if self.run_times is not None:
            request.timeline = current_timeline.get()
        try:
            with self._lock:
                return self.state.arrive(request, now, starts=not is_interruptible())
        except (ClosedError, QueueFullError, RunTimeoutError) as error:
            self._end_span(request, error, 0.0)
            if self._metrics is not None and not isinstance(error, ClosedError):
                self._metrics.record(error, 0.0, 0.0)
            raise

    def refuse(self, error: FeedError) -> None:
        """A call with wrong feeds. It is counted and gets a span, like a request that is over."""
        request = Request({})
        if self._telemetry is not None:
            self._telemetry.start(request)
        with self._lock:
            self.state.outcomes[outcome_name(error)] += 1
        self._end_span(request, error, 0.0)
        self._record(request, error, request.begun)

    def admit_inline(self, request: Request, binding: IOBinding) -> bool:
        """Give `request` an idle replica that is bound like `binding`; False when there is none.

        False also for a thread that is in a run here, as an operator's, or whose last replica is not
        handed on. Call `end_inline` afterwards, also when this is interrupted. Raises what `check_caller` raises.
        """
        caller, now = get_ident(), self._now()
        if caller in self._pool.workers:
            self.check_caller("run")
        if self.run_times is not None:
            request.timeline = current_timeline.get()
        with self._lock:
            return self.state.arrive_inline(request, binding, caller, now)

    def started(self, request: Request, run: Run) -> DagexecError | None:
        """From here on, cancelling `request` stops `run`. Returns why it was cancelled before, if it was."""
        if self._telemetry is not None and isinstance(request, Batch):
            self._telemetry.start_batch(request)
        with self._lock:
            request.run = run
            return request.cancelled

    def end(self, request: Request, result: Outputs | None, error: BaseException | None) -> None:
        """Settle a request that had a replica, and notify its caller; `following` has the replica now.

        A request that was abandoned while its replica was prepared is over already.
        """
        replica = request.replica
        assert replica is not None
        replica.unbind()
        if self._metrics is not None and self.state.joins and request.pinned is None:
            self._metrics.record_batch(request.rows)
        with self._lock:
            now = self._now()
            is_whole = request.blocks is None and not isinstance(request, Batch)
            if error is None and replica.io_binding is not None and is_whole:
                replica.io_binding.took(now - request.begun)
            ended = self.state.end(request, result, error, now)
        if self.run_times is not None and error is None and request.pinned is None:
            self._add_times(request, ended, now)
        if self._telemetry is not None and isinstance(request, Batch):
            self._telemetry.end_batch(request, outcome_name(error), error)
        for member in ended:
            self._record(member, member.error, now)
            if member.timeline is not None:
                _add_to_timeline(member, request, now)
        if ended:
            self.notify(request)
        elif self._when_empty:
            self._announce_empty()
        if self.call_loop is not None:
            self.have_turns()

    def take(self, request: Request) -> None:
        """The results of `request` are being fetched: members of a batch leave it only when that is over."""
        if isinstance(request, Batch):
            with self._lock:
                self.state.take(request)

    def start_waiting(self) -> list[Request]:
        """The requests that need not wait any more and have a replica now: the caller has them served."""
        started: list[Request] = []
        with self._lock:
            now = self._now()
            while (request := self.state.start(now)) is not None:
                started.append(request)
        return started

    def may_start(self) -> bool:
        """`start_waiting` may return requests."""
        with self._lock:
            return self.state.may_start(self._now())

    def have_turns(self) -> bool:
        """A request came, or a replica is free: call the event loop that the requests in the queue wait for.

        False when they wait although a replica is idle, but not all for the same event loop.
        """
        if self.call_loop is None or not (self.state.idle and self.state.queue.waiting):
            return True
        with self._lock:
            loop = self.state.queue.only_loop()
        if loop is not None:
            self.call_loop(loop)
        return loop is not None

    def take_turn(self) -> Request | None:
        """On the thread of an event loop: the request that has a replica now, if one waits and a replica is idle."""
        with self._lock:
            return self.state.take_turn(self._now())

    def give_up_turns(self) -> list[Request]:
        """Requests wait for event loops no more. Returns those that have a replica now: the caller has them served."""
        with self._lock:
            self.state.queue.forget_loops()
        return self.start_waiting()

    def new_due(self) -> float | None:
        """When to call `start_waiting`; None when a timer is set already, or no request waits for others."""
        state = self.state
        if state.timer_due is not None or not (state.idle and state.queue.waiting):
            return None
        with self._lock:
            return state.new_due()

    def rings(self, due: float) -> bool:
        """The time `due` that `new_due` returned has come. False when another one has taken its place."""
        with self._lock:
            return self.state.rings(due)

    def hurry(self) -> None:
        """Requests do not wait for others from here on."""
        with self._lock:
            self.state.hurry()

    def end_inline(self, request: Request, error: BaseException | None = None) -> bool:
        """The inline run of `request`, if it has one, is over. True when its replica is to be handed on: `hand_on`.

        False also when its thread keeps it; then call `take_back` in a moment. Called again after an interrupt, it does
        the rest.
        """
        if request.replica is None:
            return False
        if error is not None and not request.over:
            request.replica.unbind()
        outcome, now = "completed" if error is None else outcome_name(error), self._now()
        if self._metrics is not None and not request.over:
            self._metrics.record(error, request.begun - request.created, now - request.begun)
            if self.state.joins:
                self._metrics.record_batch(request.rows)
        if self.run_times is not None and not request.over:
            if error is None:
                self._add_times(request, (request,), now)
            if request.timeline is not None:
                _add_to_timeline(request, request, now)
        if self._watched is not None and not request.over:
            self.ran_here(request, now)
        with self._lock:
            may_keep = bool(self.state.queue.waiting) and not is_interruptible()
            return not self.state.leave_inline(request, outcome, now, bool(self._when_empty), may_keep)

    def take_back(self, now: float | None = None) -> list[Request]:
        """Take replicas back from threads that did not call in time, by the clock or at `now`. Returns who has them."""
        with self._lock:
            return self.state.take_back(self._now() if now is None else now)

    def hand_on(self, request: Request) -> None:
        """The replica of an inline run that is over goes to the next request, `following`.

        Call it on a thread that is never interrupted.
        """
        with self._lock:
            if request.replica is None:
                return
            request.following = self.state.release(request, self._now())
        if self._when_empty:
            self._announce_empty()
        self.have_turns()

    def add(self, replica: Replica) -> tuple[bool, Request | None]:
        """Add a replica: whether it was accepted, and the request that has it now."""
        self._charge_arenas_of(replica)
        with self._lock:
            if self.state.shut:
                return False, None
            return True, self.state.add(replica, self._now())

    def cancel(self, request: Request, error: DagexecError) -> bool:
        """End `request` with `error` as soon as no worker works for it; at once while its replica is prepared.

        False when there is no end to wait for: it was never taken on, or is over already.
        """
        with self._lock:
            now = self._now()
            cancelled = self.state.cancel(request, error, now)
        if cancelled is None:
            return False
        self._see_to(cancelled, now)
        return True

    def _see_to(self, cancelled: Cancelled, now: float) -> None:
        self._tell(cancelled.over, now)
        for run, error in cancelled.stop:
            self._pool.stop(run, error)

    def _tell(self, over: Iterable[Request], now: float) -> None:
        """Tell the callers of requests that ended without a run, or before it."""
        for request in over:
            self._record(request, request.error, now)
            if request.timeline is not None:
                _add_to_timeline(request, request, now)
            self.notify(request)

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
        on_device = at_work.stream is not None and any(replica.net.would_wait_for_its_device() for replica in members)
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
            now = self._now()
            over = self.state.shut_down(now)
        self._tell(over, now)

    def abandon_queue(self) -> None:
        """End all requests that wait, in the queue or for a certain replica, with ClosedError; after `shut`."""
        with self._lock:
            now = self._now()
            over = self.state.abandon_queue(now)
        self._tell(over, now)

    def stop_running(self) -> None:
        """Have the runs under way stop before their next operator or piece, and end with ClosedError."""
        with self._lock:
            now = self._now()
            cancelled = self.state.stop_running(now)
        self._see_to(cancelled, now)

    def unfinished(self) -> int:
        """How many requests are not over."""
        with self._lock:
            return self.state.unfinished

    def charge_arenas_to(self, budget: ArenaBudget | None) -> None:
        """Charge the memory that runs work in to `budget`. Before the first request."""
        self._arenas = budget
        for replica in self.state.replicas:
            self._charge_arenas_of(replica)

    def _charge_arenas_of(self, replica: Replica) -> None:
        if self._arenas is not None:
            replica.net.arena_memory.account = ArenaAccount(self._arenas, self)

    @property
    def last_begun(self) -> float:
        """When the latest run began."""
        return self.state.last_begun

    def give_back_arenas(self) -> int:
        """Give back the arenas of idle replicas, which no request gets meanwhile. Returns the bytes."""
        with self._lock:
            if self.forked:
                return 0
            return sum(replica.give_back_arena() for replica in self.state.unused())

    def when_empty(self, callback: Callable[[], object]) -> None:
        """Call `callback` as soon as there are no requests."""
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
            running = sum(not member.over for request in state.running.values() for member in members_of(request))
            places = running, len(state.queue) + len(state.again), len(state.awaiting_admission)
            begun = tuple(state.begun)
            batch_sizes, retried = dict(sorted(state.batch_sizes.items())), state.retried
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
            batch_sizes=batch_sizes,
            retried=retried,
        )

    def notify(self, request: Request) -> None:
        """Wake the callers of a settled request or batch, and whoever waits for the last request."""
        for ended in request.ended if isinstance(request, Batch) else (request,):
            if self._telemetry is not None:
                self._end_span(ended, ended.error, ended.begun - ended.created)
            ended.notify()
        if self._when_empty:
            self._announce_empty()

    def arena_bytes(self) -> int:
        """The bytes that the tensors of the replicas share."""
        return sum(replica.net.preparation_statistics().arena_bytes for replica in self.state.replicas)

    def _record(self, request: Request, error: BaseException | None, now: float) -> None:
        if self._metrics is not None and request.pinned is None:
            self._metrics.record(error, request.begun - request.created, now - request.begun)

    def note_fed(self, request: Request) -> None:
        """Its replica is fed."""
        if self.run_times is not None:
            request.fed_at = self._now()

    def note_ran(self, request: Request) -> None:
        """The steps of its last run are over."""
        if self.run_times is not None:
            request.ran_at = self._now()

    def _add_times(self, run: Request, ended: Iterable[Request], now: float) -> None:
        """A run is over, and the requests that it was of."""
        completed = [(one.rows, one.begun - one.created) for one in ended if one.error is None]
        if completed:
            assert self.run_times is not None
            fed, ran = run.fed_at - run.begun, run.ran_at - run.fed_at
            self.run_times.record(run.rows, completed, fed, ran, now - run.ran_at)

    def watch(self, lanes: Lanes, label: str) -> None:
        """Tell `lanes` what threads do here, as `label`, until nobody looks at them any more."""
        self._pool.watch(lanes, self.share, label)
        self._watched = lanes, label

    def ran_here(self, request: Request, now: float) -> None:
        """The calling thread, which is no worker, has run `request`: whoever looks at its lane is told."""
        watched = self._watched
        if watched is None:
            return
        lanes, label = watched
        if lanes.is_watched:
            lanes.add(current_thread().name, request.begun, now, label, self.name)
        else:
            self._watched = None

    def _end_span(self, request: Request, error: BaseException | None, waited: float) -> None:
        if self._telemetry is not None and request.pinned is None:
            self._telemetry.end(request, outcome_name(error), error, waited)

    def _announce_empty(self) -> None:
        with self._lock:
            if not self.state.is_empty:
                return
            callbacks, self._when_empty = self._when_empty, []
        for callback in callbacks:
            callback()

    def _stop_at_exit(self) -> Callable[[Deadline], object]:
        self.shut()
        self.abandon_queue()
        self.stop_running()
        wait = ThreadWait()
        self.when_empty(wait.notify)
        return lambda deadline: wait.wait(max(0.0, deadline.left()))

    def _in_child(self) -> None:
        """In a child made by `os.fork`: workers and holders of the lock are threads of the parent."""
        self.forked = self.state.shut = True
        self._lock = threads().lock()
        self.state.forget_requests()
        self._when_empty.clear()


def _add_to_timeline(request: Request, run: Request, now: float) -> None:
    """`request` is over, and with it the run that it was served by, or joined in."""
    assert request.timeline is not None
    times = request.created, request.begun, run.fed_at or None, run.ran_at or None, now
    request.timeline.add((*times, run.rows, current_thread().name))
