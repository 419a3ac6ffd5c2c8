"""Preparation: the operators of a net bound to tensors of known shapes, as steps that a run only has to call.

First the types of all outputs are inferred from the inputs as they stand. Then operators are prepared in list order:
outputs are sized, or placed where a memory plan has them (`dagexec.scheduler.memory`), and the operator makes its
step. An operator whose output shapes depend on a value computed by the run, and every operator
after it, gets a `CheckedStep` that prepares itself anew when what it was prepared for has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Rebind, Step, nothing_to_do
from dagexec.core.schema import TensorType
from dagexec.core.shared_buffer import SharedBuffer
from dagexec.core.tensor import Storage, Tensor, binding_epoch
from dagexec.errors import DagexecError, DeadlineExceededError, ResourceError, ShapeError
from dagexec.platform.deadline import check_deadline
from dagexec.platform.host_memory import check_fits, fits
from dagexec.scheduler.memory import Inferred, MemoryPlan, find_buffers, graph_order, list_order
from dagexec.scheduler.plan.culprit import operator_failure
from dagexec.scheduler.plan.plan import Plan, build_plan

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Binding:
    """A blob, and the tensor and array it had when the steps were prepared."""

    blob: Blob
    tensor: Tensor
    array: Array
    storage: Storage | None
    is_view: bool

    def holds(self) -> bool:
        """True while the blob still has that tensor, and the tensor that array."""
        return self.blob.value is self.tensor and self.tensor.current_array() is self.array

    def is_packed(self) -> bool:
        """True when both that array and the one the tensor has now are packed."""
        return bool(self.array.flags.c_contiguous) and self.tensor.is_packed

    def may_be_written(self) -> bool:
        """True when the array is the tensor's own to write: neither adopted from a caller nor another tensor's."""
        return not self.is_view and (self.storage is None or self.storage.writable)

    def put_back(self) -> None:
        """Give the tensor that array again. The blob holds it still."""
        self.tensor.rebind(self.array, self.storage, is_view=self.is_view)


@dataclass(frozen=True)
class _Work:
    """What an operator says of the step it has prepared."""

    operator: Operator
    working_arrays: list[Array]
    in_place: tuple[tuple[int, ...], tuple[int, ...]]
    moves: tuple[dict[int, Rebind], dict[int, Rebind]]
    shared_buffer: SharedBuffer | None

    @staticmethod
    def of(operator: Operator) -> _Work:
        """What it says now."""
        return _Work(
            operator,
            operator.working_arrays,
            (operator.inputs_in_place, operator.outputs_in_place),
            (operator.input_rebinds, operator.output_rebinds),
            operator.shared_buffer,
        )

    def put_back(self) -> None:
        """Have it say so again."""
        operator = self.operator
        operator.working_arrays = self.working_arrays
        operator.inputs_in_place, operator.outputs_in_place = self.in_place
        operator.input_rebinds, operator.output_rebinds = self.moves
        operator.shared_buffer = self.shared_buffer


def _bindings(blobs: Iterable[Blob]) -> list[Binding]:
    return [
        Binding(blob, tensor, tensor.array, tensor.storage(), tensor.is_view)
        for blob in blobs
        if isinstance(tensor := blob.value, Tensor) and not tensor.is_empty
    ]


class CheckedStep:
    """The step of an operator whose shapes are known only when it runs: prepares itself again when they changed."""

    __slots__ = ("_arrays", "_as_view", "_blobs", "_held", "_operator", "_read", "_step", "_tensors", "_values")

    def __init__(self, operator: Operator, as_view: bool) -> None:
        self._operator = operator
        self._as_view = as_view
        self._read = operator.schema.values_read(operator.definition)
        self._step: Step | None = None
        self._arrays: list[Array | None] = []
        self._blobs = (*operator.input_blobs, *operator.output_blobs)
        self._held: list[object] = []
        self._tensors: list[Tensor] = []
        self._values: list[bytes] = []

    def __call__(self) -> None:
        """Run the operator once."""
        step = self._step
        if step is None or self._changed():
            step = self._prepare()
        step()

    def current(self) -> Step:
        """The operator's step for what its blobs hold now."""
        step = self._step
        return self._prepare() if step is None or self._changed() else step

    def _changed(self) -> bool:
        arrays = self._arrays
        values = self._held
        if any(blob.value is not values[i] for i, blob in enumerate(self._blobs)):
            return True
        if any(tensor.current_array() is not arrays[i] for i, tensor in enumerate(self._tensors)):
            return True
        return self._read_values() != self._values

    def _read_values(self) -> list[bytes]:
        return [self._operator.host_value(i).tobytes() for i in self._read]

    def _prepare(self) -> Step:
        operator = self._operator
        operator.check_output_layouts()
        step = operator.bind(operator.infer(), as_view=self._as_view)
        self._held = [blob.value for blob in self._blobs]
        self._tensors = [tensor for tensor in self._held if isinstance(tensor, Tensor)]
        self._arrays = [tensor.current_array() for tensor in self._tensors]
        self._values = self._read_values()
        self._step = step
        return step


class Preparation:
    """Steps for one signature (shapes and dtypes of the blobs that exist before the net runs).

    Attributes:
        plan: the plan, its priorities from the costs of these shapes.
        memory: where outputs and working memory lie; None when each has memory of its own.
        steps: the step of each operator, in list order.
        seconds: the time each operator is estimated to take.
        chain_steps: the steps of each chain of the plan, those with nothing to do left out.
        in_order: all steps in list order, those with nothing to do left out.
        outputs: the bindings of every output tensor with static shape.
        inputs: the bindings of the blobs that exist before the net runs and that the steps read.
        epoch: `binding_epoch()` when the bindings were last seen to be in place.
    """

    def __init__(
        self,
        operators: Sequence[Operator],
        graph: Graph,
        inputs: Sequence[Blob],
        constants: frozenset[str],
        *,
        keep: Collection[str] | None = None,
        in_list_order: bool = False,
    ) -> None:
        """With `keep`, only these blobs have values after a run: others share memory when no schedule forbids it.

        Schedules are those of the graph, or with `in_list_order` operators always follow one another as listed.
        Raises ShapeError or MissingBlobError naming the operator, or ResourceError when memory would not do.
        Whatever else an operator raises while it is prepared becomes an OperatorError. Raises DeadlineExceededError
        when the caller is held to a deadline that is over.
        """
        for operator in operators:
            operator.check_output_layouts()
        _own_what_is_written(operators, inputs)
        dynamic = dynamic_operators(graph, constants)
        inferred = _inferred(operators, graph, dynamic, in_one_plan=keep is not None)
        self.memory: MemoryPlan | None = None
        if keep is not None:
            order = list_order(len(graph)) if in_list_order else graph_order(graph)
            self.memory = MemoryPlan(graph.name, find_buffers(graph, operators, inferred, inputs, keep, order), order)
        self.steps: list[Step] = []
        seconds: list[float] = []
        self.seconds = seconds
        taken = _TakenMemory(inputs)
        try:
            for index, (operator, found) in enumerate(zip(operators, inferred, strict=True)):
                check_deadline()
                as_view = index in graph.views
                if found is None:
                    self.steps.append(CheckedStep(operator, as_view))
                    seconds.append(_UNKNOWN_SECONDS)
                    continue
                with _naming(operator.label, graph.name), taken.by(operator):
                    self.steps.append(_bound(index, operator, found, as_view, self.memory))
                    seconds.append(operator.schema.cost(found.call, found.types).seconds)
        except (ResourceError, DeadlineExceededError):
            self.steps.clear()
            self.memory = None
            taken.give_back()
            raise
        self.plan: Plan = build_plan(graph, seconds)
        self.chain_steps = [self._steps_of(chain) for chain in self.plan.chains]
        self.in_order = self._steps_of(range(len(self.steps)))
        self.moves: list[tuple[dict[int, Rebind], dict[int, Rebind]]] = [
            ({}, {}) if index in dynamic else (operator.input_rebinds, operator.output_rebinds)
            for index, operator in enumerate(operators)
        ]
        self._work = [_Work.of(operator) for index, operator in enumerate(operators) if index not in dynamic]
        self.epoch = binding_epoch()
        self.outputs = _bindings(_static_outputs(operators, dynamic))
        self.inputs = _bindings(inputs)

    def wrapped(self, wrap: Callable[[int, Step], Step]) -> list[tuple[Step, ...]]:
        """The chain steps with `wrap(operator, step)` in place of each step: for tracing and checks."""
        return [tuple(wrap(index, self.steps[index]) for index in chain) for chain in self.plan.chains]

    def in_place(self) -> bool:
        """True when every tensor still has the array the steps were prepared for. Cheap while nothing changed."""
        epoch = binding_epoch()
        if self.epoch == epoch:
            return True
        if all(binding.holds() for binding in self.inputs) and all(binding.holds() for binding in self.outputs):
            self.epoch = epoch
            return True
        return False

    def restore(self, own: frozenset[int]) -> bool:
        """Bring the tensors back to the arrays of this preparation, with the input values they have now.

        Only tensors whose `id` is in `own` may be rebound, since others may be in use elsewhere, and only from a packed
        array to a packed one, since another layout was asked for. False when that is not enough; nothing has changed
        then.
        """
        if any(binding.blob.value is not binding.tensor for binding in (*self.inputs, *self.outputs)):
            return False
        if any(not binding.is_packed() for binding in (*self.inputs, *self.outputs) if not binding.holds()):
            return False
        moved = [binding for binding in self.inputs if not binding.holds()]
        if any(
            id(binding.tensor) not in own or not binding.may_be_written() or binding.array.shape != binding.tensor.shape
            for binding in moved
        ):
            return False
        for binding in moved:
            binding.tensor.runtime.copy_now(binding.array, binding.tensor.array)
            binding.put_back()
        for binding in self.outputs:
            if not binding.holds():
                binding.put_back()
        for work in self._work:
            work.put_back()
        self.epoch = binding_epoch()
        return True

    def _steps_of(self, chain: Iterable[int]) -> tuple[Step, ...]:
        return tuple(step for index in chain if (step := self.steps[index]) is not nothing_to_do)


class _TakenMemory:
    """The outputs that a preparation gave other memory, to be emptied when there is not enough for all of them."""

    def __init__(self, inputs: Iterable[Blob]) -> None:
        """The values of `inputs` are kept in any case."""
        self._kept = {id(blob) for blob in inputs}
        self._operators: list[Operator] = []
        self._tensors: list[Tensor] = []

    @contextmanager
    def by(self, operator: Operator) -> Iterator[None]:
        """Within it, `operator` is prepared."""
        blobs = [blob for blob in operator.output_blobs if id(blob) not in self._kept]
        before = [(blob.value, _array_of(blob)) for blob in blobs]
        self._operators.append(operator)
        try:
            yield
        finally:
            for blob, (tensor, array) in zip(blobs, before, strict=True):
                if isinstance(blob.value, Tensor) and (blob.value is not tensor or _array_of(blob) is not array):
                    self._tensors.append(blob.value)

    def give_back(self) -> None:
        """Empty them, and have the operators let go of their working memory."""
        for tensor in self._tensors:
            tensor.clear()
        for operator in self._operators:
            operator.working_arrays = []


def _array_of(blob: Blob) -> Array | None:
    return blob.value.current_array() if isinstance(blob.value, Tensor) else None


def _inferred(
    operators: Sequence[Operator], graph: Graph, dynamic: frozenset[int], *, in_one_plan: bool
) -> list[Inferred | None]:
    """What inference finds for each operator that is not `dynamic`.

    Raises ResourceError for outputs that do not fit in memory, together unless they are `in_one_plan` to share it.
    """
    known: dict[int, TensorType] = {}
    inferred: list[Inferred | None] = []
    nbytes = 0
    for index, operator in enumerate(operators):
        if index in dynamic:
            inferred.append(None)
            continue
        with _naming(operator.label, graph.name):
            call = operator.call(
                [known.get(id(blob)) or operator.input_type(i) for i, blob in enumerate(operator.input_blobs)]
            )
            assert operator.schema.infer is not None
            types = tuple(operator.schema.infer(call))
        if len(types) != len(operator.output_blobs):
            raise ShapeError(f"{operator.label}: inference gave {len(types)} types for its outputs: {types}")
        if not (index in graph.views and _is_packed(operator.input_blobs[0])):
            needed = _bytes_of(types, operator)
            nbytes = needed if in_one_plan else nbytes + needed
            if not fits(nbytes):
                beside = "" if in_one_plan else "with the outputs of the operators before it, "
                check_fits(nbytes, f"{operator.label}: {beside}{_named(operator, types)}")
        known.update(zip(map(id, operator.output_blobs), types, strict=True))
        inferred.append(Inferred(call, types))
    return inferred


def _is_packed(blob: Blob) -> bool:
    return not isinstance(blob.value, Tensor) or blob.value.is_packed


def _bound(index: int, operator: Operator, found: Inferred, as_view: bool, memory: MemoryPlan | None) -> Step:
    """The step of an operator, its outputs where `memory` has them."""
    operator.check_input_devices()
    if memory is None:
        return operator.bind(found.types, as_view=as_view)
    placed = []
    for place, blob in enumerate(operator.output_blobs):
        if (as_view and place == 0) or (planned := memory.storage(id(blob))) is None:
            continue
        array, storage = planned
        tensor = operator.output(place)
        if tensor.current_array() is not array:
            tensor.rebind(array, storage)
        placed.append(place)
    operator.memory_source = memory.working_memory(index, operator)
    try:
        return operator.bind(found.types, as_view=as_view, placed=placed)
    finally:
        operator.memory_source = None


def _own_what_is_written(operators: Sequence[Operator], inputs: Iterable[Blob]) -> None:
    """Give each of `inputs` that an operator writes memory of its own, with its values, if it is on someone else's.

    An operator that writes it would do so when it is prepared, after those before it took the array they read.
    """
    written = {id(blob) for operator in operators for blob in operator.output_blobs}
    for blob in inputs:
        tensor = blob.value
        if id(blob) in written and isinstance(tensor, Tensor) and not tensor.is_empty:
            tensor.resize(tensor.shape, tensor.meta)


@contextmanager
def _naming(label: str, net: str) -> Iterator[None]:
    """Within it, an exception that dagexec does not raise on purpose becomes an OperatorError for `label`.

    A ResourceError says `label`, too: a type that is too large (`TensorType`) does not know whose it is.
    """
    try:
        yield
    except ResourceError as error:
        if label in str(error):
            raise
        raise ResourceError(f"{label}: {error}") from error
    except DagexecError:
        raise
    except MemoryError as error:
        raise ResourceError(f"{label}: the system refuses memory: {error}") from error
    except Exception as error:
        raise operator_failure(net, label, error) from error


def _named(operator: Operator, types: Sequence[TensorType]) -> str:
    """The outputs with their types, for messages."""
    named = (f"{blob.name!r} {kind}" for blob, kind in zip(operator.output_blobs, types, strict=True))
    return f"output {', '.join(named)}"


def _bytes_of(types: Sequence[TensorType], operator: Operator) -> int:
    """Bytes that outputs of these types take beside those they have. Raises ResourceError when that is no number."""
    nbytes = 0
    for kind, blob in zip(types, operator.output_blobs, strict=True):
        try:
            nbytes += blob.value.growth(kind.nbytes) if isinstance(blob.value, Tensor) else kind.nbytes
        except ResourceError as error:
            raise ResourceError(f"{operator.label}: output {blob.name!r}: {error}") from None
    return nbytes


_UNKNOWN_SECONDS = 10e-6  # priority of an operator whose shapes are not known


def _static_outputs(operators: Sequence[Operator], dynamic: frozenset[int]) -> list[Blob]:
    blobs = {
        id(blob): blob
        for index, operator in enumerate(operators)
        if index not in dynamic
        for blob in operator.output_blobs
    }
    return list(blobs.values())


def dynamic_operators(graph: Graph, constants: frozenset[str]) -> frozenset[int]:
    """Operators whose output shapes cannot be told from the input shapes alone, and all that follow from them.

    A blob with one such writer counts as dynamic for all its writers, so that none of them keeps an array that
    another has replaced. So does a blob that one of them reads and that may change its shape within a run, so that it
    is read in the shape it has then: when a run begins, it has the shape of its last writer.
    """
    dynamic: set[int] = set()
    shared: set[str] = set()  # blobs with a dynamic writer
    changing = _may_change_shape(graph)
    while True:
        found: set[int] = set()
        unknown: set[str] = set()
        for index, (definition, schema) in enumerate(zip(graph.operators, graph.schemas, strict=True)):
            by_value = any(definition.input[i] not in constants for i in schema.values_read(definition))
            if (
                not schema.can_infer(definition)
                or by_value
                or any(name in unknown for name in definition.input)
                or any(name in shared for name in definition.output)
            ):
                found.add(index)
                unknown.update(definition.output)
                shared.update(definition.output)
                shared.update(changing.intersection(definition.input))
            else:
                unknown.difference_update(definition.output)
        if found == dynamic:
            return frozenset(dynamic)
        dynamic = found


def _may_change_shape(graph: Graph) -> frozenset[str]:
    """Blobs that get a value twice, the one before the run counted, other than by operators that work in place."""
    writes: Counter[str] = Counter()
    for definition in graph.operators:
        writes.update({name for name in definition.input if name not in writes})  # there before the run
        writes.update(set(definition.output) - set(definition.input))
    return frozenset(name for name, count in writes.items() if count > 1)
