"""Gradients of parameters in blobs of their own, for updates work in place on them.

The gradients of both inputs of Sum are that of its output, in one blob. Momentum writes its step there, weight decay
adds to it and clipping scales it, so two parameters must not share it; and a gradient that the caller gave, or that the
forward pass computed, is not the updates' to overwrite.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count

from dagexec.core.gradient import Gradient, SparseGradient
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef


def devices_of(init_net: NetDef) -> dict[str, DeviceOption]:
    """The devices of blobs that an init net fills, of those that name one."""
    return {
        blob: definition.device_option
        for definition in init_net.op
        for blob in definition.output
        if definition.HasField("device_option")
    }


def with_own_blobs(
    net: NetDef, gradients: Mapping[str, Gradient], forward: int, devices: Mapping[str, DeviceOption]
) -> dict[str, Gradient]:
    """The gradients of parameters, each in a blob that an operator behind the first `forward` makes for it alone.

    What is not so already is copied by operators appended to `net`, on the parameter's device. Of a sparse gradient
    that holds for its values: updates only read the indices.
    """
    free = {blob for definition in net.op[forward:] for blob in definition.output}
    taken = {blob for definition in net.op for blob in (*definition.input, *definition.output)}
    taken.update(net.external_input, net.external_output)
    owned: dict[str, Gradient] = {}
    for name, gradient in gradients.items():
        values = gradient.values if isinstance(gradient, SparseGradient) else gradient
        if values in free:
            free.remove(values)
            owned[name] = gradient
            continue
        suffix = "grad_values" if isinstance(gradient, SparseGradient) else "grad"
        target = _free_name(f"{name}_{suffix}", taken)
        taken.add(target)
        copy = OperatorDef(type="Copy", input=[values], output=[target], is_gradient_op=True)
        if name in devices:
            copy.device_option.CopyFrom(devices[name])
            copy.device_option.ClearField("random_seed")
        net.op.append(copy)
        owned[name] = SparseGradient(gradient.indices, target) if isinstance(gradient, SparseGradient) else target
    return owned


def _free_name(name: str, taken: Collection[str]) -> str:
    if name not in taken:
        return name
    return next(free for free in (f"_{name}_autosplit_{number}" for number in count()) if free not in taken)
