"""The server in front of a deployment: an unmodified client of Triton asks for what replicas compute."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

import dagexec
from dagexec.cluster import Deployment, deploy
from dagexec.server.config import ModelConfig, ServerConfig
from dagexec.server.inference import InferenceRequest, RequestError
from dagexec.server.repository import Repository
from dagexec.testing import random_feeds
from tests.cluster.test_ray_failures import alive, executors, long_pipeline, processes, until
from tests.server.serving import serving

pytestmark = pytest.mark.ray


def test_a_server_in_front_of_replicas_gives_the_bytes_of_one_process_while_one_is_killed(cluster: None) -> None:
    with dagexec.compile("zoo:lenet", num_workers=1) as executor:
        feeds = [random_feeds(executor.model, seed=seed) for seed in range(8)]
        expected = [executor.run(one) for one in feeds]
        [(name, info)] = executor.inputs.items()
    deployment = deploy("zoo:lenet", replicas=2)

    def ask(place: int) -> bytes:
        array = feeds[place % 8][name]
        asked = triton.InferInput(name, list(array.shape), "FP32")
        asked.set_data_from_numpy(array)
        with triton.InferenceServerClient(url) as client:
            answer = client.infer("digits", [asked])
            found: bytes = answer.as_numpy(executor.outputs[0]).tobytes()
        return found

    with serving(ServerConfig()) as server:
        url = server.url.removeprefix("http://")
        server.repository.add("digits", deployment)
        with triton.InferenceServerClient(url) as client:
            assert client.is_model_ready("digits")
            [described] = client.get_model_metadata("digits")["inputs"]
            assert (described["name"], described["shape"][1:]) == (name, list(info.shape or ())[1:])
            wrong = triton.InferInput(name, [1], "FP32")
            wrong.set_data_from_numpy(np.zeros(1, np.float32))
            with pytest.raises(InferenceServerException, match="must have shape"):
                client.infer("digits", [wrong])
        with ThreadPoolExecutor(4) as clients:
            answers = [clients.submit(ask, place) for place in range(64)]
            answers[0].result()
            os.kill(processes(deployment)[0], signal.SIGKILL)
            found = [answer.result() for answer in answers]
        assert found == [expected[place % 8][executor.outputs[0]].tobytes() for place in range(64)]
        assert deployment.statistics().lost == 1
    with pytest.raises(dagexec.errors.ClosedError):  # with the server
        deployment.run(feeds[0])


def test_a_model_of_the_configuration_is_deployed_and_loaded_again_beside_the_old_one(cluster: None) -> None:
    settings = {"cluster": {"replicas": 1, "autoscaling": {"min_replicas": 1, "max_replicas": 2}}}
    config = ModelConfig(name="digits", source="zoo:lenet").changed(settings)
    with dagexec.compile("zoo:lenet", num_workers=1) as executor:
        feeds = random_feeds(executor.model, seed=0)
        expected = executor.run(feeds)

    async def ask(repository: Repository) -> None:
        answer = await repository.infer(InferenceRequest(model="digits", inputs=feeds))
        assert {name: array.tobytes() for name, array in answer.outputs.items()} == {
            name: array.tobytes() for name, array in expected.items()
        }

    async def program() -> list[int]:
        repository = Repository(ServerConfig(models={"digits": config}))
        assert await repository.load_all() == {}
        [first] = repository.loaded()
        assert isinstance(first.runner, Deployment)
        try:
            await ask(repository)
            old = processes(first.runner)
            await repository.load("digits")
            await ask(repository)
            [second] = repository.loaded()
            assert isinstance(second.runner, Deployment)
            return old + processes(second.runner)
        finally:
            await repository.drain()

    ever = asyncio.run(program())
    assert len(set(ever)) == 2
    until(lambda: not any(map(alive, ever)))


def test_a_request_to_the_repository_that_is_cancelled_or_late_ends_the_run_of_the_replica(cluster: None) -> None:
    """Alone, a run takes a minute."""

    async def ask(repository: Repository, **parameters: int) -> None:
        x = {"x": np.zeros(2, np.float32)}
        await repository.infer(InferenceRequest(model="long", inputs=x, parameters=parameters))

    async def program() -> None:
        repository = Repository(ServerConfig())
        deployment = await asyncio.to_thread(deploy, long_pipeline(300, 0.2))
        repository.add("long", deployment)
        try:
            task = asyncio.create_task(ask(repository))
            await asyncio.to_thread(until, lambda: executors(deployment)[0].running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(until, lambda: executors(deployment)[0].running == 0)
            with pytest.raises(RequestError) as refused:
                await ask(repository, timeout=300_000)
            assert refused.value.status == 504
            await asyncio.to_thread(until, lambda: executors(deployment)[0].running == 0)
            assert executors(deployment)[0].completed == 0
        finally:
            await repository.drain(0)

    asyncio.run(program())
