"""Bodies of requests as ASGI brings them, within limits: one piece of memory each, decompressed where asked for."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol, Self

import anyio.to_thread
import numpy as np

from dagexec.server.inference import RequestError
from dagexec.server.limits import Limits

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]

ALIGNMENT = 64
_ON_LOOP = 64 << 10  # bytes that are decompressed at once without asking a thread
_PART = 1 << 20  # bytes of a body that must have come before there is memory for more; that a thread decompresses
_DROPPED = bytearray(64 << 10)  # where the rest of a refused body goes
_WINDOW_BITS = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}


class ClientGoneError(Exception):
    """The client closed the connection: nobody waits for an answer."""


class Sender(Protocol):
    """The client of a request, as a transport knows it."""

    def fill(self, incoming: IncomingBody) -> bool:
        """Receive the rest of a body there; False if it is there, or comes with ASGI's messages."""

    def give_way(self) -> bool:
        """Close the connection of a client that is slow in sending or reading; False if it is not."""


class Held:
    """Memory that one request takes, counted with that of all others."""

    def __init__(self, bodies: Bodies, sender: Sender | None = None) -> None:
        """`sender` may lose its memory to others when it is slow."""
        self._bodies = bodies
        self._bytes = 0
        self.sender = sender

    def add(self, count: int) -> None:
        """Take more. Raises RequestError if all requests together have too much."""
        self._bodies.take(count, self)
        self._bytes += count

    def give_back(self) -> None:
        """Take nothing any more."""
        self._bodies.held_bytes -= self._bytes
        self._bytes = 0

    def __enter__(self) -> Self:
        self._bodies.holders[self] = None
        return self

    def __exit__(self, *_: object) -> None:
        self.give_back()
        del self._bodies.holders[self]


class Bodies:
    """Memory for the bodies of all requests, counted as they are received: what is announced costs nothing.

    Attributes:
        held_bytes: that requests have now.
        holders: the requests, the oldest first.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held_bytes = 0
        self.holders: dict[Held, None] = {}

    def take(self, count: int, asking: Held) -> None:
        """Count so many bytes more, in place of those of other clients that are slow to send or to read, if need be.

        Raises RequestError if they are too many.
        """
        most = self._limits.total_body_bytes - count
        if self.held_bytes > most:
            self._make_room(most, asking)
        if self.held_bytes > most:
            raise RequestError(503, f"{self.held_bytes} bytes of other requests are being served", 1)
        self.held_bytes += count

    def _make_room(self, most: int, asking: Held) -> None:
        for held in list(self.holders):
            if self.held_bytes <= most:
                return
            if held is not asking and held.sender is not None and held.sender.give_way():
                held.give_back()

    async def read(
        self,
        receive: Receive,
        held: Held,
        length: bytes | None,
        encoding: bytes | None = None,
        start: int = 0,
    ) -> memoryview:
        """The whole body, decompressed, or else placed so that the byte `start` of it is aligned.

        `length` and `encoding` are its headers. What follows the first message is received in place where `held` knows
        the sender. Raises RequestError, ClientGoneError.
        """
        if length is None:
            body = await self._read_chunks(receive, held)
        else:
            body = await self._read_announced(receive, IncomingBody(held, self._announced(length), start))
        return body if encoding is None else await self._decompressed(body, held, encoding)

    def _announced(self, length: bytes) -> int:
        count = int(length) if length.isdigit() and len(length) < 20 else -1
        if count < 0:
            raise RequestError(400, "bad Content-Length")
        if count > self._limits.body_bytes:
            raise self._too_large()
        return count

    async def _read_announced(self, receive: Receive, body: IncomingBody) -> memoryview:
        more = True
        while more:
            chunk, more = await _next_chunk(receive)
            body.put(chunk)
            if body.error is not None:
                raise body.error
            if more and body.left and body.held.sender is not None:
                body.held.sender.fill(body)
        if body.left:
            raise RequestError(400, f"the body ends after {body.received} of {body.count} bytes")
        return body.memory

    async def _read_chunks(self, receive: Receive, held: Held) -> memoryview:
        """A body whose length nobody announced."""
        body = bytearray()
        more = True
        while more:
            chunk, more = await _next_chunk(receive)
            if len(body) + len(chunk) > self._limits.body_bytes:
                raise self._too_large()
            held.add(len(chunk))
            body += chunk
        return memoryview(body)

    async def _decompressed(self, body: memoryview, held: Held, encoding: bytes) -> memoryview:
        """In pieces, so that none is there before it is counted."""
        if encoding == b"identity":
            return body
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise RequestError(415, f"unknown Content-Encoding {encoding.decode('latin-1')!r:.80}; gzip, deflate are")
        found = bytearray()
        pieces = _inflated(body, bits, _ON_LOOP if body.nbytes <= _ON_LOOP else _PART)
        on_loop = body.nbytes <= _ON_LOOP
        while piece := next(pieces, b"") if on_loop else await anyio.to_thread.run_sync(next, pieces, b""):
            on_loop = False
            if len(found) + len(piece) > self._limits.body_bytes:
                raise self._too_large()
            held.add(len(piece))
            found += piece
        return memoryview(found)

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the body has more than {self._limits.body_bytes} bytes")


class IncomingBody:
    """A body of `count` bytes, as they come; there is memory for the first part, then for all of it.

    What comes after an error is dropped.
    """

    def __init__(self, held: Held, count: int, start: int) -> None:
        """Byte `start` is aligned."""
        self.held = held
        self.count = count
        self.received = 0
        self.error: RequestError | None = None
        self.memory = aligned(min(count, _PART), start)
        self._start = start

    @property
    def left(self) -> int:
        """Bytes that are still to come."""
        return self.count - self.received

    @property
    def refused(self) -> bool:
        """What comes is dropped."""
        return self.error is not None

    def room(self) -> memoryview:
        """Where the next bytes go."""
        if self.error is None and self.received == self.memory.nbytes:
            try:
                whole = aligned(self.count, self._start)
            except MemoryError:
                self._refuse(RequestError(503, f"there is no memory for {self.count} bytes", 1))
            else:
                whole[: self.received] = self.memory
                self.memory = whole
        return memoryview(_DROPPED)[: self.left] if self.error is not None else self.memory[self.received :]

    def took(self, nbytes: int) -> None:
        """So many more are there."""
        self.received += nbytes
        if self.error is None:
            try:
                self.held.add(nbytes)
            except RequestError as error:
                self._refuse(error)

    def put(self, chunk: bytes) -> None:
        """What came as a message. Raises RequestError if it is more than was announced."""
        if len(chunk) > self.left:
            raise RequestError(400, "the body is longer than Content-Length")
        left = memoryview(chunk)
        while left and self.error is None:
            room = self.room()[: len(left)]
            room[:] = left[: len(room)]
            left = left[len(room) :]
            self.took(len(room))

    def _refuse(self, error: RequestError) -> None:
        self.error = error
        self.memory = memoryview(b"")
        self.held.give_back()


async def _next_chunk(receive: Receive) -> tuple[bytes, bool]:
    """A part of a body, and whether there is more. Raises ClientGoneError."""
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), message.get("more_body", False)


def _inflated(body: memoryview, bits: int, most: int) -> Iterator[bytes]:
    """Decompress it, in pieces of at most `most` bytes. Raises RequestError."""
    machine = zlib.decompressobj(bits)
    place = 0
    while place < body.nbytes and not machine.eof:
        left: bytes | memoryview = body[place : place + _PART]
        place += _PART
        piece = b""
        while (left or piece) and not machine.eof:
            try:
                piece = machine.decompress(left, most)
            except zlib.error as error:
                raise RequestError(400, f"the body is not compressed as Content-Encoding says: {error}") from None
            left = machine.unconsumed_tail
            if piece:
                yield piece
    if not machine.eof or machine.unused_data or place < body.nbytes:
        raise RequestError(400, "the compressed body does not end where it should")


def compressed(parts: list[bytes | memoryview], encoding: bytes) -> bytes:
    """The parts of an answer, compressed fast rather than small."""
    machine = zlib.compressobj(1, wbits=_WINDOW_BITS[encoding])
    return b"".join((*(machine.compress(part) for part in parts), machine.flush()))


def accepted_encoding(header: bytes | None) -> bytes | None:
    """The compression that a client asks for: the only one that it names. Who names several does not mind none."""
    return header if header in _WINDOW_BITS else None


def aligned(count: int, start: int) -> memoryview:
    """Memory of `count` bytes in which byte `start` is aligned."""
    room = np.empty(count + ALIGNMENT, np.uint8)
    first = -(room.ctypes.data + start) % ALIGNMENT
    return room[first : first + count].data
