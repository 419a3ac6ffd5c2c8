"""The states of a session: arrays, and caches that attention reads and puts new positions behind.

Arrays are written by nobody once they are here, and caches of several sessions neither, so that a fork shares both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from dagexec.binding.io_binding import Array
from dagexec.compiler.stepping import Layer
from dagexec.core.caches import Caches, bytes_of_caches
from dagexec.executor.sessions.memory import SessionMemory

_LEAST_CAPACITY = 64
"""Positions that caches have room for at first; it doubles."""


class States:
    """Of one session.

    Attributes:
        arrays: by input of the model, those that are not in caches.
        caches: None where there are none.
    """

    def __init__(self, arrays: Mapping[str, Array], caches: Caches | None = None, layers: Sequence[Layer] = ()) -> None:
        self.arrays = dict(arrays)
        self.caches = caches
        self._layers = layers

    def fork(self) -> States:
        """The same for another session."""
        if self.caches is not None:
            self.caches.share()
        return States(self.arrays, self.caches, self._layers)

    def renew(self) -> None:
        """A run was given up, and writes to caches no more."""
        if self.caches is not None:
            self.caches.renew()

    def leave(self) -> None:
        """The session lets go of its caches."""
        if self.caches is not None:
            self.caches.leave()
        self.caches, self._layers = None, ()

    def names(self) -> set[str]:
        """The inputs of the model that they are."""
        return {*self.arrays, *(name for layer in self._layers for name in (layer.keys, layer.values))}

    def whole(self, length: int) -> dict[str, Array]:
        """All of them as the model has them, with so many positions in caches: views of these."""
        if self.caches is None:
            return dict(self.arrays)
        keys, values = self.caches.held(length)
        in_caches: dict[str, Array] = {}
        for layer in self._layers:
            in_caches[layer.keys] = keys[layer.keys].transpose(np.argsort(layer.key_axes))
            in_caches[layer.values] = values[layer.values].transpose(np.argsort(layer.value_axes))
        return {**self.arrays, **in_caches}

    def leave_caches(self, length: int) -> None:
        """Have all of them in arrays."""
        if self.caches is not None:
            self.arrays = {name: np.ascontiguousarray(array) for name, array in self.whole(length).items()}
            self.leave()

    def with_room(self, layers: Sequence[Layer], length: int, needed: int, memory: SessionMemory) -> Caches:
        """Caches that no other session has, with room for `needed` positions, of which there are `length`.

        The states of `layers` are in them. Raises ResourceError when the machine, or the limit of `memory`, does not
        allow for them.
        """
        caches = self.caches
        if caches is not None and caches.capacity >= needed and not caches.is_shared:
            return caches
        states = self.whole(length)
        keys = {layer.keys: states.pop(layer.keys).transpose(layer.key_axes) for layer in layers}
        values = {layer.values: states.pop(layer.values).transpose(layer.value_axes) for layer in layers}
        capacity = max(_LEAST_CAPACITY, 1 << (needed - 1).bit_length())
        is_own = caches is not None and not caches.is_shared
        nbytes = bytes_of_caches([*keys.values(), *values.values()], capacity)
        with memory.room(nbytes - (caches.nbytes if is_own and caches is not None else 0)):
            own = caches if is_own and caches is not None else Caches()
            own.take(keys, values, length, capacity)
            self.arrays, self.caches, self._layers = states, own, layers
        if caches is not None and caches is not own:
            caches.leave()
        return own

    def cut(self, length: int) -> int:
        """Have no room in caches for more than the `length` positions in them; the bytes saved.

        None are where other sessions share them.
        """
        caches = self.caches
        if caches is None or caches.is_shared or caches.capacity == length:
            return 0
        before = caches.nbytes
        caches.take(*caches.held(length), length, length)
        return before - caches.nbytes
