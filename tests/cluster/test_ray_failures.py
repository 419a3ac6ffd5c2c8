"""What a deployment on Ray does when things go wrong: processes that are killed, cancelled runs, models that fail."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.cluster import Deployment, deploy
from dagexec.errors import ClosedError, DagexecError, FeedError, ReplicaError
from dagexec.testing import random_feeds

pytestmark = pytest.mark.ray

SECONDS = 60
KILLS = int(os.environ.get("DAGEXEC_KILLS", "25"))
"""Of replicas, in a deployment of two and in one of four."""


def until(question: Callable[[], object]) -> None:
    """Return once it is so, by asking again and again."""
    end = time.monotonic() + SECONDS
    while not question():
        assert time.monotonic() < end, "it did not become so"
        time.sleep(0.005)  # lets processes of others work; nothing depends on how long it takes


def processes(deployment: Deployment) -> list[int]:
    """Those of the replicas."""
    return [int(replica.place.split()[1]) for replica in deployment.statistics().replicas]


def executors(deployment: Deployment) -> list[Any]:
    """What the replicas' executors say of themselves; None of one that is not ready."""
    import ray

    links: list[Any] = deployment._dispatcher.read(lambda state, links: list(links.values()))
    return ray.get([link.statistics() for link in links], timeout=SECONDS)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_store() -> float:
    import ray

    return float(ray.available_resources()["object_store_memory"])


X = {"x": np.zeros(2, np.float32)}


class Step:
    """A function of a pipeline that computes for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, x: np.ndarray) -> np.ndarray:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            pass
        return x + 1


def long_pipeline(stages: int, seconds: float) -> dagexec.Pipeline:
    """Stages of which each has two readers, so that a run can be stopped after each."""
    pipeline = dagexec.Pipeline("long")
    value: Any = pipeline.input("x", "float32", (2,))
    for stage in range(stages):
        value = pipeline.python(f"stage{stage}", Step(seconds), [value], "float32[2]")
        pipeline.output(f"y{stage}", value)
        pipeline.output(f"z{stage}", pipeline.python(f"side{stage}", Step(0), [value], "float32[2]"))
    return pipeline


def test_a_pipeline_runs_in_replicas_with_its_functions(cluster: None) -> None:
    with deploy(long_pipeline(2, 0), replicas=2) as deployment:
        found = deployment.run(X)
    assert {name: array.tolist() for name, array in found.items()} == {
        "y0": [1, 1],
        "z0": [2, 2],
        "y1": [2, 2],
        "z1": [3, 3],
    }


def test_a_call_that_is_cancelled_or_late_ends_the_run_of_the_replica(cluster: None) -> None:
    """Alone, a run takes a minute."""

    async def cancelled(deployment: Deployment) -> None:
        task = asyncio.create_task(deployment.run_async(X))
        await asyncio.to_thread(until, lambda: executors(deployment)[0].running == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with deploy(long_pipeline(300, 0.2)) as deployment:
        asyncio.run(cancelled(deployment))
        until(lambda: executors(deployment)[0].running == 0)
        assert executors(deployment)[0].cancelled == 1
        with pytest.raises(TimeoutError):
            deployment.run(X, timeout=0.3)
        until(lambda: executors(deployment)[0].running == 0)
        [found] = executors(deployment)
        assert found.completed == 0
        assert found.timed_out + found.cancelled == 2
        assert deployment.statistics().cancelled == 1


def test_closing_under_load_answers_every_request(cluster: None) -> None:
    outcomes: Counter[str] = Counter()
    deployment = deploy("zoo:lenet", replicas=2)
    feeds = random_feeds(deployment.model, seed=0)
    full = threading.Barrier(9)

    def client() -> None:
        deployment.run(feeds)
        full.wait(SECONDS)
        try:
            while True:
                deployment.run(feeds)
                outcomes["completed"] += 1
        except ClosedError:
            outcomes["closed"] += 1

    threads = [threading.Thread(target=client) for _ in range(8)]
    for thread in threads:
        thread.start()
    full.wait(SECONDS)
    deployment.close()
    for thread in threads:
        thread.join(SECONDS)
    assert outcomes["closed"] == 8


def test_a_model_that_does_not_compile_says_why(cluster: None) -> None:
    with pytest.raises(FeedError, match=r"keep: \['nothing'\]"):
        deploy("zoo:lenet", dagexec.CompileOptions(keep=["nothing"]), replicas=2)


class Deadly:
    """A function whose process ends when it is unpickled."""

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x

    def __reduce__(self) -> tuple[Callable[[int], Any], tuple[int]]:
        return os._exit, (3,)


class Unpicklable:
    """A function with a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        return x


def pipeline_of(function: Callable[[np.ndarray], np.ndarray]) -> dagexec.Pipeline:
    pipeline = dagexec.Pipeline("steps")
    x = pipeline.input("x", "float32", (2,))
    pipeline.output("y", pipeline.python("crop", function, [x], "float32[2]"))
    return pipeline


def test_a_step_that_cannot_be_pickled_is_named(cluster: None) -> None:
    with pytest.raises(DagexecError, match=r"'steps': the function of crop.* cannot be sent.*lock"):
        deploy(pipeline_of(Unpicklable()))


def test_a_replica_whose_process_ends_at_each_start_is_given_up(cluster: None) -> None:
    with pytest.raises(ReplicaError, match="net 'steps': replica 0 ended before it was ready"):
        deploy(pipeline_of(Deadly()))


def test_a_cluster_without_room_says_what_it_has(cluster: None) -> None:
    with pytest.raises(ReplicaError, match=r"1 of 1 replicas were not ready within .* the cluster has 8 CPUs"):
        deploy("zoo:lenet", cores_per_replica=9, start_seconds=0.2)


@pytest.fixture(params=[2, 4])
def killed(request: pytest.FixtureRequest, cluster: None) -> Iterator[Deployment]:
    deployment = deploy("zoo:lenet", replicas=request.param)
    yield deployment
    deployment.close()


def test_a_replica_that_is_stopped_and_does_not_die_is_replaced(cluster: None) -> None:
    """Its call, which has no timeout, is answered by the other one, and its process ends."""
    with deploy("zoo:lenet", replicas=2, answer_seconds=4) as deployment:
        feeds = random_feeds(deployment.model, seed=0)
        expected = deployment.run(feeds)
        stopped = processes(deployment)[0]
        os.kill(stopped, signal.SIGSTOP)
        for _ in range(4):  # some of them go to the one that is stopped
            found = deployment.run(feeds)
            assert {name: array.tobytes() for name, array in found.items()} == {
                name: array.tobytes() for name, array in expected.items()
            }
        until(lambda: deployment.statistics().lost == 1)
        until(lambda: deployment.statistics().up == 2)
        assert stopped not in processes(deployment)
        until(lambda: not alive(stopped))


def test_killing_replicas_loses_no_request_without_an_error(killed: Deployment) -> None:
    """Each call gives the bytes of one process, or an error that names a replica, within its timeout."""
    deployment, chance = killed, random.Random(1)
    replicas = deployment.statistics().up
    feeds = [random_feeds(deployment.model, seed=seed) for seed in range(4)]
    with dagexec.compile("zoo:lenet", num_workers=1) as executor:
        expected = [executor.run(one) for one in feeds]
    outcomes: Counter[str] = Counter()
    wrong: list[object] = []
    over = threading.Event()
    threads_before, files_before, store_before = (
        threading.active_count(),
        len(os.listdir("/proc/self/fd")),
        free_store(),
    )

    async def client(place: int) -> None:
        while not over.is_set():
            try:
                found = await deployment.run_async(feeds[place], timeout=SECONDS)
            except ReplicaError as error:
                outcomes["lost"] += 1
                if "replica " not in str(error):
                    wrong.append(error)
            else:
                outcomes["completed"] += 1
                if any(found[name].tobytes() != array.tobytes() for name, array in expected[place].items()):
                    wrong.append(found)

    async def clients() -> None:
        await asyncio.gather(*(client(place % 4) for place in range(12)))

    load = threading.Thread(target=lambda: asyncio.run(clients()))
    load.start()
    ever: set[int] = set()
    try:
        for _ in range(KILLS):
            completed = outcomes["completed"] + chance.randrange(1, 40)
            until(lambda: outcomes["completed"] >= completed)  # noqa: B023 - called here and now
            until(lambda: any(map(alive, processes(deployment))))
            up = [process for process in processes(deployment) if alive(process)]
            ever.update(up)
            os.kill(chance.choice(up), signal.SIGKILL)
    finally:
        over.set()
        load.join(SECONDS)
    assert not load.is_alive()
    assert wrong == []
    found = deployment.statistics()
    assert (found.running, found.queued, found.failed) == (0, 0, outcomes["lost"])
    assert found.completed == outcomes["completed"]
    assert found.lost > KILLS / 2
    print(f"{outcomes}, {found.lost} lost, {found.retried} sent again")
    until(lambda: deployment.statistics().up == replicas)
    ever.update(processes(deployment))
    deployment.close()
    until(lambda: not any(map(alive, ever)))
    until(lambda: free_store() >= store_before)
    until(lambda: threading.active_count() <= threads_before)
    until(lambda: len(os.listdir("/proc/self/fd")) <= files_before + 2)
