"""Requests: calls on their way to a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dagexec.binding.io_binding import Array, Outputs, arrays_like, check_result
from dagexec.binding.replicas import Replica
from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.traits import Rows
from dagexec.errors import (
    ClosedError,
    DagexecError,
    FeedError,
    QueueFullError,
    RunCancelledError,
    RunTimeoutError,
    ShapeError,
)
from dagexec.executor.requests.blocked_run import BlockedRun
from dagexec.executor.requests.call import PLAIN, Call
from dagexec.platform.shutdown import hold_daemon
from dagexec.scheduler.run.run import Run

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from dagexec.executor.requests.timeline import Timeline
    from dagexec.executor.requests.waiting import EventLoop

Cuts = Mapping[str, tuple[slice, ...]]
"""By result, the part that belongs to its request: the first elements along each axis of lengths."""


class Queue(Protocol):
    """Where a request waits; it may leave before its turn."""

    def remove(self, request: Request) -> None: ...


class Request:
    """A call of `run` or `run_async`, or the warm-up of a replica, from its beginning to its result.

    The lock of its dispatcher guards changes.

    Attributes:
        feeds: checked arrays, released at the end.
        names: blobs to return.
        call: its other arguments; `out` is released at the end.
        notify: called from any thread when `outcome` is ready.
        pinned: the replica that must serve it (warm-up), or None for any.
        run_net: False for a request that only has its replica prepared.
        deadline: when its timeout is over, on the dispatcher's clock: from then on it does not begin, and a result
            is late.
        created: when it came, on the dispatcher's clock.
        begun: when it got a replica, or ended without one.
        fed_at: when that was fed, and `ran_at`, when its last step was over; where `RunTimes` are added up.
        queue: the queue it waits in, if any.
        replica: serves it; None before and afterwards.
        caller: the identifier of the thread that calls its steps, for an inline run; 0 for one on workers.
        steps: called by that thread; clearing the list stops it.
        fed: workers feed the replica for it, or did.
        run: its run, from the time it is on the pool.
        following: the next request of its replica.
        cancelled: why it is to end early.
        over: it has its result or error.
        span: its OpenTelemetry span, if spans were requested.
        rows: of its inputs, along their batch axes.
        group: equal for requests that may be joined; None for a request that runs alone.
        batch: the batch that it is a member of, until it is over.
        taken: its rows of the batch are being copied, so that it must not end meanwhile.
        blocks: its runs, in sequence; None when it is a single run.
        block: the number of the current one.
        cuts: its parts of results along axes of lengths, where its inputs were padded.
        loop: the event loop whose thread may run it in one of its turns, if there is one.
        waits_on: the event loop of its caller, if that is a task.
        timeline: is told of its run; that of a request of a server.
    """

    deadline: float = math.inf
    created: float = 0.0
    begun: float = -math.inf
    fed_at: float = 0.0
    ran_at: float = 0.0
    queue: Queue | None = None
    replica: Replica | None = None
    caller: int = 0
    steps: list[Step] | None = None
    fed: bool = False
    run: Run | None = None
    following: Request | None = None
    cancelled: DagexecError | None = None
    over: bool = False
    result: Outputs | None = None
    error: BaseException | None = None
    span: Span | None = None
    rows: int = 1
    group: Hashable = None
    batch: Batch | None = None
    taken: bool = False
    blocks: BlockedRun | None = None
    block: int = 0
    cuts: Cuts | None = None
    loop: EventLoop | None = None
    waits_on: EventLoop | None = None
    timeline: Timeline | None = None

    def __init__(
        self,
        feeds: Mapping[str, Array],
        names: Sequence[str] = (),
        call: Call = PLAIN,
        *,
        notify: Callable[[], object] = nothing_to_do,
        pinned: Replica | None = None,
        run_net: bool = True,
    ) -> None:
        self.feeds = feeds
        self.names = names
        self.call = call
        self.notify = notify
        self.pinned = pinned
        self.run_net = run_net

    @property
    def is_prepared(self) -> bool:
        """Its replica is prepared for its shapes."""
        binding = None if self.replica is None else self.replica.io_binding
        return binding is not None and arrays_like(binding.signature, self.feeds) is not None

    @property
    def is_preparing(self) -> bool:
        """Its replica is being prepared for it, and the arrays of its caller are not used any more."""
        on_replica = self.replica is not None and self.replica.is_preparing
        return on_replica and self.run is None and self.call.out is None and self.pinned is None

    def time_out(self, began: float) -> None:
        """Start its timeout, if it has one, at this time of the dispatcher's clock."""
        if self.call.timeout is not None:
            self.deadline = began + self.call.timeout

    def is_abandoned(self) -> bool:
        """Nobody can wait for it any more: the event loop of its caller was closed."""
        return self.waits_on is not None and self.waits_on.is_closed()

    def seconds_left(self, now: float) -> float | None:
        """Seconds until its deadline, 0 when it is over; None when it has none."""
        return None if self.deadline == math.inf else max(0.0, self.deadline - now)

    def feed_replica(self) -> None:
        """Put its inputs, or those of its current block, where its replica reads them.

        Raises what `Replica.feed` does.
        """
        assert self.replica is not None
        if self.blocks is not None:
            self.blocks.feed(self.replica, self.feeds, self.block)
        elif self.cuts is not None:
            self.replica.feed(self.feeds)
        else:
            self.replica.feed(self.feeds, self.names, self.call.out)

    def end_block(self) -> bool:
        """A run is over: keep the results of a block. True when another block follows.

        Raises what `BlockedRun.keep` does.
        """
        if self.blocks is None:
            return False
        assert self.replica is not None
        self.blocks.keep(self.replica, self.block, self.call.out)
        return self.block + 1 < len(self.blocks.blocks)

    def fetch(self) -> Outputs:
        """The results, in arrays that are the caller's. Raises what `Replica.fetch` does."""
        assert self.replica is not None
        if self.blocks is not None:
            return self.blocks.results
        if self.cuts is None:
            return self.replica.fetch(self.names, self.call.out)
        return self.own(self.replica.net.name, self.replica.peek(self.names))

    def own(self, net: str, results: Outputs) -> Outputs:
        """The request's part of `results`, without padding, in arrays that are the caller's.

        Raises FeedError when an array of `out` does not fit.
        """
        outputs: Outputs = {}
        for name, array in results.items():
            if self.cuts is not None and name in self.cuts:
                array = array[self.cuts[name]]
            target = None if self.call.out is None else self.call.out.get(name)
            if target is None:
                outputs[name] = array.copy()
            else:
                check_result(net, name, array, target)
                target[...] = array
                outputs[name] = target
        return outputs

    def outcome(self) -> Outputs:
        """Return the outputs or raise the error, once: the request releases both."""
        error, self.error = self.error, None
        result, self.result = self.result, None
        if error is not None:
            hold_daemon()
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        assert result is not None
        return result

    def attach_secondary(self, error: BaseException) -> None:
        """Add other errors of the run as notes to `error`, which its caller gets; but not the cancellation itself."""
        other, self.error = self.error, None
        if other is None or other is error:
            return
        if not isinstance(other, RunCancelledError):
            error.add_note(f"secondary error: {other}")
        for note in getattr(other, "__notes__", ()):
            error.add_note(note)


class Group:
    """Requests that may be joined: they want the same results, and differ in rows alone.

    Attributes:
        axes: the batch axis of each input that has one.
        results: where each result has rows; None for a result that does not depend on them.
        sizes: numbers of rows in order, the next of which a run has, filled up with zeros; none where any may be run.
    """

    __slots__ = ("axes", "results", "sizes")

    def __init__(self, axes: Mapping[str, int], results: Mapping[str, Rows | None], sizes: Sequence[int] = ()) -> None:
        self.axes = axes
        self.results = results
        self.sizes = sizes

    def filled(self, parts: Sequence[Mapping[str, Array]], rows: int) -> tuple[Sequence[Mapping[str, Array]], int]:
        """The inputs of requests of so many rows together, and what fills these up; how many rows there are then."""
        size = next((size for size in self.sizes if size >= rows), rows)
        if size == rows:
            return parts, rows
        shapes = {name: list(array.shape) for name, array in parts[0].items()}
        for name, axis in self.axes.items():
            shapes[name][axis] = size - rows
        return [*parts, {name: np.zeros(shape, parts[0][name].dtype) for name, shape in shapes.items()}], size


class Batch(Request):
    """Several requests that a replica serves in one run. The lock of their dispatcher guards changes.

    Attributes:
        members: all of them, in the order of their rows.
        left: how many of them are neither over nor run alone.
        ended: those that ended with the run.
        joined: those whose rows were fed, in this order.
    """

    def __init__(self, members: Sequence[Request]) -> None:
        """`members` are of one group, and wait no more."""
        first = members[0]
        super().__init__({}, first.names, Call(priority=max(member.call.priority for member in members)))
        assert isinstance(first.group, Group)
        self.members = tuple(members)
        self.left = len(members)
        self.ended: tuple[Request, ...] = ()
        self.joined: tuple[Request, ...] = ()
        self.rows = self._rows_fed = 0
        self._feeds = [member.feeds for member in members]  # a member that leaves releases its own
        self._group = first.group
        for member in members:
            self.rows += member.rows
            member.batch = self

    @property
    def requests(self) -> tuple[Request, ...]:
        """The members that are `left`."""
        return tuple(member for member in self.members if member.batch is self)

    def drop(self, member: Request) -> None:
        """`member` is over, or runs alone."""
        member.batch = None
        self.left -= 1

    def feed_replica(self) -> None:
        """Feed the rows of those that are still members, concatenated."""
        assert self.replica is not None
        parts = [(member, feeds) for member, feeds in zip(self.members, self._feeds, strict=True) if member.batch]
        self._feeds = []
        self.joined = tuple(member for member, _ in parts)
        if parts:
            rows = sum(member.rows for member in self.joined)
            filled, self._rows_fed = self._group.filled([feeds for _, feeds in parts], rows)
            self.replica.feed_rows(filled, self._group.axes)

    def fetch(self) -> Outputs:
        """Give each member that is `taken` its rows of the results, as its own `result` or `error`."""
        assert self.replica is not None
        net = self.replica.net.name
        results = self.replica.peek(self.names)
        self._check_rows(net, results)
        start = 0
        for member in self.joined:
            if member.taken:
                try:
                    member.result = member.own(net, self._rows_of(results, member, start))
                except Exception as error:
                    member.error = error
            start += member.rows
        return {}

    def _check_rows(self, net: str, results: Outputs) -> None:
        total = self._rows_fed
        for name, array in results.items():
            rows = self._group.results[name]
            if rows is not None and (array.ndim <= rows.axis or array.shape[rows.axis] != rows.size(total)):
                raise DagexecError(
                    f"net {net!r}: result {name!r} of {total} joined rows must have {rows.size(total)} along axis "
                    f"{rows.axis}, found shape {array.shape}"
                )

    def _rows_of(self, results: Outputs, member: Request, start: int) -> Outputs:
        outputs: Outputs = {}
        for name, array in results.items():
            rows = self._group.results[name]
            if rows is not None:
                own = slice(rows.size(start), rows.size(start + member.rows))
                array = array[own] if rows.axis == 0 else array[(slice(None),) * rows.axis + (own,)]
            outputs[name] = array
        return outputs


def timed_out(net: str, request: Request) -> RunTimeoutError:
    """The error of a request that is not over at its deadline."""
    return RunTimeoutError(f"net {net!r}: not done within {request.call.timeout} seconds; the run was cancelled")


def abandoned(net: str) -> RunCancelledError:
    """The error of a request whose caller cannot wait any more."""
    return RunCancelledError(f"net {net!r}: the event loop of the caller was closed")


def outcome_name(error: BaseException | None) -> str:
    """The name of an outcome in statistics and spans: one of `dagexec.executor.dispatch.statistics.OUTCOMES`."""
    if error is None:
        return "completed"
    if isinstance(error, RunTimeoutError):
        return "timed_out"
    if isinstance(error, QueueFullError):
        return "rejected"
    if isinstance(error, FeedError | ShapeError):
        return "invalid"
    stopped = isinstance(error, RunCancelledError | ClosedError) or not isinstance(error, Exception)
    return "cancelled" if stopped else "failed"
