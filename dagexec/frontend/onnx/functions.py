"""Functions: nodes that stand for a list of other nodes, which a model defines or the standard does.

A node of a function is replaced by the function's nodes where it is converted, under the operator sets that the
function imports. Specification: https://github.com/onnx/onnx/blob/main/docs/IR.md, "Functions".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import onnx
import onnx.defs

from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.node import node_label
from dagexec.frontend.onnx.scoping import reads, rename_in_node, subgraphs

_MAX_DEPTH = 32
_MAX_NODES = 1 << 18

Key = tuple[str, str, str]


class Functions:
    """The functions of a model, and a limit on their expansion, as hostile ones would never end."""

    def __init__(self, protos: Iterable[onnx.FunctionProto], domain_of: Callable[[str], str]) -> None:
        """`domain_of` gives a domain its one name. Raises ModelFormatError when a function is defined twice."""
        self._domain_of = domain_of
        self._by_name: dict[Key, onnx.FunctionProto] = {}
        self._open: list[str] = []
        self._count = 0
        for proto in protos:
            if self._by_name.setdefault((domain_of(proto.domain), proto.name, proto.overload), proto) is not proto:
                raise ModelFormatError(f"function {proto.name!r} of domain {proto.domain!r} is defined twice")

    def of(self, node: onnx.NodeProto) -> onnx.FunctionProto | None:
        """The model's function that a node stands for; an operator of the standard is none."""
        if not self._by_name or (not self._domain_of(node.domain) and onnx.defs.has(node.op_type)):
            return None
        return self._by_name.get((self._domain_of(node.domain), node.op_type, node.overload))

    def enter(self, node: onnx.NodeProto, function: onnx.FunctionProto) -> None:
        """The nodes of `function` are converted next, in place of `node`. Raises ModelFormatError for too many."""
        self._count += node_count(function.node)
        self._open.append(function.name)
        if len(self._open) > _MAX_DEPTH:
            calls = " -> ".join(self._open[-4:])
            raise ModelFormatError(f"{node_label(node)}: functions call each other over {_MAX_DEPTH} deep: {calls}")
        if self._count > _MAX_NODES:
            raise ModelFormatError(
                f"{node_label(node)}: the model's functions expand to more than {_MAX_NODES:,} nodes"
            )

    def leave(self) -> None:
        """The nodes of the function entered last are converted."""
        self._open.pop()


def node_count(nodes: Iterable[onnx.NodeProto]) -> int:
    """The number of nodes, with those of graphs inside of them."""
    return sum(1 + sum(node_count(graph.node) for graph in subgraphs(node)) for node in nodes)


def body(function: onnx.FunctionProto, call: onnx.NodeProto, new_name: Callable[[str], str]) -> list[onnx.NodeProto]:
    """The nodes of a function in place of node `call`, on its inputs, outputs and attributes.

    Tensors between them have names from `new_name`. Raises ModelFormatError when the function does not fit the node.
    """
    if len(call.input) > len(function.input) or len(call.output) > len(function.output):
        raise ModelFormatError(
            f"{node_label(call)}: function {function.name!r} has {len(function.input)} inputs and "
            f"{len(function.output)} outputs, found {len(call.input)} and {len(call.output)}"
        )
    _check(function)
    names = dict.fromkeys(function.input, "") | dict(zip(function.input, call.input, strict=False))
    returned = {inner: outer for inner, outer in zip(function.output, call.output, strict=False) if outer}
    written = {name for node in function.node for name in node.output if name}
    stem = call.name or next((name for name in call.output if name), function.name)
    for name in written:
        names[name] = returned.get(name) or new_name(f"{stem}/{name}")
    attributes = _attributes(function, call)
    nodes = [_instance(node, names, attributes, stem) for node in function.node]
    passed = [(names.get(inner, ""), outer) for inner, outer in returned.items() if inner not in written]
    return nodes + [onnx.NodeProto(op_type="Identity", input=[inner], output=[outer]) for inner, outer in passed]


def _check(function: onnx.FunctionProto) -> None:
    """Raise ModelFormatError unless every tensor of a function has one origin in it."""
    seen: set[str] = set()
    for name in (*function.input, *(name for node in function.node for name in node.output if name)):
        if name in seen:
            raise ModelFormatError(f"tensor {name!r} of function {function.name!r} has two origins; expected one")
        seen.add(name)
    for node in function.node:
        for name in sorted(reads(node) - seen):
            where = f"nothing in function {function.name!r}"
            raise ModelFormatError(f"{node_label(node)} reads {name!r}, which {where} provides")
    for name in function.output:
        if name not in seen:
            raise ModelFormatError(f"function {function.name!r} returns {name!r}, which nothing in it provides")


def _attributes(function: onnx.FunctionProto, call: onnx.NodeProto) -> dict[str, onnx.AttributeProto]:
    """The attributes that the function's nodes may refer to: those of the call, else their defaults."""
    named = {*function.attribute, *(default.name for default in function.attribute_proto)}
    present = {attribute.name: attribute for attribute in call.attribute}
    if unknown := sorted(present.keys() - named):
        raise ModelFormatError(f"{node_label(call)}: function {function.name!r} has no attribute {unknown[0]!r}")
    return {default.name: default for default in function.attribute_proto} | present


def _instance(
    node: onnx.NodeProto, names: Mapping[str, str], attributes: Mapping[str, onnx.AttributeProto], stem: str
) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name = f"{stem}/{node.name}" if node.name else stem
    rename_in_node(copy, names)
    _refer(copy, attributes)
    return copy


def _refer(node: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> None:
    """Put attributes in place of references to them; a reference to an absent one is left out."""
    if any(attribute.ref_attr_name for attribute in node.attribute):
        kept = [resolved for attribute in node.attribute if (resolved := _referred(attribute, attributes)) is not None]
        del node.attribute[:]
        node.attribute.extend(kept)
    for graph in subgraphs(node):
        for inner in graph.node:
            _refer(inner, attributes)


def _referred(
    attribute: onnx.AttributeProto, attributes: Mapping[str, onnx.AttributeProto]
) -> onnx.AttributeProto | None:
    if not attribute.ref_attr_name:
        return attribute
    source = attributes.get(attribute.ref_attr_name)
    if source is None:
        return None
    copy = onnx.AttributeProto()
    copy.CopyFrom(source)
    copy.name = attribute.name
    return copy


def standard_function(op_type: str, opset: int) -> onnx.FunctionProto | None:
    """The function that an operator of the default domain is by definition; None where it is none."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return None
    function: onnx.FunctionProto = schema.function_body
    return function if function.node else None
