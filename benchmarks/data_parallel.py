"""How much of the all-reduce of data parallel training is hidden behind the backward pass, on four simulated devices.

    python benchmarks/data_parallel.py [--json benchmarks/results/data_parallel.json]

Times are virtual, so the figures are the same on every machine. A kernel takes what its floating-point operations take
at 5 TFLOP/s, or its bytes at 1 TB/s, and 4 us at least; a copy between devices 10 us and its bytes at 25 GB/s; a launch
5 us of a host thread.

The all-reduce of a bucket lasts from when the last device begins to pack its gradients to when the last device has
unpacked the sums. What of that is before the end of the last gradient operator on any device
is hidden behind the backward pass. The share is over all buckets. Beside it stands what the all-reduces add to the
step, whose makespan is compared with that of the same net without them.

The parameters after the steps are compared with those of one device that accumulates four micro-batches.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from environment import write_report

from dagexec.core.dtypes import INT32
from dagexec.core.node import Node
from dagexec.core.operator import Operator
from dagexec.core.program import Program
from dagexec.core.proto import NetDef
from dagexec.core.stream import Kernel, Stream
from dagexec.devices.sim import simulated
from dagexec.scheduler.exploration import EarliestFirst, explore
from dagexec.scheduler.exploration.device import ControlledDriver
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.options import RunOptions
from dagexec.scheduler.observe.observers import Observer
from dagexec.training.data_parallel import ParallelModel, parallelize
from dagexec.training.data_parallel.all_reduce_model import AllReduceModel
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import SGD
from dagexec.zoo.architecture import Architecture, Images
from dagexec.zoo.lenet import LENET
from dagexec.zoo.resnet_cifar import RESNET20

Array = npt.NDArray[Any]

DEVICES = [f"sim:{index}" for index in range(4)]
LAUNCH = 5e-6
MIN_KERNEL_SECONDS = 4e-6
MIN_HOST_SECONDS, FASTER = 2e-6, 100.0  # what Cost.seconds adds to every operator, and 5 TFLOP/s over its 50 GFLOP/s
COPY, COPY_PER_BYTE = 10e-6, 1 / 25e9


@dataclass(frozen=True)
class Workload:
    """A network, its images, and how many of them a device has in a step."""

    architecture: Architecture
    images: Images
    batch: int
    bucket_bytes: int


WORKLOADS = (
    Workload(LENET, Images(1, 28, 10), 256, 1 << 18),
    Workload(RESNET20, Images(3, 32, 10), 64, 1 << 17),
)


@dataclass(frozen=True)
class Row:
    """One network with so many workers and streams a worker. Times in microseconds."""

    model: str
    batch: int
    workers: int
    streams_per_worker: int
    buckets: int
    operators: int
    step: float
    without_all_reduce: float
    all_reduce: float
    all_reduce_hidden: float

    @property
    def hidden(self) -> float:
        """The share of the time of all-reduces that is hidden behind the backward pass."""
        return self.all_reduce_hidden / self.all_reduce

    @property
    def added(self) -> float:
        """What the all-reduces add to the step."""
        return self.step - self.without_all_reduce


class Times(Observer):
    """When kernels ran: the first and the last, the last of the backward pass, and those of each bucket."""

    def __init__(self) -> None:
        self.all: list[tuple[float, float]] = []
        self.backward_end = 0.0
        self.buckets: dict[str, tuple[float, float]] = {}

    def executed(self, stream: Stream, kernel: Kernel, start: float, end: float) -> None:
        self.all.append((start, end))
        definition = kernel.operator.definition if isinstance(kernel.operator, Operator) else Node("")
        bucket = bucket_of(definition)
        if bucket is not None:
            packed, last = self.buckets.get(bucket, (0.0, 0.0))
            packs = definition.type == "PackBucket"
            self.buckets[bucket] = (max(packed, start) if packs else packed, max(last, end))
        elif definition.is_gradient_op:
            self.backward_end = max(self.backward_end, end)

    @property
    def makespan(self) -> float:
        """From the start of the first kernel to the end of the last, in microseconds."""
        return (max(end for _, end in self.all) - min(start for start, _ in self.all)) * 1e6

    def all_reduces(self) -> tuple[float, float]:
        """The time that the all-reduces of all buckets take, and the part of it that is hidden, in microseconds."""
        total = hidden = 0.0
        for start, end in self.buckets.values():
            total += end - start
            hidden += max(0.0, min(end, self.backward_end) - start)
        return total * 1e6, hidden * 1e6


def bucket_of(definition: Node) -> str | None:
    """The bucket that an operator packs, sums, copies or unpacks."""
    for name in (*definition.input, *definition.output):
        found = re.search(r"gradient_bucket_\d+", name)
        if found is not None:
            return found[0]
    return None


def kernel_seconds(kernel: Kernel) -> float:
    """What a kernel takes on the device."""
    return max(MIN_KERNEL_SECONDS, ((kernel.seconds or 0.0) - MIN_HOST_SECONDS) / FASTER)


def inputs(workload: Workload, helper: ModelHelper) -> None:
    """Images and labels."""
    images = workload.images
    helper.add_input("data", (None, images.channels, images.size, images.size))
    helper.add_input("label", (None,), INT32)


def forward(workload: Workload, helper: ModelHelper) -> list[str]:
    """The network and its loss."""
    return [workload.architecture.add_training_layers(helper, "data", "label", workload.images)]


def batch_of(workload: Workload) -> dict[str, Array]:
    """Random images for all devices."""
    random = np.random.default_rng(0)
    images, count = workload.images, workload.batch * len(DEVICES)
    return {
        "data": random.standard_normal((count, images.channels, images.size, images.size)).astype(np.float32),
        "label": random.integers(0, images.classes, count).astype(np.int32),
    }


def model_of(workload: Workload, devices: list[str], **options: Any) -> ParallelModel:
    """The network on these devices; batch normalization is each device's own, as its sums are not gradients."""
    return parallelize(
        partial(inputs, workload),
        partial(forward, workload),
        SGD(0.05, momentum=0.9),
        devices=devices,
        name=workload.architecture.name,
        sync_batch_norm=False,
        **options,
    )


def measure(workload: Workload, workers: int, streams: int) -> tuple[Row, dict[str, Array]]:
    """The three nets, and the parameters after the steps that were run."""

    def scenario() -> tuple[Row, dict[str, Array]]:
        with (
            simulated(
                DEVICES,
                driver=ControlledDriver(),
                launch_seconds=LAUNCH,
                kernel_seconds=kernel_seconds,
                copy_seconds=COPY,
                copy_seconds_per_byte=COPY_PER_BYTE,
            ),
            model_of(
                workload,
                DEVICES,
                bucket_bytes=workload.bucket_bytes,
                num_workers=workers,
                streams_per_worker=streams,
            ) as model,
        ):
            assert isinstance(model, AllReduceModel)
            model.step(batch_of(workload))
            times, plain = Times(), Times()
            model.step(batch_of(workload), trace=times)
            parameters = model.parameters()
            operators = model.step_net.graph.operators
            rest = Program(tuple(one for one in operators if bucket_of(one) is None), NetDef(name="rest"))
            with AsyncDAGNet(
                rest, model.workspace, num_workers=workers, options=RunOptions(streams_per_worker=streams)
            ) as net:
                net.run()
                net.run(trace=plain)
            row = Row(
                workload.architecture.name,
                workload.batch,
                workers,
                streams,
                len(model.buckets),
                len(operators),
                times.makespan,
                plain.makespan,
                *times.all_reduces(),
            )
            return row, parameters

    schedule = explore(scenario, EarliestFirst())
    schedule.raise_failure()
    assert schedule.result is not None
    return schedule.result


def expected_parameters(workload: Workload) -> dict[str, Array]:
    """Those of one device that goes through four micro-batches a step."""
    with model_of(workload, ["cpu"], iter_size=len(DEVICES)) as model:
        for _ in range(2):
            model.step(batch_of(workload))
        helper = model.replicas[0].helper
        return {name: array for name, array in model.parameters().items() if name not in helper.computed_parameters}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    rows = []
    for workload in WORKLOADS:
        expected = expected_parameters(workload)
        for workers in arguments.workers:
            for streams in arguments.streams:
                row, found = measure(workload, workers, streams)
                different = [name for name, array in expected.items() if found[name].tobytes() != array.tobytes()]
                assert not different, f"{row.model}: {different} are not what one device computes"
                rows.append(row)
                print(
                    f"{row.model:9} {row.workers} workers x {row.streams_per_worker} streams, {row.buckets} buckets: "
                    f"{row.hidden:.1%} of {row.all_reduce:.0f} us of all-reduces hidden; "
                    f"step {row.step:.0f} us, {row.added:.0f} of them added by all-reduces",
                    flush=True,
                )
    if arguments.json:
        found_rows = [asdict(row) | {"hidden": row.hidden, "added": row.added} for row in rows]
        settings = {
            "devices": len(DEVICES),
            "launch_us": LAUNCH * 1e6,
            "kernel_least_us": MIN_KERNEL_SECONDS * 1e6,
            "flops": 50e9 * FASTER,
            "bytes_per_second": 10e9 * FASTER,
            "copy_us": COPY * 1e6,
            "copy_bytes_per_second": 1 / COPY_PER_BYTE,
        }
        write_report(arguments.json, settings=settings, rows=found_rows)


if __name__ == "__main__":
    main()
