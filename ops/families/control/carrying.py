"""What operators with bodies do with values from one execution to the next: carry them, and stack them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.blob import Blob, content_of, set_content, tensor_in
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import TensorType
from dagexec.core.tensor import Storage, Tensor, binding_epoch
from dagexec.core.traits import Rows
from dagexec.core.variant import Variant
from dagexec.errors import ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.platform.host_memory import check_fits

_FIRST_ROWS = 16


def require_kept(asked: RowsCall, before: Sequence[Rows | None], after: Sequence[Rows | None]) -> None:
    """Raise RowsError unless values have the rows after an execution of a net that they had before it."""
    for place, (one, two) in enumerate(zip(before, after, strict=True)):
        if one != two:
            raise asked.refuse(f"carried value {place} has other rows after an iteration than before: {one} and {two}")


class Carrying:
    """Brings what some blobs hold to others, all at once: no target is written before every source was read.

    While no tensor anywhere has moved since the last time, that is one copy a tensor; and little more while tensors
    have other sizes in the same memory, as those of growing loops.
    """

    def __init__(self, targets: Sequence[Blob], sources: Sequence[Blob]) -> None:
        """Element i of `sources` goes to element i of `targets`; one may be the other."""
        pairs = zip(targets, sources, strict=True)
        self._pairs = [(target, source) for target, source in pairs if target is not source]
        self._epoch = -1
        self._copies: list[tuple[Array, Array]] = []
        self._variants: list[tuple[Blob, Blob]] = []
        self._apart: list[tuple[Tensor, Tensor]] = []  # targets and sources
        self._memory: list[Storage | None] = []  # of these, in which no two of them meet

    def __call__(self) -> None:
        """Carry all of them once."""
        if self._epoch == binding_epoch():
            for target, source in self._copies:
                target[...] = source
        else:
            self._find_and_carry()
        if self._variants:
            contents = [content_of(source) for _, source in self._variants]
            for (blob, _), content in zip(self._variants, contents, strict=True):
                set_content(blob, content)

    def _find_and_carry(self) -> None:
        """Size the targets, carry tensors there, and note the copies for the next time.

        What lies in the memory of a target is brought elsewhere first.
        """
        if self._apart and self._memory == self._memory_now():
            self._copies = [(target.resize(one.shape, one.meta), one.array) for target, one in self._apart]
            for array, source in self._copies:
                array[...] = source
            self._epoch = binding_epoch()
            return
        self._variants = [(target, source) for target, source in self._pairs if isinstance(source.value, Variant)]
        moved = [(blob, source.get(Tensor)) for blob, source in self._pairs if not isinstance(source.value, Variant)]
        written = [blob.value.array for blob, _ in moved if isinstance(blob.value, Tensor) and not blob.value.is_empty]
        aside: list[tuple[Array, Array]] = []
        sources: list[Array] = []
        for _, tensor in moved:
            array = tensor.array
            if any(np.may_share_memory(array, other) for other in written):
                aside.append((array.copy(), array))
                array = aside[-1][0]
            sources.append(array)
        copies = []
        for (blob, tensor), array in zip(moved, sources, strict=True):
            target = tensor_in(blob).resize(tensor.shape, tensor.meta)
            target[...] = array
            copies.append((target, array))
        self._copies = [*aside, *copies]
        self._epoch = binding_epoch()
        self._apart = [] if self._variants else [(blob.get(Tensor), tensor) for blob, tensor in moved]
        self._memory = self._memory_now() if self._apart else []
        buffers = [None if one is None else one.buffer for one in self._memory]
        if not _are_apart(buffers[::2], buffers[1::2]):
            self._apart = []

    def _memory_now(self) -> list[Storage | None]:
        """Where the tensors of `_apart` are, None for what is not in its blob any more."""
        tensors = [tensor for pair in self._apart for tensor in pair]
        blobs = [blob for pair in self._pairs for blob in pair]
        return [one.storage() if blob.value is one else None for blob, one in zip(blobs, tensors, strict=True)]


def _are_apart(targets: Sequence[Array | None], sources: Sequence[Array | None]) -> bool:
    return not any(
        one is None or other is None or np.may_share_memory(one, other) for one in targets for other in sources
    )


class Stacking:
    """Rows that are gathered, one in each execution of a body: what one of its results holds then."""

    def __init__(self, source: Blob, label: str) -> None:
        """`label` is how messages name the operator."""
        self._source = source
        self._label = label
        self._rows: Array | None = None
        self.count = 0

    def clear(self) -> None:
        """Begin anew; the memory stays."""
        self.count = 0

    def add(self) -> None:
        """Append a row. Raises ShapeError when it is of another type than those before."""
        array = self._source.get(Tensor).array
        rows = self._rows
        if rows is None or rows.shape[1:] != array.shape or rows.dtype != array.dtype:
            rows = self._new_rows(array)
        elif self.count == len(rows):
            rows = self._grown(rows)
        rows[self.count] = array
        self.count += 1

    def stacked(self) -> Array:
        """The rows, as long as none is added; shape [count, ...]."""
        if self._rows is None:
            raise ShapeError(f"{self._label}: {self._source.name!r} has no rows")
        return self._rows[: self.count]

    def no_rows(self, kind: TensorType) -> Array:
        """An array of shape [0, ...] of the type that the rows would have; where that is not known, of `kind`."""
        value = self._source.value
        if isinstance(value, Tensor) and not value.is_empty:
            return np.empty((0, *value.shape), value.meta.numpy)
        return np.empty((0, *kind.shape), kind.meta.numpy)

    def _new_rows(self, array: Array) -> Array:
        if self.count:
            assert self._rows is not None
            raise ShapeError(
                f"{self._label}: {self._source.name!r} is stacked, so it must keep its type; it was "
                f"{self._rows.dtype}{list(self._rows.shape[1:])}, and in iteration {self.count} it is "
                f"{array.dtype}{list(array.shape)}"
            )
        self._rows = self._allocated(_FIRST_ROWS, array)
        return self._rows

    def _grown(self, rows: Array) -> Array:
        self._rows = self._allocated(2 * len(rows), rows[0])
        self._rows[: len(rows)] = rows
        return self._rows

    def _allocated(self, count: int, like: Array) -> Array:
        check_fits(count * like.nbytes, f"{self._label}: {count} rows of {self._source.name!r}, {like.shape} each")
        return np.empty((count, *like.shape), like.dtype)


def with_axis(kind: TensorType | None, axis: int, size: int) -> TensorType | None:
    """The type of `size` tensors of a type that are stacked in a new axis; None where that is not known."""
    if kind is None or not -len(kind.shape) - 1 <= axis <= len(kind.shape):
        return None
    place = axis + len(kind.shape) + 1 if axis < 0 else axis
    return TensorType((*kind.shape[:place], size, *kind.shape[place:]), kind.meta)


def deliver(target: Blob, array: Array) -> None:
    """Have `target` hold a copy of `array`."""
    tensor_in(target).feed(array)
