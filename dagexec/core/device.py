"""Devices and the Context through which operators reach one: memory, copies, streams, random numbers.

`Device` names a device (`cpu`, `cuda:0`, `sim:0`). A `Context` is one operator's or tensor's handle on it. A new kind
of device registers a context factory, and a copy function for each pair of kinds that data may cross.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import STRING, TypeMeta
from dagexec.core.proto import DeviceOption
from dagexec.errors import DeviceError, ResourceError
from dagexec.platform.host_memory import aligned_bytes

_KIND_NUMBERS = {"cpu": 0, "cuda": 1, "sim": 20901}
_KINDS = {number: kind for kind, number in _KIND_NUMBERS.items()}
_MOST_ELEMENTS = (1 << 63) - 1
_MOST_INDEX = (1 << 31) - 1  # as a DeviceOption holds it


@dataclass(frozen=True, slots=True)
class Device:
    """A device by kind and index, written `cpu` or `cuda:1`."""

    kind: str = "cpu"
    index: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"

    @staticmethod
    def parse(text: str) -> Device:
        """Read `cpu`, `cuda:0`, `sim:0`; the index defaults to 0. Raises DeviceError."""
        match = re.fullmatch(r"([a-z]+)(?::(\d+))?", text)
        if match is None or match[1] not in _KIND_NUMBERS:
            raise DeviceError(f"device {text!r} is unknown; expected one of cpu, cuda:N, sim:N")
        index = int(match[2] or 0)
        if index > _MOST_INDEX:
            raise DeviceError(f"device {text!r} is unknown; the largest index is {_MOST_INDEX}")
        return Device(match[1], index)

    @staticmethod
    def from_option(option: DeviceOption) -> Device:
        """The device a DeviceOption message names. Raises DeviceError for a device type dagexec does not have."""
        if not option.device_type and not option.device_id:
            return CPU
        kind = _KINDS.get(option.device_type)
        if kind is None:
            raise DeviceError(f"device type number {option.device_type} is not one dagexec has: {_KINDS}")
        return Device(kind, option.device_id)

    def to_option(self) -> DeviceOption:
        """The DeviceOption message that names this device."""
        return DeviceOption(device_type=_KIND_NUMBERS[self.kind], device_id=self.index)


CPU = Device()


class Context(ABC):
    """One user's handle on a device: allocate and free, copy, switch streams, wait, draw random numbers.

    The random generator is the context's own and is made at first use, from `seed` or from fresh entropy.
    """

    def __init__(self, device: Device, seed: int | None = None) -> None:
        self.device = device
        self._seed = seed
        self._random: np.random.Generator | None = None

    @property
    def random(self) -> np.random.Generator:
        """This context's own random generator."""
        if self._random is None:
            self._random = np.random.default_rng(self._seed)
        return self._random

    @abstractmethod
    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New device memory of `nbytes` bytes. Raises ResourceError when the device cannot hold it."""

    @abstractmethod
    def free(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Give memory back. The caller holds no view of it any more."""

    @abstractmethod
    def copy_within(self, destination: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        """Copy between two arrays of this device; shapes and dtypes are equal."""

    def host_view(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """`array` as the steps of operators see it: an ndarray that NumPy can work on."""
        return array

    @abstractmethod
    def switch(self, stream: int = 0) -> None:
        """Make `stream` the current one of this context for the work that follows."""

    @abstractmethod
    def finish(self) -> None:
        """Block until everything issued through this context has been done. Raises DeviceError if it failed."""


class CPUContext(Context):
    """The host. Work is done when a call returns, so there is one stream and nothing to wait for."""

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """New host memory, aligned to a cache line."""
        return aligned_bytes(nbytes, "an allocation")

    def free(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Nothing to do: host memory goes when the last array on it goes."""

    def copy_within(self, destination: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
        """Copy `source` into `destination`."""
        np.copyto(destination, source)

    def switch(self, stream: int = 0) -> None:
        """The host has stream 0 only."""
        if stream:
            raise DeviceError(f"stream {stream} asked for; cpu has stream 0 only")

    def finish(self) -> None:
        """Host work is finished when it returns."""


ContextFactory = Callable[[Device, int | None], Context]
CopyFunction = Callable[[npt.NDArray[Any], npt.NDArray[Any]], None]

_contexts: dict[str, ContextFactory] = {}
_copies: dict[tuple[str, str], CopyFunction] = {}


def register_context(kind: str, factory: ContextFactory) -> None:
    """Make `factory(device, seed)` the source of contexts for devices of `kind`."""
    _contexts[kind] = factory


def register_copy(destination_kind: str, source_kind: str, copy: CopyFunction) -> None:
    """Make `copy(destination, source)` the way data crosses from one kind of device to another."""
    _copies[destination_kind, source_kind] = copy


def make_context(device: Device, seed: int | None = None) -> Context:
    """A new context on `device`. Raises DeviceError when no such device kind is available."""
    factory = _contexts.get(device.kind)
    if factory is None:
        raise DeviceError(f"device {device} is not available here; available kinds: {', '.join(sorted(_contexts))}")
    return factory(device, seed)


def copy_between(destination: Device, source: Device) -> CopyFunction:
    """What copies an array of `source` to one of `destination`. Raises DeviceError when nothing is registered."""
    copy = _copies.get((destination.kind, source.kind))
    if copy is None:
        raise DeviceError(f"no copy from {source} to {destination} is registered")
    return copy


def element_count(shape: tuple[int, ...]) -> int:
    """Number of elements of a tensor of `shape`.

    Raises ResourceError for a negative size, and for sizes whose product, zeros aside, does not fit 63 bits.
    """
    count = extent = 1
    for size in shape:
        if size < 0:
            raise ResourceError(f"shape {shape} has a negative size")
        count *= size
        extent *= size or 1
    if extent > _MOST_ELEMENTS:
        raise ResourceError(f"shape {shape} overflows: it has more than 2^63 - 1 elements")
    return count


def array_on(buffer: npt.NDArray[Any], shape: tuple[int, ...], meta: TypeMeta) -> npt.NDArray[Any]:
    """An array of `shape` and `meta` over the first bytes of `buffer` (an object buffer for strings)."""
    count = element_count(shape)
    if meta is STRING:
        return buffer[:count].reshape(shape)
    return buffer[: count * meta.itemsize].view(meta.numpy).reshape(shape)


def _sim_context(device: Device, seed: int | None) -> Context:
    from dagexec.devices.sim import SimContext

    return SimContext(device, seed)


def _copy_of_sim(destination: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    from dagexec.devices.sim import copy_blocking

    copy_blocking(destination, source)


def _cuda_context(device: Device, seed: int | None) -> Context:
    from dagexec.devices.cuda.context import CudaContext

    return CudaContext(device, seed)


def _copy_of_cuda(destination: npt.NDArray[Any], source: npt.NDArray[Any]) -> None:
    from dagexec.devices.cuda.context import copy_blocking

    copy_blocking(destination, source)


register_context("cpu", CPUContext)
register_context("sim", _sim_context)
register_context("cuda", _cuda_context)
for _pair in (("sim", "cpu"), ("cpu", "sim"), ("sim", "sim")):
    register_copy(*_pair, _copy_of_sim)
for _pair in (("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")):
    register_copy(*_pair, _copy_of_cuda)
