"""The page that describes what is served: it is of that, and requests and answers are as it says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import numpy as np
import pytest

from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.openapi import description
from dagexec.server.run import Server
from tests.held import PATIENCE, doubled_model
from tests.server.serving import serving

REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, -2, 3]}]}
BODIES = {"infer": REQUEST, "register": {"key": "of-nobody", "byte_size": 8}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    model = ModelConfig(name="doubled", source=doubled_model())
    with serving(ServerConfig(models={"doubled": model}, control=True)) as server:
        yield server


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield path, method, operation


def schema_of(document: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    name = content["application/json"]["schema"]["$ref"].removeprefix("#/components/schemas/")
    found: dict[str, Any] = document["components"]["schemas"][name]
    return found


def test_each_path_answers_as_it_says(server: Server) -> None:
    """Requests are made of the page, and their answers checked against it."""
    asked = 0
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        document = client.get("/v2/openapi.json").json()
        assert document["openapi"] == "3.1.0"
        for schema in document["components"]["schemas"].values():
            jsonschema.Draft202012Validator.check_schema(schema)
        for path, method, operation in operations(document):
            names = re.findall(r"{(\w+)}", path)
            assert [one["name"] for one in operation["parameters"]] == names
            filled = path.format(name="doubled", version="1")
            body: Any = None if method == "get" else BODIES.get(path.rpartition("/")[2], {})
            if body is not None:
                jsonschema.validate(body, schema_of(document, operation["requestBody"]["content"]))
            answer = client.request(method, filled, json=body)
            asked += 1
            assert answer.status_code not in (405, 500, 501), filled
            assert "Not Found" not in answer.text, filled
            case = "200" if answer.status_code == 200 else "default"
            content = operation["responses"][case]["content"]
            if answer.headers["content-type"] == "application/json":
                jsonschema.validate(answer.json(), schema_of(document, content))
            else:
                assert answer.headers["content-type"].split(";")[0] in content
            if method == "get" and "sharedmemory/region" not in path:
                assert case == "200", filled
            if path.endswith("/infer"):
                assert answer.json()["outputs"][0]["data"] == [2, 0, 6]
    assert asked == sum(1 for _ in operations(document))
    identities = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(set(identities)) == len(identities)


def test_what_the_documentation_lists_is_there() -> None:
    text = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    listed = re.findall(r"`(?:GET |POST )?(/v2[\w/.]*|/metrics)`", text)
    assert len(listed) > 5
    served = description(has_token=False, has_page=True)["paths"]
    assert {path.replace("NAME", "{name}") for path in listed} <= set(served)


def test_a_token_is_said() -> None:
    document = description(has_token=True, has_page=True)
    assert document["security"] == [{"token": []}]
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    open_ones = [path for path, _, operation in operations(document) if operation.get("security") == []]
    assert open_ones == ["/v2/health/live", "/v2/health/ready", "/", "/live.css", "/live.js"]
    assert "security" not in description(has_token=False, has_page=True)


def test_results_that_lack_something_are_not_as_it_says() -> None:
    results = description(has_token=False, has_page=False)["components"]["schemas"]["results"]
    good = {"model_name": "m", "model_version": "1", "outputs": [{"name": "y", "datatype": "FP32", "shape": [1]}]}
    jsonschema.validate(good, results)
    for wrong in ({**good, "outputs": [{"name": "y"}]}, {"outputs": []}, {**good, "id": np.pi}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, results)
