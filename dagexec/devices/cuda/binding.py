"""The two libraries that CUDA devices are reached through: CuPy, and cuDNN by nvidia-cudnn-frontend.

Nothing else imports them, so that dagexec can be imported, and its CUDA code tested with stand-ins, without either.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dagexec.errors import DeviceError
from dagexec.platform.extras import install_command

OLDEST_CUPY = (14, 0)
OLDEST_FRONTEND = (1, 10)
INSTALL = f"install it with: {install_command('cuda12')} (CUDA 12), or: {install_command('cuda13')} (CUDA 13)"

_loaded: dict[str, Any] = {}


def cupy() -> Any:
    """The module `cupy`. Raises DeviceError, with the command that mends it, when it is missing or too old."""
    return _loaded.get("cupy") or _load("cupy", OLDEST_CUPY, "CuPy")


def cudnn() -> Any:
    """The module `cudnn` of nvidia-cudnn-frontend. Raises DeviceError, as `cupy` does."""
    return _loaded.get("cudnn") or _load("cudnn", OLDEST_FRONTEND, "nvidia-cudnn-frontend")


def cublas() -> Any:
    """cuBLAS with its C functions; see `dagexec.devices.cuda.cublas_library`. Raises DeviceError without."""
    return _loaded.get("cublas") or _load_cublas()


def _load_cublas() -> Any:
    """The libcublas that CuPy uses, which knows where pip and CUDA's own installer put it."""
    cuda = cupy().cuda
    try:
        assert cuda.cublas  # loads it
        major = cuda.runtime.runtimeGetVersion() // 1000
        library = ctypes.CDLL(f"libcublas.so.{major}")
    except (AttributeError, ImportError, OSError) as error:
        raise DeviceError(f"cuBLAS cannot be loaded ({error}); {INSTALL}") from error
    pointer, number, step = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    of_c = [pointer, number, number]
    kinds: dict[str, list[Any]] = {
        "cublasCreate_v2": [pointer],
        "cublasDestroy_v2": [pointer],
        "cublasSetStream_v2": [pointer, pointer],
        "cublasSetWorkspace_v2": [pointer, pointer, ctypes.c_size_t],
        "cublasSetPointerMode_v2": [pointer, number],
        "cublasSetMathMode": [pointer, number],
        "cublasGemmEx": [pointer, *[number] * 5, pointer, *of_c, *of_c, pointer, *of_c, number, number],
        "cublasGemmStridedBatchedEx": [
            pointer, *[number] * 5, pointer, *of_c, step, *of_c, step, pointer, *of_c, step, *[number] * 3
        ],
    }  # fmt: skip
    for name, arguments in kinds.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, number
    _loaded["cublas"] = library
    return library


def nccl() -> Any | None:
    """The module `cupy.cuda.nccl`, which `import cupy` leaves out; None where CuPy has none."""
    module = cupy()
    found = getattr(module.cuda, "nccl", None)
    if found is None and module is sys.modules.get("cupy"):
        try:
            found = importlib.import_module("cupy.cuda.nccl")
        except ImportError:
            return None
    return found


def _load(name: str, oldest: tuple[int, int], called: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise DeviceError(f"{called} cannot be imported ({error}); {INSTALL}") from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < oldest:
        needed = ".".join(map(str, oldest))
        raise DeviceError(f"{called} {module.__version__} is too old, {needed} or newer is needed; {INSTALL}")
    _loaded[name] = module
    return module


@contextmanager
def installed(**modules: Any) -> Iterator[None]:
    """Within it, `cupy` or `cudnn` are these modules: stand-ins, in tests."""
    before = dict(_loaded)
    _loaded.update(modules)
    try:
        yield
    finally:
        _loaded.clear()
        _loaded.update(before)
