"""The queue in which requests wait: the more urgent first, equal ones in order of arrival, none forever."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING

from dagexec.executor.requests.request import Request

if TYPE_CHECKING:
    from dagexec.executor.requests.waiting import EventLoop

MAX_OVERTAKEN = 32
"""So many more urgent requests may overtake the oldest request of a queue; then it is its turn."""

_STALE_ENTRIES_KEPT = 64


class RequestQueue:
    """Requests in the order in which they are to be served. Not safe by itself: its owner's lock guards it.

    The highest priority goes first, and requests of equal priority in order of arrival. A request that has been the
    oldest while `MAX_OVERTAKEN` others were taken goes next, whatever its priority: a request behind n older ones
    waits for at most (n + 1) * (MAX_OVERTAKEN + 1) others. Every operation takes O(log n), amortized.

    Attributes:
        waiting: the requests, the oldest first; read only.
        loops: how many of them each event loop may run; None stands for no loop.
        overtaken: how many overtook the oldest since it is the oldest.
    """

    __slots__ = ("_arrivals", "_heap", "loops", "overtaken", "waiting")

    def __init__(self) -> None:
        self.waiting: OrderedDict[Request, None] = OrderedDict()
        self.loops: dict[EventLoop | None, int] = {}
        self._heap: list[tuple[int, int, Request]] = []  # may have stale entries of requests that left
        self._arrivals = 0
        self.overtaken = 0

    def __len__(self) -> int:
        return len(self.waiting)

    def __iter__(self) -> Iterator[Request]:
        """The oldest first."""
        return iter(self.waiting)

    def push(self, request: Request) -> None:
        """Append `request` to those of its priority."""
        place = self._arrivals = self._arrivals + 1
        of_loop = self.loops.get(request.loop, 0) + 1
        self.waiting[request] = None
        self.loops[request.loop] = of_loop
        request.queue = self
        heappush(self._heap, (-request.call.priority, place, request))

    def pop(self) -> Request | None:
        """Take the request whose turn it is; None when none waits."""
        request = self.head()
        if request is not None:
            self.take(request)
        return request

    def head(self) -> Request | None:
        """The request whose turn it is; None when none waits."""
        oldest = next(iter(self.waiting), None)
        if oldest is None or self.overtaken >= MAX_OVERTAKEN:
            return oldest
        while (request := self._heap[0][2]).queue is not self:
            heappop(self._heap)
        return request

    def take(self, request: Request) -> None:
        """Take the waiting `request` in its turn: if it is not the oldest, it overtakes that."""
        if request is next(iter(self.waiting)):
            self.remove(request)
        else:
            self.overtaken += 1
            self._forget(request)

    def remove(self, request: Request) -> None:
        """Take the waiting `request` out of turn."""
        if request is next(iter(self.waiting)):
            self.overtaken = 0
        self._forget(request)

    def clear(self) -> list[Request]:
        """Take all, oldest first."""
        requests = list(self.waiting)
        for request in requests:
            request.queue = None
        self.waiting.clear()
        self.loops.clear()
        self._heap.clear()
        self.overtaken = 0
        return requests

    def only_loop(self) -> EventLoop | None:
        """The event loop that may run all waiting requests; None when there is none."""
        return next(iter(self.loops)) if len(self.loops) == 1 else None

    def forget_loops(self) -> None:
        """No event loop may run the waiting requests."""
        for request in self.waiting:
            request.loop = None
        self.loops = {None: len(self.waiting)} if self.waiting else {}

    def _forget(self, request: Request) -> None:
        del self.waiting[request]
        request.queue = None
        self.loops[request.loop] -= 1
        if not self.loops[request.loop]:
            del self.loops[request.loop]
        self._tidy()

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self.waiting) + _STALE_ENTRIES_KEPT:
            self._heap = [entry for entry in self._heap if entry[2].queue is self]
            heapify(self._heap)
