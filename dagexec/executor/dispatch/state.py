"""The decisions of a `Dispatcher`: which request waits where, and which replica serves it.

A state machine without locks, calls or a clock: its methods are events, and they return what is to be done. A request
is in one place at a time: awaiting admission (the queue is full and its caller waits), in the queue (admitted, no
replica is free), on a replica, or over. A replica that becomes free goes to the next request of the queue, which makes
room for the next one to be admitted. Idle replicas are used in turn, the least recently used first.

Where requests are joined, a replica is given to a `Batch` of them. Then requests may wait in the queue for others
although a replica is idle, until `next_due`. When a batch fails, its members run again, each alone and before all
other requests.

Requests also wait there while a replica is idle if the same event loop may run all of them and runs are short: it runs
them in its turns (`take_turn`).

Replicas, requests of a kind and threads are interchangeable but for what they do, where they wait and their habits; the
order of arrival is part of the state. `tests/machines` visits every state of small worlds around it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dagexec.binding.io_binding import IOBinding, Outputs
from dagexec.binding.replicas import Replica
from dagexec.errors import ClosedError, DagexecError, QueueFullError
from dagexec.executor.batching.queue import BatchQueue
from dagexec.executor.dispatch.ledger import ALONE_AGAIN, Ledger, members_of
from dagexec.executor.requests.queue import RequestQueue
from dagexec.executor.requests.request import Batch, Request, timed_out
from dagexec.executor.requests.waiting import MAX_QUEUED
from dagexec.scheduler.run.run import Run

MAX_IN_TURN = 3e-4
"""A run of up to this many seconds, at best, waits for a turn of its event loop: handing it over takes longer."""


class Cancelled(NamedTuple):
    """What to do about cancelled requests.

    Attributes:
        over: requests whose callers are to be notified.
        stop: runs that are to be stopped, each with the reason.
    """

    over: Sequence[Request]
    stop: Sequence[tuple[Run, DagexecError]]


class DispatchState(Ledger):
    """The events of the requests and replicas of one executor.

    Ctrl-C may interrupt a thread in the middle of an event, between two calls; then a request either has its `replica`
    or has not.
    """

    def arrive(self, request: Request, now: float, *, starts: bool = True) -> Request | None:
        """A request came. Returns the request to be served now: itself, a batch that it completes, or None.

        Without `starts` it completes none: `start` is called separately. Raises ClosedError once it is `shut`,
        RunTimeoutError for a late request, and QueueFullError.
        """
        if self.shut:
            raise ClosedError(f"net {self._name!r}: the executor is closed")
        if now >= request.deadline:
            self.outcomes["timed_out"] += 1
            raise timed_out(self._name, request)
        if request.pinned is not None:
            if request.pinned not in self.idle:
                self.pinned.push(request)
                return None
            self.assign(request.pinned, request, now)
            self.idle.remove(request.pinned)
            return request
        if self.joins:
            self._has_company()
        if request.caller:
            self.kept.came(request.caller, now)
            replica = self.kept.by_thread.pop(request.caller, None)
            if replica is not None:
                self.assign(replica, request, now)
                return request
        limit = self._options.max_queued
        if self.idle and self._goes_first(request, now):
            self.assign(self.idle[0], request, now)
            del self.idle[0]
            return request
        if limit is None or len(self.queue) < limit:
            self.queue.push(request)
            return self.start(now) if starts else None
        if self._options.when_full == "wait":
            self.awaiting_admission.push(request)
        else:
            self.outcomes["rejected"] += 1
            running, queued = len(self.running), len(self.queue)
            raise QueueFullError(
                f"net {self._name!r}: the queue is full: {running} run(s) in flight on "
                f"{len(self.replicas)} replica(s), {queued} queued, limit {limit}",
                limit=limit,
                queued=queued,
                running=running,
            )
        return None

    def _goes_first(self, request: Request, now: float) -> bool:
        """A new `request` gets an idle replica: it waits neither for company, nor for a turn, nor behind others."""
        if self.again.waiting:
            return False
        if isinstance(self.queue, BatchQueue):
            waits_for_others = request.group is not None and self._options.max_queued != 0
            return not (waits_for_others or self.queue.is_ready(now, self._hurried()))
        return not (self.queue.waiting or (request.loop is not None and self.is_short(self.idle[0])))

    def start(self, now: float) -> Request | None:
        """The request that gets an idle replica now; None while there is none, or all requests wait for others."""
        if not self.idle:
            return None
        following = self._next(self.idle[0], now)
        if following is not None:
            self.assign(self.idle[0], following, now)
            del self.idle[0]
        return following

    def may_start(self, now: float) -> bool:
        """`start` may return a request."""
        waiting = self.again.waiting or self.awaiting_admission.waiting
        queue = self.queue
        return bool(self.idle and (waiting or (isinstance(queue, BatchQueue) and queue.is_ready(now, self._hurried()))))

    def take_turn(self, now: float) -> Request | None:
        """An event loop has a turn: a request that waited for it gets an idle replica. None while there is none."""
        if not self.idle:
            return None
        request = self.queue.pop()
        if request is not None:
            self.assign(self.idle[0], request, now)
            del self.idle[0]
        return request

    def is_short(self, replica: Replica) -> bool:
        """Whether runs of `replica` are for turns of an event loop."""
        binding = replica.io_binding
        if binding is None or binding.is_shared or binding.seconds_at_best > MAX_QUEUED:
            return False
        alike = (bound.io_binding for bound in self.replicas)  # later ones were only measured in a crowd
        return any(
            bound is not None and bound.shortest <= MAX_IN_TURN and bound.signature == binding.signature
            for bound in alike
        )

    def next_due(self) -> float | None:
        """When to call `start` again, at the latest; None when no replica is idle or no request waits for others."""
        return self.queue.next_due() if self.idle and isinstance(self.queue, BatchQueue) else None

    def new_due(self) -> float | None:
        """The time for a new timer; None when one is set, or no request waits for others."""
        if self.timer_due is not None:
            return None
        self.timer_due = self.next_due()
        return self.timer_due

    def rings(self, due: float) -> bool:
        """The timer set to `due` rings. False when another has taken its place."""
        if self.timer_due != due:
            return False
        self.timer_due = None
        return True

    def hurry(self) -> None:
        """Requests do not wait for others from here on."""
        self.hurries, self.timer_due = True, None

    def arrive_inline(self, request: Request, binding: IOBinding, caller: int, now: float) -> bool:
        """A request came that the thread `caller` would run. True when it has an idle replica that is bound like
        `binding`.

        False also for a thread that is in a run here, as an operator's, or whose last replica is not
        handed on.
        """
        keeper = caller in self.kept.by_thread
        if self.shut or caller in self.running:
            return False
        if (self.queue.waiting or self.again.waiting) and not keeper:
            return False
        if self.joins and self._has_company():
            return False
        if not (keeper or self.idle):
            return False
        replica = self.kept.by_thread[caller] if keeper else self.idle[0]
        known = replica.io_binding
        if known is not binding and (known is None or known.signature != binding.signature):
            return False
        request.caller = caller  # no calls from here on
        request.replica = replica
        request.created = request.begun = self.last_begun = now
        self.running[caller] = request
        self.begun[replica.number] += 1
        if self.joins:
            self.batch_sizes[request.rows] += 1
        if keeper:
            del self.kept.by_thread[caller]
            self.kept.came(caller, now)
        else:
            del self.idle[0]
        return True

    def leave_inline(
        self, request: Request, outcome: str, now: float, waited_for: bool, may_keep: bool = False
    ) -> bool:
        """The inline run of `request` is over. True when its replica is idle now, or kept by its thread if it may.

        May be called again after an interrupt.
        """
        if not request.over:
            request.over = True
            request.steps = request.run = None
            self.outcomes[outcome] += 1
            if outcome == "completed":
                self.times.append((request.begun - request.created, now - request.begun))
        waiting = self.queue.waiting or self.awaiting_admission.waiting or self.pinned.waiting or self.again.waiting
        if waited_for or waiting:
            if may_keep and not waited_for and request.replica is not None and self._keeps(request, now):
                del self.running[request.caller]
                request.replica = None
            return request.replica is None
        if request.replica is not None:
            del self.running[request.caller]
            self.idle += (request.replica,)
            request.replica = None
        return True

    def _keeps(self, request: Request, now: float) -> bool:
        """The thread whose inline run is over keeps its replica, although others, no more urgent, wait."""
        replica, first = request.replica, self.queue.head()
        if replica is None or first is None or first.call.priority > request.call.priority:
            return False
        nobody_else = not (self.pinned.waiting or self.shut or self.joins)
        return nobody_else and self.kept.leave(request.caller, replica, request.begun, now)

    def take_back(self, now: float) -> list[Request]:
        """Threads that keep replicas have had time to call. Returns the requests that get the others' replicas."""
        following = [self._give(replica, now) for replica in self.kept.take_back(now)]
        return [request for request in following if request is not None]

    def assign(self, replica: Replica, request: Request, now: float) -> None:
        """`replica` serves `request` from `now` on; the caller removes it from the idle ones. Makes no calls."""
        request.replica = replica
        request.begun = self.last_begun = now
        self.running[request.caller or request] = request
        self.begun[replica.number] += 1
        if self.joins and request.pinned is None:
            self.batch_sizes[request.rows] += 1
            for member in members_of(request):
                member.begun = now

    def withdraw(self, request: Request) -> None:
        """A waiting request will not be served; if it was in the queue, there is room for the next one."""
        assert request.queue is not None
        request.queue.remove(request)
        self._admit()

    def cancel(self, request: Request, error: DagexecError, now: float) -> Cancelled | None:
        """End `request` with `error` as soon as no worker runs it; at once while its replica is prepared.

        None when there is no end to wait for: it was never taken on, or is over already.
        """
        waits, batch = request.queue is not None, request.batch
        if not waits and batch is None and request.replica is None:
            return None
        if request.cancelled is None:
            request.cancelled = error
        is_over, run = waits, request.run
        if batch is not None:
            is_over = self._leave_batch(request, error, now)
            run = batch.run if is_over and not batch.left else None
        if request.is_preparing and not request.over:
            is_over = True
            self.settle(request, None, error, now)
        if request.steps is not None:
            request.steps.clear()
        if waits:
            self.timer_due = None  # its caller may have been interrupted before it set that timer
            self.withdraw(request)
            self.settle(request, None, error, now)
        return Cancelled((request,) if is_over else (), () if run is None else ((run, error),))

    @staticmethod
    def take(request: Request) -> None:
        """The results of `request` are being fetched: members of a batch leave it only when that is over."""
        for member in members_of(request):
            member.taken = True

    def end(
        self, request: Request, result: Outputs | None, error: BaseException | None, now: float
    ) -> tuple[Request, ...]:
        """The run of `request` is over. Returns those whose callers are to be notified; `following` has the replica
        next.

        The members of a failed batch run again. A request that was abandoned while its replica was prepared was over
        before.
        """
        if isinstance(request, Batch):
            if error is not None:
                self._run_again(request)
            request.following = self.release(request, now)
            request.ended = request.requests
            for member in request.ended:
                self.settle(member, member.result, member.error or member.cancelled, now)
            request.over = True
            return request.ended
        request.following = self.release(request, now)
        if request.over:
            return ()
        self.settle(request, result, error, now)
        return (request,)

    def shut_down(self, now: float) -> list[Request]:
        """Take no more requests. Those that await admission are over: their callers are to be notified."""
        self.shut = True
        return self._end_waiting(now, self.awaiting_admission)

    def abandon_queue(self, now: float) -> list[Request]:
        """All waiting requests are over, in the queue or for a certain replica; after `shut_down`."""
        return self._end_waiting(now, self.queue, self.pinned)

    def stop_running(self, now: float) -> Cancelled:
        """The runs under way are to end, and no request runs again."""
        ended = self._end_waiting(now, self.again)
        stopped: list[tuple[Run, DagexecError]] = []
        for served in list(self.running.values()):
            error = self.closed()
            for request in members_of(served):
                cancelled = self.cancel(request, error, now)
                if cancelled is not None:
                    ended += cancelled.over
                    stopped += cancelled.stop
        return Cancelled(ended, stopped)

    def _end_waiting(self, now: float, *queues: RequestQueue) -> list[Request]:
        ended = [request for queue in queues for request in queue.clear()]
        for request in ended:
            self.settle(request, None, self.closed(), now)
        return ended

    def release(self, request: Request, now: float) -> Request | None:
        """The replica of `request` is free: the request that has it next. None when it is idle."""
        replica = request.replica
        assert replica is not None
        if replica in self.idle:  # the thread that took it was interrupted
            self.idle.remove(replica)
        del self.running[request.caller or request]
        request.replica = None
        return self._give(replica, now)

    def add(self, replica: Replica, now: float) -> Request | None:
        """Add a replica: the request that has it. None when it is idle."""
        self.replicas.append(replica)
        self.begun.append(0)
        return self._give(replica, now)

    def _give(self, replica: Replica, now: float) -> Request | None:
        """`replica` is free: the request that has it next. None when it is idle."""
        following = self._next(replica, now)
        if following is not None:
            self.assign(replica, following, now)
        else:
            self.idle.append(replica)
        return following

    def _has_company(self) -> bool:
        """A new request comes: whether it, and those after it, wait for others to join them."""
        if self.running or self.queue.waiting:
            self._to_be_alone = ALONE_AGAIN
        elif self._to_be_alone:
            self._to_be_alone -= 1
        self.expects_company = bool(self._to_be_alone) and self._options.max_wait > 0
        return self.expects_company

    def _leave_batch(self, request: Request, error: DagexecError, now: float) -> bool:
        """A member of a batch is over with `error`, and the run goes on for the others, if there are any.

        False while its rows are being copied: then it ends with the run.
        """
        batch = request.batch
        assert batch is not None
        if request.taken:
            return False
        self.settle(request, None, error, now)
        if not batch.left:
            batch.cancelled = error
        return True

    def _run_again(self, batch: Batch) -> None:
        """The run of `batch` failed: its members run alone, before all others."""
        for member in batch.requests:
            member.taken = False
            member.result = member.error = None
            if member.cancelled is None:
                batch.drop(member)
                member.group = None
                self.again.push(member)
                self.retried += 1

    def _next(self, replica: Replica, now: float) -> Request | None:
        """Take the request that `replica` serves next from where it waits; None when there is none."""
        for request in self.pinned.waiting:
            if request.pinned is replica:
                self.pinned.remove(request)
                return request
        if self.again.waiting:
            return self.again.pop()
        if not (self.queue.waiting or self.awaiting_admission.waiting):
            return None
        if self.queue.only_loop() is not None and not self.shut and self.is_short(replica):
            return None
        if isinstance(self.queue, BatchQueue) and self.queue.waiting:
            return self._next_batch(self.queue, now)
        queued = self.queue.pop() or self.awaiting_admission.pop()
        self._admit()
        return queued

    def _next_batch(self, queue: BatchQueue, now: float) -> Request | None:
        """Take the requests of the next run. They do not wait for others when no more can come."""
        batch = queue.pop_batch(now, self._hurried())
        while self._admit():
            pass
        if len(batch) > 1:
            return Batch(batch)
        return batch[0] if batch else None

    def _hurried(self) -> bool:
        """Requests do not wait for others now."""
        limit = self._options.max_queued
        is_full = limit is not None and len(self.queue) >= limit
        return self.shut or self.hurries or is_full or not self.expects_company

    def _admit(self) -> bool:
        """Admit the next request, if there is room in the queue; False when none was admitted."""
        if not self.awaiting_admission.waiting or len(self.queue) >= (self._options.max_queued or 0):
            return False
        request = self.awaiting_admission.pop()
        assert request is not None
        self.queue.push(request)
        return True
