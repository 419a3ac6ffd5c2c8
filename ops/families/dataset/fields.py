"""FieldTree: the columns of a table whose rows have lists, by names such as `words:lengths` and `words:values`.

A field `a:lengths` says how many elements of the fields below `a` each row has. Fields whose elements are counted alike
are of one domain: the root, with an element a row, or that of a lengths field.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.operator import Operator
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.platform.records import dataclass

_NO_LIMIT = np.iinfo(np.int64).max

FIELDS = "the names of the fields, `:` between the parts of one"


@dataclass(frozen=True)
class FieldTree:
    """Fields in order.

    Attributes:
        names: of the fields.
        domains: of each field; 0 is the root, 1 + j that of lengths field j.
        lengths: which fields are lengths fields.
    """

    names: tuple[str, ...]
    domains: tuple[int, ...]
    lengths: tuple[int, ...]

    @staticmethod
    def of(operator: Operator) -> FieldTree:
        """That of argument `fields`. Raises ArgumentError for none, and for a field whose lengths come behind it."""
        names = tuple(operator.arguments.strings("fields"))
        if not names:
            raise ArgumentError(f"{operator.label}: argument 'fields' names no field")
        parts = [name.split(":") for name in names]
        lengths = tuple(index for index, name in enumerate(parts) if name[-1] == "lengths")
        domains = []
        for index, name in enumerate(parts):
            depth, domain = 0, 0
            for number, field in enumerate(lengths):
                above = parts[field][:-1]
                if field != index and len(above) >= depth and name[: len(above)] == above:
                    depth, domain = len(above), 1 + number
            if domain and lengths[domain - 1] > index:
                raise ArgumentError(
                    f"{operator.label}: field {names[index]!r} comes before its lengths, {names[lengths[domain - 1]]!r}"
                )
            domains.append(domain)
        return FieldTree(names, tuple(domains), lengths)

    def parent(self, domain: int) -> int:
        """The domain of the lengths field of another domain than the root."""
        return self.domains[self.lengths[domain - 1]]


class Table:
    """The columns of a run."""

    def __init__(self, tree: FieldTree, columns: Sequence[Array], label: str) -> None:
        """Raises ShapeError for other columns than the tree has, and where lengths are not a vector of int32."""
        self.tree, self.columns, self._label = tree, columns, label
        if len(columns) != len(tree.names):
            raise ShapeError(f"{label}: expected {len(tree.names)} fields, {list(tree.names)}; found {len(columns)}")
        for name, column in zip(tree.names, columns, strict=True):
            if not column.ndim:
                raise ShapeError(f"{label}: field {name!r} is a scalar; expected a row for each element")
        for field in tree.lengths:
            column = columns[field]
            if column.dtype != np.int32 or column.ndim != 1:
                raise ShapeError(
                    f"{label}: field {tree.names[field]!r} must be a vector of int32; "
                    f"found {column.dtype}{list(column.shape)}"
                )
        self.limits = [
            min(
                (len(column) for column, of in zip(columns, tree.domains, strict=True) if of == domain),
                default=_NO_LIMIT,
            )
            for domain in range(1 + len(tree.lengths))
        ]

    def offsets(self, starts: Sequence[int], rows: int) -> Array:
        """Where each of the next `rows` rows from `starts` begins in each domain, and where the last one ends.

        Fewer where there are fewer. Raises ShapeError where lengths add up to more than there is, or are negative.
        """
        begin, end = starts[0], min(starts[0] + rows, self.limits[0])
        if not 0 <= begin <= end:
            raise ShapeError(f"{self._label}: the cursor is at row {begin} of {self.limits[0]}")
        bounds = [np.arange(begin, end + 1)]
        for domain in range(1, len(self.limits)):
            places = bounds[self.tree.parent(domain)]
            first, last = int(places[0]), int(places[-1])
            lengths = self.columns[self.tree.lengths[domain - 1]][first:last]
            if len(lengths) != last - first or (lengths < 0).any():
                raise self._inconsistent(domain)
            sums = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
            bounds.append(starts[domain] + sums[places - first])
            if not 0 <= starts[domain] <= bounds[-1][-1] <= self.limits[domain]:
                raise self._inconsistent(domain)
        return np.stack(bounds, axis=1)

    def piece(self, begins: Array, ends: Array) -> list[Array]:
        """The part of each column from one place to another, which are given for each domain."""
        places = zip(self.columns, self.tree.domains, strict=True)
        return [column[begins[domain] : ends[domain]] for column, domain in places]

    def check(self) -> None:
        """Raise ShapeError unless fields of a domain are equally long, and lengths add up to what there is."""
        for name, column, domain in zip(self.tree.names, self.columns, self.tree.domains, strict=True):
            if len(column) != self.limits[domain]:
                raise ShapeError(
                    f"{self._label}: field {name!r} has {len(column)} elements, others beside it {self.limits[domain]}"
                )
        ends = self.offsets([0] * len(self.limits), self.limits[0])[-1]
        for domain, end in enumerate(ends):
            if end != self.limits[domain]:
                raise self._inconsistent(domain)

    def _inconsistent(self, domain: int) -> ShapeError:
        names = [name for name, of in zip(self.tree.names, self.tree.domains, strict=True) if of == domain]
        return ShapeError(
            f"{self._label}: the lengths in {self.tree.names[self.tree.lengths[domain - 1]]!r} do not add up to the "
            f"{self.limits[domain]} elements of {names}"
        )


def columns_of(operator: Operator, first: int = 0) -> list[Array]:
    """The inputs from `first` on, as they are in this run."""
    return [operator.x(index) for index in range(first, len(operator.input_blobs))]
