"""Kernels compiled by NVRTC, and kept in a folder from one process to the next.

CuPy's own compiler is not asked: it adds `-ftz=true`, which takes float32 numbers below 2**-126 for 0, where the host
computes with them. NVRTC's defaults are kept: such numbers count, quotients and square roots are rounded correctly, and
a product and a sum that follow each other may be rounded once.

The folder is `$DAGEXEC_KERNELS` ("off": none), else `kernels` in `$XDG_CACHE_HOME/dagexec`, where `~/.cache` is the
default. A file's name is a hash of all that decides what is in it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path
from typing import Any, cast

from dagexec.devices.cuda.binding import cupy
from dagexec.errors import DeviceError, OutputError
from dagexec.platform.disk import make_folders, reading
from dagexec.platform.files import write_atomically

logger = logging.getLogger(__name__)

OPTIONS = ("--std=c++17", "--ftz=false")


def loaded_kernel(name: str, code: str, device: int) -> Any:
    """The `cupy.cuda.Function` of kernel `name` of `code`, loaded on a device, which is made current meanwhile.

    Raises DeviceError, with the compiler's message, when it does not compile.
    """
    place = cupy().cuda.Device(device)
    target = compile_target(int(place.compute_capability))
    with place:
        file = kernel_file(code, target)
        if file is not None and (kept := _read(file)) is not None:
            try:
                return _load(name, kept)
            except Exception as error:
                logger.warning("the kernel in %s is compiled anew, as it cannot be loaded: %s", file, str(error))
        binary = compiled_binary(code, target)
        found = _load(name, binary)
    if file is not None:
        _keep(file, binary)
    return found


def compile_target(capability: int) -> str:
    """NVRTC's option for a device of compute capability `capability` (90 is 9.0).

    Machine code where NVRTC knows the device; of a later one that it does not know, PTX for the latest before it, which
    the driver compiles. Raises DeviceError for a device that is too old for this NVRTC.
    """
    offered = [int(one) for one in cupy().cuda.nvrtc.getSupportedArchs()]
    if capability in offered:
        return f"-arch=sm_{capability}"
    earlier = [one for one in offered if one < capability]
    if not earlier:
        raise DeviceError(
            f"NVRTC compiles for compute capabilities from {min(offered)} on; the device has {capability}"
        )
    return f"-arch=compute_{max(earlier)}"


def compiled_binary(code: str, target: str) -> bytes:
    """What NVRTC makes of `code`. Raises DeviceError with its message."""
    nvrtc = cupy().cuda.nvrtc
    program = nvrtc.createProgram(code, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, (*OPTIONS, target))
        found = nvrtc.getCUBIN(program) if "sm_" in target else nvrtc.getPTX(program)
        return cast(bytes, found)
    except nvrtc.NVRTCError as error:
        raise DeviceError(f"NVRTC reported {error}: {nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


def kernel_file(code: str, target: str) -> Path | None:
    """Where what NVRTC makes of `code` is kept; None when that is switched off."""
    named = os.environ.get("DAGEXEC_KERNELS", "")
    if named == "off":
        return None
    version = ".".join(map(str, cupy().cuda.nvrtc.getVersion()))
    key = hashlib.sha256("\0".join([version, target, *OPTIONS, code]).encode()).hexdigest()[:32]
    if named:
        return Path(named, key)
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "dagexec" / "kernels" / key
    except RuntimeError:  # nobody's home
        return None


def _load(name: str, binary: bytes) -> Any:
    module = cupy().cuda.Module()
    module.load(binary)
    return module.get_function(name)


def _read(file: Path) -> bytes | None:
    try:
        with reading(file) as opened:
            return opened.read()
    except (OSError, ValueError):  # ValueError: a null character in the path
        return None


def _keep(file: Path, binary: bytes) -> None:
    """Write it whole or not at all; a folder that cannot be written to is no error."""
    try:
        make_folders(file.parent)
        write_atomically(file, binary)
    except (OSError, ValueError, OutputError) as error:
        logger.debug("kernels are not kept: %s", str(error))
