"""Server: a repository and its transports, from the start to a drain."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from importlib.metadata import version

import anyio
import uvicorn
from anyio.abc import TaskStatus

from dagexec.errors import DagexecError, SettingError
from dagexec.platform.extras import install_command
from dagexec.server.config import ServerConfig
from dagexec.server.connection import Connection, connections_with
from dagexec.server.http import Application
from dagexec.server.metrics import Metrics
from dagexec.server.repository import Repository

__all__ = ["Server"]

logger = logging.getLogger("dagexec.server")

_SPARE_FILES = 1000  # that a process opens besides its connections
_SWEEP_TICKS = 10  # of a tenth of a second, between looks at slow clients


class Server:
    """Serves the models of a configuration until `stop` is called, on an event loop of asyncio.

    Attributes:
        repository: the models.
        url: where HTTP is served, once `run` has said that it listens.
        grpc_address: where gRPC is, then; empty without.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self._metrics = Metrics(lambda: self.repository.loaded())
        self.repository = Repository(config, self._metrics)
        self.url = ""
        self.grpc_address = ""
        self._stop = anyio.Event()

    async def run(self, listening: Callable[[], object] | None = None, *, signals: bool = False) -> int:
        """Serve; the exit status: 0 after a drain, 1 if the configuration is strict and a model cannot be loaded.

        `listening` is called when clients can connect; models may be loading then. With `signals`, SIGTERM and SIGINT
        drain, and a second one ends running requests. Raises SettingError for an address that cannot be used.
        """
        listener = _listener(self.config)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{port}"
        _allow_connections(self.config.limits.connections)
        async with AsyncExitStack() as ending:
            ending.callback(listener.close)
            if self.config.grpc_port is not None:
                grpc_port = await ending.enter_async_context(_grpc(self.repository, self.config))
                self.grpc_address = f"{shown}:{grpc_port}"
            status = await self._serve(listener, listening, signals=signals)
        logger.info("ended")
        return status

    async def _serve(self, listener: socket.socket, listening: Callable[[], object] | None, *, signals: bool) -> int:
        http = _Http(self.repository, self._metrics, self.config)
        async with anyio.create_task_group() as serving:
            serving.start_soon(http.serve, [listener])
            if signals:
                await serving.start(self._obey_signals, http)
            logger.info("listening at %s%s", self.url, self.grpc_address and f", gRPC at {self.grpc_address}")
            if listening is not None:
                listening()
            status = await self._load_and_wait()
            logger.info("draining")
            await self.repository.drain()
            http.should_exit = True
            await http.ended.wait()
            serving.cancel_scope.cancel()
        return status

    async def _load_and_wait(self) -> int:
        """Load all models, and wait for `stop`; the exit status."""
        status = 0
        async with anyio.create_task_group() as loading:
            loading.start_soon(self._cancel_when_stopped, loading.cancel_scope)
            errors = await self.repository.load_all()
            if errors and self.config.strict:
                logger.error("strict: ending, as %d of the models could not be loaded", len(errors))
                self.stop()
                status = 1
            elif not self._stop.is_set():
                served = ", ".join(f"{one.config.name} ({one.version})" for one in self.repository.loaded())
                logger.info("serving %s at %s", served or "no models", self.url)
            await self._stop.wait()
        return status

    def stop(self) -> None:
        """Drain, then end."""
        self._stop.set()

    async def _cancel_when_stopped(self, scope: anyio.CancelScope) -> None:
        await self._stop.wait()
        scope.cancel()

    async def _obey_signals(self, http: _Http, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as received:
            task_status.started()
            async for _ in received:
                if self._stop.is_set():
                    logger.info("ending what still runs")
                    http.force_exit = True
                    await self.repository.abandon()
                self.stop()


class _Http(uvicorn.Server):
    """HTTP on a socket; signals are not its business."""

    def __init__(self, repository: Repository, metrics: Metrics, config: ServerConfig) -> None:
        settings = uvicorn.Config(
            Application(repository, metrics),
            http=connections_with(config.limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=int(config.limits.idle_seconds) or 1,
            timeout_graceful_shutdown=int(config.limits.body_seconds) or 1,
            backlog=2048,
        )
        super().__init__(settings)
        self.ended = anyio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until `should_exit`."""
        try:
            await super().serve(sockets)
        finally:
            self.ended.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Look at slow clients, too."""
        if counter % _SWEEP_TICKS == 0:
            now = anyio.current_time()
            for connection in list(self.server_state.connections):
                assert isinstance(connection, Connection)
                connection.check(now)
        return await super().on_tick(counter)


def _grpc(repository: Repository, config: ServerConfig) -> AbstractAsyncContextManager[int]:
    """A server of gRPC beside HTTP, within the same limits. Raises DagexecError where grpcio is not installed."""
    try:
        from dagexec.server.grpc_service import InferenceService, serve_grpc
    except ImportError as error:
        raise DagexecError(f"gRPC needs grpcio ({error}); install it with: {install_command('grpc')}") from error
    service = InferenceService(repository, config.name, version("dagexec"))
    limits = config.limits
    return serve_grpc(
        service, config.host, config.grpc_port or 0, limits.body_bytes, limits.connections, limits.body_seconds
    )


def _listener(config: ServerConfig) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise SettingError(f"cannot listen at {config.host}:{config.port}: {error}") from error


def _allow_connections(count: int) -> None:
    """Raise the process's limit of open files, if it may."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        logger.warning("%d open files are allowed: too few for %d connections", allowed, count)
