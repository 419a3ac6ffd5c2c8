"""CudaContext: the Context of CUDA devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Context, Device
from dagexec.core.runtime import Stream, runtime_of
from dagexec.devices.cuda.arrays import is_on_device
from dagexec.devices.cuda.copies import place_of
from dagexec.devices.cuda.runtime import CudaRuntime
from dagexec.errors import DeviceError

Array = npt.NDArray[Any]


def cuda_runtime(device: Device) -> CudaRuntime:
    """The runtime of a CUDA device. Raises DeviceError when there is no such device here."""
    runtime = runtime_of(device)
    if not isinstance(runtime, CudaRuntime):
        raise DeviceError(f"{device} is not a CUDA device")
    return runtime


class CudaContext(Context):
    """A handle on a CUDA device. Its work goes to the calling thread's current stream of that device.

    Attributes:
        runtime: the device's.
    """

    def __init__(self, device: Device, seed: int | None = None) -> None:
        """Raises DeviceError when there is no such device here."""
        super().__init__(device, seed)
        self.runtime = cuda_runtime(device)
        self._streams: dict[int, Stream] = {}

    def allocate(self, nbytes: int) -> npt.NDArray[Any]:
        """New device memory, as a `cupy.ndarray` of bytes."""
        return self.runtime.allocate(nbytes)

    def free(self, buffer: npt.NDArray[Any]) -> None:
        """Nothing to do: device memory is free when the last array on it is gone."""

    def copy_within(self, destination: Array, source: Array) -> None:
        """Copy, and return when it is done; either side may be a host array. See `CudaRuntime.copy_now`."""
        self.runtime.copy_now(destination, source)

    def switch(self, stream: int = 0) -> None:
        """Make stream `stream` of this context the calling thread's current one of the device, leased on first use."""
        if stream not in self._streams:
            self._streams[stream] = self.runtime.lease()
        self.runtime.set_current(self._streams[stream])

    def finish(self) -> None:
        """Block until the calling thread's current stream is idle. Raises DeviceError if its work failed."""
        stream = self.runtime.stream_in_use()
        if stream is None:
            return
        stream.synchronize()
        failure = stream.failure
        if failure is not None:
            raise DeviceError(f"{stream.name}: {failure.label} failed: {failure.error}") from failure.error


def copy_blocking(destination: Array, source: Array) -> None:
    """Copy between a CUDA device and the host, or another CUDA device, and return when it is done."""
    device = place_of(destination if is_on_device(destination) else source)
    if device == CPU:  # strings stay on the host
        np.copyto(destination, source)
        return
    cuda_runtime(device).copy_now(destination, source)
