"""The two libraries that CUDA devices are reached through: CuPy, and cuDNN by nvidia-cudnn-frontend.

Nothing else imports them, so that dagexec can be imported, and its CUDA code tested with stand-ins, without either.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dagexec.core.errors import DeviceError

OLDEST_CUPY = (14, 0)
OLDEST_FRONTEND = (1, 10)
INSTALL = "install one with: pip install 'dagexec[cuda12]' (CUDA 12), or 'dagexec[cuda13]' (CUDA 13)"

_loaded: dict[str, Any] = {}


def cupy() -> Any:
    """The module `cupy`. Raises DeviceError, with the command that mends it, when it is missing or too old."""
    return _loaded.get("cupy") or _load("cupy", OLDEST_CUPY, "CuPy")


def cudnn() -> Any:
    """The module `cudnn` of nvidia-cudnn-frontend. Raises DeviceError, as `cupy` does."""
    return _loaded.get("cudnn") or _load("cudnn", OLDEST_FRONTEND, "nvidia-cudnn-frontend")


def _load(name: str, oldest: tuple[int, int], called: str) -> Any:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise DeviceError(f"{called} cannot be imported ({error}); {INSTALL}") from error
    version = tuple(int(part) for part in module.__version__.split(".")[:2])
    if version < oldest:
        needed = ".".join(map(str, oldest))
        raise DeviceError(f"{called} {module.__version__} is too old, {needed} is the oldest that serves; {INSTALL}")
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
