"""The transport between threads of one process: a rank is a thread, a message the sender's own array.

A sender leaves its array in the queue of the two ranks and waits until the receiver has read it, so nothing is copied
twice. One lock guards all queues; a rank that waits is woken by whoever changes what it waits for. When a rank fails,
the first failure is kept and everybody is woken.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.errors import ArgumentError, ClosedError, CommunicationError, ShapeError
from dagexec.ops.families.communication.common_world import (
    DEFAULT_TIMEOUT,
    CommonWorld,
    Posted,
    Tag,
    register_transport,
)
from dagexec.platform.blocking import wait_until
from dagexec.platform.records import dataclass
from dagexec.platform.threads import ThreadWait, threads

Array = npt.NDArray[Any]


@dataclass(eq=False, slots=True)
class _Message:
    """An array on its way. `taken`: its receiver has read it."""

    array: Array
    tag: Tag
    taken: bool = False


@dataclass(frozen=True, slots=True)
class _Failure:
    """Which rank is to blame, and for what."""

    rank: int
    reason: str


class ThreadGroup:
    """What the ranks of one group share.

    Attributes:
        size: the number of ranks.
    """

    def __init__(self, size: int) -> None:
        """Raises ArgumentError for less than one rank."""
        if size < 1:
            raise ArgumentError(f"a group needs at least 1 rank, found {size}")
        self.size = size
        self._lock = threads().lock()
        self._queues: dict[tuple[int, int], deque[_Message]] = {}
        self._waits: dict[int, list[ThreadWait]] = {rank: [] for rank in range(size)}
        self._joined: set[int] = set()
        self._left: set[int] = set()
        self._failure: _Failure | None = None
        self._waited_for: dict[int, int] = {}  # by rank that waits

    def join(self, rank: int, timeout: float = DEFAULT_TIMEOUT) -> ThreadWorld:
        """The handle of `rank`. Raises ArgumentError when there is no such rank, or another has it."""
        world = ThreadWorld(self, rank, timeout)
        with self._lock:
            if rank in self._joined:
                raise ArgumentError(f"rank {rank} of this group of {self.size} has already joined")
            self._joined.add(rank)
        return world

    def fail(self, rank: int, reason: str) -> None:
        """Rank `rank` is to blame: all waits end. The first failure is the one that is told."""
        with self._lock:
            self._fail(rank, reason)

    def _fail(self, rank: int, reason: str) -> None:
        if self._failure is None:
            self._failure = _Failure(rank, reason)
        self._wake(*range(self.size))

    def leave(self, rank: int) -> None:
        """Rank `rank` communicates no more."""
        with self._lock:
            self._left.add(rank)
            self._wake(*range(self.size))

    def is_over_for(self, rank: int) -> bool:
        """True when `rank` has left, or the group has failed: it communicates here no more."""
        with self._lock:
            return self._failure is not None or rank in self._left

    def put(self, message: _Message, source: int, to: int) -> None:
        """Queue a message. Raises CommunicationError when the group has failed or `to` has left."""
        with self._lock:
            self._check(source, to)
            self._queues.setdefault((source, to), deque()).append(message)
            self._wake(to)

    def take(self, source: int, to: int, tag: Tag, timeout: float) -> _Message:
        """The next message from `source` for `to`; it stays the sender's until `done`. Raises CommunicationError."""
        queue = self._queues.setdefault((source, to), deque())
        self._wait(to, source, lambda: bool(queue), tag, timeout)
        return queue.popleft()

    def done(self, message: _Message, source: int, to: int) -> None:
        """`to` has read a message: `source` may change its array. Raises CommunicationError if it could have before."""
        with self._lock:
            if self._failure is not None:
                self._raise_failure(to)
            message.taken = True
            self._wake(source)

    def wait_taken(self, message: _Message, source: int, to: int, timeout: float) -> None:
        """Block rank `source` until `to` has read its message. Raises CommunicationError."""
        self._wait(source, to, lambda: message.taken, message.tag, timeout)

    def _wait(self, rank: int, other: int, ready: Callable[[], bool], tag: Tag, timeout: float) -> None:
        """Block `rank` until something that `other` does makes `ready()` true."""
        with self._lock:
            self._waited_for[rank] = other
            try:
                in_time = wait_until(
                    self._lock,
                    self._waits[rank],
                    lambda: ready() or self._failure is not None or other in self._left,
                    f"rank {rank} in {tag}",
                    timeout,
                )
                if not in_time:
                    self._blame_silence(rank, f"rank {rank} has waited {timeout:g} s in {tag}")
            finally:
                del self._waited_for[rank]
            if self._failure is not None or not ready():
                self._check(rank, other)

    def _blame_silence(self, rank: int, waited: str) -> None:
        """Blame the rank that `rank` waits for, directly or not: one that waits for nobody, if there is one."""
        silent = rank
        for _ in range(self.size):
            silent = self._waited_for.get(silent, silent)
        self._fail(silent, f"no message from it, and {waited}")

    def _check(self, rank: int, other: int) -> None:
        """Raise CommunicationError when `rank` waits in vain for `other`. The lock is held."""
        if self._failure is not None:
            self._raise_failure(rank)
        if other in self._left:
            raise CommunicationError(f"rank {rank}: rank {other} has left the group", rank=other)

    def _raise_failure(self, rank: int) -> None:
        failure = self._failure
        assert failure is not None
        raise CommunicationError(f"rank {rank}: rank {failure.rank} failed: {failure.reason}", rank=failure.rank)

    def _wake(self, *ranks: int) -> None:
        for rank in ranks:
            for told in self._waits[rank]:
                told.notify()


class _PostedMessage:
    """A message of `source` that `to` has not read yet."""

    __slots__ = ("_group", "_message", "_source", "_timeout", "_to")

    def __init__(self, group: ThreadGroup, message: _Message, source: int, to: int, timeout: float) -> None:
        self._group = group
        self._message = message
        self._source = source
        self._to = to
        self._timeout = timeout

    def wait(self) -> None:
        """Block until it is read."""
        self._group.wait_taken(self._message, self._source, self._to, self._timeout)


class ThreadWorld(CommonWorld):
    """A rank of a ThreadGroup, for one thread at a time."""

    def __init__(self, group: ThreadGroup, rank: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        """To be made by `ThreadGroup.join`."""
        super().__init__(rank, group.size, timeout)
        self._group = group
        self._clones = 0

    def _post(self, array: Array, to: int, tag: Tag) -> Posted:
        self._check_open()
        message = _Message(array, tag)
        self._group.put(message, self.rank, to)
        return _PostedMessage(self._group, message, self.rank, to, self.timeout)

    def _receive(self, out: Array, source: int, tag: Tag) -> None:
        self._read(out, source, tag, lambda array: np.copyto(out, array))

    def receive_sum(self, out: Array, source: int, tag: Tag) -> None:
        """Add the array of rank `source` where it is."""
        self._read(out, self._other(source), tag, lambda array: np.add(out, array, out=out))

    def _read(self, out: Array, source: int, tag: Tag, read: Callable[[Array], object]) -> None:
        self._check_open()
        message = self._group.take(source, self.rank, tag, self.timeout)
        if message.tag != tag:
            reason = f"rank {self.rank} is in {tag}, and rank {source} in {message.tag}"
            raise CommunicationError(
                f"{reason}: all ranks must call the same collectives in the same order", rank=source
            )
        sent = message.array
        if sent.shape != out.shape or sent.dtype != out.dtype:
            raise ShapeError(
                f"{tag}: rank {source} sends {sent.dtype} {sent.shape}, and rank {self.rank} expects "
                f"{out.dtype} {out.shape}"
            )
        read(sent)
        self._group.done(message, source, self.rank)

    def abort(self, reason: str) -> None:
        """End the waits of all ranks, and what they ask later."""
        self._group.fail(self.rank, reason)

    def clone(self) -> CommonWorld:
        """The ranks find each other by a name that only this group has."""
        self._check_open()
        self._clones += 1
        return join_by_name(f"{id(self._group)}/{self._clones}", self.rank, self.size, self.timeout)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._group.leave(self.rank)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"rank {self.rank} has closed its common world")


_named: weakref.WeakValueDictionary[str, ThreadGroup] = weakref.WeakValueDictionary()
_naming = threads().lock()


def join_by_name(name: str, rank: int, size: int, timeout: float = DEFAULT_TIMEOUT) -> ThreadWorld:
    """Join the group of this process called `name`, which exists as long as one of its ranks does.

    A rank that has left, or whose group has failed, begins a new one. Raises ArgumentError when it has another size,
    or `rank` has joined.
    """
    with _naming:
        group = _named.get(name)
        if group is None or group.is_over_for(rank):
            group = _named[name] = ThreadGroup(size)
    if group.size != size:
        raise ArgumentError(f"common world {name!r} has {group.size} ranks, found size={size}")
    return group.join(rank, timeout)


register_transport("threads", join_by_name)
