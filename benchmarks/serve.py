"""`dagexec serve` over HTTP: what it adds to a run, requests a second beside a rival, what a long day leaves behind.

    python benchmarks/serve.py [--rounds 5] [--seconds 2] [--requests 100000] [--json benchmarks/results/serve.json]

Overhead: one client on loopback, which waits for each answer, asks for inference with 600 KB of float32 as bytes, in
turns with `Executor.run` on the same array in the client's own process. The model `average` does almost
nothing. Operators have one thread in both.

Rates: 1, 8 and 64 connections that each ask again at once, from a process of their own. The rival is onnxruntime behind
Starlette and uvicorn, in a thread of `to_thread` for each request (`serve_peer.py`). Turns are interleaved; the ratio
is the median of those of the rounds.

Growth: resident memory, threads and file descriptors of the server after its first 1000 requests, after a tenth of the
requests and after all, over connections that are each closed after 100 of them.

But for the first, all have the threads that they choose. Results are kept by instruction set.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from environment import describe
from onnx import TensorProto, helper, numpy_helper
from serve_client import Load, answers

import dagexec
from dagexec.export.onnx_model import save_onnx

CLIENTS = (1, 8, 64)
IMAGE = (1, 3, 224, 224)
WARM_UP = 50
TURN = 10
GROWTH_CONNECTIONS = 20
EACH = 100


def save_average(path: Path) -> None:
    """The mean of each channel of an image."""
    _save(path, [helper.make_node("GlobalAveragePool", ["x"], ["y"])], [], IMAGE, (1, 3, 1, 1))


def save_tiny(path: Path) -> None:
    """One layer of 64 numbers."""
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
    _save(path, nodes, [numpy_helper.from_array(weights, "w")], (1, 64), (1, 64))


def save_squeezenet(path: Path) -> None:
    """The net of the zoo."""
    save_onnx(dagexec.load_model("zoo:squeezenet"), path)


MODELS = {"average": save_average, "tiny": save_tiny, "squeezenet": save_squeezenet}
OVERHEADS = ("average", "squeezenet")
RATES = ("tiny", "squeezenet")


def _save(path: Path, nodes: list[Any], weights: list[Any], given: tuple[int, ...], result: tuple[int, ...]) -> None:
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", given), ("y", result))
    )
    graph = helper.make_graph(nodes, path.stem, [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def the_input(path: Path) -> tuple[str, npt.NDArray[np.float32]]:
    """Its name, and values of its shape."""
    model = onnx.load(path, load_external_data=False)
    weights = {one.name for one in model.graph.initializer}
    [given] = [one for one in model.graph.input if one.name not in weights]
    shape = [size.dim_value or 1 for size in given.type.tensor_type.shape.dim]
    return given.name, np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def request(name: str, x: npt.NDArray[np.float32]) -> bytes:
    """A whole request, answered with bytes."""
    one = {"name": name, "shape": x.shape, "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    text = json.dumps({"inputs": [one], "parameters": {"binary_data_output": True}}).encode()
    head = (
        f"POST /v2/models/model/infer HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text) + x.nbytes}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
    )
    return head.encode() + text + x.tobytes()


@contextmanager
def served(*command: str) -> Iterator[tuple[int, subprocess.Popen[str]]]:
    """A server in a process of its own, which prints its port; ended at the end."""
    process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process
    finally:
        process.terminate()
        process.wait(30)


def ours(path: Path, threads: int | None = None) -> list[str]:
    """The command of our server; operators have so many threads, by default as many as it chooses."""
    return [os.fspath(Path(__file__)), "--serve", os.fspath(path), *(["--threads", str(threads)] if threads else [])]


def rival(path: Path) -> list[str]:
    """That of the other."""
    return [os.fspath(Path(__file__).with_name("serve_peer.py")), os.fspath(path)]


def serve(path: str, threads: int | None) -> None:
    """Serve one model until the process is ended; print the port when it is loaded."""
    import anyio

    from dagexec.server.config import ModelConfig, ServerConfig
    from dagexec.server.run import Server

    async def run() -> None:
        model = ModelConfig(name="model", source=path).changed({"intra_op_threads": threads})
        server = Server(ServerConfig(port=0, models={"model": model}))

        async def announce() -> None:
            while not server.repository.is_model_ready("model"):
                await anyio.sleep(0.05)
            print(server.url.rsplit(":", 1)[1], flush=True)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(announce)
            await server.run(signals=True)

    anyio.run(run)


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile."""
    ordered = sorted(seconds)
    return {"p50": statistics.median(ordered), "p99": ordered[int(0.99 * len(ordered))]}


class Asking:
    """One connection, which waits for each answer."""

    def __init__(self, port: int, asked: bytes) -> None:
        self._asked = asked
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = bytearray(1 << 20)

    def ask(self) -> None:
        """One request and its answer."""
        self._socket.sendall(self._asked)
        view, count, whole = memoryview(self._buffer), 0, sys.maxsize
        while count < whole:
            count += self._socket.recv_into(view[count:])
            end = self._buffer.find(b"\r\n\r\n", 0, count)
            if whole == sys.maxsize and end >= 0:
                head = bytes(self._buffer[:end]).lower()
                assert head.startswith(b"http/1.1 200"), bytes(self._buffer[:count])
                whole = end + 4 + int(head.partition(b"\r\ncontent-length: ")[2].partition(b"\r\n")[0])

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def overhead(path: Path, rounds: int) -> dict[str, Any]:
    """Seconds of a request and of a run, in turns, and the difference of both quantiles."""
    name, x = the_input(path)
    asked: list[float] = []
    ran: list[float] = []
    with served(*ours(path, 1)) as (port, _), dagexec.compile(path, intra_op_threads=1) as executor:
        client = Asking(port, request(name, x))
        calls = ((client.ask, asked), (lambda: executor.run({name: x}), ran))
        for _ in range(WARM_UP):
            for call, _ in calls:
                call()
        for _ in range(20 * rounds):
            for call, found in calls:
                for _ in range(TURN):
                    began = time.perf_counter()
                    call()
                    found.append(time.perf_counter() - began)
        client.close()
    http, run = quantiles(asked), quantiles(ran)
    more = {key: http[key] - run[key] for key in http}
    print(f"  overhead p50 {more['p50'] * 1e6:.0f} us, p99 {more['p99'] * 1e6:.0f} us over {run['p50'] * 1e6:.0f} us")
    return {"bytes": x.nbytes, "http": http, "run": run, "overhead": more}


def rates(path: Path, rounds: int, seconds: float) -> dict[str, Any]:
    """Requests a second of both by the number of clients, and how many times ours has the other's."""
    name, x = the_input(path)
    asked = request(name, x)
    found: dict[str, Any] = {}
    with served(*ours(path)) as (our_port, _), served(*rival(path)) as (other_port, _):
        ports = {"dagexec": our_port, "onnxruntime": other_port}
        for clients in CLIENTS:
            turns: dict[str, list[float]] = {who: [] for who in ports}
            latencies: dict[str, list[float]] = {who: [] for who in ports}
            for port in ports.values():
                answers(Load(port, asked, clients, requests=4 * clients + WARM_UP))
            for number in range(rounds):
                for who in sorted(ports, reverse=number % 2 == 1):
                    answered = answers(Load(ports[who], asked, clients, seconds=seconds))
                    turns[who].append(answered.rate)
                    latencies[who] += answered.latencies
            ratio = statistics.median(a / b for a, b in zip(turns["dagexec"], turns["onnxruntime"], strict=True))
            found[str(clients)] = {
                "rates": {who: statistics.median(turns[who]) for who in ports},
                "latencies": {who: quantiles(latencies[who]) for who in ports},
                "ratio": ratio,
            }
            rate = statistics.median(turns["dagexec"])
            print(f"  {clients} clients: {rate:.0f} requests/s, {ratio:.2f} of the rival's")
    return found


def usage(process: int) -> dict[str, int]:
    """What a process holds: resident memory in KiB, threads, file descriptors."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
    return {
        "resident KiB": int(lines["VmRSS"].split()[0]),
        "threads": int(lines["Threads"]),
        "descriptors": len(os.listdir(f"/proc/{process}/fd")),
    }


def growth(path: Path, requests: int) -> dict[str, dict[str, int]]:
    """What the server holds at the start, after a tenth of the requests, and after all."""
    name, x = the_input(path)
    asked = request(name, x)
    found: dict[str, dict[str, int]] = {}
    with served(*ours(path)) as (port, process):
        before = 0
        for count in (1000, requests // 10, requests):
            answers(Load(port, asked, GROWTH_CONNECTIONS, requests=count - before, each=EACH))
            before = count
            found[str(count)] = usage(process.pid)
            print(f"  after {count}: {found[str(count)]}")
    return found


def main() -> None:
    """Measure, print, and write what was found to a file if one is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", metavar="MODEL", help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        return
    environment = describe()
    print(f"{environment['processor']}, {environment['instruction set']}")
    report: dict[str, Any] = {"environment": environment, "overhead": {}, "rates": {}}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: Path(folder, f"{name}.onnx") for name in MODELS}
        for name, save in MODELS.items():
            save(paths[name])
        for name in OVERHEADS:
            print(name)
            report["overhead"][name] = overhead(paths[name], options.rounds)
        for name in RATES:
            print(name)
            report["rates"][name] = rates(paths[name], options.rounds, options.seconds)
        report["growth"] = growth(paths["tiny"], options.requests)
    if options.json is not None:
        reports = json.loads(options.json.read_text()) if options.json.exists() else {}
        reports[str(environment["instruction set"])] = report
        options.json.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
