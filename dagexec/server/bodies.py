"""Bodies of requests as ASGI brings them, within limits: one piece of memory each, decompressed where asked for."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Self

import anyio.to_thread
import numpy as np

from dagexec.server.inference import RequestError
from dagexec.server.limits import Limits

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Fill = Callable[[memoryview], bool]
"""Has the rest of a body received in this memory, which is as long; False if it comes with messages."""

ALIGNMENT = 64
_ON_LOOP = 64 << 10  # bytes that are decompressed at once without asking a thread
_WINDOW_BITS = {b"gzip": zlib.MAX_WBITS | 16, b"deflate": zlib.MAX_WBITS}


class ClientGoneError(Exception):
    """The client closed the connection: nobody waits for an answer."""


class Held:
    """Memory that one request takes, counted with that of all others."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._bytes = 0

    def add(self, count: int) -> None:
        """Take more. Raises RequestError if all requests together have too much."""
        self._bodies.take(count)
        self._bytes += count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held_bytes -= self._bytes


class Bodies:
    """Memory for the bodies of all requests."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held_bytes = 0

    def take(self, count: int) -> None:
        """Count so many bytes more. Raises RequestError if they are too many."""
        if self.held_bytes + count > self._limits.total_body_bytes:
            raise RequestError(503, f"{self.held_bytes} bytes of other requests are being served", 1)
        self.held_bytes += count

    async def read(
        self,
        receive: Receive,
        held: Held,
        length: bytes | None,
        encoding: bytes | None = None,
        start: int = 0,
        fill: Fill | None = None,
    ) -> memoryview:
        """The whole body, decompressed, or else placed so that the byte `start` of it is aligned.

        `length` and `encoding` are its headers. What follows the first message is received in place
        by `fill`, if that is given. Raises RequestError, ClientGoneError.
        """
        if length is None:
            body = await self._read_chunks(receive, held)
        else:
            count = self._announced(length)
            held.add(count)
            body = await self._read_announced(receive, aligned(count, start), fill)
        return body if encoding is None else await self._decompressed(body, held, encoding)

    def _announced(self, length: bytes) -> int:
        count = int(length) if length.isdigit() and len(length) < 20 else -1
        if count < 0:
            raise RequestError(400, "bad Content-Length")
        if count > self._limits.body_bytes:
            raise self._too_large()
        return count

    async def _read_announced(self, receive: Receive, body: memoryview, fill: Fill | None) -> memoryview:
        count, place = body.nbytes, 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            if place + len(chunk) > count:
                raise RequestError(400, "the body is longer than Content-Length")
            body[place : place + len(chunk)] = chunk
            place += len(chunk)
            if not message.get("more_body", False):
                break
            if fill is not None and place < count and fill(body[place:]):
                place = count
        if place != count:
            raise RequestError(400, f"the body ends after {place} of {count} bytes")
        return body

    async def _read_chunks(self, receive: Receive, held: Held) -> memoryview:
        """A body whose length nobody announced."""
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            chunk = message.get("body", b"")
            if len(body) + len(chunk) > self._limits.body_bytes:
                raise self._too_large()
            held.add(len(chunk))
            body += chunk
            if not message.get("more_body", False):
                return memoryview(body)

    async def _decompressed(self, body: memoryview, held: Held, encoding: bytes) -> memoryview:
        if encoding == b"identity":
            return body
        bits = _WINDOW_BITS.get(encoding)
        if bits is None:
            raise RequestError(415, f"unknown Content-Encoding {encoding.decode('latin-1')!r:.80}; gzip, deflate are")
        if body.nbytes <= _ON_LOOP:
            found = self._inflated(body, bits)
        else:
            found = await anyio.to_thread.run_sync(self._inflated, body, bits)
        held.add(found.nbytes)
        return found

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the body has more than {self._limits.body_bytes} bytes")

    def _inflated(self, body: memoryview, bits: int) -> memoryview:
        machine = zlib.decompressobj(bits)
        try:
            found = machine.decompress(body, self._limits.body_bytes + 1)
        except zlib.error as error:
            raise RequestError(400, f"the body is not compressed as Content-Encoding says: {error}") from None
        if len(found) > self._limits.body_bytes:
            raise self._too_large()
        if not machine.eof or machine.unused_data:
            raise RequestError(400, "the compressed body does not end where it should")
        return memoryview(found)


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
