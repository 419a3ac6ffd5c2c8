"""Optimizers: they append to a model's net the operators that change its parameters by their gradients.

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
from dataclasses import KW_ONLY, field
from typing import ClassVar

from dagexec.core.arguments import ArgumentValue
from dagexec.core.gradient import SparseGradient
from dagexec.errors import GradientError, SchemaError
from dagexec.ops.families.optimize.policies import Fixed, Policy
from dagexec.platform.records import dataclass
from dagexec.training.update_net import UpdatedModel, UpdatedParameter, UpdateNet

__all__ = ["SGD", "Adadelta", "Adagrad", "Adam", "Ftrl", "GroupFtrl", "Optimizer", "RmsProp", "Wngrad", "YellowFin"]


@dataclass(frozen=True)
class Optimizer(ABC):
    """Base of the optimizers.

    Attributes:
        learning_rate: the rate that the policy scales, at least 0.
        policy: how the rate depends on the iteration.
        weight_decay: L2 regularization: this much of a parameter is added to its gradient, before anything else. It is
            for parameters with the tag "weight" alone, as Caffe2's add_weight_decay, and for dense gradients alone.
        max_gradient_norm: all gradients of a call of `add_updates` are scaled together so that the norm of them all
            does not exceed this; None for no limit. Pascanu et al., 2013, arXiv:1211.5063. Of a sparse gradient the
            rows count as they come, as in Caffe2: those of one index are not added up before.
        deduplicate: rows of a sparse gradient that have one index are added up before the update, which then is that of
            a dense gradient on these rows. Without it each is applied on its own, in order, as in Caffe2.
        multipliers: factors of the learning rate, at least 0, by tag, or by name, of a parameter; those that fit are
            multiplied. Parameters whose factor is 0 stay as they are.
    """

    takes_sparse: ClassVar[bool] = True
    """Whether it updates parameters that have sparse gradients."""

    learning_rate: float
    _: KW_ONLY
    policy: Policy = field(default_factory=Fixed)
    weight_decay: float = 0.0
    max_gradient_norm: float | None = None
    deduplicate: bool = True
    multipliers: Mapping[str, float] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        """Raises SchemaError for a negative or infinite number."""
        self._require_numbers("learning_rate", "weight_decay")
        norm = self.max_gradient_norm
        if norm is not None and not 0 < norm < math.inf:
            raise SchemaError(f"{type(self).__name__}: max_gradient_norm must be above 0, found {norm:g}")
        for name, factor in self.multipliers.items():
            if not 0 <= factor < math.inf:
                raise SchemaError(
                    f"{type(self).__name__}: the multiplier of {name!r} must be at least 0 and finite, found {factor:g}"
                )

    def add_updates(self, helper: UpdatedModel, parameters: Sequence[str] | None = None) -> None:
        """Append the updates of `parameters`, by default of all that have a gradient, to the net of `helper`.

        May be called again for other parameters, with the same optimizer or another. Raises GradientError when
        `helper.add_gradient_operators` was not called yet, and for a parameter without gradient, which it names;
        SchemaError for a parameter that has an update already, and for a multiplier of what the model does not have.
        """
        gradients = helper.params_to_grad
        chosen = list(gradients if parameters is None else parameters)
        missing = [name for name in chosen if name not in gradients]
        if missing:
            raise GradientError(f"model {helper.name!r}: no gradient leads to {missing}; there are {list(gradients)}")
        net = UpdateNet(helper)
        net.require_first_updates(chosen)
        net.require_known(self.multipliers)
        trained = [net.trained(name, gradients[name], self.multipliers) for name in chosen]
        trained = [one for one in trained if one.multiplier != 0]
        if self.weight_decay:
            net.add_weight_decay(trained, self.weight_decay)
        if self.max_gradient_norm is not None:
            net.add_clipping(trained, self.max_gradient_norm)
        net.add_increment()
        for one in trained:
            if isinstance(one.grad, SparseGradient) and not self.takes_sparse:
                raise GradientError(
                    f"model {helper.name!r}: parameter {one.name!r} has a sparse gradient, which {type(self).__name__} "
                    "does not support; use another optimizer for it"
                )
            self._add_update(net, one)

    @abstractmethod
    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        """Append the update of one parameter."""

    def _rate(self, net: UpdateNet, one: UpdatedParameter, sign: int) -> str:
        """The blob of the parameter's learning rate, times `sign`."""
        return net.learning_rate(type(self).__name__, sign * self.learning_rate * one.multiplier, self.policy)

    def _add_rule(
        self,
        net: UpdateNet,
        one: UpdatedParameter,
        op_type: str,
        state: Sequence[str],
        rest: Sequence[str],
        arguments: Mapping[str, ArgumentValue],
    ) -> None:
        """Append `op_type` on parameter, state and gradient; for a sparse gradient, `Sparse<op_type>`."""
        changed = [one.name, *state]
        if isinstance(one.grad, SparseGradient):
            inputs = [*changed, one.grad.indices, one.grad.values, *rest]
            sparse = op_type if "Sparse" in op_type else f"Sparse{op_type}"
            net.add(one, sparse, inputs, changed, {**arguments, "deduplicate": int(self.deduplicate)})
        else:
            net.add(one, op_type, [*changed, one.grad, *rest], changed, arguments)

    def _require_no_policy(self, reason: str) -> None:
        if self.policy != Fixed():
            raise SchemaError(f"{type(self).__name__}: {reason}; found policy {self.policy.name!r}")

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
        lars: the rate of each parameter that has a dense gradient is multiplied by 1 / (norm(g) / norm(param) + lars),
            the layer-wise scaling of You et al., 2017, arXiv:1708.03888; None for one rate for all.
    """

    momentum: float = 0.0
    nesterov: bool = True
    lars: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_numbers("momentum", *(["lars"] if self.lars is not None else []))

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        rate = self._rate(net, one, 1 if self.momentum else -1)
        if self.lars is not None and not isinstance(one.grad, SparseGradient):
            rate = net.scaled_rate(one, rate, self.lars)
        if not self.momentum:
            net.add_scaled(one, rate)
            return
        momentum, values = net.state(one, "momentum"), one.values
        arguments: dict[str, ArgumentValue] = {"momentum": float(self.momentum), "nesterov": int(self.nesterov)}
        inputs, kind = [values, momentum, rate, one.name], "MomentumSGDUpdate"
        if isinstance(one.grad, SparseGradient):
            inputs, kind = [*inputs, one.grad.indices], "SparseMomentumSGDUpdate"
            arguments["deduplicate"] = int(self.deduplicate)
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
        row_wise: for sparse gradients, one second moment a row, `<param>_avg_second_moment`.
        rectified: for sparse gradients, rectified Adam (Liu et al., 2020, arXiv:1908.03265); not row-wise.
    """

    learning_rate: float = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    decoupled_weight_decay: float = 0.0
    row_wise: bool = False
    rectified: bool = False

    def __post_init__(self) -> None:
        """Raises SchemaError for a negative or infinite number, and for rectified and row-wise at once."""
        super().__post_init__()
        self._require_numbers("beta1", "beta2", "epsilon", "decoupled_weight_decay")
        if self.row_wise and self.rectified:
            raise SchemaError("Adam: row_wise and rectified cannot be combined")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        sparse = isinstance(one.grad, SparseGradient)
        decay = self.decoupled_weight_decay if one.is_weight else 0.0
        if sparse and decay:
            raise net.no_sparse_decay(one)
        arguments: dict[str, ArgumentValue] = {"beta1": self.beta1, "beta2": self.beta2, "epsilon": self.epsilon}
        if decay:
            arguments["decoupled_weight_decay"] = decay
        if sparse and self.rectified:
            arguments["enableRAdam"] = 1
        state, kind = [net.state(one, "first_moment")], "Adam"
        if sparse and self.row_wise:
            state, kind = [*state, net.state(one, "avg_second_moment", one.kind.shape[:1])], "RowWiseSparseAdam"
        else:
            state = [*state, net.state(one, "second_moment")]
        self._add_rule(net, one, kind, state, [self._rate(net, one, -1), net.iteration], arguments)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011), with the sum of squares `<param>_squared_sum`.

    Attributes:
        epsilon: added to the root of the sum.
        decay: factor of the sum from step to step; dense gradients only.
        row_wise: for sparse gradients, one sum a row, `<param>_avg_squared_sum`, of the rows' means.
    """

    learning_rate: float = 0.01
    epsilon: float = 1e-4
    decay: float = 1.0
    row_wise: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_numbers("epsilon", "decay")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        sparse, rate = isinstance(one.grad, SparseGradient), self._rate(net, one, -1)
        arguments: dict[str, ArgumentValue] = {"epsilon": self.epsilon}
        if sparse and self.row_wise:
            state, kind = net.state(one, "avg_squared_sum", one.kind.shape[:1]), "RowWiseSparseAdagrad"
        else:
            state, kind = net.state(one, "squared_sum"), "Adagrad"
        if not sparse:
            arguments["decay"] = self.decay
        self._add_rule(net, one, kind, [state], [rate], arguments)


@dataclass(frozen=True)
class Adadelta(Optimizer):
    """Adadelta (Zeiler, 2012, arXiv:1212.5701).

    Its means are `<param>_squared_moment` of gradients and `<param>_squared_moment_update` of steps.

    Attributes:
        epsilon: added to both means.
        decay: of both means.
    """

    learning_rate: float = 0.01
    epsilon: float = 1e-4
    decay: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_numbers("epsilon", "decay")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        state = [net.state(one, "squared_moment"), net.state(one, "squared_moment_update")]
        arguments = {"epsilon": self.epsilon, "decay": self.decay}
        self._add_rule(net, one, "Adadelta", state, [self._rate(net, one, -1)], arguments)


@dataclass(frozen=True)
class RmsProp(Optimizer):
    """RMSProp (Tieleman and Hinton, 2012), with `<param>_mean_squares` and `<param>_momentum`.

    s' = s + (1 - decay) (g^2 - s); m' = momentum m + rate * g / sqrt(epsilon + s'); param' = param - m'. Caffe2's
    build runs MomentumSGDUpdate on the same momentum behind that: without momentum the same, with it not.

    Attributes:
        decay: of the mean of squares.
        momentum: factor of the momentum.
        epsilon: added to the mean of squares.
    """

    takes_sparse = False

    learning_rate: float = 0.01
    decay: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_numbers("decay", "momentum", "epsilon")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        state = [net.state(one, "mean_squares"), net.state(one, "momentum")]
        arguments = {"decay": self.decay, "momentum": self.momentum, "epsilon": self.epsilon}
        rate = self._rate(net, one, -1)
        net.add(one, "RmsProp", [one.values, *state, rate], [one.values, *state], arguments)
        net.add(one, "Sum", [one.name, one.values], [one.name], {})


@dataclass(frozen=True)
class Ftrl(Optimizer):
    """FTRL-Proximal (McMahan et al., 2013), with the state `<param>_ftrl_nz`; the learning rate is its alpha.

    Attributes:
        beta: smooths the learning rate at first.
        lambda1, lambda2: strengths of L1 and L2 regularization.
    """

    learning_rate: float = 0.01
    beta: float = 1e-4
    lambda1: float = 0.0
    lambda2: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_numbers("beta", "lambda1", "lambda2")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        state = net.state(one, "ftrl_nz", (*one.kind.shape, 2))
        arguments = {"beta": self.beta, "lambda1": self.lambda1, "lambda2": self.lambda2}
        self._add_rule(net, one, "Ftrl", [state], [self._rate(net, one, 1)], arguments)


@dataclass(frozen=True)
class GroupFtrl(Optimizer):
    """Ftrl that keeps whole columns of a matrix at 0 (Ni et al., 2019), with `<param>_gftrl_nz`; the rate is its alpha.

    Attributes:
        beta: smooths the learning rate at first.
        lambda1, lambda2: strengths of L1, by columns, and L2 regularization.
    """

    takes_sparse = False

    learning_rate: float = 0.01
    beta: float = 1e-4
    lambda1: float = 0.0
    lambda2: float = 0.0

    def __post_init__(self) -> None:
        """Raises SchemaError for a negative or infinite number, and for a policy, which would have no effect."""
        super().__post_init__()
        self._require_numbers("beta", "lambda1", "lambda2")
        self._require_no_policy("its rate is the same in all steps")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        state = net.state(one, "gftrl_nz", (*one.kind.shape, 2))
        alpha = self.learning_rate * one.multiplier
        arguments = {"alpha": alpha, "beta": self.beta, "lambda1": self.lambda1, "lambda2": self.lambda2}
        self._add_rule(net, one, "GFtrl", [state], [], arguments)


@dataclass(frozen=True)
class Wngrad(Optimizer):
    """One adaptive rate for all of a parameter (Wu et al., 2018, arXiv:1803.02865), with its divisor `<param>_moment`.

    Attributes:
        epsilon: added to the divisor.
        moment_init: the divisor of the first step.
    """

    learning_rate: float = 1.0
    epsilon: float = 1e-9
    moment_init: float = 100.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_numbers("epsilon", "moment_init")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        state = net.state(one, "moment", (1,), self.moment_init)
        changed, rate = [one.name, state], self._rate(net, one, -1)
        if isinstance(one.grad, SparseGradient):
            inputs, kind = [*changed, one.grad.indices, one.grad.values, rate], "SparseWngrad"
        else:
            inputs, kind = [*changed, one.grad, rate], "Wngrad"
        net.add(one, kind, inputs, changed, {"epsilon": self.epsilon})


@dataclass(frozen=True)
class YellowFin(Optimizer):
    """Momentum whose rate and factor are tuned for each parameter (Zhang and Mitliagkas, 2017, arXiv:1706.03471).

    The learning rate is that of the first steps; the policy is not used.

    Attributes:
        momentum: the factor of the first steps.
        beta: decay of the running means.
        curv_win_width: how many steps the range of curvatures is taken over.
        epsilon: keeps divisors away from 0.
        nesterov: Nesterov's look-ahead.
        zero_debias: running means are corrected for starting at 0.
    """

    takes_sparse = False

    learning_rate: float = 0.1
    momentum: float = 0.0
    beta: float = 0.999
    curv_win_width: int = 20
    epsilon: float = 1e-6
    nesterov: bool = False
    zero_debias: bool = True

    def __post_init__(self) -> None:
        """Raises SchemaError for a negative or infinite number, and for a policy, which would have no effect."""
        super().__post_init__()
        self._require_numbers("momentum", "beta", "epsilon")
        self._require_no_policy("it tunes the learning rate itself")

    def _add_update(self, net: UpdateNet, one: UpdatedParameter) -> None:
        changed = [
            one.name,
            net.state(one, "moment"),
            net.state(one, "lr_avg", (1,), self.learning_rate * one.multiplier),
            net.state(one, "mu_avg", (1,), self.momentum),
            net.state(one, "curv_win", (self.curv_win_width,)),
            net.state(one, "g_avg"),
            net.state(one, "g2_avg"),
            net.state(one, "scalars_memory", (5,)),
        ]
        arguments: dict[str, ArgumentValue] = {
            "beta": self.beta,
            "epsilon": self.epsilon,
            "curv_win_width": self.curv_win_width,
            "nesterov": int(self.nesterov),
            "zero_debias": int(self.zero_debias),
        }
        net.add(one, "YellowFin", [*changed, one.values, net.iteration], changed, arguments)
