"""The stand-ins for `cupy.cuda.driver` and `cupy.RawModule`: kernels, their launches and their attributes."""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path
from typing import Any

from tests.cuda.emulated.compiler import EmulatedKernel, build
from tests.cuda.emulated.errors import CUDADriverError, CUDARuntimeError, EmulationError
from tests.cuda.emulated.machine import Machine, Operation
from tests.cuda.emulated.races import Touch

VALUE, READ, WRITTEN = 0, 1, 2


class Function:
    """`cupy.cuda.Function`: a kernel, loaded on a device."""

    def __init__(self, machine: Machine, kernel: EmulatedKernel) -> None:
        self._machine, self.kernel, self.device = machine, kernel, machine.device
        self.most_shared = 49152
        self.ptr = machine.new_handle(self)


class RawKernel:
    """`cupy.RawKernel`, as far as its Function is concerned."""

    def __init__(self, machine: Machine, kernel: EmulatedKernel) -> None:
        self.name = kernel.name
        self.kernel = Function(machine, kernel)


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
            machine.submit(stream, Operation(kernel.name, step, function.device))
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


def raw_module(machine: Machine) -> type:
    """The class `cupy.RawModule` of a machine."""

    class RawModule:
        def __init__(
            self,
            code: str | None = None,
            *,
            path: str | None = None,
            options: tuple[str, ...] = (),
            backend: str = "nvrtc",
            translate_cucomplex: bool = False,
            enable_cooperative_groups: bool = False,
            name_expressions: Any = None,
            jitify: bool = False,
        ) -> None:
            assert code is not None
            keep_source(code)
            self._library: ctypes.CDLL = build(code)

        def get_function(self, name: str) -> RawKernel:
            return RawKernel(machine, EmulatedKernel(self._library, name))

    return RawModule
