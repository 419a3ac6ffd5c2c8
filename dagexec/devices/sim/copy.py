"""Copies as kernels, between the host and simulated devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.runtime import check_copy
from dagexec.core.stream import Kernel
from dagexec.devices.sim.memory import device_of, unwrapped


def copy_kernel(destination: npt.NDArray[Any], source: npt.NDArray[Any]) -> Kernel:
    """What copies `source` to `destination`, each on the host or on a simulated device.

    Raises ShapeError when their shapes or dtypes differ.
    """
    check_copy(destination, source)
    step = partial(np.copyto, unwrapped(destination), unwrapped(source))
    return Kernel(step, f"copy from {device_of(source)} to {device_of(destination)}", copied_bytes=source.nbytes)
