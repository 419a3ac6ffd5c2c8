"""Nets of several devices: every pair of accesses is ordered, all shapes are known, and ResNet-20 trains the same."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dagexec.core.dtypes import FLOAT64, INT32
from dagexec.core.stream import Kernel, Stream
from dagexec.devices.sim import simulated
from dagexec.scheduler.exploration import EarliestFirst, explore
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.hazards.check import check_net
from dagexec.scheduler.hazards.detector import Detector
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.observe.observers import Observer
from dagexec.scheduler.observe.trace import Trace
from dagexec.scheduler.plan.dynamic import dynamic_operators
from dagexec.training.data_parallel import parallelize
from dagexec.training.data_parallel.all_reduce_model import AllReduceModel
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD
from dagexec.zoo.architecture import Images
from dagexec.zoo.resnet_cifar import RESNET20
from tests.training.data_parallel.problems import (
    DoubleHelper,
    image_batch,
    normalized,
    parallel_images,
    same_bytes,
    trained,
)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [["cpu"] * 3, ["sim:0", "sim:1", "sim:2"], ["cpu", "sim:1"]], ids=str)
@pytest.mark.parametrize("reduction", ["allreduce", "tree", "ring"])
@pytest.mark.parametrize("iter_size", [1, 2])
def test_all_accesses_are_ordered_and_all_shapes_known_before_a_run(
    devices: list[str], reduction: str, iter_size: int
) -> None:
    kinds = {"net_type": "async_dag", "num_workers": 2}
    with parallel_images(
        normalized, devices, reduction=reduction, iter_size=iter_size, bucket_bytes=300, **kinds
    ) as model:
        model.step(image_batch(12))
        nets = model.nets()
        assert nets
        for net in nets:
            assert isinstance(net, BaseNet)
            proof = check_net(net)
            assert proof.holds, [str(found) for found in (*proof.unordered, *proof.overwritten)]
            assert not dynamic_operators(net.graph, frozenset())


@pytest.mark.slow
@pytest.mark.simulated
@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_the_devices_work_gives_the_same_bytes(seed: int) -> None:
    data = [image_batch(12, seed=number) for number in range(2)]
    names = ["sim:0", "sim:1", "sim:2"]
    _, expected = trained(parallel_images(normalized, ["cpu"] * 3), data)
    with simulated(names, seed=seed):
        model = parallel_images(normalized, names, bucket_bytes=300, num_workers=2, streams_per_worker=2)
        _, found = trained(model, data)
    assert same_bytes(found, expected) == []


def test_buckets_are_summed_while_the_backward_pass_goes_on() -> None:
    """The operators of the first bucket need nothing that the last layers' gradients do not."""
    with parallel_images(normalized, ["sim:0", "sim:1"], bucket_bytes=1) as model:
        assert isinstance(model, AllReduceModel)
        model.step(image_batch(8))
        graph = model.step_net.graph
        labels = [graph.label(index) for index in range(len(graph))]
        reduced = next(index for index, label in enumerate(labels) if label.startswith("UnpackBucket 'sim_0/pred"))
        needed, todo = set(), [reduced]
        while todo:
            for parent in graph.parents[todo.pop()]:
                if parent not in needed:
                    needed.add(parent)
                    todo.append(parent)
        late = [index for index, label in enumerate(labels) if label.startswith("ConvGradient")]
        assert late
        assert not needed.intersection(late)


def resnet20(helper: ModelHelper) -> list[str]:
    return [RESNET20.add_training_layers(helper, "data", "label", Images(1, 16, 10))]


def digits(double: bool, helper: ModelHelper) -> None:
    helper.add_input("data", (None, 1, 16, 16), *((FLOAT64,) if double else ()))
    helper.add_input("label", (None,), INT32)


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_resnet20_on_two_devices_has_the_loss_curve_of_one(double: bool) -> None:
    """In float32 an input of a ReLU that is 0 to rounding may open it for one and not for the other, later on."""
    dtype = np.float64 if double else np.float32
    random = np.random.default_rng(0)
    data = [
        {
            "data": random.standard_normal((8, 1, 16, 16)).astype(dtype),
            "label": random.integers(0, 10, 8).astype(np.int32),
        }
        for _ in range(3)
    ]
    make = partial(DoubleHelper if double else ModelHelper, "resnet20", seed=1, training=True)
    curves = []
    for devices in (["cpu"], ["sim:0", "sim:1"]):
        model = parallelize(
            partial(digits, double), resnet20, SGD(0.02, momentum=0.9), devices=devices, make_helper=make
        )
        curves.append(trained(model, data)[0])
    np.testing.assert_allclose(curves[1][0], curves[0][0], rtol=1e-13 if double else 1e-6)
    np.testing.assert_allclose(curves[1], curves[0], rtol=1e-11 if double else 5e-4)
    assert len(set(curves[0])) == 3


def test_sums_over_devices_have_streams_of_their_own() -> None:
    launched: dict[str, set[str]] = {}

    class Streams(Observer):
        def launched(self, stream: Stream, kernel: Kernel) -> None:
            assert kernel.operator is not None
            launched.setdefault(kernel.operator.definition.type, set()).add(stream.name)

    with parallel_images(normalized, ["sim:0", "sim:1"], num_workers=1) as model:
        assert isinstance(model, AllReduceModel)
        model.step(image_batch(8), trace=Streams())
        net = model.step_net
        assert isinstance(net, AsyncDAGNet)
        assert net.streams_of_a_device() is None
        assert check_net(net).holds
        assert net.synchronization(net.plan).events > 0
    assert launched["BucketSum"]
    assert not launched["BucketSum"] & launched["ConvGradient"]


@pytest.mark.slow
@pytest.mark.simulated
def test_on_the_devices_clock_sums_run_while_earlier_layers_are_at_their_gradients() -> None:
    names = [f"sim:{index}" for index in range(4)]

    def seconds_of(kernel: Kernel) -> float:
        return 5e-6 if "bucket" in kernel.label else 50e-6

    def scenario() -> tuple[float, float]:
        times: dict[str, list[float]] = {"first sums": [], "last gradients": []}

        class Times(Observer):
            def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
                if "gradient_bucket_0" in kernel.label:
                    times["first sums"].append(end)
                elif kernel.label.startswith("ConvGradient"):
                    times["last gradients"].append(start)

        clock = {"launch_seconds": 1e-6, "kernel_seconds": seconds_of, "copy_seconds": 1e-5}
        options = {"sync_batch_norm": False, "bucket_bytes": 1, "num_workers": 4, "streams_per_worker": 2}
        with (
            simulated(names, driver=ControlledDriver(), **clock),
            parallel_images(normalized, names, **options) as model,
        ):
            assert isinstance(model, AllReduceModel)
            model.step(image_batch(8), trace=Times())
        return max(times["first sums"]), max(times["last gradients"])

    schedule = explore(scenario, EarliestFirst())
    assert schedule.result is not None, type(schedule.failure)
    sums_end, gradients_start = schedule.result
    assert sums_end < gradients_start


def test_micro_batches_need_no_more_nets_than_there_are_kept_sums() -> None:
    with parallel_images(normalized, ["cpu"] * 2, iter_size=16, num_workers=1) as model:
        model.step(image_batch(32))
        assert len(model.nets()) == 2 + 4


@pytest.mark.simulated
def test_the_written_trace_shows_sums_beside_the_backward_pass(tmp_path: Path) -> None:
    """Kernels of a bucket overlap in time with gradient operators of the same device, on another stream."""
    names = ["sim:0", "sim:1"]
    path = tmp_path / "step.json"

    def scenario() -> None:
        clock = {"launch_seconds": 1e-6, "kernel_seconds": 50e-6, "copy_seconds": 40e-6}
        with (
            simulated(names, driver=ControlledDriver(), **clock),
            parallel_images(normalized, names, sync_batch_norm=False, bucket_bytes=1, num_workers=4) as model,
        ):
            assert isinstance(model, AllReduceModel)
            trace = Trace()
            model.step(image_batch(8), trace=trace)
            trace.write(path)

    explore(scenario, EarliestFirst()).raise_failure()
    kernels = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    sums = [event for event in kernels if any("gradient_bucket" in name for name in event["args"]["inputs"])]
    backward = [event for event in kernels if event["name"].endswith("Gradient")]
    beside = [
        one["name"]
        for one in sums
        for other in backward
        if one["pid"] == other["pid"]
        and one["tid"] != other["tid"]
        and one["ts"] < other["ts"] + other["dur"]
        and other["ts"] < one["ts"] + one["dur"]
    ]
    assert {"Copy", "BucketSum", "UnpackBucket"} <= set(beside)


@pytest.mark.parametrize("devices", [["cpu"] * 3, ["sim:0", "sim:1", "sim:2"]], ids=str)
def test_the_detector_finds_no_race_in_a_step(devices: list[str]) -> None:
    with parallel_images(normalized, devices, bucket_bytes=300, num_workers=3, streams_per_worker=2) as model:
        assert isinstance(model, AllReduceModel)
        for seed in range(2):
            detector = Detector()
            model.step(image_batch(6, seed=seed), trace=detector)
            detector.raise_found()
