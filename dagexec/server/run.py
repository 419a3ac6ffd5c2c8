"""Server: a repository and its transports, from the start to a drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, suppress
from functools import partial
from importlib.metadata import version
from typing import cast

import anyio
import uvicorn
from anyio.abc import TaskStatus

from dagexec.errors import DagexecError, SettingError
from dagexec.platform.extras import install_command
from dagexec.server.access import Access, Tls
from dagexec.server.bodies import Bodies
from dagexec.server.config import ServerConfig
from dagexec.server.connection import Connection, Connections, connections_with
from dagexec.server.http import Application
from dagexec.server.limits import Limits
from dagexec.server.metrics import Metrics
from dagexec.server.repository import Repository
from dagexec.server.shared_memory import Regions

__all__ = ["Server"]

logger = logging.getLogger("dagexec.server")

_SPARE_FILES = 1000  # that a process opens besides its connections
_TICK = 0.1  # seconds, uvicorn's
_SWEEP_TICKS = 10  # between looks at slow clients, and at certificates
_SWEEP_SECONDS = 1.0  # between looks at idle sequences, and at the token


class Server:
    """Serves the models of a configuration until `stop` is called, on an event loop of asyncio.

    Attributes:
        repository: the models.
        url: where HTTP is served, once `run` has said that it listens.
        grpc_address: where gRPC is, then; empty without.
        bodies: the memory that requests take.
    """

    def __init__(self, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells how long sequences are idle."""
        self.config = config
        self._metrics = Metrics(lambda: self.repository.loaded())
        self.repository = Repository(config, self._metrics, clock=clock)
        self.bodies = Bodies(config.limits)
        self._regions = Regions(config.shared_memory, config.limits)
        self._access = Access(config.token_file)
        self._tls = None if config.certificates is None else Tls(config.certificates)
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
        self.url = f"{'http' if self.config.certificate is None else 'https'}://{shown}:{port}"
        _allow_connections(self.config.limits.connections)
        async with AsyncExitStack() as ending:
            ending.callback(listener.close)
            if self.config.grpc_port is not None:
                grpc_port = await ending.enter_async_context(self._grpc(self.config.grpc_port))
                self.grpc_address = f"{shown}:{grpc_port}"
            status = await self._serve(listener, listening, signals=signals)
        logger.info("ended")
        return status

    async def _serve(self, listener: socket.socket, listening: Callable[[], object] | None, *, signals: bool) -> int:
        application = Application(self.repository, self.bodies, self._metrics, self._regions, self._access)
        http = _Http(application, self.config.limits, self._metrics, self._tls)
        async with anyio.create_task_group() as serving:
            serving.start_soon(http.serve, [listener])
            serving.start_soon(self._look_now_and_then)
            if signals:
                await serving.start(self._obey_signals, http)
            logger.info("listening at %s%s", self.url, self.grpc_address and f", gRPC at {self.grpc_address}")
            if listening is not None:
                listening()
            status = await self._load_and_wait()
            logger.info("draining")
            http.connections.draining = True
            await self.repository.drain()
            http.should_exit = True
            await http.ended.wait()
            serving.cancel_scope.cancel()
        return status

    def _grpc(self, port: int) -> AbstractAsyncContextManager[int]:
        """A server of gRPC beside HTTP, within the same limits. Raises DagexecError where grpcio is not installed."""
        try:
            from dagexec.server.grpc_service import InferenceService, serve_grpc
        except ImportError as error:
            raise DagexecError(f"gRPC needs grpcio ({error}); install it with: {install_command('grpc')}") from error
        counted = partial(self._metrics.error_answered, "grpc")
        name, own_version = self.config.name, version("dagexec")
        service = InferenceService(
            self.repository, name, own_version, self.bodies, counted, self._regions, self._access
        )
        return serve_grpc(service, self.config.host, port, self._tls)

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

    async def _look_now_and_then(self) -> None:
        while True:
            await anyio.sleep(_SWEEP_SECONDS)
            self.repository.end_idle_sequences()
            self._access.read_again()

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

    def __init__(self, application: Application, limits: Limits, metrics: Metrics, tls: Tls | None) -> None:
        self._tls = tls
        self.connections = Connections(limits, partial(metrics.error_answered, "http"))
        settings = uvicorn.Config(
            application,
            http=connections_with(self.connections),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=2048,
        )
        settings.load()
        settings.ssl = None if tls is None else tls.context
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
        """Look at slow clients, too, and at certificates."""
        if counter % _SWEEP_TICKS == 0:
            self._close_slow()
            if self._tls is not None and self._tls.read_again():
                self.config.ssl = self._tls.context
                await self._listen_again()
        return await super().on_tick(counter)

    async def _listen_again(self) -> None:
        """Connections from now on have the new certificates; none is refused, and those there are go on."""
        before = self.servers
        await self.startup([socket.dup() for server in before for socket in server.sockets])
        for server in before:
            server.close()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and wait for those there are: each is read to its end."""
        await asyncio.sleep(0)  # whoever has connected is in
        for server in self.servers:
            server.close()
        for connection in self._open():
            connection.shutdown()
        with anyio.move_on_after(self.connections.limits.body_seconds):
            while self.server_state.connections and not self.force_exit:
                await asyncio.sleep(_TICK)
                self._close_slow()
        for connection in self._open():
            connection.transport.abort()
        for task in self.server_state.tasks:
            task.cancel()

    def _open(self) -> list[Connection]:
        found = list(self.server_state.connections)
        assert all(isinstance(one, Connection) for one in found)
        return cast(list[Connection], found)

    def _close_slow(self) -> None:
        now = anyio.current_time()
        for connection in self._open():
            connection.check(now)


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
