"""Caches: the keys and values of a decoder's attention, which stay where they are while positions are put behind them.

A session (`dagexec.executor.session`) holds one and lets nets of its executor reach it by a number, as a net is fed
arrays alone. Numbers are drawn at random: a net that was not given one finds nothing. A run that its session has given
up may still be computed, beside others: caches are renewed then, and no run of an older number writes to them.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32
from dagexec.errors import MissingBlobError, ShapeError
from dagexec.platform.host_memory import check_fits
from dagexec.platform.threads import threads

Array = npt.NDArray[Any]
Sizes = tuple[int, ...]

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
        self._moves = 0
        self._lock = threads().lock()
        _all[self.number] = self

    def renew(self) -> None:
        """A run was given up: it does not write here from now on, even where it is still being computed.

        It may have found arrays that it will write to, which are left to it.
        """
        with self._lock:
            self.keys = {layer: _copied(array) for layer, array in self.keys.items()}
            self.values = {layer: array.copy() for layer, array in self.values.items()}
            self._moves += 1
            renewals = (self.number >> _BITS) + 1
            self.number = self.number % (1 << _BITS) + (renewals % _MOST_RENEWALS << _BITS)

    def at(self, number: int, length: int) -> Held | None:
        """What a run reads and writes that begins now; None where `number` is not that of now."""
        with self._lock:
            if number != self.number:
                return None
            return Held(self.keys, self.values, self.fed, self.capacity, length, (number, self._moves))

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
            made_keys[layer] = _new_keys((batch, heads, elements, capacity))
            made_keys[layer][..., :length] = array[:, :, :length].swapaxes(2, 3)
        for layer, array in values.items():
            batch, heads, _, elements = array.shape
            made_values[layer] = np.empty((batch, heads, capacity, elements), np.float32)
            made_values[layer][:, :, :length] = array[:, :, :length]
        with self._lock:
            self.keys, self.values, self.capacity, self._moves = made_keys, made_values, capacity, self._moves + 1

    def held(self, length: int) -> tuple[dict[str, Array], dict[str, Array]]:
        """Keys and values of the first `length` positions, [batch, heads, positions, elements] by layer: views."""
        keys = {layer: array[..., :length].swapaxes(2, 3) for layer, array in self.keys.items()}
        return keys, {layer: array[:, :, :length] for layer, array in self.values.items()}


def bytes_of_caches(arrays: Iterable[Array], capacity: int) -> int:
    """Bytes of keys and values like these, [batch, heads, positions, elements], with room for `capacity` positions."""
    elements: int = sum(math.prod(array.shape[:2]) * array.shape[3] for array in arrays)
    return elements * capacity * FLOAT32.itemsize


def _new_keys(shape: Sizes) -> Array:
    keys: Array = np.empty((*shape[:3], shape[3] + _LINE), np.float32)[..., : shape[3]]
    return keys


def _copied(keys: Array) -> Array:
    own = _new_keys(keys.shape)
    own[...] = keys
    return own


class Held(NamedTuple):
    """What a run reads and writes of a session, which may let go of it meanwhile.

    Attributes:
        keys, values, fed, capacity: as of `Caches`.
        length: how many positions there are.
        memory: where it is, told from wherever else it was.
    """

    keys: dict[str, Array]
    values: dict[str, Array]
    fed: Mapping[str, Array] | None
    capacity: int
    length: int
    memory: tuple[int, int]

    def check_room(self, count: int, label: str) -> None:
        """Raises ShapeError, naming the operator `label`, where there is no room for so many positions more."""
        if self.fed is None and not 0 <= self.length <= self.capacity - count:
            raise self._misfit(count, label)

    def layer(self, names: tuple[str, str], new: tuple[Sizes, Sizes], label: str) -> tuple[Array, Array]:
        """Keys and values of a layer, with room for new ones of these sizes behind those that there are.

        Raises ShapeError, naming the operator `label`, where they do not fit.
        """
        batch, heads, count, elements = new[0]
        if self.fed is not None:
            for made, name, sizes in zip((self.keys, self.values), names, new, strict=True):
                past = self.fed[name]
                if past.shape != (*sizes[:2], self.length, sizes[3]):
                    raise self._misfit(count, label)
                made[name] = np.empty((*sizes[:2], self.length + count, sizes[3]), np.float32)
                made[name][:, :, : self.length] = past
            return self.keys[names[0]].swapaxes(2, 3), self.values[names[1]]
        self.check_room(count, label)
        keys, values = self.keys[names[0]], self.values[names[1]]
        if keys.shape[:3] != (batch, heads, elements):
            raise self._misfit(count, label)
        return keys, values

    def _misfit(self, count: int, label: str) -> ShapeError:
        return ShapeError(f"{label}: {count} positions behind {self.length} do not fit into the cache")


_all: WeakValueDictionary[int, Caches] = WeakValueDictionary()


def caches_of(number: int, label: str) -> Caches:
    """The caches with this number, or that had it. Raises MissingBlobError, naming the operator `label`."""
    caches = _all.get(number % (1 << _BITS))
    if caches is None:
        raise MissingBlobError(f"{label}: there are no caches with this number; only sessions have some")
    return caches


class Found(NamedTuple):
    """What a run finds.

    Attributes:
        held: of each session; None for none, or where the run was given up before it began.
        memory: where it is, told from wherever else it was.
    """

    held: list[Held | None]
    memory: list[tuple[int, int] | None]


def found_caches(numbers: Array, lengths: Array, label: str) -> Found:
    """What caches with these numbers hold; 0 is none. Raises as `caches_of`."""
    pairs = zip(numbers.tolist(), lengths.tolist(), strict=True)
    held = [caches_of(number, label).at(number, length) if number else None for number, length in pairs]
    return Found(held, [one and one.memory for one in held])
