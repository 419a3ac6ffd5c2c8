"""The gRPC server, asked by an unmodified tritonclient over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from tritonclient.grpc import (
    InferenceServerClient,
    InferenceServerException,
    InferInput,
    InferRequestedOutput,
    InferResult,
    aio,
    service_pb2,
)

import dagexec
from dagexec.errors import OperatorError, QueueFullError, RunTimeoutError, SettingError
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.grpc_service import InferenceService, serve_grpc
from dagexec.server.limits import Limits
from dagexec.server.repository import Repository
from dagexec.testing import random_feeds
from tests.held import PATIENCE
from tests.server.runners import HeldRunner, Loads, repository_of

MIB = 1 << 20
INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # all that gRPC has


@asynccontextmanager
async def serving(repository: Repository, **limits: Any) -> AsyncIterator[str]:
    """The address of a server whose models are loaded."""
    await repository.load_all()
    limits = {"body_bytes": MIB, "connections": 100, "body_seconds": 0.1, **limits}
    repository.config = replace(repository.config, limits=Limits(**limits))
    service = InferenceService(repository, name="a server", version="1.2.3")
    try:
        async with serve_grpc(service, "127.0.0.1", 0) as port:
            yield f"127.0.0.1:{port}"
    finally:
        await repository.drain(0)


@asynccontextmanager
async def client_of(repository: Repository, **limits: Any) -> AsyncIterator[aio.InferenceServerClient]:
    async with serving(repository, **limits) as url, aio.InferenceServerClient(url) as client:
        yield client


def input_of(values: np.ndarray, name: str = "x", datatype: str = "FP32") -> InferInput:
    found = InferInput(name, list(values.shape), datatype)
    found.set_data_from_numpy(values)
    return found


def rows(count: int = 2) -> np.ndarray:
    return np.arange(3 * count, dtype=np.float32).reshape(count, 3)


def code_of(error: InferenceServerException) -> str:
    return str(error.status()).removeprefix("StatusCode.")


async def test_the_server_and_its_models_tell_what_they_are() -> None:
    async with client_of(repository_of(Loads())) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready("m")
        assert await client.is_model_ready("m", "1")
        assert not await client.is_model_ready("m", "2")
        assert not await client.is_model_ready("n")
        server = await client.get_server_metadata(as_json=True)
        assert (server["name"], server["version"]) == ("a server", "1.2.3")
        metadata = await client.get_model_metadata("m")
        assert (metadata.name, list(metadata.versions), metadata.platform) == ("m", ["1"], "dagexec")
        [x], [y] = metadata.inputs, metadata.outputs
        assert (x.name, x.datatype, list(x.shape)) == ("x", "FP32", [-1, 3])
        assert (y.name, y.datatype, list(y.shape)) == ("y", "FP32", [-1, 3])
        config = (await client.get_model_config("m")).config
        assert (config.name, config.max_batch_size, config.backend) == ("m", 0, "dagexec")
        assert [(one.name, one.data_type, list(one.dims)) for one in config.input] == [("x", 11, [-1, 3])]
        assert [(one.name, one.data_type, list(one.dims)) for one in config.output] == [("y", 11, [-1, 3])]


async def test_an_inference_answers_with_the_model_and_the_id_of_the_request() -> None:
    async with client_of(repository_of(Loads())) as client:
        result = await client.infer("m", [input_of(rows())], request_id="an id", outputs=[InferRequestedOutput("y")])
        answer = result.get_response()
        assert (answer.model_name, answer.model_version, answer.id) == ("m", "1", "an id")
        assert result.as_numpy("y").tolist() == (rows() + 1).tolist()


async def test_a_request_can_have_priority_and_timeout() -> None:
    runner = HeldRunner(1)
    async with client_of(repository_of(Loads(runner))) as client:
        await client.infer("m", [input_of(rows())], priority=3, timeout=2_000_000)
    assert runner.calls == [(2.0, -2)]


async def test_the_blocking_client_gets_the_bytes_that_the_executor_gives() -> None:
    model = ModelConfig(name="lenet", source="zoo:lenet")
    with dagexec.compile("zoo:lenet") as executor:
        feeds = random_feeds(executor.model)
        expected = executor.run(feeds)

    def ask(url: str) -> InferResult:
        with InferenceServerClient(url) as client:
            return client.infer("lenet", [input_of(value, name) for name, value in feeds.items()])

    async with serving(Repository(ServerConfig(models={"lenet": model}))) as url:
        result = await asyncio.to_thread(ask, url)
    for name, value in expected.items():
        assert result.as_numpy(name).tobytes() == value.tobytes()


async def test_the_repository_is_listed_and_changed_by_clients() -> None:
    loads = Loads()
    async with client_of(repository_of(loads)) as client:
        [row] = (await client.get_model_repository_index()).models
        assert (row.name, row.version, row.state) == ("m", "1", "READY")
        await client.unload_model("m")
        assert not await client.is_model_ready("m")
        [row] = (await client.get_model_repository_index()).models
        assert (row.name, row.state, row.reason) == ("m", "UNAVAILABLE", "unloaded")
        await client.load_model("m", config='{"priority": 7}')
        assert loads.configs[-1].priority == 7
        result = await client.infer("m", [input_of(rows())])
        assert result.as_numpy("y").tolist() == (rows() + 2).tolist()
        with pytest.raises(InferenceServerException, match="files") as caught:
            await client.load_model("m", files={"file:1/model.onnx": b"bytes"}, config="{}")
        assert code_of(caught.value) == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (QueueFullError("the queue is full"), "UNAVAILABLE", "the queue is full"),
        (RunTimeoutError("too late"), "DEADLINE_EXCEEDED", "too late"),
        (OperatorError("an operator failed"), "INTERNAL", "an operator failed"),
        (ZeroDivisionError("a secret"), "INTERNAL", "internal error"),
    ],
)
async def test_errors_of_a_run_have_their_codes_and_no_traceback(error: Exception, code: str, text: str) -> None:
    runner = HeldRunner(1)
    runner.error = error
    async with client_of(repository_of(Loads(runner))) as client:
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("m", [input_of(rows())])
        assert code_of(caught.value) == code
        assert caught.value.message() == text
        runner.error = None
        assert (await client.infer("m", [input_of(rows())])).as_numpy("y").tolist() == (rows() + 1).tolist()


async def test_an_input_that_there_is_not_is_named_and_not_its_size() -> None:
    async with serving(repository_of(Loads())) as url, grpc.aio.insecure_channel(url) as channel:
        tensor = service_pb2.ModelInferRequest.InferInputTensor(name="xs", datatype="FP32", shape=[1, 3])
        request = service_pb2.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[b"1234"])
        with pytest.raises(grpc.aio.AioRpcError, match="unknown input 'xs'") as caught:
            await channel.unary_unary(INFER)(request.SerializeToString(), timeout=PATIENCE)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(caught.value.details()).endswith("; did you mean 'x'?")


async def test_who_finds_the_queue_full_is_told_when_to_come_back() -> None:
    runner = HeldRunner(1)
    runner.error = QueueFullError("the queue is full")
    async with serving(repository_of(Loads(runner))) as url, grpc.aio.insecure_channel(url) as channel:
        request = service_pb2.ModelInferRequest(model_name="m").SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(INFER)(request, timeout=PATIENCE)
    assert dict(caught.value.trailing_metadata()) == {"grpc-retry-pushback-ms": "1000"}


async def test_a_client_that_gives_up_cancels_its_run_and_no_other() -> None:
    runner = HeldRunner(1, held=True)
    async with client_of(repository_of(Loads(runner))) as client:
        other = asyncio.create_task(client.infer("m", [input_of(rows())]))
        await _until(lambda: runner.inside == 1)
        call = asyncio.create_task(client.infer("m", [input_of(rows())]))
        await _until(lambda: runner.inside == 2)
        call.cancel()
        await _until(lambda: runner.cancelled == 1)
        assert runner.inside == 1
        runner.go_on.set()
        assert (await other).as_numpy("y").tolist() == (rows() + 1).tolist()


async def test_a_deadline_that_passes_cancels_the_run() -> None:
    runner = HeldRunner(1, held=True)
    async with client_of(repository_of(Loads(runner))) as client:
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("m", [input_of(rows())], client_timeout=0.2)
        assert code_of(caught.value) == "DEADLINE_EXCEEDED"
        await _until(lambda: runner.cancelled == 1)


async def test_a_message_that_is_too_long_is_refused_and_others_go_on() -> None:
    async with client_of(repository_of(Loads()), body_bytes=MIB) as client:
        with pytest.raises(InferenceServerException, match="larger than max") as caught:
            await client.infer("m", [input_of(rows(MIB // 12))])
        assert code_of(caught.value) == "RESOURCE_EXHAUSTED"
        with pytest.raises(InferenceServerException, match="larger than max") as caught:
            await client.infer("m", [input_of(rows(MIB // 4))], compression_algorithm="gzip")
        assert code_of(caught.value) == "RESOURCE_EXHAUSTED"
        result = await client.infer("m", [input_of(rows(MIB // 12 - 100))])
        assert result.as_numpy("y").nbytes == 12 * (MIB // 12 - 100)


async def test_calls_beyond_the_limit_are_refused_and_the_others_answered() -> None:
    runner = HeldRunner(1, held=True)
    async with client_of(repository_of(Loads(runner)), connections=2) as client:
        calls = [asyncio.create_task(client.infer("m", [input_of(rows())])) for _ in range(2)]
        await _until(lambda: runner.inside == 2)
        with pytest.raises(InferenceServerException) as caught:
            await client.infer("m", [input_of(rows())])
        assert code_of(caught.value) == "RESOURCE_EXHAUSTED"
        runner.go_on.set()
        assert len(await asyncio.gather(*calls)) == 2


async def test_what_is_no_message_of_the_protocol_is_refused() -> None:
    async with serving(repository_of(Loads())) as url, grpc.aio.insecure_channel(url) as channel:
        for data in (b"\xff" * 100, service_pb2.ModelInferRequest(model_name="m").SerializeToString()[:-1]):
            with pytest.raises(grpc.aio.AioRpcError, match="not a message") as caught:
                await channel.unary_unary(INFER)(data, timeout=PATIENCE)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_models_are_not_the_clients_to_load_where_the_configuration_says_so() -> None:
    repository = repository_of(Loads())
    repository.config = replace(repository.config, control=False)
    async with client_of(repository) as client:
        for call in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="may not load or unload") as caught:
                await call("m")
            assert code_of(caught.value) == "PERMISSION_DENIED"
        assert await client.is_model_ready("m")
        repository.config = replace(repository.config, control=True, control_settings=False)
        with pytest.raises(InferenceServerException, match="control_settings") as caught:
            await client.load_model("m", config='{"priority": 7}')
        assert code_of(caught.value) == "PERMISSION_DENIED"
        await client.load_model("m")
        assert (await client.infer("m", [input_of(rows())])).as_numpy("y").tolist() == (rows() + 2).tolist()


async def test_a_call_that_is_not_offered_says_so() -> None:
    async with client_of(repository_of(Loads())) as client:
        await client.unregister_cuda_shared_memory()
        assert not (await client.get_cuda_shared_memory_status()).regions
        with pytest.raises(InferenceServerException) as caught:
            await client.register_cuda_shared_memory("images", b"aGFuZGxl", 0, 8)
        assert code_of(caught.value) == "UNIMPLEMENTED"


async def test_a_stream_answers_in_order_and_goes_on_after_an_error() -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number, name in enumerate(["m", "n", "m"]):
            yield {"model_name": name, "inputs": [input_of(rows())], "request_id": str(number)}

    async with client_of(repository_of(Loads())) as client:
        found = [pair async for pair in client.stream_infer(requests())]
    (first, none), (_, error), (last, _) = found
    assert none is None
    assert (first.get_response().id, last.get_response().id) == ("0", "2")
    assert first.as_numpy("y").tolist() == (rows() + 1).tolist()
    assert "unknown model 'n'" in str(error)


async def test_the_end_refuses_new_calls_and_waits_for_those_in_service() -> None:
    runner = HeldRunner(1, held=True)
    async with asyncio.TaskGroup() as tasks:
        async with serving(repository_of(Loads(runner)), body_seconds=PATIENCE) as url:
            client, another = aio.InferenceServerClient(url), aio.InferenceServerClient(url)
            call = tasks.create_task(client.infer("m", [input_of(rows())]))
            await _until(lambda: runner.inside == 1)
            tasks.create_task(_let_go_when_refused(another, runner))
        assert (await call).as_numpy("y").tolist() == (rows() + 1).tolist()
    await client.close()
    await another.close()


async def _let_go_when_refused(client: aio.InferenceServerClient, runner: HeldRunner) -> None:
    # gRPC itself cancels a call that is on its way when the server stops taking any
    with pytest.raises(InferenceServerException, match=r"UNAVAILABLE|CANCELLED"):
        await _live_for_ever(client)
    runner.go_on.set()


async def _live_for_ever(client: aio.InferenceServerClient) -> None:
    while await client.is_server_live(client_timeout=PATIENCE):
        pass


async def test_an_address_that_is_taken_is_an_error() -> None:
    async with serving(repository_of(Loads())) as url:
        service = InferenceService(repository_of(Loads()), name="another", version="1")
        with pytest.raises(SettingError, match="gRPC cannot listen"):
            async with serve_grpc(service, "127.0.0.1", int(url.rpartition(":")[2])):
                pass


async def _until(condition: Any) -> None:
    """Let the loop turn until something is so."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.001)
