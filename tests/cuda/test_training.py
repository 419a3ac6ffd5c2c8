"""Training on CUDA: Caffe2's recorded parameters, the same bytes on every kind of net, and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dagexec import Workspace, zoo
from dagexec.core.device import Device
from dagexec.training.optimizer import SGD
from dagexec.training.trainer import StepReport, Trainer
from tests.cuda.emulated import cuda_devices
from tests.cuda.placing import on_cuda
from tests.training.small_task import make_task
from tests.training.test_caffe2_training import STEPS, TOLERANCE, Recording, distance

CUDA = Device("cuda", 0)
NETS = [("simple", 1), ("dag", 2), ("async_dag", 2)]


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    with cuda_devices():
        yield


def places(workspace: Workspace, blobs: list[str]) -> set[Device]:
    return {workspace.get_blob(blob).tensor().device for blob in blobs}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_sgd", "train_adam"])
def test_recorded_nets_give_caffe2s_parameters_and_the_same_bytes_on_every_net(name: str) -> None:
    recording = Recording.load(name)
    recording.init_net.CopyFrom(on_cuda(recording.init_net))
    found = []
    for schedule in NETS:
        workspace = recording.workspace()
        with workspace.create_net(on_cuda(recording.net), *schedule) as net:
            for _ in range(STEPS):
                net.run()
        assert distance(workspace, recording, name) < TOLERANCE
        assert places(workspace, list(recording.params)) == {CUDA}
        found.append({blob: workspace.fetch_blob(blob).tobytes() for blob in recording.params})
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
def test_lenet_makes_the_steps_of_the_host() -> None:
    helper = zoo.build_training("lenet", 4, classes=4)
    helper.add_gradient_operators(["loss"])
    SGD(learning_rate=0.01, momentum=0.9).add_updates(helper)
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((4, 1, 28, 28)).astype(np.float32) for _ in range(3)]
    found = []
    for place in (lambda net: net, on_cuda):
        workspace = Workspace()
        workspace.run_net_once(place(helper.init_net))
        workspace.feed_blob("label", np.arange(4, dtype=np.int32))
        workspace.feed_blob("data", batches[0])
        losses = []
        with workspace.create_net(place(helper.net), "dag", 2) as net:
            for batch in batches:
                workspace.feed_blob("data", batch)
                net.run()
                losses.append(float(workspace.fetch_blob("loss")))
        found.append((losses, {name: workspace.fetch_blob(name) for name in helper.checkpoint_blobs()}))
    assert places(workspace, helper.params) == {CUDA}
    (losses, wanted), (device_losses, parameters) = found
    np.testing.assert_allclose(device_losses, losses, rtol=1e-5)
    for name, array in wanted.items():
        np.testing.assert_allclose(parameters[name], array, rtol=1e-4, atol=1e-5 * np.abs(array).max(), err_msg=name)


def trained(devices: str, net_type: str = "dag", workers: int = 2) -> dict[str, bytes]:
    with Trainer(make_task(0), net_type=net_type, num_workers=workers, devices=[devices]) as trainer:
        trainer.train()
        return state_of(trainer)


def state_of(trainer: Trainer) -> dict[str, bytes]:
    return {name: trainer.steps.workspace.fetch_blob(name).tobytes() for name in trainer.steps.checkpoint_blobs()}


@pytest.mark.slow
def test_every_net_trains_to_the_same_bytes_and_to_what_the_host_does() -> None:
    host, found = trained("cpu"), [trained("cuda:0", *schedule) for schedule in NETS]
    assert found[0] == found[1] == found[2]
    for name in host:
        one, other = (np.frombuffer(part[name], np.float32) for part in (found[0], host))
        np.testing.assert_allclose(one, other, 2e-3, 2e-4, err_msg=name)


class StopError(Exception):
    """Ends a training."""


@pytest.mark.slow
@pytest.mark.parametrize("goes_on", ["cuda:0", "cpu"])
def test_checkpoints_are_saved_from_the_device_and_loaded_to_it(goes_on: str, tmp_path: Path) -> None:
    def stop(report: StepReport) -> None:
        if report.step == 4:
            raise StopError

    task = make_task(0)
    with (
        Trainer(task, devices=["cuda:0"], checkpoints=tmp_path, checkpoint_steps=3) as first,
        pytest.raises(StopError),
    ):
        first.train(on_step=stop)
    assert places(first.steps.workspace, first.steps.helper.params) == {CUDA}
    with Trainer(task, devices=[goes_on], checkpoints=tmp_path, resume=True) as second:
        assert second.step == 3
        second.train()
        resumed = state_of(second)
    with Trainer(task, devices=["cuda:0"]) as third:
        third.train()
        wanted = state_of(third)
    if goes_on == "cuda:0":
        assert resumed == wanted
    for name, expected in wanted.items():
        one, other = (np.frombuffer(part, np.float32) for part in (resumed[name], expected))
        np.testing.assert_allclose(one, other, 2e-3, 2e-4, err_msg=name)
