"""Replicas: the model as each device builds it, with its gradients and updates, and the proof that all are the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest

from dagexec.building.net_builder import ITERATION
from dagexec.core.arguments import make_argument
from dagexec.core.gradient import Gradient
from dagexec.core.node import arguments_of
from dagexec.core.proto import OperatorDef
from dagexec.errors import SchemaError
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass
from dagexec.training.data_parallel.batch_statistics import share_backward_statistics, share_forward_statistics
from dagexec.training.data_parallel.replica_devices import REPLICA, ReplicaDevice
from dagexec.training.model_helper import ModelHelper
from dagexec.training.optimizer import Optimizer

InputBuilder = Callable[[ModelHelper], object]
DRAW = "data_parallel_draw"
"""The blob that says which micro-batch of the training this is, counted over all steps and devices, one int64."""

ForwardBuilder = Callable[[ModelHelper], Sequence[str] | str]


@dataclass(frozen=True)
class Replica:
    """The operators of one device, with blobs as the builders call them, in no scope.

    Attributes:
        place: where it will be.
        helper: the model helper it was built with.
        losses: the blobs that are minimized.
        gradients: the gradient of each trained parameter.
        init: operators that fill its parameters and its optimizer's state.
        forward_backward: operators of a step up to the gradients.
        update: operators that change the parameters.
        shares_statistics: batch normalization is over the batches of all devices.
    """

    place: ReplicaDevice
    helper: ModelHelper
    losses: tuple[str, ...]
    gradients: dict[str, Gradient]
    init: tuple[OperatorDef, ...]
    forward_backward: tuple[OperatorDef, ...]
    update: tuple[OperatorDef, ...]
    shares_statistics: bool

    @property
    def inputs(self) -> tuple[str, ...]:
        """The blobs that are fed."""
        return tuple(self.helper.inputs)

    @property
    def computed(self) -> tuple[str, ...]:
        """The parameters that a step changes and no gradient does."""
        return tuple(self.helper.computed_parameters)

    @cached_property
    def draws(self) -> bool:
        """True when masks are drawn by DRAW."""
        return any(DRAW in definition.input for definition in self.forward_backward)


def build_replica(
    place: ReplicaDevice,
    helper: ModelHelper,
    build_inputs: InputBuilder,
    build_forward: ForwardBuilder,
    optimizer: Optimizer,
    batches: int,
) -> Replica:
    """Build the model; batch normalization is over `batches` devices, if that is more than one.

    Raises SchemaError when the builder names no loss, and what the gradients and the optimizer raise.
    """
    with helper.device_scope(REPLICA):
        build_inputs(helper)
        built = build_forward(helper)
    losses = (built,) if isinstance(built, str) else tuple(built or ())
    if not losses:
        raise SchemaError(f"model {helper.name!r} on {place}: the forward builder must return the names of its losses")
    shares = batches > 1 and share_forward_statistics(helper.net, batches)
    gradients = helper.add_gradient_operators(losses)
    if shares:
        share_backward_statistics(helper.net)
    count = len(helper.net.op)
    with helper.device_scope(REPLICA):
        optimizer.add_updates(helper)
    return Replica(
        place,
        helper,
        losses,
        gradients,
        tuple(helper.init_net.op),
        tuple(map(_drawing_apart, helper.net.op[:count])),
        tuple(helper.net.op[count:]),
        shares,
    )


def _drawing_apart(definition: OperatorDef) -> OperatorDef:
    """A Dropout by the count of micro-batches in place of that of steps, so that each has a mask of its own.

    The mask goes by the name that the model has for the layer, in no scope, so that it is the same on all devices.
    """
    drawn = OperatorDef()
    drawn.CopyFrom(definition)
    if definition.type == "Dropout" and list(definition.input[1:]) == [ITERATION]:
        drawn.input[1] = DRAW
        if not arguments_of(definition).string("drawn_as", ""):
            drawn.arg.append(make_argument("drawn_as", definition.output[0]))
    return drawn


def check_same(replicas: Sequence[Replica]) -> None:
    """Raise SchemaError unless all replicas have the inputs, parameters, fillers and operators of the first.

    The message lists the differences.
    """
    first = replicas[0]
    for other in replicas[1:]:
        differences = _parameter_differences(first, other) or _operator_differences(first, other)
        if differences:
            raise SchemaError(
                f"the builders made different models on {first.place} and {other.place}: " + "; ".join(differences)
            )


def _parameter_differences(first: Replica, other: Replica) -> list[str]:
    differences = []
    inputs = (first.helper.inputs, other.helper.inputs)
    if inputs[0] != inputs[1]:
        differences.append(f"the inputs are {dict(inputs[0])} and {dict(inputs[1])}")
    for kind in ("parameters", "computed_parameters"):
        shapes, others = dict(getattr(first.helper, kind)), dict(getattr(other.helper, kind))
        for name in dict.fromkeys([*shapes, *others]):
            if name not in others or name not in shapes:
                where = first.place if name in shapes else other.place
                differences.append(f"parameter {name!r} is only on {where}")
            elif shapes[name] != others[name]:
                differences.append(
                    f"parameter {name!r} has shape {shapes[name]} on {first.place} and {others[name]} on {other.place}"
                )
    if differences:
        return differences
    mine, theirs = ({name: op for op in replica.init for name in op.output} for replica in (first, other))
    for name in dict.fromkeys([*mine, *theirs]):
        if name not in theirs or name not in mine:
            differences.append(f"{name!r} is only filled on {first.place if name in mine else other.place}")
        elif _spelled(mine[name]) != _spelled(theirs[name]):
            differences.append(f"parameter {name!r} is filled in another way")
    return differences


def _operator_differences(first: Replica, other: Replica) -> list[str]:
    pairs = zip_longest((*first.forward_backward, *first.update), (*other.forward_backward, *other.update))
    for index, (mine, theirs) in enumerate(pairs):
        if mine is None or theirs is None:
            where, which = (first.place, mine) if theirs is None else (other.place, theirs)
            return [f"operator {index}, {which.type} {list(which.output)}, is only on {where}"]
        if _spelled(mine) != _spelled(theirs):
            return [
                f"operator {index} is {mine.type} {list(mine.output)} on {first.place} and {theirs.type} "
                f"{list(theirs.output)} on {other.place}, or has other inputs or arguments"
            ]
    return []


def _spelled(definition: OperatorDef) -> bytes:
    """The operator as bytes, without its device."""
    plain = OperatorDef()
    plain.CopyFrom(definition)
    seed = plain.device_option.random_seed
    plain.ClearField("device_option")
    return plain.SerializeToString(deterministic=True) + str(seed).encode()
