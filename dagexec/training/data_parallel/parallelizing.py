"""`parallelize`: from builders of a model and an optimizer to a model that is trained on several devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from dagexec.core.device import Device
from dagexec.core.workspace import Workspace
from dagexec.errors import ArgumentError
from dagexec.scheduler.nets.options import RunOptions
from dagexec.training.data_parallel.all_reduce_model import AllReduceModel
from dagexec.training.data_parallel.bucketing import DEFAULT_BUCKET_BYTES
from dagexec.training.data_parallel.parallel_model import ParallelModel
from dagexec.training.data_parallel.replica import ForwardBuilder, InputBuilder, build_replica, check_same
from dagexec.training.data_parallel.replica_devices import find_replica_devices
from dagexec.training.data_parallel.threaded_model import ThreadedModel
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import Optimizer

REDUCTIONS = ("allreduce", "tree", "ring")

DEFAULT_TIMEOUT = 600.0
"""Seconds that a replica waits for another: a whole forward and backward pass of the slowest."""


def parallelize(
    build_inputs: InputBuilder,
    build_forward: ForwardBuilder,
    optimizer: Optimizer,
    *,
    devices: Sequence[str | Device],
    reduction: str = "allreduce",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    iter_size: int = 1,
    sync_batch_norm: bool = True,
    name: str = "data_parallel",
    seed: int = 0,
    make_helper: Callable[[], ModelHelper] | None = None,
    workspace: Workspace | None = None,
    net_type: str | None = None,
    num_workers: int | None = None,
    streams_per_worker: int = 1,
    timeout: float | None = None,
) -> ParallelModel:
    """The model, built once for each of `devices`, with equal parameters, ready for its first step.

    `build_inputs(helper)` declares the inputs, `build_forward(helper)` adds the layers and returns the names of the
    losses. Blobs of the n-th device get its scope, `cpu_0/`, `sim_1/`. A step goes through `iter_size` micro-batches on
    each device and applies the mean of all gradients once.

    `reduction` says how the gradients meet:

    - allreduce: all devices in one net. Gradients are put into buckets of `bucket_bytes`, the last layers' first, and
      each bucket is summed over the devices by operators beside the backward pass.
    - tree: a thread and nets for each device; gradients go up a tree of pairs, the root updates, parameters go down.
    - ring: the same threads; gradients go around a ring, and each device updates.

    All sums are made in an order that is fixed. With `sync_batch_norm`, batch normalization is over the batches of all
    devices; otherwise each has its own statistics of a batch, and the running ones are the first device's.

    `make_helper` makes the model helper, by default one of `name` and `seed` for training. The blobs that `workspace`
    has now, such as a queue of records, are one for all devices, under their own names. `net_type` and `num_workers`
    are those of the nets, `streams_per_worker` that of a net for all devices. After `timeout` seconds the run of a net
    for all devices is stopped (by default it is not), and a thread gives up its wait for another (by default after
    600).

    Raises DeviceError for an empty list of devices, one named twice, and one that is missing here; SchemaError when the
    builders do not make the same model for all, and for an unknown net type; ArgumentError for a bad reduction or
    number, SettingError for one of workers or streams.
    """
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction must be one of {', '.join(REDUCTIONS)}, found {reduction!r}")
    if iter_size < 1:
        raise ArgumentError(f"iter_size must be at least 1, found {iter_size}")
    if timeout is not None and not timeout > 0:
        raise ArgumentError(f"timeout must be positive, found {timeout}")
    options = RunOptions(net_type=net_type, num_workers=num_workers, streams_per_worker=streams_per_worker)
    places = find_replica_devices(devices)
    make = make_helper or partial(ModelHelper, name, seed=seed, training=True)
    batches = len(places) if sync_batch_norm else 1
    replicas = [build_replica(place, make(), build_inputs, build_forward, optimizer, batches) for place in places]
    check_same(replicas)
    if reduction == "allreduce":
        return AllReduceModel(
            replicas,
            iter_size,
            workspace,
            bucket_bytes=bucket_bytes,
            options=options,
            timeout=timeout,
        )
    return ThreadedModel(
        replicas,
        iter_size,
        workspace,
        reduction=reduction,
        options=options,
        timeout=DEFAULT_TIMEOUT if timeout is None else timeout,
    )
