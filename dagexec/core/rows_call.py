"""What a rule of rows may look at; the rules that operators share are in `rows`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy.typing as npt

from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import RowsError
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class RowsCall:
    """What a rule may look at: an operator as it is called with so many `examples`.

    Attributes:
        outputs: types of the outputs.
        rows: those of the inputs; None for an input that all examples share.
        counted: inputs whose contents depend on the number of examples, such as a shape.
        growing: by output, the axes whose sizes depend on the number of examples.
        contents: by input, what it holds for each of `numbers` of examples; None where that is not known.
        results: the rows of what the net in an argument results in, from those of what it is given besides what it
            captures. Raises RowsError where they are not apart in the net.
    """

    call: OperatorCall
    outputs: Sequence[TensorType]
    rows: Sequence[Rows | None]
    counted: Collection[int]
    growing: Sequence[Collection[int]]
    examples: int
    numbers: Sequence[int]
    contents: Sequence[Sequence[npt.NDArray[Any] | None]]
    results: Callable[[str, Sequence[Rows | None]], Sequence[Rows | None]]

    def refuse(self, problem: str) -> RowsError:
        """A RowsError naming the operator; the caller raises it."""
        return RowsError(f"{self.call.label}: {problem}")

    def mixes(self, axis: int) -> RowsError:
        """The error for an operator that computes across the axis of rows; the caller raises it."""
        return self.refuse(f"works along axis {axis}, which is that of the rows")

    def without_rows(self) -> RowsError:
        """The error where none of the inputs has rows and an output grows with them; the caller raises it."""
        return self.refuse("gives a tensor that grows with the number of rows, from inputs without rows")

    def require_uncounted(self, count: int | None = None) -> None:
        """Raise RowsError if an input, or one of the first `count`, depends on the number of rows."""
        for index in self.counted if count is None else set(self.counted).intersection(range(count)):
            raise self.refuse(f"input {self.call.definition.input[index]!r} depends on the number of rows")

    def require_shared(self, indices: Iterable[int]) -> None:
        """Raise RowsError if one of these inputs has rows."""
        for index in indices:
            if self.rows[index] is not None:
                raise self.refuse(f"input {self.call.definition.input[index]!r} differs from row to row")

    def only(self, *indices: int) -> Rows:
        """The rows of the inputs that have some, which may be `indices` alone, and on one and the same axis."""
        self.require_uncounted()
        found = self.common({index: rows for index, rows in enumerate(self.rows) if rows is not None})
        self.require_shared(index for index in range(len(self.rows)) if index not in indices)
        return found

    def common(self, rows: dict[int, Rows]) -> Rows:
        """The one value of `rows`, by input. Raises RowsError where they differ."""
        found = set(rows.values())
        if not found:
            raise self.without_rows()
        if len(found) != 1:
            named = ", ".join(f"{self.call.definition.input[index]!r}: {one}" for index, one in rows.items())
            raise self.refuse(f"the rows of its inputs are on different axes ({named})")
        return found.pop()

    def known_contents(self, index: int) -> list[npt.NDArray[Any]]:
        """What input `index` holds for each of the numbers of examples. Raises RowsError where that is not known."""
        found = [one for one in self.contents[index] if one is not None]
        if len(found) != len(self.numbers):
            raise self.refuse(f"input {self.call.definition.input[index]!r} depends on the number of rows")
        return found

    def rank(self, index: int) -> int:
        """The number of axes of input `index`."""
        return len(self.call.inputs[index].shape)

    def all_outputs(self, rows: Rows) -> list[Rows | None]:
        """`rows` for each output."""
        return [rows] * len(self.outputs)


RowsRule = Callable[[RowsCall], Sequence[Rows | None]]
"""See `OpSchema.rows`; called if an input has rows or an output grows. Raises RowsError."""
