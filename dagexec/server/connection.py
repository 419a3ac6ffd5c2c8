"""Connections of HTTP with limits that uvicorn does not have: bytes of headers, seconds for each part of a request.

What cannot be understood is answered as the protocol says, too: JSON with an `error`. A connection ends without a
reset: the client reads its last answer, whatever it has sent meanwhile. Where there are too many, one whose client
keeps the server waiting gives its place to the next.

An application has large bodies received where it wants them, without copies, is called when the client has gone,
without a task that waits for that, and sends small answers with one system call (`exchange_of`).
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Literal

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dagexec.server.bodies import IncomingBody
from dagexec.server.limits import Limits

Clock = Callable[[], float]

_EXTENSION = "dagexec.exchange"
_FIRST_READ = 64 << 10  # bytes that a connection reads at once, when it does not know yet where to
_SMALL = 64 << 10  # bytes of an answer that are sent with its head, by one system call

PATIENCE_SECONDS = 1.0
"""After which a client counts as slow that is to send a body, or to read; what it sends at `FAIR_PACE` renews them."""

FAIR_PACE = 64 << 10
"""Bytes a second."""

LINGER_SECONDS = 1.0
"""How long what a client still sends is read and dropped after its last answer: a close would take that from it."""


class Connections:
    """What the connections of one server have in common.

    Attributes:
        limits: of each of them, and how many there may be.
        draining: each ends with the answer to what it has received.
        awaited: those whose clients the server waits for, the longest first.
        error_answered: is told the status of each answer that is an error.
    """

    def __init__(self, limits: Limits, error_answered: Callable[[int], object] = lambda status: None) -> None:
        self.limits = limits
        self.draining = False
        self.awaited: dict[Connection, None] = {}
        self.error_answered = error_answered

    def make_room(self) -> bool:
        """Close the connection whose client has kept the server waiting for the longest; False where none does."""
        slow = next((one for one in self.awaited if one.is_slow()), None)
        if slow is not None:
            slow.give_way()
        return slow is not None


class Connection(HttpToolsProtocol):
    """One connection of a client.

    Attributes:
        common: what it shares with the others of its server.
        deadline: when the client must have sent, or read, what is awaited of it.
        when_gone: called when the client has closed the connection; set by what serves a request, for as long.
    """

    common = Connections(Limits())

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._clock: Clock = self.loop.time
        self._header_bytes = 0  # of a request whose headers are not complete
        self._receives_body = False
        self._refusal = b""  # of the next request, to be written behind the answers to those before
        self._ended = False  # nothing more is written
        self._waits_for: Literal["", "headers", "body", "reading", "end"] = ""
        self._patience = math.inf  # until when a client that sends or reads is not slow
        self.deadline = math.inf
        self.when_gone: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a client when there are too many, and the server waits for none of them."""
        super().connection_made(transport)
        # asyncio does so only for sockets that name TCP; an answer's second part would wait 40 ms for an acknowledgment
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        if hasattr(transport, "max_size"):  # of one read, as asyncio has it; the rest of a large body is read in place
            transport.max_size = _FIRST_READ
        most = self.common.limits.connections
        if len(self.connections) > most and not self.common.make_room():
            self._refuse(503, f"{most} connections are open already", {"Retry-After": "1"})
            transport.close()
        else:
            self._await_client()

    def data_received(self, data: bytes) -> None:
        """Read on, unless the headers are too long."""
        if self._is_over():
            return
        if self._receives_body:
            self._be_patient(len(data))
        else:
            self._header_bytes += len(data)
            if self._header_bytes == len(data):
                self._await_client()
        super().data_received(data)
        if self._header_bytes > self.common.limits.header_bytes and not self._receives_body:
            self._refuse_headers()

    def on_headers_complete(self) -> None:
        """Serve the request, whose body may follow."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._header_bytes = 0
        if self._is_over():
            return
        if size > self.common.limits.header_bytes:
            self._refuse_headers()
            return
        self._receives_body = True
        super().on_headers_complete()
        self.scope["extensions"] = {_EXTENSION: Exchange(self, self.cycle)}  # type: ignore[dict-item]
        self._await_client()

    def on_body(self, body: bytes) -> None:
        """Keep it, unless the request has been refused."""
        if self._is_over():
            return
        cycle = self.cycle
        if cycle.body or cycle.response_complete:
            cycle.body = bytearray(cycle.body)
            super().on_body(body)
        else:  # the application is about to take it: no copy, and no pause in reading
            cycle.body = body  # type: ignore[assignment]
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        """All of a request is there, and the client owes nothing."""
        if self._is_over():
            return
        self._receives_body = False
        super().on_message_complete()
        self._await_client()

    def filled(self, nbytes: int, incoming: IncomingBody) -> None:
        """So many bytes of a body are there that is received in place; with the last of them, this is the protocol."""
        self._be_patient(nbytes)
        if incoming.refused:
            self.cycle.message_event.set()
        if incoming.left:
            return
        self.transport.set_protocol(self)
        self.parser = httptools.HttpRequestParser(self)  # the old one waits for the body still
        self.on_message_complete()

    def on_response_complete(self) -> None:
        """Serve the next request, or wait for it."""
        if self._ended:
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal:
            self._write_refusal()
        self._await_client()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell what serves a request."""
        self.common.awaited.pop(self, None)
        super().connection_lost(exc)
        if self.when_gone is not None:
            self.when_gone()

    def pause_writing(self) -> None:
        """The client has to read before more is written."""
        super().pause_writing()
        self._await_client()

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self._await_client()

    def ends_with_this_answer(self, cycle: RequestResponseCycle) -> bool:
        """The client wants it, or the server drains and has received no request behind it."""
        return not cycle.keep_alive or (self.common.draining and not self.pipeline and not self._refusal)

    def end(self) -> None:
        """Write nothing more. What the client sends is dropped until it has closed the connection, or for a while."""
        if self._ended or self.transport.is_closing():
            return
        self._ended = True
        for cycle in (self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()
        self.pipeline.clear()
        self.transport.set_protocol(self)  # not the body that it may be receiving
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:  # TLS has no half of a connection
            self.transport.close()
        self._await_client()

    def shutdown(self) -> None:
        """The server ends: so does this, unless a request has been received, or a body is."""
        if not (self._is_serving() or self._receives_body):
            self.end()

    def check(self, now: float) -> None:
        """Close the connection of a client that is too slow; to be called now and then."""
        if now < self.deadline:
            return
        if self._waits_for == "end":
            unread = self.transport.get_write_buffer_size() > 0
            if not unread or now >= self.deadline + self.common.limits.body_seconds:
                self.transport.abort()
        elif self._waits_for == "reading":
            self.transport.abort()
        elif self._waits_for == "headers" and self.cycle is not None and not self._header_bytes:
            self.end()
        else:
            self._refuse(408, f"the {self._waits_for} of the request did not come in time")

    def is_slow(self) -> bool:
        """The server waits for the client, and not because it receives or reads something large at a fair pace."""
        return self._waits_for in ("headers", "end") or self._clock() > self._patience

    def give_way(self) -> None:
        """Close a connection that is slow, as others need its place or its memory."""
        if self._waits_for == "body" or (self._waits_for == "headers" and self._header_bytes):
            self._refuse(408, f"the {self._waits_for} of the request came too slowly, and others wait for its place")
            self.transport.close()
        else:
            self.transport.abort()
        self.common.awaited.pop(self, None)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(400, msg)

    def _is_over(self) -> bool:
        """What comes is dropped."""
        return self._ended or bool(self._refusal) or self.transport.is_closing()

    def _is_serving(self) -> bool:
        """A request has been received that is not answered."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and bool(self.pipeline or not cycle.more_body)

    def _await_client(self) -> None:
        """Find what the server waits for, from now on; nothing while it serves a request itself."""
        limits, now = self.common.limits, self._clock()
        self._patience = math.inf
        if self._ended:
            self._waits_for, self.deadline = "end", now + LINGER_SECONDS
        elif self.flow.write_paused:
            self._waits_for, self.deadline, self._patience = (
                "reading",
                now + limits.body_seconds,
                now + PATIENCE_SECONDS,
            )
        elif self._is_serving():
            self._waits_for, self.deadline = "", math.inf
        elif self._receives_body:
            self._waits_for, self.deadline, self._patience = "body", now + limits.body_seconds, now + PATIENCE_SECONDS
        else:
            seconds = limits.header_seconds if self._header_bytes else limits.idle_seconds
            self._waits_for, self.deadline = "headers", now + seconds
        self.common.awaited.pop(self, None)
        if self._waits_for and not self.transport.is_closing():
            self.common.awaited[self] = None

    def _be_patient(self, nbytes: int) -> None:
        """So many bytes of a body came."""
        now = self._clock()
        self._patience = min(now + PATIENCE_SECONDS, max(self._patience, now) + nbytes / FAIR_PACE)

    def _refuse_headers(self) -> None:
        self._refuse(431, f"the headers have more than {self.common.limits.header_bytes} bytes")

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Answer what is being received, behind the answers to what has been, and end; a begun answer is cut off."""
        if self._is_over():
            return
        self.common.error_answered(status)
        body = json.dumps({"error": message}).encode()
        fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        start = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}Connection: close\r\n\r\n"
        self._refusal = start.encode() + body
        if not self._is_serving():
            self._write_refusal()

    def _write_refusal(self) -> None:
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(self._refusal)
        self.end()


class _Filling(asyncio.BufferedProtocol):
    """Stands in for a connection while a body is received."""

    def __init__(self, connection: Connection, incoming: IncomingBody) -> None:
        self._connection = connection
        self._incoming = incoming

    def get_buffer(self, sizehint: int) -> memoryview:
        """No more than the body, so that a request behind it is parsed."""
        return self._incoming.room()

    def buffer_updated(self, nbytes: int) -> None:
        """So much more is there."""
        self._incoming.took(nbytes)
        self._connection.filled(nbytes, self._incoming)

    def pause_writing(self) -> None:
        """For the connection."""
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        """For the connection."""
        self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """For the connection."""
        self._connection.connection_lost(exc)


class Exchange:
    """One request and its answer, for an application that knows of it."""

    def __init__(self, connection: Connection, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self._is_last = False

    def fill(self, incoming: IncomingBody) -> bool:
        """Receive the rest of the body there; False if it is there, or comes with ASGI's messages.

        To be called when all that came has been taken.
        """
        connection, cycle = self._connection, self._cycle
        if connection.cycle is not cycle or not cycle.more_body or cycle.body or cycle.disconnected:
            return False
        if connection.transport.is_closing():
            return False
        connection.transport.set_protocol(_Filling(connection, incoming))
        return True

    def give_way(self) -> bool:
        """Close the connection of a client that is slow in sending or reading; False if it is not."""
        slow = self._connection.is_slow()
        if slow:
            self._connection.give_way()
        return slow

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Have `call` called when the client closes the connection; None: not any more. For the request in service."""
        self._connection.when_gone = call
        if call is not None and self._cycle.disconnected:
            call()

    async def answer(
        self, status: int, headers: Sequence[tuple[bytes, bytes]], parts: Sequence[bytes | memoryview]
    ) -> None:
        """Send a whole answer, in place of ASGI's messages. `headers` have its length, and `parts` so many bytes."""
        if not await self._client_reads():  # answers to requests before this one
            return
        head = self._head(status, headers)
        small = sum(map(len, parts)) <= _SMALL
        self._connection.transport.write(b"".join([head, *parts]) if small else head)
        for part in [] if small else parts:
            if not await self._client_reads():
                return
            self._connection.transport.write(part)
        self._complete()

    async def stream(self, headers: Sequence[tuple[bytes, bytes]], parts: AsyncIterable[bytes]) -> None:
        """Send an answer in parts as they come, the first one with its head: until then it may become another one."""
        chunked = self._cycle.scope["http_version"] != "1.0"
        head = b""
        async for part in parts:
            if not await self._client_reads():
                return
            if not self._cycle.response_started:
                head = self._head(200, [*headers, (b"transfer-encoding", b"chunked")] if chunked else headers)
            self._connection.transport.write(head + (b"%x\r\n%b\r\n" % (len(part), part) if chunked else part))
            head = b""
        if chunked:
            self._connection.transport.write(b"0\r\n\r\n")
        self._complete()

    def count_error(self, status: int) -> None:
        """An error is sent within an answer."""
        self._connection.common.error_answered(status)

    async def _client_reads(self) -> bool:
        """Wait until the client has read most of what was written; False if it has gone."""
        if self._cycle.flow.write_paused:
            await self._cycle.flow.drain()
        return not self._cycle.disconnected

    def _head(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
        """That of an answer, which begins."""
        if status >= 400:
            self.count_error(status)
        self._cycle.response_started = True
        lines = [b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())]
        lines += [b"%s: %s\r\n" % header for header in headers]
        self._is_last = self._connection.ends_with_this_answer(self._cycle)
        lines.append(b"connection: close\r\n\r\n" if self._is_last else b"\r\n")
        return b"".join(lines)

    def _complete(self) -> None:
        """All of the answer is written."""
        self._cycle.response_complete = True
        self._cycle.message_event.set()
        if self._is_last or self._connection.ends_with_this_answer(self._cycle):
            self._connection.end()
        self._cycle.on_response()


def exchange_of(scope: Mapping[str, Any]) -> Exchange:
    """That of a request of ASGI which came by a `Connection`."""
    found: Exchange = scope["extensions"][_EXTENSION]
    return found


def connections_with(common: Connections) -> type[Connection]:
    """Connections of one server."""
    return type("Connection", (Connection,), {"common": common})
