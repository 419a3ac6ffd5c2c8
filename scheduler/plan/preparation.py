"""Preparation: the operators of a net bound to tensors of known shapes, as steps that a run only has to call.

First the types of all outputs are inferred from the inputs as they stand; what follows from shapes alone is computed
on the way (`dagexec.scheduler.plan.settling`). Then operators are prepared in list order: outputs are sized, or placed
where a memory plan has them (`dagexec.scheduler.memory`), and the operator makes its step. An operator whose output
shapes depend on a value computed by the run, and every operator after it, gets a `CheckedStep`
(`dagexec.scheduler.plan.dynamic`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.device import CPU
from dagexec.core.graph import Graph
from dagexec.core.native_tables import AlikeStep, merged
from dagexec.core.numpy_calls import natively
from dagexec.core.operator import MemorySource, Operator, Prepared, Step, nothing_to_do
from dagexec.core.purity import is_known
from dagexec.core.tensor import Tensor
from dagexec.errors import DeadlineExceededError, ResourceError
from dagexec.platform.addresses import address_of
from dagexec.platform.cached import cached_property
from dagexec.platform.deadline import check_deadline
from dagexec.scheduler.memory import ArenaMemory, BufferPatterns, Inferred, MemoryPlan, graph_order, list_order
from dagexec.scheduler.plan.alike import Alike, AlikeUnplanned, outputs_of, small_inputs, written_once
from dagexec.scheduler.plan.bindings import Bindings
from dagexec.scheduler.plan.chains import compute_chains
from dagexec.scheduler.plan.culprit import Failed, NameStep, UnderWay, is_part_of, label_of, naming_failures
from dagexec.scheduler.plan.dynamic import CheckedStep
from dagexec.scheduler.plan.inference import inferred_and_settled
from dagexec.scheduler.plan.plan import Plan, build_plan

Array = npt.NDArray[Any]


class Preparation:
    """Steps for one signature (shapes and dtypes of the blobs that exist before the net runs).

    Attributes:
        plan: the plan, its priorities from the costs of these shapes.
        memory: where outputs and working memory lie; None when each has memory of its own.
        prepared: each operator as it is prepared, in list order.
        settled: those that a run has nothing to do for, as their results follow from the shapes.
        steps: their steps.
        seconds: the time each operator is estimated to take.
        may_wait: an operator may wait for something, or its shapes are not known, so that it may take longer.
        name_step: how errors name the operator of a step.
        nbytes: an estimate of what the preparation has to itself, beside arenas: steps, what they keep, and the outputs
            that no plan places, if they got memory for it.
        bindings: where the tensors are that the steps read and write: the blobs that exist before the net runs and that
            it reads, and those in `written`.
        written: every output with static shape, and those of nets inside that are prepared with this one.
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
        unsteady: frozenset[str] = frozenset(),
        arena_memory: ArenaMemory | None = None,
        previous: Preparation | None = None,
        ordered: Callable[[Plan], Plan] | None = None,
    ) -> None:
        """With `keep`, only these blobs have values after a run: others share memory when no schedule forbids it.

        Schedules are those of the graph, or with `in_list_order` operators always follow one another as listed.
        Arenas lie in `arena_memory`, which the net's preparations share, as one of them is in use at a time.
        Operators that are where they were in `previous`, a living preparation of the same net, are not prepared again.
        `ordered` makes of the plan the one that runs go by.
        The inputs in `unsteady` have other shapes in each run: what depends on them prepares itself there, if need be.
        Raises ShapeError or MissingBlobError naming the operator, or ResourceError when memory would not do.
        Whatever else an operator raises while it is prepared becomes an OperatorError. Raises DeadlineExceededError
        when the caller is held to a deadline that is over.
        """
        for operator in operators:
            operator.check_output_layouts()
        before = {id(blob.value.storage()) for blob in outputs_of(operators) if isinstance(blob.value, Tensor)}
        _own_what_is_written(operators, inputs)
        dynamic, inferred = inferred_and_settled(
            operators, graph, constants, in_one_plan=keep is not None, unsteady=unsteady
        )
        self.settled = frozenset(index for index, found in enumerate(inferred) if found and found.is_settled)
        running = graph.without_edges_of(self.settled) if self.settled else graph
        self.memory: MemoryPlan | None = None
        if keep is not None:
            order = list_order(len(graph)) if in_list_order else graph_order(running)
            patterns = BufferPatterns() if arena_memory is None else arena_memory.patterns
            buffers = patterns.find(graph, operators, inferred, inputs, keep, order)
            self.memory = MemoryPlan(graph.name, buffers, order, arena_memory)
        self._conditions: list[Hashable] = [None] * len(operators)
        self.seconds: list[float] = [0.0] * len(operators)
        with _emptied_on_failure(operators, inputs), naming_failures(graph.name) as under_way:
            self.prepared = self._prepared(operators, graph, inputs, inferred, keep or (), previous, under_way)
        self.steps: list[Step] = [one.step for one in self.prepared]
        self._waits = _wait_seconds(operators)
        self.may_wait = any(self._waits) or bool(dynamic)
        plan = _planned(running, self.settled, self.seconds)
        self.plan: Plan = plan if ordered is None else ordered(plan)
        self._operator_of: dict[int, tuple[int, float]] | None = None
        self.name_step: NameStep = partial(_label, self.plan, self.steps, [one for one in self.prepared if one.parts])
        own = _static_outputs(operators, dynamic)
        self.written = (*own, *(blob for one in self.prepared for blob in one.blobs))
        moving = _named(operators, unsteady) if unsteady else ()
        self.bindings = Bindings([blob for blob in inputs if id(blob) not in moving], self.written)
        self.nbytes = self._own_bytes(operators, before)

    def _prepared(
        self,
        operators: Sequence[Operator],
        graph: Graph,
        inputs: Sequence[Blob],
        inferred: Sequence[Inferred | None],
        keep: Collection[str],
        previous: Preparation | None,
        under_way: UnderWay,
    ) -> tuple[Prepared, ...]:
        """The operators in list order; those that are alike are left for the end, to be prepared together."""
        memory, views = self.memory, graph.views
        made: dict[int, Prepared] = {}
        moving = frozenset(id(blob) for blob in inputs if not _is_constant(blob))
        read_last = _read_last(operators, inputs)
        alike = (
            Alike(inferred, small_inputs(operators, inputs), memory.passing())
            if memory is not None
            else AlikeUnplanned(inferred, small_inputs(operators, inputs), written_once(operators, inputs))
        )
        for index, (operator, found) in enumerate(zip(operators, inferred, strict=True)):
            check_deadline()
            if found is None:
                made[index] = Prepared(CheckedStep(operator, index in views), shared_buffer=operator.shared_buffer)
                self.seconds[index] = _UNKNOWN_SECONDS
                continue
            if found.is_settled:
                made[index] = Prepared(nothing_to_do, is_settled=True)
                continue
            under_way.operator = operator
            as_view = index in views
            self.seconds[index] = found.seconds
            placed = [] if memory is None else _placed(operator, as_view, memory)
            if not as_view and alike.takes(index, operator, found):
                continue
            if len(placed) == len(operator.output_blobs) and moving.isdisjoint(map(id, operator.input_blobs)):
                self._conditions[index] = _conditions(operator, keep)
            known = None if previous is None else previous._prepared_for(index, self._conditions[index])
            made[index] = _bound(index, operator, found, as_view, placed, memory, known)
            alike.note(operator, found, made[index])
            for blob in read_last.get(index, ()):
                blob.tensor().let_go()
        for index, step in alike.steps(under_way):
            if step is not None:
                made[index] = Prepared(step)
                continue
            operator, found = operators[index], inferred[index]
            assert found is not None
            under_way.operator = operator
            made[index] = _bound(index, operator, found, False, range(len(operator.output_blobs)), memory, None)
        return tuple([made[index] for index in range(len(operators))])

    def _prepared_for(self, index: int, conditions: Hashable) -> Prepared | None:
        """Operator `index` as it is prepared here, if that was under these conditions."""
        return None if conditions is None or conditions != self._conditions[index] else self.prepared[index]

    def _own_bytes(self, operators: Sequence[Operator], before: Collection[int]) -> int:
        """See `nbytes`; `before` are the ids of the storages that outputs had."""
        own = set(map(id, outputs_of(operators)))
        planned = set() if self.memory is None else self.memory.storage_ids
        storages = {
            id(binding.storage): binding.storage
            for binding in self.bindings.outputs
            if not binding.is_view and id(binding.blob) in own
        }
        new = [storage for key, storage in storages.items() if key not in before and key not in planned]
        steps = [one for one in self.prepared if one.step is not nothing_to_do]
        return (
            sum(_ALIKE_BYTES if isinstance(one.step, AlikeStep) else _STEP_BYTES for one in steps)
            + sum(one.nbytes for one in steps)
            + sum(storage.capacity for storage in new if storage is not None)
        )

    @cached_property
    def in_order(self) -> tuple[Step, ...]:
        """All steps in list order, those with nothing to do left out, short native calls made one step."""
        timed = self.timed(range(len(self.steps)))
        return tuple(merged([step for step, _ in timed], [seconds for _, seconds in timed], LONGEST_SECONDS))

    def timed(self, operators: Iterable[int]) -> list[tuple[Step, float]]:
        """The steps of these operators, those with nothing to do left out, and the seconds that each may take.

        Of one that may wait for others that is longer than to hand it out.
        """
        return [
            (part, max(self.seconds[index], self._waits[index]) / len(parts))
            for index in operators
            if (parts := _parts(self.prepared[index]))
            for part in parts
        ]

    def operator_of(self, step: Step) -> tuple[int, float]:
        """The operator that one of the steps in `timed` is of, and what part of its time it takes."""
        if self._operator_of is None:
            parts = [_parts(one) for one in self.prepared]
            self._operator_of = {id(part): (index, 1 / len(row)) for index, row in enumerate(parts) for part in row}
        return self._operator_of[id(step)]


def _label(plan: Plan, steps: Sequence[Step], in_parts: Sequence[Prepared], chain: int | None, failed: Failed) -> str:
    """As `label_of`; of a part of an operator `in_parts`, what that says."""
    for one in in_parts:
        part = next((part for part in one.parts if is_part_of(part, failed)), None)
        if part is not None and one.name_part is not None:
            return one.name_part(part)
    return label_of(plan, steps, chain, failed)


def _parts(prepared: Prepared) -> tuple[Step, ...]:
    """The steps that a run calls for an operator."""
    return prepared.parts or (() if prepared.step is nothing_to_do else (prepared.step,))


def _named(operators: Iterable[Operator], names: Collection[str]) -> set[int]:
    """The ids of the blobs that operators read by these names."""
    pairs = (zip(one.definition.input, one.input_blobs, strict=True) for one in operators)
    return {id(blob) for pair in pairs for name, blob in pair if name in names}


def _wait_seconds(operators: Iterable[Operator]) -> list[float]:
    """How long each may wait for something, as far as its type tells."""
    kinds = {one.definition.type: one.definition for one in operators}
    waits = {kind: 0.0 if is_known(definition) else _WAIT_SECONDS for kind, definition in kinds.items()}
    return [waits[one.definition.type] for one in operators]


def _read_last(operators: Sequence[Operator], inputs: Iterable[Blob]) -> dict[int, list[Blob]]:
    """The constants among `inputs` that no operator behind the one of that number reads."""
    constants = {id(blob) for blob in inputs if _is_constant(blob)}
    last: dict[int, tuple[int, Blob]] = {}
    for index, operator in enumerate(operators):
        last.update((id(blob), (index, blob)) for blob in operator.input_blobs if id(blob) in constants)
    found: dict[int, list[Blob]] = {}
    for index, blob in last.values():
        found.setdefault(index, []).append(blob)
    return found


@contextmanager
def _emptied_on_failure(operators: Sequence[Operator], inputs: Iterable[Blob]) -> Iterator[None]:
    """Within it, outputs that were given other memory are emptied when there is not enough for all, or time is over.

    The values of `inputs` are kept in any case.
    """
    kept = {id(blob) for blob in inputs}
    before = [(blob, blob.value, _array_of(blob)) for blob in outputs_of(operators) if id(blob) not in kept]
    try:
        yield
    except (ResourceError, DeadlineExceededError):
        for blob, value, array in before:
            if isinstance(blob.value, Tensor) and (blob.value is not value or blob.value.current_array() is not array):
                blob.value.clear()
        raise


def _array_of(blob: Blob) -> Array | None:
    return blob.value.current_array() if isinstance(blob.value, Tensor) else None


def _planned(running: Graph, settled: frozenset[int], seconds: Sequence[float]) -> Plan:
    """The plan of a run, in which `settled` operators, without edges in the graph, have no place."""
    return build_plan(running, seconds, [chain for chain in compute_chains(running) if chain[0] not in settled])


def _placed(operator: Operator, as_view: bool, memory: MemoryPlan) -> list[int]:
    """The outputs that now are where `memory` has them."""
    placed = []
    for place, blob in enumerate(operator.output_blobs):
        if (as_view and place == 0) or (planned := memory.storage(id(blob))) is None:
            continue
        tensor = operator.output(place)
        if tensor.current_array() is not planned.array:
            tensor.place(planned.array, planned.storage, planned.type.meta, planned.address)
        placed.append(place)
    return placed


def _bound(
    index: int,
    operator: Operator,
    found: Inferred,
    as_view: bool,
    placed: Sequence[int],
    memory: MemoryPlan | None,
    known: Prepared | None,
) -> Prepared:
    """An operator prepared, its outputs in `placed` where `memory` has them: as `known` where that may be.

    It may unless it has working memory that is elsewhere now. What calls NumPy, on the host or where
    that simulates a device, is made native calls.
    """
    if memory is None:
        operator.check_input_devices()
        return _natively(operator, operator.bind(found.types, as_view=as_view, call=found.seen_of(operator)))
    source = memory.working_memory(index, operator)
    if known is not None:
        pieces = [source(before.nbytes) for before in known.working_memory]
        if all(map(_is_same_memory, pieces, known.working_memory)):
            return known
        source = _first_from(pieces, source)
    operator.check_input_devices()
    made = operator.bind(found.types, as_view=as_view, placed=placed, memory=source, call=found.seen_of(operator))
    return _natively(operator, made)


_COMPUTED_BY_NUMPY = (CPU.kind, "sim")


def _natively(operator: Operator, prepared: Prepared) -> Prepared:
    return natively(prepared, operator.label) if operator.runtime.device.kind in _COMPUTED_BY_NUMPY else prepared


def _is_same_memory(one: Array, other: Array) -> bool:
    return address_of(one) == address_of(other)


def _first_from(pieces: Sequence[Array], source: MemorySource) -> MemorySource:
    """Gives `pieces`, to an operator that asks for their sizes in their order, and from then on what `source` gives."""
    left = list(reversed(pieces))

    def give(nbytes: int) -> Array:
        return left.pop() if left and left[-1].nbytes == nbytes else source(nbytes)

    return give


def _conditions(operator: Operator, keep: Collection[str]) -> Hashable:
    """All that decides how `operator` is prepared: where its tensors are, and of which types; None where more does.

    Tensors that a caller hands in or gets may be elsewhere in a run. Addresses name memory while that is alive.
    """
    circumstances = operator.circumstances
    if circumstances is None or not all(isinstance(blob.value, Tensor) for blob in operator.input_blobs):
        return None
    found: list[Hashable] = [circumstances]
    for blob in (*operator.input_blobs, *operator.output_blobs):
        tensor = blob.tensor()
        if tensor.constant is not None:
            found.append(id(tensor.constant))
            continue
        if blob.name in keep or not tensor.is_packed:
            return None
        found.append((tensor.address, tensor.shape, tensor.meta))
    return tuple(found)


def _is_constant(blob: Blob) -> bool:
    return isinstance(blob.value, Tensor) and blob.value.constant is not None


def _own_what_is_written(operators: Sequence[Operator], inputs: Iterable[Blob]) -> None:
    """Give each of `inputs` that an operator writes memory of its own, with its values, if it is on someone else's.

    An operator that writes it would do so when it is prepared, after those before it took the array they read.
    """
    written = {id(blob) for operator in operators for blob in operator.output_blobs}
    for blob in inputs:
        tensor = blob.value
        if id(blob) in written and isinstance(tensor, Tensor) and not tensor.is_empty:
            tensor.resize(tensor.shape, tensor.meta)


LONGEST_SECONDS = 0.5e-3
"""Of native calls that are made in one go, as estimated: a run is stopped, and left for another, between them."""

_WAIT_SECONDS = 1e-3

_STEP_BYTES = 4 << 10
"""What Python takes for a prepared operator: arrays, steps, places in plans. By tracemalloc it was 3 to 4 KiB."""

_ALIKE_BYTES = 3 << 9
"""The same of one that was prepared with others; resident memory grew by 1.6 KB for each of 10,000."""

_UNKNOWN_SECONDS = 10e-6  # priority of an operator whose shapes are not known


def _static_outputs(operators: Sequence[Operator], dynamic: frozenset[int]) -> list[Blob]:
    blobs = {
        id(blob): blob
        for index, operator in enumerate(operators)
        if index not in dynamic
        for blob in operator.output_blobs
    }
    return list(blobs.values())
