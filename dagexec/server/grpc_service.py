"""The Open Inference Protocol over gRPC: the calls of `inference.GRPCInferenceService`, and the server that takes them.

`http.py` is the same over HTTP. Needs the extra `grpc`, and an event loop of asyncio, which HTTP may share.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, aclosing, asynccontextmanager, contextmanager, nullcontext
from typing import Any, NoReturn, TypeVar

import anyio.to_thread
import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from dagexec.errors import SettingError
from dagexec.server.access import OPEN, Access, Tls
from dagexec.server.bodies import Bodies, Held
from dagexec.server.grpc_codec import (
    metadata_message,
    parameters_from,
    request_from,
    response_message,
    shared_outputs,
    token_message,
)
from dagexec.server.inference import InferenceRequest, RequestError, request_error
from dagexec.server.parent_span import parent_span
from dagexec.server.proto import inference_pb2 as messages
from dagexec.server.repository import Repository
from dagexec.server.settings import check_unchanged, log_settings, trace_settings
from dagexec.server.shared_memory import NO_DEVICE_MEMORY, NO_REGIONS, REGION, Part, Regions

SERVICE = "inference.GRPCInferenceService"

EXTENSIONS = (
    *("logging", "model_configuration", "model_repository", "schedule_policy", "sequence", "sequence(string_id)"),
    *("statistics", "system_shared_memory", "trace"),
)
"""Of the protocol, those that this service has beyond inference."""

_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
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

_OPEN_CALLS = ("ServerLive", "ServerReady")

_SETTING_FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}

_IN_SERVICE = 64
"""Requests of one stream that run or wait at one time."""

_Context = grpc.aio.ServicerContext[bytes, bytes]
_Kind = TypeVar("_Kind", bound=Message)


class InferenceService:
    """The calls, as methods from message to message. What they raise is mapped to codes by `handlers`."""

    def __init__(
        self,
        repository: Repository,
        name: str,
        version: str,
        bodies: Bodies | None = None,
        error_answered: Callable[[int], object] = lambda status: None,
        regions: Regions = NO_REGIONS,
        access: Access = OPEN,
    ) -> None:
        """`name` and `version` are the server's own.

        `bodies` counts the memory of messages, with that of other transports; `error_answered` is told the status, as
        HTTP has it, of each answer that is an error. `regions` are those of shared memory, of other transports, too.
        """
        self._repository = repository
        self._name = name
        self._version = version
        self.limits = repository.config.limits
        self._bodies = bodies or Bodies(self.limits)
        self._calls = _Calls(self.limits.connections)
        self._error_answered = error_answered
        self._regions = regions
        self._access = access

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
        config = self._repository.model_config(request.name, request.version or None)
        return messages.ModelConfigResponse(config=messages.ModelConfig(**config))

    async def model_statistics(self, request: messages.ModelRequest) -> messages.ModelStatisticsResponse:
        found = self._repository.statistics(request.name, request.version or None)
        return messages.ModelStatisticsResponse(model_stats=[messages.ModelStatistics(**one) for one in found])

    async def model_infer(self, request: messages.ModelInferRequest) -> messages.ModelInferResponse:
        with Held(self._bodies) as held:
            asked, shared = await self._asked(request, held)
            response = await self._repository.infer(asked)
            if shared:
                return await anyio.to_thread.run_sync(response_message, response, shared)
            return response_message(response)

    async def model_stream_infer(
        self, request: messages.ModelInferRequest
    ) -> AsyncGenerator[messages.ModelInferResponse, None]:
        """The answers to one message of a stream: a token each, where it has the parameter `max_tokens`."""
        if "max_tokens" not in request.parameters:
            answer = await self.model_infer(request)
            answer.parameters["triton_final_response"].bool_param = True
            yield answer
            return
        with Held(self._bodies) as held:
            asked, _ = await self._asked(request, held)
            async with aclosing(self._repository.generate(asked)) as tokens:
                async for token in tokens:
                    answer = token_message(token)
                    answer.parameters["triton_final_response"].bool_param = bool(token.finish_reason)
                    yield answer

    async def _asked(self, request: messages.ModelInferRequest, held: Held) -> tuple[InferenceRequest, dict[str, Part]]:
        """The request in a message, and where results are to be left in shared memory. Raises RequestError."""
        model, version = request.model_name, request.model_version or None
        on_thread = self._regions.any and any(REGION in tensor.parameters for tensor in request.inputs)
        arguments = (request, self.limits, self._regions, self._regions.reader(held, on_thread))
        try:
            try:
                shared = shared_outputs(request, self._regions)
                if on_thread:
                    return await anyio.to_thread.run_sync(request_from, *arguments), shared
                return request_from(*arguments), shared
            except RequestError:
                self._repository.check_inputs(model, version, [tensor.name for tensor in request.inputs])
                raise
        except RequestError as error:
            self._repository.count_refused(model, version, error)
            raise

    async def repository_index(self, request: messages.RepositoryIndexRequest) -> messages.RepositoryIndexResponse:
        rows = self._repository.index(request.ready)
        return messages.RepositoryIndexResponse(
            models=[
                messages.ModelIndex(name=row.name, version=row.version, state=row.state, reason=row.reason)
                for row in rows
            ]
        )

    async def load(self, request: messages.RepositoryModelRequest) -> messages.RepositoryModelResponse:
        parameters = parameters_from(request.parameters)
        self._repository.check_control(parameters)
        await self._repository.load(request.model_name, parameters)
        return messages.RepositoryModelResponse()

    async def unload(self, request: messages.RepositoryModelRequest) -> messages.RepositoryModelResponse:
        self._repository.check_control()
        await self._repository.unload(request.model_name)
        return messages.RepositoryModelResponse()

    async def trace(self, request: messages.TraceSettings) -> messages.TraceSettings:
        if request.model_name:
            self._repository.metadata(request.model_name)
        settings = trace_settings(self._repository.config.telemetry)
        check_unchanged(settings, {name: list(one.value) or None for name, one in request.settings.items()})
        answer = messages.TraceSettings()
        for name, value in settings.items():
            answer.settings[name].value.extend([value] if isinstance(value, str) else value)
        return answer

    async def log(self, request: messages.LogSettings) -> messages.LogSettings:
        settings = log_settings()
        check_unchanged(settings, parameters_from(request.settings))
        answer = messages.LogSettings()
        for name, value in settings.items():
            setattr(answer.settings[name], _SETTING_FIELDS[type(value)], value)
        return answer

    async def regions(self, request: messages.RegionRequest) -> messages.RegionsResponse:
        found = self._regions.status(request.name)
        return messages.RegionsResponse(regions={one["name"]: messages.Region(**one) for one in found})

    async def register(self, request: messages.Region) -> messages.EmptyResponse:
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return messages.EmptyResponse()

    async def unregister(self, request: messages.RegionRequest) -> messages.EmptyResponse:
        self._regions.unregister(request.name)
        return messages.EmptyResponse()

    async def device_memory(self, request: messages.RegionRequest) -> messages.EmptyResponse:
        raise RequestError(501, NO_DEVICE_MEMORY)

    async def no_device_memory(self, request: messages.RegionRequest) -> messages.EmptyResponse:
        return messages.EmptyResponse()

    def handlers(self) -> grpc.GenericRpcHandler:
        """What a server of gRPC asks for the handler of a call."""
        calls: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            "ServerLive": (messages.ServerLiveRequest, self.server_live),
            "ServerReady": (messages.ServerReadyRequest, self.server_ready),
            "ServerMetadata": (messages.ServerMetadataRequest, self.server_metadata),
            "ModelReady": (messages.ModelRequest, self.model_ready),
            "ModelMetadata": (messages.ModelRequest, self.model_metadata),
            "ModelConfig": (messages.ModelRequest, self.model_config),
            "ModelStatistics": (messages.ModelRequest, self.model_statistics),
            "ModelInfer": (messages.ModelInferRequest, self.model_infer),
            "RepositoryIndex": (messages.RepositoryIndexRequest, self.repository_index),
            "RepositoryModelLoad": (messages.RepositoryModelRequest, self.load),
            "RepositoryModelUnload": (messages.RepositoryModelRequest, self.unload),
            "TraceSetting": (messages.TraceSettings, self.trace),
            "LogSettings": (messages.LogSettings, self.log),
            "SystemSharedMemoryStatus": (messages.RegionRequest, self.regions),
            "SystemSharedMemoryRegister": (messages.Region, self.register),
            "SystemSharedMemoryUnregister": (messages.RegionRequest, self.unregister),
            "CudaSharedMemoryStatus": (messages.RegionRequest, self.no_device_memory),
            "CudaSharedMemoryRegister": (messages.RegionRequest, self.device_memory),
            "CudaSharedMemoryUnregister": (messages.RegionRequest, self.no_device_memory),
        }
        found: dict[str, grpc.RpcMethodHandler[Any, Any]]
        found = {
            name: grpc.stream_unary_rpc_method_handler(self._answering(*call, is_open=name in _OPEN_CALLS))
            for name, call in calls.items()
        }
        found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(self._answer_stream)
        return grpc.method_handlers_generic_handler(SERVICE, found)

    def _answering(
        self, kind: type[Message], call: Callable[[Any], Awaitable[Message]], *, is_open: bool
    ) -> Callable[[object, _Context], Awaitable[bytes]]:
        """A handler from bytes to bytes, which ends a failed call with a code.

        It reads the one message itself, as gRPC waits for it without end. gRPC cancels it where the client goes away or
        its deadline is over.
        """

        async def answer(_: object, context: _Context) -> bytes:
            try:
                if not is_open:
                    self._check_access(context)
                with self._calls.place():
                    data = await _Client(self._calls, context, self.limits.body_seconds).message()
                    if data is None:
                        raise RequestError(400, "the call has no message")
                    with self._held(data), _parent_span(context):
                        return (await call(_parsed(kind, data))).SerializeToString()
            except Exception as error:
                refused = request_error(error)
            return await self._abort(context, refused)

        return answer

    async def _answer_stream(self, _: object, context: _Context) -> None:
        """Requests run side by side, and are answered in the order in which they came."""
        refused: RequestError | None = None
        try:
            self._check_access(context)
            with self._calls.place():
                async with asyncio.TaskGroup() as tasks:
                    refused = await self._read_stream(context, tasks)
        except RequestError as error:
            refused = error
        if refused is not None:
            await self._abort(context, refused)

    async def _read_stream(self, context: _Context, tasks: asyncio.TaskGroup) -> RequestError | None:
        """Begin the requests of a stream, up to its end; what is wrong with the stream itself."""
        client = _Client(self._calls, context, self.limits.idle_seconds)
        room = asyncio.Semaphore(_IN_SERVICE)
        before: asyncio.Task[None] | None = None

        async def serve(data: bytes, before: asyncio.Task[None] | None) -> None:
            try:
                await self._answer_in_turn(data, context, before)
            finally:
                client.served()
                room.release()

        try:
            while (data := await client.message()) is not None:
                await room.acquire()
                client.serves()
                before = tasks.create_task(serve(data, before))
        except RequestError as error:
            return error
        return None

    async def _answer_in_turn(self, data: bytes, context: _Context, before: asyncio.Task[None] | None) -> None:
        """Answer one message of a stream once `before` is over; errors do not end the stream."""
        with _parent_span(context):
            async with aclosing(self._answers(data)) as answers:
                async for answer in answers:
                    if before is not None:
                        await asyncio.wait([before])
                        before = None
                    await context.write(answer.SerializeToString())

    async def _answers(self, data: bytes) -> AsyncGenerator[messages.ModelStreamInferResponse, None]:
        """Those to one message of a stream; an error is the last one."""
        request = messages.ModelInferRequest()
        try:
            with self._held(data):
                request = _parsed(messages.ModelInferRequest, data)
                async with aclosing(self.model_stream_infer(request)) as answers:
                    async for answer in answers:
                        yield messages.ModelStreamInferResponse(infer_response=answer)
            return
        except Exception as error:
            refused = request_error(error)
        self._error_answered(refused.status)
        failed = messages.ModelInferResponse(
            model_name=request.model_name, model_version=request.model_version, id=request.id
        )
        yield messages.ModelStreamInferResponse(error_message=str(refused), infer_response=failed)

    def _check_access(self, context: _Context) -> None:
        """Raise RequestError (401) for a client without the token."""
        sent = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        self._access.check(sent[0].encode() if sent and isinstance(sent[0], str) else None)

    @contextmanager
    def _held(self, data: bytes) -> Iterator[None]:
        """Count the memory of a message. Raises RequestError."""
        with Held(self._bodies) as held:
            held.add(len(data))
            yield

    async def _abort(self, context: _Context, refused: RequestError) -> NoReturn:
        self._error_answered(refused.status)
        metadata = () if refused.retry_after is None else ((RETRY_METADATA, str(1000 * refused.retry_after)),)
        code = _CODES.get(refused.status, grpc.StatusCode.INTERNAL)
        await context.abort(code, str(refused)[:_MESSAGE_CHARACTERS], metadata)
        raise AssertionError("abort raises")


class _Calls:
    """Calls that are being served; of those whose messages have not come, the oldest gives its place to a new one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._count = 0
        self.awaited: dict[_Client, None] = {}
        """Clients that the server waits for, the longest first."""

    @contextmanager
    def place(self) -> Iterator[None]:
        """That of one call. Raises RequestError when there is none."""
        if self._count >= self._most:
            oldest = next(iter(self.awaited), None)
            if oldest is None:
                raise RequestError(429, f"{self._most} calls are being served already")
            oldest.give_way()
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


class _Client:
    """Who sends the messages of one call: within `seconds`, while none of its requests is in service."""

    def __init__(self, calls: _Calls, context: _Context, seconds: float) -> None:
        self._calls = calls
        self._context = context
        self._seconds = seconds
        self._in_service = 0
        self._patience: asyncio.Timeout | None = None

    async def message(self) -> bytes | None:
        """The next one, None at their end. Raises RequestError if it does not come in time."""
        try:
            async with asyncio.timeout(None) as self._patience:
                self._await_message()
                data = await self._context.read()
        except TimeoutError:
            raise RequestError(408, "the message of the call did not come in time") from None
        finally:
            self._patience = None
            self._calls.awaited.pop(self, None)
        return data if isinstance(data, bytes) else None

    def serves(self) -> None:
        """A request of it begins."""
        self._in_service += 1

    def served(self) -> None:
        """A request of it is over."""
        self._in_service -= 1
        self._await_message()

    def give_way(self) -> None:
        """Wait no longer."""
        self._calls.awaited.pop(self)
        if self._patience is not None:
            self._patience.reschedule(0)

    def _await_message(self) -> None:
        """From now on, if nothing else is to be done for it."""
        if self._patience is None or self._patience.expired() or self._in_service:
            return
        self._patience.reschedule(asyncio.get_running_loop().time() + self._seconds)
        self._calls.awaited[self] = None


@asynccontextmanager
async def serve_grpc(service: InferenceService, host: str, port: int, tls: Tls | None = None) -> AsyncIterator[int]:
    """Take calls while the context is open; its value is the port, which is any free one if 0 is given.

    Within the limits of `service`: `body_bytes` of a message, `connections` as calls at one time, `header_seconds` for
    the handshake of a connection, `idle_seconds` that it stays open without a call. At the end new calls are refused,
    and those in service have `body_seconds` before they are cancelled.

    Raises `SettingError` where the address cannot be used.
    """
    limits = service.limits
    options = [
        ("grpc.max_receive_message_length", limits.body_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.server_handshake_timeout_ms", _milliseconds(limits.header_seconds)),
        ("grpc.max_connection_idle_ms", _milliseconds(limits.idle_seconds)),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.aio.server(handlers=[service.handlers()], options=options)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        bound = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, _credentials(tls))
    except (OSError, RuntimeError) as error:
        raise SettingError(f"gRPC cannot listen on {host}, port {port}: {error}") from error
    await server.start()
    try:
        yield bound
    finally:
        await server.stop(limits.body_seconds)


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Those of each connection are what `tls` has when it begins."""
    used = tls.contents

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(used.private_key, used.certificate)], used.client_certificates
        )

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal used
        if used is tls.contents:
            return None
        used = tls.contents
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        renewed,  # type: ignore[arg-type]  # None, which the stubs lack, stands for no change
        require_client_authentication=used.client_certificates is not None,
    )


def _milliseconds(seconds: float) -> int:
    return max(1, min(round(1000 * seconds), (1 << 31) - 1))


def _parent_span(context: _Context) -> AbstractContextManager[None]:
    """The span that the client names, which few do."""
    metadata = context.invocation_metadata() or ()
    if not any(name == "traceparent" for name, _ in metadata):
        return nullcontext()
    return parent_span((name, value) for name, value in metadata if isinstance(value, str))


def _parsed(kind: type[_Kind], data: bytes) -> _Kind:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise RequestError(400, f"the request is not a message of the protocol: {error}") from error
    return message
