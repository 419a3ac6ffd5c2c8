"""Kernels: CUDA C++ compiled once a device, and calls of them that are prepared once and made often.

function = compiled("relu", RELU, T="float")       # RELU: source of `extern "C" __global__ void relu(...)`
step = Launch(function, elements=x.size, arguments=(x, y, np.int64(x.size)))
step()                                             # puts it on the calling thread's current stream
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from dagexec.devices.cuda.arrays import address, is_on_device
from dagexec.devices.cuda.binding import cupy
from dagexec.devices.cuda.compilation import loaded_kernel
from dagexec.devices.cuda.current import current
from dagexec.devices.cuda.prelude import PRELUDE
from dagexec.errors import DeviceError
from dagexec.platform.locks import new_lock

BLOCK = 256
"""Threads of a block, unless a kernel asks for another number."""

_BLOCKS_PER_MULTIPROCESSOR = 16
_lock = new_lock()
_functions: dict[tuple[int, str, str], Function] = {}


class Function:
    """A compiled kernel, loaded on one device.

    Attributes:
        name: as in its source.
        pointer: the CUfunction.
    """

    __slots__ = ("_kernel", "name", "pointer")

    def __init__(self, name: str, kernel: Any) -> None:
        self.name = name
        self._kernel = kernel  # keeps the module loaded
        self.pointer = int(kernel.ptr)


def compiled(name: str, source: str, device: int | None = None, **types: str) -> Function:
    """Kernel `name` of `source`, for a device (default: the current one), compiled at the first call for it.

    `types` are defined before the source: T="float" makes T the type float. Raises DeviceError, with the compiler's
    message, when it does not compile.
    """
    index = int(cupy().cuda.runtime.getDevice()) if device is None else device
    code = PRELUDE + "".join(f"typedef {c_type} {alias};\n" for alias, c_type in sorted(types.items())) + source
    key = (index, name, code)
    found = _functions.get(key)
    if found is None:
        with _lock:
            found = _functions.get(key)
            if found is None:
                found = _functions[key] = _compile(index, name, code)
    return found


def forget_functions() -> None:
    """Compile anew from now on: another CuPy is in use."""
    with _lock:
        _functions.clear()


def _compile(index: int, name: str, code: str) -> Function:
    try:
        return Function(name, loaded_kernel(name, code, index))
    except Exception as error:
        raise DeviceError(f"kernel {name!r} does not compile for cuda:{index}: {error}") from error


def block_count(elements: int, device: int, threads: int = BLOCK) -> int:
    """Blocks for a grid-stride loop over `elements`: enough to fill the device, at least 1."""
    attribute = cupy().cuda.runtime.cudaDevAttrMultiProcessorCount
    most = cupy().cuda.runtime.deviceGetAttribute(attribute, device) * _BLOCKS_PER_MULTIPROCESSOR
    return max(1, min(-(-elements // threads), int(most)))


class Launch:
    """A step that launches a kernel on the calling thread's current stream, with the same arguments each time.

    Arguments are device arrays (passed as pointers), NumPy scalars (passed as their type: a kernel's `int` is an
    np.int32, its `i64` an np.int64, its `float` an np.float32), host arrays of NumPy (passed by value, as a struct of
    those bytes), and None (a null pointer). Python numbers are refused: their size cannot be told. A launch over no
    elements does nothing.
    """

    __slots__ = (
        "_address", "_kept", "_packed", "_parameters", "_put", "blocks", "function", "shared_bytes", "threads"
    )  # fmt: skip

    def __init__(
        self,
        function: Function,
        arguments: Sequence[Any],
        *,
        elements: int | None = None,
        blocks: int | tuple[int, int, int] | None = None,
        threads: int = BLOCK,
        shared_bytes: int = 0,
        device: int | None = None,
    ) -> None:
        """Give `elements` for a grid-stride loop, or `blocks`. Raises TypeError for an argument of another type."""
        self.function = function
        if blocks is None:
            if elements is None:
                raise TypeError(f"kernel {function.name!r} needs a number of elements or of blocks")
            index = cupy().cuda.runtime.getDevice() if device is None else device
            blocks = block_count(elements, index, threads) if elements else 0
        self.blocks = (blocks, 1, 1) if isinstance(blocks, int) else blocks
        self.threads = threads
        self.shared_bytes = shared_bytes
        self._kept = tuple(arguments)
        self._packed = [_packed(function.name, argument) for argument in arguments]
        addresses = [piece.ctypes.data for piece in self._packed]
        self._parameters = (ctypes.c_void_p * max(1, len(addresses)))(*addresses)
        self._address = ctypes.addressof(self._parameters)
        x, y, z = self.blocks
        launch = cupy().cuda.driver.launchKernel
        put = partial(launch, function.pointer, x, y, z, threads, 1, 1, shared_bytes)
        self._put = put if x and y and z else None

    def __call__(self) -> None:
        """Launch it. Every operator of a run comes through here."""
        if self._put is not None:
            self._put(current.stream_pointer, self._address, 0)


def _packed(kernel: str, argument: Any) -> np.ndarray[Any, Any]:
    """The bytes of an argument, as an array that holds them."""
    if argument is None:
        return np.zeros(1, np.uint64)
    if isinstance(argument, np.ndarray):
        return np.ascontiguousarray(argument).copy()
    if isinstance(argument, np.generic):
        return np.array([argument])
    if is_on_device(argument):
        return np.array([address(argument)], np.uint64)
    raise TypeError(f"kernel {kernel!r}: an argument is {argument!r}; expected a device array or a NumPy value")
