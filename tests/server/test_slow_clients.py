"""Clients that are slow, and clients that are many: they lose their connections, and others are served."""

from __future__ import annotations

import os
import re
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import pytest
from uvicorn import Config
from uvicorn.server import ServerState

from dagexec.export.onnx_model import save_onnx
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.connection import FAIR_PACE, PATIENCE_SECONDS, Connection, Connections, connections_with
from dagexec.server.limits import Limits
from dagexec.server.log import log_to
from dagexec.server.run import Server
from tests.held import PATIENCE, doubled_model
from tests.server.raw import Answer, binary_request, binary_result, connected, infer_path, post
from tests.server.runners import HeldRunner
from tests.server.serving import on_loop, serving

X = np.float32([[1, -2, 3]])
LIVE = b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n"


@contextmanager
def serving_within(limits: Limits) -> Iterator[Server]:
    model = ModelConfig(name="m", source=doubled_model())
    with serving(ServerConfig(models={"m": model}, limits=limits)) as server:
        yield server


def assert_serves(answer: Answer) -> None:
    np.testing.assert_array_equal(binary_result(answer), np.maximum(X, 0) * 2)


def test_clients_that_do_not_send_in_time() -> None:
    """Each is told, and its connection closed; one that sends all is served."""
    limits = Limits(header_seconds=0.01, body_seconds=0.01, idle_seconds=0.01)
    request = binary_request("m", X)
    large = post(infer_path("m"), b"x" * 200_000, {"Content-Length": 300_000})
    parts = {
        "headers": [b"", request[:1], request[:30]],
        "body": [request[:-1], large, request + request[:-1]],
    }
    with serving_within(limits) as server, ExitStack() as open_clients:
        waiting = []
        for what, sent in parts.items():
            for part in sent:
                client = open_clients.enter_context(connected(server))
                client.send(part)
                waiting.append((what, client, part.startswith(request)))
        for what, client, is_second in waiting:
            if is_second:
                assert_serves(client.answer())
            answer = client.answer()
            assert answer.status == 408
            assert answer.error == f"the {what} of the request did not come in time"
            assert client.is_at_end()
        with connected(server) as client:
            assert_serves(client.ask(request))


class Clocked:
    """A connection on a clock that a test sets, with a transport that keeps what is written."""

    def __init__(self, limits: Limits) -> None:
        self.now = 1000.0
        self.pause_reading = self.resume_reading
        self.written = b""
        self.closed = self.aborted = self.ended = False
        self.unread = 0
        loop = SimpleNamespace(time=lambda: self.now, create_task=lambda task: task.close() or MagicMock())
        state = ServerState()
        kind = connections_with(Connections(limits))
        self.connection = kind(Config(None, loop="none"), state, {}, loop)  # type: ignore[arg-type]
        self.connection.connection_made(self)  # type: ignore[arg-type]

    def write(self, data: bytes) -> None:
        self.written += data

    def get_extra_info(self, name: str) -> MagicMock | None:
        return MagicMock() if name == "socket" else None

    def is_closing(self) -> bool:
        return self.closed or self.aborted

    def resume_reading(self) -> None:
        pass

    def set_protocol(self, protocol: object) -> None:
        assert protocol is self.connection

    def get_write_buffer_size(self) -> int:
        return self.unread

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("seconds", "late"), [(9.99, False), (10.0, True)])
def test_the_deadline(seconds: float, late: bool) -> None:
    clocked = Clocked(Limits(header_seconds=10))
    clocked.connection.data_received(b"GET")
    clocked.connection.check(clocked.now + seconds)
    assert clocked.ended is late
    assert clocked.written.startswith(b"HTTP/1.1 408 ") is late


@pytest.mark.parametrize(("pace", "slow"), [(FAIR_PACE // 2, True), (FAIR_PACE, False)])
def test_who_sends_a_body_at_a_fair_pace_is_not_slow(pace: int, slow: bool) -> None:
    """Whatever came at once before, and however small the pieces are."""
    clocked = Clocked(Limits())
    clocked.connection.data_received(post(infer_path("m"), b"x" * 1_000_000, {"Content-Length": 10_000_000}))
    found = []
    for _ in range(40):
        clocked.now += 0.1
        found.append(clocked.connection.is_slow())
        clocked.connection.data_received(b"x" * (pace // 10 + 1))
    assert any(found) is slow
    assert not any(found[:9])
    clocked.now += PATIENCE_SECONDS + 0.001
    assert clocked.connection.is_slow()


def test_a_client_that_waits_is_not_slow() -> None:
    """The server is the one that is."""
    clocked = Clocked(Limits())
    clocked.connection.data_received(binary_request("m", X))
    clocked.now += 1e6
    assert not clocked.connection.is_slow()
    clocked.connection.check(clocked.now)
    assert not clocked.ended
    clocked.connection.data_received(binary_request("m", X)[:-1])  # the next one has its turn then
    clocked.now += 1e6
    assert not clocked.connection.is_slow()
    clocked.connection.check(clocked.now)
    assert not clocked.written


@pytest.mark.parametrize("reads_again", [False, True])
def test_a_client_that_does_not_read(reads_again: bool) -> None:
    """There is nothing to tell it: it does not read."""
    clocked = Clocked(Limits(body_seconds=5))
    clocked.connection.pause_writing()
    if reads_again:
        clocked.now += 4.9
        clocked.connection.resume_writing()
    clocked.connection.check(clocked.now + 5)
    assert clocked.aborted is not reads_again
    assert not clocked.written


@pytest.mark.slow
def test_a_client_that_does_not_read_a_large_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = threading.Event()
    paused = threading.Event()
    slow: list[Connection] = []
    lose, pause = Connection.connection_lost, Connection.pause_writing

    def see_pause(connection: Connection) -> None:
        pause(connection)
        slow.append(connection)
        paused.set()

    def see_loss(connection: Connection, error: Exception | None) -> None:
        lose(connection, error)
        if connection in slow:
            lost.set()

    monkeypatch.setattr(Connection, "pause_writing", see_pause)
    monkeypatch.setattr(Connection, "connection_lost", see_loss)
    x = np.ones((1_500_000, 3), np.float32)
    with serving_within(Limits(body_seconds=2)) as server, connected(server) as client:
        client.send(binary_request("m", x))
        assert paused.wait(PATIENCE)
        with connected(server) as other:
            assert_serves(other.ask(binary_request("m", X)))
        assert lost.wait(PATIENCE)
        with connected(server) as other:
            assert_serves(other.ask(binary_request("m", X)))


def make_room(url: str, limit: int) -> None:
    """So many connections are served; one more takes the place of that which has had no request for the longest.

    The client that waited for the model is gone when the first of these is served, as it had closed its connection.
    """
    with ExitStack() as clients:
        open_ones = [clients.enter_context(connected(url)) for _ in range(limit)]
        for client in open_ones:
            assert client.ask(LIVE).status == 200
        assert_serves(open_ones[0].ask(binary_request("m", X)))
        with connected(url) as one_more:
            assert_serves(one_more.ask(binary_request("m", X)))
            assert open_ones[1].is_at_end()
        for client in (open_ones[0], *open_ones[2:200]):
            assert client.ask(LIVE).status == 200


def test_more_connections_than_allowed() -> None:
    with serving_within(Limits(connections=200)) as server:
        make_room(server.url, 200)


def test_no_place_is_left_where_all_are_served() -> None:
    limits = Limits(connections=3)
    runner = HeldRunner(0.0, held=True)
    with serving_within(limits) as server:
        server.repository.add("held", runner)
        with ExitStack() as clients:
            served = [clients.enter_context(connected(server)) for _ in range(3)]
            for client in served:
                client.send(binary_request("held", X))
            while runner.inside < 3:
                pass
            with connected(server) as one_more:
                answer = one_more.answer()
                assert answer.status == 503
                assert answer.headers["retry-after"] == "1"
                assert "3 connections" in answer.error
                assert one_more.is_at_end()
            on_loop(server, runner.go_on.set)
            for client in served:
                np.testing.assert_array_equal(binary_result(client.answer()), X)


@pytest.mark.slow
def test_ten_thousand_connections(tmp_path: Path) -> None:
    """The server is a process of its own, as each end of a connection is an open file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 11_000
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"{hard} open files are allowed, 10,000 connections need {wanted}")
    model = tmp_path / "doubled.onnx"
    save_onnx(doubled_model(), model)
    command = [sys.executable, "-c", "from dagexec.cli import main; main()", "serve", f"m={model}", "--port", "0"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stderr is not None
                url = next(found[1] for line in process.stderr if (found := re.search(r"serving m .* at (\S+)", line)))
                make_room(url, 10_000)
            finally:
                process.kill()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("loggers_as_before")
def test_a_full_disk_for_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is logged is lost; the client gets its error, and others their results."""
    full = os.open("/dev/full", os.O_WRONLY)
    handler = log_to(full)
    failing = HeldRunner(0.0)
    failing.error = ZeroDivisionError("a defect")
    try:
        with serving_within(Limits()) as server:
            server.repository.add("failing", failing)
            with connected(server) as client:
                for _ in range(3):
                    answer = client.ask(binary_request("failing", X))
                    assert (answer.status, answer.error) == (500, "internal error")
                    assert_serves(client.ask(binary_request("m", X)))
        assert handler._lost >= 3
    finally:
        os.close(full)


def test_clients_that_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is reset, in headers, in a body, or before the answer is read."""
    request = binary_request("m", X)
    with serving_within(Limits()) as server:
        for part in (b"", request[:20], request[:-1], request, request * 3):
            with connected(server) as client:
                client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
                client.send(part)
        with connected(server) as client:
            assert_serves(client.ask(request))
