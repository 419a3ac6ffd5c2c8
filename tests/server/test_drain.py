"""The end of a server, as clients that keep their connections see it: no reset, no half of an answer, nothing lost."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from dagexec.server import connection
from dagexec.server.config import ServerConfig
from tests.held import PATIENCE
from tests.server.raw import asked_until_the_end, binary_request, binary_result, connected
from tests.server.runners import HeldRunner
from tests.server.serving import on_loop, serving

CLIENTS = 32
X = np.float32([[1, -2, 3]])


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode()


def test_clients_that_keep_their_connections_lose_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a client has sent when its connection ends was either answered or never taken: results count the runs."""
    monkeypatch.setattr(connection, "LINGER_SECONDS", PATIENCE)  # threads of a busy machine may sleep for long
    runner = HeldRunner(1.0)
    went_on = threading.Semaphore(0)
    with ThreadPoolExecutor(CLIENTS) as threads, serving(ServerConfig()) as server:
        server.repository.add("m", runner)
        asking = [
            threads.submit(asked_until_the_end, server.url, binary_request("m", X), went_on) for _ in range(CLIENTS)
        ]
        for _ in range(10 * CLIENTS):
            assert went_on.acquire(timeout=PATIENCE)
        on_loop(server, server.stop)
        found = [one.result(PATIENCE) for one in asking]
    answers = [answer for one in found for answer in one]
    results = [answer for answer in answers if answer.status == 200]
    assert len(results) == len(runner.calls)
    for answer in results:
        np.testing.assert_array_equal(binary_result(answer), X + 1)
    for answer in answers:
        if answer.status != 200:
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert answer.error == "the server is shutting down"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get("/v2/health/live"), 200),
        (get("/v2/health/ready"), 503),
        (get("/v2/models/held"), 503),
        (get("/metrics"), 200),
        (get("/nowhere"), 404),
        (binary_request("held", X), 503),
        (binary_request("other", X), 503),
    ],
)
def test_every_answer_of_a_drain_is_the_last_of_its_connection(request_bytes: bytes, status: int) -> None:
    """That of the run that the drain waits for, too; connections without a request are closed at the end."""
    runner = HeldRunner(1.0, held=True)
    with (
        serving(ServerConfig()) as server,
        connected(server) as held,
        connected(server) as idle,
        connected(server) as one,
    ):
        server.repository.add("held", runner)
        for client in (idle, one):
            assert "connection" not in client.ask(get("/v2/health/live")).headers
        held.send(binary_request("held", X) + get("/v2/health/live"))  # the second waits for the first
        while not runner.inside:
            pass
        on_loop(server, server.stop)
        while one.ask(get("/v2/health/ready")).status == 200:  # the drain begins
            pass
        with connected(server) as late:
            answer = late.ask(request_bytes)
            assert (answer.status, answer.headers["connection"]) == (status, "close")
            assert late.is_at_end()
        on_loop(server, runner.go_on.set)
        first, second = held.answer(), held.answer()
        np.testing.assert_array_equal(binary_result(first), X + 1)
        assert ("connection" in first.headers, second.headers["connection"]) == (False, "close")
        for client in (held, idle, one):
            assert client.is_at_end()


def test_a_body_that_is_on_its_way_when_the_server_ends_is_read() -> None:
    """Its client is told, and has been heard to the end."""
    request = binary_request("m", np.ones((100_000, 3), np.float32), {"Expect": "100-continue"})
    head = request.index(b"\r\n\r\n") + 4
    with serving(ServerConfig()) as server, connected(server) as client:
        server.repository.add("m", HeldRunner(1.0))
        client.send(request[:head])
        assert client.socket.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        on_loop(server, server.stop)
        while listens(server.url):
            pass
        answer = client.ask(request[head:])
        assert (answer.status, answer.headers["connection"]) == (503, "close")
        assert client.is_at_end()


def listens(url: str) -> bool:
    try:
        with connected(url):
            return True
    except ConnectionError:
        return False
