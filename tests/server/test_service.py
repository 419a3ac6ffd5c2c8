"""What a service promises beyond one answer: versions change under load, full queues, time limits and traces."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton
from onnx import TensorProto
from opentelemetry import trace
from tritonclient.utils import InferenceServerException

from dagexec.core.feeds import Array, Feeds
from dagexec.executor.executor import Executor
from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.run import Server
from tests.held import PATIENCE, doubled_model, held_operators, rows
from tests.server.raw import Answer, binary_request, connected
from tests.server.runners import HeldRunner
from tests.server.serving import serving
from tests.server.test_triton_client import two_typed_model


def ask(server: Server, value: float, **headers: object) -> Answer:
    with connected(server) as client:
        return client.ask(binary_request("m", rows(value), headers))


def executor_of(server: Server) -> Executor:
    [version] = server.repository.loaded()
    assert isinstance(version.runner, Executor)
    return version.runner


def test_a_new_version_takes_over_under_load_and_no_request_fails(tmp_path: Path) -> None:
    def write(version: str, op: str) -> None:
        (tmp_path / version).mkdir()
        onnx.save(two_typed_model(op, TensorProto.FLOAT), tmp_path / version / "model.onnx")

    write("1", "Neg")
    swapped = threading.Event()
    started = threading.Barrier(4)
    expected = {"1": [[1.0, -2.0]], "2": [[1.0, 2.0]]}

    def versions_seen(address: str) -> list[str]:
        """The version of each answer, up to one that was asked for after the change."""
        x = triton.InferInput("x", [1, 2], "FP32")
        x.set_data_from_numpy(np.float32([[-1, 2]]))
        seen: list[str] = []
        with triton.InferenceServerClient(address) as client:
            last = False
            while not last:
                last = swapped.is_set()
                result = client.infer("m", [x])
                version = result.get_response()["model_version"]
                assert result.as_numpy("y").tolist() == expected[version]
                seen.append(version)
                if len(seen) == 1:
                    started.wait(PATIENCE)
        return seen

    with serving(ServerConfig(models={"m": ModelConfig(name="m", source=tmp_path)}, control=True)) as server:
        address = server.url.removeprefix("http://")
        with ThreadPoolExecutor(3) as threads, triton.InferenceServerClient(address) as client:
            asking = [threads.submit(versions_seen, address) for _ in range(3)]
            try:
                started.wait(PATIENCE)
                write("2", "Abs")
                client.load_model("m")
            finally:
                swapped.set()
            for one in asking:
                seen = one.result(PATIENCE)
                assert seen == sorted(seen)
                assert (seen[0], seen[-1]) == ("1", "2")


def test_who_finds_the_queue_full_is_told_when_to_come_back() -> None:
    options = CompileOptions(replicas=1, max_queued=1, when_full="reject")
    model = ModelConfig(name="m", source=doubled_model("Held"), options=options)
    with held_operators() as held, ThreadPoolExecutor(2) as threads:
        held.go_on.release()  # the run that warms the model up
        with serving(ServerConfig(models={"m": model})) as server:
            held.wait_inside()
            first = threads.submit(ask, server, 1)
            held.wait_inside()
            second = threads.submit(ask, server, 2)
            while executor_of(server).statistics().queued == 0:
                pass
            third = ask(server, 3)
            held.go_on.release(2)
            assert third.status == 503
            assert int(third.headers["retry-after"]) >= 1
            assert "m" in third.error
            assert (first.result(PATIENCE).status, second.result(PATIENCE).status) == (200, 200)
    assert held.seen == [0, 1, 2]


def test_settings_of_a_file_reach_each_model(tmp_path: Path) -> None:
    """Clients see the time limit; how many run at one time and are joined stands in the executor's statistics."""
    config = ServerConfig(models={"m": ModelConfig(name="m", source=doubled_model())})
    changed = config.models["m"].changed({"replicas": 3, "max_batch": 8, "priority": 5, "timeout": 1e-6})
    with serving(ServerConfig(models={"m": changed}, grpc_port=0)) as server:
        statistics = executor_of(server).statistics()
        late = ask(server, 1)
        with triton_grpc.InferenceServerClient(server.grpc_address) as client:
            x = triton_grpc.InferInput("x", [2, 3], "FP32")
            x.set_data_from_numpy(rows(1))
            with pytest.raises(InferenceServerException) as caught:
                client.infer("m", [x])
    assert statistics.replicas == 3
    assert late.status == 504
    assert late.error
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"


class TracedRunner(HeldRunner):
    """Remembers the span that each run is under."""

    def __init__(self) -> None:
        super().__init__(1)
        self.parents: list[trace.SpanContext] = []

    async def run_async(
        self, feeds: Feeds, *, outputs: Iterable[str] | None = None, timeout: float | None = None, priority: int = 0
    ) -> dict[str, Array]:
        self.parents.append(trace.get_current_span().get_span_context())
        return await super().run_async(feeds, outputs=outputs, timeout=timeout, priority=priority)


def test_a_run_is_under_the_span_that_the_client_names() -> None:
    runner = TracedRunner()
    given = f"00-{7:032x}-{9:016x}-01"
    x = triton_grpc.InferInput("x", [1, 3], "FP32")
    x.set_data_from_numpy(rows(1)[:1])
    with serving(ServerConfig(grpc_port=0)) as server, triton_grpc.InferenceServerClient(server.grpc_address) as client:
        server.repository.add("m", runner)
        assert ask(server, 1, traceparent=given).status == 200
        assert ask(server, 1).status == 200
        client.infer("m", [x], headers={"traceparent": given})
        client.infer("m", [x])
    for named, unnamed in (runner.parents[:2], runner.parents[2:]):
        assert (named.trace_id, named.span_id, named.is_remote) == (7, 9, True)
        assert not unnamed.is_valid
