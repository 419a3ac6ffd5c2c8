"""Nodes that dagexec has no operators for: OnnxSession operators, which other runtimes compute.

Each node becomes one at first. `merged` then makes one of those that are connected, as far as that closes no circle
through other operators, so that values stay inside of the other runtime.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.numpy_helper

from dagexec import foreign
from dagexec.core.dtypes import STRING, from_numpy
from dagexec.core.model import InputInfo
from dagexec.core.node import Node, new_node
from dagexec.core.schema import TensorType
from dagexec.errors import UnsupportedOperatorError
from dagexec.frontend.onnx.initializers import Array
from dagexec.frontend.onnx.known_types import KnownTypes
from dagexec.frontend.onnx.node import DEFAULT_DOMAINS, Scope
from dagexec.frontend.onnx.scoping import reads, subgraphs

FOREIGN = "OnnxSession"

_IR_VERSION = 10  # of the messages; all runtimes since 2024 read it
_USUAL_OPSET = 17
_EMBEDDED_BYTES = 1 << 16
"""Constants up to this size are in the message, where a runtime sees their values; larger ones are inputs."""
_MAX_STEPS = 1_000_000
"""Operators visited in search of circles; what is not merged by then stays apart."""


def foreign_operator(proto: onnx.NodeProto, opsets: Mapping[str, int], scope: Scope, reason: str) -> Node:
    """The operator of one node, which dagexec itself cannot compute for this `reason`."""
    names = [*dict.fromkeys(name for name in proto.input if name)]
    names += sorted(reads(proto) - set(names))
    embedded = {name: scope.values[name] for name in names if _is_small(scope.values.get(name))}
    outputs = [name for name in proto.output if name and name in scope.read]
    outputs = outputs or [name for name in proto.output if name][:1]
    inputs = [name for name in names if name not in embedded]
    scope.variants.update(variant_outputs(proto, opsets))
    graph = onnx.GraphProto(name=proto.name or proto.op_type, node=[proto])
    graph.initializer.extend(_tensor(name, array) for name, array in embedded.items())
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in inputs)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
    model = onnx.ModelProto(ir_version=_IR_VERSION, graph=graph)
    for domain, version in sorted(_versions([proto], opsets).items()):
        model.opset_import.add(domain=domain, version=version)
    label = proto.name or next(iter(outputs), "")
    return _operator(model, label, [f"{proto.op_type} {label!r}: {reason}"])


def variant_outputs(proto: onnx.NodeProto, opsets: Mapping[str, int]) -> list[str]:
    """The outputs that are sequences or mappings whatever the inputs are."""
    domain = "" if proto.domain in DEFAULT_DOMAINS else proto.domain
    if not onnx.defs.has(proto.op_type, opsets.get(domain, 1), domain):
        return []
    kinds = onnx.defs.get_schema(proto.op_type, opsets.get(domain, 1), domain).outputs
    return [
        name
        for name, kind in zip(proto.output, kinds, strict=False)
        if not any(allowed.startswith("tensor(") for allowed in kind.types)
    ]


def is_deterministic(proto: onnx.NodeProto, opset: int | None) -> bool:
    """True when the standard says that the same inputs give the same outputs; of other domains it says nothing."""
    domain = "" if proto.domain in DEFAULT_DOMAINS else proto.domain
    if opset is None or not onnx.defs.has(proto.op_type, opset, domain):
        return False
    schema: Any = onnx.defs.get_schema(proto.op_type, opset, domain)  # what onnx 1.18 has, and its stubs have not
    determinism = getattr(schema, "node_determinism", None)
    return determinism is not None and determinism.name == "Deterministic"


def _is_small(array: Array | None) -> bool:
    return array is not None and array.nbytes <= _EMBEDDED_BYTES


def _tensor(name: str, array: Array) -> onnx.TensorProto:
    if from_numpy(array.dtype) is STRING:
        return onnx.TensorProto(name=name, data_type=STRING.onnx, dims=array.shape, string_data=array.reshape(-1))
    return onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def _versions(nodes: Iterable[onnx.NodeProto], opsets: Mapping[str, int]) -> dict[str, int]:
    """For each domain of the nodes and of those inside, a version of the operator set in which they mean the same.

    It is not the newest, which runtimes may not know yet.
    """
    least: dict[str, int] = {}
    for node in _all_nodes(nodes):
        domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
        newest = opsets.get(domain, 1)
        since = newest
        if onnx.defs.has(node.op_type, newest, domain):
            since = onnx.defs.get_schema(node.op_type, newest, domain).since_version
        usual = min(newest, _USUAL_OPSET) if not domain else since
        least[domain] = max(least.get(domain, 1), since, usual)
    return least


def _all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all_nodes(graph.node)


def _operator(model: onnx.ModelProto, name: str, reasons: Sequence[str]) -> Node:
    inputs = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    content = model.SerializeToString(deterministic=True)
    return new_node(FOREIGN, inputs, outputs, name=name, model=content, reasons=list(reasons))


def _model_of(operator: Node) -> onnx.ModelProto:
    return onnx.ModelProto.FromString(operator.arguments().field("model", "s"))


def merged(operators: Sequence[Node], kept: Collection[str], types: KnownTypes) -> list[Node]:
    """The operators, with connected foreign ones merged into one; `kept` are outputs that others need.

    Nodes without a kernel in onnxruntime, as far as `types` tell, are not merged with others.
    """
    if sum(operator.type == FOREIGN for operator in operators) < 2:
        return list(operators)
    groups = _Groups(operators)
    has_kernel = [operator.type == FOREIGN and _has_kernel(operator, types) for operator in operators]
    for index, operator in enumerate(operators):
        for parent in groups.parents[index]:
            both = operator.type == operators[parent].type == FOREIGN
            if both and has_kernel[index] == has_kernel[parent]:
                groups.merge(parent, index)
    members = groups.members()
    if len(members) == len(operators):
        return list(operators)
    needed = set(kept)
    for index, operator in enumerate(operators):
        outside = (name for name in operator.input if groups.leaves(name, index))
        needed.update(outside)
    return [
        operators[group[0]] if len(group) == 1 else _joined([operators[index] for index in group], needed)
        for group in members
    ]


def _has_kernel(operator: Node, types: KnownTypes) -> bool:
    """True when onnxruntime has kernels for all nodes of the operator; a body may have been merged before."""
    message = _model_of(operator)
    opsets = {entry.domain: entry.version for entry in message.opset_import}
    for node in message.graph.node:
        domain = "" if node.domain in DEFAULT_DOMAINS else node.domain
        metas = {name: meta for name in node.input if name and (meta := types.meta_of(name)) is not None}
        if not foreign.has_kernel(node, opsets.get(domain, 1), metas):
            return False
    return True


class _Groups:
    """A partition of operators without cycles between its groups: union-find, with a search before each merge."""

    def __init__(self, operators: Sequence[Node]) -> None:
        self._writer = {name: index for index, one in enumerate(operators) for name in one.output}
        read = [(*one.input, *one.control_input) for one in operators]
        self.parents = [sorted({self._writer[name] for name in names if name in self._writer}) for names in read]
        self._group = list(range(len(operators)))
        self._members = [[index] for index in range(len(operators))]
        self._children: list[set[int]] = [set() for _ in operators]
        self._steps = _MAX_STEPS
        for index, parents in enumerate(self.parents):
            for parent in parents:
                self._children[parent].add(index)

    def merge(self, parent: int, child: int) -> None:
        """Merge the groups of two operators, unless a path between them leads through a third."""
        first, second = self._group[parent], self._group[child]
        if first == second or self._detour(first, second) or self._detour(second, first):
            return
        for index in self._members[second]:
            self._group[index] = first
        self._members[first] += self._members[second]
        self._children[first] |= self._children[second]
        self._members[second] = []

    def _detour(self, start: int, end: int) -> bool:
        """True when a path leads from one group to another through a third, or when that takes too long to tell."""
        waiting = [group for group in self._next(start) if group != end]
        seen = {start, *waiting}
        while waiting:
            self._steps -= 1
            if self._steps < 0:
                return True
            for group in self._next(waiting.pop()):
                if group == end:
                    return True
                if group not in seen:
                    seen.add(group)
                    waiting.append(group)
        return False

    def _next(self, group: int) -> set[int]:
        return {self._group[child] for child in self._children[group]} - {group}

    def leaves(self, name: str, reader: int) -> bool:
        """True when the operator reads a blob that another group writes."""
        return name in self._writer and self._group[self._writer[name]] != self._group[reader]

    def members(self) -> list[list[int]]:
        """The operators of each group, in order, the groups so that each comes after those it reads from."""
        waiting = {group: 0 for group, members in enumerate(self._members) if members}
        for group in waiting:
            for child in self._next(group):
                waiting[child] += 1
        ready = [(min(self._members[group]), group) for group, count in waiting.items() if not count]
        heapq.heapify(ready)
        result = []
        while ready:
            _, group = heapq.heappop(ready)
            result.append(sorted(self._members[group]))
            for child in self._next(group):
                waiting[child] -= 1
                if not waiting[child]:
                    heapq.heappush(ready, (min(self._members[child]), child))
        return result


def _joined(operators: Sequence[Node], needed: Collection[str]) -> Node:
    """One operator that does what these do in order; its outputs are those of theirs that are `needed`."""
    parts = [_model_of(operator) for operator in operators]
    written = {name for operator in operators for name in operator.output}
    graph = onnx.GraphProto(name=parts[0].graph.name)
    initializers: dict[str, onnx.TensorProto] = {}
    versions: dict[str, int] = {}
    for part in parts:
        graph.node.extend(part.graph.node)
        initializers |= {tensor.name: tensor for tensor in part.graph.initializer}
        for entry in part.opset_import:
            versions[entry.domain] = max(versions.get(entry.domain, 1), entry.version)
    graph.initializer.extend(initializers.values())
    inputs = dict.fromkeys(name for operator in operators for name in operator.input if name not in written)
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in inputs)
    outputs = [name for operator in operators for name in operator.output if name in needed]
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs or operators[-1].output[:1])
    model = onnx.ModelProto(ir_version=_IR_VERSION, graph=graph)
    for domain, version in sorted(versions.items()):
        model.opset_import.add(domain=domain, version=version)
    reasons = [reason for operator in operators for reason in operator.arguments().strings("reasons")]
    return _operator(model, operators[0].name, reasons)


def settle(
    operators: Sequence[Node], parameters: Mapping[str, Array], inputs: Mapping[str, InputInfo], types: KnownTypes
) -> tuple[Sequence[Node], KnownTypes]:
    """The operators of a model, where foreign ones have what can be known of them before anything runs.

    Where the types of inputs are known, each is opened once, and types of outputs are inferred: `types` are the earlier
    ones, and the result includes the new. Raises UnsupportedOperatorError for all that no runtime can compute.
    """
    if all(operator.type != FOREIGN for operator in operators):
        return operators, types
    types = KnownTypes(parameters, inputs)
    settled, refused = [], []
    for operator in operators:
        if operator.type == FOREIGN and (given := types.of(operator.input)) is not None:
            if inferred := all(found[0] is not None for found in types.outputs(operator)):
                operator = operator.changed(arguments={"inferred": 1})
            try:
                _open(operator, given, sized=inferred)
            except UnsupportedOperatorError as error:
                refused.append(str(error))
        types.follow([operator])
        settled.append(operator)
    if refused:
        raise UnsupportedOperatorError(f"{len(refused)} operator(s) cannot be run:\n  " + "\n  ".join(refused))
    return settled, types


def _open(operator: Node, inputs: Sequence[TensorType], *, sized: bool) -> None:
    typed = foreign.complete(_model_of(operator), list(map(foreign.tensor_type, inputs)), sized=sized)
    foreign.open_session(typed, ", ".join(operator.arguments().strings("reasons")))
