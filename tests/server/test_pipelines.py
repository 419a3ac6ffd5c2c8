"""Pipelines in the configuration of a server, asked by a client."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from dagexec.errors import SettingError
from dagexec.export import save_onnx
from dagexec.server.config import ServerConfig, read_config
from dagexec.server.inference import InferenceRequest, RequestError
from dagexec.server.repository import Repository
from tests.held import PATIENCE
from tests.pipelines.layers import dense, dense_by_formula
from tests.server.serving import serving

A, B, C = dense("a", 8, 16, 1), dense("b", 16, 16, 2), dense("c", 16, 16, 3)
X = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)

DIAMOND = """
[server]
python_steps = true

[[pipelines]]
name = "diamond"
version = "v2"
num_workers = 2
timeout = 60.0

[pipelines.inputs]
data = "float32[N, 8]"

[pipelines.stages.A]
model = "a.onnx"
inputs = { x = "data" }

[pipelines.stages.B]
model = "b.onnx"
inputs = { x = "A" }

[pipelines.stages.C]
model = "c.onnx"
inputs = "A/y"

[pipelines.stages.mean]
python = "own_steps.py:mean"
inputs = ["B/y", "C"]
outputs = "float32[N, 16]"

[pipelines.outputs]
result = "mean"

[[pipelines]]
name = "again"
inputs = { x = "" }
outputs = { y = "A" }
stages.A = { model = "a.onnx", inputs = "x" }
"""
STEPS = """
def mean(first, second):
    return (first + second) / 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, model in {"a": A, "b": B, "c": C}.items():
        save_onnx(model, tmp_path / f"{name}.onnx")
    (tmp_path / "own_steps.py").write_text(STEPS)
    return tmp_path


def config_of(folder: Path, text: str = DIAMOND) -> ServerConfig:
    (folder / "serve.toml").write_text(text)
    return read_config(folder / "serve.toml")


def test_clients_ask_a_pipeline_as_any_model(folder: Path) -> None:
    http = pytest.importorskip("tritonclient.http")
    with serving(config_of(folder)) as server:
        client = http.InferenceServerClient(server.url.removeprefix("http://"))
        try:
            metadata = client.get_model_metadata("diamond")
            given = http.InferInput("data", X.shape, "FP32")
            given.set_data_from_numpy(X)
            found = client.infer("diamond", [given], model_version="v2").as_numpy("result")
        finally:
            client.close()
    assert metadata["inputs"] == [{"name": "data", "datatype": "FP32", "shape": [-1, 8]}]
    assert [one["name"] for one in metadata["outputs"]] == ["result"]
    h = dense_by_formula(A, X)
    expected = (dense_by_formula(B, h) + dense_by_formula(C, h)) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_pipeline_that_cannot_be_loaded_says_why_and_the_others_serve(folder: Path) -> None:
    wrong = DIAMOND.replace('model = "b.onnx"', 'model = "a.onnx"')
    with serving(config_of(folder, wrong)) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        index = {row["name"]: row for row in client.post("/v2/repository/index").json()}
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [3, 8], "data": X.ravel().tolist()}]}
        answer = client.post("/v2/models/again/infer", json=body)
        refused = client.post("/v2/models/diamond/infer", json=body)
    assert (index["again"]["state"], index["diamond"]["state"]) == ("READY", "UNAVAILABLE")
    assert (
        "pipeline 'diamond': stage 'B': input 'x' expects float32[?, 8], found float32[N, 16] from stage 'A'"
        in (index["diamond"]["reason"])
    )
    assert (answer.status_code, refused.status_code) == (200, 503)


async def test_a_pipeline_that_is_loaded_again_has_what_its_files_say_then(folder: Path) -> None:
    repository = Repository(config_of(folder))
    request = InferenceRequest(model="diamond", inputs={"data": X})
    try:
        assert await repository.load_all() == {}
        before = (await repository.infer(request)).outputs["result"]
        (folder / "own_steps.py").write_text(STEPS.replace("/ 2", "* 2"))
        save_onnx(dense("b", 16, 16, 3), folder / "b.onnx")
        await repository.load("diamond")
        after = (await repository.infer(request)).outputs["result"]
        (folder / "b.onnx").unlink()
        with pytest.raises(RequestError, match=r"'diamond' could not be loaded: .*b\.onnx: no such file"):
            await repository.load("diamond")
        kept = (await repository.infer(request)).outputs["result"]
    finally:
        await repository.drain()
    h = dense_by_formula(A, X)
    np.testing.assert_allclose(before, (dense_by_formula(B, h) + dense_by_formula(C, h)) / 2, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(after, 4 * dense_by_formula(C, h), rtol=1e-4, atol=1e-3)
    np.testing.assert_array_equal(kept, after)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "python_steps = true", "",
            r"pipeline 'diamond': stage 'mean': a Python step, 'own_steps.py:mean', is imported .*python_steps = true",
        ),
        ("python_steps = true", "python_steps = 1", "Python step"),
        ('name = "diamond"', "", "name must be 1 to 200 printable characters"),
        ('name = "again"', 'name = "diamond"', "two models or pipelines 'diamond'"),
        ("timeout = 60.0", "timeouts = 60.0", r"model 'diamond': unknown key 'timeouts'; did you mean 'timeout'"),
        ("timeout = 60.0", 'source = "a.onnx"', "pipeline 'diamond': it has stages in place of a source"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_said_at_once(folder: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(SettingError, match=rf"serve\.toml: .*{message}"):
        config_of(folder, DIAMOND.replace(old, new))


def test_pipelines_are_a_list(folder: Path) -> None:
    with pytest.raises(SettingError, match=r"pipelines must be a list of tables: \[\[pipelines\]\]"):
        config_of(folder, "[pipelines.a]\n")


def test_a_file_without_leave_for_python_steps_may_have_pipelines_of_models(folder: Path) -> None:
    text = "[[pipelines]]" + DIAMOND.rpartition("[[pipelines]]")[2]
    assert list(config_of(folder, text).models) == ["again"]
