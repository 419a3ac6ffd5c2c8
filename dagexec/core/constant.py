"""What is kept of a tensor whose values never change: results computed from it, and how its values are made anew.

Packed forms, the values as kernels read them, are all made by `packed`. Who has some from elsewhere, a file say, gives
them before the first run (`keep`).

A constant that is packed for the operators that read it is in memory twice. Where nothing else reads it, and nothing
will ask for it soon, the plain values may go: packing them moved them, and can be undone.
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
"""Gives the packed form of a name of a constant; None where it has none."""

_LINE = 64  # bytes

MIN_BYTES, MAX_BYTES = 1 << 16, 1 << 26
"""Smaller constants stay, and larger ones where a copy has to be made to see that they can come back."""

letting_go = ProcessLock()
"""Held while the values of a constant go or come back."""


class Constant:
    """What was computed from a tensor whose values never change, kept for all who need it: packed weights, say.

    Attributes:
        most_returns: how often the plain values may come back and go again; below 0 they stay.
    """

    __slots__ = (
        "__weakref__",
        "_found",
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
        self._found: dict[Hashable, object] = {}
        self._packed: dict[Hashable, Array] = {}
        self._keeper: Keeper | None = None
        self._make: Callable[[], Array] | None = None
        self._is_tried = False
        self._returns = 0
        self.most_returns = -1

    def derived(self, key: Hashable, compute: Callable[[], Derived]) -> Derived:
        """The result of `compute`, called once for `key`; callers that come while it is computed wait."""
        with self._lock.own:
            if key not in self._found:
                self._found[key] = compute()
            return cast(Derived, self._found[key])

    def packed(self, form: Hashable, nbytes: int, compute: Callable[[], Array]) -> Array:
        """The values as kernels read them: bytes, uint8 [nbytes], on a line of a cache and not to be written to.

        `form` says all that the bytes depend on beside the values: layouts, and what else was done. A form that is text
        says it in the same words in every process of one version of dagexec and its libraries. Each is asked of the
        keeper, if it is text, else made by `compute`: once; callers that come meanwhile wait.
        """
        with self._lock.own:
            found = self._packed.get(form)
            if found is None:
                kept = self._kept(form, nbytes)
                found = self._packed[form] = compute() if kept is None else kept
                found.flags.writeable = False
            return found

    def find(self, form: Hashable, nbytes: int) -> Array | None:
        """What `packed` gives for `form` without making it; None where it has to be made."""
        with self._lock.own:
            found = self._packed.get(form)
            if found is None and (found := self._kept(form, nbytes)) is not None:
                found.flags.writeable = False
                self._packed[form] = found
            return found

    def _kept(self, form: Hashable, nbytes: int) -> Array | None:
        found = self._keeper(form) if self._keeper is not None and isinstance(form, str) else None
        return found if found is not None and _is_packed(found, nbytes) else None

    def forms(self) -> Mapping[Hashable, Array]:
        """All that `packed` gave, by form. Those whose form is text may be kept, and be given to `keep` elsewhere."""
        with self._lock.own:
            return dict(self._packed)

    def keep(self, keeper: Keeper) -> None:
        """Have `packed` ask `keeper` for arrays: uint8 [nbytes], on a line of a cache; others are not used.

        What it gives is taken to be what computing would give: only sizes are checked.
        """
        self._keeper = keeper

    def may_go(self, nbytes: int) -> bool:
        """False for values of so few bytes that they stay, and for those beside a keeper, whose memory they are in."""
        return nbytes >= MIN_BYTES and self._keeper is None and self._make is None

    def can_be_made_by(self, make: Callable[[], Array], *, surely: bool = False) -> None:
        """`make` may give the values in new memory, from what is derived; it is tried unless it `surely` does."""
        if self._make is None:
            self._make, self._is_tried = make, surely

    def can_go(self, array: Array) -> bool:
        """True when `array`, the tensor's, has much memory that nothing else seems to have, and can be made anew."""
        make = self._make
        most = array.nbytes if self._is_tried else MAX_BYTES
        if make is None or not MIN_BYTES <= array.nbytes <= most or self._returns > self.most_returns:
            return False
        owner = array.base
        if not isinstance(owner, np.ndarray) or not owner.flags.c_contiguous or sys.getrefcount(owner) > _REFERENCES:
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


_REFERENCES = 4
"""To the memory of a tensor: from its array, its buffer, and two from within `can_go`."""


def _is_packed(array: Array, nbytes: int) -> bool:
    """True for so many bytes on a line of a cache."""
    return array.dtype == np.uint8 and array.shape == (nbytes,) and address_of(array) % _LINE == 0


def _gives(make: Callable[[], Array], array: Array) -> bool:
    """True when `make` gives the bytes of `array`; False also where there is no memory for them, or no way."""
    try:
        made = make()
    except DagexecError:
        return False
    return made.shape == array.shape and made.dtype == array.dtype and np.array_equal(_words(made), _words(array))


def _words(array: Array) -> Array:
    """The bytes, eight at a time where they divide so."""
    return array.reshape(-1).view(np.uint64 if array.nbytes % 8 == 0 else np.uint8)
