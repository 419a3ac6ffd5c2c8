"""Requests that are joined: requests a second and latencies with and without `max_batch`, beside onnxruntime.

    python benchmarks/batching.py [--models perceptron lenet resnet50] [--callers 64] [--rounds 5] [--seconds 1]
                                  [--quick] [--json benchmarks/results/batching.json]

Requests of one row come from so many threads, and from as many tasks of asyncio, that each ask again at once.
dagexec.compile without options, with one replica, and with `max_batch`; onnxruntime without and behind a queue as users
write it themselves: a thread, or a task, that takes what there is, waits a little for more, runs and splits it. Turns
are interleaved, in one process. Then arrivals of a Poisson process, at 70% of the most that any of them has answered
to threads, go to each at the same moments; latencies count from when an arrival was due.

Results are kept by instruction set. ONEDNN_MAX_CPU_ISA=AVX2 limits dagexec; onnxruntime takes what the processor has.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
from cnn_models import with_batch_size, workload
from environment import describe
from load_generators import Latencies, arrivals, closed_loop, closed_loop_of_tasks, open_loop

import dagexec

MODELS = ("perceptron", "lenet", "resnet50")
MAX_BATCH = {"perceptron": 32, "lenet": 32, "resnet50": 8}
MAX_WAIT = 0.002
LOAD = 0.7
"""Of what the best can answer, the part that arrives."""
TOLERANCE = 1e-4
OURS = "max_batch"
UNJOINED = ("default", "one replica")

Feeds = dict[str, npt.NDArray[Any]]
Results = dict[str, npt.NDArray[Any]]


class Server:
    """Whoever answers requests, to threads and to tasks."""

    def __init__(self, run: Callable[[Feeds], Results], run_async: Callable[[Feeds], Awaitable[Results]]) -> None:
        self.run = run
        self.run_async = run_async


class Queued:
    """onnxruntime behind a queue that joins what waits."""

    def __init__(self, session: onnxruntime.InferenceSession, max_batch: int) -> None:
        self._session = session
        self._outputs = [output.name for output in session.get_outputs()]
        self._max_batch = max_batch
        self._asked: queue.SimpleQueue[tuple[Feeds, Future[Results]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def run(self, feeds: Feeds) -> Results:
        """The results of one request."""
        return self._ask(feeds).result()

    async def run_async(self, feeds: Feeds) -> Results:
        """The same for a task."""
        return await asyncio.wrap_future(self._ask(feeds))

    def close(self) -> None:
        """End the thread."""
        self._asked.put(None)
        self._thread.join()

    def _ask(self, feeds: Feeds) -> Future[Results]:
        future: Future[Results] = Future()
        self._asked.put((feeds, future))
        return future

    def _serve(self) -> None:
        while (first := self._asked.get()) is not None:
            batch, until = [first], time.monotonic() + MAX_WAIT
            while len(batch) < self._max_batch:
                try:
                    more = self._asked.get(timeout=max(0.0, until - time.monotonic()))
                except queue.Empty:
                    break
                if more is None:
                    self._asked.put(None)
                    break
                batch.append(more)
            self._answer(batch)

    def _answer(self, batch: list[tuple[Feeds, Future[Results]]]) -> None:
        joined = {name: np.concatenate([feeds[name] for feeds, _ in batch]) for name in batch[0][0]}
        results = self._session.run(None, joined)
        for row, (_, future) in enumerate(batch):
            future.set_result({name: array[row : row + 1] for name, array in zip(self._outputs, results, strict=True)})


def main() -> None:
    """Measure, print, and write what was found to a file if one is given."""
    options = _arguments()
    environment = describe()
    found = {}
    for name in options.models:
        found[name] = measure(name, options.callers, options.rounds, options.seconds)
        print(f"{name} ({environment['instruction set']})")
        for line in lines(found[name]):
            print("  " + line, flush=True)
    if options.json is not None:
        reports = json.loads(options.json.read_text()) if options.json.exists() else {}
        kept = reports.setdefault(str(environment["instruction set"]), {"models": {}})
        kept["environment"] = environment
        kept["models"] |= found
        options.json.write_text(json.dumps(reports, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS)
    parser.add_argument("--callers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of a closed loop in a round")
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds = 2, 0.3
    return options


def measure(name: str, callers: int, rounds: int, seconds: float) -> dict[str, Any]:
    """Rates and latencies of one model by server, and what joining gains over each way of not joining."""
    model = with_free_batch(name)
    feeds = workload(name, 1).feeds
    with _servers(model, MAX_BATCH[name]) as servers:
        compare(servers, feeds)
        rates: dict[str, dict[str, list[float]]] = {kind: {one: [] for one in servers} for kind in ("threads", "tasks")}
        for _ in range(rounds):
            for one, server in servers.items():
                rates["threads"][one].append(closed_loop(lambda: server.run(feeds), callers, seconds).rate)  # noqa: B023
                rates["tasks"][one].append(
                    closed_loop_of_tasks(lambda: server.run_async(feeds), callers, seconds).rate  # noqa: B023
                )
        rate = LOAD * max(statistics.median(row) for row in rates["threads"].values())
        waits: dict[str, list[Latencies]] = {one: [] for one in servers}
        for number in range(rounds):
            moments = arrivals(rate, 2 * seconds, seed=number)
            for one, server in servers.items():
                waits[one].append(open_loop(lambda: server.run(feeds), moments, callers))  # noqa: B023
    return {
        "closed": {kind: summary(rows) for kind, rows in rates.items()},
        "open": {
            "rate": rate,
            "latencies": {
                one: [statistics.median(wait.p50 for wait in row), statistics.median(wait.p99 for wait in row)]
                for one, row in waits.items()
            },
        },
        "effort": {"callers": callers, "rounds": rounds, "seconds": seconds},
    }


def summary(rates: Mapping[str, list[float]]) -> dict[str, Any]:
    """Medians over the rounds, and those of what joining gains in each round."""
    gains = {one: [mine / other for mine, other in zip(rates[OURS], rates[one], strict=True)] for one in UNJOINED}
    return {
        "rates": {one: statistics.median(row) for one, row in rates.items()},
        "gain": {one: statistics.median(row) for one, row in gains.items()},
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The results of one model as text."""
    for kind, row in found["closed"].items():
        rates = ", ".join(f"{one} {rate:.1f}" for one, rate in row["rates"].items())
        gains = ", ".join(f"{gain:.2f} of {one}" for one, gain in row["gain"].items())
        yield f"{found['effort']['callers']} {kind}: {OURS} answers {gains} ({rates} a second)"
    waits = ", ".join(
        f"{one} {1e3 * p50:.2f} and {1e3 * p99:.2f}" for one, (p50, p99) in found["open"]["latencies"].items()
    )
    yield f"Poisson, {found['open']['rate']:.1f} a second: p50 and p99, ms: {waits}"


def with_free_batch(name: str) -> onnx.ModelProto:
    """The network, for any number of rows."""
    model = with_batch_size(workload(name, 1).model, -1)
    given = {tensor.name for tensor in model.graph.initializer}
    for value in (*model.graph.input, *model.graph.output):
        if value.name not in given:
            value.type.tensor_type.shape.dim[0].dim_param = "N"
    return model


@contextmanager
def _servers(model: onnx.ModelProto, max_batch: int) -> Iterator[dict[str, Server]]:
    """All contenders, ready."""
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = [output.name for output in session.get_outputs()]

    def run(feeds: Feeds) -> Results:
        return dict(zip(names, session.run(None, feeds), strict=True))

    async def run_async(feeds: Feeds) -> Results:
        return await asyncio.to_thread(run, feeds)

    queued = Queued(session, max_batch)
    try:
        with (
            dagexec.compile(model) as default,
            dagexec.compile(model, replicas=1) as one,
            dagexec.compile(model, max_batch=max_batch, max_wait=MAX_WAIT) as joined,
        ):
            yield {
                "default": Server(default.run, default.run_async),
                "one replica": Server(one.run, one.run_async),
                OURS: Server(joined.run, joined.run_async),
                "onnxruntime": Server(run, run_async),
                "onnxruntime, queue": Server(queued.run, queued.run_async),
            }
    finally:
        queued.close()


def compare(servers: Mapping[str, Server], feeds: Feeds) -> None:
    """Raises AssertionError when they do not give the same, within the rounding of 32 bits."""
    expected = servers["onnxruntime"].run(feeds)
    for server in servers.values():
        for name, array in server.run(feeds).items():
            np.testing.assert_allclose(array, expected[name], rtol=TOLERANCE, atol=TOLERANCE)


if __name__ == "__main__":
    main()
