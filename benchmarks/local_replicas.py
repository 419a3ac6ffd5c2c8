"""Replicas in processes of this machine behind one event loop, with nothing in between: a cluster without its cost.

The front end writes inputs to a socket of the replica with the fewest outstanding requests (`dagexec.cluster.routing`)
and reads outputs from there; a replica reads in a thread of its own while it computes.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

import numpy as np

from dagexec.cluster.routing import LeastOutstanding

LENGTH = struct.Struct("<Q")


class LocalReplicas:
    """A front end with the `run_async` of an executor; `children` are the replicas' processes."""

    def __init__(self, model: str, replicas: int, max_outstanding: int | None = 2) -> None:
        self._sockets = []
        self.children = []
        for _ in range(replicas):
            ours, theirs = socket.socketpair()
            arguments = [sys.executable, __file__, model, str(theirs.fileno())]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self.children.append(subprocess.Popen(arguments, pass_fds=[theirs.fileno()], env=environment))
            theirs.close()
            self._sockets.append(ours)
        self._router = LeastOutstanding(range(replicas), max_outstanding)
        self._waiting: deque[asyncio.Future[int]] = deque()
        self._answers: list[deque[asyncio.Future[Any]]] = [deque() for _ in range(replicas)]

    async def start(self) -> None:
        """Return when all replicas are ready."""
        self._streams = [await asyncio.open_connection(sock=ours, limit=1 << 22) for ours in self._sockets]
        for reader, _ in self._streams:
            await reader.readexactly(1)
        self._readers = [asyncio.create_task(self._read(number)) for number in range(len(self._streams))]

    async def run_async(self, feeds: dict[str, np.ndarray]) -> Any:
        """What `Executor.run_async` returns, with "seconds", those of the run alone."""
        replica = self._router.acquire()
        if replica is None:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            replica = await turn
        answer = asyncio.get_running_loop().create_future()
        self._answers[replica].append(answer)
        content = pickle.dumps(feeds, protocol=5)
        self._streams[replica][1].write(LENGTH.pack(len(content)) + content)
        return await answer

    async def _read(self, replica: int) -> None:
        reader = self._streams[replica][0]
        while True:
            try:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                content = await reader.readexactly(length)
            except asyncio.IncompleteReadError:
                return
            self._answers[replica].popleft().set_result(pickle.loads(content))
            self._router.release(replica)
            if self._waiting and (free := self._router.acquire()) is not None:
                self._waiting.popleft().set_result(free)

    async def aclose(self) -> None:
        """End the processes."""
        for _, writer in self._streams:
            writer.close()
        await asyncio.gather(*self._readers)
        for process in self.children:
            process.wait(30)


def processor_seconds(process: int) -> float:
    """User and system time of a process and its threads so far, by its clock (`clock_getcpuclockid`)."""
    return time.clock_gettime(~process << 3 | 2)


def together(model: str, processes: int, seconds: float) -> list[list[float]]:
    """The seconds of runs of so many processes, each with its own replica, that compute at the same time."""
    script = f"import sys; sys.path[:0] = {sys.path[:1]!r}; import local_replicas as it; it.loop({model!r}, {seconds})"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for _ in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        process.stdout.readline()
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [[float(number) for number in process.communicate()[0].split()] for process in running]


def loop(model: str, seconds: float) -> None:
    """In a process of its own: wait for a line, run for so long, print the seconds of each run."""
    executor, feeds = compiled(model)
    print("ready", flush=True)
    sys.stdin.readline()
    found = []
    end = time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        executor.run(feeds)
        found.append(time.perf_counter() - begun)
    print(*found)


def compiled(model: str) -> tuple[Any, dict[str, np.ndarray]]:
    import dagexec
    from dagexec.testing import random_feeds

    executor = dagexec.compile(model, num_workers=1, intra_op_threads=1, net_type="simple")
    feeds = random_feeds(executor.model, seed=1)
    for _ in range(5):
        executor.run(feeds)
    return executor, feeds


def serve(model: str, descriptor: int) -> None:
    """A replica: read requests in a thread, answer them in this one."""
    executor, _ = compiled(model)
    connection = socket.socket(fileno=descriptor)
    stream = connection.makefile("rb")
    requests: SimpleQueue[bytes | None] = SimpleQueue()

    def read() -> None:
        while header := stream.read(LENGTH.size):
            requests.put(stream.read(*LENGTH.unpack(header)))
        requests.put(None)

    threading.Thread(target=read, daemon=True).start()
    connection.sendall(b"+")
    while (content := requests.get()) is not None:
        feeds = pickle.loads(content)
        begun = time.perf_counter()
        outputs = executor.run(feeds)
        seconds = time.perf_counter() - begun
        content = pickle.dumps(outputs | {"seconds": seconds}, protocol=5)
        connection.sendall(LENGTH.pack(len(content)) + content)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
