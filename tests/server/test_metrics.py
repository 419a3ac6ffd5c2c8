"""What Prometheus reads at /metrics, parsed by its own client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from dagexec.errors import OperatorError
from dagexec.options import CompileOptions
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.proto import inference_pb2 as messages
from dagexec.server.run import Server
from tests.held import PATIENCE, doubled_model
from tests.server.raw import binary_request, connected, infer_path, post
from tests.server.runners import HeldRunner
from tests.server.serving import serving


@contextmanager
def server_of(options: CompileOptions) -> Iterator[tuple[Server, triton.InferenceServerClient]]:
    model = ModelConfig(name="doubled", source=doubled_model(), version="7", options=options)
    with (
        serving(ServerConfig(models={"doubled": model}, control=True)) as server,
        triton.InferenceServerClient(server.url.removeprefix("http://")) as client,
    ):
        yield server, client


def ask(client: triton.InferenceServerClient, rows: int, width: int = 3, model: str = "doubled") -> None:
    x = triton.InferInput("x", [rows, width], "FP32")
    x.set_data_from_numpy(np.ones((rows, width), np.float32))
    client.infer(model, [x])


def samples(server: Server, accept: str = "text/plain") -> dict[tuple[str, ...], float]:
    """All values by the name of their metric, their labels in order of their names, and nothing else."""
    page = httpx.get(f"{server.url}/metrics", headers={"accept": accept}, timeout=PATIENCE)
    assert page.status_code == 200
    parse = openmetrics.text_string_to_metric_families if "openmetrics" in accept else text_string_to_metric_families
    assert ("openmetrics" in page.headers["content-type"]) == ("openmetrics" in accept)
    return {
        (sample.name, *(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in parse(page.text)
        for sample in family.samples
    }


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_requests_are_counted_by_outcome_and_timed(accept: str) -> None:
    with server_of(CompileOptions()) as (server, client):
        before = samples(server, accept)
        assert ("dagexec_requests_total", "doubled", "completed", "7") not in before
        for rows in (1, 2, 3):
            ask(client, rows)
        with pytest.raises(InferenceServerException):
            ask(client, 1, width=4)
        with pytest.raises(InferenceServerException, match="unknown model"):
            ask(client, 1, model="none")
        found = samples(server, accept)
    assert found["dagexec_requests_total", "doubled", "completed", "7"] == 3
    outcomes = {key[2] for key in found if key[0] == "dagexec_requests_total"}
    assert outcomes == {"completed", "invalid"}
    assert {key[1] for key in found if key[0] == "dagexec_requests_total"} == {"doubled"}
    assert found["dagexec_request_seconds_count", "doubled", "7"] == 3
    assert found["dagexec_request_seconds_bucket", "+Inf", "doubled", "7"] == 3
    assert found["dagexec_request_seconds_sum", "doubled", "7"] > 0
    assert found["dagexec_requests_running", "doubled", "7"] == 0
    assert found["dagexec_requests_queued", "doubled", "7"] == 0
    assert found["dagexec_replicas", "doubled", "7"] >= 1
    assert found["dagexec_arena_bytes", "doubled", "7"] >= 0
    assert found["process_resident_memory_bytes",] > 1 << 20


def test_mistakes_of_clients_count_apart_from_failures() -> None:
    """Whatever is wrong with them, and over both transports; a name that is not there is no label."""
    failing = HeldRunner(0.0)
    failing.error = OperatorError("an operator failed")
    model = ModelConfig(name="doubled", source=doubled_model(), version="7")
    with (
        serving(ServerConfig(models={"doubled": model}, grpc_port=0)) as server,
        grpc.insecure_channel(server.grpc_address) as channel,
        connected(server) as client,
    ):
        server.repository.add("failing", failing)
        x = np.ones((1, 3), np.float32)
        for request in (
            post(infer_path("doubled"), b"no JSON"),
            binary_request("doubled", x, name="z"),
            binary_request("doubled", np.ones((1, 4), np.float32)),
            binary_request("doubled", x, datatype="FP31"),
            post(infer_path("unknown"), b"no JSON"),
        ):
            assert client.ask(request).status in (400, 404)
        for _ in range(2):
            assert client.ask(binary_request("failing", x)).status == 500
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        wrong = messages.ModelInferRequest(model_name="doubled", inputs=[messages.Tensor(name="x", datatype="FP31")])
        for sent in (b"\xff", wrong.SerializeToString()):
            with pytest.raises(grpc.RpcError):
                call(sent, timeout=PATIENCE)
        with connected(server) as other:
            assert other.ask(b"no HTTP\r\n\r\n").status == 400
        found = samples(server)
    requests = {key[1:]: value for key, value in found.items() if key[0] == "dagexec_requests_total"}
    assert requests == {("doubled", "invalid", "7"): 5, ("failing", "failed", "1"): 2}
    errors = {key[1:]: value for key, value in found.items() if key[0] == "dagexec_error_answers_total"}
    assert errors == {("400", "http"): 6, ("500", "http"): 2, ("400", "grpc"): 2}


def test_rows_of_runs_that_requests_are_joined_in() -> None:
    with server_of(CompileOptions(max_batch=8)) as (server, client):
        for rows in (1, 3, 3):
            ask(client, rows)
        found = samples(server)
    buckets = {key[1]: value for key, value in found.items() if key[0] == "dagexec_batch_rows_bucket"}
    assert (buckets["1.0"], buckets["2.0"], buckets["4.0"], buckets["+Inf"]) == (1, 1, 3, 3)
    assert found["dagexec_batch_rows_sum", "doubled", "7"] == 7
    assert found["dagexec_batch_rows_count", "doubled", "7"] == 3


def test_a_model_that_is_unloaded_has_counts_and_no_state() -> None:
    with server_of(CompileOptions()) as (server, client):
        ask(client, 1)
        client.unload_model("doubled")
        found = samples(server)
    assert found["dagexec_requests_total", "doubled", "completed", "7"] == 1
    assert not [key for key in found if key[0] in ("dagexec_replicas", "dagexec_requests_running")]
