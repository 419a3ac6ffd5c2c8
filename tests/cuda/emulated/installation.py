"""Putting the stand-ins in place of CuPy and cuBLAS."""

from __future__ import annotations

import gc
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from dagexec.core.device import Device
from dagexec.core.runtime import install_runtime, installed_runtime
from dagexec.devices.cuda.binding import _loaded, cupy, installed
from dagexec.devices.cuda.kernels import forget_functions
from dagexec.devices.cuda.runtime import CudaRuntime
from tests.cuda.emulated.arrays import MemoryPointer, PinnedMemoryPointer, UnownedMemory, ndarray
from tests.cuda.emulated.cublas import CublasLibrary, CublasModule
from tests.cuda.emulated.driver import Driver, Function, Nvrtc, module_class
from tests.cuda.emulated.errors import OutOfMemoryError
from tests.cuda.emulated.machine import Machine
from tests.cuda.emulated.nccl import NcclModule
from tests.cuda.emulated.runtime import Runtime
from tests.cuda.emulated.streams import Classes


class Namespace:
    """What stands for a module."""

    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)


def new_cupy(machine: Machine) -> Any:
    """A module `cupy` of a machine."""
    runtime = Runtime(machine)
    classes = Classes(machine, runtime)
    library = CublasLibrary(machine)
    memory = Namespace(OutOfMemoryError=OutOfMemoryError, UnownedMemory=UnownedMemory, MemoryPointer=MemoryPointer)
    cuda = Namespace(
        runtime=runtime, driver=Driver(machine), cublas=CublasModule(library, classes), memory=memory,
        nccl=NcclModule(machine), nvrtc=Nvrtc(),
        Device=classes.Device, Stream=classes.Stream, ExternalStream=classes.ExternalStream, Event=classes.Event,
        Graph=classes.Graph, Memory=classes.Memory, PinnedMemory=classes.PinnedMemory, UnownedMemory=UnownedMemory,
        MemoryPointer=MemoryPointer, PinnedMemoryPointer=PinnedMemoryPointer, Function=Function,
        Module=module_class(machine),
        alloc_pinned_memory=lambda size: PinnedMemoryPointer(classes.PinnedMemory(size), 0),
        get_current_stream=classes.get_current_stream, get_elapsed_time=classes.get_elapsed_time,
    )  # fmt: skip
    memory.Memory = classes.Memory
    found = Namespace(__version__="14.2.0", cuda=cuda, ndarray=ndarray)
    found.library = library
    return found


@cache
def has_compiler() -> bool:
    """True where kernels can be compiled for the processor that this process runs on, which may be emulated."""
    if shutil.which("g++") is None:
        return False
    target = subprocess.run(["g++", "-dumpmachine"], capture_output=True, text=True, check=False).stdout
    return target.startswith(platform.machine())


@contextmanager
def emulated(devices: int = 2, **settings: Any) -> Iterator[Machine]:
    """Within it, there are emulated CUDA devices; `settings` are a Machine's.

    At the end writes beside blocks are raised, and races that nobody asked about. Without g++ the test is skipped.
    """
    if not has_compiler():
        pytest.skip("the emulation of CUDA compiles kernels with g++, which is not installed")
    machine = Machine(devices, **settings)
    module = new_cupy(machine)
    places = [Device("cuda", index) for index in range(devices)]
    before = [installed_runtime(place) for place in places]  # an emulation may be within another
    with pytest.MonkeyPatch.context() as patch, installed(cupy=module, cublas=module.library):
        if isinstance(_loaded.get("cudnn"), ModuleType):
            _loaded.pop("cudnn")
        patch.setitem(sys.modules, "cudnn", None)  # the real one would take an emulated stream for a pointer
        forget_functions()
        for place in places:
            install_runtime(place, None)
        try:
            yield machine
            module.cuda.nccl._check()
            machine.check()
        finally:
            forget_functions()
            for place, earlier in zip(places, before, strict=True):
                runtime = installed_runtime(place)
                if isinstance(runtime, CudaRuntime):
                    runtime.close()
                install_runtime(place, earlier)
            gc.collect() if machine.asynchronous else None
            machine.close()


@contextmanager
def cuda_devices() -> Iterator[None]:
    """Within it, there are CUDA devices: those of this machine, or else emulated ones."""
    if has_gpu():
        yield
    else:
        with emulated(record=False):
            yield


@cache
def has_gpu() -> bool:
    """True where CuPy finds a device."""
    try:
        return bool(cupy().cuda.runtime.getDeviceCount())
    except Exception:
        return False
