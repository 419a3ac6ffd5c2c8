"""Kernels compiled by the real NVRTC, which needs no device."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from dagexec.devices.cuda.binding import installed
from dagexec.devices.cuda.compilation import OPTIONS, compiled_binary

WANTED = (75, 80, 90, 100)


def nvrtc() -> Any:
    """The module `cupy.cuda.nvrtc`, None where CuPy, or NVRTC, is not there."""
    try:
        found: Any = importlib.import_module("cupy").cuda.nvrtc
        found.getVersion()
    except Exception:
        return None
    return found


def architectures() -> list[int]:
    """Of the architectures we care about those that this NVRTC compiles for."""
    offered = nvrtc().getSupportedArchs()
    return [one for one in WANTED if one in offered]


def assembly(source: str, architecture: int) -> str:
    """The PTX of a source that compiles."""
    with installed(cupy=importlib.import_module("cupy")):
        return compiled_binary(source, f"-arch=compute_{architecture}").decode()


def compile_error(source: str, architecture: int) -> str | None:
    """What NVRTC says of a source, None when it compiles."""
    module = nvrtc()
    program = module.createProgram(source, "kernel.cu", (), ())
    try:
        module.compileProgram(program, (*OPTIONS, f"-arch=sm_{architecture}"))
        module.getCUBIN(program)
    except module.NVRTCError:
        return str(module.getProgramLog(program))
    finally:
        module.destroyProgram(program)
    return None


def _first_error(path: str) -> str | None:
    source = Path(path).read_text()
    for architecture in architectures():
        error = compile_error(source, architecture)
        if error is not None:
            return f"{path} for sm_{architecture}:\n{error}"
    return None


def errors_of(sources: Iterable[Path]) -> list[str]:
    """What NVRTC says of sources that do not compile for every architecture."""
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        return [error for error in pool.map(_first_error, map(str, sources), chunksize=8) if error is not None]
