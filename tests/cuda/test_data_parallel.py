"""Training over several CUDA devices: sums by NCCL, or by peer copies where it is missing."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.device import Device
from dagexec.devices.cuda import nccl
from dagexec.errors import DeviceError, SchemaError
from dagexec.scheduler.hazards import check_net
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.training.data_parallel import parallelize
from dagexec.training.data_parallel.all_reduce_model import AllReduceModel
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD
from tests.cuda.emulated import emulated
from tests.cuda.placing import nets_on_cuda
from tests.ops.running import operator_def
from tests.training.data_parallel import test_failures as failures
from tests.training.data_parallel.problems import (
    dyadic,
    image_batch,
    images,
    largest_difference,
    lenet,
    number_batch,
    numbers,
    parallel_images,
    same_bytes,
    trained,
)

TWO = ["cuda:0", "cuda:1"]
BATCHES = [image_batch(8, seed=seed) for seed in range(3)]


def types_of(model: Any) -> list[str]:
    assert isinstance(model, AllReduceModel)
    return [definition.type for definition in model.step_net.graph.operators]


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_two_devices_train_as_the_host_does_and_keep_equal_parameters(asynchronous: bool) -> None:
    host_losses, host = trained(parallel_images(lenet, ["cpu", "cpu"]), BATCHES)
    with emulated(asynchronous=asynchronous, record=False) as machine:
        model = parallel_images(lenet, TWO, bucket_bytes=700, num_workers=2, streams_per_worker=2)
        assert "NCCLAllreduce" in types_of(model)
        losses, found = trained(model, BATCHES)
        assert largest_difference(found, host) < 1e-5
        np.testing.assert_allclose(losses, host_losses, rtol=1e-5)
        again_losses, again = trained(parallel_images(lenet, TWO, bucket_bytes=700, num_workers=2), BATCHES)
        assert same_bytes(again, found) == []
        assert again_losses == losses
        assert machine.races == []


def test_all_accesses_of_a_step_are_ordered() -> None:
    with emulated(record=False), parallel_images(lenet, TWO, net_type="async_dag", num_workers=2) as model:
        model.step(BATCHES[0])
        for net in model.nets():
            assert isinstance(net, BaseNet)
            proof = check_net(net)
            assert proof.holds, [str(found) for found in proof.unordered]


@pytest.mark.slow
def test_without_nccl_sums_go_by_copies_between_the_devices_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nccl._say_missing.cache_clear()
    with emulated(record=False):
        _losses, wanted = trained(parallel_images(lenet, TWO), BATCHES)
        monkeypatch.setattr(nccl, "nccl", lambda: None)
        with caplog.at_level(logging.WARNING, "dagexec"):
            models = [parallel_images(lenet, TWO) for _ in range(2)]
        assert caplog.text.count("NCCL is not installed") == 1
        assert "pip install nvidia-nccl-cu12" in caplog.text
        assert "NCCLAllreduce" not in types_of(models[0])
        models[1].close()
        _losses, found = trained(models[0], BATCHES)
        assert largest_difference(found, wanted) < 1e-5


def test_one_device_has_nothing_to_sum() -> None:
    with emulated(record=False):
        model = parallel_images(lenet, ["cuda:0"])
        assert not {"NCCLAllreduce", "Copy"} & set(types_of(model))
        _losses, found = trained(model, BATCHES)
    _losses, host = trained(parallel_images(lenet, ["cpu"]), BATCHES)
    assert largest_difference(found, host) < 1e-5


@pytest.mark.exact
@pytest.mark.parametrize("reduction", ["allreduce", "tree", "ring"])
def test_where_all_sums_are_exact_every_reduction_has_the_bytes_of_one_device(reduction: str) -> None:
    data = [number_batch(16)] * 3
    options: dict[str, Any] = {"inputs": numbers, "optimizer": SGD(0.125)}
    _losses, one = trained(parallel_images(dyadic, ["cpu"], **options), data)
    with emulated(record=False):
        _losses, found = trained(parallel_images(dyadic, TWO, reduction=reduction, **options), data)
    assert same_bytes(found, one) == []


def test_models_that_differ_and_devices_that_are_missing_are_refused() -> None:
    def other(helper: ModelHelper, built: list[int] = []) -> list[str]:  # noqa: B006 - counts the calls
        built.append(1)
        x = helper.fc("data", "fc", 64, 10 + len(built))
        _, loss = helper.softmax_with_loss(x, "label")
        return [loss]

    with emulated(devices=2, record=False):
        with pytest.raises(SchemaError, match="different models on cuda_0 and cuda_1"):
            parallelize(images, other, SGD(0.1), devices=TWO)
        with pytest.raises(DeviceError, match="entry 1 of the devices, cuda:5, is missing here"):
            parallelize(images, lenet, SGD(0.1), devices=["cuda:0", "cuda:5"])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, np.int32])
def test_an_operator_sums_tensors_where_they_are(dtype: type) -> None:
    values = [np.arange(5).astype(dtype), np.full(5, 3, dtype)]
    net = NetDef(name="sum")
    for number in range(2):
        made = operator_def("CopyFromCPUInput", [f"x{number}"], [f"y{number}"])
        made.device_option.CopyFrom(Device("cuda", number).to_option())
        net.op.append(made)
    summed = operator_def("NCCLAllreduce", ["y0", "y1"], ["y0", "y1"])
    summed.device_option.CopyFrom(Device("cuda", 0).to_option())
    net.op.append(summed)
    net.external_input.extend(["x0", "x1"])
    with emulated(asynchronous=True) as machine:
        workspace = Workspace()
        for number, value in enumerate(values):
            workspace.feed_blob(f"x{number}", value)
        with AsyncDAGNet(net, workspace, num_workers=2) as running:
            for _ in range(3):
                running.run(timeout=60)
                for number in range(2):
                    np.testing.assert_array_equal(workspace.fetch_blob(f"y{number}"), values[0] + values[1])
            devices = [workspace.get_blob(f"y{number}").value.device for number in range(2)]
        names = [call.name for call in machine.calls]
        assert sum("llReduce" in name for name in names) == 6
        assert machine.races == []
    assert devices == [Device("cuda", 0), Device("cuda", 1)]


def test_the_same_operator_sums_on_the_host() -> None:
    workspace = Workspace()
    workspace.feed_blob("a", np.array([1.0, 2.0], np.float32))
    workspace.feed_blob("b", np.array([3.0, 5.0], np.float32))
    workspace.run_operator_once(operator_def("NCCLAllreduce", ["a", "b"], ["a", "c"]))
    assert workspace.fetch_blob("a").tolist() == workspace.fetch_blob("c").tolist() == [4.0, 7.0]


@pytest.mark.parametrize("reduction", ["tree", "ring"])
def test_a_replica_that_waits_for_a_record_is_woken_when_another_fails(reduction: str) -> None:
    with nets_on_cuda():
        failures.test_a_replica_that_waits_for_a_record_is_woken_when_another_fails(reduction)
