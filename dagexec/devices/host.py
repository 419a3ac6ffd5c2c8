"""The host as a device: its memory, which every array of NumPy is in. Its work is done when a call returns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.runtime import DeviceRuntime, RuntimeStatistics
from dagexec.platform.host_memory import aligned_bytes, physical_bytes

Array = npt.NDArray[Any]


class HostRuntime(DeviceRuntime):
    """The host. It has no streams: nets call the steps of its operators."""

    in_host_memory = True

    def allocate(self, nbytes: int) -> Array:
        """Bytes on a cache line. Raises ResourceError when the system has no memory left."""
        return aligned_bytes(nbytes, "an allocation")

    def copy_now(self, destination: Array, source: Array) -> None:
        np.copyto(destination, source)

    def statistics(self) -> RuntimeStatistics:
        """What the machine has. The bytes of host memory in use are not counted."""
        return RuntimeStatistics(limit_bytes=physical_bytes())
