"""What a run's shapes decide: operators whose results are known with them, and those whose shapes even a run decides.

An operator is *settled* when its results follow from the shapes a net is prepared for and from constants: `Shape`,
and what is computed from it. It is computed once, while the net is prepared, so that others may take their shapes from
what it gives, and a run has nothing to do for it. An operator is *dynamic* when its output shapes depend on a value
computed by the run, or when it comes after one. Its `CheckedStep` prepares itself again when what it was prepared for
has changed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Any

import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.device import CPU
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Prepared, Step
from dagexec.core.purity import is_pure, mutated
from dagexec.core.schema import OpSchema, TensorType
from dagexec.core.shape_values import asked_operators
from dagexec.core.tensor import Storage, Tensor, binding_epoch
from dagexec.platform.cached import cached_property
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.room import Rooms

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Dependence:
    """What the operators of a graph depend on.

    Attributes:
        dynamic: those whose output shapes cannot be told from the input shapes alone, and all that follow from them.
        settled: those whose results can, if these are not too large to be kept.
        asked: those on whose results shapes depend.
    """

    dynamic: frozenset[int]
    settled: frozenset[int]
    asked: frozenset[int]


def dependence(
    graph: Graph,
    constants: frozenset[str],
    unsettled: frozenset[int] = frozenset(),
    unsteady: frozenset[str] = frozenset(),
) -> Dependence:
    """What the operators depend on where `constants` do not change and those in `unsettled` are left to the run.

    The inputs in `unsteady` have other types in each run.

    A blob with one dynamic writer counts as dynamic for all its writers, so that none of them keeps an array that
    another has replaced. So does a blob that one of them reads and that may change its shape within a run, so that it
    is read in the shape it has then: when a run begins, it has the shape of its last writer.
    """
    key = (constants, unsettled, unsteady)
    return graph.derived(key, lambda: _find_dependence(graph, constants, unsettled, unsteady))


def dynamic_operators(graph: Graph, constants: frozenset[str]) -> frozenset[int]:
    """Operators whose output shapes cannot be told from the input shapes alone, and all that follow from them."""
    return dependence(graph, constants).dynamic


def _find_dependence(
    graph: Graph, constants: frozenset[str], unsettled: frozenset[int], unsteady: frozenset[str]
) -> Dependence:
    if not unsteady and all(map(_is_told_by_types, {schema.type: schema for schema in graph.schemas}.values())):
        return _NONE
    asked = asked_operators(graph.operators, graph.schemas, decide=True)
    blobs = _Blobs(graph)
    dynamic: set[int] = set()
    shared: set[str] = set()  # blobs with a dynamic writer
    while True:
        found: set[int] = set()
        settled: set[int] = set()
        unknown = set(unsteady)
        values: set[str] = set()  # the blobs that settled operators write
        for index, (definition, schema) in enumerate(zip(graph.operators, graph.schemas, strict=True)):
            inputs, outputs = tuple(definition.input), tuple(definition.output)
            read = (inputs[i] for i in schema.values_read(definition)) if schema.value_inputs else ()
            if (
                not (schema.can_infer(definition) or (schema.decided_by and index not in unsettled))
                or any(name not in constants and name not in values for name in read)
                or not unknown.isdisjoint(inputs)
                or not shared.isdisjoint(outputs)
            ):
                found.add(index)
                unknown.update(outputs)
                shared.update(outputs)
                shared.update(blobs.changing.intersection(inputs))
                continue
            unknown.difference_update(outputs)
            follows = schema.from_types is not None or (
                (index in asked or not values.isdisjoint(inputs))
                and all(name in values or name in constants for name in inputs)
            )
            if follows and not schema.sub_nets and index not in unsettled and blobs.may_be_settled(index):
                settled.add(index)
                values.update(outputs)
        if found == dynamic:
            return Dependence(frozenset(dynamic), frozenset(settled), asked)
        dynamic = found


_NONE = Dependence(frozenset(), frozenset(), frozenset())


def _is_told_by_types(schema: OpSchema) -> bool:
    """True where output types follow from input types, and no values from either."""
    by_values = schema.value_inputs or schema.decided_by or schema.inferred_if or schema.from_types
    return schema.infer is not None and not by_values


class _Blobs:
    """How the blobs of a graph are used, found out when something depends on it."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def may_be_settled(self, index: int) -> bool:
        """True for operators of the host that only compute, and write blobs that hold nothing else in a run."""
        definition, schema = self._graph.operators[index], self._graph.schemas[index]
        return (
            all(self._writes[name] == 1 and name not in self._touched for name in definition.output)
            and not schema.handles
            and not schema.does_io
            and self._graph.device(index) == CPU
            and is_pure(definition)
        )

    @cached_property
    def _writes(self) -> Counter[str]:
        """How many operators write each blob."""
        return Counter(name for definition in self._graph.operators for name in definition.output)

    @cached_property
    def _touched(self) -> frozenset[str]:
        """Blobs that an operator uses otherwise than by reading them after they were written."""
        touched: set[str] = set()
        written: set[str] = set()
        for definition, schema in zip(self._graph.operators, self._graph.schemas, strict=True):
            inputs = definition.input
            touched.update(inputs[place] for place in mutated(definition, schema))
            touched.update(name for name in inputs if name in self._writes and name not in written)
            written.update(definition.output)
        return frozenset(touched)

    @cached_property
    def changing(self) -> frozenset[str]:
        """Blobs that get a value twice, the one before the run counted, other than by operators that work in place."""
        writes: Counter[str] = Counter()
        for definition in self._graph.operators:
            writes.update({name for name in definition.input if name not in writes})  # there before the run
            writes.update(set(definition.output) - set(definition.input))
        return frozenset(name for name, count in writes.items() if count > 1)


_MOST_KEPT, _MOST_KEPT_BYTES = 256, 1 << 18
"""Preparations of an operator whose shapes a run decides, as many as a loop may have sizes, of some 4 KiB each; and
bytes that one has to do with: more take longer to compute than to prepare, and would be kept from their owners."""


class CheckedStep:
    """The step of an operator whose shapes are known only when it runs: prepares itself again when they changed.

    The latest preparations are kept, as far as they are for the memory that the outputs have now, for when the same
    inputs come back, in the same places.
    """

    __slots__ = (
        "_arrays",
        "_as_view",
        "_blobs",
        "_epoch",
        "_held",
        "_kept",
        "_lasts",
        "_operator",
        "_read",
        "_rooms",
        "_step",
        "_tensors",
        "_types",
        "_values",
    )

    def __init__(self, operator: Operator, as_view: bool) -> None:
        self._operator = operator
        self._as_view = as_view
        self._read = operator.schema.values_read(operator.definition)
        self._step: Step | None = None
        self._lasts = False  # the step is for any sizes
        self._epoch = 0
        self._arrays: list[Array | None] = []
        self._blobs = (*operator.input_blobs, *operator.output_blobs)
        self._held: list[object] = []
        self._tensors: list[Tensor] = []
        self._values: list[bytes] = []
        self._kept: OrderedDict[Hashable, _Kept] | None = OrderedDict() if _may_come_back(operator) else None
        self._types: tuple[TensorType, ...] = ()  # of the inputs, when it was prepared last
        self._rooms = Rooms(operator, as_view) if self._kept is not None else None

    def __call__(self) -> None:
        """Run the operator once."""
        self.current()()

    def current(self) -> Step:
        """The operator's step for what its blobs hold now."""
        step = self._step
        if step is not None and self._lasts:
            return step
        with_room = None if self._rooms is None else self._rooms.step()
        if with_room is not None:
            return with_room
        if step is not None and not self._changed():
            return step
        key = self._key()
        kept = None if key is None or self._kept is None else self._kept.get(key)
        if kept is None or self._kept is None or not kept.writes(self._operator.output_blobs):
            step = self._step = self._prepare(key)
        else:
            self._kept.move_to_end(key)
            step = self._step = kept.brought_back()
        self._note()
        return step

    def _changed(self) -> bool:
        epoch = binding_epoch()
        if epoch != self._epoch:  # an array was replaced somewhere, perhaps one of these
            if any(blob.value is not held for blob, held in zip(self._blobs, self._held, strict=True)):
                return True
            if any(one.current_array() is not array for one, array in zip(self._tensors, self._arrays, strict=True)):
                return True
            self._epoch = epoch
        return bool(self._read) and self._read_values() != self._values

    def _read_values(self) -> list[bytes]:
        return [self._operator.host_value(i).tobytes() for i in self._read]

    def _key(self) -> Hashable | None:
        """What a preparation depends on: where the inputs are, and values; None where one is not kept."""
        if self._kept is None:
            return None
        places: list[Hashable] = []
        for blob in self._operator.input_blobs:
            tensor = blob.value
            if not isinstance(tensor, Tensor) or tensor.is_empty:
                return None
            if tensor.constant is not None:
                places.append(id(tensor.constant))
            else:
                places.append((tensor.address, tensor.shape, tensor.array.strides, tensor.meta))
        return (*places, *self._read_values())

    def _prepare(self, key: Hashable | None) -> Step:
        operator = self._operator
        operator.check_output_layouts()
        step = operator.for_any_sizes()
        if step is not None:
            self._lasts = True
            return step
        call = operator.call() if operator.schema.can_infer(operator.definition) else None  # None: perhaps no tensors
        if call is not None and self._rooms is not None:
            before, self._types = self._types, call.inputs
            step = self._rooms.prepared(before, call.inputs)
            if step is not None:
                return step
        prepared = operator.bind(operator.infer(call), as_view=self._as_view, call=call)
        if self._kept is not None and key is not None and key == self._key():  # in place it may be elsewhere now
            self._keep(self._kept, key, prepared)
        return prepared.step

    def _keep(self, kept: OrderedDict[Hashable, _Kept], key: Hashable, prepared: Prepared) -> None:
        inputs = [blob.get(Tensor) for blob in self._operator.input_blobs]
        held = [blob.value for blob in self._operator.output_blobs]
        outputs = [one for one in held if isinstance(one, Tensor) and not one.is_empty]
        if len(outputs) < len(self._operator.output_blobs):
            return
        moving = [one for one in (*inputs, *outputs) if one.constant is None]
        if prepared.nbytes + sum(one.nbytes for one in moving) > _MOST_KEPT_BYTES:
            return
        bindings = [(one, one.array, one.storage(), one.is_view) for one in outputs]
        before = next(iter(kept.values())).outputs if kept else bindings
        if any(one[2] is not other[2] for one, other in zip(bindings, before, strict=True)):
            kept.clear()  # what they are for would be memory that nothing else needs
        kept[key] = _Kept(prepared.step, tuple(bindings), tuple([one.constant or one.array for one in inputs]))
        if len(kept) > _MOST_KEPT:
            kept.popitem(last=False)

    def _note(self) -> None:
        """Remember what the step is for."""
        self._epoch = binding_epoch()
        self._held = [blob.value for blob in self._blobs]
        self._tensors = [tensor for tensor in self._held if isinstance(tensor, Tensor)]
        self._arrays = [tensor.current_array() for tensor in self._tensors]
        self._values = self._read_values()


@dataclass(frozen=True)
class _Kept:
    """A preparation.

    Attributes:
        step: what it is.
        outputs: the tensors that it writes, and where they are then.
        inputs: what it reads, so that nothing else is at its address.
    """

    step: Step
    outputs: tuple[tuple[Tensor, Array, Storage | None, bool], ...]
    inputs: tuple[object, ...]

    def writes(self, blobs: Sequence[Blob]) -> bool:
        """True while the blobs hold the tensors that it is for, which nobody gave other memory or a layout."""
        return all(
            blob.value is tensor and tensor.storage() is storage
            for blob, (tensor, _, storage, _) in zip(blobs, self.outputs, strict=True)
        )

    def brought_back(self) -> Step:
        """The step, its outputs where they were."""
        for tensor, array, storage, is_view in self.outputs:
            if tensor.current_array() is not array:
                tensor.rebind(array, storage, is_view=is_view)
        return self.step


def _may_come_back(operator: Operator) -> bool:
    """True for what only reads its inputs and writes its outputs, all of them tensors of the host."""
    return not operator.bodies and not operator.schema.handles and operator.runtime.device == CPU
