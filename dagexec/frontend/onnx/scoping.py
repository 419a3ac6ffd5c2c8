"""Names in a graph and in the graphs inside its nodes: what they capture, an order to compute in, distinct names.

A graph that a node holds as an attribute (a branch of If, a body of Loop or Scan) may read tensors of the graphs around
it. Specification: https://github.com/onnx/onnx/blob/main/docs/IR.md, "Names Within a Graph".
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import onnx

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.node import DEFAULT_DOMAINS, node_label

_TEXT = frozenset({str})


def subgraphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs that a node holds."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def reads(node: onnx.NodeProto) -> set[str]:
    """The tensors that a node needs: its inputs, and what its graphs capture."""
    names = set(node.input)
    names.discard("")
    return names.union(*map(captured, subgraphs(node)))


def captured(graph: onnx.GraphProto) -> set[str]:
    """The tensors that a graph reads or returns and that are not its own."""
    needed = {value.name for value in graph.output}.union(*map(reads, graph.node))
    return needed - set(own_names(graph))


class Listed(NamedTuple):
    """A node of a graph with facts that are asked for often: every look into a message makes objects.

    Attributes:
        op_type, name, attributes: as in the message.
        domain: of its operator, the default one as ''.
        inputs, outputs: tensors; an absent optional one is ''.
        needs: the tensors that it needs: inputs, and what its graphs capture.
        holds_graphs: it has graphs as attributes.
    """

    proto: onnx.NodeProto
    op_type: str
    name: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[onnx.AttributeProto, ...]
    needs: Collection[str]
    holds_graphs: bool


def listed(nodes: Iterable[onnx.NodeProto]) -> list[Listed]:
    """Nodes of a graph, in their order. Raises ModelFormatError for a name that is not text."""
    result = []
    for proto in nodes:
        op_type, name, domain = proto.op_type, proto.name, proto.domain
        inputs, outputs, attributes = tuple(proto.input), tuple(proto.output), tuple(proto.attribute)
        if not _TEXT.issuperset(map(type, (op_type, name, domain, *inputs, *outputs))):
            raise ModelFormatError("a name in the model is not UTF-8 text")
        holds_graphs = False
        for attribute in attributes:
            if attribute.HasField("g") or attribute.graphs:
                holds_graphs = True
        needs = reads(proto) if holds_graphs or "" in inputs else inputs
        domain = "" if domain in DEFAULT_DOMAINS else domain
        result.append(Listed(proto, op_type, name, domain, inputs, outputs, attributes, needs, holds_graphs))
    return result


def given_names(graph: onnx.GraphProto) -> dict[str, None]:
    """The tensors of a graph before its nodes compute: inputs and initializers; one may be both."""
    tensors = dict.fromkeys([value.name for value in graph.input])
    tensors |= dict.fromkeys([tensor.name for tensor in graph.initializer])
    return tensors | dict.fromkeys([tensor.values.name for tensor in graph.sparse_initializer])


def own_names(graph: onnx.GraphProto) -> list[str]:
    """The tensors of a graph: inputs, initializers and nodes' outputs."""
    return [*given_names(graph), *filter(None, chain.from_iterable(node.output for node in graph.node))]


def check_origins(own: Sequence[str]) -> None:
    """Raise ModelFormatError when one of a graph's `own_names` has two origins (the IR has single assignments)."""
    if len(set(own)) < len(own):
        name = next(name for index, name in enumerate(own) if name in own[:index])
        raise ModelFormatError(f"tensor {name!r} has two origins; expected one node, input or initializer")


def check_provided(nodes: Iterable[Listed], returned: Iterable[str], own: Collection[str]) -> None:
    """Raise ModelFormatError when the model's graph, or one in it, reads or returns what nothing provides."""
    provided = frozenset(own)
    for node in nodes:
        if not provided.issuperset(node.needs):
            name = min(set(node.needs) - provided)
            raise ModelFormatError(f"{node_label(node.proto)} reads {name!r}, which nothing in the model provides")
    for name in returned:
        if name not in provided:
            raise ModelFormatError(f"the model returns {name!r}, which nothing in it provides")


def sorted_nodes(nodes: list[Listed]) -> list[Listed]:
    """The nodes so that each comes after those whose outputs it reads, else in their order.

    Raises ModelFormatError, naming some of the nodes, when they wait for each other in a circle.
    """
    if _are_sorted(nodes):
        return nodes
    writer = {name: index for index, node in enumerate(nodes) for name in node.outputs if name}
    parents = [{writer[name] for name in node.needs if name in writer} for node in nodes]
    children: list[list[int]] = [[] for _ in nodes]
    for index, before in enumerate(parents):
        for parent in before:
            children[parent].append(index)
    waiting = [len(before) for before in parents]
    ready = [index for index, count in enumerate(waiting) if not count]  # ascending, so a heap
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for child in children[index]:
            waiting[child] -= 1
            if not waiting[child]:
                heapq.heappush(ready, child)
    if len(order) < len(nodes):
        circle = " -> ".join(node_label(nodes[index].proto) for index in _circle(parents, waiting))
        raise ModelFormatError(f"nodes wait for each other in a circle: {circle}")
    return [nodes[index] for index in order]


def _are_sorted(nodes: Sequence[Listed]) -> bool:
    unwritten = set(chain.from_iterable(node.outputs for node in nodes))
    unwritten.discard("")
    for node in nodes:
        if not unwritten.isdisjoint(node.needs):
            return False
        unwritten.difference_update(node.outputs)
    return True


_MAX_NAMED = 8


def _circle(parents: Sequence[Collection[int]], waiting: Sequence[int]) -> list[int]:
    """Nodes of a cycle, each reading what the one before it writes; of a long one its end."""
    index = next(index for index, count in enumerate(waiting) if count)
    path: dict[int, None] = {}
    while index not in path:
        path[index] = None
        index = min(parent for parent in parents[index] if waiting[parent])
    steps = list(path)
    backwards = [*steps[steps.index(index) :], index]
    return backwards[::-1][-_MAX_NAMED:]


def renamed(graph: onnx.GraphProto, rename: Callable[[str], str]) -> onnx.GraphProto:
    """A graph in which every tensor of its own has the name that `rename` gives for it; the same if it had before."""
    names = {name: new for name in dict.fromkeys(own_names(graph)) if (new := rename(name)) != name}
    if not names:
        return graph
    copy = onnx.GraphProto()
    copy.CopyFrom(graph)
    _rename(copy, names)
    return copy


def _rename(graph: onnx.GraphProto, names: Mapping[str, str]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        value.name = names.get(value.name, value.name)
    for initializer in graph.initializer:
        initializer.name = names.get(initializer.name, initializer.name)
    for tensor in graph.sparse_initializer:
        tensor.values.name = names.get(tensor.values.name, tensor.values.name)
    for node in graph.node:
        rename_in_node(node, names)


def rename_in_node(node: onnx.NodeProto, names: Mapping[str, str]) -> None:
    """Give tensors that a node, and graphs in it, read or write the names that `names` has for them."""
    node.input[:] = [names.get(name, name) for name in node.input]
    node.output[:] = [names.get(name, name) for name in node.output]
    for inner in subgraphs(node):
        hidden = set(own_names(inner))
        _rename(inner, {name: new for name, new in names.items() if name not in hidden})
