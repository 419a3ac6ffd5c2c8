"""The transport between processes: MPI, through mpi4py (extra `mpi`).

An array goes as two messages: a header with what it belongs to, its dtype and shape, and its bytes. Notices that a rank
has failed or left go under a tag of their own. Whoever waits looks for its message and for notices in turns and gives
up after the timeout: MPI itself has no wait with an end. All calls into MPI are short, and one lock guards them, so a
library with MPI_THREAD_SERIALIZED will do.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from dagexec.errors import ArgumentError, ClosedError, CommunicationError, DagexecError, ShapeError
from dagexec.ops.families.communication.common_world import (
    DEFAULT_TIMEOUT,
    CommonWorld,
    Posted,
    Tag,
    register_transport,
)
from dagexec.ops.families.communication.mpi_startup import limited_start
from dagexec.platform.extras import install_command
from dagexec.platform.threads import threads

if TYPE_CHECKING:
    from mpi4py import MPI

Array = npt.NDArray[Any]

_HEADERS, _BYTES, _NOTICES = 1, 2, 3  # tags of MPI
_HEADER_BYTES = 512
_MAX_BYTES = 1 << 30  # of one message: MPI counts in 32 bits
_SPINS = 200
"""How often a wait only yields the processor before it begins to sleep between its looks."""
_MAX_PAUSE = 1e-3
"""Seconds between two looks of a long wait."""
_ANSWER_SECONDS = 0.5
"""How long a rank that waits itself may take to say for whom."""

_calls = threads().lock()


class MPIWorld(CommonWorld):
    """A rank of a communicator of MPI."""

    def __init__(self, communicator: MPI.Comm, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Use `communicator`, which nobody else may."""
        super().__init__(communicator.Get_rank(), communicator.Get_size(), timeout)
        self._communicator = communicator
        self._failure: tuple[int, str] | None = None
        self._left: set[int] = set()
        self._header = np.zeros(_HEADER_BYTES, np.uint8)  # kept: a receive that was given up may still write to it
        self._waits_for = -1
        self._answers: dict[int, int] = {}  # by rank that was asked, whom it waits for
        self._notices: list[tuple[MPI.Request, Array]] = []  # kept until they are gone

    def _post(self, array: Array, to: int, tag: Tag) -> Posted:
        self._look_for_notices(to)
        header = _encoded({"number": tag.number, "what": tag.what, "dtype": array.dtype.str, "shape": array.shape})
        with _calls:
            requests = [self._communicator.Isend(header, to, _HEADERS)]
            requests += [self._communicator.Isend(part, to, _BYTES) for part in _parts(array)]
        return _PostedMessage(self, requests, (header, array), to, tag)

    def _receive(self, out: Array, source: int, tag: Tag) -> None:
        header = self._header
        header.fill(0)
        with _calls:
            request = self._communicator.Irecv(header, source, _HEADERS)
        self.wait_for(request, source, tag)
        sent = _decoded(header)
        other = Tag(sent["number"], sent["what"])
        if other != tag:
            raise CommunicationError(
                f"rank {self.rank} is in {tag}, and rank {source} in {other}: all ranks must call the same collectives "
                f"in one order",
                rank=source,
            )
        if (sent["dtype"], tuple(sent["shape"])) != (out.dtype.str, out.shape):
            raise ShapeError(
                f"{tag}: rank {source} sends {sent['dtype']} {tuple(sent['shape'])}, and rank {self.rank} expects "
                f"{out.dtype.str} {out.shape}"
            )
        for part in _parts(out):
            with _calls:
                request = self._communicator.Irecv(part, source, _BYTES)
            self.wait_for(request, source, tag)

    def wait_for(self, request: MPI.Request, other: int, tag: Tag) -> None:
        """Block until `request`, to or from rank `other`, is done. Raises CommunicationError."""
        self._waits_for = other
        try:
            if self._wait_until(lambda: self._is_done(request), other, self.timeout):
                return
            silent = self._silent(other)
            raise CommunicationError(
                f"rank {self.rank}: rank {silent} does not answer; waited {self.timeout:g} s in {tag}", rank=silent
            )
        except CommunicationError:
            self._cancel(request)
            raise
        finally:
            self._waits_for = -1

    def _wait_until(self, ready: Callable[[], bool], other: int, seconds: float) -> bool:
        """Look for notices until `ready()`; False when it is not after so many seconds."""
        deadline = time.monotonic() + seconds
        looks = 0
        while not ready():
            self._look_for_notices(other)
            if time.monotonic() > deadline:
                return False
            looks += 1
            if looks < _SPINS:
                os.sched_yield()
            else:
                time.sleep(min(_MAX_PAUSE, (looks - _SPINS) * 1e-5))
        return True

    def _silent(self, other: int) -> int:
        """The rank to blame for a wait in vain for `other`: the one that does not say whom it waits for itself."""
        asked = other
        for _ in range(self.size):
            self._answers.clear()
            self._notify({"kind": "question"}, asked)
            if not self._wait_until(lambda rank=asked: rank in self._answers, other, _ANSWER_SECONDS):  # type: ignore[misc]
                break
            following = self._answers[asked]
            if following in (-1, self.rank):
                break
            asked = following
        return asked

    def abort(self, reason: str) -> None:
        """Tell every rank; what they do with this group ends from now on."""
        if self._failure is None:
            self._failure = (self.rank, reason)
            self._notify_all({"kind": "failed", "reason": reason})

    def clone(self) -> CommonWorld:
        """A duplicate of the communicator."""
        return MPIWorld(self._communicator.Dup(), self.timeout)

    def close(self) -> None:
        """Tell every rank that this one has left."""
        if not self.closed:
            self.closed = True
            if self._failure is None:
                self._notify_all({"kind": "left"})

    @staticmethod
    def _is_done(request: MPI.Request) -> bool:
        with _calls:
            return bool(request.Test())

    @staticmethod
    def _cancel(request: MPI.Request) -> None:
        """Give up a request, if it is one to receive: what is being sent cannot be called back."""
        with _calls:
            request.Cancel()
            request.Free()

    def _notify_all(self, content: dict[str, object]) -> None:
        for rank in range(self.size):
            if rank != self.rank:
                self._notify(content, rank)

    def _notify(self, content: dict[str, object], rank: int) -> None:
        notice = _encoded(content)
        with _calls:
            self._notices.append((self._communicator.Isend(notice, rank, _NOTICES), notice))

    def _look_for_notices(self, other: int) -> None:
        """Raise CommunicationError when the group has failed, or rank `other` has left it."""
        if self.closed:
            raise ClosedError(f"rank {self.rank} has closed its common world")
        while (notice := self._next_notice()) is not None:
            found, source = notice
            if found["kind"] == "left":
                self._left.add(source)
            elif found["kind"] == "question":
                self._notify({"kind": "answer", "waits_for": self._waits_for}, source)
            elif found["kind"] == "answer":
                self._answers[source] = found["waits_for"]
            elif self._failure is None:
                self._failure = (source, found["reason"])
        if self._failure is not None:
            rank, reason = self._failure
            raise CommunicationError(f"rank {self.rank}: rank {rank} failed: {reason}", rank=rank)
        if other in self._left:
            raise CommunicationError(f"rank {self.rank}: rank {other} has left the group", rank=other)

    def _next_notice(self) -> tuple[dict[str, Any], int] | None:
        """A notice that has arrived, and the rank that it is from."""
        from mpi4py import MPI

        with _calls:
            if not self._communicator.Iprobe(MPI.ANY_SOURCE, _NOTICES):
                return None
            notice, status = np.zeros(_HEADER_BYTES, np.uint8), MPI.Status()
            self._communicator.Recv(notice, MPI.ANY_SOURCE, _NOTICES, status)
        return _decoded(notice), status.Get_source()


class _PostedMessage:
    """A message of an MPIWorld on its way, with the memory that MPI reads."""

    __slots__ = ("_memory", "_other", "_requests", "_tag", "_world")

    def __init__(
        self, world: MPIWorld, requests: list[MPI.Request], memory: tuple[Array, Array], other: int, tag: Tag
    ) -> None:
        self._world = world
        self._requests = requests
        self._memory = memory
        self._other = other
        self._tag = tag

    def wait(self) -> None:
        """Block until MPI has read the array."""
        for request in self._requests:
            self._world.wait_for(request, self._other, self._tag)


def _parts(array: Array) -> list[Array]:
    """The bytes of a packed array in pieces that MPI can count; none of an empty one."""
    flat = array.reshape(-1).view(np.uint8)
    return [flat[first : first + _MAX_BYTES] for first in range(0, flat.size, _MAX_BYTES)]


def _encoded(content: dict[str, object]) -> Array:
    """A message of `_HEADER_BYTES` bytes. A text that is too long is cut."""
    text = json.dumps(content).encode()
    if len(text) > _HEADER_BYTES:
        text = json.dumps({**content, "reason": str(content.get("reason", ""))[: _HEADER_BYTES // 6]}).encode()
    message = np.zeros(_HEADER_BYTES, np.uint8)
    message[: len(text)] = np.frombuffer(text, np.uint8)
    return message


def _decoded(message: Array) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message.tobytes().rstrip(b"\0"))
    return found


def require_mpi() -> Any:
    """The module `mpi4py.MPI`. Raises DagexecError where it, or an MPI library, is not there or serves one thread."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise DagexecError(f"MPI is not available ({error}); install it with: {install_command('mpi')}") from None
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise DagexecError("this MPI was started for one thread only; MPI_THREAD_SERIALIZED or more is needed")
    return MPI


def join_mpi(name: str, rank: int, size: int, timeout: float = DEFAULT_TIMEOUT) -> MPIWorld:
    """Join a new communicator of all processes that mpiexec started; all of them must call this.

    A rank that waits too long for others to start is ended, see `mpi_startup`.
    Negative `rank` and `size` are those that MPI gives. Raises DagexecError without MPI and ArgumentError for others.
    """
    with limited_start(timeout):
        own = require_mpi().COMM_WORLD.Dup()
    found = (own.Get_rank(), own.Get_size())
    for what, asked, given in zip(("rank", "size"), (rank, size), found, strict=True):
        if asked not in (-1, given):
            raise ArgumentError(f"common world {name!r}: {what} {asked} was requested, but mpiexec started {given}")
    return MPIWorld(own, timeout)


register_transport("mpi", join_mpi)
