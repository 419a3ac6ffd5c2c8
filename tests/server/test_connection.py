"""Connections of the server: bodies that are received in place, requests one behind another, clients that leave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import anyio
import numpy as np
import pytest

from dagexec.core.feeds import Array
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.connection import Connection
from dagexec.server.run import Server
from tests.held import PATIENCE, doubled_model
from tests.server.raw import binary_request, binary_result, connected, infer_path, post
from tests.server.runners import HeldRunner
from tests.server.serving import on_loop, serving

LARGE = 300_000  # rows of three: more than any socket takes at once


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(ServerConfig(models={"m": ModelConfig(name="m", source=doubled_model())})) as server:
        yield server


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(count).standard_normal((count, 3)).astype(np.float32)


def doubled(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) * 2


@pytest.mark.parametrize("count", [1, 1000, 20_000, LARGE])
def test_a_body_of_any_size(server: Server, count: int) -> None:
    with connected(server) as client:
        for seed in range(3):
            x = rows(count + seed)
            np.testing.assert_array_equal(binary_result(client.ask(binary_request("m", x))), doubled(x))


def test_a_body_in_pieces(server: Server) -> None:
    x = rows(5000)
    request = binary_request("m", x)
    with connected(server) as client:
        client.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.send(*(request[place : place + 997] for place in range(0, len(request), 997)))
        np.testing.assert_array_equal(binary_result(client.answer()), doubled(x))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (LARGE, 1, LARGE), (1, LARGE, 2), (20_000, 30_000, 1)])
def test_requests_one_behind_another(server: Server, sizes: tuple[int, ...]) -> None:
    """The next one may be in the same packet as the end of a large body."""
    given = [rows(size) for size in sizes]
    with connected(server) as client:
        client.send(b"".join(binary_request("m", x) for x in given[:-1]))
        client.send(binary_request("m", given[-1])[:-1])
        for x in given[:-1]:
            np.testing.assert_array_equal(binary_result(client.answer()), doubled(x))
        client.send(binary_request("m", given[-1])[-1:])
        np.testing.assert_array_equal(binary_result(client.answer()), doubled(given[-1]))


def test_a_large_body_after_100_continue(server: Server) -> None:
    x = rows(LARGE)
    request = binary_request("m", x, {"Expect": "100-continue"})
    head = request.index(b"\r\n\r\n") + 4
    with connected(server) as client:
        client.send(request[:head])
        assert client.socket.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        np.testing.assert_array_equal(binary_result(client.ask(request[head:])), doubled(x))


def test_a_client_that_asks_to_close(server: Server) -> None:
    x = rows(2)
    with connected(server) as client:
        answer = client.ask(binary_request("m", x, {"Connection": "close"}))
        np.testing.assert_array_equal(binary_result(answer), doubled(x))
        assert answer.headers["connection"] == "close"
        assert client.is_at_end()


def test_what_is_no_http_behind_a_request_is_refused_behind_its_answer() -> None:
    runner = HeldRunner(1.0, held=True)
    with serving(ServerConfig()) as server, connected(server) as client:
        server.repository.add("held", runner)
        client.send(binary_request("held", rows(2)) + b"no HTTP\r\n\r\n")
        while not runner.inside:
            pass
        on_loop(server, runner.go_on.set)
        np.testing.assert_array_equal(binary_result(client.answer()), rows(2) + 1)
        assert client.answer().status == 400
        assert client.is_at_end()


def test_a_client_that_asks_for_headers_only(server: Server) -> None:
    """They are those of the whole answer; the next one follows."""
    with connected(server) as client:
        whole = client.ask(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        client.send(b"HEAD /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        head = client.headers()
        assert (head.status, head.headers) == (200, whole.headers)
        assert client.ask(binary_request("m", rows(1))).status == 200


def test_a_client_that_sends_on_after_its_last_answer_reads_it(server: Server) -> None:
    """And no reset, which a close with bytes unread would be."""
    with connected(server) as client:
        client.send(binary_request("m", rows(2), {"Connection": "close"}), b"x" * 100_000)
        np.testing.assert_array_equal(binary_result(client.answer()), doubled(rows(2)))
        assert client.socket.recv(1) == b""


def test_a_client_that_leaves_within_a_large_body(server: Server) -> None:
    with connected(server) as client:
        client.send(binary_request("m", rows(LARGE))[:-1])
    with connected(server) as client:
        assert client.ask(binary_request("m", rows(1))).status == 200


class WaitingRunner(HeldRunner):
    """Runs until it is cancelled."""

    def __init__(self) -> None:
        super().__init__(0.0)
        self.runs = threading.Event()
        self.ended = threading.Event()

    async def run_async(self, *_: object, **__: object) -> dict[str, Array]:
        self.runs.set()
        try:
            await anyio.sleep_forever()
        finally:
            self.ended.set()


@pytest.mark.parametrize("count", [1, LARGE])
def test_a_client_that_leaves_ends_its_run(count: int) -> None:
    runner = WaitingRunner()
    with serving(ServerConfig()) as server:
        server.repository.add("waiting", runner)
        with connected(server) as client:
            client.send(binary_request("waiting", rows(count)))
            assert runner.runs.wait(PATIENCE)
            assert not runner.ended.is_set()
        assert runner.ended.wait(PATIENCE)
        assert not runner.closed


def test_large_json(server: Server) -> None:
    values = ", ".join(["1.5"] * 3 * 20_000)
    text = f'{{"inputs": [{{"name": "x", "shape": [20000, 3], "datatype": "FP32", "data": [{values}]}}]}}'
    with connected(server) as client:
        [output] = client.ask(post(infer_path("m"), text.encode())).json["outputs"]
    assert output["data"] == [3.0] * 60_000


def test_answers_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nagle's algorithm would hold back the end of an answer until the client acknowledges its beginning."""
    found = []
    made = Connection.connection_made

    def look(connection: Connection, transport: object) -> None:
        made(connection, transport)  # type: ignore[arg-type]
        given = connection.transport.get_extra_info("socket")
        found.append(given.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(Connection, "connection_made", look)
    with serving(ServerConfig()) as server, connected(server):
        pass
    assert found
    assert all(found)
