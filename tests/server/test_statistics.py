"""Statistics and configurations of models, as unmodified clients of Triton read them over HTTP and gRPC."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from google.protobuf import json_format
from tritonclient.grpc import model_config_pb2, service_pb2
from tritonclient.utils import InferenceServerException

from dagexec.executor.executor import Executor
from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.run import Server
from tests.held import PATIENCE, Held, doubled_model, held_operators
from tests.server.runners import HeldRunner
from tests.server.serving import serving

PHASES = ("compute_input", "compute_infer", "compute_output")


class Asked:
    """A server with clients of both kinds."""

    def __init__(self, server: Server) -> None:
        self.http = over_http.InferenceServerClient(server.url.removeprefix("http://"))
        self.grpc = over_grpc.InferenceServerClient(server.grpc_address)
        self._url = server.url.removeprefix("http://")
        executor = server.repository.loaded()[0].runner
        assert isinstance(executor, Executor)
        self.executor = executor

    def infer(self, rows: int, width: int = 3, model: str = "doubled") -> None:
        x = over_http.InferInput("x", [rows, width], "FP32")
        x.set_data_from_numpy(np.ones((rows, width), np.float32))
        with over_http.InferenceServerClient(self._url) as client:  # those of Triton are for one thread each
            client.infer(model, [x])

    def statistics(self, name: str = "doubled", version: str = "") -> dict[str, Any]:
        """Those of a model: in HTTP's JSON there is all that gRPC's messages have, and nothing that these do not."""
        [found] = self.http.get_inference_statistics(name, version)["model_stats"]
        message = json_format.ParseDict(found, service_pb2.ModelStatistics())
        [same] = self.grpc.get_inference_statistics(name, version).model_stats
        assert message == same
        return found


@contextmanager
def asked(options: CompileOptions, held: Held | None = None) -> Iterator[Asked]:
    source = doubled_model() if held is None else doubled_model("Held")
    if held is not None:
        held.go_on.release()  # the model is warmed up
    config = ModelConfig(name="doubled", source=source, version="7", options=options)
    with serving(ServerConfig(models={"doubled": config}, grpc_port=0, control=True)) as server:
        server.repository.add("elsewhere", HeldRunner(1.0))
        clients = Asked(server)
        with clients.http, clients.grpc:
            yield clients


def test_requests_and_runs_are_counted() -> None:
    before = round(1000 * time.time()) - 1
    with asked(CompileOptions()) as server:
        fresh = server.statistics()
        for rows in (1, 2, 2):
            server.infer(rows)
        for width in (4, 5):
            with pytest.raises(InferenceServerException):
                server.infer(1, width)
        found = server.statistics()
        assert server.statistics(version="7") == found
    assert (fresh["inference_count"], fresh["execution_count"], fresh["last_inference"]) == (0, 0, 0)
    assert fresh["batch_stats"] == []
    assert (found["name"], found["version"]) == ("doubled", "7")
    assert (found["inference_count"], found["execution_count"]) == (3, 3)
    assert before <= found["last_inference"] <= 1000 * time.time() + 1
    counts = {name: one["count"] for name, one in found["inference_stats"].items()}
    assert counts == {"success": 3, "fail": 2, "queue": 3, **dict.fromkeys(PHASES, 3), "cache_hit": 0, "cache_miss": 0}
    [alone] = found["batch_stats"]
    assert alone["batch_size"] == 1  # the executor joins nothing, so it does not know of rows
    assert {name: alone[name] for name in PHASES} == {name: found["inference_stats"][name] for name in PHASES}


def test_durations_are_those_of_what_happened() -> None:
    """Two requests for one replica: the first is held in its run, and the second one waits for that long."""
    seconds = 0.05
    with (
        held_operators() as control,
        asked(CompileOptions(replicas=1, num_workers=1), held=control) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        first = threads.submit(server.infer, 1)
        control.wait_inside(2)
        second = threads.submit(server.infer, 1)
        while server.executor.statistics().queued == 0:
            time.sleep(0.001)
        time.sleep(seconds)
        control.go_on.release(2)
        for one in (first, second):
            one.result(PATIENCE)
        found = server.statistics()["inference_stats"]
    assert {found[name]["count"] for name in ("success", "queue", *PHASES)} == {2}
    spent = {name: one["ns"] / 1e9 for name, one in found.items()}
    assert spent["compute_infer"] >= seconds
    assert spent["queue"] >= seconds
    assert min(spent[name] for name in PHASES) > 0
    assert sum(spent[name] for name in ("queue", *PHASES)) <= spent["success"]


def test_joined_requests_are_one_execution() -> None:
    with asked(CompileOptions(max_batch=4, max_wait=PATIENCE)) as server, ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(server.infer, rows) for rows in (1, 1, 2)]:
            one.result(PATIENCE)
        found = server.statistics()
    assert (found["inference_count"], found["execution_count"]) == (4, 1)
    [joined] = found["batch_stats"]
    assert joined["batch_size"] == 4
    for name in PHASES:
        [once, each] = joined[name], found["inference_stats"][name]
        assert (once["count"], each["count"]) == (1, 3)
        assert each["ns"] == pytest.approx(3 * once["ns"], abs=3)
    assert found["inference_stats"]["queue"]["count"] == 3


def test_all_models_and_those_without_an_executor() -> None:
    with asked(CompileOptions()) as server:
        server.infer(1, model="elsewhere")
        everything = server.http.get_inference_statistics()["model_stats"]
        also = server.grpc.get_inference_statistics().model_stats
        for ask in (server.http.get_inference_statistics, server.grpc.get_inference_statistics):
            with pytest.raises(InferenceServerException, match="unknown model 'other'"):
                ask("other")
            with pytest.raises(InferenceServerException, match="no version '8'"):
                ask("doubled", "8")
        elsewhere = server.statistics("elsewhere")
    assert [one["name"] for one in everything] == [one.name for one in also] == ["doubled", "elsewhere"]
    assert elsewhere["inference_stats"]["success"]["count"] == 1
    assert elsewhere["inference_stats"]["success"]["ns"] > 0
    assert elsewhere["inference_stats"]["compute_infer"] == {"count": 0, "ns": 0}


def test_statistics_begin_anew_with_a_version_that_is_loaded() -> None:
    with asked(CompileOptions()) as server:
        server.infer(1)
        server.http.load_model("doubled")
        found = server.statistics()
    assert (found["inference_count"], found["inference_stats"]["success"]["count"]) == (0, 0)


@pytest.mark.parametrize(("max_batch", "dims"), [(1, [-1, 3]), (8, [3])])
def test_configurations(max_batch: int, dims: list[int]) -> None:
    with asked(CompileOptions(max_batch=max_batch, max_wait=0.001)) as server:
        found = server.http.get_model_config("doubled")
        versioned = server.http.get_model_config("doubled", "7")
        same = server.grpc.get_model_config("doubled").config
        with pytest.raises(InferenceServerException, match="unknown model 'other'"):
            server.http.get_model_config("other")
    assert found == versioned
    message = json_format.ParseDict(found, model_config_pb2.ModelConfig())
    assert message == same
    assert (message.name, message.backend, list(message.version_policy.specific.versions)) == (
        "doubled",
        "dagexec",
        [7],
    )
    assert message.max_batch_size == (8 if max_batch > 1 else 0)
    assert [(one.name, one.data_type, list(one.dims)) for one in message.input] == [("x", 11, dims)]
    assert [(one.name, one.data_type, list(one.dims)) for one in message.output] == [("y", 11, dims)]
    assert message.HasField("dynamic_batching") == (max_batch > 1)
    assert message.dynamic_batching.max_queue_delay_microseconds == (1000 if max_batch > 1 else 0)
