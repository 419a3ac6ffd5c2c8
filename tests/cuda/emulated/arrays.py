"""The stand-in for `cupy.ndarray`: what dagexec uses of it, over memory of the host."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class UnownedMemory:
    """Memory that somebody else owns."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner, self.device_id = ptr, size, owner, max(device_id, 0)


class MemoryPointer:
    """A place in a block."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem = mem
        self.ptr = mem.ptr + offset
        self.device_id = mem.device_id


class PinnedMemoryPointer:
    """A place in pinned memory of the host, with the buffer protocol."""

    mem: Any
    ptr: int

    def __new__(cls, mem: Any, offset: int) -> Any:
        size = mem.size - offset
        members = {"size": lambda _self: size, "mem": mem, "ptr": mem.ptr + offset}
        kind = type("PinnedMemoryPointer", (ctypes.c_ubyte * size,), members)
        return kind.from_address(mem.ptr + offset)

    def size(self) -> int:
        raise NotImplementedError


class ndarray:
    """An array of a device: pointer, shape, dtype and strides; views, but no elements."""

    def __init__(self, shape: Any, dtype: Any = float, memptr: Any = None, strides: Any = None) -> None:
        self.data = memptr
        self._host = _over(memptr.ptr, tuple(shape), np.dtype(dtype), strides)

    shape = property(lambda self: self._host.shape)
    dtype = property(lambda self: self._host.dtype)
    strides = property(lambda self: self._host.strides)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    flags = property(lambda self: self._host.flags)
    T = property(lambda self: self._derived(self._host.T))

    def __len__(self) -> int:
        return len(self._host)

    def _derived(self, view: Array) -> ndarray:
        made = object.__new__(ndarray)
        made._host = view
        offset = view.ctypes.data - self.data.mem.ptr if view.size else 0
        made.data = MemoryPointer(self.data.mem, offset)
        return made

    def reshape(self, *shape: Any) -> ndarray:
        found = self._host.reshape(*shape)
        assert not found.size or np.may_share_memory(found, self._host), "a reshape that copies"
        return self._derived(found)

    def view(self, dtype: Any = None) -> ndarray:
        return self._derived(self._host.view() if dtype is None else self._host.view(dtype))

    def ravel(self, order: str = "C") -> ndarray:
        assert order == "C"
        return self.reshape(-1)

    def transpose(self, *axes: Any) -> ndarray:
        return self._derived(self._host.transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self._derived(self._host.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self._derived(self._host.squeeze(axis))

    def __getitem__(self, key: Any) -> ndarray:
        found = self._host[key]
        if not isinstance(found, np.ndarray):
            raise TypeError("an element of a device array was asked for by the host")
        return self._derived(found)

    def __array__(self, *_args: object, **_kwargs: object) -> Array:
        raise TypeError("Implicit conversion to a NumPy array is not allowed.")


def _over(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], strides: Any) -> Array:
    """An array over memory at `pointer`."""
    span = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)) + dtype.itemsize if strides else (
        int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    )  # fmt: skip
    if 0 in shape:
        return np.empty(shape, dtype)
    raw = np.frombuffer((ctypes.c_ubyte * span).from_address(pointer), np.uint8)
    if strides:
        return np.lib.stride_tricks.as_strided(raw[: dtype.itemsize].view(dtype), shape, strides)
    return raw.view(dtype).reshape(shape)
