"""Data parallelism in one net: `Parallelize` builds a model once for each device, and sums the gradients over them.

Blobs of the device with number `i` are in the name scope `gpu_<i>`, or `cpu_<i>`. All steps are synchronous: each
device updates its own parameters by the same gradients, and so they stay equal.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from dagexec.building.net_builder import ITERATION
from dagexec.caffe2 import workspace
from dagexec.caffe2.creation import make_device_option
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.net import Net
from dagexec.caffe2.proto import caffe2_pb2
from dagexec.caffe2.references import BlobReference, GradientSlice
from dagexec.caffe2.scope import DeviceScope, NameScope
from dagexec.core.proto import DeviceOption
from dagexec.errors import Caffe2Error

__all__ = [
    "CreateNet", "FinalizeAfterCheckpoint", "GetCheckpointParams", "GetLearningRateBlobNames", "OptimizeGradientMemory",
    "Parallelize", "Parallelize_CPU", "Parallelize_GPU", "RunInitNet", "RunNet",
]  # fmt: skip

logger = logging.getLogger("dagexec")

Builder = Callable[[ModelHelper], Any]


def Parallelize(
    model_helper_obj: ModelHelper,
    input_builder_fun: Builder,
    forward_pass_builder_fun: Callable[[ModelHelper, float], Sequence[Any] | None],
    param_update_builder_fun: Builder | None = None,
    optimizer_builder_fun: Builder | None = None,
    post_sync_builder_fun: Builder | None = None,
    pre_grad_net_transformer_fun: Builder | None = None,
    net_transformer_fun: Callable[..., Any] | None = None,
    devices: Iterable[int] | None = None,
    rendezvous: Any = None,
    net_type: str = "dag",
    broadcast_computed_params: bool = True,
    optimize_gradient_memory: bool = False,
    dynamic_memory_management: bool = False,
    blobs_to_keep: Any = None,
    use_nccl: bool = False,
    max_concurrent_distributed_ops: int = 16,
    cpu_device: bool = False,
    num_threads_per_device: int = 4,
    shared_model: bool = False,
    combine_spatial_bn: bool = False,
    **kwargs: Any,
) -> None:
    """Build a model for each of `devices`, by default all GPUs, and what keeps their parameters equal.

    In the scopes of each device, `input_builder_fun(model)` adds what reads inputs, and
    `forward_pass_builder_fun(model, loss_scale)` the layers; it returns the losses, which it has multiplied by
    `loss_scale`, 1 / number of devices. Updates are added by `param_update_builder_fun(model)` in the scopes of each
    device, or by `optimizer_builder_fun(model)` once; without either the model is for tests and has no gradients.

    dagexec places operators in memory and chooses threads itself, so `optimize_gradient_memory`,
    `dynamic_memory_management`, `blobs_to_keep`, `use_nccl` and the numbers of threads change nothing. Raises
    Caffe2Error for a model that is parallel already, models that differ between devices, and for a rendezvous of
    several machines, `shared_model` and `combine_spatial_bn`, which are not there.
    """
    model = model_helper_obj
    numbers = list(range(workspace.NumCudaDevices()) if devices is None else devices)
    _check(model, numbers, rendezvous=rendezvous, shared_model=shared_model, combine_spatial_bn=combine_spatial_bn)
    if param_update_builder_fun is not None and optimizer_builder_fun is not None:
        raise Caffe2Error("Parallelize: updates come from param_update_builder_fun or optimizer_builder_fun, not both")
    if optimize_gradient_memory or dynamic_memory_management:
        logger.warning("Parallelize: memory of gradients is planned by dagexec, whether asked for or not")
    model._devices, model._device_prefix = numbers, "cpu" if cpu_device else "gpu"
    model.net.Proto().type = net_type
    replicas = Replicas(model)
    losses: list[Any] = []
    for number in numbers:
        with replicas.scopes(number):
            input_builder_fun(model)
            losses.extend(forward_pass_builder_fun(model, 1.0 / len(numbers)) or [])
    replicas.check()
    if pre_grad_net_transformer_fun is not None:
        pre_grad_net_transformer_fun(model)
    if param_update_builder_fun is not None or optimizer_builder_fun is not None:
        model.AddGradientOperators(losses)
        replicas.add_all_reduce()
    if broadcast_computed_params:
        replicas.add_copies(model.net, replicas.names(model.GetComputedParams("")))
    if param_update_builder_fun is not None:
        for number in numbers:
            with replicas.scopes(number):
                param_update_builder_fun(model)
    if optimizer_builder_fun is not None:
        model._optimizer = optimizer_builder_fun(model)
    replicas.add_copies(model.param_init_net, replicas.names(model.GetAllParams("")))
    if post_sync_builder_fun is not None:
        for number in numbers:
            with replicas.scopes(number):
                post_sync_builder_fun(model)
    if net_transformer_fun is not None:
        net_transformer_fun(model, len(numbers), model._device_prefix, _device_type(model))
    model._data_parallel_model_init_nets = [model.param_init_net]
    model._data_parallel_model_nets = [model.net]


Parallelize_GPU = partial(Parallelize, cpu_device=False)
Parallelize_CPU = partial(Parallelize, cpu_device=True)


class Replicas:
    """A model on several devices: their scopes, their common names, and operators that make them equal."""

    def __init__(self, model: ModelHelper) -> None:
        """Of a model whose devices are chosen."""
        self._model = model
        self._numbers: list[int] = model._devices
        self._prefix: str = model._device_prefix

    def option(self, number: int) -> DeviceOption:
        """The device with that number."""
        kind = _device_type(self._model)
        return make_device_option(kind, number if kind == caffe2_pb2.CUDA else 0)

    def scopes(self, number: int) -> Any:
        """The scopes of names and of the device."""
        made = ExitStack()
        made.enter_context(DeviceScope(self.option(number)))
        made.enter_context(NameScope(f"{self._prefix}_{number}"))
        return made

    def blob(self, name: str, number: int) -> BlobReference:
        """The blob called so on a device."""
        return BlobReference(f"{self._prefix}_{number}/{name}", self._model.net)

    def names(self, blobs: Iterable[Any]) -> list[str]:
        """What blobs are called behind the scope of the first device, of those that are there."""
        first = f"{self._prefix}_{self._numbers[0]}/"
        return [str(blob).removeprefix(first) for blob in blobs if str(blob).startswith(first)]

    def check(self) -> None:
        """Raise Caffe2Error where devices have different parameters."""
        params = {str(param) for param in self._model.GetAllParams("")}
        names = self.names(sorted(params))
        expected = {str(self.blob(name, number)) for name in names for number in self._numbers}
        if params != expected:
            raise Caffe2Error(
                f"model {self._model.name!r}: parameters {sorted(params ^ expected)} are not the same on all devices; "
                "builders make them in the name scope that is open"
            )

    def add_all_reduce(self) -> None:
        """Sum the gradient of each parameter over the devices, those of the last layers first."""
        for name in reversed(self.names(self._model.params)):
            gradients = [
                self._model.param_to_grad[blob]
                for blob in (self.blob(name, number) for number in self._numbers)
                if blob in self._model.param_to_grad
            ]
            if len(gradients) == 1 or not gradients:
                continue
            if isinstance(gradients[0], GradientSlice):
                indices = self._joined([gradient.indices for gradient in gradients])
                values = self._joined([gradient.values for gradient in gradients])
                for number, *slices in zip(self._numbers, indices, values, strict=True):
                    info = self._model.get_parameter_info(self.blob(name, number))
                    info.grad = self._model.param_to_grad[info.blob] = GradientSlice(*slices)
                continue
            net, first = self._model.net, gradients[0]
            with DeviceScope(self.option(self._numbers[0])):
                net.Sum(gradients, first)
            self._copy(net, gradients)

    def _joined(self, parts: Sequence[Any]) -> list[BlobReference]:
        """Blobs that have, on each device, the rows of all, in the order of the devices."""
        joined = [part + "_all" for part in parts]
        with DeviceScope(self.option(self._numbers[0])):
            self._model.net.Concat(parts, [joined[0], joined[0] + "_concat_dims"], axis=0)
        self._copy(self._model.net, joined)
        return joined

    def _copy(self, net: Net, blobs: Sequence[Any]) -> None:
        """Copy the first device's blob to those of the others."""
        for blob, number in zip(blobs[1:], self._numbers[1:], strict=True):
            with DeviceScope(self.option(number)):
                net.Copy(blobs[0], blob)

    def add_copies(self, net: Net, names: Iterable[str]) -> None:
        """Have `net` give all devices what the first one has in the blobs of these names."""
        for name in names:
            self._copy(net, [self.blob(name, number) for number in self._numbers])


def _device_type(model: ModelHelper) -> int:
    return caffe2_pb2.CUDA if model._device_prefix == "gpu" else caffe2_pb2.CPU


def _check(model: ModelHelper, numbers: list[int], **missing: Any) -> None:
    if hasattr(model, "_devices"):
        raise Caffe2Error(f"model {model.name!r} is parallel already")
    if not numbers or len(set(numbers)) < len(numbers):
        raise Caffe2Error(f"Parallelize: expected devices, each of them once, found {numbers}")
    for name, value in missing.items():
        if value:
            raise Caffe2Error(f"Parallelize: {name} is not there; docs/caffe2.md says what is")


# What scripts call behind Parallelize


def RunInitNet(model: ModelHelper) -> None:
    """Fill the parameters and make the nets."""
    for net in model._data_parallel_model_init_nets:
        workspace.RunNetOnce(net)
    CreateNet(model)


def CreateNet(model: ModelHelper, overwrite: bool = False) -> None:
    """Make the nets of a model."""
    for net in model._data_parallel_model_nets:
        workspace.CreateNet(net, overwrite=overwrite)


def RunNet(model: ModelHelper, num_iterations: int) -> None:
    """Run the nets of a model so many times."""
    for net in model._data_parallel_model_nets:
        workspace.RunNet(net, num_iterations)


def OptimizeGradientMemory(
    model: ModelHelper, input_shapes: Any, excluded_blobs: Any, recycle_activations: bool
) -> None:
    """Nothing: dagexec plans memory itself."""


def GetLearningRateBlobNames(model: ModelHelper) -> list[str]:
    """The blobs of the learning rates, of models with `optimizer_builder_fun`. Raises Caffe2Error for others."""
    if not hasattr(model, "_optimizer"):
        raise Caffe2Error(f"model {model.name!r} has no optimizer from optimizer_builder_fun")
    shared = model._optimizer.get_auxiliary_parameters().shared
    return [str(blob) for blob in shared if str(blob).startswith(model._optimizer.make_unique_blob_name("lr"))]


def GetCheckpointParams(model: ModelHelper) -> set[str]:
    """What a checkpoint needs: all that the init net fills on the first device, and what no device has, the counter."""
    filled = [blob for definition in model.param_init_net.Proto().op for blob in definition.output]
    first = f"{model._device_prefix}_{model._devices[0]}/"
    return {blob for blob in filled if blob.startswith(first) or blob == ITERATION}


def FinalizeAfterCheckpoint(model: ModelHelper, blobs: Iterable[Any] | None = None) -> None:
    """Give all devices what was loaded to the first one: all of a checkpoint, or these blobs."""
    replicas = Replicas(model)
    net = Net(f"{model.name}_checkpoint_sync")
    replicas.add_copies(net, replicas.names(GetCheckpointParams(model) if blobs is None else blobs))
    workspace.RunNetOnce(net)
