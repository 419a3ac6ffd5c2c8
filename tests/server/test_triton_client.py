"""An unmodified client of Triton asks a server over HTTP for all that it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

import dagexec
from dagexec.server.config import ModelConfig, ServerConfig
from tests.held import doubled_model
from tests.server.serving import serving


def two_typed_model(op: str, onnx_type: int) -> onnx.ModelProto:
    """y = op(x), of any shape with two axes."""
    graph = helper.make_graph(
        [helper.make_node(op, ["x"], ["y"])],
        op,
        [helper.make_tensor_value_info("x", onnx_type, [None, None])],
        [helper.make_tensor_value_info("y", onnx_type, [None, None])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    sources = {
        "doubled": doubled_model(),
        "lenet": "zoo:lenet",
        "texts": two_typed_model("Identity", TensorProto.STRING),
        "half": two_typed_model("Neg", TensorProto.FLOAT16),
        "brain": two_typed_model("Identity", TensorProto.BFLOAT16),
        "whole": two_typed_model("Neg", TensorProto.INT64),
    }
    models = {name: ModelConfig(name=name, source=source) for name, source in sources.items()}
    with serving(ServerConfig(models=models, control=True, control_settings=True)) as server:
        yield server.url.removeprefix("http://")


@pytest.fixture
def client(url: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(url) as client:
        yield client


def given(name: str, array: np.ndarray, datatype: str, *, binary: bool = True) -> triton.InferInput:
    one = triton.InferInput(name, list(array.shape), datatype)
    one.set_data_from_numpy(array, binary_data=binary)
    return one


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("binary_output", [True, False, None])
def test_inference(client: triton.InferenceServerClient, binary: bool, binary_output: bool | None) -> None:
    x = np.float32([[1, 2, 3], [4, 5, -6]])
    outputs = None if binary_output is None else [triton.InferRequestedOutput("y", binary_data=binary_output)]
    result = client.infer(
        "doubled",
        [given("x", x, "FP32", binary=binary)],
        outputs=outputs,
        request_id="seven",
        priority=1,
        timeout=10**7,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), np.maximum(x, 0) * 2)
    response = result.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("seven", "doubled", "1")


@pytest.mark.parametrize("name", ["gzip", "deflate"])
def test_compressed_both_ways(client: triton.InferenceServerClient, name: str) -> None:
    x = np.random.default_rng(0).standard_normal((40_000, 3), np.float32)
    result = client.infer(
        "doubled",
        [given("x", x, "FP32")],
        request_compression_algorithm=name,
        response_compression_algorithm=name,
        model_version="1",
    )
    np.testing.assert_array_equal(result.as_numpy("y"), np.maximum(x, 0) * 2)


def test_the_bytes_of_a_run_in_this_process(client: triton.InferenceServerClient) -> None:
    x = np.random.default_rng(1).standard_normal((1, 1, 28, 28), np.float32)
    metadata = client.get_model_metadata("lenet")
    [output] = [one["name"] for one in metadata["outputs"]]
    [name] = [one["name"] for one in metadata["inputs"]]
    with dagexec.compile("zoo:lenet") as executor:
        expected = executor.run({name: x})[output]
    assert client.infer("lenet", [given(name, x, "FP32")]).as_numpy(output).tobytes() == expected.tobytes()
    asynchronous = [client.async_infer("lenet", [given(name, x, "FP32")]) for _ in range(4)]
    for one in asynchronous:
        assert one.get_result().as_numpy(output).tobytes() == expected.tobytes()


@pytest.mark.parametrize("binary", [True, False])
def test_other_types(client: triton.InferenceServerClient, binary: bool) -> None:
    texts = np.array([["a", "naïve"], ["", "b" * 1000]], object)
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    found = client.infer("texts", [given("x", texts, "BYTES", binary=binary)], outputs=outputs).as_numpy("y")
    assert [[one.decode() if isinstance(one, bytes) else one for one in row] for row in found] == texts.tolist()
    numbers = np.array([[1, -(2**62)]])
    found = client.infer("whole", [given("x", numbers, "INT64", binary=binary)], outputs=outputs).as_numpy("y")
    np.testing.assert_array_equal(found, -numbers)


def test_types_of_16_bits(client: triton.InferenceServerClient) -> None:
    half = np.float16([[1, -2.5]])
    np.testing.assert_array_equal(client.infer("half", [given("x", half, "FP16")]).as_numpy("y"), -half)
    brain = np.array([[1, -2.5]], ml_dtypes.bfloat16)
    np.testing.assert_array_equal(client.infer("brain", [given("x", brain, "BF16")]).as_numpy("y"), brain)
    with pytest.raises(InferenceServerException, match="JSON has no BF16"):
        client.infer(
            "brain", [given("x", brain, "BF16")], outputs=[triton.InferRequestedOutput("y", binary_data=False)]
        )


def test_metadata(client: triton.InferenceServerClient) -> None:
    assert client.get_server_metadata() == {
        "name": "dagexec",
        "version": dagexec.__version__,
        "extensions": [
            *("binary_tensor_data", "generate", "logging", "model_configuration", "model_repository"),
            *("schedule_policy", "sequence", "sequence(string_id)", "statistics", "system_shared_memory", "trace"),
        ],
    }
    metadata = {
        "name": "doubled",
        "versions": ["1"],
        "platform": "dagexec",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3]}],
    }
    assert client.get_model_metadata("doubled") == client.get_model_metadata("doubled", "1") == metadata
    for name, version in (("other", ""), ("doubled", "2")):
        with pytest.raises(InferenceServerException) as caught:
            client.get_model_metadata(name, version)
        assert caught.value.status() == "404"


def test_readiness_and_the_repository(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("doubled")
    assert client.is_model_ready("doubled", "1")
    assert not client.is_model_ready("doubled", "2")
    client.unload_model("whole")
    assert not client.is_model_ready("whole")
    assert {"name": "whole", "version": "", "state": "UNAVAILABLE", "reason": "unloaded"} in (
        client.get_model_repository_index()
    )
    with pytest.raises(InferenceServerException, match="'whole' is not ready: unloaded") as caught:
        client.infer("whole", [given("x", np.array([[1]]), "INT64")])
    assert caught.value.status() == "503"
    client.load_model("whole")
    assert {"name": "whole", "version": "1", "state": "READY", "reason": ""} in client.get_model_repository_index()
    with pytest.raises(InferenceServerException, match=r"\A\[400\] model 'whole': unknown key 'replica'; did you"):
        client.load_model("whole", config='{"replica": 2}')
    with pytest.raises(InferenceServerException, match="come from the server's own files"):
        client.load_model("whole", config="{}", files={"file:1/model.onnx": b"abc"})
    with pytest.raises(InferenceServerException, match="unknown model"):
        client.load_model("other")


def test_shared_memory_of_devices_is_refused(client: triton.InferenceServerClient) -> None:
    """Programs of Triton's begin by unregistering all."""
    client.unregister_cuda_shared_memory()
    client.unregister_cuda_shared_memory("images")
    assert client.get_cuda_shared_memory_status() == []
    with pytest.raises(InferenceServerException, match="shared memory of CUDA is not supported") as caught:
        client.register_cuda_shared_memory("images", b"aGFuZGxl", 0, 8)
    assert caught.value.status() == "501"


@pytest.mark.parametrize(
    ("model", "shape", "datatype", "status", "message"),
    [
        ("other", (1, 3), "FP32", "404", "unknown model 'other'"),
        ("doubled", (1, 4), "FP32", "400", "shape"),
        ("doubled", (1, 3), "FP64", "400", "float64"),
    ],
)
def test_errors_say_what_is_wrong(
    client: triton.InferenceServerClient, model: str, shape: tuple[int, ...], datatype: str, status: str, message: str
) -> None:
    dtype = {"FP32": np.float32, "FP64": np.float64}[datatype]
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, [given("x", np.zeros(shape, dtype), datatype)])
    assert caught.value.status() == status


def test_a_new_version_is_there_after_a_load(tmp_path: Path) -> None:
    def write(version: str, op: str) -> None:
        (tmp_path / version).mkdir()
        onnx.save(two_typed_model(op, TensorProto.FLOAT), tmp_path / version / "model.onnx")

    write("1", "Neg")
    x = given("x", np.float32([[-1, 2]]), "FP32")
    with (
        serving(ServerConfig(models={"m": ModelConfig(name="m", source=tmp_path)}, control=True)) as server,
        triton.InferenceServerClient(server.url.removeprefix("http://")) as client,
    ):
        assert client.infer("m", [x]).as_numpy("y").tolist() == [[1, -2]]
        write("2", "Abs")
        client.load_model("m")
        assert client.infer("m", [x]).as_numpy("y").tolist() == [[1, 2]]
        assert client.get_model_metadata("m")["versions"] == ["2"]
