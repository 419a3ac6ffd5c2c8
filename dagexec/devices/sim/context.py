"""SimContext: the Context of simulated devices, and the copies to and from their memory."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Context, Device
from dagexec.core.runtime import Stream, runtime_of
from dagexec.devices.sim.memory import unwrapped
from dagexec.devices.sim.runtime import SimRuntime, place_of
from dagexec.errors import DeviceError

Array = npt.NDArray[Any]

MOST_DEVICES = 64


def sim_runtime(device: Device) -> SimRuntime:
    """The runtime of the simulated `device` now in force. Raises DeviceError for another kind."""
    runtime = runtime_of(device)
    if not isinstance(runtime, SimRuntime):
        raise DeviceError(f"{device} is not a simulated device")
    return runtime


def check_index(device: Device) -> None:
    """Raise DeviceError unless there is such a simulated device."""
    if not 0 <= device.index < MOST_DEVICES:
        raise DeviceError(f"device {device} does not exist; simulated devices are sim:0 to sim:{MOST_DEVICES - 1}")


class SimContext(Context):
    """A handle on a simulated device. Its work is what it launches on the calling thread's streams."""

    def __init__(self, device: Device, seed: int | None = None) -> None:
        """Raises DeviceError for an index of 64 or more."""
        check_index(device)
        super().__init__(device, seed)
        self._streams: dict[tuple[SimRuntime, int], Stream] = {}

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New device memory, as a `SimArray`."""
        return cast(npt.NDArray[np.uint8], sim_runtime(self.device).allocate(nbytes))

    def free(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Nothing to do: device memory is free when the last array on it is gone."""

    def copy_within(self, destination: Array, source: Array) -> None:
        """Copy, and return when it is done; either side may be a host array. See `SimRuntime.copy_now`."""
        if destination.shape != source.shape:
            source = np.broadcast_to(unwrapped(source), destination.shape)
        sim_runtime(self.device).copy_now(destination, source)

    def host_view(self, array: Array) -> Array:
        """The NumPy array inside a `SimArray`, for steps that run as kernels."""
        return unwrapped(array)

    def switch(self, stream: int = 0) -> None:
        """Make stream `stream` of this context the calling thread's current one of the device, leased on first use."""
        runtime = sim_runtime(self.device)
        found = self._streams.get((runtime, stream))
        if found is None:
            found = self._streams[runtime, stream] = runtime.lease()
        runtime.set_current(found)

    def finish(self) -> None:
        """Block until the calling thread's current stream is idle. Raises DeviceError if its work failed."""
        stream = sim_runtime(self.device).stream_in_use()
        if stream is None:
            return
        stream.synchronize()
        failure = stream.failure
        if failure is not None:
            raise DeviceError(f"{stream.name}: {failure.label} failed: {failure.error}") from failure.error


def copy_blocking(destination: Array, source: Array) -> None:
    """Copy between a simulated device and the host, or another simulated device, and return when it is done."""
    device = place_of(destination, source)
    if device == CPU:  # strings stay on the host
        np.copyto(destination, source)
        return
    sim_runtime(device).copy_now(destination, source)
