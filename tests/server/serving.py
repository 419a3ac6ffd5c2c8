"""A server on a thread, at a free port of this machine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

import httpx

from dagexec.server.config import ServerConfig
from dagexec.server.run import Server
from tests.held import PATIENCE

_loops: WeakKeyDictionary[Server, asyncio.AbstractEventLoop] = WeakKeyDictionary()


@contextmanager
def serving(
    config: ServerConfig, *, loaded: bool = True, clock: Callable[[], float] = time.monotonic
) -> Iterator[Server]:
    """The server, which listens and has loaded its models; at the end it has drained, and its thread is gone."""
    server = Server(replace(config, port=0), clock)
    listening = threading.Event()
    status: list[int] = []

    async def run() -> None:
        _loops[server] = asyncio.get_running_loop()
        status.append(await server.run(listening.set))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert listening.wait(PATIENCE)
        if loaded:
            wait_until_loaded(server)
        yield server
    finally:
        if server in _loops and thread.is_alive():
            on_loop(server, server.stop)
        thread.join(PATIENCE)
        assert not thread.is_alive()


def on_loop(server: Server, call: Callable[[], object]) -> None:
    """Have `call` called soon by the loop of a server that listens."""
    _loops[server].call_soon_threadsafe(call)


def wait_until_loaded(server: Server) -> None:
    """Until no model is being loaded, or waits for that."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        while any(
            row["state"] == "LOADING" or row["reason"] == "not loaded yet"
            for row in client.post("/v2/repository/index").json()
        ):
            pass
