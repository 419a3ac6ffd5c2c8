"""Accesses: what every operator of a net reads and writes, as resources on which accesses may conflict.

A resource is memory: of one blob, or of several that share it (views, adopted arrays that overlap, activations and
working memory that a plan puts on the same bytes), or working memory that operators use in turn. Two accesses to one
resource must be ordered if one of them writes. Accesses are read from tensors and operators, not from the plan or its
guards, as the proof checks the plan and its guards against them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.device import CPU, Device
from dagexec.core.graph import Graph
from dagexec.core.operator import Operator, Prepared, nothing_to_do
from dagexec.core.purity import mutated
from dagexec.core.runtime import runtime_of
from dagexec.core.shared_buffer import shared_buffer_forced
from dagexec.core.tensor import Tensor
from dagexec.devices.cuda.arrays import address, is_on_device
from dagexec.platform.records import dataclass
from dagexec.scheduler.plan.dynamic import CheckedStep

_Key = TypeVar("_Key", bound=Hashable)

_MAX_NAMED = 6
_MAX_WORK = 100_000  # of `numpy.shares_memory` on two strided arrays; beyond it they count as sharing


@dataclass(frozen=True, slots=True)
class Resource:
    """Something that operators read and write.

    Attributes:
        name: "blob 'conv1'", "memory of blobs 'a', 'b'", "shared buffer of sim:0".
        exclusive: it is working memory, whose content no later user reads: any order of its users will do, as long as
            each is done before the next begins.
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
        users: list[list[int]] = [[] for _ in self.resources]
        for operator, (read, written) in enumerate(zip(self.reads, self.writes, strict=True)):
            for resource in {*read, *written}:
                users[resource].append(operator)
        return users


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes from `low` up to `high` of an address space, and the host array on them if there is one."""

    space: Hashable
    low: int
    high: int
    array: npt.NDArray[Any] | None = None

    @property
    def is_packed(self) -> bool:
        """True unless the elements may leave gaps."""
        return self.array is None or bool(self.array.flags.c_contiguous)


@dataclass(frozen=True, slots=True)
class Untouched:
    """Blobs that an operator names and does not touch, as they are in place already.

    Attributes:
        inputs: the ids of input blobs.
        outputs: the indices of outputs that are views of input 0, or of a part of it; all those of a settled operator.
        kept_parts: the ids of input blobs that are parts of output 0; the operator only writes between them.
    """

    inputs: frozenset[int] = frozenset()
    outputs: frozenset[int] = frozenset()
    kept_parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class TouchedMemory:
    """The memory of a prepared net.

    Attributes:
        regions: by blob id, where it is; working memory has negative numbers. Lacks blobs that a run may move.
        names: of the blobs by their ids, and of working memory by its number.
        working: the numbers of each operator's working memory.
        untouched: the blobs that each operator does not touch.
        dynamic: the ids of the blobs that a run may move.
    """

    regions: Mapping[int, Region]
    names: Mapping[int, str]
    working: tuple[tuple[int, ...], ...]
    untouched: tuple[Untouched, ...]
    dynamic: frozenset[int]


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
        """`operator` uses these working memories, each in turn with its other users."""
        self.write(operator, [self.resource(("turns", name), name, exclusive=True) for name in names])

    def change_kept(self, operator: int, graph: Graph) -> None:
        """`operator` changes memory beside the blobs."""
        keeps = graph.schemas[operator].keeps
        names = () if keeps is None else keeps(graph.operators[operator])
        self.write(operator, [self.resource(("kept", name), name) for name in names])

    def order_controls(self, graph: Graph, settled: Collection[int] = ()) -> None:
        """Give each control input a resource of its own: it stands for order only, not for memory.

        Operators in `settled` do not run.
        """
        names = {name for definition in graph.operators for name in definition.control_input}
        for operator, definition in enumerate(graph.operators):
            if operator in settled:
                continue
            self.read(operator, [self._control(name) for name in definition.control_input])
            self.write(operator, [self._control(name) for name in definition.output if name in names])

    def _control(self, name: str) -> int:
        return self.resource(("control", name), f"order of blob {name!r}")

    def finished(self) -> Accesses:
        """The collected accesses."""
        return Accesses(
            tuple(self._resources),
            tuple(tuple(sorted(row)) for row in self._reads),
            tuple(tuple(sorted(row)) for row in self._writes),
        )


def named_accesses(graph: Graph) -> Accesses:
    """The accesses of a net before preparation: blobs are told apart by name, working memory by arguments.

    An output that may be a view stands for its own memory and for that which it may be a view of; an operator that
    reads it reads both.
    """
    collection = _Collection(len(graph))
    origin: dict[str, str] = {}
    for index in sorted(graph.views):
        definition = graph.operators[index]
        origin[definition.output[0]] = definition.input[0]

    def blob(name: str) -> int:
        return collection.resource(name, f"blob {name!r}")

    for index, definition in enumerate(graph.operators):
        for name in definition.input:
            collection.read(index, [blob(viewed) for viewed in _origins(name, origin)])
        collection.write(index, [blob(name) for name in definition.output])
        collection.write(
            index, [blob(definition.input[place]) for place in mutated(graph.operators[index], graph.schemas[index])]
        )
        collection.change_kept(index, graph)
        collection.take_turns(index, _argued_turns(graph, index))
    collection.order_controls(graph)
    return collection.finished()


def touched_memory(graph: Graph, operators: Sequence[Operator], prepared: Sequence[Prepared]) -> TouchedMemory:
    """Where the blobs and the working memory of a prepared net are, except those that a run may still move."""
    unsettled = [index for index, record in enumerate(prepared) if isinstance(record.step, CheckedStep)]
    dynamic = frozenset(id(blob) for index in unsettled for blob in operators[index].output_blobs)
    blobs = {id(blob): blob for operator in operators for blob in (*operator.input_blobs, *operator.output_blobs)}
    regions = {key: region for key, blob in blobs.items() if key not in dynamic and (region := region_of(blob))}
    names = {key: blob.name for key, blob in blobs.items()}
    working: list[tuple[int, ...]] = []
    for index, record in enumerate(prepared):
        arrays = [array for array in record.working_memory if array.size]
        numbers = tuple(-1 - len(regions) - place for place in range(len(arrays)))
        working.append(numbers)
        for number, array in zip(numbers, arrays, strict=True):
            regions[number] = _region_of_array(array)
            names[number] = f"working memory of {graph.label(index)}"
    untouched = tuple(
        _untouched(index, graph, operator, regions, record)
        for index, (operator, record) in enumerate(zip(operators, prepared, strict=True))
    )
    return TouchedMemory(regions, names, tuple(working), untouched, dynamic)


def _untouched(
    index: int, graph: Graph, operator: Operator, regions: Mapping[int, Region], prepared: Prepared
) -> Untouched:
    """What operator `index` does not touch: all of a view that needs no work, and what it rightly claims not to."""
    if prepared.is_settled:
        return Untouched(frozenset(map(id, operator.input_blobs)), frozenset(range(len(operator.output_blobs))))
    first_input = id(operator.input_blobs[0]) if operator.input_blobs else 0
    first_output = id(operator.output_blobs[0]) if operator.output_blobs else 0
    source, target = regions.get(first_input), regions.get(first_output)
    if source is None or target is None:
        return Untouched()
    if index in graph.views and (source.space, source.low, source.high) == (target.space, target.low, target.high):
        idle = prepared.step is nothing_to_do
        return Untouched(frozenset(map(id, operator.input_blobs)) if idle else frozenset(), frozenset((0,)))
    parts = [
        place
        for place in prepared.inputs_in_place
        if _lies_within(regions.get(id(operator.input_blobs[place])), target)
    ]
    cut = [
        place
        for place in prepared.outputs_in_place
        if _lies_within(regions.get(id(operator.output_blobs[place])), source)
    ]
    unread = {id(operator.input_blobs[place]) for place in parts}
    read = [blob for place, blob in enumerate(operator.input_blobs) if place not in parts]
    if cut and len(cut) == len(operator.output_blobs):
        read = [blob for blob in read if id(blob) != first_input]
        unread.add(first_input)
    return Untouched(
        frozenset(unread - set(map(id, read))),
        frozenset(cut),
        tuple(id(operator.input_blobs[place]) for place in parts),
    )


def _lies_within(part: Region | None, whole: Region) -> bool:
    return (
        part is not None and part.is_packed and whole.is_packed
        and part.space == whole.space and whole.low <= part.low and part.high <= whole.high
    )  # fmt: skip


def prepared_accesses(
    graph: Graph,
    operators: Sequence[Operator],
    prepared: Sequence[Prepared],
    touched: TouchedMemory | None = None,
) -> Accesses:
    """The accesses of a net whose operators are bound to tensors: blobs are told apart by their memory.

    What is in place already, such as a view, is not touched. Blobs that a run may still move are told apart by name, as
    are tensors without elements. `touched` defaults to the result of `touched_memory`.
    """
    memory = touched_memory(graph, operators, prepared) if touched is None else touched
    collection = _Collection(len(graph))
    numbers = _memory_resources(collection, memory.regions, memory.names)
    origin: dict[int, int] = {}
    for index in sorted(graph.views):
        operator = operators[index]
        if id(operator.output_blobs[0]) in memory.dynamic:
            origin[id(operator.output_blobs[0])] = id(operator.input_blobs[0])

    def resources(key: int) -> list[int]:
        if key in numbers:
            return numbers[key]
        return [collection.resource(key, f"blob {memory.names[key]!r}")]

    for index, operator in enumerate(operators):
        untouched = memory.untouched[index]
        for blob in operator.input_blobs:
            if id(blob) not in untouched.inputs:
                for key in _origins(id(blob), origin):
                    collection.read(index, resources(key))
        for place, blob in enumerate(operator.output_blobs):
            if place not in untouched.outputs:
                written = set(resources(id(blob)))
                if place == 0:
                    written.difference_update(number for part in untouched.kept_parts for number in resources(part))
                collection.write(index, sorted(written))
        for place in mutated(graph.operators[index], graph.schemas[index]):
            collection.write(index, resources(id(operator.input_blobs[place])))
        for number in memory.working[index]:
            collection.write(index, resources(number))
        collection.change_kept(index, graph)
        collection.take_turns(index, turns_of(operator, prepared[index]))
    collection.order_controls(graph, {index for index, record in enumerate(prepared) if record.is_settled})
    return collection.finished()


def turns_of(operator: Operator, prepared: Prepared) -> list[str]:
    """Names of the working memories that `operator` shares with others."""
    names = []
    if prepared.shared_buffer is not None:
        names.append(f"shared buffer of {operator.runtime.device}")
    if operator.library_state is not None:
        names.append(operator.library_state.name)
    return names


def region_of(blob: Blob) -> Region | None:
    """Where the elements of the tensor in `blob` are; None for one without elements, and for any other value."""
    tensor = blob.value
    if not isinstance(tensor, Tensor) or tensor.is_empty:
        return None
    array = tensor.array
    if array.size == 0:
        return None
    if tensor.device.kind == "cuda" and is_on_device(array):
        return _region_of_array(array)
    where: object = tensor.device if isinstance(array, np.ndarray) else array.device
    if isinstance(where, Device):
        array = runtime_of(where).host_view(array)
    if isinstance(array, np.ndarray):
        return _region_of_array(array)
    return Region(id(tensor.storage()), 0, max(1, tensor.capacity))


def _region_of_array(array: npt.NDArray[Any]) -> Region:
    """Where the elements of a nonempty array are: in the host's addresses, or in CUDA's, one space for all devices."""
    if not is_on_device(array):
        low, high = np.lib.array_utils.byte_bounds(array)
        return Region("host", low, high, array)
    spans = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
    start = address(array)
    low, high = start + sum(min(0, span) for span in spans), start + sum(max(0, span) for span in spans)
    return Region("cuda", low, high + int(array.itemsize))


def _memory_resources(
    collection: _Collection, regions: Mapping[int, Region], names: Mapping[int, str]
) -> dict[int, list[int]]:
    """The resources of each region. Two regions share a resource exactly when they share memory."""
    numbers: dict[int, list[int]] = {}
    for group in _overlapping(regions):
        parts = _strided_parts(group, regions) if _has_gaps(group, regions) else _packed_parts(group, regions)
        for part in parts:
            blobs = [names[key] for key in part if key >= 0]
            number = collection.resource(("memory", part), _named(blobs, [names[key] for key in part if key < 0]))
            for key in part:
                numbers.setdefault(key, []).append(number)
    return numbers


def _named(blobs: Iterable[str], working: Sequence[str]) -> str:
    names = sorted(set(blobs))
    shown = [*(repr(name) for name in names[:_MAX_NAMED]), *working[: max(0, _MAX_NAMED - len(names))]]
    if len(shown) == 1:
        return shown[0] if working else f"blob {shown[0]}"
    more = len(names) + len(working) - len(shown)
    return f"memory of blobs {', '.join(shown)}" + (f" and {more} more" if more else "")


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
    """The regions that cover each stretch between two neighboring ends of regions; each set of regions once."""
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
    """Each region, and each pair of regions that share an element: exact where elements leave gaps."""
    parts: list[tuple[int, ...]] = [(key,) for key in group]
    for position, key in enumerate(group):
        parts += [tuple(sorted((key, other))) for other in group[:position] if _share(regions[key], regions[other])]
    return parts


def _share(first: Region, second: Region) -> bool:
    if first.array is None or second.array is None:
        return True
    try:
        return bool(np.shares_memory(first.array, second.array, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except (np.exceptions.TooHardError, OverflowError):
        return True


def _origins(name: _Key, origin: Mapping[_Key, _Key]) -> list[_Key]:
    """`name`, the blob that it is a view of, the one that this is a view of, ..."""
    chain = [name]
    while chain[-1] in origin:
        chain.append(origin[chain[-1]])
    return chain


def _argued_turns(graph: Graph, index: int) -> list[str]:
    """The working memories that an operator asks for by its arguments and its engine."""
    definition, device = graph.operators[index], graph.device(index)
    arguments = {name: value for name, value in definition.values.items() if isinstance(value, int)}
    names = []
    if "shared_buffer" in graph.schemas[index].args and (arguments.get("shared_buffer") or shared_buffer_forced()):
        names.append(f"shared buffer of {device}")
    if _uses_library(definition.engine, device, arguments):
        names.append(f"library state {arguments.get('cudnn_state', 0)} of {device}")
    return names


def _uses_library(engine: str, device: Device, arguments: Mapping[str, int]) -> bool:
    """On CUDA an operator may use the library on its own stream, which is the default (`cudnn.operator`)."""
    if device.kind == "cuda" and arguments.get("cudnn_inline", "cudnn_state" not in arguments):
        return False
    return "CUDNN" in engine.split(",") and device != CPU
