"""The dispatcher: admits requests, gives each a replica, has its run done by the pool, and ends it.

A request is in one place at a time: awaiting admission (the queue is full and its caller waits), in the queue
(admitted, no replica is free), on a replica, or over. Whoever frees a replica gives it to the next request of the
queue, which makes room for the next one that awaits admission. Idle replicas are used in turn, the one least recently
used first.

The dispatcher's lock guards those places, the counts and what changes in a request. It is never held while anything is
fed, prepared, run, fetched or told, and no other lock is taken under it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from threading import get_ident
from typing import Literal

from dagexec.binding.io_binding import IOBinding, Outputs
from dagexec.binding.replicas import Replica, Replicas
from dagexec.core.device import Device
from dagexec.core.runtime import at_work, runtime_of
from dagexec.errors import ClosedError, DagexecError, QueueFullError, SettingError, WorkerLostError
from dagexec.platform.deadline import Deadline
from dagexec.platform.forking import reset_after_fork
from dagexec.platform.shutdown import hold_daemon, stop_at_exit
from dagexec.platform.threads import ThreadsEndedError, ThreadWait, threads
from dagexec.scheduler.run.pool import WorkerPool
from dagexec.scheduler.run.run import Run, task
from dagexec.serving.requests import InlineRun, Request, RequestQueue, outcome_name
from dagexec.serving.statistics import OUTCOMES, ExecutorStatistics, Latencies, Tally
from dagexec.serving.telemetry import Telemetry

WhenFull = Literal["wait", "reject"]


@dataclass(frozen=True)
class Admission:
    """How many requests may wait in the queue (None: any number), and what happens to one more."""

    max_queued: int | None = None
    when_full: WhenFull = "wait"

    def __post_init__(self) -> None:
        most = self.max_queued
        if most is not None and (not isinstance(most, Integral) or most < 0):
            raise SettingError(f"max_queued must be 0 or more, or None, not {most!r:.80}")
        if self.when_full not in ("wait", "reject"):
            raise SettingError(f'when_full must be "wait" or "reject", not {self.when_full!r}')


class Dispatcher:
    """Serves requests with the replicas of one executor, whose workers are those of `pool`."""

    def __init__(
        self,
        name: str,
        replicas: Replicas,
        pool: WorkerPool,
        device: Device,
        admission: Admission,
        telemetry: Telemetry | None,
    ) -> None:
        """`name` is the model's, for messages."""
        self.name = name
        self._pool = pool
        self._device = device
        self._admission = admission
        self._telemetry = telemetry
        self._now = threads().monotonic
        self._forked = False
        self._lock = threads().lock()
        self._members = replicas.members
        self._idle = deque(replicas.members)
        self._queue, self._awaiting_admission = RequestQueue(), RequestQueue()
        self._pinned = RequestQueue()  # those that wait for a certain replica
        self._running: set[Request] = set()
        self._inline_runs = [InlineRun(replica) for replica in replicas.members]
        self._here: dict[int, InlineRun] = {}  # by the thread whose run it is
        self._shut = False
        self._tally = Tally()
        self._begun = [0] * len(replicas.members)
        self._when_empty: list[Callable[[], object]] = []
        reset_after_fork(self, Dispatcher._in_child)
        if threads().concurrent:
            stop_at_exit(self, Dispatcher._stop_at_exit)

    def submit(self, request: Request, *, start_here: bool) -> None:
        """Take a request on; with `start_here` the caller's thread feeds the replica, if one is free.

        Raises ClosedError when no more are admitted, QueueFullError, and what `check_caller` raises.
        """
        self.check_caller("run")
        request.created = self._now()
        if self._telemetry is not None and request.pinned is None:
            self._telemetry.start(request)
        try:
            with self._lock:
                replica = self._place(request)
            if replica is not None:
                if start_here:
                    self._serve(replica, request)
                else:
                    self._serve_on_pool(replica, request)
        except (ClosedError, QueueFullError) as error:
            if self._telemetry is not None and request.pinned is None:
                outcome = "rejected" if isinstance(error, QueueFullError) else "cancelled"
                self._telemetry.end(request, outcome, error, 0.0)
            raise
        except BaseException as error:  # KeyboardInterrupt
            self._unassign(request, error)
            raise

    def first_idle(self) -> IOBinding | None:
        """How arrays get into the replica whose turn it is; None when none is idle, or that one was never fed.

        None also for a thread that is in a run here, as an operator's is, or whose last one is still to be passed on.
        """
        if get_ident() in self._here:
            return None
        try:
            return self._idle[0].io_binding
        except IndexError:
            return None

    def begin_inline(self, io_binding: IOBinding) -> InlineRun | None:
        """Take an idle replica for a run in this thread; None when there is none that is fed as `io_binding` does.

        To be called where `first_idle` has given something. Raises what `check_caller` raises. Call `end_inline`
        afterwards, also when this is interrupted.
        """
        caller = get_ident()
        if caller in self._pool.workers:
            self.check_caller("run")
        now = self._now()
        with self._lock:  # nothing is called that changes something: Ctrl-C comes between calls
            idle = self._idle
            if self._shut or not idle:
                return None
            replica = idle[0]
            known = replica.io_binding
            if known is not io_binding and (known is None or known.signature != io_binding.signature):
                return None
            here = self._inline_runs[replica.number]
            here.caller, here.begun, here.stopped = caller, now, None
            here.running = True
            self._here[caller] = here
            del idle[0]
            self._begun[replica.number] += 1
        return here

    def end_inline(self, outcome: str) -> None:
        """The run in this thread, if there is one, has ended so: count it, and pass its replica on.

        Called again after an interrupt, it does what is left to do.
        """
        caller, now = get_ident(), self._now()
        here = self._here.get(caller)
        if here is None:
            return
        if outcome != "completed" and here.running:
            here.replica.settle()
        with self._lock:
            if here.running:
                waiting = (
                    self._when_empty or self._queue.waiting or self._awaiting_admission.waiting or self._pinned.waiting
                )
                handing = self._handing(here) if waiting else None
                here.running = False
                here.handing = handing
                here.steps = []
                self._tally.outcomes[outcome] += 1
                if handing is None:
                    del self._here[caller]
                    self._idle += (here.replica,)
                if outcome == "completed":
                    self._tally.times.append((0.0, now - here.begun))
            else:
                handing = here.handing
        if handing is not None:
            self._pool.submit(handing)

    def _handing(self, here: InlineRun) -> Run:
        return task(f"handing on a replica of {self.name}", lambda: self._hand_on(here))

    def _hand_on(self, here: InlineRun) -> None:
        """On a worker: the replica of a run that has ended in its caller's thread serves the next request."""
        with self._lock:
            if here.running or self._here.get(here.caller) is not here:
                return
            following = self._next(here.replica)
            del self._here[here.caller]
        if self._when_empty:
            self._announce_empty()
        if following is not None:
            self._serve(here.replica, following)

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
            if request.queue is not None:
                request.queue.remove(request)
                self._admit()
                self._settle(request, None, error)
        if waiting:
            self._tell(request)
        elif run is not None:
            self._pool.stop(run, error)
        return True

    def check_caller(self, doing: str) -> None:
        """Raise where `run` or `close` would wait for ever: DagexecError on a worker, ClosedError in a forked child."""
        hold_daemon()
        if self._forked:
            raise ClosedError(
                f"net {self.name!r}: the process was forked, and the workers stayed in the parent; "
                "call reopen() in the child, or compile the model again there"
            )
        here = self._here.get(get_ident())
        on_device = at_work.stream is not None and any(one.net.would_wait_for_its_device() for one in self._members)
        if on_device or self._pool.is_worker() or (here is not None and here.running):
            raise DagexecError(
                f"net {self.name!r}: an operator cannot {doing} the executor that runs it; it would wait for itself"
            )

    @property
    def forked(self) -> bool:
        """True in a child process of the one that made the dispatcher, where it serves nothing."""
        return self._forked

    def shut(self) -> None:
        """Admit no more; requests that await admission end with ClosedError. Idempotent."""
        with self._lock:
            self._shut = True
        self._end_waiting(self._awaiting_admission)

    def abandon_queue(self) -> None:
        """End the requests that wait, in the queue or for a certain replica, with ClosedError; after `shut`."""
        self._end_waiting(self._queue)
        self._end_waiting(self._pinned)

    def stop_running(self) -> None:
        """Have the runs under way stop at the next chain boundary, and end with ClosedError."""
        with self._lock:
            running = list(self._running)
            for here in self._here.values():
                here.stopped = self._closed()
                here.steps.clear()
        for request in running:
            self.cancel(request, self._closed())

    def _stop_at_exit(self) -> Callable[[Deadline], object]:
        self.shut()
        self.abandon_queue()
        self.stop_running()
        wait = ThreadWait()
        self.when_empty(wait.notify)
        return lambda deadline: wait.wait(max(0.0, deadline.left()))

    def when_empty(self, callback: Callable[[], object]) -> None:
        """Call `callback` once no request is left, at once if none is."""
        with self._lock:
            self._when_empty.append(callback)
        self._announce_empty()

    def statistics(self) -> ExecutorStatistics:
        """Counts at this moment."""
        pool = self._pool.statistics()
        streams = None if self._device.kind == "cpu" else runtime_of(self._device).statistics()
        with self._lock:
            times = list(self._tally.times)
            outcomes = self._tally.outcomes
            running = len(self._running) + len(self._here)
            queued, awaiting_admission = len(self._queue), len(self._awaiting_admission)
            counts = {name: outcomes[name] for name in OUTCOMES}
            begun = tuple(self._begun)
        total = Latencies.of(wait + run for wait, run in times)
        return ExecutorStatistics(
            replicas=len(self._members),
            running=running,
            queued=queued,
            awaiting_admission=awaiting_admission,
            **counts,
            median_latency=total.median,
            p99_latency=total.p99,
            queue_wait=Latencies.of(wait for wait, _ in times),
            run_time=Latencies.of(run for _, run in times),
            runs_per_replica=begun,
            busy_workers=pool.busy,
            pool=pool,
            streams=streams,
        )

    def _place(self, request: Request) -> Replica | None:
        """Put a new request where it belongs; its replica if it has one at once. Call with the lock held."""
        if self._shut:
            raise ClosedError(f"net {self.name!r}: the executor is closed")
        if request.pinned is not None:
            if request.pinned not in self._idle:
                self._pinned.push(request)
                return None
            self._assign(request.pinned, request)
            self._idle.remove(request.pinned)
            return request.pinned
        if self._idle:
            self._assign(self._idle[0], request)
            return self._idle.popleft()
        limit = self._admission.max_queued
        if limit is None or len(self._queue) < limit:
            self._queue.push(request)
        elif self._admission.when_full == "reject":
            self._tally.count("rejected")
            running = len(self._running) + len(self._here)
            raise QueueFullError(
                f"net {self.name!r}: the queue is full: {running} run(s) in flight on "
                f"{len(self._members)} replica(s), {len(self._queue)} queued, limit {limit}",
                limit=limit,
                queued=len(self._queue),
                running=running,
            )
        else:
            self._awaiting_admission.push(request)
        return None

    def _assign(self, replica: Replica, request: Request) -> None:
        """Call with the lock held."""
        request.replica = replica
        request.begun = self._now()
        self._running.add(request)
        self._begun[replica.number] += 1

    def _unassign(self, request: Request, error: BaseException) -> None:
        """The thread that submits `request` was interrupted, perhaps before it could do anything with its replica."""
        with self._lock:
            replica = request.replica
            if replica is None or request.fed or request.run is not None:
                return
            if replica in self._idle:
                self._idle.remove(replica)
        self._end(replica, request, None, error)
        self._pass_on(replica, request)

    def _admit(self) -> None:
        """There is room in the queue: admit the next one. Call with the lock held."""
        if self._awaiting_admission and len(self._queue) < (self._admission.max_queued or 0):
            request = self._awaiting_admission.pop()
            assert request is not None
            self._queue.push(request)

    def _next(self, replica: Replica) -> Request | None:
        """The request that `replica`, which is free, serves next; else it is idle. Call with the lock held."""
        request = next((pinned for pinned in self._pinned if pinned.pinned is replica), None)
        if request is not None:
            self._pinned.remove(request)
        else:
            request = self._queue.pop() or self._awaiting_admission.pop()
            self._admit()
        if request is None:
            self._idle.append(replica)
        else:
            self._assign(replica, request)
        return request

    def _serve_on_pool(self, replica: Replica, request: Request) -> None:
        feeding = task(f"feeding {self.name}", lambda: self._serve(replica, request), request.priority)
        feeding.finished = lambda: self._fed(replica, request, feeding.error)
        with self._lock:
            cancelled = request.cancelled
            if cancelled is None:
                request.run = feeding  # from here on, whoever cancels the request stops this
        if cancelled is None:
            self._pool.submit(feeding)
        else:
            self._fed(replica, request, cancelled)

    def _fed(self, replica: Replica, request: Request, error: BaseException | None) -> None:
        """The task that feeds is over. With an `error` and nothing fed, it was cancelled before its turn came."""
        if error is not None and not request.fed:
            self._end(replica, request, None, error)
            self._pass_on(replica, request)

    def _pass_on(self, replica: Replica, ended: Request) -> None:
        """Serve the request after `ended`, if any, on a worker: no caller's thread feeds and prepares for another."""
        if ended.following is not None:
            if self._pool.is_worker():
                self._serve(replica, ended.following)
            else:
                self._serve_on_pool(replica, ended.following)
            ended.following = None

    def _serve(self, replica: Replica, request: Request) -> None:
        """Start the run of `request`; when it cannot be started, end it and have the one after it served.

        Raises what interrupts the calling thread when the run is on the pool already; the caller stops it then.
        """
        while not request.fed:
            request.fed = True
            request.run = None
            result: Outputs | None = None
            error: BaseException | None = None
            try:
                if self._start(replica, request):
                    return
                result = {}
            except ThreadsEndedError:
                raise
            except BaseException as caught:
                error = self._reported(caught)
                if request.run is not None:  # the pool may have it
                    if not isinstance(error, Exception):
                        raise
                    self._pool.stop(request.run, error)
                    return
            following = self._end(replica, request, result, error)
            if following is None or not self._pool.is_worker():
                self._pass_on(replica, request)
                return
            request.following = None
            request = following

    def _start(self, replica: Replica, request: Request) -> bool:
        """Feed the replica and hand its run to the pool; False when there is nothing to run.

        From the moment `request.run` is the run, the way to end the request is to stop that.
        """
        replica.feed(request.feeds, request.names, request.out)
        if not request.run_net:
            replica.net.prepared()
            return False
        run = replica.net.new_run(lambda: self._over(replica, request, run), request.trace)
        run.priority = request.priority
        with self._lock:
            request.run = run
            cancelled = request.cancelled
        if cancelled is not None:
            raise cancelled
        self._pool.submit(run)
        return True

    def _over(self, replica: Replica, request: Request, run: Run) -> None:
        """The end of a run, on the thread that left it last: fetch, then serve the next request with the replica.

        The pool calls it again if that thread died in it.
        """
        if not request.over:
            result: Outputs | None = None
            error: BaseException | None = None
            try:
                run.check_complete()
                run.raise_error()
                result = replica.fetch(request.names, request.out)
            except ThreadsEndedError:
                raise
            except BaseException as caught:
                error = self._reported(caught)
            self._end(replica, request, result, error)
        else:
            self._tell(request)
        self._pass_on(replica, request)

    def _reported(self, error: BaseException) -> BaseException:
        """What the caller of a request gets to see of an `error`: nothing that would end the caller's own thread."""
        if isinstance(error, Exception) or not self._pool.is_worker():
            return error
        lost = WorkerLostError(f"net {self.name!r}: a worker was ended: {type(error).__name__}: {error}")
        lost.__cause__ = error
        return lost

    def _end(
        self, replica: Replica, request: Request, result: Outputs | None, error: BaseException | None
    ) -> Request | None:
        """Settle a request that had a replica; the request that has it now."""
        replica.settle()
        with self._lock:
            self._running.discard(request)
            request.replica = request.run = None
            following = request.following = self._next(replica)
            self._settle(request, result, error)
        self._tell(request)
        return following

    def _settle(self, request: Request, result: Outputs | None, error: BaseException | None) -> None:
        """Call with the lock held, and `_tell` afterwards."""
        request.result, request.error, request.over = result, error, True
        request.feeds, request.out = {}, None
        if request.pinned is not None:
            return
        if error is None:
            assert request.begun is not None
            self._tally.completed(request.begun - request.created, self._now() - request.begun)
        else:
            self._tally.count(outcome_name(error))

    def _tell(self, request: Request) -> None:
        """Let the caller of a settled request go on, and whoever waits for the last one."""
        if self._telemetry is not None and request.pinned is None:
            waited = (request.begun if request.begun is not None else self._now()) - request.created
            self._telemetry.end(request, outcome_name(request.error), request.error, waited)
        request.notify()
        if self._when_empty:
            self._announce_empty()

    def _announce_empty(self) -> None:
        with self._lock:
            if self._running or self._here:  # nobody waits while a replica is idle, so this is all there is
                return
            told, self._when_empty = self._when_empty, []
        for callback in told:
            callback()

    def _end_waiting(self, queue: RequestQueue) -> None:
        with self._lock:
            ended = queue.clear()
            for request in ended:
                self._settle(request, None, self._closed())
        for request in ended:
            self._tell(request)

    def _closed(self) -> ClosedError:
        return ClosedError(f"net {self.name!r}: the executor was closed")

    def _in_child(self) -> None:
        """In a child made by `os.fork`: the workers are the parent's, and so is whoever holds the lock."""
        self._forked = self._shut = True
        self._lock = threads().lock()
        self._queue, self._awaiting_admission, self._pinned = RequestQueue(), RequestQueue(), RequestQueue()
        self._running.clear()
        self._here.clear()
        self._when_empty.clear()
