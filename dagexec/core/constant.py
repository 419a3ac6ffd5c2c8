"""Constants: results computed from a tensor whose values never change, and how to restore its values.

`packed` makes packed forms, the values as kernels read them. Forms from elsewhere, such as a file, are given before the
first run (`keep`).

A constant that is packed for the operators that read it is in memory twice. Where nothing else reads it or will soon,
the plain values may be freed: packing is a permutation, and can be undone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from dagexec.errors import DagexecError
from dagexec.platform.addresses import address_of
from dagexec.platform.forking import ProcessLock

Derived = TypeVar("Derived")
Array = npt.NDArray[Any]

Keeper = Callable[[str], Array | None]
"""Returns a constant's packed form of this name; None where it has none."""

_LINE = 64  # bytes

MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 26
"""Smaller constants stay, and larger ones where only a trial copy shows that they can be restored."""

letting_go = ProcessLock()
"""Held while the values of a constant are freed or restored."""


class Constant:
    """Results computed from a tensor whose values never change, shared by all users: packed weights, say.

    Attributes:
        most_returns: how often the plain values may be restored and freed again; below 0 they stay.
    """

    __slots__ = (
        "__weakref__",
        "_derived",
        "_is_tried",
        "_keeper",
        "_lock",
        "_make",
        "_packed",
        "_returns",
        "most_returns",
    )

    def __init__(self) -> None:
        self._lock = ProcessLock()
        self._derived: dict[Hashable, object] = {}
        self._packed: dict[Hashable, Array] = {}
        self._keeper: Keeper | None = None
        self._make: Callable[[], Array] | None = None
        self._is_tried = False
        self._returns = 0
        self.most_returns = -1

    def derived(self, key: Hashable, compute: Callable[[], Derived]) -> Derived:
        """The result of `compute`, called once for `key`; callers that come while it is computed wait."""
        with self._lock.own:
            if key not in self._derived:
                self._derived[key] = compute()
            return cast(Derived, self._derived[key])

    def packed(self, form: Hashable, nbytes: int, compute: Callable[[], Array]) -> Array:
        """The values as kernels read them: read-only uint8 [nbytes], aligned to a cache line.

        `form` identifies all that the bytes depend on besides the values: layouts and transformations. A form that is
        text is the same in every process with these versions of dagexec and its libraries. The keeper is asked for such
        a form first; otherwise `compute` makes it, once: concurrent callers wait.
        """
        with self._lock.own:
            form_bytes = self._packed.get(form)
            if form_bytes is None:
                stored = self._kept(form, nbytes)
                form_bytes = self._packed[form] = compute() if stored is None else stored
                form_bytes.flags.writeable = False
            return form_bytes

    def find(self, form: Hashable, nbytes: int) -> Array | None:
        """The result of `packed` for `form`, if it exists; else None."""
        with self._lock.own:
            form_bytes = self._packed.get(form)
            if form_bytes is None and (form_bytes := self._kept(form, nbytes)) is not None:
                form_bytes.flags.writeable = False
                self._packed[form] = form_bytes
            return form_bytes

    def _kept(self, form: Hashable, nbytes: int) -> Array | None:
        form_bytes = self._keeper(form) if self._keeper is not None and isinstance(form, str) else None
        return form_bytes if form_bytes is not None and _is_packed(form_bytes, nbytes) else None

    def forms(self) -> Mapping[Hashable, Array]:
        """All results of `packed`, by form. Those with a text form may be stored, and passed to `keep` elsewhere."""
        with self._lock.own:
            return dict(self._packed)

    def keep(self, keeper: Keeper) -> None:
        """Have `packed` ask `keeper` for arrays: uint8 [nbytes], aligned to a cache line; others are not used.

        Their contents are trusted: only sizes are checked.
        """
        self._keeper = keeper

    def may_go(self, nbytes: int) -> bool:
        """False for values that are too small, and for those in the memory of a keeper."""
        return nbytes >= MIN_BYTES and self._keeper is None and self._make is None

    def can_be_made_by(self, make: Callable[[], Array], *, surely: bool = False) -> None:
        """`make` may restore the values in new memory, from derived results; it is tried unless it `surely` does."""
        if self._make is None:
            self._make, self._is_tried = make, surely

    def can_go(self, array: Array) -> bool:
        """True when `array`, the tensor's, is large, seems to be referred to by nothing else, and can be restored."""
        make = self._make
        limit = array.nbytes if self._is_tried else MAX_BYTES
        if make is None or not MIN_BYTES <= array.nbytes <= limit or self._returns > self.most_returns:
            return False
        if sys.getrefcount(array.base) > _REFERENCES:
            return False
        owner = array.base
        if not isinstance(owner, np.ndarray) or not owner.flags.c_contiguous:
            return False
        if not self._is_tried and not _gives(make, array):
            self._make = None
        self._is_tried = True
        return self._make is not None

    def made_anew(self) -> Array:
        """The values, in new memory."""
        assert self._make is not None
        array = self._make()
        self._returns += 1
        return array


_REFERENCES = 3
"""References to the memory of a tensor: from its array, its buffer, and the call that counts them."""


def _is_packed(array: Array, nbytes: int) -> bool:
    """True for `nbytes` bytes that are aligned to a cache line."""
    return array.dtype == np.uint8 and array.shape == (nbytes,) and address_of(array) % _LINE == 0


def _gives(make: Callable[[], Array], array: Array) -> bool:
    """True when `make` restores the bytes of `array`; False also where it fails, or memory is short."""
    try:
        values = make()
    except DagexecError:
        return False
    return values.shape == array.shape and values.dtype == array.dtype and np.array_equal(_words(values), _words(array))


def _words(array: Array) -> Array:
    """The bytes, as words of eight where their number allows it."""
    return array.reshape(-1).view(np.uint64 if array.nbytes % 8 == 0 else np.uint8)
