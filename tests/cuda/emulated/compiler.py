"""Kernels compiled by g++, kept in a folder by the hash of their source, and run over every thread of every block."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

_HERE = Path(__file__).parent
_FOLDER = Path(os.environ.get("DAGEXEC_EMULATED_KERNELS", Path(tempfile.gettempdir()) / "dagexec-emulated-kernels"))
_LOOP = r"""
extern "C" { thread_local dim3_t threadIdx, blockIdx, blockDim, gridDim; }
extern "C" void run_blocks(void (*once)(void*, void**), void* kernel, void** parameters,
                           const unsigned int* grid, const unsigned int* block) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    for (unsigned bz = 0; bz < grid[2]; ++bz) for (unsigned by = 0; by < grid[1]; ++by)
    for (unsigned bx = 0; bx < grid[0]; ++bx)
    for (unsigned tz = 0; tz < block[2]; ++tz) for (unsigned ty = 0; ty < block[1]; ++ty)
    for (unsigned tx = 0; tx < block[0]; ++tx) {
        blockIdx = {bx, by, bz};
        threadIdx = {tx, ty, tz};
        once(kernel, parameters);
    }
}
"""
_KERNEL = re.compile(r'extern\s+"C"\s+__global__\s+void\s+(\w+)\s*\(')
_lock = threading.Lock()


class CompileError(Exception):
    """g++ refuses a kernel, for the reason it gives."""


def build(source: str) -> ctypes.CDLL:
    """The kernels of `source` as a library: for each, `NAME_call` and `NAME_sizes`. Raises CompileError."""
    shim = (_HERE / "shim.h").read_text()
    entries = "".join(
        f'extern "C" void {name}_call(void*, void** p) {{ call_kernel({name}, p); }}\n'
        f'extern "C" int {name}_sizes(int* s) {{ return parameter_sizes({name}, s); }}\n'
        for name in _KERNEL.findall(source)
    )
    return _library(shim + source + entries + _LOOP)


def _library(text: str) -> ctypes.CDLL:
    key = hashlib.sha256(text.encode()).hexdigest()[:24]
    target = _FOLDER / f"{key}.so"
    with _lock:
        if not target.exists():
            _FOLDER.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
                code, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
                code.write_text(text)
                options = ["-std=c++17", "-O1", "-fPIC", "-shared", "-fno-exceptions", "-ffp-contract=off"]
                result = subprocess.run(
                    ["g++", *options, "-fno-builtin-memcpy", "-w", str(code), "-o", str(made), "-lm"],
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                if result.returncode:
                    raise CompileError(result.stderr)
                made.replace(target)
    return ctypes.CDLL(str(target))


class EmulatedKernel:
    """A kernel of a library, with the sizes of its parameters."""

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._library = library
        sizes = (ctypes.c_int * 64)()
        count = getattr(library, f"{name}_sizes")(sizes)
        self.sizes = list(sizes[:count])

    def copied(self, parameters: int) -> list[bytes]:
        """The arguments that `parameters`, a void**, points to."""
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        return [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)]

    def run(self, arguments: Sequence[bytes], grid: Sequence[int], block: Sequence[int]) -> None:
        """Run it over all blocks."""
        held = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
        pointers = (ctypes.c_void_p * max(1, len(held)))(*map(ctypes.addressof, held))
        call = getattr(self._library, f"{self.name}_call")
        three = ctypes.c_uint * 3
        self._library.run_blocks(call, None, pointers, three(*grid), three(*block))
