"""From a training net to the net for inference inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagexec.core.arguments import make_argument
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import schema_of
from dagexec.training.engines import BATCH_INVARIANT

_WITH_LOSS: Mapping[str, Mapping[str, int]] = {
    "SoftmaxWithLoss": {},
    "SpatialSoftmaxWithLoss": {"axis": 1, "single_axis": 1},
}
"""Operators that compute a softmax along with a loss, and the arguments of the Softmax that computes the same."""


def prediction_net(net: NetDef, operators: int | None, outputs: Sequence[str]) -> NetDef:
    """What of the first `operators` operators of `net` (by default all) computes `outputs`, in test mode.

    A softmax that is computed along with a loss is computed alone. The inputs of the result are the blobs that it reads
    and does not write before.
    """
    made = NetDef(name=f"{net.name}_predict", external_output=outputs)
    if net.HasField("device_option"):
        made.device_option.CopyFrom(net.device_option)
    needed = set(outputs)
    kept: list[OperatorDef] = []
    for definition in reversed(net.op[:operators]):
        if needed.isdisjoint(definition.output):
            continue
        tested = _in_test_mode(definition, needed)
        needed.difference_update(tested.output)
        needed.update(tested.input)
        kept.append(tested)
    made.op.extend(reversed(kept))
    made.external_input.extend(name for name in _inputs_in_order(net, needed))
    return made


def _inputs_in_order(net: NetDef, needed: set[str]) -> list[str]:
    declared = [name for name in net.external_input if name in needed]
    return declared + sorted(needed.difference(declared))


def _in_test_mode(definition: OperatorDef, needed: set[str]) -> OperatorDef:
    made = OperatorDef()
    made.CopyFrom(definition)
    del made.arg[:]
    made.arg.extend(arg for arg in definition.arg if arg.name != BATCH_INVARIANT)
    if made.type in _WITH_LOSS and made.output[1] not in needed:
        axes = [arg for arg in definition.arg if arg.name == "axis" and made.type == "SoftmaxWithLoss"]
        axes += [make_argument(name, value) for name, value in _WITH_LOSS[made.type].items()]
        made.type = "Softmax"
        del made.input[1:], made.output[1:]
        del made.arg[:]
        made.arg.extend(axes)
    results = schema_of(made.type).results or len(made.output)
    if needed.isdisjoint(made.output[results:]):
        del made.output[results:]
    for arg in made.arg:
        if arg.name == "is_test":
            arg.CopyFrom(make_argument("is_test", 1))
    if made.type == "SpatialBN":
        del made.input[5:]
    if made.type == "Dropout":
        del made.input[1:]
        made.device_option.ClearField("random_seed")
    return made
