"""Operators of one form, with tensors of the same types, that are prepared together at the end of a preparation.

The first of them is prepared as usual, and says how the others differ (`Repeat` in `dagexec.core.operator`): they are
one table of native calls that differ only in addresses. `dagexec.core.numpy_alike` makes it for operators that are
calls of NumPy, engines make it for theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from dagexec.core.blob import Blob
from dagexec.core.device import CPU
from dagexec.core.numpy_alike import repeat_of
from dagexec.core.operator import Operator, Prepared, Repeat, Step
from dagexec.core.tensor import Tensor
from dagexec.scheduler.memory import Inferred
from dagexec.scheduler.plan import bindings
from dagexec.scheduler.plan.culprit import UnderWay


class Alike:
    """Operators like one that was prepared, whose inputs and outputs nobody sees: they are prepared together."""

    def __init__(self, inferred: Sequence[Inferred | None], fed: dict[int, int], passing: dict[int, int]) -> None:
        """Addresses by the ids of blobs: of packed tensors, `fed` or `passing`, whose place no other memory takes."""
        self._readable = {**fed, **passing}
        self._writable = passing
        self._repeats: dict[int, tuple[Repeat, list[int], list[Operator], list[list[int]]]] = {}  # by `Inferred`
        self._counts = Counter(map(id, inferred))

    def note(self, operator: Operator, record: Inferred, prepared: Prepared) -> None:
        """An operator has been prepared."""
        if self._counts[id(record)] > 1 and id(record) not in self._repeats:
            repeat = operator.repeat(prepared) or repeat_of(operator, prepared)
            if repeat is not None:
                self._repeats[id(record)] = repeat, [], [], []

    def takes(self, index: int, operator: Operator, record: Inferred) -> bool:
        """True for an operator that is left for the end."""
        group = self._repeats.get(id(record))
        if group is None or operator.runtime.device != CPU:
            return False
        readable, writable = self._readable, self._writable
        try:
            row = [readable[id(blob)] for blob in operator.input_blobs]
            row += [writable[id(blob)] for blob in operator.output_blobs]
        except KeyError:
            return False
        _, indices, operators, rows = group
        indices.append(index)
        operators.append(operator)
        rows.append(row)
        return True

    def steps(self, under_way: UnderWay) -> Iterator[tuple[int, Step | None]]:
        """Their steps, by number; None for one that has to be prepared alone."""
        for repeat, indices, operators, rows in self._repeats.values():
            if indices:
                under_way.operator = operators[0]
                yield from zip(indices, repeat(operators, np.array(rows, np.int64)), strict=True)


class AlikeUnplanned(Alike):
    """The same where each output gets memory of its own here, as outputs too small to be replaced do."""

    def __init__(self, inferred: Sequence[Inferred | None], fed: dict[int, int], steady: frozenset[int]) -> None:
        """`steady` are the ids of blobs that keep the memory which their operator gives them."""
        super().__init__(inferred, fed, {})
        self._steady = steady

    def note(self, operator: Operator, record: Inferred, prepared: Prepared) -> None:
        super().note(operator, record, prepared)
        self._readable.update(_addresses(blob for blob in operator.output_blobs if id(blob) in self._steady))

    def takes(self, index: int, operator: Operator, record: Inferred) -> bool:
        if id(record) not in self._repeats or record.nbytes >= bindings.MIN_BYTES_BOUND:
            return False
        outputs = operator.output_blobs
        if not all(id(blob) in self._steady and _is_packed(blob) for blob in outputs):
            return False
        if not all(id(blob) in self._readable for blob in operator.input_blobs):
            return False
        operator.size_outputs(record.types)
        addresses = _addresses(outputs)
        self._readable.update(addresses)
        self._writable.update(addresses)
        return super().takes(index, operator, record)


def written_once(operators: Sequence[Operator], inputs: Iterable[Blob]) -> frozenset[int]:
    """The ids of blobs that one operator writes, and whose tensor no other blob has."""
    blobs = {id(blob): blob for blob in (*inputs, *outputs_of(operators))}
    writes = Counter(map(id, outputs_of(operators)))
    tensors = Counter([id(blob.value) for blob in blobs.values() if blob.value is not None])
    return frozenset(key for key, count in writes.items() if count == 1 and tensors.get(id(blobs[key].value), 0) <= 1)


def small_inputs(operators: Sequence[Operator], inputs: Iterable[Blob]) -> dict[int, int]:
    """The addresses of inputs that are only read, and too small to be read from a caller's arrays."""
    written = set(map(id, outputs_of(operators)))
    return _addresses(blob for blob in inputs if id(blob) not in written)


def _addresses(blobs: Iterable[Blob]) -> dict[int, int]:
    """Addresses of packed tensors on the host, no constants, too small to be replaced by a caller's arrays."""
    return {
        id(blob): tensor.address
        for blob in blobs
        if isinstance(tensor := blob.value, Tensor)
        and tensor.constant is None
        and not tensor.is_empty
        and tensor.is_packed
        and tensor.device == CPU
        and tensor.nbytes < bindings.MIN_BYTES_BOUND
    }


def _is_packed(blob: Blob) -> bool:
    return not isinstance(blob.value, Tensor) or blob.value.is_packed


def outputs_of(operators: Sequence[Operator]) -> Iterator[Blob]:
    """The blobs that operators write, in order, each as often as it is written."""
    return (blob for operator in operators for blob in operator.output_blobs)
