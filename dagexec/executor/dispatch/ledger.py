"""Where each request of an executor is, what each replica does, and how requests ended.

`state` has the events that change this.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence

from dagexec.binding.io_binding import Outputs
from dagexec.binding.replicas import Replica
from dagexec.errors import ClosedError
from dagexec.executor.batching.queue import BatchQueue
from dagexec.executor.dispatch.keeping import KeptReplicas
from dagexec.executor.dispatch.statistics import OUTCOMES, TIMES_KEPT
from dagexec.executor.requests.queue import RequestQueue
from dagexec.executor.requests.request import Batch, Request, outcome_name, timed_out
from dagexec.options import CompileOptions

ALONE_AGAIN = 8
"""After so many requests in a row that find nothing running, requests are taken to come one at a time again."""


class Ledger:
    """The requests and the replicas of one executor.

    Attributes:
        replicas: all of them.
        idle: those that serve nobody, the next one first.
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
        retried: requests that ran again, alone, as their batch had failed.
        shut: no more requests are taken.
        joins: requests may be joined.
        hurries: none of them waits for others.
        timer_due: when the timer for requests that wait for others rings; None when none is set.
        expects_company: a new request waits for others; False after several in a row that found nothing running.
        last_begun: when the latest run began.
    """

    def __init__(self, name: str, replicas: Sequence[Replica], options: CompileOptions) -> None:
        """`name` is the model's, for messages."""
        self._name = name
        self._options = options
        self.replicas = list(replicas)
        self.joins = options.max_batch > 1
        self.hurries = False
        self._to_be_alone = ALONE_AGAIN  # requests that have to find nothing running before the next does not wait
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
        """Begin without requests: at the start, and in a forked child, where no worker serves them."""
        self.queue = self._new_queue()
        self.awaiting_admission, self.pinned, self.again = RequestQueue(), RequestQueue(), RequestQueue()
        self.running: dict[object, Request] = {}
        self.kept = KeptReplicas()
        self.timer_due: float | None = None

    def _new_queue(self) -> RequestQueue:
        return BatchQueue(self._options.max_batch, self._options.max_wait) if self.joins else RequestQueue()

    @property
    def unfinished(self) -> int:
        """The number of requests that are not over."""
        waiting = sum(map(len, (self.queue, self.awaiting_admission, self.pinned, self.again)))
        return waiting + sum(len(members_of(request)) for request in self.running.values())

    @property
    def is_empty(self) -> bool:
        """Nobody waits, and no replica is in use."""
        return not (self.running or self.unfinished)

    def unused(self) -> list[Replica]:
        """The idle replicas, without one whose thread was interrupted just after taking it."""
        taken = [request.replica for request in self.running.values()]
        return [replica for replica in self.idle if replica not in taken]

    def closed(self) -> ClosedError:
        """The error of requests that wait when the executor is closed."""
        return ClosedError(f"net {self._name!r}: the executor was closed")

    def settle(self, request: Request, result: Outputs | None, error: BaseException | None, now: float) -> None:
        """`request` is over: it has its outcome, releases its caller's arrays, and is counted.

        A request that is not done by its deadline has timed out, whoever notices first.
        """
        if error is None and now >= request.deadline:
            result, error = None, timed_out(self._name, request)
        request.begun = request.begun if request.begun >= request.created else now
        request.run = None
        request.result, request.error, request.over = result, error, True
        request.feeds = {}
        if request.call.out is not None:
            request.call = request.call._replace(out=None)
        if request.batch is not None:
            request.batch.drop(request)
        if request.pinned is not None:
            return
        self.outcomes[outcome_name(error)] += 1
        if error is None:
            self.times.append((request.begun - request.created, now - request.begun))

    def state(self, now: float, name: Callable[[Request], Hashable]) -> Hashable:
        """All that decides what comes next, except measured times of replicas. Times are relative to `now`.

        `name` identifies a request and its constants. Requests of one name differ only in where they are. Replicas are
        interchangeable: each is identified by its place among the idle ones, by the thread that keeps it, or by the
        request that it serves.
        """

        def waiting(*queues: RequestQueue) -> Hashable:
            return tuple((tuple((name(member), member.loop) for member in queue), queue.overtaken) for queue in queues)

        def pins(replica: Replica | None) -> Hashable:
            return tuple(place for place, request in enumerate(self.pinned) if request.pinned is replica)

        def served(request: Request) -> Hashable:
            members = tuple((name(member), member.taken, member.cancelled is None) for member in members_of(request))
            since = self.kept.seconds_kept(request.begun, now) if request.caller else None
            progress = request.caller, since, request.over, request.fed, request.run is None, request.cancelled is None
            return isinstance(request, Batch), members, progress, pins(request.replica)

        return (
            tuple(map(pins, self.idle)),
            frozenset((thread, pins(replica)) for thread, replica in self.kept.by_thread.items()),
            frozenset(Counter(map(served, self.running.values())).items()),
            waiting(self.queue, self.awaiting_admission, self.pinned, self.again),
            tuple(one.created - now for one in (*self.queue, *self.awaiting_admission) if self.joins),
            self.kept.state(now),
            None if self.timer_due is None else self.timer_due - now,
            (self.shut, self.hurries, self.expects_company, self._to_be_alone),
        )


def members_of(request: Request) -> tuple[Request, ...]:
    """The members of a batch; any other request alone."""
    return request.requests if isinstance(request, Batch) else (request,)
