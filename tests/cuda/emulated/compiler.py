"""Kernels compiled by g++, kept in a folder by the hash of their source, and run over every thread of every block."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.cuda.emulated.errors import EmulationError
from tests.cuda.emulated.memory import Block
from tests.cuda.emulated.races import Touch

_HERE = Path(__file__).parent
_FOLDER = Path(os.environ.get("DAGEXEC_EMULATED_KERNELS", Path(tempfile.gettempdir()) / "dagexec-emulated-kernels"))
_FUSED = ["-ffp-contract=fast", *(["-mfma"] if platform.machine() == "x86_64" else [])]
_FUSES = os.environ.get("DAGEXEC_EMULATED_FUSED", "0") == "1"
_OPTIONS = ["-std=c++17", "-fPIC", "-shared", *(_FUSED if _FUSES else ["-ffp-contract=off"]), "-w"]
"""With DAGEXEC_EMULATED_FUSED=1 a product and a sum that follow each other are rounded once, as on a GPU."""
_WATCHED = ["-O1", "-fsanitize=thread", "-nodefaultlibs", "--param", "tsan-instrument-func-entry-exit=0"]
"""Every access to memory calls a function, which blocks.cpp has."""
_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)\s*)?(\w+)\s*\('
)
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w\s]+?)\s+(\w+)\s*\[\s*\]\s*;")
_MESSAGE_ROOM = 512
_MAX_TOUCHES = 4096
ORDERS = {"forward": 0, "reverse": 1, "shuffle": 2}
_lock = threading.Lock()


class _Memory(ctypes.Structure):
    """As in blocks.cpp."""

    _fields_ = [
        ("bounds", ctypes.c_void_p),
        ("count", ctypes.c_ulong),
        ("track", ctypes.c_int),
        ("found", ctypes.c_void_p),
        ("most", ctypes.c_ulong),
        ("number", ctypes.c_ulong),
    ]


class CompileError(Exception):
    """g++ refuses a kernel, for the reason it gives."""


class KernelError(EmulationError):
    """A kernel did what is undefined on a GPU."""


def order() -> int:
    """In which order the threads of a block go on between barriers: DAGEXEC_EMULATED_ORDER, forward by default."""
    return ORDERS[os.environ.get("DAGEXEC_EMULATED_ORDER", "forward")]


def build(source: str) -> ctypes.CDLL:
    """The kernels of `source` as a library: for each, `NAME_call` and `NAME_parameters`. Raises CompileError."""
    _engine()
    entries = "".join(
        f'extern "C" void {name}_call(void*, void** of_) {{ call_kernel(::{name}, of_); }}\n'
        f'extern "C" int {name}_parameters(int* sizes_, int* kinds_) '
        f"{{ return describe_parameters(::{name}, sizes_, kinds_); }}\n"
        for name in dict.fromkeys(_KERNEL.findall(source))
    )
    code = _DYNAMIC.sub(r"\1* \2 = (\1*)emulated_dynamic_shared();", source)
    return _library(f'{_shim()}\n#line 1 "kernel"\n{code}\n{entries}', [*_WATCHED, "-fno-exceptions"])


@cache
def _shim() -> str:
    return (_HERE / "shim.h").read_text()


@cache
def _engine() -> ctypes.CDLL:
    """What runs blocks. Kernels find its symbols when they are loaded."""
    engine = _library((_HERE / "blocks.cpp").read_text(), ["-O2"], ctypes.RTLD_GLOBAL)
    engine.run_blocks.argtypes = [
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_uint,
        ctypes.c_void_p, ctypes.c_char_p, ctypes.c_ulong,
    ]  # fmt: skip
    return engine


def _library(text: str, options: Sequence[str], mode: int = ctypes.DEFAULT_MODE) -> ctypes.CDLL:
    key = hashlib.sha256("\0".join([*_OPTIONS, *options, text]).encode()).hexdigest()[:24]
    target = _FOLDER / f"{key}.so"
    if not target.exists():
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_FOLDER) as folder:
            code, made = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
            code.write_text(text)
            result = subprocess.run(
                ["g++", *_OPTIONS, *options, str(code), "-o", str(made), "-lm", "-lc"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            if result.returncode:
                raise CompileError(result.stderr)
            made.replace(target)
    with _lock:
        return ctypes.CDLL(str(target), mode)


class EmulatedKernel:
    """A kernel of a library.

    Attributes:
        sizes: bytes of its parameters.
        kinds: of each whether it is a value (0), a pointer to const (1) or another pointer (2).
    """

    def __init__(self, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self._library = library
        sizes, kinds = (ctypes.c_int * 256)(), (ctypes.c_int * 256)()
        count = getattr(library, f"{name}_parameters")(sizes, kinds)
        self.sizes, self.kinds = list(sizes[:count]), list(kinds[:count])
        self._call = ctypes.cast(getattr(library, f"{name}_call"), ctypes.c_void_p)

    def copied(self, parameters: int) -> list[bytes]:
        """The arguments that `parameters`, a void**, points to."""
        pointers = (ctypes.c_void_p * len(self.sizes)).from_address(parameters)
        return [ctypes.string_at(at, size) for at, size in zip(pointers, self.sizes, strict=True)]

    def run(
        self,
        arguments: Sequence[bytes],
        grid: Sequence[int],
        block: Sequence[int],
        shared_bytes: int = 0,
        table: tuple[np.ndarray[Any, Any], list[Block]] | None = None,
        track: bool = False,
    ) -> list[Touch]:
        """Run it over all blocks; what it touched, if that is tracked. Raises KernelError for what is undefined.

        `table` has the memory it may touch (see `Memories.table`); without one, all memory.
        """
        held = [ctypes.create_string_buffer(value, len(value)) for value in arguments]
        pointers = (ctypes.c_void_p * max(1, len(held)))(*map(ctypes.addressof, held))
        three = ctypes.c_uint * 3
        message = ctypes.create_string_buffer(_MESSAGE_ROOM)
        memory, blocks = _Memory(), list[Block]()
        if table is not None:
            bounds, blocks = table
            found = np.empty((_MAX_TOUCHES, 4) if track else (1, 4), np.uint64)
            memory.bounds, memory.count, memory.track = bounds.ctypes.data, len(blocks), track
            memory.found, memory.most = found.ctypes.data, len(found)
        if _engine().run_blocks(
            self._call, pointers, three(*grid), three(*block), shared_bytes, order(), 0,
            None if table is None else ctypes.byref(memory), message, _MESSAGE_ROOM,
        ):  # fmt: skip
            raise KernelError(f"kernel {self.name}: {message.value.decode()}")
        if not track or table is None:
            return []
        return [
            Touch(blocks[index], begin, end, bool(writes))
            for index, begin, end, writes in found[: memory.number].tolist()
        ]
