"""The queue of requests that may be joined: a `RequestQueue` that gives out requests of a group together.

A group is a set of requests that may be joined. It is ready when its rows fill a batch, or its oldest request has
waited for `max_wait` seconds; a request without a group is ready at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from heapq import heappush, nsmallest
from itertools import islice

from dagexec.executor.requests.queue import RequestQueue
from dagexec.executor.requests.request import Request


class _Waiting:
    """The requests of one group that wait.

    Attributes:
        requests: in order of arrival.
        rows: their total number.
        in_order: the first is the oldest, too; requests that awaited admission may be older than those before them.
    """

    __slots__ = ("in_order", "requests", "rows")

    def __init__(self) -> None:
        self.requests: OrderedDict[Request, None] = OrderedDict()
        self.rows = 0
        self.in_order = True


class BatchQueue(RequestQueue):
    """Requests in the order in which they are to be served, several at once.

    Groups go in the order of `RequestQueue`; the request whose turn it is is joined by others in order of priority,
    then of arrival. They overtake nobody, as they need no run of their own. Not safe by itself.
    """

    __slots__ = ("_alone", "_groups", "_max_batch", "_max_wait", "_prioritized")

    def __init__(self, max_batch: int, max_wait: float) -> None:
        """At most `max_batch` rows are joined, and a request waits for others at most `max_wait` seconds."""
        super().__init__()
        self._max_batch = max_batch
        self._max_wait = max_wait
        self._groups: dict[Hashable, _Waiting] = {}
        self._alone = 0  # waiting requests without a group
        self._prioritized = False  # some request had another priority than 0

    def push(self, request: Request) -> None:
        place = self._arrivals = self._arrivals + 1
        group = None if request.group is None else self._groups.get(request.group) or _Waiting()
        if group is not None and group.requests and request.created < next(reversed(group.requests)).created:
            group.in_order = False
        self.waiting[request] = None  # no calls from here on, so that Ctrl-C comes before or after all of it
        request.queue = self
        if request.call.priority:
            self._prioritized = True
        if group is None:
            self._alone += 1
        else:
            self._groups[request.group] = group
            group.requests[request] = None
            group.rows += request.rows
        heappush(self._heap, (-request.call.priority, place, request))

    def clear(self) -> list[Request]:
        self._groups.clear()
        self._alone = 0
        return super().clear()

    def pop_batch(self, now: float, hurried: bool) -> list[Request]:
        """Take the requests of the next run; none while all wait for others, unless they are `hurried`."""
        first = self._first_ready(now, hurried)
        if first is None:
            return []
        group = None if first.group is None else self._groups[first.group]
        self.take(first)
        if group is None:
            return [first]
        batch = [first, *self._joining(group, self._max_batch - first.rows)]
        for request in batch[1:]:
            self.remove(request)
        return batch

    def is_ready(self, now: float, hurried: bool) -> bool:
        """`pop_batch` would take requests."""
        return self._first_ready(now, hurried) is not None

    def next_due(self) -> float | None:
        """The first time at which a request has waited for others long enough; None when none waits."""
        return min((self._due(group) for group in self._groups.values()), default=None)

    def _first_ready(self, now: float, hurried: bool) -> Request | None:
        head = self.head()
        if head is None or hurried or head.group is None or self._is_ready(self._groups[head.group], now):
            return head
        if not self._alone and len(self._groups) == 1:
            return None
        firsts = [self._in_order(group, 1)[0] for group in self._groups.values() if self._is_ready(group, now)]
        if self._alone:
            firsts += [request for request in self.waiting if request.group is None]
        return min(firsts, key=lambda request: (-request.call.priority, request.created), default=None)

    def _is_ready(self, group: _Waiting, now: float) -> bool:
        return group.rows >= self._max_batch or self._due(group) <= now

    def _due(self, group: _Waiting) -> float:
        oldest = next(iter(group.requests)).created
        if not group.in_order:
            oldest = min(request.created for request in group.requests)
        return oldest + self._max_wait

    def _joining(self, group: _Waiting, room: int) -> list[Request]:
        """Requests that join, up to the first with more rows than there is `room` for."""
        joining: list[Request] = []
        for request in self._in_order(group, room):
            room -= request.rows
            if room < 0:
                break
            joining.append(request)
        return joining

    def _in_order(self, group: _Waiting, count: int) -> list[Request]:
        """The first `count` requests of a group: `nsmallest` keeps the order of arrival among equals."""
        if not self._prioritized:
            return list(islice(group.requests, count))
        return nsmallest(count, group.requests, key=lambda request: -request.call.priority)

    def _forget(self, request: Request) -> None:
        del self.waiting[request]  # as in `push`, no calls
        request.queue = None
        if request.group is None:
            self._alone -= 1
        else:
            group = self._groups[request.group]
            del group.requests[request]
            group.rows -= request.rows
            if not group.requests:
                del self._groups[request.group]
        self._tidy()
