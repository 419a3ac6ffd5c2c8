"""Who announces much and sends little, or never finishes, takes nothing from others: over HTTP and over gRPC."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import grpc
import grpc.aio
import numpy as np
import pytest

from dagexec.server import connection
from dagexec.server.bodies import Bodies
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.grpc_service import InferenceService, serve_grpc
from dagexec.server.limits import Limits
from dagexec.server.proto import inference_pb2 as messages
from dagexec.server.repository import Repository
from dagexec.server.run import Server
from tests.held import PATIENCE, doubled_model
from tests.server.raw import Client, binary_request, binary_result, connected, infer_path, post
from tests.server.runners import HeldRunner, Loads, repository_of
from tests.server.serving import serving

X = np.float32([[1, -2, 3]])
BODY_BYTES = 1 << 28
TOTAL_BYTES = 150_000
LARGE = np.ones((5000, 3), np.float32)  # 60,000 bytes


@contextmanager
def server_within(limits: Limits) -> Iterator[Server]:
    model = ModelConfig(name="m", source=doubled_model())
    with serving(ServerConfig(models={"m": model}, limits=limits)) as server:
        yield server
        while server.bodies.held_bytes:
            pass


@pytest.fixture
def server() -> Iterator[Server]:
    with server_within(Limits(body_bytes=BODY_BYTES, total_body_bytes=TOTAL_BYTES)) as server:
        yield server


def announced(sent: bytes) -> list[bytes]:
    """A request that announces all that it may have, and so much of its body."""
    return [post(infer_path("m"), b"", {"Content-Length": BODY_BYTES, "Expect": "100-continue"}), sent]


def chunked(sent: bytes) -> list[bytes]:
    """A request that announces nothing, and so much of its body."""
    head = post(
        infer_path("m"), b"", {"Content-Length": None, "Transfer-Encoding": "chunked", "Expect": "100-continue"}
    )
    return [head, b"%x\r\n%b\r\n" % (len(sent), sent)]


def send_slowly(server: Server, client: Client, parts: list[bytes], *, held: int) -> None:
    """Return when the server has received it, and so has `held` bytes of all requests."""
    client.send(parts[0])
    assert client.socket.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
    client.send(parts[1])
    while server.bodies.held_bytes != held:
        pass


def assert_serves(server: Server, x: np.ndarray = X) -> None:
    with connected(server) as client:
        np.testing.assert_array_equal(binary_result(client.ask(binary_request("m", x))), np.maximum(x, 0) * 2)


def test_what_is_announced_costs_nothing(server: Server) -> None:
    """Four clients that announce far more than all may have together, and send one byte."""
    with ExitStack() as clients:
        for count in range(1, 5):
            send_slowly(server, clients.enter_context(connected(server)), announced(b"{"), held=count)
        assert_serves(server)
        assert_serves(server, LARGE)


@pytest.mark.parametrize("parts", [announced, chunked])
def test_who_is_slow_gives_its_memory_to_others(
    server: Server, monkeypatch: pytest.MonkeyPatch, parts: Callable[[bytes], list[bytes]]
) -> None:
    """Only as much as these need, of the slowest first; while it is not slow, others are told to come again."""
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", PATIENCE * 1000)
    with connected(server) as first, connected(server) as second, connected(server) as third:
        send_slowly(server, first, parts(b" " * 60_000), held=60_000)
        send_slowly(server, second, parts(b" " * 60_000), held=120_000)
        answer = third.ask(binary_request("m", LARGE))
        assert answer.status == 503
        assert "bytes of other requests" in answer.error
        assert answer.headers["retry-after"] == "1"
        third.send(binary_request("m", X))
        np.testing.assert_array_equal(binary_result(third.answer()), np.maximum(X, 0) * 2)
    while server.bodies.held_bytes:
        pass
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.0)
    with connected(server) as first, connected(server) as second:
        send_slowly(server, first, parts(b" " * 60_000), held=60_000)
        send_slowly(server, second, parts(b" " * 60_000), held=120_000)
        assert_serves(server, LARGE)
        answer = first.answer()
        assert answer.status == 408
        assert "too slowly" in answer.error
        assert server.bodies.held_bytes >= 60_000
        assert first.is_at_end()


@pytest.mark.parametrize("patience", [1.0, 0.0])
def test_a_large_body_that_is_refused_is_read_to_its_end(
    server: Server, monkeypatch: pytest.MonkeyPatch, patience: float
) -> None:
    """The client is told at once, and has its next request served on the connection; it makes no room for itself."""
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", patience)
    request = binary_request("m", np.ones((1_000_000, 3), np.float32))
    with connected(server) as client:
        client.send(request[:2_000_000])
        answer = client.answer()
        assert (answer.status, "bytes of other requests" in answer.error) == (503, True)
        client.send(request[2_000_000:])
        np.testing.assert_array_equal(binary_result(client.ask(binary_request("m", X))), np.maximum(X, 0) * 2)


@pytest.mark.parametrize("what", ["headers", "body"])
def test_who_has_a_place_and_does_not_use_it_gives_it_to_others(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.setattr(connection, "PATIENCE_SECONDS", 0.0)
    request = binary_request("m", X, {"Expect": "100-continue"})
    sent = request[:30] if what == "headers" else request[: request.index(b"\r\n\r\n") + 5]
    with server_within(Limits(connections=3)) as server, ExitStack() as clients:
        slow = [clients.enter_context(connected(server)) for _ in range(3)]
        for client in slow:
            client.send(sent)
            if what == "body":
                assert client.socket.recv(25, socket.MSG_WAITALL) == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert_serves(server)
        if what == "body":  # which of them were there first is certain
            assert slow[0].answer().status == 408
            assert slow[0].is_at_end()


INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


def grpc_request(x: np.ndarray) -> bytes:
    tensor = messages.Tensor(name="x", datatype="FP32", shape=x.shape)
    return messages.ModelInferRequest(
        model_name="m", inputs=[tensor], raw_input_contents=[x.tobytes()]
    ).SerializeToString()


@contextmanager
def within(repository: Repository, limits: Limits) -> Iterator[tuple[InferenceService, Bodies]]:
    bodies = Bodies(limits)
    repository.config = ServerConfig(models=repository.config.models, limits=limits)
    yield InferenceService(repository, "s", "1", bodies), bodies
    assert not bodies.held_bytes


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # all that gRPC has


@asynccontextmanager
async def channel_to(service: InferenceService) -> AsyncIterator[grpc.aio.Channel]:
    async with serve_grpc(service, "127.0.0.1", 0) as port, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel


@pytest.mark.parametrize("path", [INFER, STREAM])
async def test_a_call_without_a_message_gives_its_place_to_others(path: str) -> None:
    repository = repository_of(Loads())
    await repository.load_all()
    with within(repository, Limits(connections=2, body_seconds=0.1)) as (service, _):
        async with (
            serve_grpc(service, "127.0.0.1", 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            silent = []
            for count in (1, 2):
                silent.append(channel.stream_stream(path)(timeout=PATIENCE))
                while len(service._calls.awaited) < count:
                    await asyncio.sleep(0)
            answer = await channel.unary_unary(INFER)(grpc_request(X), timeout=PATIENCE)
            assert messages.ModelInferResponse.FromString(answer).raw_output_contents == [(X + 1).tobytes()]
            with pytest.raises(grpc.aio.AioRpcError, match="did not come in time") as caught:
                await silent[0].read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            silent[1].cancel()
    await repository.drain()


@pytest.mark.parametrize(("path", "limits"), [(INFER, {"body_seconds": 0.05}), (STREAM, {"idle_seconds": 0.05})])
async def test_a_message_that_does_not_come_in_time(path: str, limits: dict[str, float]) -> None:
    repository = repository_of(Loads())
    await repository.load_all()
    with within(repository, Limits(**limits)) as (service, _):
        async with (
            serve_grpc(service, "127.0.0.1", 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="did not come in time") as caught:
                await channel.stream_stream(path)(timeout=PATIENCE).read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            with pytest.raises(grpc.aio.AioRpcError, match="the call has no message"):
                await channel.stream_unary(INFER)(iter(()), timeout=PATIENCE)
    await repository.drain()


async def test_messages_of_grpc_count_with_the_bodies_of_http() -> None:
    runner = HeldRunner(1, held=True)
    repository = repository_of(Loads(runner))
    await repository.load_all()
    limits = Limits(total_body_bytes=100_000, body_seconds=0.1)
    with within(repository, limits) as (service, bodies):
        async with (
            serve_grpc(service, "127.0.0.1", 0) as port,
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
        ):
            first = channel.unary_unary(INFER)(grpc_request(LARGE), timeout=PATIENCE)
            await runner.entered.wait()
            assert 60_000 < bodies.held_bytes < 61_000
            with pytest.raises(grpc.aio.AioRpcError, match="bytes of other requests") as caught:
                await channel.unary_unary(INFER)(grpc_request(LARGE), timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            runner.go_on.set()
            await first
    await repository.drain()
