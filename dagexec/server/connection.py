"""Connections of HTTP with limits that uvicorn does not have: bytes of headers, seconds for each part of a request.

What cannot be understood is answered as the protocol says, too: JSON with an `error`.

An application that knows of it (`exchange_of`) has large bodies received where it wants them, without copies, is called
when the client has gone, without a task that waits for that, and sends small answers with one system call.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from dagexec.server.limits import Limits

Clock = Callable[[], float]

_EXTENSION = "dagexec.exchange"
_FIRST_READ = 64 << 10  # bytes that a connection reads at once, when it does not know yet where to
_SMALL = 64 << 10  # bytes of an answer that are sent with its head, by one system call


class Connection(HttpToolsProtocol):
    """One connection of a client.

    Attributes:
        deadline: when the client must have sent, or read, what is awaited of it.
        when_gone: called when the client has closed the connection; set by what serves a request, for as long.
    """

    limits = Limits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._clock = self.loop.time
        self._header_bytes = 0  # of a request whose headers are not complete
        self._waits_for = ""
        self.deadline = math.inf
        self.when_gone: Callable[[], object] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a client when there are too many."""
        super().connection_made(transport)
        # asyncio does so only for sockets that name TCP; an answer's second part would wait 40 ms for an acknowledgment
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        if hasattr(transport, "max_size"):  # of one read, as asyncio has it; the rest of a large body is read in place
            transport.max_size = _FIRST_READ
        self._await("headers", self.limits.idle_seconds)
        if len(self.connections) > self.limits.connections:
            self._refuse(503, f"{self.limits.connections} connections are open already", {"Retry-After": "1"})

    def data_received(self, data: bytes) -> None:
        """Read on, unless the headers are too long."""
        if self.transport.is_closing():
            return
        if self._waits_for == "headers":
            if not self._header_bytes:
                self._await("headers", self.limits.header_seconds)
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > self.limits.header_bytes and self._waits_for == "headers":
            self._refuse(431, f"the headers have more than {self.limits.header_bytes} bytes")

    def on_headers_complete(self) -> None:
        """Serve the request, whose body may follow."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        self._header_bytes = 0
        self._await("body", self.limits.body_seconds)
        if size > self.limits.header_bytes:
            self._refuse(431, f"the headers have more than {self.limits.header_bytes} bytes")
            return
        super().on_headers_complete()
        self.scope["extensions"] = {_EXTENSION: Exchange(self, self.cycle)}  # type: ignore[dict-item]

    def on_body(self, body: bytes) -> None:
        """Keep it, unless the request has been refused."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle.body or cycle.response_complete:
            cycle.body = bytearray(cycle.body)
            super().on_body(body)
        else:  # the application is about to take it: no copy, and no pause in reading
            cycle.body = body  # type: ignore[assignment]
            cycle.message_event.set()

    def filled(self) -> None:
        """The body is there. The parser waits for it still: another one parses the next request."""
        self.transport.set_protocol(self)
        self.parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell what serves a request."""
        super().connection_lost(exc)
        if self.when_gone is not None:
            self.when_gone()

    def on_message_complete(self) -> None:
        """All of a request is there, and the client owes nothing."""
        self.deadline = math.inf
        self._waits_for = "headers"
        if not self.transport.is_closing():
            super().on_message_complete()

    def pause_writing(self) -> None:
        """The client has to read before more is written."""
        super().pause_writing()
        self._await("reading", self.limits.body_seconds)

    def resume_writing(self) -> None:
        """The client has read."""
        super().resume_writing()
        self.deadline = math.inf

    def check(self, now: float) -> None:
        """Close the connection of a client that is too slow; to be called now and then."""
        if now < self.deadline:
            return
        if self._waits_for == "reading":
            self.transport.abort()
        else:
            self._refuse(408, f"the {self._waits_for} of the request did not come in time")

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP."""
        self._refuse(400, msg)

    def _await(self, what: str, seconds: float) -> None:
        self._waits_for = what
        self.deadline = self._clock() + seconds

    def _refuse(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        """Answer, unless an answer is under way, and close."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps({"error": message}).encode()
            fields = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
            lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
            start = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n{lines}Connection: close\r\n\r\n"
            self.transport.write(start.encode() + body)
        self.deadline = math.inf
        self.transport.close()


class _Filling(asyncio.BufferedProtocol):
    """Stands in for a connection while a body is received."""

    def __init__(self, connection: Connection, memory: memoryview) -> None:
        self._connection = connection
        self._left = memory

    def get_buffer(self, sizehint: int) -> memoryview:
        """No more than the body, so that a request behind it is parsed."""
        return self._left

    def buffer_updated(self, nbytes: int) -> None:
        """So much more is there."""
        self._left = self._left[nbytes:]
        if not self._left:
            self._connection.filled()

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

    def fill(self, memory: memoryview) -> bool:
        """Receive the rest of the body there; False if it is there, or comes with ASGI's messages.

        `memory` is as long as what is left. To be called when all that came has been taken.
        """
        connection, cycle = self._connection, self._cycle
        if connection.cycle is not cycle or not cycle.more_body or cycle.body or connection.transport.is_closing():
            return False
        connection.transport.set_protocol(_Filling(connection, memory))
        return True

    def when_gone(self, call: Callable[[], object] | None) -> None:
        """Have `call` called when the client closes the connection; None: not any more. For the request in service."""
        self._connection.when_gone = call
        if call is not None and self._cycle.disconnected:
            call()

    async def answer(self, status: int, headers: list[tuple[bytes, bytes]], parts: list[bytes | memoryview]) -> None:
        """Send a whole answer, in place of ASGI's messages. `headers` have its length, and `parts` so many bytes."""
        cycle, transport = self._cycle, self._connection.transport
        if cycle.disconnected:
            return
        cycle.response_started = True
        lines = [b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())]
        lines += [b"%s: %s\r\n" % header for header in headers]
        lines.append(b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n")
        small = sum(map(len, parts)) <= _SMALL
        transport.write(b"".join([*lines, *parts] if small else lines))
        for part in [] if small else parts:
            if cycle.flow.write_paused:
                await cycle.flow.drain()
            if cycle.disconnected:
                return
            transport.write(part)
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            transport.close()
        cycle.on_response()


def exchange_of(scope: Mapping[str, Any]) -> Exchange:
    """That of a request of ASGI which came by a `Connection`."""
    found: Exchange = scope["extensions"][_EXTENSION]
    return found


def connections_with(limits: Limits) -> type[Connection]:
    """Connections with these limits."""
    return type("Connection", (Connection,), {"limits": limits})
