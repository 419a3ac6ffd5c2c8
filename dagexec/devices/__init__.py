"""The kinds of devices: the host, a simulated asynchronous device, and CUDA; and what one more kind is made of.

A kind registers here, by a line. What a simulated or a CUDA device needs is imported when the first one is used.
"""

from typing import TYPE_CHECKING

from dagexec.core.device import Device
from dagexec.core.runtime import DeviceKind, DeviceRuntime, RuntimeStatistics, register_kind, runtime_of
from dagexec.core.stream import Capture, Event, EventState, Kernel, Priority, Stream, StreamObserver
from dagexec.devices.host import HostRuntime
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    _cuda = LazyModule("dagexec.devices.cuda.runtime")
    _prelude = LazyModule("dagexec.devices.cuda.prelude")
    _sim = LazyModule("dagexec.devices.sim.runtime")
else:
    from dagexec.devices.cuda import prelude as _prelude
    from dagexec.devices.cuda import runtime as _cuda
    from dagexec.devices.sim import runtime as _sim

__all__ = [
    "Capture",
    "Device",
    "DeviceKind",
    "DeviceRuntime",
    "Event",
    "EventState",
    "Kernel",
    "Priority",
    "RuntimeStatistics",
    "Stream",
    "StreamObserver",
    "register_kind",
    "runtime_of",
]

register_kind(DeviceKind("cpu", 0, HostRuntime))
register_kind(
    DeviceKind("cuda", 1, lambda device: _cuda.CudaRuntime(device), lambda meta: meta.name in _prelude.C_TYPES)
)
register_kind(DeviceKind("sim", 20901, lambda device: _sim.SimRuntime(device)))
