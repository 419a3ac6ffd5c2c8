"""System shared memory: inputs that clients on this machine leave there, and results that they find there.

A client registers a region, a part of a POSIX shared memory object, by the object's *key*. Only keys that the
configuration allows are opened. The client can change the object at any time, and shrink it: so it is never mapped
here, where an access behind its end would end the process. Inputs are read to memory of the server before they are
checked, and results written.
"""

from __future__ import annotations

import math
import os
import stat
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import anyio.from_thread

from dagexec.core.feeds import Array
from dagexec.platform.records import dataclass
from dagexec.server.bodies import Held, aligned
from dagexec.server.datatypes import BYTES
from dagexec.server.inference import RequestError
from dagexec.server.limits import Limits
from dagexec.server.tensors import ProtocolError, checked_datatype, from_binary, whole_parameter

try:
    from _posixshmem import shm_open  # type: ignore[import-not-found]
except ImportError:  # Windows
    shm_open = None

_MOST_REGIONS = 1024
_NAME_BYTES = 250
NO_DEVICE_MEMORY = "shared memory of CUDA is not supported; use that of the system, or send raw data"
REGION = "shared_memory_region"
"""The parameter of a tensor that names its region."""


class _Object:
    """An open object, closed with its last user: a region, or a request."""

    def __init__(self, key: str) -> None:
        """Raises OSError."""
        self.file = shm_open(f"/{key}", os.O_RDWR, 0)
        weakref.finalize(self, os.close, self.file)
        self.is_regular = stat.S_ISREG(os.fstat(self.file).st_mode)
        self.nbytes = os.fstat(self.file).st_size


@dataclass(frozen=True, slots=True)
class Region:
    """A region that is registered: `byte_size` bytes of an object, from `offset` on."""

    name: str
    key: str
    offset: int
    byte_size: int
    object: _Object

    def described(self) -> dict[str, Any]:
        """As the protocol has it."""
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.byte_size}


@dataclass(frozen=True, slots=True)
class Part:
    """That of a region in which a tensor is, or has room. It stays usable when the region is unregistered."""

    region: Region
    offset: int
    nbytes: int

    def read(self) -> memoryview:
        """A copy of what is there now. Raises RequestError where the client has made the object smaller."""
        memory = aligned(self.nbytes, 0)
        place = 0
        while place < self.nbytes:
            count = os.preadv(self.region.object.file, [memory[place:]], self.region.offset + self.offset + place)
            if not count:
                raise RequestError(400, f"shared memory region {self.region.name!r:.80} has become smaller")
            place += count
        return memory

    def write(self, name: str, data: memoryview) -> dict[str, Any]:
        """Leave a result there; the parameters that tell of it. Raises RequestError where it has no room."""
        if data.nbytes > self.nbytes:
            raise RequestError(
                400, f"output {name!r} has {data.nbytes} bytes; {self.nbytes} are kept for it in shared memory"
            )
        try:
            place = 0
            while place < data.nbytes:
                place += os.pwrite(self.region.object.file, data[place:], self.region.offset + self.offset + place)
        except OSError as error:
            raise RequestError(400, f"shared memory region {self.region.name!r:.80}: {error.strerror}") from error
        where = {REGION: self.region.name, "shared_memory_byte_size": data.nbytes}
        return {**where, "shared_memory_offset": self.offset} if self.offset else where


class Regions:
    """Those of one server, on its event loop."""

    def __init__(self, allowed: Iterable[str], limits: Limits) -> None:
        """`allowed` are keys; one that ends with `*` allows all that begin so."""
        self._allowed = tuple(one.removeprefix("/") for one in allowed)
        self._limits = limits
        self._regions: dict[str, Region] = {}

    def register(self, name: str, key: object, offset: object, byte_size: object) -> None:
        """Raises RequestError: 400 for a name that is taken and for what is no such part of an object, 403 for a key
        that is not allowed, 404 for one that is not there.
        """
        if not isinstance(key, str):
            raise ProtocolError(f"key must be a text, not {key!r:.80}")
        plain = key.lstrip("/")
        if not any(plain == one or (one.endswith("*") and plain.startswith(one[:-1])) for one in self._allowed):
            raise RequestError(403, f"the server's setting `shared_memory` does not allow {key!r:.80}")
        if not plain or "/" in plain or "\0" in plain or len(plain.encode(errors="replace")) > _NAME_BYTES:
            raise ProtocolError(f"key {key!r:.80} is no name of shared memory")
        if shm_open is None:
            raise RequestError(501, "this system has no shared memory with names")
        for what, value in (("offset", offset), ("byte_size", byte_size)):
            if type(value) is not int or not 0 <= value < 1 << 63:
                raise ProtocolError(f"{what} must be a whole number, not {value!r:.80}")
        assert isinstance(offset, int)
        assert isinstance(byte_size, int)
        if name in self._regions:
            raise ProtocolError(f"shared memory region {name!r:.80} is registered already")
        if len(self._regions) >= _MOST_REGIONS:
            raise ProtocolError(f"{_MOST_REGIONS} shared memory regions are registered; unregister some")
        try:
            opened = _Object(plain)
        except (OSError, ValueError) as error:
            raise RequestError(404, f"shared memory {key!r:.80} cannot be opened: {error}") from error
        if not opened.is_regular or not byte_size or offset + byte_size > opened.nbytes:
            raise ProtocolError(
                f"shared memory {key!r:.80} has {opened.nbytes} bytes, not {byte_size} from {offset} on"
            )
        self._regions[name] = Region(name, key, offset, byte_size, opened)

    def unregister(self, name: str = "") -> None:
        """Forget one, if it is there, or all. Requests that have begun go on using it."""
        if name:
            self._regions.pop(name, None)
        else:
            self._regions.clear()

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """One, or all. Raises RequestError (404)."""
        if name and name not in self._regions:
            raise RequestError(404, f"unknown shared memory region {name!r:.80}")
        return [region.described() for region in self._regions.values() if name in ("", region.name)]

    def part(self, tensor: str, parameters: Mapping[str, Any]) -> Part | None:
        """Where the parameters of a tensor say that it is; None for one that is not in shared memory.

        Raises ProtocolError.
        """
        name = parameters.get(REGION)
        if name is None:
            return None
        region = self._regions.get(name) if isinstance(name, str) else None
        if region is None:
            raise ProtocolError(f"{tensor}: unknown shared memory region {name!r:.80}")
        nbytes = whole_parameter(parameters, "shared_memory_byte_size")
        offset = whole_parameter(parameters, "shared_memory_offset") or 0
        if nbytes is None:
            raise ProtocolError(f"{tensor}: shared_memory_byte_size is missing")
        if offset + nbytes > region.byte_size:
            raise ProtocolError(
                f"{tensor}: {nbytes} bytes from {offset} on; region {name!r:.80} has {region.byte_size}"
            )
        return Part(region, offset, nbytes)

    @property
    def any(self) -> bool:
        """Some are registered."""
        return bool(self._regions)

    def reader(self, held: Held, on_thread: bool) -> Callable[[Part], memoryview]:
        """Reads inputs of one request, on a thread or the event loop; they count as if they had come in its body."""
        left = self._limits.body_bytes

        def read(part: Part) -> memoryview:
            nonlocal left
            left -= part.nbytes
            if left < 0:
                raise RequestError(413, f"the inputs in shared memory have more than {self._limits.body_bytes} bytes")
            if on_thread:
                anyio.from_thread.run_sync(held.add, part.nbytes)
            else:
                held.add(part.nbytes)
            return part.read()

        return read


NO_REGIONS = Regions((), Limits())
"""Those of a server that allows none."""


def from_shared_memory(
    name: str, datatype: object, shape: tuple[int, ...], part: Part, read: Callable[[Part], memoryview]
) -> Array:
    """The input that a client has left there. Its size is checked before memory is taken for it."""
    if datatype != BYTES and part.nbytes != math.prod(shape) * checked_datatype(name, datatype).itemsize:
        raise ProtocolError(
            f"input {name!r:.80}: {part.nbytes} bytes in shared memory; {datatype} of shape {list(shape)}"
        )
    return from_binary(name, datatype, shape, read(part))
