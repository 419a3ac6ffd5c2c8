"""Which settings a simulated device has: `configure` for good, `simulated` for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from dagexec.core.device import Device
from dagexec.core.runtime import install_runtime, installed_runtime
from dagexec.devices.sim.clock import set_host_time
from dagexec.devices.sim.runtime import SimRuntime
from dagexec.devices.sim.settings import SimSettings
from dagexec.errors import DeviceError


def configure(device: Device | str, settings: SimSettings) -> SimRuntime:
    """Give `device` these settings: a new runtime, with no streams and no memory in use, and the old one closed.

    Tensors made before stay where they were; do not use them together with new ones. Raises DeviceError for what is no
    simulated device.
    """
    place = _simulated_device(device)
    before = installed_runtime(place)
    runtime = SimRuntime(place, settings)
    install_runtime(place, runtime)
    if isinstance(before, SimRuntime):
        before.close()
    return runtime


@contextmanager
def simulated(device: Device | str | Sequence[Device | str] = "sim:0", **settings: Any) -> Iterator[SimRuntime]:
    """Within it, `device`, or each of several, has `SimSettings(**settings)`; several share a driver.

    Gives the runtime, of the first device if there are several. The calling thread's virtual time begins at 0.
    Afterwards what is still on the streams is abandoned, their threads are ended, and each device is what it was
    before.
    """
    places = [_simulated_device(d) for d in ([device] if isinstance(device, Device | str) else device)]
    if not places:
        raise DeviceError("simulated() needs a device")
    wanted = SimSettings(**settings)
    shared = replace(wanted, seed=None, driver=wanted.new_driver("sim")) if len(places) > 1 else wanted
    before = [(place, installed_runtime(place)) for place in places]
    runtimes = [SimRuntime(place, shared) for place in places]
    for runtime in runtimes:
        install_runtime(runtime.device, runtime)
    set_host_time(0.0)
    try:
        yield runtimes[0]
    finally:
        for place, earlier in before:
            install_runtime(place, earlier)
        for runtime in runtimes:
            runtime.abandon_all()
        for runtime in runtimes:
            runtime.close()
        if shared.driver is not None and wanted.driver is None:
            shared.driver.close()


def _simulated_device(device: Device | str) -> Device:
    place = Device.parse(device) if isinstance(device, str) else device
    if place.kind != "sim":
        raise DeviceError(f"{place} is not a simulated device")
    return place
