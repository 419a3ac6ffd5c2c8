"""Buffers for other shapes, derived from those that a net had for some shapes.

Which tensors share a piece of memory, and which operators touch it, mostly does not depend on sizes. Where it may, the
buffers are searched for anew: where tensors are laid into one another (`zero_copy`), change their type within a run, or
have no elements, strides, or storage of inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from types import MappingProxyType

from dagexec.core.blob import Blob
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator
from dagexec.core.tensor import Tensor
from dagexec.scheduler.memory.buffers import Buffers, BufferSlice, Inferred, find_buffers
from dagexec.scheduler.memory.lifetime import Order

_Source = tuple[int, int]
"""An operator, and the number of its output."""

_MOST = 8


class BufferPatterns:
    """How the buffers of one net follow from the types of its tensors."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Pattern] = {}

    def find(
        self,
        graph: Graph,
        operators: Sequence[Operator],
        inferred: Sequence[Inferred | None],
        inputs: Collection[Blob],
        keep: Collection[str],
        order: Order,
    ) -> Buffers:
        """The result of `find_buffers`, for the same net and `keep` at every call."""
        key = _kinds(inferred)
        earlier = self._known.get(key)
        buffers = None if earlier is None or earlier.order != order else earlier.buffers(inferred)
        if buffers is None:
            buffers = find_buffers(graph, operators, inferred, inputs, keep, order)
            if len(self._known) >= _MOST:
                self._known.clear()
            pattern = _Pattern(graph, operators, inferred, inputs, order, buffers)
            if pattern.serves(inferred):
                self._known[key] = pattern
        return buffers


class _Pattern:
    """The buffers of a net as they follow from the types.

    Attributes:
        order: which operators are done before which begin.
    """

    def __init__(
        self,
        graph: Graph,
        operators: Sequence[Operator],
        inferred: Sequence[Inferred | None],
        inputs: Collection[Blob],
        order: Order,
        buffers: Buffers,
    ) -> None:
        self.order = order
        self._inputs = inputs
        self._buffers = buffers.buffers
        sources: dict[int, list[_Source]] = {}
        blobs: dict[int, Blob] = {}
        self._is_simple = not any(record.zero_copy for record in inferred if record is not None)
        for index, (operator, record) in enumerate(zip(operators, inferred, strict=True)):
            for place, blob in enumerate(operator.output_blobs if record is not None and not record.is_settled else ()):
                sources.setdefault(id(blob), []).append((index, place))
                blobs[id(blob)] = blob
        self._blobs = tuple(blobs.values())
        self._sources = tuple(map(tuple, sources.values()))
        self._places = tuple((key, place.buffer, *sources[key][0]) for key, place in buffers.places.items())
        self._own = tuple(
            rows[0]
            for key, rows in sources.items()
            if key not in buffers.places and not any(index in graph.views for index, _ in rows)
        )

    def serves(self, inferred: Sequence[Inferred | None]) -> bool:
        """True when outputs are packed tensors of one type, with elements, apart from each other and the inputs."""
        values = [blob.value for blob in self._blobs]
        if not self._is_simple or len(set(map(id, values))) != len(values):
            return False
        storages = {id(blob.value.storage()) for blob in self._inputs if isinstance(blob.value, Tensor)}
        for value in values:
            if not isinstance(value, Tensor) or not value.is_packed:
                return False
            if not value.is_empty and id(value.storage()) in storages:
                return False
        for rows in self._sources:
            first, *others = [record.types[place] for index, place in rows if (record := inferred[index]) is not None]
            if not first.nbytes or any(other != first for other in others):
                return False
        return True

    def buffers(self, inferred: Sequence[Inferred | None]) -> Buffers | None:
        """The buffers for `inferred`, which has the same element types; None where they do not follow."""
        if not self.serves(inferred):
            return None
        sizes = [0] * len(self._buffers)
        places = {}
        for key, buffer, index, place in self._places:
            record = inferred[index]
            assert record is not None
            kind = record.types[place]
            sizes[buffer] = kind.nbytes
            places[key] = BufferSlice(buffer, 0, kind)
        buffers = tuple([buffer._replace(nbytes=size) for buffer, size in zip(self._buffers, sizes, strict=True)])
        own = sum(record.types[place].nbytes for index, place in self._own if (record := inferred[index]) is not None)
        return Buffers(buffers, MappingProxyType(places), own)


def _kinds(inferred: Sequence[Inferred | None]) -> Hashable:
    """Which operators are static, which of these settled, and the element types of the others' outputs."""
    cache: dict[int, Hashable] = {}  # by the id of what all that are alike have

    def kinds(record: Inferred | None) -> Hashable:
        if record is None or record.is_settled:
            return None if record is None else ()
        result = cache.get(id(record))
        if result is None:
            result = cache[id(record)] = tuple([kind.meta for kind in record.types])
        return result

    return tuple(map(kinds, inferred))
