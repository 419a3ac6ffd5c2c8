"""Captured runs on CUDA: a graph a shape, replayed at one call, with the bytes of ordinary runs."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec import Workspace
from dagexec.core.model import Model
from dagexec.errors import OperatorError
from dagexec.scheduler.nets.captured import CapturedNet
from tests.cuda.emulated import cuda_devices, emulated
from tests.cuda.test_nets import X, branches, feeds_of, inception, y_of


def test_a_replay_is_one_launch_of_a_graph() -> None:
    with emulated() as machine:
        workspace = Workspace()
        workspace.feed_blob("x", X)
        with CapturedNet(branches(), workspace, num_workers=2) as net:
            for number, scale in enumerate((1.0, 2.0, -1.0, 0.5)):
                x = (X * scale).astype(np.float32)
                workspace.feed_blob("x", x)
                machine.calls.clear()
                net.run()
                names = [call.name for call in machine.calls]
                assert names.count("streamBeginCapture") == (number == 1)
                assert names.count("graphLaunch") == (number > 0)
                if number > 1:
                    assert not any("aunchKernel" in name for name in names)
                np.testing.assert_allclose(workspace.fetch_blob("y"), y_of(x), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_captured_nets_have_the_bytes_of_ordinary_ones_and_no_race(optimize: bool, seed: int) -> None:
    with emulated(asynchronous=True, record=False, seed=seed) as machine:
        options: dict[str, Any] = {"device": "cuda:0", "optimize": optimize, "num_workers": 2}
        with (
            dagexec.compile(inception(), net_type="async_dag", **options) as plain,
            dagexec.compile(inception(), capture=True, **options) as captured,
        ):
            for number in range(5):
                feeds = feeds_of(plain.inputs, number)
                wanted, found = plain.run(feeds), captured.run(feeds)
                assert found["y"].tobytes() == wanted["y"].tobytes()
            net = captured.net()
            assert isinstance(net, CapturedNet)
            assert len(net._captures) == 1
        assert machine.races == []


def free_batch() -> Model:
    model = inception()
    info = model.inputs["x"]
    return Model(
        model.name, model.net, None, model.parameters, {"x": type(info)(info.dtype, (None, 3, 9, 9))}, model.outputs
    )


@pytest.mark.slow
def test_a_shape_has_a_graph_of_its_own_and_a_few_are_kept() -> None:
    generator = np.random.default_rng(0)
    with (
        cuda_devices(),
        dagexec.compile(free_batch(), net_type="simple", optimize=False) as host,
        dagexec.compile(free_batch(), device="cuda:0", capture=True) as captured,
    ):
        for batch in (1, 3, 3, 1, 3, 1, 1, 2, 2, 4, 4, 5, 5, 6, 6, 1, 1):
            x = generator.random((batch, 3, 9, 9), np.float32)
            np.testing.assert_allclose(captured.run({"x": x})["y"], host.run({"x": x})["y"], atol=1e-5)
        net = captured.net()
        assert isinstance(net, CapturedNet)
        assert 1 <= len(net._captures) <= 4


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_replicas_have_graphs_of_their_own() -> None:
    with (
        emulated(asynchronous=True, record=False) as machine,
        dagexec.compile(inception(), net_type="simple", optimize=False) as host,
        dagexec.compile(inception(), device="cuda:0", capture=True, replicas=3, num_workers=2) as captured,
    ):
        feeds = [feeds_of(host.inputs, seed) for seed in range(15)]
        results = await asyncio.gather(*(captured.run_async(feed, timeout=60) for feed in feeds))
        for feed, outputs in zip(feeds, results, strict=True):
            np.testing.assert_allclose(outputs["y"], host.run(feed)["y"], atol=1e-5)
        assert machine.races == []


def test_a_capture_that_cuda_refuses_names_the_operator_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated():
        workspace = Workspace()
        workspace.feed_blob("x", X)
        with CapturedNet(branches(), workspace, num_workers=2) as net:
            net.run()
            step = net.prepared().steps[-1]

            def waits_for_the_device() -> None:
                raise RuntimeError("operation not permitted when stream is capturing")

            net.prepared().steps[-1] = waits_for_the_device
            with pytest.raises(OperatorError, match=r"net 'branches' cannot be captured: .*Sum.*compile it without"):
                net.run()
            net.prepared().steps[-1] = step
            net.run()
            np.testing.assert_allclose(workspace.fetch_blob("y"), y_of(X), rtol=1e-5)
