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
    "Parallelize", "Parallelize_BMUF", "Parallelize_CPU", "Parallelize_GPU", "RunInitNet", "RunNet", "RunWarmup",
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


def Parallelize_BMUF(
    model_helper_obj: ModelHelper,
    input_builder_fun: Builder,
    forward_pass_builder_fun: Callable[[ModelHelper, float], Sequence[Any] | None],
    param_update_builder_fun: Builder,
    block_learning_rate: float = 1.0,
    block_momentum: float | None = None,
    devices: Iterable[int] | None = None,
    rendezvous: Any = None,
    net_type: str = "dag",
    master_device: int | None = None,
    use_nccl: bool = False,
    nesterov: bool = False,
    optimize_gradient_memory: bool = False,
    reset_momentum_sgd: bool = False,
    warmup_iterations: int | None = None,
    max_concurrent_distributed_ops: int = 4,
    add_blobs_to_sync: Iterable[str] | None = None,
    num_threads_per_device: int = 4,
    cpu_device: bool = False,
) -> None:
    """Have each device train on its own, and `RunNet` bring them together behind its iterations (Chen and Huo, 2016).

    With g, the model before, the mean over devices is a step: v' = block_momentum v + block_learning_rate (mean - g),
    and the model of all devices is g + v', with `nesterov` g + v' - block_momentum (v' - v). The momentum is by default
    1 - 1 / number of devices. With `reset_momentum_sgd` devices begin anew with their own momenta. `add_blobs_to_sync`
    are further blobs, without their scope, that are treated so. `RunWarmup` runs `warmup_iterations` before, and then
    has all devices begin as the first. The other arguments are those of `Parallelize`.
    """
    model = model_helper_obj
    numbers = list(range(workspace.NumCudaDevices()) if devices is None else devices)
    _check(model, numbers, rendezvous=rendezvous)
    model._devices, model._device_prefix = numbers, "cpu" if cpu_device else "gpu"
    model.net.Proto().type = net_type
    replicas = Replicas(model)
    losses: list[Any] = []
    for number in numbers:
        with replicas.scopes(number):
            input_builder_fun(model)
            losses.extend(forward_pass_builder_fun(model, 1.0) or [])
    replicas.check()
    model.AddGradientOperators(losses)
    for number in numbers:
        with replicas.scopes(number):
            param_update_builder_fun(model)
    names = [*replicas.names(model.GetParams("")), *(add_blobs_to_sync or ())]
    replicas.add_copies(model.param_init_net, replicas.names(model.GetAllParams("")))
    begin, step = Net(f"{model.name}_global_init"), Net(f"{model.name}_global_update")
    step.Proto().type = net_type
    momentum = 1.0 - 1.0 / len(numbers) if block_momentum is None else block_momentum
    with DeviceScope(replicas.option(numbers[0] if master_device is None else master_device)):
        for name in names:
            blobs = [replicas.blob(name, number) for number in numbers]
            _add_block_update(begin, step, blobs, block_learning_rate, momentum, nesterov)
    replicas.add_copies(step, names)
    for operator in model.net.Proto().op if reset_momentum_sgd else ():
        if operator.type == "MomentumSGDUpdate":
            with DeviceScope(operator.device_option):
                step.ConstantFill([BlobReference(operator.input[1])], BlobReference(operator.input[1]), value=0.0)
    model._warmup_iterations = warmup_iterations
    model._data_parallel_model_init_nets = [model.param_init_net, begin]
    model._data_parallel_model_nets = [model.net, (step, 1)]


def _add_block_update(
    begin: Net, step: Net, blobs: Sequence[BlobReference], rate: float, momentum: float, nesterov: bool
) -> None:
    """Bring one parameter of all devices together in that of the first, from the state that `begin` fills."""
    first, last, total = (blobs[0] + suffix for suffix in ("", "_g", "_v"))
    begin.Copy(first, last)
    begin.ConstantFill([first], total, value=0.0)
    step.Sum(blobs, first)
    step.Scale(first, first, scale=1.0 / len(blobs))
    step.Sub([first, last], first)
    step.Scale(first, first, scale=rate)
    before = step.Scale(total, first + "_v_decayed", scale=momentum)
    if nesterov:
        step.Copy(total, first + "_v_prev")
    step.Add([before, first], total)
    step.Add([last, total], last)
    if nesterov:
        change = step.Sub([total, first + "_v_prev"], first + "_v_change")
        step.Scale(change, change, scale=momentum)
        step.Sub([last, change], last)
    step.Copy(last, first)


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
        workspace.CreateNet(net[0] if isinstance(net, tuple) else net, overwrite=overwrite)


def RunNet(model: ModelHelper, num_iterations: int) -> None:
    """Run the nets of a model so many times, but those that have a number of their own so often."""
    for net in model._data_parallel_model_nets:
        one, times = net if isinstance(net, tuple) else (net, num_iterations)
        workspace.RunNet(one, times)


def RunWarmup(model: ModelHelper) -> None:
    """Train each device on its own for the warm-up iterations of `Parallelize_BMUF`, and take over the first one."""
    workspace.RunNet(model.net, model._warmup_iterations or 0)
    FinalizeAfterCheckpoint(model)
    workspace.RunNetOnce(model._data_parallel_model_init_nets[-1])


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
