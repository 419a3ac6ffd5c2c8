"""Tensors in shared memory, left and found there by unmodified clients of Triton over HTTP and gRPC."""

from __future__ import annotations

import gc
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from onnx import TensorProto
from tritonclient.utils import InferenceServerException, serialize_byte_tensor, shared_memory

from dagexec.errors import SettingError
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.inference import RequestError
from dagexec.server.limits import Limits
from dagexec.server.run import Server
from dagexec.server.shared_memory import Regions
from tests.held import PATIENCE, doubled_model, held_operators
from tests.server.serving import serving
from tests.server.test_triton_client import two_typed_model

PREFIX = f"dagexec-test-{os.getpid()}-"
X = np.float32([[1, 2, -3], [4, -5, 6]])
Y = np.maximum(X, 0) * 2


@dataclass
class Client:
    """A client of either kind."""

    module: ModuleType
    asked: Any
    kind: str
    server: Server
    used: list[Any] = field(default_factory=list)

    @property
    def as_json(self) -> dict[str, bool]:
        """What has gRPC's client answer as HTTP's does."""
        return {} if self.kind == "http" else {"as_json": True}

    def invalid(self) -> float:
        """How many requests the metrics have as mistakes of clients."""
        text = httpx.get(f"{self.server.url}/metrics", timeout=PATIENCE).text
        found = re.search(r'^dagexec_requests_total{model="doubled",outcome="invalid",version="1"} (\S+)$', text, re.M)
        return float(found[1]) if found else 0.0

    def memory(self, name: str, nbytes: int) -> Any:
        """A new object, of which nobody else knows."""
        self.used.append(shared_memory.create_shared_memory_region(name, f"/{PREFIX}{name}-{self.kind}", nbytes))
        return self.used[-1]

    def region(self, name: str, nbytes: int, offset: int = 0, more: int = 0) -> Any:
        """A new object with `more` bytes behind those that are registered."""
        handle = self.memory(name, offset + nbytes + more)
        self.asked.register_system_shared_memory(name, handle._shm_key, nbytes, offset)
        return handle

    def input_in(self, region: str, array: np.ndarray = X, nbytes: int | None = None, offset: int = 0) -> Any:
        one = self.module.InferInput("x", list(array.shape), "FP32")
        one.set_shared_memory(region, array.nbytes if nbytes is None else nbytes, offset)
        return one

    def output_in(self, region: str, nbytes: int = Y.nbytes, offset: int = 0) -> Any:
        one = self.module.InferRequestedOutput("y")
        one.set_shared_memory(region, nbytes, offset)
        return one


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    sources = {"doubled": doubled_model(), "texts": two_typed_model("Identity", TensorProto.STRING)}
    config = ServerConfig(
        models={name: ModelConfig(name=name, source=source) for name, source in sources.items()},
        grpc_port=0,
        shared_memory=(f"{PREFIX}*",),
        limits=Limits(body_bytes=1 << 20),
    )
    with serving(config) as server:
        yield server


@pytest.fixture(params=["http", "grpc"])
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Client]:
    with client_of(server, request.param) as client:
        yield client


@contextmanager
def client_of(server: Server, kind: str) -> Iterator[Client]:
    module = over_http if kind == "http" else over_grpc
    address = server.url.removeprefix("http://") if kind == "http" else server.grpc_address
    with module.InferenceServerClient(address) as asked:
        client = Client(module, asked, kind, server)
        try:
            yield client
        finally:
            asked.unregister_system_shared_memory()
            for handle in client.used:
                shared_memory.destroy_shared_memory_region(handle)


def test_inputs_and_outputs_in_regions(client: Client) -> None:
    """Also behind an offset of the object and one of the region, and with only one of the two there."""
    given = client.region("given", 100, offset=16)
    results = client.region("results", 64)
    shared_memory.set_shared_memory_region(given, [X], offset=16 + 8)
    x = client.input_in("given", offset=8)
    answer = client.asked.infer("doubled", [x], outputs=[client.output_in("results", 40, 24)])
    np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(results, np.float32, [2, 3], 24), Y)
    described = answer.get_output("y")
    found = described["parameters"] if client.kind == "http" else described.parameters
    plain = {key: value if client.kind == "http" else getattr(value, value.WhichOneof("parameter_choice"))
             for key, value in found.items()}  # fmt: skip
    expected = {"shared_memory_region": "results", "shared_memory_byte_size": 24, "shared_memory_offset": 24}
    assert plain == expected
    np.testing.assert_array_equal(client.asked.infer("doubled", [x]).as_numpy("y"), Y)
    sent = client.module.InferInput("x", [1, 3], "FP32")
    sent.set_data_from_numpy(X[:1])
    client.asked.infer("doubled", [sent], outputs=[client.output_in("results", 12)])
    np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(results, np.float32, [1, 3]), Y[:1])


def test_texts(client: Client) -> None:
    texts = np.array([["a", "naïve"]], object)
    data = serialize_byte_tensor(texts)
    nbytes = len(data.item())
    given, results = client.region("given", nbytes), client.region("results", 100)
    shared_memory.set_shared_memory_region(given, [data])
    one = client.module.InferInput("x", [1, 2], "BYTES")
    one.set_shared_memory("given", nbytes)
    client.asked.infer("texts", [one], outputs=[client.output_in("results", 100)])
    found = shared_memory.get_contents_as_numpy(results, np.object_, [1, 2])
    assert [text.decode() for text in found.flat] == ["a", "naïve"]


def test_status_and_unregister(client: Client) -> None:
    for name in ("a", "b"):
        client.region(name, 24, offset=8, more=8)
    keys = {one._triton_shm_name: one._shm_key for one in client.used}

    def status(name: str = "") -> dict[str, tuple[str, int, int]]:
        answer = client.asked.get_system_shared_memory_status(name, **client.as_json)
        if client.kind == "grpc":
            answer = [{"offset": 0, **one} for one in answer.get("regions", {}).values()]
        rows: list[Any] = [(one["name"], one["key"], int(one["offset"]), int(one["byte_size"])) for one in answer]
        return {name: tuple(rest) for name, *rest in rows}

    assert status() == {name: (keys[name], 8, 24) for name in ("a", "b")}
    assert status("b") == {"b": (keys["b"], 8, 24)}
    client.asked.unregister_system_shared_memory("a")
    client.asked.unregister_system_shared_memory("a")
    assert set(status()) == {"b"}
    for ask, wrong in ((lambda: status("a"), "unknown shared memory region 'a'"),
                       (lambda: client.asked.infer("doubled", [client.input_in("a")]), "unknown shared memory region"),
                       (lambda: client.asked.register_system_shared_memory("b", keys["b"], 8), "registered already"),
                       ):  # fmt: skip
        with pytest.raises(InferenceServerException, match=wrong):
            ask()
    client.asked.unregister_system_shared_memory()
    assert status() == {}


def test_keys_that_are_not_allowed(client: Client) -> None:
    with pytest.raises(InferenceServerException, match="does not allow") as caught:
        client.asked.register_system_shared_memory("r", "/other", 8)
    assert caught.value.status() in ("403", "StatusCode.PERMISSION_DENIED")
    for key in (f"/{PREFIX}none", f"{PREFIX}\0"):
        with pytest.raises(InferenceServerException) as caught:
            client.asked.register_system_shared_memory("r", key, 8)
        assert caught.value.status() in ("400", "404", "StatusCode.INVALID_ARGUMENT", "StatusCode.NOT_FOUND")
    with pytest.raises(InferenceServerException, match="no name of shared memory"):
        client.asked.register_system_shared_memory("r", f"/{PREFIX}/../../etc/passwd", 8)


def test_sizes_that_are_not_there(client: Client) -> None:
    handle = client.memory("object", 64)
    for nbytes, offset in ((65, 0), (0, 0), (1, 64), (1 << 62, 1 << 62), (8, 60)):
        with pytest.raises(InferenceServerException, match="has 64 bytes"):
            client.asked.register_system_shared_memory("r", handle._shm_key, nbytes, offset)
    client.asked.register_system_shared_memory("r", handle._shm_key, 48, 8)
    shared_memory.set_shared_memory_region(handle, [np.arange(16, dtype=np.float32)])
    before = shared_memory.get_contents_as_numpy(handle, np.uint8, [64]).copy()
    sent = client.module.InferInput("x", [2, 3], "FP32")
    sent.set_data_from_numpy(X)
    for inputs, outputs, wrong in (
        ([client.input_in("r", offset=25)], None, "region 'r' has 48"),
        ([client.input_in("r", nbytes=1 << 40)], None, "region 'r' has 48"),
        ([client.input_in("r", nbytes=1 << 62, offset=1 << 62)], None, "region 'r' has 48"),
        ([client.input_in("r", nbytes=20)], None, "20 bytes in shared memory"),
        ([sent], [client.output_in("r", 24, 25)], "region 'r' has 48"),
        ([sent], [client.output_in("r", 23)], "'y' has 24 bytes; 23 are kept"),
        ([sent], [client.output_in("other")], "unknown shared memory region 'other'"),
    ):
        invalid = client.invalid()
        with pytest.raises(InferenceServerException, match=wrong):
            client.asked.infer("doubled", inputs, outputs=outputs)
        assert client.invalid() == invalid + ("are kept" not in wrong)  # which shows when the run is over
    np.testing.assert_array_equal(shared_memory.get_contents_as_numpy(handle, np.uint8, [64]), before)


def test_an_object_that_shrinks_is_an_error(client: Client) -> None:
    """Memory that is mapped would end the server's process at the next access."""
    client.region("r", 1 << 16)
    key = client.used[-1]._shm_key
    os.truncate(f"/dev/shm{key}", 10)
    with pytest.raises(InferenceServerException, match="has become smaller"):
        client.asked.infer("doubled", [client.input_in("r", np.zeros((4, 3), np.float32))])
    assert client.asked.is_server_live()


def test_what_is_read_counts_like_a_body(client: Client) -> None:
    client.region("r", 2 << 20)
    for count, fits in ((1 << 20, True), ((1 << 20) + 12, False)):
        array = np.zeros((count // 12, 3), np.float32)
        if fits:
            client.asked.infer("doubled", [client.input_in("r", array)], outputs=[client.output_in("r", array.nbytes)])
        else:
            with pytest.raises(InferenceServerException, match="shared memory have more than 1048576 bytes"):
                client.asked.infer("doubled", [client.input_in("r", array)])
    assert client.server.bodies.held_bytes == 0


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_a_request_that_runs_keeps_its_regions(kind: str) -> None:
    with held_operators() as control:
        control.go_on.release()  # the model is warmed up
        model = ModelConfig(name="doubled", source=doubled_model("HeldRows"))
        config = ServerConfig(models={"doubled": model}, grpc_port=0, shared_memory=(f"/{PREFIX}*",))
        with serving(config) as server, client_of(server, kind) as client, client_of(server, kind) as other:
            control.wait_inside(len(control.seen))
            handle = client.region("r", 48)
            shared_memory.set_shared_memory_region(handle, [X, np.zeros_like(X)])
            if kind == "http":
                waiting = client.asked.async_infer(
                    "doubled", [client.input_in("r")], outputs=[client.output_in("r", offset=24)]
                )
            else:
                waiting = client.asked.async_infer(
                    "doubled", [client.input_in("r")], lambda result, error: None,
                    outputs=[client.output_in("r", offset=24)],
                )  # fmt: skip
            control.wait_inside()
            other.asked.unregister_system_shared_memory("r")
            control.go_on.release()
            if kind == "http":
                waiting.get_result(timeout=PATIENCE)
            while not shared_memory.get_contents_as_numpy(handle, np.float32, [2, 3], 24)[-1].all():
                pass
            np.testing.assert_array_equal(
                shared_memory.get_contents_as_numpy(handle, np.float32, [2, 3], 24), np.full((2, 3), 2)
            )
            shared_memory.destroy_shared_memory_region(client.used.pop())
            while any(handle._shm_key in name for name in open_files()):
                client.asked.is_server_live()
                gc.collect()  # a traceback that is a part of a cycle may have it


def open_files() -> list[str]:
    """What this process, of which the server is a part, has open."""
    found = []
    for file in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/self/fd/{file}"))
    return found


def test_nothing_is_allowed_unless_the_configuration_says_so() -> None:
    with pytest.raises(RequestError) as caught:
        Regions((), Limits()).register("r", "anything", 0, 1)
    assert caught.value.status == 403
    for wrong, words in (("prefix*", "must be a list"), (["a", 3], ".1 must be a valid string"), ([""], "at least 1")):
        with pytest.raises(SettingError, match=f"shared_memory.*{words}"):
            ServerConfig(shared_memory=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [{}, {"key": 3, "byte_size": 8}, {"key": "K"}, {"key": "K", "byte_size": "8"}, {"key": "K", "byte_size": True},
     {"key": "K", "byte_size": -1}, {"key": "K", "byte_size": 8, "offset": -1}, {"key": "K", "byte_size": 1 << 63}],
)  # fmt: skip
def test_registrations_that_make_no_sense(server: Server, body: dict[str, Any]) -> None:
    text = json.dumps(body).replace('"K"', f'"{PREFIX}K"')
    answer = httpx.post(f"{server.url}/v2/systemsharedmemory/region/r/register", content=text, timeout=PATIENCE)
    assert answer.status_code == 400
    assert "error" in answer.json()


def test_parameters_that_make_no_sense(server: Server) -> None:
    for parameters in (
        {"shared_memory_region": "r"},
        {"shared_memory_region": 3, "shared_memory_byte_size": 24},
        {"shared_memory_region": "r", "shared_memory_byte_size": -24},
        {"shared_memory_region": "r", "shared_memory_byte_size": 24, "shared_memory_offset": 1.5},
    ):
        x = {"name": "x", "shape": [2, 3], "datatype": "FP32", "parameters": parameters}
        with client_of(server, "http") as client:
            client.region("r", 48)
            answer = httpx.post(f"{server.url}/v2/models/doubled/infer", json={"inputs": [x]}, timeout=PATIENCE)
        assert answer.status_code == 400, parameters
