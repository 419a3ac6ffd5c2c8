"""Putting the stand-in in place of CuPy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from dagexec.core.cuda.binding import cupy, installed
from dagexec.core.cuda.kernels import forget_functions
from dagexec.core.device import Device
from dagexec.core.runtime import install_runtime
from tests.cuda.emulated.runtime import DEVICES, new_cupy


@contextmanager
def emulated() -> Iterator[None]:
    """Within it, there are emulated CUDA devices."""
    with installed(cupy=new_cupy()):
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    forget_functions()
    for index in range(DEVICES):
        install_runtime(Device("cuda", index), None)


@contextmanager
def cuda_devices() -> Iterator[None]:
    """Within it, there are CUDA devices: those of this machine, or else emulated ones."""
    if has_gpu():
        yield
    else:
        with emulated():
            yield


@cache
def has_gpu() -> bool:
    """True where CuPy finds a device."""
    try:
        return bool(cupy().cuda.runtime.getDeviceCount())
    except Exception:
        return False
