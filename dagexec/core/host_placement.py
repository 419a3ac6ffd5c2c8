"""A model placed on the host, whatever devices its files name.

A file that was made on a machine with GPUs says so in the device option of every operator. `dagexec.compile(...,
device="cpu")` runs it all the same. Copies between devices become copies within the host.
"""

from __future__ import annotations

from dataclasses import replace

from dagexec.core.device import CPU, Device
from dagexec.core.model import Model
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef


def model_on_host(model: Model) -> Model:
    """The model with no device in its nets; the same object when they name none."""
    init = None if model.init_net is None else net_on_host(model.init_net)
    net = net_on_host(model.net)
    return model if net is model.net and init is model.init_net else replace(model, net=net, init_net=init)


def net_on_host(net: NetDef) -> NetDef:
    """A copy of `net` that names no device, not in nets that its operators hold either; `net` where it names none.

    What else device options say, such as the seed of random numbers, stays.
    """
    if not _names_device(net):
        return net
    changed = NetDef()
    changed.CopyFrom(net)
    _clear(changed)
    return changed


def _names_device(net: NetDef) -> bool:
    if _is_elsewhere(net.device_option):
        return True
    return any(
        _is_elsewhere(definition.device_option) or any(map(_names_device, _nets_in(definition)))
        for definition in net.op
    )


def _nets_in(definition: OperatorDef) -> list[NetDef]:
    """The nets that an operator holds."""
    single = [arg.n for arg in definition.arg if arg.HasField("n")]
    return [*single, *(net for arg in definition.arg for net in arg.nets)]


def _is_elsewhere(option: DeviceOption) -> bool:
    return Device.from_option(option) != CPU


def _clear(net: NetDef) -> None:
    net.ClearField("device_option")
    for definition in net.op:
        definition.device_option.ClearField("device_type")
        definition.device_option.ClearField("device_id")
        for inner in _nets_in(definition):
            _clear(inner)
