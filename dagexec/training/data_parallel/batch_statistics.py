"""Batch normalization over the batches of all devices.

Each device computes the sums of its own batch (ChannelStats), an Allreduce makes them those of all batches, and
SpatialBN normalizes by them; likewise the sums in the gradient (ChannelBackpropStats). So the statistics, and their
gradients, are those of one device that has all the images.
"""

from __future__ import annotations

from dagexec.core.arguments import make_argument
from dagexec.core.node import arguments_of
from dagexec.core.proto import NetDef, OperatorDef

COMMON_WORLD = "data_parallel_world"
"""The blob with the ranks over which an Allreduce that is put in here goes."""


def share_forward_statistics(net: NetDef, batches: int) -> bool:
    """Rewrite every SpatialBN that computes statistics; False when there is none."""
    operators: list[OperatorDef] = []
    is_shared = False
    for definition in net.op:
        arguments = arguments_of(definition)
        if definition.type == "SpatialBN" and not arguments.bool("is_test") and len(definition.input) == 5:
            is_shared = True
            sums = [f"{definition.output[0]}_sums", f"{definition.output[0]}_sumsq"]
            statistics = OperatorDef(type="ChannelStats", input=definition.input[:1], output=sums)
            statistics.arg.extend(arg for arg in definition.arg if arg.name == "order")
            if definition.HasField("device_option"):
                statistics.device_option.CopyFrom(definition.device_option)
            normalized = OperatorDef()
            normalized.CopyFrom(definition)
            normalized.input.extend(sums)
            normalized.arg.append(make_argument("num_batches", batches))
            operators += [statistics, _all_reduce(sums), normalized]
        else:
            operators.append(definition)
    if is_shared:
        _replace(net, operators)
        net.external_input.append(COMMON_WORLD)
    return is_shared


def share_backward_statistics(net: NetDef) -> None:
    """Sum what every ChannelBackpropStats computes over all devices."""
    operators: list[OperatorDef] = []
    for definition in net.op:
        operators.append(definition)
        if definition.type == "ChannelBackpropStats":
            operators.append(_all_reduce(list(definition.output)))
    _replace(net, operators)


def is_shared_sum(definition: OperatorDef) -> bool:
    """True for an Allreduce that was put in here."""
    return definition.type == "Allreduce" and definition.input[0] == COMMON_WORLD


def _all_reduce(blobs: list[str]) -> OperatorDef:
    return OperatorDef(type="Allreduce", input=[COMMON_WORLD, *blobs], output=blobs)


def _replace(net: NetDef, operators: list[OperatorDef]) -> None:
    copies = []
    for definition in operators:
        copy = OperatorDef()
        copy.CopyFrom(definition)
        copies.append(copy)
    del net.op[:]
    net.op.extend(copies)
