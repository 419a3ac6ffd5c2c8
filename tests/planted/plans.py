"""Mutants: nets from which one wait, record, mutex or dependency has been taken away, and what says if it was needed.

`is_ordered_naively` is that judge. It shares nothing with `scheduler.hazards`: it looks at every pair of operators,
asks NumPy whether arrays share memory, and searches the order of a run with every chain on a stream of its own. For
small nets a test compares it with all launch orders and all assignments to streams.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.blob import Blob
from dagexec.core.device import CPU, Device
from dagexec.core.operator import Operator, nothing_to_do
from dagexec.core.runtime import runtime_of
from dagexec.core.stream import Event, Priority, Stream
from dagexec.core.tensor import Tensor
from dagexec.errors import DagexecError
from dagexec.scheduler.hazards import Detector, Proof, check_plan, prepared_accesses
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.net import BaseNet
from dagexec.scheduler.plan.plan import Plan
from dagexec.scheduler.plan.preparation import Preparation
from dagexec.scheduler.plan.synchronization import Synchronization, synchronize
from dagexec.scheduler.run.launching import DeviceStreams, LaunchedChains, NetStreams

Conflicts = list[tuple[int, int]]


@dataclass(frozen=True)
class Mutant:
    """A plan and a synchronization with one thing less than they should have.

    Attributes:
        kind: "wait", "record", "guard" or "dependency".
        what: says which.
        stale: chains whose event passes for recorded though it was not, as if left over from the run before.
    """

    kind: str
    what: str
    plan: Plan
    synchronization: Synchronization
    stale: frozenset[int] = frozenset()


def mutants_of(net: AsyncDAGNet) -> Iterator[Mutant]:
    """Every mutant of `net` as it is prepared now."""
    plan = net.prepared().plan
    sync = net.synchronization(plan)
    for chain, waits in enumerate(sync.waits):
        for parent in waits:
            less = tuple(p for p in waits if p != parent)
            changed = replace(sync, waits=_with(sync.waits, chain, less))
            yield Mutant("wait", f"chain {chain} for chain {parent}", plan, changed)
    for chain, recorded in enumerate(sync.records):
        if recorded:
            changed = replace(sync, records=_with(sync.records, chain, False))
            yield Mutant("record", f"of chain {chain}", plan, changed)
            yield Mutant("lost record", f"of chain {chain}", plan, changed, frozenset((chain,)))
    for operator, guards in enumerate(sync.guards):
        for guard in guards:
            less_guards = tuple(name for name in guards if name != guard)
            if net.graph.device(operator) != CPU:  # on the host the operator's own step takes it
                changed = replace(sync, guards=_with(sync.guards, operator, less_guards))
                yield Mutant("guard", f"{guard} of {net.graph.label(operator)}", plan, changed)
    streams = net.num_workers * net.streams.per_worker
    for parent, children in enumerate(plan.children):
        for child in children:
            fewer = without_dependency(plan, parent, child)
            changed = synchronize(fewer, sync.guards, streams)
            yield Mutant("dependency", f"of chain {child} on chain {parent}", fewer, changed)


def _with(row: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    return (*row[:index], value, *row[index + 1 :])


def without_dependency(plan: Plan, parent: int, child: int) -> Plan:
    """`plan` in which chain `child` no longer waits for chain `parent`."""
    children = tuple(
        tuple(c for c in row if (number, c) != (parent, child)) for number, row in enumerate(plan.children)
    )
    counts = _with(plan.parent_counts, child, plan.parent_counts[child] - 1)
    frontier = tuple(chain for chain, count in enumerate(counts) if count == 0)
    return replace(plan, children=children, parent_counts=counts, frontier=frontier)


# What says whether a mutant needs what was taken from it.


def conflicts_of(net: BaseNet) -> tuple[Conflicts, Conflicts]:
    """Pairs of operators (in list order) that must be ordered; and pairs that must be ordered or take turns."""
    steps = net.prepared().steps
    reads: list[list[Tensor]] = []
    writes: list[list[Tensor]] = []
    for index, operator in enumerate(net.operators):
        idle = steps[index] is nothing_to_do and index in net.graph.views
        outputs = operator.output_blobs[1:] if _is_view(operator) else operator.output_blobs
        reads.append([] if idle else _tensors(operator.input_blobs))
        writes.append([] if idle else _tensors(outputs))
    ordered, turns = [], []
    for later in range(len(net.operators)):
        for earlier in range(later):
            if (
                _meet(writes[earlier], reads[later])
                or _meet(reads[earlier], writes[later])
                or _meet(writes[earlier], writes[later])
                or _controls(net, earlier, later)
            ):
                ordered.append((earlier, later))
            if _same(net.operators[earlier], net.operators[later]):
                turns.append((earlier, later))
    return ordered, turns


def _is_view(operator: Operator) -> bool:
    if not operator.schema.view or not operator.output_blobs:
        return False
    target, source = operator.output_blobs[0].value, operator.input_blobs[0].value
    return isinstance(target, Tensor) and isinstance(source, Tensor) and target.shares_storage_with(source)


def _tensors(blobs: Sequence[Blob]) -> list[Tensor]:
    return [tensor for blob in blobs if isinstance(tensor := blob.value, Tensor) and not tensor.is_empty]


def _meet(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return any(one is other or np.may_share_memory(_host(one), _host(other)) for one in some for other in others)


def _host(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.runtime.host_view(tensor.array)


def _controls(net: BaseNet, earlier: int, later: int) -> bool:
    first, second = net.graph.operators[earlier], net.graph.operators[later]
    return bool(set(first.output) & set(second.control_input)) or bool(set(first.control_input) & set(second.output))


def _same(one: Operator, other: Operator) -> bool:
    return any(
        mine is not None and mine is theirs
        for mine, theirs in ((one.shared_buffer, other.shared_buffer), (one.library_state, other.library_state))
    )


Node = tuple[str, int]


def orders_of(
    plan: Plan, sync: Synchronization, launch_order: Sequence[int], stream: Sequence[int]
) -> dict[int, set[int]]:
    """For each operator, those that surely start after it is done, in one schedule.

    `launch_order` lists the chains as they are launched; `stream` is the stream of each.
    """
    edges: dict[Node, list[Node]] = {}

    def edge(source: Node, target: Node) -> None:
        edges.setdefault(source, []).append(target)

    place = {chain: position for position, chain in enumerate(launch_order)}
    for chain, operators in enumerate(plan.chains):
        path: list[Node] = [("start", chain), *(("operator", index) for index in operators), ("end", chain)]
        edge(("launch", chain), path[0])
        for source, target in itertools.pairwise(path):
            edge(source, target)
        for child in plan.children[chain]:
            edge(("end" if sync.devices[chain] == CPU else "launch", chain), ("launch", child))
        for parent in sync.waits[chain]:
            if sync.records[parent] and place[parent] < place[chain]:
                by_host = sync.devices[parent].kind != sync.devices[chain].kind
                edge(("end", parent), ("launch" if by_host else "start", chain))
    last: dict[tuple[Device, int], int] = {}
    for chain in launch_order:
        if sync.devices[chain] != CPU:
            where = (sync.devices[chain], stream[chain])
            if where in last:
                edge(("end", last[where]), ("start", chain))
            last[where] = chain
    reached: dict[Node, set[int]] = {}
    for node in TopologicalSorter(edges).static_order():  # what is said to come before a node here, comes after it
        own = {node[1]} if node[0] == "operator" else set()
        reached[node] = own.union(*(reached[target] for target in edges.get(node, ())))
    return {number: found - {number} for (kind, number), found in reached.items() if kind == "operator"}


def is_ordered_naively(mutant: Mutant, conflicts: tuple[Conflicts, Conflicts]) -> bool:
    """True when a run with every chain on a stream of its own has all `conflicts` in order, and every wait succeeds."""
    order = list_order(mutant.plan)
    after = orders_of(mutant.plan, mutant.synchronization, order, range(len(mutant.plan.chains)))
    return holds_in(mutant, conflicts, after) and not waits_in_vain(mutant)


def holds_in(mutant: Mutant, conflicts: tuple[Conflicts, Conflicts], after: dict[int, set[int]]) -> bool:
    """True when the orders of a schedule settle all conflicts."""
    guards = mutant.synchronization.guards
    ordered, turns = conflicts
    return all(later in after[earlier] for earlier, later in ordered) and all(
        later in after[earlier] or set(guards[earlier]) & set(guards[later]) for earlier, later in turns
    )


def waits_in_vain(mutant: Mutant) -> bool:
    """True when some chain waits for an event that is never recorded."""
    sync = mutant.synchronization
    return any(not sync.records[parent] and parent not in mutant.stale for waits in sync.waits for parent in waits)


def list_order(plan: Plan) -> list[int]:
    """A launch order: by first operator, an empty chain first."""
    return sorted(range(len(plan.chains)), key=lambda chain: plan.chains[chain][:1])


# Running a mutant.


class OwnStreams(DeviceStreams):
    """A stream of its own for every chain."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, 1, Priority.NORMAL)

    def choose(self, parents: Sequence[Event]) -> Stream:
        """A new stream."""
        [stream] = self._lease()
        self.own.only = None  # the next chain does not go there
        return stream


class StreamPerChain(NetStreams):
    """Streams on which nothing is ordered by chance."""

    def on(self, device: Device, group: str = "") -> DeviceStreams:
        """Those of `device`; groups make no difference."""
        with self._lock:
            if (device, group) not in self._devices:
                self._devices[device, group] = OwnStreams(device)
            return self._devices[device, group]


class MutantNet(AsyncDAGNet):
    """An AsyncDAGNet that runs as `mutant` says; with `hollow`, only operators that take turns compute anything."""

    mutant: Mutant | None = None
    hollow = False

    def prepared(self) -> Preparation:
        """The preparation with the mutant's plan."""
        preparation = super().prepared()
        if self.mutant is not None:
            preparation.plan = self.mutant.plan
        if self.hollow:
            preparation.steps = [
                step if step is nothing_to_do or operator.shared_buffer is not None else _hollow
                for step, operator in zip(preparation.steps, self.operators, strict=True)
            ]
        return preparation

    def synchronization(self, plan: Plan) -> Synchronization:
        """The mutant's."""
        return super().synchronization(plan) if self.mutant is None else self.mutant.synchronization


def _hollow() -> None:
    """Stands for the work of an operator where only its place counts."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: was what it lacks needed, and who noticed."""

    mutant: Mutant
    needed: bool
    proof: Proof
    races: tuple[str, ...]
    error: DagexecError | None

    @property
    def disproved(self) -> bool:
        """The proof has found what is missing; that a record is left out does not count where nobody notices it."""
        return any(not (self.mutant.stale and found.resource.startswith("event of")) for found in self.proof.unordered)

    @property
    def detected(self) -> bool:
        """The run did not go by unnoticed."""
        return bool(self.races) or self.error is not None


def try_mutant(net: MutantNet, mutant: Mutant, conflicts: tuple[Conflicts, Conflicts]) -> Outcome:
    """Judge, prove and run one mutant of `net`, with a stream for every chain."""
    original = net.prepared()
    plan = original.plan
    accesses = prepared_accesses(net.graph, net.operators, original.prepared)
    proof = check_plan(mutant.plan, mutant.synchronization, accesses)
    detector = Detector()
    own = net.streams
    error: DagexecError | None = None
    net.streams = StreamPerChain(net.name, 1, Priority.NORMAL)
    net.mutant = mutant
    try:
        with _lost(mutant.stale):
            net.run(trace=detector, timeout=60)
    except DagexecError as raised:
        error = raised
    finally:
        net.mutant = None
        net.streams.give_back()
        net.streams = own
        original.plan = plan
    needed = not is_ordered_naively(mutant, conflicts)
    return Outcome(mutant, needed, proof, tuple(map(str, detector.races)), error)


@contextmanager
def _lost(chains: frozenset[int]) -> Iterator[None]:
    """Within it, the events of `chains` pass for recorded, at a place where nothing was."""
    if not chains:
        yield
        return
    plain: Callable[[LaunchedChains, int, int], Event] = LaunchedChains._event_of

    with ExitStack() as leases:

        def event_of(launched: LaunchedChains, parent: int, child: int) -> Event:
            event = plain(launched, parent, child)
            if parent in chains:
                runtime = runtime_of(launched._synchronization.devices[parent])
                idle = runtime.lease()
                leases.callback(runtime.give_back, idle)
                event.record(idle)
            return event

        LaunchedChains._event_of = event_of  # type: ignore[method-assign]
        try:
            yield
        finally:
            LaunchedChains._event_of = plain  # type: ignore[method-assign]
