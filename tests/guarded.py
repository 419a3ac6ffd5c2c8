"""Arrays beside pages that nobody may touch: who reads or writes past an end of one ends the process, there and then.

`guarded_memory` has all that dagexec allocates for a net between such pages: tensors, the buffers of memory plans and
working memory (each in pages of its own, so that none shares any), packed weights, and results for callers. What a
caller gives, feeds and parameters, is guarded by `Guards.copy`. An array touches the page behind it or the one before
it, as two runs are to see both ends.
"""

from __future__ import annotations

import ctypes
import mmap
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from dagexec.binding import io_binding
from dagexec.core import packed_copy, tensor
from dagexec.core.device import CPU
from dagexec.core.tensor import Storage, array_on
from dagexec.devices import host
from dagexec.executor.requests import blocked_run
from dagexec.ops.engines.onednn import descriptors, packing
from dagexec.platform.weight_memory import Pieces
from dagexec.scheduler.memory import arena_memory
from dagexec.scheduler.memory.arena import Arena
from dagexec.scheduler.memory.plan import MemoryPlan, Placed

Array = npt.NDArray[Any]

_PROT_NONE = 0
_NEVER_WRITTEN = 0xFF
"""Bytes of new memory: NaN, so that what is read before it was written is seen in results."""

ALIGNMENTS = (1, 16, 64)
"""Bytes. With 1 an array ends at its page whatever its size is, and is aligned as its elements are; with 64, where
memory of that alignment was promised, as many bytes less one may lie between."""

_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


@dataclass(frozen=True)
class Guards:
    """Where guarded arrays lie in their pages.

    Attributes:
        behind: they touch the page behind them; else the one before.
        alignment: of the first byte of those that touch the page behind.
    """

    behind: bool
    alignment: int = 1

    @classmethod
    def drawn(cls, source: random.Random) -> Guards:
        """Mostly such as see the most."""
        return cls(source.random() < 0.75, source.choice((1, 1, *ALIGNMENTS)))

    def memory(self, nbytes: int) -> Array:
        """So many bytes between two pages."""
        page = mmap.PAGESIZE
        size = -(-nbytes // page) * page
        pages = np.frombuffer(mmap.mmap(-1, size + 2 * page), np.uint8)
        pages[page : page + size] = _NEVER_WRITTEN
        for guard in (0, page + size):
            if _mprotect(pages.ctypes.data + guard, page, _PROT_NONE):
                raise OSError(ctypes.get_errno(), "mprotect")
        start = page + ((size - nbytes) // self.alignment * self.alignment if self.behind else 0)
        return pages[start : start + nbytes]

    def like(self, array: Array) -> Array:
        """A new array of the same shape and type; of objects, which cannot be guarded, an ordinary one."""
        if array.dtype.hasobject:
            return np.empty_like(array, order="C")
        return self.memory(array.nbytes).view(array.dtype).reshape(array.shape)

    def copy(self, array: Array) -> Array:
        """A packed copy."""
        found = self.like(array)
        found[...] = array
        return found

    def copies(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Of all."""
        return {name: self.copy(array) for name, array in arrays.items()}


@contextmanager
def guarded_memory(guards: Guards) -> Iterator[None]:
    """Nets that are prepared meanwhile work in guarded memory."""

    def allocated(nbytes: int, _what: str) -> Array:
        return guards.memory(nbytes)

    def taken(_pieces: Pieces, nbytes: int, _what: str = "") -> Array:
        return guards.memory(nbytes)

    def worked_in(arena: Arena, operator: int, nbytes: int) -> Array:
        given = working_memory(arena, operator, nbytes)  # whose book-keeping goes on
        return guards.memory(given.nbytes)

    def result(_net: str, _name: str, like: Array) -> Array:
        return guards.like(like)

    working_memory = Arena.working_memory
    with ExitStack() as stack:
        for module, name, replacement in (
            (host, "aligned_bytes", allocated),
            (descriptors, "aligned_bytes", allocated),
            (packed_copy, "aligned_bytes", allocated),
            (packing, "unshared_bytes", allocated),
            (tensor, "reserve", _no_addresses),
            (arena_memory, "reserve", _no_addresses),
            (Pieces, "take", taken),
            (Arena, "working_memory", worked_in),
            (MemoryPlan, "storage", _storage_apart(guards)),
            (MemoryPlan, "passing", _no_addresses_of),
            (io_binding, "new_result", result),
            (blocked_run, "new_result", result),
        ):
            stack.enter_context(patch.object(module, name, replacement))
        yield


def _no_addresses(_nbytes: int) -> None:
    """In place of `reserve`: memory that may grow where it is would have no end."""


def _storage_apart(guards: Guards) -> Callable[[MemoryPlan, int], Placed | None]:
    """`MemoryPlan.storage` with the memory of each buffer apart from that of all others."""
    memories: WeakKeyDictionary[MemoryPlan, dict[int, Array]] = WeakKeyDictionary()
    apart: WeakKeyDictionary[MemoryPlan, dict[int, Placed]] = WeakKeyDictionary()
    planned = MemoryPlan.storage

    def storage(plan: MemoryPlan, blob: int) -> Placed | None:
        found, known = planned(plan, blob), apart.setdefault(plan, {})
        if found is None or blob in known:
            return known.get(blob)
        place = plan._places[blob]
        buffer = plan.buffers[place.buffer]
        if not buffer.runtime.in_host_memory:
            return found
        own = memories.setdefault(plan, {})
        if place.buffer not in own:
            own[place.buffer] = guards.memory(buffer.nbytes)
        kind = place.type
        memory = own[place.buffer][place.offset : place.offset + kind.nbytes]
        guarded = Storage(memory, kind.nbytes, writable=False, reused=not buffer.kept)
        array = array_on(memory, kind.shape, kind.meta)
        known[blob] = Placed(array, guarded, kind, array.ctypes.data if buffer.device == CPU else None)
        plan._bound[buffer.device, -1 - blob, id(kind), buffer.kept] = known[blob]  # it is in the arenas for others
        return known[blob]

    return storage


def _no_addresses_of(_plan: MemoryPlan) -> dict[int, int]:
    """In place of `MemoryPlan.passing`: those in the arena are not where the tensors are."""
    return {}
