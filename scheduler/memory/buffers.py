"""Buffers: which tensors of a net share one piece of memory in any plan, and which operators touch it.

A buffer is the output of an operator, with the tensors in place with it and its views. Where an operator has the
argument `zero_copy`, the buffers of the tensors that it joins become parts of its result's buffer, and the pieces that
it cuts are views of its input, provided that nobody can see the difference:

- no operator writes a joined tensor, or anything else in its buffer, once it has been joined;
- no operator writes the result while a joined tensor is still to be read;
- the result has the same values wherever a buffer's values lie, so that two results may share a part (the blocks of
  DenseNet join all that was joined before, and something new).

Other tensors keep memory of their own: inputs, parameters and whatever a run leaves for the next; tensors of operators
whose shapes depend on values; strings; strided tensors; tensors that change their type within a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from dagexec.core.blob import Blob
from dagexec.core.device import Device
from dagexec.core.dtypes import STRING
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator
from dagexec.core.runtime import DeviceRuntime
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.core.tensor import Tensor
from dagexec.platform.records import dataclass
from dagexec.scheduler.memory.content import ByteRange, Content
from dagexec.scheduler.memory.lifetime import Order


@dataclass(frozen=True, slots=True, eq=False)
class Inferred:
    """What is known of operators of static shapes before preparation; equal operators of a net share it.

    If it `is_settled`, the outputs have memory of their own, and a run touches neither them nor the inputs.

    Attributes:
        first: what inference saw of the first of the operators.
        types: of the outputs.
        seconds: the estimated time.
        nbytes: of the outputs.
        fits: that many bytes are available for it, where it shares memory with others.
        zero_copy: what it joins or cuts may lie in one piece of memory.
    """

    first: OperatorCall
    types: tuple[TensorType, ...]
    seconds: float
    nbytes: int
    is_settled: bool = False
    fits: bool = False
    zero_copy: bool = False

    def seen_of(self, operator: Operator) -> OperatorCall | None:
        """What inference saw of `operator`, if that is the one it saw; else None."""
        return self.first if self.first.definition is operator.definition else None

    def call(self, operator: Operator) -> OperatorCall:
        """What inference would see of `operator`."""
        return self.seen_of(operator) or operator.call(self.first.inputs)


class Buffer(NamedTuple):
    """Memory of one or more tensors.

    Attributes:
        name: of the first tensor.
        nbytes: its size.
        users: the operators that touch it, ascending.
        kept: its content must survive the run.
        runtime: of its device.
    """

    name: str
    nbytes: int
    users: tuple[int, ...]
    kept: bool
    runtime: DeviceRuntime

    @property
    def device(self) -> Device:
        """Where it is."""
        return self.runtime.device


class BufferSlice(NamedTuple):
    """The buffer of a tensor, and where in it the tensor begins."""

    buffer: int
    offset: int
    type: TensorType


@dataclass(frozen=True)
class Buffers:
    """The buffers of a net.

    Attributes:
        buffers: all of them.
        places: the place of each blob that has one, by its id.
        own_bytes: bytes of the outputs that keep memory of their own.
    """

    buffers: tuple[Buffer, ...]
    places: Mapping[int, BufferSlice]
    own_bytes: int


class _Uses:
    """The operators that touch a blob, in list order, and the types that it gets: the first, and any others."""

    __slots__ = ("blob", "others", "readers", "type", "writers")

    def __init__(self, blob: Blob) -> None:
        self.blob = blob
        self.readers: list[int] = []
        self.writers: list[int] = []
        self.type: TensorType | None = None
        self.others: list[TensorType] | None = None

    @property
    def nbytes(self) -> int:
        """The size of its largest type."""
        types = [self.type, *(self.others or ())]
        return max(0 if kind is None else kind.nbytes for kind in types)


class _Root:
    """A buffer under construction; `members` are the offsets of blobs."""

    __slots__ = ("content", "members", "nbytes")

    def __init__(self, nbytes: int, key: int) -> None:
        self.nbytes = nbytes
        self.members = {key: 0}
        self.content: Content | None = None  # what its own operator writes

    def found_content(self, key: int) -> Content:
        """Which values lie where in it; `key` is the blob that it was made for."""
        if self.content is None:
            self.content = Content((ByteRange(0, self.nbytes, key, 0),))
        return self.content


def find_buffers(
    graph: Graph,
    operators: Sequence[Operator],
    inferred: Sequence[Inferred | None],
    inputs: Collection[Blob],
    keep: Collection[str],
    order: Order,
) -> Buffers:
    """The buffers of a net in which operator i has static shapes if `inferred[i]` is not None.

    `inputs` are read before they are written; `keep` names the blobs whose values must survive the run. Empty output
    blobs get a tensor, as they would in preparation.
    """
    return _Search(graph, operators, inferred, inputs, keep, order).run()


class _Search:
    def __init__(
        self,
        graph: Graph,
        operators: Sequence[Operator],
        inferred: Sequence[Inferred | None],
        inputs: Collection[Blob],
        keep: Collection[str],
        order: Order,
    ) -> None:
        self._graph = graph
        self._operators = operators
        self._inferred = inferred
        self._keep = keep
        self._order = order
        self._uses = _uses_of(operators, inferred)
        self._nbytes: dict[int, int] = {}  # by the id of a type
        self._plannable = self._find_plannable(inputs)
        self._roots: dict[int, _Root] = {}  # by the id of the blob it was made for
        self._root_of: dict[int, int] = {}

    def run(self) -> Buffers:
        """Go through the operators in list order."""
        for index, (operator, record) in enumerate(zip(self._operators, self._inferred, strict=True)):
            if record is None or record.is_settled:
                continue
            for place, blob in enumerate(operator.output_blobs):
                key = id(blob)
                if key in self._plannable and key not in self._root_of:
                    self._add_output(index, operator, record, place, key)
            if record.zero_copy and operator.schema.joined is not None:
                self._lay_joined(index, operator, operator.schema.joined(record.call(operator), record.types))
        return self._finished()

    def _add_output(self, index: int, operator: Operator, record: Inferred, place: int, key: int) -> None:
        if place == 0 and index in self._graph.views:
            source = id(operator.input_blobs[0])
            if source in self._root_of:
                self._lay_into(self._root_of[source], key, self._offset(source))
            else:
                self._plannable.discard(key)  # a view of memory that is not planned
            return
        source = id(operator.input_blobs[0]) if record.zero_copy and operator.input_blobs else 0
        if source in self._root_of and operator.schema.cut is not None:
            offset = operator.schema.cut(record.call(operator), record.types).get(place)
            if offset is not None and self._may_be_cut(index, source, key):
                self._lay_into(self._root_of[source], key, self._offset(source) + offset)
                return
        self._roots[key] = _Root(self._nbytes_of(record.types[place]), key)
        self._root_of[key] = key

    def _nbytes_of(self, kind: TensorType) -> int:
        """Bytes of a type, one object of which serves many tensors."""
        nbytes = self._nbytes.get(id(kind))
        if nbytes is None:
            nbytes = self._nbytes[id(kind)] = kind.nbytes
        return nbytes

    def _offset(self, key: int) -> int:
        return self._roots[self._root_of[key]].members[key]

    def _lay_into(self, root: int, key: int, offset: int) -> None:
        self._roots[root].members[key] = offset
        self._root_of[key] = root

    def _may_be_cut(self, index: int, source: int, key: int) -> bool:
        root = self._roots[self._root_of[source]]
        return (
            self._uses[key].writers == [index]
            and not self._is_kept((key,))
            and not self._is_kept(root.members)
            and self._all_before(self._writers(root.members) - {index}, index)
        )

    def _lay_joined(self, index: int, operator: Operator, offsets: Mapping[int, int]) -> None:
        """Lay the tensors that operator `index` joins into its result, as far as that is allowed."""
        result = id(operator.output_blobs[0])
        if result not in self._root_of or self._uses[result].writers[0] != index or self._root_of[result] != result:
            return
        target = self._roots[result]
        ranges: list[ByteRange] = []
        for place, offset in sorted(offsets.items(), key=lambda item: item[1]):
            key = id(operator.input_blobs[place])
            if key in self._root_of:
                start, nbytes, root = self._offset(key), self._nbytes_of(self._type(key)), self._root_of[key]
                ranges += self._roots[root].found_content(root).part(start, start + nbytes, offset - start)
        goal = Content.of(ranges)
        laid: list[ByteRange] = []
        for place, offset in offsets.items():
            key = id(operator.input_blobs[place])
            root = self._root_of.get(key, result)
            if root == result:
                continue
            shift = offset - self._offset(key)
            spans = self._roots[root].found_content(root).part(0, self._roots[root].nbytes, shift)
            if goal.contains(spans) and self._may_be_joined(index, result, root):
                for member, start in self._roots.pop(root).members.items():
                    self._lay_into(result, member, start + shift)
                laid += spans
        target.content = Content.of(laid).filled(target.nbytes, result)

    def _may_be_joined(self, index: int, result: int, root: int) -> bool:
        buffer = self._roots[root]
        touching = self._writers(buffer.members) | {
            reader for key in buffer.members for reader in self._uses[key].readers if reader != index
        }
        later = [writer for writer in self._uses[result].writers if writer != index]
        return (
            self._device(root) == self._device(result)
            and not self._is_kept(buffer.members)
            and self._all_before(self._writers(buffer.members), index)
            and all(self._all_before(touching, writer) for writer in later)
        )

    def _device(self, key: int) -> Device:
        return _tensor(self._uses[key].blob).device

    def _type(self, key: int) -> TensorType:
        kind = self._uses[key].type
        assert kind is not None
        return kind

    def _writers(self, keys: Iterable[int]) -> set[int]:
        return {writer for key in keys for writer in self._uses[key].writers}

    def _all_before(self, operators: Collection[int], index: int) -> bool:
        return all(self._order.is_before(operator, index) for operator in operators)

    def _is_kept(self, keys: Iterable[int]) -> bool:
        return any(self._uses[key].blob.name in self._keep for key in keys)

    def _find_plannable(self, inputs: Collection[Blob]) -> set[int]:
        """The blobs whose memory the net may choose."""
        unplanned = {id(blob) for blob in inputs}
        own_storages = {id(_storage(blob)) for blob in inputs}
        for operator, record in zip(self._operators, self._inferred, strict=True):
            if record is None:
                unplanned.update(id(blob) for blob in (*operator.input_blobs, *operator.output_blobs))
        tensors = Counter([id(uses.blob.value) for uses in self._uses.values()])
        plannable = set()
        for key, uses in self._uses.items():
            kind = uses.type
            if not uses.writers or kind is None or uses.others or key in unplanned:
                continue
            tensor = uses.blob.value
            if not isinstance(tensor, Tensor):
                writer = self._operators[uses.writers[0]]  # which may write to another device than its own
                tensor = writer.output(next(n for n, blob in enumerate(writer.output_blobs) if blob is uses.blob))
            elif tensors[id(tensor)] > 1 or not tensor.is_packed:
                continue
            if kind.meta is STRING or not self._nbytes_of(kind):
                continue
            if tensor.is_empty or id(tensor.storage()) not in own_storages:
                plannable.add(key)
        for index in sorted(self._graph.views, reverse=True):
            source, view = self._operators[index].input_blobs[0], self._operators[index].output_blobs[0]
            if id(view) not in plannable:
                plannable.discard(id(source))  # it is read, as the view, by operators that are unknown here
        return plannable

    def _finished(self) -> Buffers:
        buffers: list[Buffer] = []
        places: dict[int, BufferSlice] = {}
        for root in self._roots.values():
            users: set[int] = set()
            for key in root.members:
                uses = self._uses[key]
                users.update(uses.readers, uses.writers)
            first = self._uses[next(iter(root.members))].blob
            kept = self._is_kept(root.members)
            buffers.append(Buffer(first.name, root.nbytes, tuple(sorted(users)), kept, _tensor(first).runtime))
            for key, offset in root.members.items():
                places[key] = BufferSlice(len(buffers) - 1, offset, self._type(key))
        views = self._graph.views
        own_bytes = sum(
            uses.nbytes
            for key, uses in self._uses.items()
            if uses.writers and key not in places and views.isdisjoint(uses.writers)
        )
        return Buffers(tuple(buffers), MappingProxyType(places), own_bytes)


def _uses_of(operators: Sequence[Operator], inferred: Sequence[Inferred | None]) -> dict[int, _Uses]:
    uses: dict[int, _Uses] = {}
    for index, (operator, record) in enumerate(zip(operators, inferred, strict=True)):
        if record is not None and record.is_settled:
            continue
        for blob in operator.input_blobs:
            use = uses.get(id(blob))
            if use is None:
                use = uses[id(blob)] = _Uses(blob)
            use.readers.append(index)
        for place, blob in enumerate(operator.output_blobs):
            use = uses.get(id(blob))
            if use is None:
                use = uses[id(blob)] = _Uses(blob)
            use.writers.append(index)
            if record is None:
                continue
            kind = record.types[place]
            if use.type is None:
                use.type = kind
            elif use.type != kind:
                use.others = [*(use.others or ()), kind]
    return uses


def _tensor(blob: Blob) -> Tensor:
    return blob.get(Tensor)


def _storage(blob: Blob) -> object:
    value = blob.value
    return value.storage() if isinstance(value, Tensor) else None
