"""What stands for Caffe2's GPUs: `cuda:i` for the GPU `i`, or simulated devices, `sim:i`, for scripts without a GPU."""

from __future__ import annotations

from dagexec.core.device import Device
from dagexec.core.proto import DeviceOption, NetDef
from dagexec.devices.cuda.errors import device_count
from dagexec.errors import DagexecError

_CUDA = 1


class _Simulated:
    """How many GPUs are simulated; None for those of the machine."""

    count: int | None = None


def simulate_gpus(count: int | None) -> None:
    """Have nets from here on find `count` GPUs, simulated ones; None for those of the machine."""
    _Simulated.count = count


def gpu_count() -> int:
    """How many GPUs there are."""
    if _Simulated.count is not None:
        return _Simulated.count
    try:
        return device_count()
    except DagexecError:
        return 0


def placed(option: DeviceOption) -> DeviceOption:
    """The device that stands for `option`."""
    if option.device_type != _CUDA or _Simulated.count is None:
        return option
    made = DeviceOption()
    made.CopyFrom(option)
    made.device_type = Device("sim", option.device_id).to_option().device_type
    return made


def place(net: NetDef) -> None:
    """Put what a net, or a net in an argument of its operators, has on GPUs on what stands for them."""
    if _Simulated.count is None:
        return
    options = [operator.device_option for operator in net.op if operator.HasField("device_option")]
    for option in [*options, net.device_option] if net.HasField("device_option") else options:
        option.CopyFrom(placed(option))
    for argument in (argument for operator in net.op for argument in operator.arg):
        for inner in (argument.n, *argument.nets) if argument.HasField("n") else argument.nets:
            place(inner)
