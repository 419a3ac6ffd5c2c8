"""The benchmark of joined requests: its queue in front of onnxruntime, what it compares, and callers that are tasks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
PATIENCE = 30


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules beside the benchmark's script can be imported, as they can from the script."""
    monkeypatch.syspath_prepend(BENCHMARKS)


class Session:
    """What is used of one of onnxruntime: y = 2 x."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def get_outputs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="y")]

    def run(self, _names: None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        self.sizes.append(len(feeds["x"]))
        return [2 * feeds["x"]]


def test_requests_in_the_queue_run_as_one_and_each_gets_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    import batching

    monkeypatch.setattr(batching, "MAX_WAIT", PATIENCE)
    session = Session()
    queued = batching.Queued(session, 4)
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda n: queued.run({"x": np.full((1, 2), n)})["y"], range(4), timeout=PATIENCE))

    async def tasks() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(queued.run_async({"x": np.full((1, 2), n)}) for n in range(4)))

    found += [one["y"] for one in asyncio.run(tasks())]
    queued.close()
    assert [one.tolist() for one in found] == [[[2 * n, 2 * n]] for n in (*range(4), *range(4))]
    assert session.sizes == [4, 4]


def test_what_joining_gains_is_compared_in_each_round() -> None:
    from batching import summary

    found = summary({"default": [10.0, 30.0, 8.0], "one replica": [5.0, 5.0, 5.0], "max_batch": [30.0, 15.0, 24.0]})
    assert found["gain"] == {"default": 3.0, "one replica": 4.8}
    assert found["rates"]["max_batch"] == 24.0


def test_tasks_call_again_as_soon_as_they_have_their_answer() -> None:
    from load_generators import closed_loop_of_tasks

    calls = itertools.count()

    async def call() -> None:
        next(calls)
        await asyncio.sleep(0)

    found = closed_loop_of_tasks(call, 3, 0.01)
    assert found.latencies.requests == next(calls) - 3  # the first call of each does not count
    assert found.rate > 0


def test_the_benchmark_measures_every_server(monkeypatch: pytest.MonkeyPatch) -> None:
    import batching

    class Doubled:
        def run(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {"y": 2 * next(iter(feeds.values()))}

        async def run_async(self, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            await asyncio.sleep(0)
            return self.run(feeds)

    @contextmanager
    def servers(*_arguments: object) -> Iterator[dict[str, Doubled]]:
        yield {name: Doubled() for name in ("default", "one replica", "max_batch", "onnxruntime")}

    monkeypatch.setattr(batching, "_servers", servers)
    monkeypatch.setattr(batching, "with_free_batch", lambda _name: None)
    monkeypatch.setattr(batching, "workload", lambda *_case: SimpleNamespace(feeds={"x": np.ones((1, 2))}))
    monkeypatch.setattr(batching, "arrivals", lambda *_rate, **_seed: [0.0, 0.001])
    found = batching.measure("perceptron", callers=2, rounds=1, seconds=0.01)
    assert found["closed"].keys() == {"threads", "tasks"}
    assert found["open"]["latencies"].keys() == {"default", "one replica", "max_batch", "onnxruntime"}
    text = "\n".join(batching.lines(found))
    assert "2 threads: max_batch answers" in text
    assert "2 tasks: max_batch answers" in text
