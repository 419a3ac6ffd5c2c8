"""The part of a net that updates parameters: what `optimizer` builds it from.

An operator that updates a parameter runs on the device of the parameter. The counter and the learning rates are on the
host, once for all; the net copies them to the devices that need them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from dagexec.building.fillers import Filler, constant
from dagexec.building.net_builder import BIAS, WEIGHT
from dagexec.core.arguments import ArgumentValue
from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import FLOAT32, TypeMeta
from dagexec.core.gradient import Gradient, SparseGradient
from dagexec.core.graph import build_graph
from dagexec.core.inference import infer_net
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef
from dagexec.core.schema import TensorType
from dagexec.errors import GradientError, SchemaError
from dagexec.ops.families.optimize.policies import Policy
from dagexec.platform.records import dataclass


class UpdatedModel(Protocol):
    """What updates ask of a model; `training.model_helper.ModelHelper` and Caffe2's nets in `caffe2.optimizer` have it.

    Attributes:
        name: for messages.
        net: the net that updates are appended to.
        init_net: the net that fills parameters and state.
    """

    name: str
    net: NetDef
    init_net: NetDef

    @property
    def params(self) -> list[str]:
        """The parameters that training changes."""

    @property
    def params_to_grad(self) -> Mapping[str, Gradient]:
        """Their gradients. Raises GradientError where there are none yet."""

    def tags_of(self, parameter: str) -> frozenset[str]:
        """The tags of a parameter, such as "weight"."""

    def iteration(self) -> str:
        """The blob that counts steps, made by the first call."""

    def add_state(self, name: str, shape: Sequence[int], filler: Filler, dtype: TypeMeta = FLOAT32) -> str:
        """A blob that is kept from step to step."""

    def device_scope(self, device: str | Device) -> AbstractContextManager[None]:
        """Where state that is added inside lies."""


@dataclass(frozen=True)
class UpdatedParameter:
    """A parameter to update.

    Attributes:
        name: its blob.
        grad: its gradient.
        kind: its shape and type.
        device: where it is, and its state and its update, too.
        is_weight: it has the tag "weight".
        multiplier: factor of its learning rate.
    """

    name: str
    grad: Gradient
    kind: TensorType
    device: Device
    is_weight: bool
    multiplier: float

    @property
    def values(self) -> str:
        """The blob of the gradient's values."""
        return self.grad.values if isinstance(self.grad, SparseGradient) else self.grad


class UpdateNet:
    """Appends operators to the nets of a model.

    Attributes:
        iteration: the blob of the iteration counter.
    """

    def __init__(self, helper: UpdatedModel) -> None:
        """Creates the model's iteration counter, unless it is there."""
        self._helper = helper
        self._types = infer_net(build_graph(helper.init_net), {}).blobs
        self._placed = {
            blob: Device.from_option(definition.device_option)
            for definition in helper.init_net.op
            for blob in definition.output
        }
        self.iteration = helper.iteration()

    def require_first_updates(self, parameters: Sequence[str]) -> None:
        """Raise SchemaError for a parameter that is there twice, or that an operator behind the counter writes."""
        operators = self._helper.net.op
        begin = next((index for index, made in enumerate(operators) if self.iteration in made.output), len(operators))
        updated = {blob for definition in operators[begin:] for blob in definition.output}
        repeated = [name for index, name in enumerate(parameters) if name in updated or name in parameters[:index]]
        if repeated:
            raise SchemaError(f"model {self._helper.name!r}: {repeated} already has an update")

    def require_known(self, multipliers: Mapping[str, float]) -> None:
        """Raise SchemaError for a key that is neither a parameter, nor a tag of one, nor one of the usual tags."""
        known = {WEIGHT, BIAS, *self._helper.params}
        known.update(tag for name in self._helper.params for tag in self._helper.tags_of(name))
        unknown = sorted(multipliers.keys() - known)
        if unknown:
            raise SchemaError(
                f"model {self._helper.name!r}: multipliers of {unknown}, which are neither parameters nor their tags; "
                f"known: {sorted(known)}"
            )

    def trained(self, name: str, grad: Gradient, multipliers: Mapping[str, float]) -> UpdatedParameter:
        """A parameter, with what the init net says of it. Raises SchemaError when that does not make it."""
        kind = self._types.get(name)
        if kind is None:
            raise SchemaError(f"model {self._helper.name!r}: the init net gives no type for parameter {name!r}")
        tags = self._helper.tags_of(name)
        factors = [factor for key, factor in multipliers.items() if key == name or key in tags]
        return UpdatedParameter(name, grad, kind, self._placed[name], WEIGHT in tags, math.prod(factors))

    def state(self, one: UpdatedParameter, suffix: str, shape: Sequence[int] | None = None, value: float = 0.0) -> str:
        """The blob `<param>_<suffix>` of the parameter's type, filled with `value`; by default of its shape."""
        size = one.kind.shape if shape is None else shape
        with self._helper.device_scope(one.device):
            return self._helper.add_state(f"{one.name}_{suffix}", size, constant(value), one.kind.meta)

    def add(
        self,
        one: UpdatedParameter,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        arguments: Mapping[str, ArgumentValue],
    ) -> None:
        """Append an operator on the parameter's device."""
        self._append(self._helper.net, op_type, inputs, outputs, arguments, one.device)

    def add_scaled(self, one: UpdatedParameter, factor: str) -> None:
        """Append param' = param + factor * gradient."""
        ones = self.number(1.0, "ONE", one.device)
        if isinstance(one.grad, SparseGradient):
            inputs = [one.name, ones, one.grad.indices, one.grad.values, factor]
            self.add(one, "ScatterWeightedSum", inputs, [one.name], {})
        else:
            self.add(one, "WeightedSum", [one.name, ones, one.grad, factor], [one.name], {})

    def number(self, value: float, name: str, device: Device = CPU) -> str:
        """A blob on `device` that holds one float32, which the init net makes."""
        blob = f"{name}_{device}".replace(":", "_")
        known = {made for definition in self._helper.init_net.op for made in definition.output}
        if blob not in known:
            filler = constant(value)
            self._append(self._helper.init_net, filler.type, [], [blob], {"shape": [1], **filler.arguments}, device)
            self._helper.init_net.external_output.append(blob)
            self._helper.net.external_input.append(blob)
        return blob

    def learning_rate(self, prefix: str, base_lr: float, policy: Policy) -> str:
        """The blob of a learning rate; one that is in the net already serves all parameters that ask for it.

        Raises ArgumentError for a policy that cannot be used with this rate.
        """
        policy.multiplier(0, base_lr)
        made = op("LearningRate", [self.iteration], base_lr=float(base_lr), arg=policy.arguments(), device_option=CPU)
        rates = [definition for definition in self._helper.net.op if definition.type == "LearningRate"]
        for definition in rates:
            if list(definition.input) == [self.iteration] and list(definition.arg) == list(made.arg):
                return definition.output[0]
        made.output.append(f"{prefix}_{len(rates)}_lr")
        self._helper.net.op.append(made)
        return made.output[0]

    def scaled_rate(self, one: UpdatedParameter, rate: str, offset: float) -> str:
        """The blob of a learning rate scaled for one parameter with a dense gradient by Lars."""
        factor, scaled = f"{one.name}_lars", f"{one.name}_lr"
        self.add(one, "Lars", [one.name, one.values], [factor], {"offset": float(offset)})
        self.add(one, "Mul", [factor, rate], [scaled], {"broadcast": 1})
        return scaled

    def add_increment(self) -> None:
        """Append the increment of the iteration counter, unless the net has one."""
        if all(self.iteration not in definition.output for definition in self._helper.net.op):
            self._append(self._helper.net, "Iter", [self.iteration], [self.iteration], {}, CPU)

    def add_weight_decay(self, trained: Sequence[UpdatedParameter], decay: float) -> None:
        """Append grad' = grad + decay * param for weights. Raises GradientError for one with a sparse gradient."""
        for one in trained:
            if not one.is_weight:
                continue
            if isinstance(one.grad, SparseGradient):
                raise self.no_sparse_decay(one)
            factors = [self.number(1.0, "ONE", one.device), self.number(decay, f"wd_{decay!r}", one.device)]
            self.add(one, "WeightedSum", [one.grad, factors[0], one.name, factors[1]], [one.grad], {})

    def no_sparse_decay(self, one: UpdatedParameter) -> GradientError:
        """The error that weight decay is asked for a parameter with a sparse gradient; the caller raises it."""
        return GradientError(
            f"model {self._helper.name!r}: parameter {one.name!r} has a sparse gradient, for which there is no weight "
            "decay; leave the tag 'weight' off it, or update it with an optimizer of its own"
        )

    def add_clipping(self, trained: Sequence[UpdatedParameter], limit: float) -> None:
        """Append what scales the gradients so that the norm of all of them does not exceed `limit`."""
        squares = []
        for one in trained:
            squares.append(f"{one.values}_squared_sum")
            self.add(one, "SumSqrElements", [one.values], [squares[-1]], {})
        norm = f"{trained[0].name}_gradients_norm" if trained else ""
        if trained:
            self._append(self._helper.net, "GlobalNorm", squares, [norm], {}, CPU)
        for one in trained:
            self.add(one, "ClipTensorByScaling", [one.values, norm], [one.values], {"threshold": float(limit)})

    def _append(
        self,
        net: NetDef,
        op_type: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        arguments: Mapping[str, ArgumentValue],
        device: Device,
    ) -> None:
        net.op.append(op(op_type, inputs, outputs, device_option=device, arg=arguments))
