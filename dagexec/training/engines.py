"""Which engine the operators of a training net run on."""

from __future__ import annotations

from dagexec.core.device import CPU, Device
from dagexec.core.proto import NetDef
from dagexec.core.registry import registered_engines
from dagexec.ops.onednn.binding import library

ONEDNN = "ONEDNN"


def name_engines(net: NetDef, device: Device = CPU) -> None:
    """Have the operators of `net` on `device` that oneDNN can compute name its engine, if the library is there.

    `device` is the host, or what stands for it.
    An engine that is named already stays. What oneDNN refuses when it is prepared, such as float64, NumPy computes.
    """
    if library() is None:
        return
    for definition in net.op:
        option = definition.device_option if definition.HasField("device_option") else net.device_option
        if (
            Device.from_option(option) == device
            and not definition.engine
            and ONEDNN in registered_engines(definition.type)
        ):
            definition.engine = ONEDNN
