"""NCCL through CuPy: the communicators of several devices of one process, and sums over them.

One thread asks for all devices, between `groupStart` and `groupEnd`, so that no two devices can ever wait for each
other in different collectives. NCCL's sums have one order for one group of devices and one size: the same bytes in
every run, and on every device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from dagexec.core.device import Device
from dagexec.core.runtime import DeviceRuntime, runtime_of
from dagexec.core.stream import Stream
from dagexec.devices.cuda.arrays import address
from dagexec.devices.cuda.binding import nccl
from dagexec.errors import DeviceError
from dagexec.platform.threads import threads

logger = logging.getLogger("dagexec")

_TYPES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "float16": "NCCL_FLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "bfloat16": "NCCL_BFLOAT16",
}


_making = threads().lock()


def has_nccl() -> bool:
    """True when CuPy has found NCCL. The log says once when it has not, and how to install it."""
    library = nccl()
    available = bool(getattr(library, "available", False))
    if not available:
        _say_missing()
    return available


@cache
def _say_missing() -> None:
    logger.warning(
        "NCCL is not installed: tensors are summed over CUDA devices by peer copies; "
        "install it with: pip install nvidia-nccl-cu12 (CUDA 12), or nvidia-nccl-cu13 (CUDA 13)"
    )


class Communicators:
    """The communicators of a few devices, and a stream of each that their collectives go to, one after the other.

    Attributes:
        devices: the devices, by rank.
        streams: one a device.
    """

    def __init__(self, devices: Sequence[Device], forget: Callable[[], object]) -> None:
        """Raises DeviceError when NCCL cannot connect them. `forget` is called when they are of no use any
        more."""
        self.devices = tuple(devices)
        library: Any = nccl()
        self._library = library
        self._forget = forget
        self._lock = threads().lock()
        try:
            self._members = library.NcclCommunicator.initAll([device.index for device in devices])
        except library.NcclError as error:
            raise DeviceError(f"NCCL cannot connect {', '.join(map(str, devices))}: {error}") from error
        self._runtimes: list[DeviceRuntime] = [runtime_of(device) for device in devices]
        self.streams: list[Stream] = [runtime.lease() for runtime in self._runtimes]

    def all_reduce(self, arrays: Sequence[tuple[Any, Any]], here: Stream) -> None:
        """The sum of the first arrays of all pairs, in all second ones; a pair a device, packed and of one type.

        Comes after what is on `here`, and before what is put there afterwards. Raises DeviceError.
        """
        kind = getattr(self._library, _TYPES[np.dtype(arrays[0][0].dtype).name])
        with self._lock:
            before = runtime_of(here.device).event("what comes before an all-reduce")
            before.record(here)
            for stream in self.streams:
                stream.wait(before)
            self._launch(arrays, kind)
            for runtime, stream in zip(self._runtimes, self.streams, strict=True):
                after = runtime.event(f"an all-reduce on {stream.name}")
                after.record(stream)
                here.wait(after)

    def _launch(self, arrays: Sequence[tuple[Any, Any]], kind: int) -> None:
        library = self._library
        try:
            library.groupStart()
            try:
                for (x, y), member, stream in zip(arrays, self._members, self.streams, strict=True):
                    pointer: int = stream.pointer  # type: ignore[attr-defined]
                    member.allReduce(address(x), address(y), int(x.size), kind, library.NCCL_SUM, pointer)
            finally:
                library.groupEnd()
        except library.NcclError as error:
            self._forget()
            for member in self._members:
                member.abort()
            names = ", ".join(map(str, self.devices))
            raise DeviceError(f"the all-reduce over {names} failed: {error}") from error


def communicators(devices: Sequence[Device]) -> Communicators:
    """Those of `devices`, made at the first call for them. Raises DeviceError without NCCL,
    and when it cannot connect them."""
    if not has_nccl():
        raise DeviceError("NCCL is not installed; install it with: pip install nvidia-nccl-cu12")
    key = tuple(devices)
    made = runtime_of(key[0]).once("nccl communicators", dict[tuple[Device, ...], Communicators])
    with _making:
        if key not in made:
            made[key] = Communicators(key, lambda: made.pop(key, None))
        return made[key]
