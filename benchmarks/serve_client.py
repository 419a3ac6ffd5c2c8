"""A load of requests that are bytes known beforehand, from a process that does little else.

    from serve_client import Load, answers

The same client asks every server, with whole requests of HTTP/1.1 over connections that stay open. It reads the number
of bytes that the answer announces, and looks at the status only. Programs of this module answer one pickled `Load` on
stdin with one pickled `Answers` on stdout.
"""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

_HEAD_END = b"\r\n\r\n"
_LENGTH = b"\r\ncontent-length:"
_READ = 1 << 20


class AnswerError(Exception):
    """A server answered with an error, or closed a connection."""


@dataclass(frozen=True)
class Load:
    """So many connections, each of which asks again as soon as it has its answer.

    It ends after `seconds`, or after `requests` if there is no such time. With `each` above 0 a connection is closed
    after so many requests and replaced by a new one.
    """

    port: int
    request: bytes
    connections: int
    seconds: float | None = None
    requests: int = 0
    each: int = 0


@dataclass(frozen=True)
class Answers:
    """When each request began and how long its answer took, in seconds; and the time of all of them."""

    latencies: list[float]
    seconds: float

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.latencies) / self.seconds

    def quantile(self, part: float) -> float:
        """The latency that this part of the requests did not exceed, in seconds."""
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(part * len(ordered)))]


def answers(load: Load) -> Answers:
    """Run the load in a process of its own; raises `AnswerError` with what went wrong."""
    child = subprocess.run([sys.executable, os.fspath(__file__)], input=pickle.dumps(load), capture_output=True)
    if child.returncode:
        raise AnswerError(child.stderr.decode(errors="replace").strip().splitlines()[-1])
    found: Answers = pickle.loads(child.stdout)
    return found


class _Connection:
    """One connection of HTTP, which sends its request whenever the last answer is complete."""

    def __init__(self, load: Load) -> None:
        self._request = memoryview(load.request)
        self.socket = socket.create_connection(("127.0.0.1", load.port), timeout=30)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self._buffer = bytearray(_READ)
        self.answered = 0
        self.begin()

    def begin(self) -> None:
        """Start a request; what the socket does not take at once is sent by `proceed`."""
        self.began = time.perf_counter()
        self._unsent = self._request
        self._read = 0
        self._awaited: int | None = None

    def proceed(self, events: int) -> bool:
        """Send and read what is possible now; True when the answer is complete."""
        if events & selectors.EVENT_WRITE and self._unsent:
            self._unsent = self._unsent[self.socket.send(self._unsent) :]
        if events & selectors.EVENT_READ:
            count = self.socket.recv_into(memoryview(self._buffer)[self._read :])
            if count == 0:
                raise AnswerError("a connection was closed")
            self._read += count
            if self._awaited is None:
                self._awaited = self._length()
        done = self._awaited is not None and self._read >= self._awaited
        self.answered += done
        return done

    def waits_for(self) -> int:
        """The events that it waits for now."""
        return selectors.EVENT_WRITE | selectors.EVENT_READ if self._unsent else selectors.EVENT_READ

    def _length(self) -> int | None:
        """Bytes of head and body together, once the head is there; the buffer grows to hold them."""
        end = self._buffer.find(_HEAD_END, 0, self._read)
        if end < 0:
            return None
        head = bytes(self._buffer[:end]).lower()
        if not head.startswith(b"http/1.1 200"):
            raise AnswerError(bytes(self._buffer[: self._read]).decode(errors="replace")[:500].replace("\n", " "))
        length = int(head.partition(_LENGTH)[2].partition(b"\r\n")[0])
        whole = end + len(_HEAD_END) + length
        self._buffer.extend(bytes(max(0, whole - len(self._buffer))))
        return whole


def _ask(load: Load) -> Answers:
    latencies: list[float] = []
    start = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        for connection in [_Connection(load) for _ in range(load.connections)]:
            selector.register(connection.socket, connection.waits_for(), connection)
        unfinished = load.connections
        while unfinished:
            for key, events in selector.select(timeout=60):
                connection = key.data
                done = connection.proceed(events)
                if done:
                    latencies.append(time.perf_counter() - connection.began)
                    if _is_over(load, start, len(latencies) + unfinished - 1):
                        selector.unregister(connection.socket)
                        connection.socket.close()
                        unfinished -= 1
                        continue
                    if load.each and connection.answered >= load.each:
                        selector.unregister(connection.socket)
                        connection.socket.close()
                        connection = _Connection(load)
                        selector.register(connection.socket, connection.waits_for(), connection)
                        continue
                    connection.begin()
                    connection.proceed(selectors.EVENT_WRITE)
                if key.events != connection.waits_for():
                    selector.modify(connection.socket, connection.waits_for(), connection)
    return Answers(latencies, time.perf_counter() - start)


def _is_over(load: Load, start: float, begun: int) -> bool:
    if load.seconds is None:
        return begun >= load.requests
    return time.perf_counter() - start >= load.seconds


def main() -> None:
    """Run the load that is on stdin."""
    pickle.dump(_ask(pickle.load(sys.stdin.buffer)), sys.stdout.buffer)


if __name__ == "__main__":
    import serve_client  # where the classes are, for whoever reads them

    serve_client.main()
