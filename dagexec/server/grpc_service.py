"""The Open Inference Protocol over gRPC: the calls of `inference.GRPCInferenceService`, and the server that takes them.

`http.py` is the same over HTTP. Needs the extra `grpc`, and an event loop of asyncio, which HTTP may share.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dagexec.errors import SettingError
from dagexec.server.grpc_codec import (
    config_message,
    metadata_message,
    parameters_from,
    request_from,
    response_message,
)
from dagexec.server.inference import RequestError, request_error
from dagexec.server.parent_span import parent_span
from dagexec.server.proto import inference_pb2 as messages
from dagexec.server.repository import Repository

logger = logging.getLogger("dagexec.server")

SERVICE = "inference.GRPCInferenceService"

EXTENSIONS = ("model_repository", "model_configuration")
"""Of the protocol, those that this service has beyond inference."""

_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
"""By status of HTTP; INTERNAL for any other."""

RETRY_METADATA = "grpc-retry-pushback-ms"
"""Where a client with a retry policy finds the milliseconds after which it may try again (gRFC A6)."""

_MESSAGE_CHARACTERS = 2000
"""Of an error's text, which is sent as a header, and clients take few bytes of these."""

_Context = grpc.aio.ServicerContext[bytes, bytes]


class InferenceService:
    """The calls, as methods from message to message. What they raise is mapped to codes by `handlers`."""

    def __init__(self, repository: Repository, name: str, version: str) -> None:
        """`name` and `version` are the server's own."""
        self._repository = repository
        self._name = name
        self._version = version

    async def server_live(self, request: messages.ServerLiveRequest) -> messages.ServerLiveResponse:
        return messages.ServerLiveResponse(live=True)

    async def server_ready(self, request: messages.ServerReadyRequest) -> messages.ServerReadyResponse:
        return messages.ServerReadyResponse(ready=self._repository.is_ready())

    async def server_metadata(self, request: messages.ServerMetadataRequest) -> messages.ServerMetadataResponse:
        return messages.ServerMetadataResponse(name=self._name, version=self._version, extensions=EXTENSIONS)

    async def model_ready(self, request: messages.ModelRequest) -> messages.ModelReadyResponse:
        ready = self._repository.is_model_ready(request.name, request.version or None)
        return messages.ModelReadyResponse(ready=ready)

    async def model_metadata(self, request: messages.ModelRequest) -> messages.ModelMetadataResponse:
        return metadata_message(self._repository.metadata(request.name, request.version or None))

    async def model_config(self, request: messages.ModelRequest) -> messages.ModelConfigResponse:
        return config_message(self._repository.metadata(request.name, request.version or None))

    async def model_infer(self, request: messages.ModelInferRequest) -> messages.ModelInferResponse:
        return response_message(await self._repository.infer(request_from(request, self._repository.config.limits)))

    async def repository_index(self, request: messages.RepositoryIndexRequest) -> messages.RepositoryIndexResponse:
        rows = self._repository.index(request.ready)
        return messages.RepositoryIndexResponse(
            models=[
                messages.ModelIndex(name=row.name, version=row.version, state=row.state, reason=row.reason)
                for row in rows
            ]
        )

    async def load(self, request: messages.RepositoryModelRequest) -> messages.RepositoryModelResponse:
        self._repository.check_control()
        await self._repository.load(request.model_name, parameters_from(request.parameters))
        return messages.RepositoryModelResponse()

    async def unload(self, request: messages.RepositoryModelRequest) -> messages.RepositoryModelResponse:
        self._repository.check_control()
        await self._repository.unload(request.model_name)
        return messages.RepositoryModelResponse()

    async def stream(self, data: bytes) -> messages.ModelStreamInferResponse:
        """The answer to one message of a stream, errors included: they do not end it."""
        request = messages.ModelInferRequest()
        try:
            _parse(request, data)
            return messages.ModelStreamInferResponse(infer_response=await self.model_infer(request))
        except Exception as error:
            failed = messages.ModelInferResponse(
                model_name=request.model_name, model_version=request.model_version, id=request.id
            )
            return messages.ModelStreamInferResponse(error_message=str(request_error(error)), infer_response=failed)

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server of gRPC asks for the handler of a call."""
        calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            "ServerLive": (messages.ServerLiveRequest, self.server_live),
            "ServerReady": (messages.ServerReadyRequest, self.server_ready),
            "ServerMetadata": (messages.ServerMetadataRequest, self.server_metadata),
            "ModelReady": (messages.ModelRequest, self.model_ready),
            "ModelMetadata": (messages.ModelRequest, self.model_metadata),
            "ModelConfig": (messages.ModelRequest, self.model_config),
            "ModelInfer": (messages.ModelInferRequest, self.model_infer),
            "RepositoryIndex": (messages.RepositoryIndexRequest, self.repository_index),
            "RepositoryModelLoad": (messages.RepositoryModelRequest, self.load),
            "RepositoryModelUnload": (messages.RepositoryModelRequest, self.unload),
        }
        found: dict[str, grpc.RpcMethodHandler[Any, Any]]
        found = {name: grpc.unary_unary_rpc_method_handler(_answering(*call)) for name, call in calls.items()}
        found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._answer_stream)
        return grpc.method_handlers_generic_handler(SERVICE, found)

    async def _answer_stream(self, requests: AsyncIterator[bytes], context: _Context) -> AsyncIterator[bytes]:
        """One request after another, so that answers come in the order of requests."""
        async for data in requests:
            with _parent_span(context):
                answer = await self.stream(data)
            yield answer.SerializeToString()


@asynccontextmanager
async def serve_grpc(
    service: InferenceService, host: str, port: int, max_message_bytes: int, max_requests: int, grace_seconds: float
) -> AsyncIterator[int]:
    """Take calls while the context is open; its value is the port, which is any free one if 0 is given.

    Messages have at most `max_message_bytes`; beyond `max_requests` calls at one time, further ones are refused. At
    the end new calls are refused, and those in service have `grace_seconds` before they are cancelled.

    Raises `SettingError` where the address cannot be used.
    """
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(handlers=[service.handlers()], options=options, maximum_concurrent_rpcs=max_requests)
    try:
        bound = server.add_insecure_port(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except RuntimeError as error:
        raise SettingError(f"gRPC cannot listen on {host}, port {port}: {error}") from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(grace_seconds)


def _answering(
    kind: type[Message], call: Callable[[Any], Awaitable[Message]]
) -> Callable[[bytes, _Context], Awaitable[bytes]]:
    """A handler from bytes to bytes, which ends a failed call with a code.

    gRPC cancels it where the client goes away or its deadline is over.
    """

    async def answer(data: bytes, context: _Context) -> bytes:
        try:
            message = kind()
            _parse(message, data)
            with _parent_span(context):
                return (await call(message)).SerializeToString()
        except Exception as error:
            refused = request_error(error)
        metadata = () if refused.retry_after is None else ((RETRY_METADATA, str(1000 * refused.retry_after)),)
        code = _CODES.get(refused.status, grpc.StatusCode.INTERNAL)
        return await context.abort(code, str(refused)[:_MESSAGE_CHARACTERS], metadata)

    return answer


def _parent_span(context: _Context) -> AbstractContextManager[None]:
    """The span that the client names, which few do."""
    metadata = context.invocation_metadata() or ()
    if not any(name == "traceparent" for name, _ in metadata):
        return nullcontext()
    return parent_span((name, value) for name, value in metadata if isinstance(value, str))


def _parse(message: Message, data: bytes) -> None:
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RequestError(400, f"the request is not a message of the protocol: {error}") from error
