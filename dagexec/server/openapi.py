"""The paths of HTTP in one table: what is served is made of it, and the page that describes it (OpenAPI)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any, Literal

from dagexec.platform.records import dataclass

OPEN_PATHS = frozenset(("/v2/health/live", "/v2/health/ready", "/", "/live.css", "/live.js"))
"""Those that ask for no token: they tell nothing of the models but whether all serve."""

MODEL = "/v2/models/{name}"
_OF_VERSION = f"{MODEL}/versions/{{version}}"
_REGION = "/v2/systemsharedmemory/region/{name}"
_MEMORIES = ("/v2/systemsharedmemory", _REGION)


@dataclass(frozen=True, slots=True)
class Path:
    """A path, and what is asked there.

    Attributes:
        endpoint: a method of `http.py`; `run` for requests that are served without Starlette.
        body: the schema of the request's JSON, "" without a body.
        answer: that of the answer.
    """

    path: str
    method: Literal["GET", "POST"]
    endpoint: str
    about: str
    body: str = ""
    answer: str = "object"


def _versions(ending: str, method: Literal["GET", "POST"], endpoint: str, about: str, *schemas: str) -> Iterator[Path]:
    for path in (MODEL, _OF_VERSION):
        yield Path(path + ending, method, endpoint, about, *schemas)


PATHS = (
    Path("/v2", "GET", "server", "What server this is.", "", "server"),
    Path("/v2/health/live", "GET", "live", "Whether the server lives."),
    Path("/v2/health/ready", "GET", "ready", "Whether all models serve."),
    Path("/v2/openapi.json", "GET", "openapi", "This page."),
    Path("/v2/models/stats", "GET", "statistics", "Statistics of all models.", "", "statistics"),
    *_versions("", "GET", "model", "What a model takes and gives.", "", "model"),
    *_versions("/ready", "GET", "model_ready", "Whether a model serves."),
    *_versions("/config", "GET", "model_config", "How a model is configured."),
    *_versions("/stats", "GET", "statistics", "Statistics of a model.", "", "statistics"),
    *_versions("/infer", "POST", "run", "Run a model.", "inference", "results"),
    *_versions("/generate", "POST", "run", "All tokens of a text.", "object"),
    *_versions("/generate_stream", "POST", "run", "Tokens of a text, as events.", "object", "events"),
    *(
        Path(path, method, "trace", "How runs are traced.", "object" if method == "POST" else "")
        for path in ("/v2/trace/setting", f"{MODEL}/trace/setting")
        for method in ("GET", "POST")
    ),
    *(Path("/v2/logging", method, "log", "What is logged.", "object" if method == "POST" else "")
      for method in ("GET", "POST")),
    Path("/v2/repository/index", "POST", "index", "All models and their versions.", "object", "index"),
    Path("/v2/repository/models/{name}/load", "POST", "load", "Load a model, or load it again.", "object"),
    Path("/v2/repository/models/{name}/unload", "POST", "unload", "Take a model out of service.", "object"),
    *(Path(f"{path}/status", "GET", "regions", "Regions of shared memory.", "", "regions") for path in _MEMORIES),
    Path(f"{_REGION}/register", "POST", "register", "Register a region of shared memory.", "region"),
    *(Path(f"{path}/unregister", "POST", "unregister", "Forget a region, or all.", "object") for path in _MEMORIES),
    Path("/metrics", "GET", "metrics", "Metrics for Prometheus.", "", "text"),
)  # fmt: skip

PAGE = (
    Path("/", "GET", "page", "A page that shows what the server does.", "", "html"),
    Path("/live.css", "GET", "page", "Its style.", "", "css"),
    Path("/live.js", "GET", "page", "Its script.", "", "script"),
    Path("/live.json", "GET", "state", "What it shows; with `stretch` and `request` of an earlier state, the rest.",
         "", "state"),
)  # fmt: skip
"""The live page, where it is served."""

_NAME = {"type": "string"}
_PARAMETERS = {"type": "object"}


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _object(required: tuple[str, ...], **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


_METADATA = _object(
    ("name", "datatype", "shape"), name=_NAME, datatype=_NAME, shape=_list_of({"type": "integer", "minimum": -1})
)
_TENSOR = _object(
    ("name", "datatype", "shape"),
    name=_NAME,
    datatype=_NAME,
    shape=_list_of({"type": "integer", "minimum": 0}),
    parameters=_PARAMETERS,
    data={"type": "array"},
)
_SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {"type": "object"},
    "error": _object(("error",), error=_NAME),
    "server": _object(("name", "version", "extensions"), name=_NAME, version=_NAME, extensions=_list_of(_NAME)),
    "model": _object(
        ("name", "versions", "platform", "inputs", "outputs"),
        name=_NAME,
        versions=_list_of(_NAME),
        platform=_NAME,
        inputs=_list_of(_METADATA),
        outputs=_list_of(_METADATA),
    ),
    "inference": _object(
        ("inputs",),
        id=_NAME,
        parameters=_PARAMETERS,
        inputs=_list_of(_TENSOR),
        outputs=_list_of(_object(("name",), name=_NAME, parameters=_PARAMETERS)),
    ),
    "results": _object(
        ("model_name", "model_version", "outputs"),
        model_name=_NAME,
        model_version=_NAME,
        id=_NAME,
        outputs=_list_of(_TENSOR),
    ),
    "statistics": _object(("model_stats",), model_stats=_list_of({"type": "object"})),
    "index": _list_of(_object(("name", "state"), name=_NAME, version=_NAME, state=_NAME, reason=_NAME)),
    "region": _object(
        ("key", "byte_size"),
        key=_NAME,
        offset={"type": "integer", "minimum": 0},
        byte_size={"type": "integer", "minimum": 1},
    ),
    "state": _object(
        ("models", "lanes", "slow", "stretch", "request"),
        models=_list_of(_object(("name", "version", "state"), name=_NAME, version=_NAME, state=_NAME)),
        lanes={"type": "object", "additionalProperties": _list_of({"type": "array"})},
        slow=_list_of({"type": "object"}),
        stretch={"type": "integer"},
        request={"type": "integer"},
    ),
    "regions": _list_of(_object(("name", "key", "offset", "byte_size"), name=_NAME, key=_NAME)),
}
_OTHER_MEDIA = {
    "events": "text/event-stream",
    "text": "text/plain",
    "html": "text/html",
    "css": "text/css",
    "script": "text/javascript",
}


def paths_served(has_page: bool) -> tuple[Path, ...]:
    """Those of a server with the live page, or without."""
    return PATHS + PAGE if has_page else PATHS


def description(has_token: bool, has_page: bool) -> dict[str, Any]:
    """The description of all paths, as OpenAPI 3.1 has it."""
    paths: dict[str, dict[str, Any]] = {}
    for number, path in enumerate(paths_served(has_page)):
        operation = {
            "operationId": f"{path.method.lower()}-{path.endpoint}-{number}",
            "summary": path.about,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": _NAME}
                for name in re.findall(r"{(\w+)}", path.path)
            ],
            "responses": {
                "200": {"description": "It is done.", "content": _content(path.answer)},
                "default": {"description": "It is not done.", "content": _content("error")},
            },
        }
        if path.body:
            operation["requestBody"] = {"content": _content(path.body)}
        paths.setdefault(path.path, {})[path.method.lower()] = operation
    components: dict[str, Any] = {"schemas": _SCHEMAS}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Open Inference Protocol, served by dagexec", "version": version("dagexec")},
        "paths": paths,
        "components": components,
    }
    if has_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"token": []}]
        for path_open in OPEN_PATHS.intersection(paths):
            paths[path_open]["get"]["security"] = []
    return found


def _content(schema: str) -> dict[str, Any]:
    if schema in _OTHER_MEDIA:
        return {_OTHER_MEDIA[schema]: {"schema": {"type": "string"}}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
