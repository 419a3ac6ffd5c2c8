"""Optimisers: they append to a model's net the operators that change its parameters by their gradients.

    gradients = helper.add_gradient_operators([loss])
    SGD(0.05, momentum=0.9, policy=Step(stepsize=1000, gamma=0.5), weight_decay=5e-4).add_updates(helper)

The iteration counter of the model is incremented before the learning rate is computed, so that the first step of a
training is iteration 1, as in Caffe2. State, such as momenta, has Caffe2's names, lies on the device of its parameter
and is filled by the init net.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field

from dagexec.core.errors import GradientError, SchemaError
from dagexec.core.gradient import SparseGradient
from dagexec.ops.optimize.policies import Fixed, Policy
from dagexec.training.model_helper import ModelHelper
from dagexec.training.update_net import Trained, UpdateNet


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base of the optimisers.

    Attributes:
        learning_rate: the rate that the policy scales, at least 0.
        policy: how the rate depends on the iteration.
        weight_decay: L2 regularisation: this much of a parameter is added to its gradient, before anything else. It is
            for parameters with the tag "weight" alone, as Caffe2's add_weight_decay, and for dense gradients alone.
        max_gradient_norm: all gradients of a call of `add_updates` are scaled together so that the norm of them all
            does not exceed this; None for no limit. Pascanu et al., 2013, arXiv:1211.5063.
        multipliers: factors of the learning rate by tag, or by name, of a parameter; those that fit are multiplied.
            Parameters whose factor is 0 stay as they are.
    """

    learning_rate: float
    _: KW_ONLY
    policy: Policy = field(default_factory=Fixed)
    weight_decay: float = 0.0
    max_gradient_norm: float | None = None
    multipliers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises SchemaError for a negative or infinite number."""
        self._require_numbers("learning_rate", "weight_decay")
        norm = self.max_gradient_norm
        if norm is not None and not 0 < norm < math.inf:
            raise SchemaError(f"{type(self).__name__}: max_gradient_norm must be above 0, found {norm:g}")

    def add_updates(self, helper: ModelHelper, parameters: Sequence[str] | None = None) -> None:
        """Append the updates of `parameters`, by default of all that have a gradient, to the net of `helper`.

        May be called again for other parameters, with the same optimiser or another. Raises GradientError when
        `helper.add_gradient_operators` was not called yet, and for a parameter without gradient, which it names.
        """
        gradients = helper.params_to_grad
        chosen = list(gradients if parameters is None else parameters)
        missing = [name for name in chosen if name not in gradients]
        if missing:
            raise GradientError(f"model {helper.name!r}: no gradient leads to {missing}; there are {list(gradients)}")
        net = UpdateNet(helper)
        trained = [net.trained(name, gradients[name], self.multipliers) for name in chosen]
        trained = [one for one in trained if one.multiplier != 0]
        if self.weight_decay:
            net.add_weight_decay(trained, self.weight_decay)
        if self.max_gradient_norm is not None:
            net.add_clipping(trained, self.max_gradient_norm)
        net.add_increment()
        for one in trained:
            self._add_update(net, one)

    @abstractmethod
    def _add_update(self, net: UpdateNet, one: Trained) -> None:
        """Append the update of one parameter."""

    def _rate(self, net: UpdateNet, one: Trained, sign: int) -> str:
        """The blob of the parameter's learning rate, times `sign`."""
        return net.learning_rate(type(self).__name__, sign * self.learning_rate * one.multiplier, self.policy)

    def _require_numbers(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise SchemaError(f"{type(self).__name__}: {name} must be at least 0 and finite, found {value:g}")


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent, with momentum when that is above 0.

    Without momentum param' = param - rate * g (WeightedSum). With it, m' = rate * g + momentum * m, and the step is m',
    with Nesterov (1 + momentum) * m' - momentum * m (MomentumSGDUpdate, which overwrites the gradient with the step).

    Attributes:
        momentum: factor of the momentum `<param>_momentum`.
        nesterov: Nesterov's look-ahead, Caffe2's default.
    """

    momentum: float = 0.0
    nesterov: bool = True

    def __post_init__(self) -> None:
        """Raises SchemaError for a negative or infinite number."""
        super().__post_init__()
        self._require_numbers("momentum")

    def _add_update(self, net: UpdateNet, one: Trained) -> None:
        if not self.momentum:
            net.add_scaled(one, self._rate(net, one, -1))
            return
        rate, momentum = self._rate(net, one, 1), net.state(one, "momentum")
        arguments = {"momentum": float(self.momentum), "nesterov": int(self.nesterov)}
        values = one.values
        if isinstance(one.grad, SparseGradient):
            inputs, kind = [values, momentum, rate, one.name, one.grad.indices], "SparseMomentumSGDUpdate"
        else:
            inputs, kind = [values, momentum, rate, one.name], "MomentumSGDUpdate"
        net.add(one, kind, inputs, [values, momentum, one.name], arguments)


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015, arXiv:1412.6980), with moments `<param>_first_moment` and `<param>_second_moment`.

    As in Caffe2 the correction of the moments counts the first step as step 2.

    Attributes:
        beta1, beta2: decay of the moments.
        epsilon: added to the root of the second moment.
        decoupled_weight_decay: AdamW (Loshchilov and Hutter, 2019, arXiv:1711.05101): this much of a parameter with the
            tag "weight", times the learning rate, is taken off it beside Adam's step; dense gradients only.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled_weight_decay: float = 0.0

    def __post_init__(self) -> None:
        """Raises SchemaError for a negative or infinite number."""
        super().__post_init__()
        self._require_numbers("beta1", "beta2", "epsilon", "decoupled_weight_decay")

    def _add_update(self, net: UpdateNet, one: Trained) -> None:
        rate = self._rate(net, one, -1)
        state = [one.name, net.state(one, "first_moment"), net.state(one, "second_moment")]
        arguments = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}
        decay = self.decoupled_weight_decay if one.is_weight else 0.0
        if isinstance(one.grad, SparseGradient):
            if decay:
                raise net.no_sparse_decay(one)
            inputs, kind = [*state, one.grad.indices, one.grad.values], "SparseAdam"
        else:
            inputs, kind = [*state, one.grad], "Adam"
        if decay:
            arguments["decoupled_weight_decay"] = decay
        net.add(one, kind, [*inputs, rate, net.iteration], state, arguments)
