"""The simulated device `sim:N`: streams, events and device memory on the host, with no GPU.

Kernels are the host steps of operators, done later by a `Driver`: on real threads, or in an order a seed decides.
Memory cannot be touched by the host, a virtual clock models latencies, and faults can be planned;
`docs/simulated-device.md` says what is modeled and what is not. `simulated` and `configure` set a device up;
`sim_runtime` gives the one in force.
"""

from dagexec.devices.sim.clock import host_time, set_host_time
from dagexec.devices.sim.command_queue import Driver
from dagexec.devices.sim.driver import SeededDriver, ThreadDriver, enter_device, is_device_thread
from dagexec.devices.sim.event import SimEvent
from dagexec.devices.sim.faults import Fault, RandomFaults
from dagexec.devices.sim.handle import LibraryHandle
from dagexec.devices.sim.installation import configure, simulated
from dagexec.devices.sim.memory import SimArray, unwrapped
from dagexec.devices.sim.runtime import SimRuntime, sim_runtime
from dagexec.devices.sim.settings import SimSettings
from dagexec.devices.sim.stream import SimStream

__all__ = [
    "Driver",
    "Fault",
    "LibraryHandle",
    "RandomFaults",
    "SeededDriver",
    "SimArray",
    "SimEvent",
    "SimRuntime",
    "SimSettings",
    "SimStream",
    "ThreadDriver",
    "configure",
    "enter_device",
    "host_time",
    "is_device_thread",
    "set_host_time",
    "sim_runtime",
    "simulated",
    "unwrapped",
]
