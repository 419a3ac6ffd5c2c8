"""Caffe2's optimizers: `optimizer.build_sgd(model, 0.1, policy="step", stepsize=1, gamma=0.999)`.

They are those of `dagexec.training.optimizer`, with Caffe2's arguments and defaults.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import numpy as np

from dagexec.caffe2 import workspace
from dagexec.caffe2.helpers.training import add_weight_decay
from dagexec.caffe2.model_helper import ModelHelper
from dagexec.caffe2.modeling.parameter_info import ParameterInfo
from dagexec.caffe2.net import Net
from dagexec.caffe2.optimizer_nets import OptimizerNets
from dagexec.caffe2.references import BlobReference, GradientSlice, plain_gradient
from dagexec.core.device import CPU
from dagexec.core.gradient import SparseGradient
from dagexec.core.node import arguments_of
from dagexec.core.operator_def import op
from dagexec.core.proto import DeviceOption, TensorProto
from dagexec.errors import Caffe2Error, GradientError
from dagexec.ops.families.optimize.policies import Policy, read_policy
from dagexec.training import optimizer as training
from dagexec.training.fp16_sgd import Fp16SGD

__all__ = [
    "AdadeltaOptimizer",
    "AdagradOptimizer",
    "AdamOptimizer",
    "AuxOptimizerParams",
    "FP16SgdOptimizer",
    "FtrlOptimizer",
    "GFtrlOptimizer",
    "MultiPrecisionSgdOptimizer",
    "Optimizer",
    "RmsPropOptimizer",
    "SgdOptimizer",
    "WngradOptimizer",
    "YellowFinOptimizer",
    "add_weight_decay",
    "build_adadelta",
    "build_adagrad",
    "build_adam",
    "build_fp16_sgd",
    "build_ftrl",
    "build_gftrl",
    "build_multi_precision_sgd",
    "build_rms_prop",
    "build_sgd",
    "build_wngrad",
    "build_yellowfin",
    "get_lr_injection",
    "get_param_device",
    "reset_optimizer_instance_count",
    "set_lr_injection",
]  # fmt: skip

logger = logging.getLogger("dagexec")

_LR_INJECTION = "lr_injection"
_instances: Counter[str] = Counter()


class AuxOptimizerParams(NamedTuple):
    """What an optimizer keeps: `local` of single parameters, `shared` of all."""

    local: list[BlobReference]
    shared: list[BlobReference]


class Optimizer:
    """An optimizer, called with the nets and a parameter: `SgdOptimizer(0.1)(net, param_init_net, param, grad)`.

    Attributes:
        base_learning_rate: the rate that the policy scales.
    """

    _kind: ClassVar[type[training.Optimizer]]

    def __init__(
        self,
        base_learning_rate: float,
        policy: str,
        sparse_dedup_aggregator: str | None,
        fields: dict[str, Any],
        kwargs: dict[str, Any],
    ) -> None:
        """`fields` are those of the class in `dagexec.training`, `kwargs` the arguments of the policy.

        Rows of a sparse gradient that have one index are each applied, in order; with the aggregator "sum" they are
        added up before. Raises Caffe2Error for another one, ArgumentError for a policy that makes no sense.
        """
        if sparse_dedup_aggregator not in (None, "sum"):
            raise Caffe2Error(
                f"{type(self).__name__}: sparse_dedup_aggregator {sparse_dedup_aggregator!r}; known: 'sum'"
            )
        self.base_learning_rate = base_learning_rate
        self._deduplicate = sparse_dedup_aggregator == "sum"
        self._fields = fields
        self._policy = _policy(type(self).__name__, policy, kwargs)
        self._lr_multiplier: str | None = None
        self._aux = AuxOptimizerParams([], [])
        self._instance = _instances[type(self).__name__]
        _instances[type(self).__name__] += 1

    def __call__(self, net: Net, param_init_net: Net, param: Any, grad: Any = None) -> None:
        """Append the update of a parameter: a ParameterInfo, or a blob and its gradient."""
        info = param
        if not isinstance(param, ParameterInfo):
            info = ParameterInfo(BlobReference(str(param)))
            info.grad = grad
        self._update(net, param_init_net, [info])

    def _update(
        self, net: Net, init_net: Net, infos: list[ParameterInfo], max_gradient_norm: float | None = None
    ) -> None:
        nets = OptimizerNets(net, init_net, infos, self.make_unique_blob_name("lr"))
        made = self._kind(
            self.base_learning_rate,
            policy=self._policy,
            deduplicate=self._deduplicate,
            max_gradient_norm=max_gradient_norm,
            **self._fields,
        )
        made.add_updates(nets)
        local, shared = nets.finish(self._lr_multiplier)
        self._aux.local.extend(local)
        self._aux.shared.extend(blob for blob in shared if blob not in self._aux.shared)

    def make_unique_blob_name(self, base_str: str) -> str:
        """What names of blobs of this optimizer begin with: `SgdOptimizer_0_lr`."""
        return f"{type(self).__name__}_{self._instance}_{base_str}"

    def get_cpu_blob_name(self, base_str: str, node_name: str = "") -> str:
        """The name of a blob that is kept for all devices of this kind: `SgdOptimizer_0_lr_cpu`."""
        return f"{self.make_unique_blob_name(base_str)}_cpu{node_name}"

    def get_auxiliary_parameters(self) -> AuxOptimizerParams:
        """What the optimizer keeps."""
        return self._aux

    def scale_learning_rate(self, scale: float) -> None:
        """Multiply the rate of updates that are added from here on."""
        self.base_learning_rate *= scale

    def add_lr_multiplier(self, lr_multiplier: Any) -> None:
        """Multiply the rate, in each run, by what a blob holds. Raises Caffe2Error for a second blob."""
        if self._lr_multiplier is not None:
            raise Caffe2Error(f"{type(self).__name__}: the rate is multiplied by {self._lr_multiplier!r} already")
        self._lr_multiplier = str(lr_multiplier)


class SgdOptimizer(Optimizer):
    """Gradient descent, with momentum where that is not 0, Nesterov's unless `nesterov=0`."""

    _kind = training.SGD

    def __init__(
        self,
        base_learning_rate: float = 0.01,
        policy: str = "fixed",
        momentum: float = 0.0,
        nesterov: bool = True,
        sparse_dedup_aggregator: str | None = None,
        lars: float | None = None,
        **kwargs: Any,
    ) -> None:
        fields = {"momentum": momentum, "nesterov": bool(nesterov), "lars": lars}
        super().__init__(base_learning_rate, policy, sparse_dedup_aggregator, fields, kwargs)


class MultiPrecisionSgdOptimizer(SgdOptimizer):
    """SgdOptimizer, which updates parameters of float16 in their copies of float32, and rounds these."""

    def __init__(
        self,
        base_learning_rate: float = 0.1,
        momentum: float = 0.0,
        policy: str = "fixed",
        nesterov: bool = True,
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(base_learning_rate, policy, momentum, nesterov, sparse_dedup_aggregator, **kwargs)

    def _update(
        self, net: Net, init_net: Net, infos: list[ParameterInfo], max_gradient_norm: float | None = None
    ) -> None:
        updated: list[ParameterInfo] = []
        for info in infos:
            copy = (info.blob_copy or {}).get(TensorProto.FLOAT)
            if copy is not None and isinstance(info.grad, GradientSlice):
                raise GradientError(f"MultiPrecisionSgdOptimizer: parameter {info.name!r} has a sparse gradient")
            updated.append(info if copy is None else ParameterInfo(copy, info.shape))
            updated[-1].grad, updated[-1].tags = info.grad, info.tags
        for info, one in zip(infos, updated, strict=True):
            if one is not info:
                one.grad = net.HalfToFloat(info.grad, info.grad + "_fp32")
        super()._update(net, init_net, updated, max_gradient_norm)
        for info, one in zip(infos, updated, strict=True):
            if one is not info:
                net.FloatToHalf(one.blob, info.blob)


class FP16SgdOptimizer(Optimizer):
    """Gradient descent on parameters of float16, each step in float32, with decay of all parameters."""

    _kind = Fp16SGD

    def __init__(
        self,
        base_learning_rate: float = 0.1,
        momentum: float = 0.0,
        policy: str = "fixed",
        nesterov: bool = True,
        weight_decay: float = 0.0001,
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        fields = {"momentum": momentum, "nesterov": bool(nesterov), "decay": weight_decay}
        super().__init__(base_learning_rate, policy, sparse_dedup_aggregator, fields, kwargs)


class AdagradOptimizer(Optimizer):
    """Adagrad; `rowWise` keeps one sum a row of sparse gradients."""

    _kind = training.Adagrad

    def __init__(
        self,
        alpha: float = 0.01,
        epsilon: float = 1e-4,
        decay: float = 1,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        rowWise: bool = False,
        **kwargs: Any,
    ) -> None:
        fields = {"epsilon": epsilon, "decay": float(decay), "row_wise": rowWise}
        super().__init__(alpha, policy, sparse_dedup_aggregator, fields, kwargs)


class AdadeltaOptimizer(Optimizer):
    """Adadelta."""

    _kind = training.Adadelta

    def __init__(
        self,
        alpha: float = 0.01,
        epsilon: float = 1e-4,
        decay: float = 0.95,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(alpha, policy, sparse_dedup_aggregator, {"epsilon": epsilon, "decay": decay}, kwargs)


class AdamOptimizer(Optimizer):
    """Adam; `rowWise` and `enableRAdam` are for sparse gradients."""

    _kind = training.Adam

    def __init__(
        self,
        alpha: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        rowWise: bool = False,
        enableRAdam: bool = False,
        **kwargs: Any,
    ) -> None:
        fields = {"beta1": beta1, "beta2": beta2, "epsilon": epsilon, "row_wise": rowWise, "rectified": enableRAdam}
        super().__init__(alpha, policy, sparse_dedup_aggregator, fields, kwargs)


class RmsPropOptimizer(Optimizer):
    """RMSProp."""

    _kind = training.RmsProp

    def __init__(
        self,
        alpha: float = 0.01,
        decay: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-5,
        policy: str = "fixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(alpha, policy, None, {"decay": decay, "momentum": momentum, "epsilon": epsilon}, kwargs)


class FtrlOptimizer(Optimizer):
    """FTRL-Proximal."""

    _kind: ClassVar[type[training.Optimizer]] = training.Ftrl

    def __init__(
        self,
        alpha: float = 0.01,
        beta: float = 1e-4,
        lambda1: float = 0,
        lambda2: float = 0,
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        fields = {"beta": beta, "lambda1": float(lambda1), "lambda2": float(lambda2)}
        super().__init__(alpha, "fixed", sparse_dedup_aggregator, fields, kwargs)


class GFtrlOptimizer(FtrlOptimizer):
    """FTRL-Proximal that keeps whole columns at 0."""

    _kind = training.GroupFtrl


class WngradOptimizer(Optimizer):
    """One adaptive rate for each parameter."""

    _kind = training.Wngrad

    def __init__(
        self,
        alpha: float = 1.0,
        epsilon: float = 1e-9,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        moment_init: float = 100.0,
        **kwargs: Any,
    ) -> None:
        fields = {"epsilon": epsilon, "moment_init": moment_init}
        super().__init__(alpha, policy, sparse_dedup_aggregator, fields, kwargs)


class YellowFinOptimizer(Optimizer):
    """Momentum that tunes its rate and its factor."""

    _kind = training.YellowFin

    def __init__(
        self,
        alpha: float = 0.1,
        mu: float = 0.0,
        beta: float = 0.999,
        curv_win_width: int = 20,
        zero_debias: bool = True,
        epsilon: float = 0.1**6,
        policy: str = "fixed",
        sparse_dedup_aggregator: str | None = None,
        **kwargs: Any,
    ) -> None:
        fields = {"momentum": mu, "beta": beta, "curv_win_width": curv_win_width, "epsilon": epsilon}
        super().__init__(alpha, policy, sparse_dedup_aggregator, {**fields, "zero_debias": bool(zero_debias)}, kwargs)


# Updates of all parameters of a model


def _build_rated(
    kind: Callable[..., Optimizer],
    model: ModelHelper,
    base_learning_rate: float,
    max_gradient_norm: float | None = None,
    allow_lr_injection: bool = False,
    **kwargs: Any,
) -> Optimizer:
    """Append the updates of an optimizer for all parameters of a model that have a gradient, and return it.

    All gradients are scaled together so that their norm is at most `max_gradient_norm`. With `allow_lr_injection` the
    rate is multiplied by what `set_lr_injection` says. Raises GradientError before `AddGradientOperators`.
    """
    return _build(kind(base_learning_rate, **kwargs), model, max_gradient_norm, allow_lr_injection)


def _build_some(
    kind: Callable[..., Optimizer],
    model: ModelHelper,
    base_learning_rate: float,
    parameters: Iterable[Any] | None = None,
    max_gradient_norm: float | None = None,
    allow_lr_injection: bool = False,
    **kwargs: Any,
) -> Optimizer:
    """As `build_sgd`, for all parameters or only for `parameters`."""
    return _build(kind(base_learning_rate, **kwargs), model, max_gradient_norm, allow_lr_injection, parameters)


build_sgd = partial(_build_rated, SgdOptimizer)
build_multi_precision_sgd = partial(_build_rated, MultiPrecisionSgdOptimizer)
build_fp16_sgd = partial(_build_rated, FP16SgdOptimizer)
build_adam = partial(_build_rated, AdamOptimizer)
build_rms_prop = partial(_build_rated, RmsPropOptimizer)
build_wngrad = partial(_build_rated, WngradOptimizer)
build_adagrad = partial(_build_some, AdagradOptimizer)
build_adadelta = partial(_build_some, AdadeltaOptimizer)


def build_ftrl(model: ModelHelper, engine: str = "SIMD", **kwargs: Any) -> Optimizer:
    """Append the updates of FtrlOptimizer. The engine is dagexec's, whichever is named."""
    return _build(FtrlOptimizer(**kwargs), model)


def build_gftrl(model: ModelHelper, engine: str = "", **kwargs: Any) -> Optimizer:
    """Append the updates of GFtrlOptimizer."""
    return _build(GFtrlOptimizer(**kwargs), model)


def build_yellowfin(model: ModelHelper, base_learning_rate: float = 0.1, **kwargs: Any) -> Optimizer:
    """Append the updates of YellowFinOptimizer."""
    return _build(YellowFinOptimizer(base_learning_rate, **kwargs), model)


def _build(
    made: Optimizer,
    model: ModelHelper,
    max_gradient_norm: float | None = None,
    allow_lr_injection: bool = False,
    parameters: Iterable[Any] | None = None,
) -> Optimizer:
    if not model.gradient_ops_added:
        raise GradientError(f"model {model.name!r}: there are no gradients yet: call AddGradientOperators")
    if allow_lr_injection:
        one = model.param_init_net.ConstantFill([], BlobReference(_LR_INJECTION), shape=[1], value=1.0)
        made.add_lr_multiplier(one)
    groups: dict[Optimizer, list[ParameterInfo]] = {made: []}
    for info in model.GetOptimizationParamInfo(parameters):
        groups.setdefault(info.optimizer or made, []).append(info)
    if len(groups) > 1 and max_gradient_norm is not None:
        raise Caffe2Error("max_gradient_norm is of all gradients: it needs one optimizer for all parameters")
    for one, infos in groups.items():
        one._update(model.net, model.param_init_net, infos, max_gradient_norm)
    return made


def get_lr_injection() -> float:
    """What rates are multiplied by, of models built with `allow_lr_injection`."""
    return float(workspace.FetchBlob(_LR_INJECTION).reshape(()))


def set_lr_injection(lr_injection_value: float) -> None:
    """Have rates multiplied by this from the next run on."""
    workspace.FeedBlob(_LR_INJECTION, np.array([lr_injection_value], np.float32))


def get_param_device(
    param_name: Any,
    grad: Any,
    param_to_device: Mapping[str, DeviceOption] | None = None,
    default_device: DeviceOption | None = None,
) -> DeviceOption:
    """The device of a parameter: that of the mapping for it or for its gradient, else the default, else the host."""
    values = plain_gradient(grad)
    blobs = (str(param_name), values.values if isinstance(values, SparseGradient) else values)
    devices = [param_to_device[blob] for blob in blobs if blob in (param_to_device or {})] if param_to_device else []
    return next(iter(devices), default_device or CPU.to_option())


def reset_optimizer_instance_count() -> None:
    """Count the optimizers of each class from 0 again, as names of their blobs do."""
    _instances.clear()


def _policy(owner: str, name: str, arguments: dict[str, Any]) -> Policy:
    """The policy of that name with its arguments. What it does not know has no effect, as in Caffe2: the log tells."""
    definition = op("LearningRate", arg={"policy": name, **arguments})
    policy = read_policy(arguments_of(definition, owner), owner)
    ignored = sorted(arguments.keys() - policy.arguments().keys())
    if ignored:
        logger.warning("%s: the arguments %s have no effect, as in Caffe2", owner, ignored)
    return policy
