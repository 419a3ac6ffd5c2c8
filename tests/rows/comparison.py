"""Examples that are run together, and each of them alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import dagexec
from dagexec import Executor
from dagexec.core.row_axes import find_row_axes
from tests.fuzz.near import same
from tests.rows.case import Array, Subject, of_examples


@dataclass(frozen=True)
class Difference:
    """An example has other values in a batch than alone.

    Attributes:
        size: of the batch.
        places: in it where bytes differ.
        output: in which they do.
        largest: of the differences, relative to the largest element.
    """

    size: int
    places: tuple[int, ...]
    output: str
    largest: float

    def __str__(self) -> str:
        which = "all" if len(self.places) == self.size else f"{len(self.places)}, the first at {self.places[0]},"
        return f"{which} of {self.size} in {self.output} ({self.largest:.0e})"


def differences(subject: Subject, sizes: Iterable[int], *, distinct: int = 64, **options: Any) -> Iterator[Difference]:
    """What `compared` finds, of all sizes."""
    for _, found in compared(subject, sizes, distinct=distinct, **options):
        yield from found


def compared(
    subject: Subject, sizes: Iterable[int], *, distinct: int = 64, **options: Any
) -> Iterator[tuple[int, list[Difference]]]:
    """Run batches of these sizes and compare every row, byte by byte, with the lone run of its example.

    Yields each size with what differs. The examples of a batch begin at another one in each, so that an example is at
    many places. `distinct` is how many examples there are, `options` those of `dagexec.compile`.
    """
    rows = find_row_axes(subject.model, subject.types(), subject.axes()).outputs
    with dagexec.compile(subject.model, **options) as executor:
        alone: dict[int, dict[str, Array]] = {}
        for size in sizes:
            chosen = [(size + place) % distinct for place in range(size)]
            together = _run(executor, subject, chosen)
            for number in set(chosen) - alone.keys():
                alone[number] = _run(executor, subject, [number])
            found = []
            for name, array in together.items():
                pairs = [
                    (of_examples(array, rows.get(name), [place], size), alone[number][name])
                    for place, number in enumerate(chosen)
                ]
                places = tuple(place for place, (one, other) in enumerate(pairs) if not same(one, other))
                if places:
                    found.append(Difference(size, places, name, max(_distance(*pairs[place]) for place in places)))
            yield size, found


def _run(executor: Executor, subject: Subject, chosen: Sequence[int]) -> dict[str, Array]:
    return {name: np.array(array) for name, array in executor.run(subject.feeds(chosen)).items()}


def _distance(one: Array, other: Array) -> float:
    """The largest difference, relative to the largest element; infinite for other shapes, NaN and texts."""
    if one.shape != other.shape or one.dtype == object:
        return np.inf
    wide, alone = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(invalid="ignore"):
        found = np.abs(wide - alone).max(initial=0) / max(np.abs(alone).max(initial=0), 1e-30)
    return float(np.inf if np.isnan(found) else found)
