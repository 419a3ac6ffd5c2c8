"""CommonWorld: one rank's handle on a group of ranks, and what a transport has to offer.

A transport moves packed host arrays between two ranks, tells all ranks when one fails, and ends every wait: with the
message, with an error that names the rank to blame, or after the timeout. `collectives` does the rest with that.

Every message has a tag: the number of the collective it belongs to and its name. Ranks that call different collectives,
or in another order, get an error instead of each other's arrays.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dagexec.errors import ArgumentError, ClosedError, ShapeError
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

DEFAULT_TIMEOUT = 60.0
"""Seconds that a rank waits for another, unless something else is requested."""


class Tag(NamedTuple):
    """What a message belongs to: the number of the collective, the same on all ranks, and its name."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} {self.number}"


class Posted(Protocol):
    """A message under way."""

    def wait(self) -> None:
        """Block until the array may be changed again. Raises CommunicationError."""


@dataclass(frozen=True, slots=True)
class CommunicationStatistics:
    """What a rank has done so far. Bytes are those of the arrays."""

    collectives: int
    messages_sent: int
    bytes_sent: int


class CommonWorld(ABC):
    """One rank of a group. A single thread uses it at a time.

    After a failure no rank of the group can communicate any more; a new group is made then.

    Attributes:
        rank: this one's number, from 0.
        size: how many there are.
        timeout: seconds that a wait for another rank may take.
        closed: `close` was called.
    """

    def __init__(self, rank: int, size: int, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Raises ArgumentError for a rank that is not below the size, and for a timeout that is not positive."""
        if not 0 <= rank < size:
            raise ArgumentError(f"a common world of {size} ranks has ranks 0 to {size - 1}, found {rank}")
        if not timeout > 0 or math.isinf(timeout):
            raise ArgumentError(f"the timeout of a common world must be positive and finite, found {timeout}")
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.closed = False
        self._collectives = 0
        self._messages = 0
        self._bytes = 0
        self._scratch = np.empty(0, np.uint8)

    def post(self, array: Array, to: int, tag: Tag) -> Posted:
        """Begin to send `array`, which stays as it is until the message's `wait` returns.

        Raises CommunicationError when the group has failed.
        """
        self._messages += 1
        self._bytes += array.nbytes
        return self._post(_packed(array), self._other(to), tag)

    def send(self, array: Array, to: int, tag: Tag) -> None:
        """Send `array` to rank `to`; when this returns, it may be changed. Raises CommunicationError."""
        self.post(array, to, tag).wait()

    def receive(self, out: Array, source: int, tag: Tag) -> None:
        """Fill `out` with the next array from rank `source`, which must have its shape and dtype.

        Raises CommunicationError: a rank failed or left, `source` does not answer, or sends for another collective.
        ShapeError when what it sends does not fit.
        """
        self._receive(_packed(out), self._other(source), tag)

    def receive_sum(self, out: Array, source: int, tag: Tag) -> None:
        """Add the next array from rank `source` to `out`: out + received, element by element. Raises as `receive`."""
        received = self.scratch(out)
        self.receive(received, source, tag)
        np.add(out, received, out=out)

    def exchange(self, outgoing: Array, to: int, incoming: Array, source: int, tag: Tag) -> None:
        """Send to one rank while receiving from another, which no order of ranks can block. Raises as `receive`."""
        posted = self.post(outgoing, to, tag)
        self.receive(incoming, source, tag)
        posted.wait()

    @abstractmethod
    def _post(self, array: Array, to: int, tag: Tag) -> Posted:
        """`post`, for a packed array and another rank."""

    @abstractmethod
    def _receive(self, out: Array, source: int, tag: Tag) -> None:
        """`receive`, for a packed array and another rank."""

    @abstractmethod
    def abort(self, reason: str) -> None:
        """Tell all ranks that this one has failed: their waits, and what they ask later, end with `reason`."""

    @abstractmethod
    def clone(self) -> CommonWorld:
        """A group of the same ranks, whose failure is its own. All ranks must call this, in the same order."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Ranks that wait for this one get an error that says so. Idempotent."""

    def scratch(self, like: Array) -> Array:
        """Memory of this rank of the shape and dtype of `like`; the next call may give the same."""
        if self._scratch.nbytes < like.nbytes:
            self._scratch = np.empty(like.nbytes, np.uint8)
        return self._scratch[: like.nbytes].view(like.dtype).reshape(like.shape)

    @contextmanager
    def collective(self, what: str) -> Iterator[Tag]:
        """Within it this rank takes part in the next collective, under the tag given. What is raised ends the group."""
        with self._in(Tag(self._collectives, what)) as tag:
            self._collectives += 1
            yield tag

    def message(self, number: int) -> AbstractContextManager[Tag]:
        """Within it this rank sends to another or receives, apart from collectives. What is raised ends the group.

        Both must give the same number.
        """
        return self._in(Tag(number, "message"))

    @contextmanager
    def _in(self, tag: Tag) -> Iterator[Tag]:
        if self.closed:
            raise ClosedError(f"rank {self.rank} has closed its common world; {tag.what} is not possible")
        try:
            yield tag
        except BaseException as error:
            self.abort(f"{tag}: {type(error).__name__}: {error}")
            raise

    def statistics(self) -> CommunicationStatistics:
        """Counts at this moment."""
        return CommunicationStatistics(self._collectives, self._messages, self._bytes)

    def _other(self, rank: int) -> int:
        if rank == self.rank or not 0 <= rank < self.size:
            raise ArgumentError(f"rank {self.rank} of {self.size} cannot exchange messages with rank {rank}")
        return rank


def _packed(array: Array) -> Array:
    if not array.flags.c_contiguous:
        raise ShapeError(f"only packed arrays can be sent and received, found strides {array.strides} of {array.shape}")
    return array


Transport = Callable[[str, int, int, float], CommonWorld]
"""`transport(name, rank, size, timeout)` makes a rank's handle; ranks that give one name find each other."""

_transports: dict[str, Transport] = {}


def register_transport(kind: str, transport: Transport) -> None:
    """Make `transport` the one that CreateCommonWorld's argument `transport` calls `kind`."""
    _transports[kind] = transport


def connect(kind: str, name: str, rank: int, size: int, timeout: float = DEFAULT_TIMEOUT) -> CommonWorld:
    """Join the group `name` by the transport `kind`. Raises ArgumentError for an unknown one and bad numbers."""
    transport = _transports.get(kind)
    if transport is None:
        raise ArgumentError(f"transport {kind!r} is unknown; expected one of {sorted(_transports)}")
    return transport(name, rank, size, timeout)
