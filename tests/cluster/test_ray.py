"""Deployments on a local Ray cluster of one machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec import CompileOptions
from dagexec.cluster import Autoscaling, Deployment, deploy
from dagexec.cluster.ray_replica import Parcel
from dagexec.errors import ClosedError, FeedError, RunTimeoutError
from dagexec.executor.opening import plan_for
from dagexec.testing import random_feeds
from tests.cluster.test_ray_failures import long_pipeline, until
from tests.test_examples import blocks

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module", params=[2, 4])
def lenet(request: pytest.FixtureRequest, cluster: None) -> Iterator[Deployment]:
    with deploy("zoo:lenet", replicas=request.param) as deployment:
        yield deployment


def test_replicas_give_the_bytes_of_one_process(lenet: Deployment) -> None:
    with dagexec.compile("zoo:lenet", num_workers=1) as executor:
        feeds = [random_feeds(executor.model, seed=seed) for seed in range(8)]
        expected = [executor.run(one) for one in feeds]

    async def all_at_once() -> list[dict[str, np.ndarray]]:
        return await asyncio.gather(*(lenet.run_async(one) for one in feeds * 4))

    results = asyncio.run(all_at_once())
    for one, other in zip(results, expected * 4, strict=True):
        assert {name: array.tobytes() for name, array in one.items()} == {
            name: array.tobytes() for name, array in other.items()
        }
    begun = [replica.begun for replica in lenet.statistics().replicas]
    assert min(begun) > 0
    assert lenet.inputs == executor.inputs
    assert tuple(lenet.outputs) == tuple(executor.outputs)
    assert lenet.output_info() == executor.output_info()


def test_errors_are_those_of_an_executor(lenet: Deployment) -> None:
    feeds = random_feeds(lenet.model, seed=0)
    with pytest.raises(FeedError, match="unknown input"):
        lenet.run({**feeds, "other": np.zeros(1)})
    with pytest.raises(FeedError, match="'nothing' is not a blob"):
        lenet.run(feeds, outputs=["nothing"])
    with pytest.raises(RunTimeoutError):
        lenet.run(feeds, timeout=0)


def test_results_are_the_callers_or_written_where_it_says(lenet: Deployment) -> None:
    feeds = random_feeds(lenet.model, seed=0)
    [(name, array)] = lenet.run(feeds).items()
    array[:] = 0  # writable
    target = np.empty_like(array)
    assert lenet.run(feeds, out={name: target})[name] is target
    assert target.any()


def test_replicas_come_with_load_and_go_without_it(cluster: None) -> None:
    feeds = {"x": np.zeros(2, np.float32)}
    bounds = Autoscaling(min_replicas=1, max_replicas=3, target_outstanding=1, downscale_seconds=0)

    async def loaded(deployment: Deployment) -> None:
        asked = [asyncio.create_task(deployment.run_async(feeds)) for _ in range(6)]
        await asyncio.to_thread(until, lambda: deployment.statistics().up == 3)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)

    with deploy(long_pipeline(300, 0.2), autoscaling=bounds) as deployment:
        assert deployment.statistics().up == 1
        asyncio.run(loaded(deployment))
        until(lambda: len(deployment.statistics().replicas) == 1)


def test_a_closed_deployment_says_so(cluster: None) -> None:
    with deploy("zoo:lenet") as deployment:
        pass
    with pytest.raises(ClosedError):
        deployment.run(random_feeds(deployment.model, seed=0))
    deployment.close()


def test_the_page_about_clusters_runs(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    exec("\n".join(blocks("docs/cluster.md")), {})
    assert "2 replicas are up" in capsys.readouterr().out


def test_replicas_open_a_plan_where_they_find_it(cluster: None, tmp_path: Path) -> None:
    path = tmp_path / "lenet.dagexec"
    with dagexec.build("zoo:lenet", path, CompileOptions(num_workers=1)) as executor:
        feeds = random_feeds(executor.model, seed=3)
        expected = executor.run(feeds)
    with deploy(path, replicas=1) as deployment:
        [(name, array)] = deployment.run(feeds).items()
        assert array.tobytes() == expected[name].tobytes()
    plan, options = plan_for(path, CompileOptions(max_batch=2))
    assert options == CompileOptions(num_workers=1, max_batch=2, tuning_seconds=0.0)
    parcel = Parcel(executor.model, options, 1, plan)
    assert parcel.source({}) == path
    dagexec.build("zoo:lenet", path, CompileOptions(keep=["conv1"])).close()
    assert isinstance(parcel.source({}), dagexec.Model)
    path.unlink()
    assert isinstance(parcel.source({}), dagexec.Model)


def test_a_plan_that_was_made_otherwise_is_compiled_by_replicas(tmp_path: Path) -> None:
    path = tmp_path / "lenet.dagexec"
    dagexec.build("zoo:lenet", path, CompileOptions()).close()
    assert plan_for(path, CompileOptions(dtype="bfloat16"))[0] is None
