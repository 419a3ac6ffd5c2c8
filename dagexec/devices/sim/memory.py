"""Memory of a simulated device: arrays whose elements the host cannot touch, and the count of bytes held.

A `SimArray` tells the host everything about its elements but the elements, as a device pointer with a shape would. Work
on the device uses the NumPy array inside, which `unwrapped` gives: for kernels and copies only.
"""

from __future__ import annotations

import gc
import operator
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn, cast

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU, Device
from dagexec.errors import DeviceError, ResourceError
from dagexec.platform.forking import ProcessLock
from dagexec.platform.host_memory import aligned_bytes

Array = npt.NDArray[Any]

_METADATA: frozenset[object] = frozenset({np.shape, np.ndim, np.size, np.may_share_memory, np.shares_memory})
_NOT_OFFERED = frozenset({"__array_interface__", "__array_struct__"})


class SimArray:
    """An array in the memory of a simulated device.

    It has the metadata of an ndarray and the methods that make another view of the same memory. Whatever would read or
    write an element on the host raises DeviceError.
    """

    __slots__ = ("__weakref__", "_array", "device")

    def __init__(self, array: Array, device: Device) -> None:
        self._array = array
        self.device = device

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes."""
        return self._array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        return self._array.dtype

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        return self._array.strides

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._array.ndim

    @property
    def size(self) -> int:
        """Number of elements."""
        return self._array.size

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self._array.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self._array.nbytes

    @property
    def flags(self) -> Any:
        """As of an ndarray; `writeable` may be set."""
        return self._array.flags

    @property
    def T(self) -> SimArray:  # noqa: N802 - NumPy's name
        """The axes in reverse order."""
        return SimArray(self._array.T, self.device)

    def __len__(self) -> int:
        return len(self._array)

    def view(self, dtype: npt.DTypeLike | None = None) -> SimArray:
        """The same memory, as elements of `dtype` if given."""
        return SimArray(self._array.view() if dtype is None else self._array.view(dtype), self.device)

    def reshape(self, *shape: Any) -> SimArray:
        """The same elements in another shape. Raises DeviceError where NumPy would have to copy them."""
        result = self._array.reshape(*shape)
        if result.size and not np.may_share_memory(result, self._array):
            raise self._touched(f"reshape to {result.shape}, which has to copy")
        return SimArray(result, self.device)

    def transpose(self, *axes: Any) -> SimArray:
        """The axes in another order."""
        return SimArray(self._array.transpose(*axes), self.device)

    def swapaxes(self, first: int, second: int) -> SimArray:
        """Two axes exchanged."""
        return SimArray(self._array.swapaxes(first, second), self.device)

    def squeeze(self, axis: Any = None) -> SimArray:
        """Without axes of size 1."""
        return SimArray(self._array.squeeze(axis), self.device)

    def strided(self, shape: tuple[int, ...], strides: tuple[int, ...], writeable: bool = True) -> SimArray:
        """The same memory with this shape and these strides, in bytes, as `numpy.lib.stride_tricks.as_strided`."""
        found = np.lib.stride_tricks.as_strided(self._array, shape, strides, writeable=writeable)
        return SimArray(found, self.device)

    def __getitem__(self, key: Any) -> SimArray:
        parts = key if isinstance(key, tuple) else (key,)
        if not all(part is None or part is Ellipsis or isinstance(part, slice) or _is_index(part) for part in parts):
            raise self._touched("indexing with an array, which has to copy")
        found = self._array[key]
        if not isinstance(found, np.ndarray):
            raise self._touched(f"element {key}")
        return SimArray(found, self.device)

    def __array_function__(self, function: object, types: object, args: tuple[Any, ...], kwargs: Any) -> Any:
        if function in _METADATA:
            plain = [a._array if isinstance(a, SimArray) else a for a in args]
            return cast(Callable[..., Any], function)(*plain, **kwargs)
        raise self._touched(f"numpy.{getattr(function, '__name__', function)}")

    def __array_ufunc__(self, ufunc: object, method: str, *args: object, **kwargs: object) -> NoReturn:
        raise self._touched(f"numpy.{getattr(ufunc, '__name__', ufunc)}")

    def __getattr__(self, name: str) -> NoReturn:
        if name not in _NOT_OFFERED and hasattr(np.ndarray, name):
            raise self._touched(name)
        raise AttributeError(f"'SimArray' object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"SimArray(shape={self.shape}, dtype={self.dtype}, device={self.device})"

    def _touched(self, what: str) -> DeviceError:
        return DeviceError(
            f"{self.device}: the host touches elements of a {self.dtype} array of shape {self.shape} in the memory of "
            f"the device ({what}); copy it to the host first, with Tensor.fetch or DeviceRuntime.copy"
        )


def _is_index(part: object) -> bool:
    try:
        operator.index(cast(Any, part))
    except TypeError:
        return False
    return not isinstance(part, np.ndarray | bool)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(self: SimArray, *_args: object, **_kwargs: object) -> NoReturn:
        raise self._touched(name)

    refuse.__name__ = name
    refuse.__doc__ = f"Raises DeviceError: {name} touches elements."
    return refuse


_BINARY = (
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "xor", "or"
)  # fmt: skip
_TOUCHING = [
    "__array__", "__iter__", "__float__", "__int__", "__complex__", "__index__", "__bool__", "__contains__",
    "__setitem__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__pos__", "__abs__",
    "__invert__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__", "__dlpack__", "__buffer__",
    *(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r", "i")),
]  # fmt: skip
for _name in _TOUCHING:
    setattr(SimArray, _name, _refusal(_name))
SimArray.__hash__ = None  # type: ignore[assignment]


def unwrapped(array: Array) -> Array:
    """The NumPy array inside, for what runs on the device; a host array as it is."""
    found: object = array
    return found._array if isinstance(found, SimArray) else array


def device_of(array: Array) -> Device:
    """Where the elements are."""
    found: object = array
    return found.device if isinstance(found, SimArray) else CPU


class DeviceMemory:
    """The memory of one simulated device. Bytes count as held until the last array on them, or step with it, is gone.

    Attributes:
        limit: bytes it can hold, None without a limit.
        peak: bytes it held at most.
    """

    def __init__(self, device: Device, limit: int | None) -> None:
        self.device = device
        self.limit = limit
        self.peak = 0
        self._held = 0
        self._lock = ProcessLock()
        self._released: deque[int] = deque()  # a finalizer may run anywhere, so it takes no lock

    @property
    def held(self) -> int:
        """Bytes held now."""
        with self._lock.own:
            return self._count()

    def allocate(self, nbytes: int) -> SimArray:
        """`nbytes` new bytes. Raises ResourceError when they do not fit beside those held."""
        if not self._take(nbytes):
            gc.collect()  # what only a reference cycle still holds is no reason to fail
            if not self._take(nbytes):
                raise ResourceError(
                    f"{self.device}: out of memory: an allocation of {nbytes:,} bytes; the device holds "
                    f"{self.held:,} of {self.limit:,} bytes"
                )
        try:
            buffer = aligned_bytes(nbytes, "an allocation")
        except BaseException:
            self._released.append(nbytes)
            raise
        owner = buffer.base
        assert owner is not None
        weakref.finalize(owner, self._released.append, nbytes).atexit = False
        return SimArray(buffer, self.device)

    def _take(self, nbytes: int) -> bool:
        with self._lock.own:
            held = self._count() + nbytes
            if self.limit is not None and held > self.limit:
                return False
            self._held = held
            self.peak = max(self.peak, held)
            return True

    def _count(self) -> int:
        """Bytes held; call with the lock held."""
        while self._released:
            self._held -= self._released.popleft()
        return self._held
