"""The stand-ins for `cupy.cuda.driver`, `nvrtc` and `Module`: kernels, their launches and their attributes."""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

from tests.cuda.emulated.compiler import CompileError, EmulatedKernel, build
from tests.cuda.emulated.errors import CUDADriverError, CUDARuntimeError, EmulationError, NVRTCError
from tests.cuda.emulated.machine import Machine
from tests.cuda.emulated.races import Touch
from tests.cuda.emulated.work import Operation

VALUE, READ, WRITTEN = 0, 1, 2


class Function:
    """`cupy.cuda.Function`: a kernel, loaded on a device."""

    def __init__(self, machine: Machine, kernel: EmulatedKernel) -> None:
        self._machine, self.kernel, self.device = machine, kernel, machine.device
        self.most_shared = 49152
        self.ptr = machine.new_handle(self)


class Driver:
    """`cupy.cuda.driver`."""

    CUDADriverError = CUDADriverError
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def get_build_version(self) -> int:
        return 12090

    def funcSetAttribute(self, f: int, attribute: int, value: int) -> None:
        if attribute == 8:
            if value > 232448:
                raise CUDADriverError(1)
            self._machine.handle(f, Function).most_shared = value

    def launchKernel(
        self,
        f: int,
        grid_dim_x: int,
        grid_dim_y: int,
        grid_dim_z: int,
        block_dim_x: int,
        block_dim_y: int,
        block_dim_z: int,
        shared_mem_bytes: int,
        stream: int,
        kernel_params: int,
        extra: int,
    ) -> None:
        machine = self._machine
        try:
            machine.called("launchKernel", stream, f)
            function: Function = machine.handle(f, Function)
            kernel = function.kernel
            grid, block = (grid_dim_x, grid_dim_y, grid_dim_z), (block_dim_x, block_dim_y, block_dim_z)
            threads = block_dim_x * block_dim_y * block_dim_z
            wrong = not 0 < threads <= 1024 or block_dim_z > 64 or not 0 < grid_dim_x < 1 << 31
            if wrong or not (0 < grid_dim_y <= 65535 and 0 < grid_dim_z <= 65535):
                raise CUDARuntimeError(1)
            if shared_mem_bytes > function.most_shared:
                raise CUDARuntimeError(1)
            if function.device != machine.stream(stream).device:
                raise CUDARuntimeError(400)
            status = machine.fault("launch", kernel.name)
            if status is not None:
                raise CUDARuntimeError(status)
            arguments = kernel.copied(kernel_params)
            self._check_pointers(kernel, arguments)
            step = self._step(kernel, arguments, grid, block, shared_mem_bytes)
            machine.submit(stream, Operation(kernel.name, step, function.device, computes=True))
        except CUDARuntimeError as error:
            raise CUDADriverError(error.status) from error.__cause__

    def _check_pointers(self, kernel: EmulatedKernel, arguments: list[bytes]) -> None:
        machine = self._machine
        for number, (kind, value) in enumerate(zip(kernel.kinds, arguments, strict=True)):
            pointer = int.from_bytes(value, "little")
            if kind == VALUE or not pointer:
                continue
            block = machine.memories.find(pointer)
            if block is None or block.freed or not machine.reaches(machine.device, block):
                what = "no memory of a device" if block is None else f"in a {'freed ' * block.freed}{block}"
                raise EmulationError(f"kernel {kernel.name}: pointer {number} ({pointer:#x}) is {what}")

    def _step(self, kernel: EmulatedKernel, arguments: list[bytes], grid: Any, block: Any, shared: int) -> Any:
        track, table = self._machine.track, self._machine.memories.table()

        def run() -> list[Touch]:
            return kernel.run(arguments, grid, block, shared, table, track)

        return run


def keep_source(code: str) -> None:
    """Write what a kernel is compiled from into the folder DAGEXEC_KERNEL_SOURCES, for a check by NVRTC."""
    folder = os.environ.get("DAGEXEC_KERNEL_SOURCES")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, hashlib.sha256(code.encode()).hexdigest()[:24] + ".cu").write_text(code)


class Nvrtc:
    """`cupy.cuda.nvrtc`: what it makes of a source is the source, once g++ has accepted it."""

    NVRTCError = NVRTCError

    def __init__(self) -> None:
        self._programs: dict[int, str] = {}
        self._logs: dict[int, str] = {}
        self._numbers = itertools.count(1)

    def getVersion(self) -> tuple[int, int]:
        return 0, 0  # no real one's, as nothing that is kept of it may be taken for what a device can load

    def getSupportedArchs(self) -> tuple[int, ...]:
        return 75, 80, 90

    def createProgram(self, src: str, name: str, headers: object, include_names: object) -> int:
        number = next(self._numbers)
        self._programs[number] = src
        return number

    def compileProgram(self, prog: int, options: tuple[str, ...]) -> None:
        try:
            build(self._programs[prog])
        except CompileError as error:
            self._logs[prog] = str(error)
            raise NVRTCError(6) from error

    def getCUBIN(self, prog: int) -> bytes:
        return self._programs[prog].encode()

    def getPTX(self, prog: int) -> bytes:
        return self.getCUBIN(prog)

    def getProgramLog(self, prog: int) -> str:
        return self._logs.get(prog, "")

    def destroyProgram(self, prog: int) -> None:
        del self._programs[prog]


def module_class(machine: Machine) -> type:
    """The class `cupy.cuda.Module` of a machine."""

    class Module:
        def __init__(self) -> None:
            self._library: ctypes.CDLL | None = None

        def load(self, cubin: bytes) -> None:
            source = cubin.decode()
            self._library = build(source)
            keep_source(source)

        def get_function(self, name: str) -> Function:
            assert self._library is not None
            return Function(machine, EmulatedKernel(self._library, name))

    return Module
