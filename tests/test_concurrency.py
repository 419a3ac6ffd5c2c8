"""Real models under concurrency: results never depend on who else runs, on the net type or on the workers."""

import collections
import random

import anyio
import numpy as np
import pytest

import dagexec
from dagexec.analysis.comparison import compare, random_feeds
from dagexec.errors import RunTimeoutError

NET_TYPES = ["simple", "dag", "async_dag"]


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("net_type", NET_TYPES)
async def test_64_concurrent_runs_on_4_replicas_give_the_bytes_of_64_sequential_ones(net_type: str) -> None:
    with dagexec.compile("zoo:squeezenet", optimize=False, net_type="simple") as alone:
        feeds = [random_feeds(alone.model, seed=seed) for seed in range(64)]
        [name] = alone.outputs
        expected = [alone.run(feed)[name].tobytes() for feed in feeds]
    assert len(set(expected)) == 64
    found: dict[int, bytes] = {}

    async with dagexec.compile(
        "zoo:squeezenet", optimize=False, net_type=net_type, num_workers=2, replicas=4
    ) as executor:

        async def one(number: int) -> None:
            found[number] = (await executor.run_async(feeds[number]))[name].tobytes()

        async with anyio.create_task_group() as tasks:
            for number in range(64):
                tasks.start_soon(one, number)
        assert executor.statistics().completed == 64
    assert [found[number] for number in range(64)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("model", ["zoo:googlenet", "zoo:mobilenet_v2", "zoo:densenet121"])
def test_all_runtimes_give_the_same_bytes(model: str) -> None:
    comparison = compare(model, net_types=NET_TYPES[1:], workers=(1, 2, 3), repeat=2)
    assert comparison.agrees
    assert len(comparison.rows) == 7
    assert max(row.largest_difference for row in comparison.rows) == 0


def test_runs_of_different_batch_sizes_may_alternate_on_one_replica() -> None:
    generator = np.random.default_rng(0)
    model = dagexec.executor.source.loading.load_model("zoo:lenet")
    [name] = model.inputs
    images = generator.standard_normal((4, *model.inputs[name].shape[1:]), np.float32)  # type: ignore[index]
    net = dagexec.compile((model.init_net, model.net), optimize=False)  # as Caffe2 nets they take any batch size
    with net as executor:
        together = executor.run({name: images})
        for start in range(4):
            one = executor.run({name: images[start : start + 1]})
            for output in executor.outputs:
                np.testing.assert_allclose(one[output][0], together[output][start], rtol=1e-5, atol=1e-7)


async def test_cancellations_and_timeouts_leave_every_other_run_right() -> None:
    seeds = random.Random(0)
    outcomes: collections.Counter[str] = collections.Counter()
    async with dagexec.compile(
        "zoo:lenet", optimize=False, net_type="async_dag", num_workers=2, replicas=3
    ) as executor:
        feeds = [random_feeds(executor.model, seed=seed) for seed in range(4)]
        expected = [executor.run(feed)["softmax"].tobytes() for feed in feeds]

        async def one(number: int, patience: float, kind: str) -> None:
            timeout = patience if kind == "timeout" else None
            with anyio.move_on_after(patience if kind == "cancel" else None) as scope:
                try:
                    result = await executor.run_async(feeds[number], timeout=timeout)
                except RunTimeoutError:
                    outcomes["timed out"] += 1
                else:
                    outcomes["done"] += 1
                    assert result["softmax"].tobytes() == expected[number]
            if scope.cancelled_caught:
                outcomes["cancelled"] += 1

        async with anyio.create_task_group() as tasks:
            for _ in range(300):
                kind = seeds.choice(["patient", "timeout", "cancel"])
                tasks.start_soon(one, seeds.randrange(4), seeds.uniform(0, 0.05), kind)
        statistics = executor.statistics()
        assert (statistics.running, statistics.queued, statistics.failed) == (0, 0, 0)
        assert statistics.completed + statistics.cancelled + statistics.timed_out == 304
        assert statistics.pool.chains_waiting == 0
        for number, feed in enumerate(feeds):
            assert executor.run(feed)["softmax"].tobytes() == expected[number]
    assert sum(outcomes.values()) == 300
    assert outcomes["done"] >= 90
