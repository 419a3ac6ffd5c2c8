"""Caches: the keys and values of a decoder's attention, which stay where they are while positions are put behind them.

A session (`dagexec.executor.session`) holds one and lets nets of its executor reach it by a number, as a net is fed
arrays alone. Numbers are drawn at random: a net that was not given one finds nothing. A run that its session has given
up may still be computed, beside others: caches are renewed then, and no run of an older number writes to them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import MissingBlobError, ShapeError
from dagexec.platform.host_memory import check_fits
from dagexec.platform.threads import threads

Array = npt.NDArray[Any]

_LINE = 16
"""Elements of a cache line, by which rows of keys are longer than they need be: as many bytes as a power of two apart
they would contend for few places of the first cache."""

_BITS = 44
"""Of a number, those that are drawn. How often caches were renewed is in the others."""

_MOST_RENEWALS = 1 << 18


class Caches:
    """Of one session.

    Attributes:
        number: by which `caches_of` finds it, never 0.
        keys: by layer, float32 [batch, heads, elements, capacity]: positions are next to each other.
        values: by layer, float32 [batch, heads, capacity, elements].
        capacity: how many positions there is room for.
        fed: what a run without a session was fed, by layer; [batch, heads, positions, elements]. Keys and values are
            then what becomes of it, in new memory with room for the new positions.
    """

    def __init__(self, fed: Mapping[str, Array] | None = None) -> None:
        self.fed = fed
        self.number = secrets.randbits(_BITS) | 1
        self.keys: dict[str, Array] = {}
        self.values: dict[str, Array] = {}
        self.capacity = 0
        self._sessions = 1
        self._lock = threads().lock()
        _all[self.number] = self

    def renew(self) -> None:
        """A run was given up: it does not write here from now on, even where it is still being computed."""
        with self._lock:
            renewals = (self.number >> _BITS) + 1
            self.number = self.number % (1 << _BITS) + (renewals % _MOST_RENEWALS << _BITS)

    def appended(
        self, number: int, layer: tuple[str, str], new: tuple[Array, Array], start: int, label: str
    ) -> tuple[Array, Array] | None:
        """Keys and values of a layer with new positions behind the `start` that there are.

        None, and nothing is written, where `number` is not that of now. Raises ShapeError, naming the operator `label`,
        where the new ones do not fit.
        """
        with self._lock:
            if number != self.number:
                return None
            added = self._added_to_fed if self.fed is not None else self._added
            arrays = added(layer, new, start, start + new[0].shape[2])
        if arrays is None:
            raise ShapeError(f"{label}: {new[0].shape[2]} positions behind {start} do not fit into the cache")
        return arrays

    def _added_to_fed(
        self, layer: tuple[str, str], new: tuple[Array, Array], start: int, stop: int
    ) -> tuple[Array, Array] | None:
        assert self.fed is not None
        for made, name, array in zip((self.keys, self.values), layer, new, strict=True):
            past = self.fed[name]
            if past.shape[:2] != array.shape[:2] or past.shape[2:] != (start, array.shape[3]):
                return None
            made[name] = np.empty((*array.shape[:2], stop, array.shape[3]), np.float32)
            np.concatenate((past, array), 2, out=made[name])
        return self.keys[layer[0]].swapaxes(2, 3), self.values[layer[1]]

    def _added(
        self, layer: tuple[str, str], new: tuple[Array, Array], start: int, stop: int
    ) -> tuple[Array, Array] | None:
        keys, values = self.keys[layer[0]], self.values[layer[1]]
        if not 0 <= start <= stop <= self.capacity or keys.shape[:3] != (*new[0].shape[:2], new[0].shape[3]):
            return None
        keys[..., start:stop] = new[0].swapaxes(2, 3)
        values[:, :, start:stop] = new[1]
        return keys, values

    @property
    def is_shared(self) -> bool:
        """Several sessions have them, so that none may write to them."""
        return self._sessions > 1

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, with room for more."""
        return sum(array.nbytes for array in (*self.keys.values(), *self.values.values()))

    def share(self) -> None:
        """One more session has them; none writes to them from now on."""
        with self._lock:
            self._sessions += 1

    def leave(self) -> bool:
        """A session that had others beside it has them no more. False for the only one."""
        with self._lock:
            is_shared = self._sessions > 1
            self._sessions -= is_shared
        return is_shared

    def take(self, keys: Mapping[str, Array], values: Mapping[str, Array], length: int, capacity: int) -> None:
        """Have room for `capacity` positions, and these `length` in it: [batch, heads, positions, elements] by layer.

        Raises ResourceError when the machine cannot hold them.
        """
        check_fits(bytes_of_caches([*keys.values(), *values.values()], capacity), f"caches of {capacity} positions")
        made_keys, made_values = dict[str, Array](), dict[str, Array]()
        for layer, array in keys.items():
            batch, heads, _, elements = array.shape
            whole = np.empty((batch, heads, elements, capacity + _LINE), np.float32)
            made_keys[layer] = whole[..., :capacity]
            made_keys[layer][..., :length] = array[:, :, :length].swapaxes(2, 3)
        for layer, array in values.items():
            batch, heads, _, elements = array.shape
            made_values[layer] = np.empty((batch, heads, capacity, elements), np.float32)
            made_values[layer][:, :, :length] = array[:, :, :length]
        self.keys, self.values, self.capacity = made_keys, made_values, capacity

    def held(self, length: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Keys and values of the first `length` positions, [batch, heads, positions, elements] by layer: views."""
        keys = {layer: array[..., :length].swapaxes(2, 3) for layer, array in self.keys.items()}
        return keys, {layer: array[:, :, :length] for layer, array in self.values.items()}


def bytes_of_caches(arrays: Iterable[Array], capacity: int) -> int:
    """Bytes of keys and values like these, [batch, heads, positions, elements], with room for `capacity` positions."""
    elements: int = sum(math.prod(array.shape[:2]) * array.shape[3] for array in arrays)
    return elements * capacity * FLOAT32.itemsize


_all: WeakValueDictionary[int, Caches] = WeakValueDictionary()


def caches_of(number: int, label: str) -> Caches:
    """The caches with this number, or that had it. Raises MissingBlobError, naming the operator `label`."""
    caches = _all.get(number % (1 << _BITS))
    if caches is None:
        raise MissingBlobError(f"{label}: there are no caches with this number; only sessions have some")
    return caches
