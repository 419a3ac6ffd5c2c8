"""Requests: what callers asked for, from the call to its result."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

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

    from dagexec.executor.requests.waiting import EventLoop

Cuts = Mapping[str, tuple[slice, ...]]
"""By result, the part of it that belongs to its request: the first ones along each axis of lengths."""


class Queue(Protocol):
    """Where a request waits, and which it may leave before it is its turn."""

    def remove(self, request: Request) -> None: ...


class Request:
    """One call of `run` or `run_async`, or one replica to be warmed up, from its beginning to its result.

    The lock of the dispatcher that serves it guards what changes.

    Attributes:
        feeds: checked arrays, let go at the end.
        names: blobs to return.
        call: what else its caller asks for; `out` is let go at the end.
        notify: called from any thread when `outcome` is there to be requested.
        pinned: the replica that must serve it (warm-up), or None for any.
        run_net: False for a request that only has its replica prepared.
        deadline: when its caller gives it up, on the dispatcher's clock: from then on it does not begin, and is not
            done in time.
        created: when it was made, on the dispatcher's clock.
        begun: when it got a replica, or ended without one.
        queue: the queue it waits in, if any.
        replica: who serves it; None before and afterwards.
        caller: the identifier of the thread that calls its steps, for an inline run; 0 for one on workers.
        steps: what that thread calls; to clear the list is to stop it.
        fed: the replica is being fed for it, or was, by workers.
        run: its run, from the time it is on the pool.
        following: the request that got the replica after it.
        cancelled: why it is to end early.
        over: the result or the error is settled.
        span: its OpenTelemetry span, if spans were requested.
        rows: of its inputs, along their batch axes.
        group: what it has in common with the requests that it may be joined with; None for one that runs alone.
        batch: the joined run that it is a member of, until it is over.
        taken: its rows of that run are being copied, so that nobody may end it meanwhile.
        blocks: the runs that it is made up of, one behind the other; None when it is one run.
        block: the number of the one that it is at.
        cuts: what belongs to it of results along axes of lengths, where its inputs were padded.
        loop: the event loop whose thread may run it in one of its turns, if there is one.
        waits_on: the event loop of its caller, if that is a task.
    """

    deadline: float = math.inf
    created: float = 0.0
    begun: float = -math.inf
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
        known = None if self.replica is None else self.replica.io_binding
        return known is not None and arrays_like(known.signature, self.feeds) is not None

    @property
    def is_preparing(self) -> bool:
        """Its replica is being prepared for it, and nothing of its caller's is read or written to any more."""
        on_replica = self.replica is not None and self.replica.is_preparing
        return on_replica and self.run is None and self.call.out is None and self.pinned is None

    def time_out(self, began: float) -> None:
        """Have its timeout, if it has one, start at that moment of the dispatcher's clock."""
        if self.call.timeout is not None:
            self.deadline = began + self.call.timeout

    def is_abandoned(self) -> bool:
        """Nobody can wait for it any more: the event loop of its caller was closed."""
        return self.waits_on is not None and self.waits_on.is_closed()

    def seconds_left(self, now: float) -> float | None:
        """Seconds until its deadline, 0 when it is over; None when it has none."""
        return None if self.deadline == math.inf else max(0.0, self.deadline - now)

    def feed_replica(self) -> None:
        """Put the inputs, of one block where there are some, where its replica reads them.

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
        """A run is over: keep what it computed of a block. True when another block is to follow.

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
        """Of `results` what is neither padding nor another's, in arrays that are the caller's.

        Raises FeedError when an array that the caller gave does not fit.
        """
        found: Outputs = {}
        for name, array in results.items():
            if self.cuts is not None and name in self.cuts:
                array = array[self.cuts[name]]
            target = None if self.call.out is None else self.call.out.get(name)
            if target is None:
                found[name] = array.copy()
            else:
                check_result(net, name, array, target)
                target[...] = array
                found[name] = target
        return found

    def outcome(self) -> Outputs:
        """The outputs, or raise what went wrong. To be asked once, as the request releases both."""
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
        """What else went wrong in a run whose caller gets `error`: notes on it. The cancellation itself is not one."""
        other, self.error = self.error, None
        if other is None or other is error:
            return
        if not isinstance(other, RunCancelledError):
            error.add_note(f"secondary error: {other}")
        for note in getattr(other, "__notes__", ()):
            error.add_note(note)


class Group:
    """Requests that may be joined: they ask for the same results, and differ in rows alone.

    Attributes:
        axes: the batch axis of each input that has one.
        results: where each result has rows; None for one that is the same for any rows.
    """

    __slots__ = ("axes", "results")

    def __init__(self, axes: Mapping[str, int], results: Mapping[str, Rows | None]) -> None:
        self.axes = axes
        self.results = results


class Batch(Request):
    """Several requests that a replica serves as one. The lock of their dispatcher guards what changes.

    Attributes:
        members: all of them, in the order of their rows.
        left: how many of them are not over, and do not run by themselves.
        ended: those that were not over before the run was.
        joined: those whose rows the replica was fed with, in this order.
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
        self.rows = 0
        self._feeds = [member.feeds for member in members]  # a member that leaves lets go of its own
        self._group = first.group
        for member in members:
            self.rows += member.rows
            member.batch = self

    @property
    def requests(self) -> tuple[Request, ...]:
        """The members that are `left`."""
        return tuple(member for member in self.members if member.batch is self)

    def drop(self, member: Request) -> None:
        """`member` is over, or runs by itself."""
        member.batch = None
        self.left -= 1

    def feed_replica(self) -> None:
        """Feed the rows of those that are still members, one behind the other."""
        assert self.replica is not None
        parts = [(member, feeds) for member, feeds in zip(self.members, self._feeds, strict=True) if member.batch]
        self._feeds = []
        self.joined = tuple(member for member, _ in parts)
        if parts:
            self.replica.feed_rows([feeds for _, feeds in parts], self._group.axes)

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
        total = sum(member.rows for member in self.joined)
        for name, array in results.items():
            rows = self._group.results[name]
            if rows is not None and (array.ndim <= rows.axis or array.shape[rows.axis] != rows.size(total)):
                raise DagexecError(
                    f"net {net!r}: result {name!r} of {total} joined rows must have {rows.size(total)} along axis "
                    f"{rows.axis}, found shape {array.shape}"
                )

    def _rows_of(self, results: Outputs, member: Request, start: int) -> Outputs:
        found: Outputs = {}
        for name, array in results.items():
            rows = self._group.results[name]
            if rows is not None:
                own = slice(rows.size(start), rows.size(start + member.rows))
                array = array[own] if rows.axis == 0 else array[(slice(None),) * rows.axis + (own,)]
            found[name] = array
        return found


def timed_out(net: str, request: Request) -> RunTimeoutError:
    """What the caller of a request gets that is not over at its deadline."""
    return RunTimeoutError(f"net {net!r}: not done within {request.call.timeout} seconds; the run was cancelled")


def abandoned(net: str) -> RunCancelledError:
    """Why a request ends that nobody can wait for any more."""
    return RunCancelledError(f"net {net!r}: the event loop of the caller was closed")


def outcome_name(error: BaseException | None) -> str:
    """How statistics and spans call the end of a request: one of `dagexec.executor.dispatch.statistics.OUTCOMES`."""
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
