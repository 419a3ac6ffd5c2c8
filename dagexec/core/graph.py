"""The dependency graph of a net: which operator must run before which, and why.

Blobs are named, so order comes from names. Operators are read in list order; between two that touch one blob, of
which one writes, there is an edge:

    RAW      the reader of a value comes after its writer
    WAW      a writer comes after the writer before it
    WAR      a writer comes after every reader of the value it replaces
    CONTROL  a `control_input` counts as a read, for order only; it need not exist

The edges all point forward in the list, so the graph has no cycle - unless an operator reads a blob that only a later
one writes; `build_graph` then reports the cycle, or the wrong order, instead of guessing.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

from dagexec.core.device import CPU, Device
from dagexec.core.node import Node, operator_label
from dagexec.core.program import Program, program_of
from dagexec.core.proto import NetDef
from dagexec.core.purity import mutated
from dagexec.core.registry import schema_of, verify_all
from dagexec.core.schema import OpSchema
from dagexec.errors import CycleError, NetOrderError
from dagexec.platform.cached import cached_property
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass

if not TYPE_CHECKING:
    nx = LazyModule("networkx")
else:
    import networkx as nx


Derived = TypeVar("Derived")


class Hazard(enum.Flag):
    """Why one operator must wait for another."""

    RAW = enum.auto()
    WAR = enum.auto()
    WAW = enum.auto()
    CONTROL = enum.auto()


@dataclass(frozen=True)
class Graph:
    """Operators of one net and the order they need; immutable, shared by every plan and net made from it.

    Attributes:
        name: the net's name.
        operators: the defs, in list order, each with the device it runs on.
        schemas: the schema of each operator.
        parents, children: all hazard edges, per operator, ascending.
        reduced_parents, reduced_children: the transitive reduction of them.
        views: operators whose output 0 may be a view of input 0: nothing else writes the output or reads it before, as
            the run before left it, and nothing writes the input afterwards.
        read_early: blobs that an operator reads before another one writes them, or changes what they hold.
        external_inputs, external_outputs: as the NetDef lists them.
    """

    name: str
    operators: tuple[Node, ...]
    schemas: tuple[OpSchema, ...]
    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]
    reduced_parents: tuple[tuple[int, ...], ...]
    reduced_children: tuple[tuple[int, ...], ...]
    views: frozenset[int]
    read_early: Set[str]
    external_inputs: tuple[str, ...]
    external_outputs: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.operators)

    @cached_property
    def written(self) -> frozenset[str]:
        """The blobs that operators write."""
        return frozenset([name for definition in self.operators for name in definition.output])

    @cached_property
    def devices(self) -> frozenset[Device]:
        """The devices that operators run on."""
        return frozenset([CPU if operator.device_option is None else operator.device for operator in self.operators])

    @cached_property
    def hazards(self) -> Mapping[tuple[int, int], Hazard]:
        """(earlier, later) to the reasons for that edge."""
        return find_hazards(self.operators)

    @cached_property
    def _known(self) -> dict[Hashable, object]:
        return {}

    def derived(self, key: Hashable, compute: Callable[[], Derived]) -> Derived:
        """The result of `compute` for the graph, cached under `key` for all its nets and preparations."""
        if key not in self._known:
            self._known[key] = compute()
        return cast(Derived, self._known[key])

    def without_edges_of(self, operators: frozenset[int]) -> Graph:
        """The graph in which nothing waits for `operators`, and they wait for nothing.

        The others keep their order if none of `operators` writes a blob that another operator writes. An operator with
        a control input from them waits for their parents.
        """
        return self.derived(("without edges of", operators), lambda: self._without_edges_of(operators))

    def _without_edges_of(self, operators: frozenset[int]) -> Graph:
        writer: dict[str, int] = {}
        before: dict[int, set[int]] = {}  # parents of `operators`
        rows: list[tuple[int, ...]] = []
        for index, definition in enumerate(self.operators):
            waits_for = {parent for parent in self.parents[index] if parent not in operators}
            if index in operators:
                waits_for.update(*(before[parent] for parent in self.parents[index] if parent in operators))
                before[index] = waits_for
                rows.append(())
            else:
                controls = [writer[name] for name in definition.control_input if name in writer]
                waits_for.update(*(before[parent] for parent in controls if parent in operators))
                rows.append(tuple(sorted(waits_for)))
            writer.update(dict.fromkeys(definition.output, index))
        parents = tuple(rows)
        reduced = transitive_reduction(parents)
        return replace(
            self,
            parents=parents,
            children=_reverse(parents),
            reduced_parents=reduced,
            reduced_children=_reverse(reduced),
        )

    def label(self, index: int) -> str:
        """How messages name operator `index`."""
        return operator_label(self.operators[index], index, self.name)

    def device(self, index: int) -> Device:
        """The device operator `index` runs on."""
        return self.operators[index].device

    def to_networkx(self, *, reduced: bool = False) -> nx.DiGraph[int]:
        """The graph for networkx's algorithms: operator indices, edges with their `hazard`."""
        digraph: nx.DiGraph[int] = nx.DiGraph()
        digraph.add_nodes_from(range(len(self)))
        for later, parents in enumerate(self.reduced_parents if reduced else self.parents):
            for earlier in parents:
                digraph.add_edge(earlier, later, hazard=self.hazards[earlier, later])
        return digraph


def check_net(net: Program, exists: Callable[[str], bool] | None = None) -> None:
    """Raise what `build_graph` raises, without building the graph."""
    _schemas_of(net)
    _check_order(net, exists or _declared(net))


def build_graph(net: NetDef | Program, exists: Callable[[str], bool] | None = None) -> Graph:
    """Check every operator against its schema and derive the graph, once for a Program.

    `exists` says which blobs exist before the net runs; by default those in `external_input`, or, when that list
    is empty, any blob (as Caffe2 does).
    Raises SchemaError, UnsupportedOperatorError, CycleError or NetOrderError.
    """
    program = program_of(net)
    graph = program.once("graph", partial(_derived, program))
    exists = exists or _declared(program)
    if not all(map(exists, graph.read_early)):
        _check_order(program, exists)
    return graph


def _schemas_of(program: Program) -> tuple[OpSchema, ...]:
    return program.once("schemas", lambda: verify_all(program.op, program.name))


def _derived(program: Program) -> Graph:
    schemas, operators = _schemas_of(program), program.op
    if program.header.HasField("device_option"):
        option = program.header.device_option
        operators = tuple(node if node.device_option else node.changed(device_option=option) for node in operators)
    flow = flow_of(operators, schemas)
    children = _reverse(flow.parents)
    reduced_parents = transitive_reduction(flow.parents)
    reduced_children = children if reduced_parents == flow.parents else _reverse(reduced_parents)
    views = frozenset(
        index
        for index, schema in enumerate(schemas)
        if schema.view and schema.is_view(operators[index]) and flow.may_be_view(index, operators[index])
    )
    return Graph(
        program.name, operators, schemas, flow.parents, children, reduced_parents, reduced_children, views,
        flow.early & flow.writers.keys(), tuple(program.external_input), tuple(program.external_output),
    )  # fmt: skip


def find_hazards(operators: Sequence[Node]) -> dict[tuple[int, int], Hazard]:
    """Every (earlier, later) pair of operators with the hazards between them; one pass over the list.

    Inputs that an operator changes count as outputs.

    The WAR edges of a write start at the readers since the last write, so pairs ordered through another writer
    between them have no edge of their own: they are ordered by a path.
    """
    hazards: dict[tuple[int, int], Hazard] = {}
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}

    def add(earlier: int, later: int, hazard: Hazard) -> None:
        if earlier != later:
            present = hazards.setdefault((earlier, later), hazard)
            if present is not hazard:
                hazards[earlier, later] = present | hazard

    for index, definition in enumerate(operators):
        for names, hazard in ((definition.input, Hazard.RAW), (definition.control_input, Hazard.CONTROL)):
            for name in names:
                if name in writer:
                    add(writer[name], index, hazard)
                readers.setdefault(name, []).append(index)
        for name in (*definition.output, *_mutated(definition, schema_of(definition.type))):
            if name in writer:
                add(writer[name], index, Hazard.WAW)
            for reader in readers.pop(name, ()):
                add(reader, index, Hazard.WAR)
            writer[name] = index
    return hazards


@dataclass(frozen=True, slots=True)
class Flow:
    """How the operators of a net use its blobs, in list order.

    Attributes:
        parents: for each operator the earlier ones that it has a hazard with, ascending: the edges of `find_hazards`.
        writers: by blob, the last operator that writes it.
        rewritten: blobs that are written more than once.
        early: blobs that an operator reads before any has written them.
    """

    parents: tuple[tuple[int, ...], ...]
    writers: Mapping[str, int]
    rewritten: Set[str]
    early: Set[str]

    def may_be_view(self, index: int, definition: Node) -> bool:
        """True where output 0 of operator `index` may stay a view of its input 0, see `Graph.views`."""
        source, result = definition.input[0], definition.output[0]
        return (
            source != result
            and result not in self.early
            and result not in self.rewritten
            and source not in self.rewritten
            and self.writers.get(source, -1) < index
        )


def flow_of(operators: Sequence[Node], schemas: Sequence[OpSchema]) -> Flow:
    """The flow of a net, in one walk over its operators."""
    rows: list[tuple[int, ...]] = []
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    rewritten: set[str] = set()
    early: set[str] = set()
    for index, (definition, schema) in enumerate(zip(operators, schemas, strict=True)):
        waits_for = set()
        for name in definition.input:
            if name in writer:
                waits_for.add(writer[name])
            else:
                early.add(name)
            row = readers.get(name)
            if row is None:
                readers[name] = [index]
            else:
                row.append(index)
        for name in definition.control_input:
            if name in writer:
                waits_for.add(writer[name])
            readers.setdefault(name, []).append(index)
        mutates = schema.mutates or schema.sub_nets
        for name in (*definition.output, *_mutated(definition, schema)) if mutates else definition.output:
            if name in writer:
                waits_for.add(writer[name])
                rewritten.add(name)
            row = readers.pop(name, None)
            if row is not None:
                waits_for.update(row)
            writer[name] = index
        waits_for.discard(index)
        rows.append(tuple(waits_for) if len(waits_for) < 2 else tuple(sorted(waits_for)))
    return Flow(tuple(rows), writer, rewritten, early)


def _mutated(definition: Node, schema: OpSchema) -> list[str]:
    return [definition.input[place] for place in mutated(definition, schema)]


def transitive_reduction(parents: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """The fewest edges with the same reachability; unique for a DAG (Aho, Garey, Ullman 1972).

    `parents[v]` lists the parents of v, ascending, all below v. A parent is redundant exactly when a later one of them
    already reaches it, so parents are tried from the latest to the earliest against the set of ancestors covered so
    far. Ancestor sets are integers used as bit sets and are dropped with their last child. Only a node that still has
    children to come has a bit in them, so a set is as long as the graph is wide there, however long the graph is:
    O(edges x width / 64) time. Where all sets together would take more than 128 MiB, which no net of some ten thousand
    operators needs, further nodes get no bit, and an edge from one of these may stay though it is redundant.
    """
    if all(len(row) < 2 for row in parents):
        return tuple(map(tuple, parents))
    child_counts = [0] * len(parents)
    last_child = list(range(len(parents)))
    for child, row in enumerate(parents):
        for parent in row:
            child_counts[parent] += 1
            last_child[parent] = child
    bits = AncestorBits()
    reduced: list[tuple[int, ...]] = []
    for child, row in enumerate(parents):
        covered = 0
        necessary = []
        for parent in sorted(row, reverse=True) if len(row) > 1 else row:
            if not bits.has(covered, parent):
                necessary.append(parent)
                covered |= bits.with_ancestors(parent)
        necessary.reverse()
        reduced.append(row if isinstance(row, tuple) and len(necessary) == len(row) else tuple(necessary))
        for parent in row:
            if last_child[parent] == child:
                bits.forget(parent)
                bits.release(parent)
        if last_child[child] > child:
            bits.enter(child, covered)
            if child_counts[child] > 1:  # an only child cannot make an edge redundant
                bits.assign(child)
    return tuple(reduced)


_MAX_BITS = 1 << 30  # of ancestor sets held at one time, 128 MiB
_MIN_RECYCLED = 512


class AncestorBits:
    """Sets of ancestors as integers, in a walk over a graph; a node has a bit as long as it is needed.

    Bits are reused, so the sets are as long as the number of nodes that are needed at the same time.
    """

    def __init__(self) -> None:
        self._ancestors: dict[int, int] = {}
        self._bits: dict[int, int] = {}  # the position of each node's bit
        self._free: list[int] = []
        self._released: list[int] = []
        self._length = 0

    def has(self, ancestors: int, node: int) -> bool:
        """True when `node` is in the set; False where it has no bit."""
        bit = self._bits.get(node)
        return bit is not None and bool(ancestors >> bit & 1)

    def mask(self, nodes: Sequence[int]) -> int | None:
        """The set of `nodes`, comparable with sets of ancestors until one of them is released; None without bits."""
        mask = 0
        for node in nodes:
            bit = self._bits.get(node)
            if bit is None:
                return None
            mask |= 1 << bit
        return mask

    def with_ancestors(self, node: int) -> int:
        """The set of an entered node and its ancestors."""
        bit = self._bits.get(node)
        return self._ancestors[node] if bit is None else self._ancestors[node] | 1 << bit

    def enter(self, node: int, ancestors: int) -> None:
        """Keep the set of a node until it is forgotten."""
        self._ancestors[node] = ancestors

    def forget(self, node: int) -> None:
        """Drop the set of a node."""
        del self._ancestors[node]

    def assign(self, node: int) -> bool:
        """Give a bit to a node that was just entered and whose set is unread; False if that takes too much memory."""
        if not self._free:
            self._recycle()
        if self._free:
            self._bits[node] = self._free.pop()
        elif self._length * len(self._ancestors) < _MAX_BITS:
            self._bits[node] = self._length
            self._length += 1
        return node in self._bits

    def release(self, node: int) -> None:
        """The node is not needed any more."""
        bit = self._bits.pop(node, None)
        if bit is not None:
            self._released.append(bit)

    def _recycle(self) -> None:
        """Take the bits of released nodes out of all sets, once that frees enough of them."""
        if len(self._released) < max(_MIN_RECYCLED, self._length // 2, len(self._ancestors) // 4):
            return
        gone = 0
        for bit in self._released:
            gone |= 1 << bit
        for node, ancestors in self._ancestors.items():
            if ancestors & gone:
                self._ancestors[node] = ancestors & ~gone
        self._free = self._released
        self._released = []


def _declared(net: Program) -> Callable[[str], bool]:
    return set(net.external_input).__contains__ if net.external_input else lambda _name: True


def _check_order(program: Program, exists: Callable[[str], bool]) -> None:
    """Raise CycleError or NetOrderError when a blob is read before the only operators that write it."""
    operators = program.op
    written: set[str] = set()
    early: set[str] = set()  # read before they are written
    for definition in operators:
        early.update(name for name in definition.input if name not in written)
        written.update(definition.output)
    if not all(map(exists, early & written)):
        _refuse_order(program.name, operators, {name for name in written if not exists(name)})


def _refuse_order(net: str, operators: Sequence[Node], written: Collection[str]) -> NoReturn:
    """Raise CycleError or NetOrderError for a net that reads one of the blobs it has `written` before it makes it."""
    first_writer: dict[str, int] = {}
    for index, definition in enumerate(operators):
        for name in definition.output:
            first_writer.setdefault(name, index)
    flow: nx.DiGraph[int] = nx.DiGraph()
    for index, definition in enumerate(operators):
        for name in definition.input:
            if name in written:
                flow.add_edge(first_writer[name], index)
    try:
        cycle = [edge[0] for edge in nx.find_cycle(flow)]
    except nx.NetworkXNoCycle:
        writer, reader, name = next(
            (first_writer[name], index, name)
            for index, definition in enumerate(operators)
            for name in definition.input
            if name in written and first_writer[name] >= index
        )
        raise NetOrderError(
            f"{operator_label(operators[reader], reader, net)} reads blob {name!r}, which only "
            f"{operator_label(operators[writer], writer)} writes, later in the list; expected writers first"
        ) from None
    labels = [operator_label(operators[index], index) for index in cycle]
    raise CycleError(f"net {net!r}: operators depend on each other in a cycle: {' -> '.join(labels)}", labels)


def _reverse(parents: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    children: list[list[int]] = [[] for _ in parents]
    for child, row in enumerate(parents):
        for parent in row:
            children[parent].append(child)
    return tuple(tuple(row) for row in children)
