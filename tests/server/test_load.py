"""A load generator that speaks the published protocol: many requests at once, each with its own answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.run import Server
from tests.held import doubled_model
from tests.server.serving import serving

REQUESTS, AT_ONCE = 96, 16

Ask = Callable[[np.ndarray], Awaitable[np.ndarray]]


class _HttpConnection:
    """One connection, which takes a request after the other."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer

    async def ask(self, x: np.ndarray) -> np.ndarray:
        data = x.tobytes()
        tensor = {"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": len(data)}}
        text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        self.writer.write(
            b"POST /v2/models/doubled/infer HTTP/1.1\r\nHost: here\r\nInference-Header-Content-Length: %d\r\n"
            b"Content-Length: %d\r\n\r\n%b%b" % (len(text), len(text) + len(data), text, data)
        )
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower().split("\r\n")
        assert lines[0].startswith("http/1.1 200"), lines[0]
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        body = await self._reader.readexactly(int(headers["content-length"]))
        length = int(headers["inference-header-content-length"])
        [output] = json.loads(body[:length])["outputs"]
        return np.frombuffer(body[length:], np.float32).reshape(output["shape"])


@asynccontextmanager
async def http_clients(server: Server) -> Any:
    address = server.url.removeprefix("http://").split(":")
    clients = [_HttpConnection(*await asyncio.open_connection(address[0], int(address[1]))) for _ in range(AT_ONCE)]
    try:
        yield [client.ask for client in clients]
    finally:
        for client in clients:
            client.writer.close()


@asynccontextmanager
async def grpc_clients(server: Server) -> Any:
    async with grpc.aio.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            service_pb2.ModelInferRequest.SerializeToString,
            service_pb2.ModelInferResponse.FromString,
        )

        async def ask(x: np.ndarray) -> np.ndarray:
            request = service_pb2.ModelInferRequest(model_name="doubled", raw_input_contents=[x.tobytes()])
            request.inputs.add(name="x", datatype="FP32", shape=x.shape)
            answer = await call(request)
            return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(answer.outputs[0].shape)

        yield [ask] * AT_ONCE


@pytest.mark.parametrize("max_batch", [1, 8])
@pytest.mark.parametrize("clients_of", [http_clients, grpc_clients])
def test_each_of_many_requests_gets_its_own_answer(clients_of: Any, max_batch: int) -> None:
    """And the server's statistics have them all, as runs with as many rows as requests had."""
    options = CompileOptions(max_batch=max_batch, max_wait=0.001)
    model = ModelConfig(name="doubled", source=doubled_model(), options=options)
    random = np.random.default_rng(0)
    inputs = [random.standard_normal((1 + number % 3, 3), np.float32) for number in range(REQUESTS)]
    answers: dict[int, np.ndarray] = {}

    async def load(server: Server) -> None:
        waiting = iter(enumerate(inputs))

        async def one_after_another(ask: Ask) -> None:
            for number, x in waiting:
                answers[number] = await ask(x)

        async with clients_of(server) as clients, asyncio.TaskGroup() as tasks:
            for ask in clients:
                tasks.create_task(one_after_another(ask))

    with serving(ServerConfig(models={"doubled": model}, grpc_port=0)) as server:
        asyncio.run(load(server))
        [found] = server.repository.statistics("doubled")
    assert len(answers) == REQUESTS
    for number, x in enumerate(inputs):
        np.testing.assert_array_equal(answers[number], np.maximum(x, 0) * 2)
    counts = {name: one["count"] for name, one in found["inference_stats"].items()}
    assert (counts["success"], counts["fail"], counts["compute_infer"]) == (REQUESTS, 0, REQUESTS)
    runs = found["batch_stats"]
    assert sum(run["compute_infer"]["count"] for run in runs) == found["execution_count"] <= REQUESTS
    rows = sum(map(len, inputs)) if max_batch > 1 else REQUESTS
    assert sum(run["batch_size"] * run["compute_infer"]["count"] for run in runs) == found["inference_count"] == rows
    spent = {name: one["ns"] for name, one in found["inference_stats"].items()}
    assert (
        sum(spent[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")) <= spent["success"]
    )
