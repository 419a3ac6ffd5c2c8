"""Buffers for other shapes, found from those that a net had for some.

Which tensors share a piece of memory, and who touches it, mostly does not depend on sizes: they say how large the
pieces are. Where that may not be so the buffers are searched for anew: where tensors are laid into one another
(`zero_copy`), change their type within a run, or have no elements, strides, or storage of inputs.
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
"""An operator, and which of its outputs."""

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
        """What `find_buffers` finds, for the same net and `keep` at every call."""
        key = _kinds(inferred)
        known = self._known.get(key)
        found = None if known is None or known.order != order else known.buffers(inferred)
        if found is None:
            found = find_buffers(graph, operators, inferred, inputs, keep, order)
            if len(self._known) >= _MOST:
                self._known.clear()
            pattern = _Pattern(graph, operators, inferred, inputs, order, found)
            if pattern.serves(inferred):
                self._known[key] = pattern
        return found


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
        found: Buffers,
    ) -> None:
        self.order = order
        self._inputs = inputs
        self._buffers = found.buffers
        sources: dict[int, list[_Source]] = {}
        blobs: dict[int, Blob] = {}
        self._is_simple = not any(one.zero_copy for one in inferred if one is not None)
        for index, (operator, one) in enumerate(zip(operators, inferred, strict=True)):
            for place, blob in enumerate(operator.output_blobs if one is not None and not one.is_settled else ()):
                sources.setdefault(id(blob), []).append((index, place))
                blobs[id(blob)] = blob
        self._blobs = tuple(blobs.values())
        self._sources = tuple(map(tuple, sources.values()))
        self._places = tuple((key, place.buffer, *sources[key][0]) for key, place in found.places.items())
        self._own = tuple(
            rows[0]
            for key, rows in sources.items()
            if key not in found.places and not any(index in graph.views for index, _ in rows)
        )

    def serves(self, inferred: Sequence[Inferred | None]) -> bool:
        """True when outputs are packed tensors of one type, with elements, each its own and apart from the inputs."""
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
            first, *others = [one.types[place] for index, place in rows if (one := inferred[index]) is not None]
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
            found = inferred[index]
            assert found is not None
            kind = found.types[place]
            sizes[buffer] = kind.nbytes
            places[key] = BufferSlice(buffer, 0, kind)
        buffers = tuple([one._replace(nbytes=size) for one, size in zip(self._buffers, sizes, strict=True)])
        own = sum(one.types[place].nbytes for index, place in self._own if (one := inferred[index]) is not None)
        return Buffers(buffers, MappingProxyType(places), own)


def _kinds(inferred: Sequence[Inferred | None]) -> Hashable:
    """What operators are static and which of them settled, and the element types of what others give."""
    known: dict[int, Hashable] = {}  # by the id of what all that are alike have

    def kinds(one: Inferred | None) -> Hashable:
        if one is None or one.is_settled:
            return None if one is None else ()
        found = known.get(id(one))
        if found is None:
            found = known[id(one)] = tuple([kind.meta for kind in one.types])
        return found

    return tuple(map(kinds, inferred))
