"""What CUDA, CuPy and the driver say is wrong, as errors of ours that name the device and the command that mends it."""

from __future__ import annotations

import os
from typing import Any

from dagexec.core.device import Device
from dagexec.devices.cuda.binding import INSTALL, cupy
from dagexec.errors import DagexecError, DeviceError, ResourceError

SUCCESS = 0
OUT_OF_MEMORY = 2
NOT_READY = 600
PEER_ACCESS_ALREADY_ENABLED = 704
_INSUFFICIENT_DRIVER = 35
_NO_DEVICE = 100
_STICKY = frozenset({214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 999})
_CAPTURING = frozenset(range(900, 911))
_DRIVER = "sudo apt-get install nvidia-driver-580 (or https://www.nvidia.com/drivers), and check with: nvidia-smi"


def status_of(error: BaseException) -> int | None:
    """The number of an error of the CUDA runtime or driver (cudaError_t, CUresult); None for any other error."""
    status = getattr(error, "status", None)
    return status if isinstance(status, int) else None


def is_sticky(status: int | None) -> bool:
    """True for errors after which nothing works on the device any more until the process ends.

    Source: "CUDA Runtime API", the errors that "leave the process in an inconsistent state".
    """
    return status in _STICKY


def is_out_of_memory(error: BaseException) -> bool:
    """True when the device has no memory left."""
    return status_of(error) == OUT_OF_MEMORY or isinstance(error, MemoryError)


def device_error(device: Device, error: BaseException, doing: str) -> BaseException:
    """`error` as one of ours, `doing` naming what it came of; an error that is not CUDA's is returned as it is."""
    status = status_of(error)
    if isinstance(error, DagexecError) or (status is None and not isinstance(error, MemoryError)):
        return error
    found: DagexecError
    if is_out_of_memory(error):
        found = ResourceError(f"{device}: out of memory: {doing}: {error}")
    elif is_sticky(status):
        found = DeviceError(
            f"{device}: {doing}: {error}. Nothing works on this device any more: the process has to be restarted. To "
            "find the kernel, run it again with: CUDA_LAUNCH_BLOCKING=1"
        )
    elif status in _CAPTURING:
        found = DeviceError(f"{device}: {doing}: cannot be part of a capture: {error}")
    else:
        found = DeviceError(f"{device}: {doing}: {error}")
    found.__cause__ = error
    return found


def check_device(device: Device) -> None:
    """Raise DeviceError, with the command that mends it, unless CUDA has this device."""
    count = device_count()
    if not 0 <= device.index < count:
        there = ", ".join(f"cuda:{index} ({device_name(index)})" for index in range(count))
        raise DeviceError(
            f"device {device} does not exist; this machine has {count}: {there}; list them with: nvidia-smi --list-gpus"
        )


def device_name(index: int) -> str:
    """What a device is called, such as "NVIDIA H100 80GB HBM3"."""
    name = cupy().cuda.runtime.getDeviceProperties(index)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def device_count() -> int:
    """How many devices CUDA has. Raises DeviceError, with the command that mends it, when it has none."""
    runtime: Any = cupy().cuda.runtime
    try:
        count = int(runtime.getDeviceCount())
    except Exception as error:
        raise DeviceError(_why_no_device(runtime, error)) from error
    if not count:
        raise DeviceError(_no_device_visible())
    return count


def _why_no_device(runtime: Any, error: Exception) -> str:
    status = status_of(error)
    if status == _NO_DEVICE:
        return _no_device_visible()
    if status != _INSUFFICIENT_DRIVER:
        return f"CUDA cannot be used: {error}; check with: nvidia-smi"
    driver, needed = _version(runtime, "driverGetVersion"), _version(runtime, "runtimeGetVersion")
    if not driver:
        return (
            f"CUDA cannot be used: there is no NVIDIA driver on this machine; install one with: {_DRIVER}; in a "
            "container, start it with: docker run --gpus all"
        )
    return (
        f"CUDA cannot be used: the NVIDIA driver serves CUDA {_dotted(driver)} and CuPy needs CUDA {_dotted(needed)}; "
        f"upgrade the driver with: {_DRIVER}; or {INSTALL}"
    )


def _no_device_visible() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return (
            f"CUDA sees no device, CUDA_VISIBLE_DEVICES is {visible!r}; let it see all with: unset CUDA_VISIBLE_DEVICES"
        )
    return "CUDA sees no device on this machine; check with: nvidia-smi (in a container, start it with --gpus all)"


def _version(runtime: Any, name: str) -> int:
    try:
        return int(getattr(runtime, name)())
    except Exception:
        return 0


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
