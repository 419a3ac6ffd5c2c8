"""Accesses: what every operator of a net reads and writes, as resources that conflicts are looked for on.

A resource is memory: of one blob, or of several that share it (views, adopted arrays that overlap, activations whose
memory a plan uses again), or working memory that operators take turns at. Two accesses to one resource of which one
writes must be ordered. What is read here comes from tensors and operators, not from the plan or its guards: it is
what the proof holds these against.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.device import CPU, Device, make_context
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.shared_buffer import shared_buffer_forced
from dagexec.core.tensor import Tensor
from dagexec.scheduler.preparation import CheckedStep, dynamic_operators

_Key = TypeVar("_Key", bound=Hashable)

_MOST_WORK = 100_000  # of `numpy.shares_memory` on two strided arrays; beyond it they count as sharing


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that operators read and write.

    Attributes:
        name: "blob 'conv1'", "memory of blobs 'a', 'b'", "shared buffer of sim:0".
        exclusive: its content matters to nobody afterwards, so that any order of its users will do, as long as one is
            done before the next begins: working memory.
    """

    name: str
    exclusive: bool = False


@dataclass(frozen=True)
class Accesses:
    """Per operator, in list order, the resources (by number) that it reads and that it writes, ascending."""

    resources: tuple[Resource, ...]
    reads: tuple[tuple[int, ...], ...]
    writes: tuple[tuple[int, ...], ...]

    def users(self) -> list[list[int]]:
        """Per resource, the operators that read or write it, in list order."""
        found: list[list[int]] = [[] for _ in self.resources]
        for operator, (read, written) in enumerate(zip(self.reads, self.writes, strict=True)):
            for resource in {*read, *written}:
                found[resource].append(operator)
        return found


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes from `low` up to `high` of an address space, and the host array on them where there is one to look at."""

    space: Hashable
    low: int
    high: int
    array: npt.NDArray[Any] | None = None

    @property
    def is_packed(self) -> bool:
        """True unless the elements may leave gaps."""
        return self.array is None or bool(self.array.flags.c_contiguous)


class _Collection:
    """Accesses while they are collected."""

    def __init__(self, operators: int) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._resources: list[Resource] = []
        self._reads: list[set[int]] = [set() for _ in range(operators)]
        self._writes: list[set[int]] = [set() for _ in range(operators)]

    def resource(self, key: Hashable, name: str, *, exclusive: bool = False) -> int:
        """The number of the resource known by `key`."""
        number = self._numbers.setdefault(key, len(self._resources))
        if number == len(self._resources):
            self._resources.append(Resource(name, exclusive))
        return number

    def read(self, operator: int, resources: Iterable[int]) -> None:
        self._reads[operator].update(resources)

    def write(self, operator: int, resources: Iterable[int]) -> None:
        self._writes[operator].update(resources)

    def take_turns(self, operator: int, names: Iterable[str]) -> None:
        """`operator` uses these working memories."""
        self.write(operator, [self.resource(("turns", name), name, exclusive=True) for name in names])

    def order_controls(self, graph: Graph) -> None:
        """A control input is a read for order only, of no memory: a resource of its own for each such name."""
        names = {name for definition in graph.operators for name in definition.control_input}
        for operator, definition in enumerate(graph.operators):
            self.read(operator, [self._control(name) for name in definition.control_input])
            self.write(operator, [self._control(name) for name in definition.output if name in names])

    def _control(self, name: str) -> int:
        return self.resource(("control", name), f"order of blob {name!r}")

    def finished(self) -> Accesses:
        """All of it."""
        return Accesses(
            tuple(self._resources),
            tuple(tuple(sorted(row)) for row in self._reads),
            tuple(tuple(sorted(row)) for row in self._writes),
        )


def named_accesses(graph: Graph) -> Accesses:
    """The accesses of a net of which nothing is prepared: blobs go by their names, working memory by arguments.

    An output that may be a view stands for its own memory and for what it may be a view of; an operator that reads it
    reads both.
    """
    found = _Collection(len(graph))
    origin: dict[str, str] = {}
    for index in sorted(graph.views):
        definition = graph.operators[index]
        origin[definition.output[0]] = definition.input[0]

    def blob(name: str) -> int:
        return found.resource(name, f"blob {name!r}")

    for index, definition in enumerate(graph.operators):
        for name in definition.input:
            found.read(index, [blob(viewed) for viewed in _origins(name, origin)])
        found.write(index, [blob(name) for name in definition.output])
        found.take_turns(index, _argued_turns(graph, index))
    found.order_controls(graph)
    return found.finished()


def prepared_accesses(graph: Graph, operators: Sequence[Operator], steps: Sequence[Step] | None = None) -> Accesses:
    """The accesses of a net whose operators are bound to tensors: blobs go by the memory they have.

    A view that has nothing to do touches nothing. What a run may yet give other memory, since its shape depends on
    values, goes by name, and so does a tensor without elements. Without the `steps` that were prepared, that is told
    from the graph.
    """
    found = _Collection(len(graph))
    if steps is None:
        unsettled = dynamic_operators(graph, frozenset())
    else:
        unsettled = frozenset(index for index, step in enumerate(steps) if isinstance(step, CheckedStep))
    dynamic = {id(blob) for index in unsettled for blob in operators[index].output_blobs}
    blobs = {id(blob): blob for operator in operators for blob in (*operator.input_blobs, *operator.output_blobs)}
    regions = {key: region for key, blob in blobs.items() if key not in dynamic and (region := region_of(blob))}
    numbers = _memory_resources(found, regions, {key: blob.name for key, blob in blobs.items()})
    origin: dict[int, int] = {}
    for index in sorted(graph.views):
        operator = operators[index]
        if id(operator.output_blobs[0]) in dynamic:
            origin[id(operator.output_blobs[0])] = id(operator.input_blobs[0])

    def resources(key: int) -> list[int]:
        if key in numbers:
            return numbers[key]
        return [found.resource(key, f"blob {blobs[key].name!r}")]

    for index, operator in enumerate(operators):
        outputs = [id(blob) for blob in operator.output_blobs]
        if index in graph.views and outputs[0] in regions:
            source = regions.get(id(operator.input_blobs[0]))
            target = regions[outputs[0]]
            if source is not None and (source.space, source.low, source.high) == (
                target.space, target.low, target.high
            ):  # fmt: skip
                if len(outputs) == 1 if steps is None else steps[index] is nothing_to_do:
                    continue
                outputs = outputs[1:]
        for blob in operator.input_blobs:
            for key in _origins(id(blob), origin):
                found.read(index, resources(key))
        for key in outputs:
            found.write(index, resources(key))
        found.take_turns(index, turns_of(operator))
    found.order_controls(graph)
    return found.finished()


def turns_of(operator: Operator) -> list[str]:
    """Names of the working memories that `operator` shares with others."""
    names = []
    if operator.shared_buffer is not None:
        names.append(f"shared buffer of {operator.context.device}")
    if operator.library_state is not None:
        names.append(operator.library_state.name)
    return names


def region_of(blob: Blob) -> Region | None:
    """Where the tensor in `blob` has its elements; None for one without elements, and for anything else."""
    tensor = blob.value
    if not isinstance(tensor, Tensor) or tensor.is_empty:
        return None
    array = tensor.array
    if array.size == 0:
        return None
    where: object = tensor.device if isinstance(array, np.ndarray) else array.device
    if isinstance(where, Device):
        array = make_context(where).host_view(array)
    if isinstance(array, np.ndarray):
        low, high = np.lib.array_utils.byte_bounds(array)
        return Region("host", low, high, array)
    return Region(id(tensor.storage()), 0, max(1, tensor.capacity))


def _memory_resources(
    found: _Collection, regions: Mapping[int, Region], names: Mapping[int, str]
) -> dict[int, list[int]]:
    """The resources of each region. Two regions have one in common exactly when they have memory in common."""
    numbers: dict[int, list[int]] = {}
    for group in _overlapping(regions):
        parts = _strided_parts(group, regions) if _has_gaps(group, regions) else _packed_parts(group, regions)
        for part in parts:
            number = found.resource(("memory", part), _named([names[key] for key in part]))
            for key in part:
                numbers.setdefault(key, []).append(number)
    return numbers


def _named(names: Iterable[str]) -> str:
    found = [repr(name) for name in sorted(set(names))]
    return f"blob {found[0]}" if len(found) == 1 else f"memory of blobs {', '.join(found)}"


def _overlapping(regions: Mapping[int, Region]) -> list[list[int]]:
    """Groups of regions, connected by overlaps."""
    ordered = sorted(regions, key=lambda key: (str(regions[key].space), regions[key].low))
    groups: list[list[int]] = []
    space: Hashable = None
    end = 0
    for key in ordered:
        region = regions[key]
        if groups and region.space == space and region.low < end:
            groups[-1].append(key)
            end = max(end, region.high)
        else:
            groups.append([key])
            space, end = region.space, region.high
    return groups


def _has_gaps(group: Sequence[int], regions: Mapping[int, Region]) -> bool:
    return len(group) > 1 and not all(regions[key].is_packed for key in group)


def _packed_parts(group: Sequence[int], regions: Mapping[int, Region]) -> list[tuple[int, ...]]:
    """The regions that cover each stretch between two neighbouring ends of regions; each set of regions once."""
    cuts = sorted({end for key in group for end in (regions[key].low, regions[key].high)})
    starts: dict[int, list[int]] = {}
    for key in group:
        starts.setdefault(regions[key].low, []).append(key)
    parts: dict[tuple[int, ...], None] = {}
    covering: list[int] = []
    for cut in cuts[:-1]:
        covering = [key for key in covering if regions[key].high > cut] + starts.get(cut, [])
        parts[tuple(sorted(covering))] = None
    return list(parts)


def _strided_parts(group: Sequence[int], regions: Mapping[int, Region]) -> list[tuple[int, ...]]:
    """Each region, and each pair of regions that have an element in common: exact where elements leave gaps."""
    parts: list[tuple[int, ...]] = [(key,) for key in group]
    for position, key in enumerate(group):
        parts += [tuple(sorted((key, other))) for other in group[:position] if _share(regions[key], regions[other])]
    return parts


def _share(one: Region, other: Region) -> bool:
    if one.array is None or other.array is None:
        return True
    try:
        return bool(np.shares_memory(one.array, other.array, max_work=_MOST_WORK))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True


def _origins(name: _Key, origin: Mapping[_Key, _Key]) -> list[_Key]:
    """`name`, what it is a view of, what that is a view of, ..."""
    found = [name]
    while found[-1] in origin:
        found.append(origin[found[-1]])
    return found


def _argued_turns(graph: Graph, index: int) -> list[str]:
    """The working memories that an operator asks for by its arguments and its engine."""
    definition, device = graph.operators[index], graph.device(index)
    arguments = {argument.name: argument.i for argument in definition.arg}
    names = []
    if "shared_buffer" in graph.schemas[index].args and (arguments.get("shared_buffer") or shared_buffer_forced()):
        names.append(f"shared buffer of {device}")
    if _uses_library(definition.engine, device):
        names.append(f"library state {arguments.get('cudnn_state', 0)} of {device}")
    return names


def _uses_library(engine: str, device: Device) -> bool:
    return "CUDNN" in engine.split(",") and device != CPU
