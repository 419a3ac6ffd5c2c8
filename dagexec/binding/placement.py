"""A model's net on a device: which of its operators run there, and copies between these and what stays on the host."""

from __future__ import annotations

from dagexec.core.device import CPU, Device
from dagexec.core.dtypes import FLOAT32
from dagexec.core.inference import Probed, probed_net
from dagexec.core.model import InputInfo, Model
from dagexec.core.program import Program
from dagexec.core.runtime import kind_of
from dagexec.core.schema import TensorType
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.scheduler.plan.copies import insert_copies, names_devices

_OPEN = 1  # what a size counts as that each run chooses; types of elements do not depend on it


def placed_net(model: Model, device: Device, parameters: Workspace) -> Program:
    """The net with copies where blobs cross devices; operators that name no device run on `device`.

    What it has no type of elements for stays on the host. Inputs are fed there. Parameters that the net never writes
    are copied to the devices that read them, here and once.
    """
    net = model.program
    if device == CPU and not names_devices(net):
        return net
    if device != CPU:
        net = _left_on_host(net.with_device(device), model, device, parameters)
    written = {name for definition in net.op for name in definition.output}
    on_host = set(parameters.blobs()) | set(model.inputs)
    constants = frozenset(parameters.blobs()) - written - set(model.inputs)
    placed = insert_copies(net, lambda name: CPU if name in on_host else None, constants)
    if placed.constants.op:
        parameters.run_net_once(placed.constants)
    return placed.net


def _left_on_host(net: Program, model: Model, device: Device, parameters: Workspace) -> Program:
    """Those operators name the host that read or write elements which `device` has no type for."""
    holds = kind_of(device).holds
    if holds is None:
        return net
    given = {name: Probed.of_types([_type(info)]) for name, info in model.inputs.items()}
    for name in parameters.blobs():
        value = parameters.get_blob(name).value
        if name not in given and isinstance(value, Tensor) and not value.is_empty:
            given[name] = Probed.of_constant(value.array, 1)
    known = probed_net(net.op, given, 1)
    metas = {name: one.types[0].meta for name, one in known.items() if one.types[0] is not None}
    others = {name for name, meta in metas.items() if not holds(meta)}
    host = CPU.to_option()
    return net.with_operators(
        one if one.device_option or others.isdisjoint((*one.input, *one.output)) else one.changed(device_option=host)
        for one in net.op
    )


def _type(info: InputInfo) -> TensorType | None:
    """What an input may be; None for a sequence, an optional and one of unknown shape."""
    if info.shape is None or info.is_sequence or info.is_optional:
        return None
    return TensorType(tuple(_OPEN if size is None else size for size in info.shape), info.dtype or FLOAT32)
