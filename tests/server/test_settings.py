"""Settings of traces and logs, as unmodified clients of Triton read them, and cannot change them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from tritonclient.utils import InferenceServerException

from dagexec.server.config import ModelConfig, ServerConfig
from tests.held import doubled_model
from tests.server.serving import serving

LOG = {
    "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 0,
    "log_format": "default",
}  # fmt: skip


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    models = {"doubled": ModelConfig(name="doubled", source=doubled_model())}
    with serving(ServerConfig(models=models, grpc_port=0)) as server:
        yield {"http": server.url.removeprefix("http://"), "grpc": server.grpc_address}


@pytest.fixture(params=["http", "grpc"])
def client(addresses: dict[str, str], request: pytest.FixtureRequest) -> Iterator[Any]:
    module = over_http if request.param == "http" else over_grpc
    with module.InferenceServerClient(addresses[request.param]) as client:
        client.kind = request.param
        client.module = module
        yield client


def as_json(client: Any) -> dict[str, bool]:
    return {} if client.kind == "http" else {"as_json": True}


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of traces as HTTP has them: gRPC has lists alone."""
    found = {name: one["value"] for name, one in settings["settings"].items()} if "settings" in settings else settings
    one = {name: value[0] for name, value in found.items() if isinstance(value, list) and name != "trace_level"}
    return found | one


def refused(client: Any) -> tuple[str, ...]:
    return ("403",) if client.kind == "http" else ("StatusCode.PERMISSION_DENIED",)


def test_traces(client: Any) -> None:
    expected = {
        "trace_file": "", "trace_level": ["OFF"], "trace_rate": "1", "trace_count": "-1", "log_frequency": "0",
        "trace_mode": "triton",
    }  # fmt: skip
    assert plain(client.get_trace_settings(**as_json(client))) == expected
    assert plain(client.get_trace_settings("doubled", **as_json(client))) == expected
    same = client.update_trace_settings(settings={"trace_rate": "1", "trace_level": ["OFF"]}, **as_json(client))
    assert plain(same) == expected
    for settings in ({"trace_level": ["TIMESTAMPS"]}, {"trace_file": "/etc/passwd"}, {"trace_rate": "2"}):
        with pytest.raises(InferenceServerException, match="may not change settings") as caught:
            client.update_trace_settings(settings=settings)
        assert caught.value.status() in refused(client)
    with pytest.raises(InferenceServerException, match="unknown setting 'color'"):
        client.update_trace_settings(settings={"color": "red"})
    with pytest.raises(InferenceServerException, match="unknown model 'other'"):
        client.get_trace_settings("other")


def test_logs(client: Any, request: pytest.FixtureRequest) -> None:
    def settings() -> dict[str, Any]:
        found = client.get_log_settings(**as_json(client))
        if client.kind == "http":
            return dict(found)
        return {name: next(iter(one.values())) for name, one in found["settings"].items()}

    logger = logging.getLogger("dagexec.server")
    before = logger.level
    logger.setLevel(logging.INFO)
    request.addfinalizer(lambda: logger.setLevel(before))
    assert settings() == LOG
    client.update_log_settings({"log_info": True})
    for wrong in ({"log_info": False}, {"log_verbose_level": 1}, {"log_file": "/tmp/log"}):
        with pytest.raises(InferenceServerException, match="may not change settings") as caught:
            client.update_log_settings(wrong)
        assert caught.value.status() in refused(client)
    logger.setLevel(logging.ERROR)
    assert settings() == LOG | {"log_info": False, "log_warning": False}


def test_traces_of_a_server_with_telemetry() -> None:
    with (
        serving(ServerConfig(telemetry=True)) as server,
        over_http.InferenceServerClient(server.url.removeprefix("http://")) as client,
    ):
        found = client.get_trace_settings()
    assert (found["trace_level"], found["trace_mode"]) == (["TIMESTAMPS"], "opentelemetry")


def test_classification_is_refused(client: Any) -> None:
    x = client.module.InferInput("x", [1, 3], "FP32")
    x.set_data_from_numpy(np.ones((1, 3), np.float32))
    with pytest.raises(InferenceServerException, match="classification is not supported"):
        client.infer("doubled", [x], outputs=[client.module.InferRequestedOutput("y", class_count=2)])
