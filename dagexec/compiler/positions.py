"""Numbers of positions: contents of blobs that follow from the sizes of a net alone, in which they are linear.

Each number is a sum: of one that is always the same, a multiple of the length, and for each axis that is as long as
the length a multiple of the position on it. So indices are told apart that lead to the element's own position.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.node import Node
from dagexec.platform.records import dataclass

Integers = npt.NDArray[np.int64]

FIXED, LENGTH = -1, -2
"""Keys of `Positions.terms` beside axes."""


@dataclass(frozen=True)
class Positions:
    """Such numbers.

    Attributes:
        terms: the summands: what is fixed, and the multiples of the length and of positions by axis. All have one
            shape, that of the blob with 1 for each axis that is as long as the length; those that are left out are 0.
    """

    terms: Mapping[int, Integers]

    @classmethod
    def of(cls, fixed: npt.ArrayLike, **_none: None) -> Positions:
        """Numbers that are always the same."""
        return cls({FIXED: np.asarray(fixed, np.int64)})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of each term."""
        return self.terms[FIXED].shape

    def term(self, key: int) -> Integers:
        """One of the summands."""
        found = self.terms.get(key)
        return np.zeros(self.shape, np.int64) if found is None else found

    @property
    def axes(self) -> list[int]:
        """Those on whose positions the numbers depend."""
        return [key for key, term in self.terms.items() if key >= 0 and term.any()]

    @property
    def is_fixed(self) -> bool:
        """All are always the same."""
        return not any(term.any() for key, term in self.terms.items() if key != FIXED)

    @property
    def is_of_length(self) -> bool:
        """Some of them depend on the length."""
        return bool(self.term(LENGTH).any())

    def changed(self, change: Callable[[Integers], Integers], moved: Callable[[int], int] = int) -> Positions:
        """With what a linear function of whole arrays makes of the terms, and axes that have moved."""
        return Positions({key if key < 0 else moved(key): change(term) for key, term in self.terms.items()})

    def only(self, key: int) -> Positions:
        """One summand, alone."""
        return Positions({FIXED: np.zeros(self.shape, np.int64), key: self.term(key)})


def added(one: Positions, other: Positions, sign: int = 1) -> Positions:
    """The sum, or the difference, as NumPy broadcasts."""
    shape = np.broadcast_shapes(one.shape, other.shape)
    terms: dict[int, Integers] = {}
    for positions, factor in ((one, 1), (other, sign)):
        behind = len(shape) - len(positions.shape)
        for key, term in positions.terms.items():
            place = key if key < 0 else key + behind
            terms[place] = terms.get(place, np.zeros(shape, np.int64)) + factor * np.broadcast_to(term, shape)
    return Positions(terms)


def multiplied(one: Positions, other: Positions) -> Positions | None:
    """The product, where one of them is always the same."""
    if other.is_fixed:
        factor = other.terms[FIXED]
        if not one.axes or factor.size == 1:
            rank = max(len(one.shape), factor.ndim)
            behind = rank - len(one.shape)
            return one.changed(lambda term: term * factor, lambda axis: axis + behind)
    return multiplied(other, one) if one.is_fixed and not other.is_fixed else None


def joined(parts: Sequence[Positions], axis: int) -> Positions:
    """One behind the other on an axis that is not as long as the length."""
    keys = dict.fromkeys(key for part in parts for key in part.terms)
    shape = np.broadcast_shapes(*((*part.shape[:axis], 1, *part.shape[axis + 1 :]) for part in parts))

    def whole(part: Positions, key: int) -> Integers:
        return np.broadcast_to(part.term(key), (*shape[:axis], part.shape[axis], *shape[axis + 1 :]))

    return Positions({key: np.concatenate([whole(part, key) for part in parts], axis) for key in keys})


def result_of(node: Node, inputs: Sequence[Positions | None]) -> Positions | None:
    """What a linear operator makes of such numbers, element by element; None for others."""
    if None in inputs or len(inputs) != 2:
        return None
    one, other = inputs
    assert one is not None
    assert other is not None
    if node.type in ("Add", "Sub"):
        return added(one, other, 1 if node.type == "Add" else -1)
    return multiplied(one, other) if node.type == "Mul" else None
