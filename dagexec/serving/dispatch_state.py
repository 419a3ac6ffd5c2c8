"""Which request waits where, and which replica serves which: what a `Dispatcher` decides.

A machine that locks nothing, calls nobody and reads no clock: events are its methods, and what they return says what is
to be done. A request is in one place at a time: awaiting admission (the queue is full and its caller waits), in the
queue (admitted, no replica is free), on a replica, or over. Whoever frees a replica gives it to the next request of the
queue, which makes room for the next one to be admitted. Idle replicas are used in turn, the one least recently used
first.

Where requests are joined, a replica is given to a `Batch` of them; they are its members meanwhile. Then requests may
wait in the queue while a replica is idle, for others to join them, until `next_due`. The members of a joined run that
failed run again, each alone and before all others.

Requests also wait there while a replica is idle if one event loop may run them all, and runs are short: it has them in
its turns (`take_turn`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from dagexec.binding.io_binding import IOBinding, Outputs
from dagexec.binding.replicas import Replica
from dagexec.errors import ClosedError, DagexecError, QueueFullError
from dagexec.options import CompileOptions
from dagexec.serving.batch_queue import BatchQueue
from dagexec.serving.batching import Batch
from dagexec.serving.keeping import KeptReplicas
from dagexec.serving.requests import Request, RequestQueue, outcome_name, timed_out
from dagexec.serving.statistics import OUTCOMES, TIMES_KEPT
from dagexec.serving.waiting import MAX_QUEUED

ALONE_AGAIN = 8
"""How many requests in a row have to find nothing running before they are taken to come one at a time again."""

MAX_IN_TURN = 3e-4
"""Seconds that a run takes at best, up to which it waits for a turn of its event loop: handing it over takes longer."""


class DispatchState:
    """The requests and the replicas of one executor.

    A thread that is interrupted in the middle of an event, as Ctrl-C does it between two calls, leaves a state in which
    a request has its `replica`, or has not.

    Attributes:
        replicas: all of them.
        idle: those that serve nobody, the one whose turn it is first.
        kept: those that serve nobody and that threads keep for their next call.
        queue: admitted requests.
        awaiting_admission: those that wait until there is room in the queue.
        pinned: those that wait for a certain replica.
        again: those that run alone, as the run that they were joined in failed.
        running: those that have a replica, by the thread that calls the steps of an inline run, else by themselves;
            where requests are joined, a batch in place of its members.
        begun: runs that each replica has begun.
        outcomes: how many requests ended in each way.
        times: of the last completed ones, the seconds in the queue and on a replica.
        batch_sizes: how many runs had so many rows, where requests are joined.
        retried: requests that ran again, alone, as a run that they were joined in failed.
        shut: no more requests are taken.
        joins: requests may be joined.
        hurries: none of them waits for others.
        expects_company: a request that comes waits for others; not after several in a row that found nobody here.
        last_begun: when the latest run began.
    """

    def __init__(self, name: str, replicas: Sequence[Replica], options: CompileOptions) -> None:
        """`name` is the model's, for messages."""
        self._name = name
        self._options = options
        self.replicas = list(replicas)
        self.joins = options.max_batch > 1
        self.hurries = False
        self._to_be_alone = ALONE_AGAIN  # how many requests have to find nobody here before one does not wait
        self.expects_company = self.joins and options.max_wait > 0
        self.idle = deque(replicas)
        self.begun = [0] * len(replicas)
        self.outcomes = Counter(dict.fromkeys(OUTCOMES, 0))
        self.times: deque[tuple[float, float]] = deque(maxlen=TIMES_KEPT)
        self.batch_sizes: Counter[int] = Counter()
        self.retried = 0
        self.shut = False
        self.last_begun = 0.0
        self.forget_requests()

    def forget_requests(self) -> None:
        """There are none: at the start, and in a forked child, where nobody serves them."""
        self.queue = self._new_queue()
        self.awaiting_admission, self.pinned, self.again = RequestQueue(), RequestQueue(), RequestQueue()
        self.running: dict[object, Request] = {}
        self.kept = KeptReplicas()

    def _new_queue(self) -> RequestQueue:
        return BatchQueue(self._options.max_batch, self._options.max_wait) if self.joins else RequestQueue()

    def arrive(self, request: Request, now: float, *, starts: bool = True) -> Request | None:
        """A request came. Who is to be served now that it did: itself, a batch that it completes, or nobody.

        Without `starts` it completes none: somebody else is to call `start`. Raises ClosedError once it is `shut`,
        RunTimeoutError for one that is late, and QueueFullError.
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
            kept = self.kept.by_thread.pop(request.caller, None)
            if kept is not None:
                self.assign(kept, request, now)
                return request
        limit = self._options.max_queued
        if self.idle and (request.group is None or limit == 0) and not self._waits_for_turns(request):
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

    def _waits_for_turns(self, request: Request) -> bool:
        """While a replica is idle, `request` comes, and its event loop is to run it, or others that came before."""
        if self.queue.waiting:
            return self.queue.only_loop() is not None
        return request.loop is not None and self.is_short(self.idle[0])

    def start(self, now: float) -> Request | None:
        """Who gets an idle replica now; None while there is none, or nobody who need not wait for others."""
        if not self.idle:
            return None
        following = self._next(self.idle[0], now)
        if following is not None:
            self.assign(self.idle[0], following, now)
            del self.idle[0]
        return following

    def may_start(self, now: float) -> bool:
        """`start` would give somebody a replica, or may."""
        waiting = self.again.waiting or self.awaiting_admission.waiting
        queue = self.queue
        return bool(self.idle and (waiting or (isinstance(queue, BatchQueue) and queue.is_ready(now, self._hurried()))))

    def take_turn(self, now: float) -> Request | None:
        """An event loop has a turn: who gets an idle replica although it waits for that. None while there is none."""
        if not self.idle:
            return None
        request = self.queue.pop()
        if request is not None:
            self.assign(self.idle[0], request, now)
            del self.idle[0]
        return request

    def is_short(self, replica: Replica) -> bool:
        """Whether runs of `replica` are for turns of an event loop."""
        known = replica.io_binding
        if known is None or known.is_shared or known.seconds_at_best > MAX_QUEUED:
            return False
        alike = (one.io_binding for one in self.replicas)  # one that was made later was only measured in a crowd
        return any(
            one is not None and one.shortest <= MAX_IN_TURN and one.signature == known.signature for one in alike
        )

    def next_due(self) -> float | None:
        """When to ask `start` again, at the latest; None when no replica is idle or nobody waits for others."""
        return self.queue.next_due() if self.idle and isinstance(self.queue, BatchQueue) else None

    def arrive_inline(self, request: Request, binding: IOBinding, caller: int, now: float) -> bool:
        """A request came that the thread `caller` would run. True when it has an idle replica, fed as `binding` does.

        False also for a thread that is in a run here, as an operator's is, or whose last one is still to be handed on.
        """
        keeper = caller in self.kept.by_thread
        if self.shut or caller in self.running or (self.queue.waiting and not keeper):
            return False
        if self.joins and self._has_company():
            return False
        if not (keeper or self.idle):
            return False
        replica = self.kept.by_thread[caller] if keeper else self.idle[0]
        known = replica.io_binding
        if known is not binding and (known is None or known.signature != binding.signature):
            return False
        request.caller = caller  # calls nothing from here on
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

        It may be told again after an interrupt.
        """
        if not request.over:
            request.over = True
            request.steps = request.run = None
            self.outcomes[outcome] += 1
            if outcome == "completed":
                self.times.append((request.begun - request.created, now - request.begun))
        if waited_for or self.queue.waiting or self.awaiting_admission.waiting or self.pinned.waiting:
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
        """True when the thread whose inline run is over keeps its replica, while others, no more urgent, wait."""
        replica, first = request.replica, self.queue.head()
        if replica is None or first is None or first.priority > request.priority:
            return False
        nobody_else = not (self.pinned.waiting or self.shut or self.joins)
        return nobody_else and self.kept.leave(request.caller, replica, request.begun, now)

    def take_back(self, now: float) -> list[Request]:
        """Threads that keep replicas have had time to call. Who gets those of threads that did not."""
        following = [self._give(replica, now) for replica in self.kept.take_back(now)]
        return [request for request in following if request is not None]

    def assign(self, replica: Replica, request: Request, now: float) -> None:
        """`replica` serves `request` from `now` on; the caller takes it from the idle ones. Calls nothing."""
        request.replica = replica
        request.begun = self.last_begun = now
        self.running[request.caller or request] = request
        self.begun[replica.number] += 1
        if self.joins and request.pinned is None:
            self.batch_sizes[request.rows] += 1
            for member in members_of(request):
                member.begun = now

    def unused(self) -> list[Replica]:
        """The replicas that serve nobody, less one whose thread was interrupted when it had just taken it."""
        taken = [request.replica for request in self.running.values()]
        return [replica for replica in self.idle if replica not in taken]

    def withdraw(self, request: Request) -> None:
        """A request that waits will not be served; in the queue it makes room for the next one."""
        assert request.queue is not None
        request.queue.remove(request)
        self._admit()

    def release(self, request: Request, now: float) -> Request | None:
        """The replica of `request` is free: who has it next. None when it is idle."""
        replica = request.replica
        assert replica is not None
        if replica in self.idle:  # the thread that took it was interrupted
            self.idle.remove(replica)
        del self.running[request.caller or request]
        request.replica = None
        return self._give(replica, now)

    def add(self, replica: Replica, now: float) -> Request | None:
        """A replica that was made later: who has it. None when it is idle."""
        self.replicas.append(replica)
        self.begun.append(0)
        return self._give(replica, now)

    def _give(self, replica: Replica, now: float) -> Request | None:
        """`replica` is free: who has it next. None when it is idle."""
        following = self._next(replica, now)
        if following is not None:
            self.assign(replica, following, now)
        else:
            self.idle.append(replica)
        return following

    def _has_company(self) -> bool:
        """A request comes: whether it waits for others to join it, as do those after it."""
        if self.running or self.queue.waiting:
            self._to_be_alone = ALONE_AGAIN
        elif self._to_be_alone:
            self._to_be_alone -= 1
        self.expects_company = bool(self._to_be_alone) and self._options.max_wait > 0
        return self.expects_company

    def leave_batch(self, request: Request, error: DagexecError, now: float) -> bool:
        """A member of a joined run is over with `error`, and the run goes on for the others, if there are any.

        False while its rows are being copied: then it is over when the run is.
        """
        batch = request.batch
        assert batch is not None
        if request.taken:
            return False
        self.settle(request, None, error, now)
        if not batch.left:
            batch.cancelled = error
        return True

    def run_again(self, batch: Batch) -> None:
        """The run of `batch` failed: its members run alone, before all others. To be called before `release`."""
        for member in batch.requests:
            member.taken = False
            member.result = member.error = None
            if member.cancelled is None:
                batch.drop(member)
                member.group = None
                self.again.push(member)
                self.retried += 1

    def settle(self, request: Request, result: Outputs | None, error: BaseException | None, now: float) -> None:
        """`request` is over: it has its outcome, releases what its caller gave, and is counted.

        What is not done by its deadline was not done in time, whoever looks first.
        """
        if error is None and now >= request.deadline:
            result, error = None, timed_out(self._name, request)
        request.begun = request.begun if request.begun >= request.created else now
        request.run = None
        request.result, request.error, request.over = result, error, True
        request.feeds, request.out = {}, None
        if request.batch is not None:
            request.batch.drop(request)
        if request.pinned is not None:
            return
        self.outcomes[outcome_name(error)] += 1
        if error is None:
            self.times.append((request.begun - request.created, now - request.begun))

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
        taken = self.queue.pop() or self.awaiting_admission.pop()
        self._admit()
        return taken

    def _next_batch(self, queue: BatchQueue, now: float) -> Request | None:
        """Take the requests that run next, as one. None of them waits for others when no more can come."""
        taken = queue.pop_batch(now, self._hurried())
        while self._admit():
            pass
        if len(taken) > 1:
            return Batch(taken)
        return taken[0] if taken else None

    def _hurried(self) -> bool:
        """Nobody waits for others now."""
        limit = self._options.max_queued
        is_full = limit is not None and len(self.queue) >= limit
        return self.shut or self.hurries or is_full or not self.expects_company

    def _admit(self) -> bool:
        """Let the next one in, if there is room in the queue; False when nobody came in."""
        if not self.awaiting_admission.waiting or len(self.queue) >= (self._options.max_queued or 0):
            return False
        request = self.awaiting_admission.pop()
        assert request is not None
        self.queue.push(request)
        return True


def members_of(request: Request) -> tuple[Request, ...]:
    """The requests of callers that a replica serves with `request`."""
    return request.requests if isinstance(request, Batch) else (request,)
