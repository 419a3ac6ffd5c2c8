"""Connections of HTTP with limits that uvicorn does not have: bytes of headers, seconds for each part of a request.

What cannot be understood is answered as the protocol says, too: JSON with an `error`.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dagexec.server.limits import Limits

Clock = Callable[[], float]


class Connection(HttpToolsProtocol):
    """One connection of a client.

    Attributes:
        deadline: when the client must have sent, or read, what is awaited of it.
    """

    limits = Limits()

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._clock = self.loop.time
        self._header_bytes = 0  # of a request whose headers are not complete
        self._waits_for = ""
        self.deadline = math.inf

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Refuse a client when there are too many."""
        super().connection_made(transport)
        # asyncio does so only for sockets that name TCP; an answer's second part would wait 40 ms for an acknowledgment
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
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

    def on_body(self, body: bytes) -> None:
        """Keep it, unless the request has been refused."""
        if not self.transport.is_closing():
            super().on_body(body)

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


def connections_with(limits: Limits) -> type[Connection]:
    """Connections with these limits."""
    return type("Connection", (Connection,), {"limits": limits})
