"""The Open Inference Protocol, version 2, over HTTP: an ASGI application over a repository.

Requests for inference and for tokens, which are many, are served here directly; Starlette serves the others.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dagexec.server.access import OPEN, Access
from dagexec.server.bodies import Bodies, ClientGoneError, Held, Receive, accepted_encoding, compressed
from dagexec.server.connection import Exchange, exchange_of
from dagexec.server.inference import (
    GeneratedToken,
    InferenceRequest,
    InferenceResponse,
    RequestError,
    TensorMetadata,
    request_error,
)
from dagexec.server.messages import (
    HEADER_LENGTH,
    ParsedRequest,
    parse_generation,
    parse_json,
    parse_request,
    token_object,
    tokens_object,
    write_response,
)
from dagexec.server.metrics import Metrics
from dagexec.server.openapi import OPEN_PATHS, description, paths_served
from dagexec.server.page_files import PAGE_HEADERS, page_at
from dagexec.server.parent_span import parent_span
from dagexec.server.repository import Repository
from dagexec.server.settings import check_unchanged, log_settings, trace_settings
from dagexec.server.shared_memory import NO_DEVICE_MEMORY, REGION, Regions
from dagexec.server.tensors import ProtocolError

logger = logging.getLogger("dagexec.server")

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

EXTENSIONS = (
    *("binary_tensor_data", "generate", "logging", "model_configuration", "model_repository", "schedule_policy"),
    *("sequence", "sequence(string_id)", "statistics", "system_shared_memory", "trace"),
)
_RUN = re.compile(r"/v2/models/([^/]+)(?:/versions/([^/]+))?/(infer|generate|generate_stream)")
_LENGTH_NAME = HEADER_LENGTH.lower().encode()
_LARGE = 64 << 10  # bytes of JSON that a thread parses, so that others have their turn
_PRIVATE = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
_JSON = (b"content-type", b"application/json")
_BINARY = (b"content-type", b"application/octet-stream")
_EVENTS = ((b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"))


class Application:
    """The ASGI application of a server."""

    def __init__(
        self, repository: Repository, bodies: Bodies, metrics: Metrics, regions: Regions, access: Access = OPEN
    ) -> None:
        """Its limits are those of the repository's configuration."""
        self._access = access
        self._repository = repository
        self._limits = repository.config.limits
        self._bodies = bodies
        self._regions = regions
        self._others = _starlette(repository, bodies, metrics, regions)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        exchange = exchange_of(scope)
        if scope["path"] not in OPEN_PATHS:
            try:
                self._access.check(next((value for name, value in scope["headers"] if name == b"authorization"), None))
            except RequestError as error:
                refused = _error_response(error, {"WWW-Authenticate": "Bearer"})
                await exchange.answer(refused.status_code, refused.raw_headers, [refused.body])
                return
        path = _RUN.fullmatch(scope["path"])
        if path is None or scope["method"] != "POST":
            await self._others(scope, receive, _Answer(exchange, scope["method"]))
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            with Held(self._bodies, exchange) as held:
                try:
                    body = await self._body(headers, receive, held)
                    if path[3] == "infer":
                        parsed = await self._parsed(path[1], path[2], headers, body, held)
                    else:
                        asked = await self._asked(path[1], path[2], body)
                except RequestError as error:
                    self._repository.count_refused(path[1], path[2], error)
                    raise
                with _cancelled_when_the_client_leaves(exchange), _parent_span(headers):
                    if path[3] != "infer":
                        async with aclosing(self._repository.generate(asked)) as tokens:
                            await _send_tokens(exchange, tokens, as_events=path[3] == "generate_stream")
                        return
                    response = await self._repository.infer(parsed.request)
                await _send_response(exchange, parsed, response, headers)
        except ClientGoneError:
            return
        except Exception as error:
            refused = _error_response(request_error(error))
            await exchange.answer(refused.status_code, refused.raw_headers, [refused.body])

    async def _body(self, headers: Mapping[bytes, bytes], receive: Receive, held: Held) -> memoryview:
        announced, encoding = headers.get(b"content-length"), headers.get(b"content-encoding")
        return await self._bodies.read(receive, held, announced, encoding, _header_length(headers) or 0)

    async def _parsed(
        self, model: str, version: str | None, headers: Mapping[bytes, bytes], body: memoryview, held: Held
    ) -> ParsedRequest:
        length = _header_length(headers)
        text = body[:length]
        on_thread = text.nbytes > _LARGE or (self._regions.any and REGION.encode() in bytes(text))
        read = self._regions.reader(held, on_thread)
        arguments = (model, version, body, length, self._limits, self._repository.check_inputs, self._regions, read)
        if on_thread:
            return await anyio.to_thread.run_sync(parse_request, *arguments)
        return parse_request(*arguments)

    async def _asked(self, model: str, version: str | None, body: memoryview) -> InferenceRequest:
        """What is asked of a model that generates."""
        arguments = (model, version, body, self._repository.metadata(model, version).inputs, self._limits)
        if body.nbytes > _LARGE:
            return await anyio.to_thread.run_sync(parse_generation, *arguments)
        return parse_generation(*arguments)


class _Answer:
    """ASGI's `send` for answers that are whole, as Starlette's are here."""

    def __init__(self, exchange: Exchange, method: str) -> None:
        self._exchange = exchange
        self._method = method

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        """Send the answer with its second message."""
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], message["headers"]
        else:
            await self._exchange.answer(
                self._status, self._headers, [] if self._method == "HEAD" else [message["body"]]
            )


def _header_length(headers: Mapping[bytes, bytes]) -> int | None:
    """How many bytes of a body are JSON, None for all."""
    text = headers.get(_LENGTH_NAME)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 18:
        raise ProtocolError(f"{HEADER_LENGTH} must be a whole number, not {text.decode('latin-1')!r:.80}")
    return int(text)


@contextmanager
def _cancelled_when_the_client_leaves(exchange: Exchange) -> Iterator[None]:
    """Cancel what this task does inside when the client closes the connection, and raise ClientGoneError then."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    def cancel() -> None:
        nonlocal gone
        gone = True
        task.cancel()

    exchange.when_gone(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if gone and not task.uncancel():
            raise ClientGoneError from None
        raise
    finally:
        exchange.when_gone(None)


def _parent_span(headers: Mapping[bytes, bytes]) -> AbstractContextManager[None]:
    """The span that the client names, which few do."""
    if b"traceparent" not in headers:
        return nullcontext()
    return parent_span((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers.items())


async def _send_response(
    exchange: Exchange, parsed: ParsedRequest, response: InferenceResponse, headers: Mapping[bytes, bytes]
) -> None:
    if parsed.shared:
        text, binary = await anyio.to_thread.run_sync(write_response, parsed, response)
    else:
        text, binary = write_response(parsed, response)
    parts: list[bytes | memoryview] = [text, *binary]
    names = [_BINARY, (_LENGTH_NAME, b"%d" % len(text))] if binary else [_JSON]
    encoding = accepted_encoding(headers.get(b"accept-encoding"))
    if encoding is not None:
        parts = [await anyio.to_thread.run_sync(compressed, parts, encoding)]
        names.append((b"content-encoding", encoding))
    names.append((b"content-length", b"%d" % sum(map(len, parts))))
    await exchange.answer(200, names, parts)


async def _send_tokens(exchange: Exchange, tokens: AsyncIterable[GeneratedToken], *, as_events: bool) -> None:
    """Each as an event when it is there, or all in one answer."""
    if as_events:
        async with aclosing(_events(exchange, tokens)) as events:
            await exchange.stream(_EVENTS, events)
        return
    body = json.dumps(tokens_object([token async for token in tokens])).encode()
    await exchange.answer(200, [_JSON, (b"content-length", b"%d" % len(body))], [body])


async def _events(exchange: Exchange, tokens: AsyncIterable[GeneratedToken]) -> AsyncGenerator[bytes, None]:
    """Server-sent events; the last one is an error where there is one behind the first token."""
    has_begun = False
    try:
        async for token in tokens:
            has_begun = True
            yield _event(token_object(token))
    except RequestError as error:
        if not has_begun:
            raise
        exchange.count_error(error.status)
        yield _event({"error": str(error)})


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(data).encode()


def _error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    if error.retry_after is not None:
        headers = {"Retry-After": str(error.retry_after)}
    return JSONResponse({"error": str(error)}, error.status, headers)


def _starlette(repository: Repository, bodies: Bodies, metrics: Metrics, regions: Regions) -> Starlette:
    """The application for everything but inference."""
    endpoints = _Endpoints(repository, bodies, metrics, regions)
    routes = [
        Route(one.path, getattr(endpoints, one.endpoint), methods=[one.method])
        for one in paths_served(repository.live is not None)
        if one.endpoint != "run"
    ]
    routes += [
        Route("/v2/", endpoints.server),
        Route("/v2/cudasharedmemory/{rest:path}", endpoints.device_memory, methods=["GET", "POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={RequestError: _refused, HTTPException: _not_served})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _error_response(error)


async def _not_served(request: Request, error: Exception) -> Response:
    """What Starlette refuses: paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    return JSONResponse(
        {"error": f"{request.method} {request.url.path:.200}: {error.detail}"}, error.status_code, error.headers
    )


class _Endpoints:
    """Everything but inference."""

    def __init__(self, repository: Repository, bodies: Bodies, metrics: Metrics, regions: Regions) -> None:
        self._repository = repository
        self._bodies = bodies
        self._metrics = metrics
        self._regions = regions

    async def server(self, request: Request) -> Response:
        """What server this is."""
        name = self._repository.config.name
        return JSONResponse({"name": name, "version": version("dagexec"), "extensions": EXTENSIONS})

    async def openapi(self, request: Request) -> Response:
        """What can be asked here."""
        return JSONResponse(
            description(self._repository.config.token_file is not None, self._repository.live is not None)
        )

    async def page(self, request: Request) -> Response:
        """A file of the live page."""
        text, media_type = page_at(request.url.path)
        return Response(text, media_type=media_type, headers=PAGE_HEADERS)

    async def state(self, request: Request) -> Response:
        """What the live page shows."""
        numbers = (request.query_params.get(name, "0") for name in ("stretch", "request"))
        state = self._repository.live_state(*(int(one) if one.isdecimal() and len(one) < 18 else 0 for one in numbers))
        return JSONResponse(state, headers=_PRIVATE)

    async def live(self, request: Request) -> Response:
        """It answers, so it lives."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Whether all models serve."""
        ready = self._repository.is_ready()
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def model(self, request: Request) -> Response:
        """What a model takes and gives."""
        found = self._repository.metadata(**request.path_params)
        return JSONResponse(
            {
                "name": found.name,
                "versions": found.versions,
                "platform": found.platform,
                "inputs": [_tensor(one) for one in found.inputs],
                "outputs": [_tensor(one) for one in found.outputs],
            }
        )

    async def model_ready(self, request: Request) -> Response:
        """Whether a model serves."""
        ready = self._repository.is_model_ready(**request.path_params)
        return JSONResponse({"name": request.path_params["name"], "ready": ready}, 200 if ready else 503)

    async def model_config(self, request: Request) -> Response:
        """How a model is configured, in Triton's words."""
        return JSONResponse(self._repository.model_config(**request.path_params))

    async def statistics(self, request: Request) -> Response:
        """What the requests of a model, or of all, waited and took."""
        return JSONResponse({"model_stats": self._repository.statistics(**request.path_params)})

    async def index(self, request: Request) -> Response:
        """All models and their versions."""
        message = await self._message(request)
        rows = self._repository.index(message.get("ready") is True)
        return JSONResponse(
            [{"name": r.name, "version": r.version, "state": r.state, "reason": r.reason} for r in rows]
        )

    async def load(self, request: Request) -> Response:
        """Load a model, once more if it is there."""
        parameters = (await self._message(request)).get("parameters", {})
        if not isinstance(parameters, dict):
            raise ProtocolError("parameters must be a JSON object")
        self._repository.check_control(parameters)
        await self._repository.load(request.path_params["name"], parameters)
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        """Take a model out of service."""
        await self._message(request)
        self._repository.check_control()
        await self._repository.unload(request.path_params["name"])
        return JSONResponse({})

    async def metrics(self, request: Request) -> Response:
        """What Prometheus asks for."""
        page, media_type = self._metrics.page(request.headers.get("accept", ""))
        return Response(page, headers={"content-type": media_type})

    async def trace(self, request: Request) -> Response:
        """How runs are traced."""
        for name in request.path_params.values():
            self._repository.metadata(name)
        return await self._settings(request, trace_settings(self._repository.config.telemetry))

    async def log(self, request: Request) -> Response:
        """What is logged."""
        return await self._settings(request, log_settings())

    async def _settings(self, request: Request, settings: Mapping[str, object]) -> Response:
        """The settings, to which a client may not ask for others."""
        if request.method == "POST":
            check_unchanged(settings, await self._message(request))
        return JSONResponse(settings)

    async def regions(self, request: Request) -> Response:
        """The regions of shared memory that are registered, or one of them."""
        return JSONResponse(self._regions.status(**request.path_params))

    async def register(self, request: Request) -> Response:
        """Register a region."""
        asked = await self._message(request)
        self._regions.register(
            request.path_params["name"], asked.get("key"), asked.get("offset", 0), asked.get("byte_size")
        )
        return JSONResponse({})

    async def unregister(self, request: Request) -> Response:
        """Forget a region, or all."""
        await self._message(request)
        self._regions.unregister(**request.path_params)
        return JSONResponse({})

    async def device_memory(self, request: Request) -> Response:
        """Nothing can be registered there, so nothing is: clients that begin by unregistering all go on."""
        if request.url.path.endswith("/register"):
            raise RequestError(501, NO_DEVICE_MEMORY)
        await self._message(request)
        return JSONResponse([] if request.method == "GET" else {})

    async def _message(self, request: Request) -> dict[str, Any]:
        """The JSON object of a request, empty if there is none."""
        length = request.headers.get("content-length")
        announced = None if length is None else length.encode("latin-1")
        with Held(self._bodies, exchange_of(request.scope)) as held:
            body = await self._bodies.read(request.receive, held, announced)
            return parse_json(body) if body.nbytes else {}


def _tensor(one: TensorMetadata) -> dict[str, Any]:
    return {"name": one.name, "datatype": one.datatype, "shape": [-1] if one.shape is None else one.shape}
