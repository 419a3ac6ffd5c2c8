"""Which tensors hold strings: they are on the host alone, and so is what computes with them, whatever device it is for.

The element type of a tensor follows by ONNX's rules from those of others, also where its shape depends on a run.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence

import onnx
import onnx.defs
import onnx.helper
import onnx.shape_inference

from dagexec.core.device import CPU
from dagexec.core.dtypes import STRING
from dagexec.core.node import Node
from dagexec.core.proto import DeviceOption
from dagexec.frontend.onnx.known_types import KnownTypes
from dagexec.frontend.onnx.node import domain_of
from dagexec.frontend.onnx.scoping import Listed


class StringTensors:
    """The tensors that hold strings, while nodes are converted; sequences and optionals of strings are among them."""

    def __init__(self, types: KnownTypes) -> None:
        """`types` are those of what operators compute; for what they do not tell, ONNX is asked."""
        self._known = types
        self._asked: dict[str, onnx.TypeProto] = {}
        self._told_before: dict[Hashable, Sequence[onnx.TypeProto | None]] = {}

    def add_inputs(self, graph: onnx.GraphProto) -> None:
        """Note what the model says of its inputs."""
        for value in graph.input:
            kind = onnx.TypeProto()
            kind.CopyFrom(value.type)
            if kind.HasField("tensor_type"):
                kind.tensor_type.ClearField("shape")
            self._note(value.name, kind)

    def _note(self, name: str, kind: onnx.TypeProto) -> None:
        self._asked[name] = kind
        if _is_of_strings(kind):
            self._known.texts.add(name)

    def kept_on_host(self, node: Listed, opset: int | None, operators: list[Node]) -> list[Node]:
        """The `operators`, which compute a node of set `opset`: on the host if it reads or writes strings."""
        for name in node.outputs:
            self._known.in_probes(name)  # it may be a constant now
        texts = self._known.texts
        has_read = not texts.isdisjoint(node.needs)
        if not self._known.untyped.isdisjoint(node.outputs):
            self._ask(node, opset, is_likely=has_read)
        if has_read or not texts.isdisjoint(node.outputs):
            return [operator.changed(device_option=_on_host(operator)) for operator in operators]
        return operators

    def _ask(self, node: Listed, opset: int | None, *, is_likely: bool) -> None:
        """Find the types of outputs that are unknown; where ONNX cannot tell, they are strings if `is_likely`."""
        unknown = [name for name in node.outputs if name and self._known.meta_of(name) is None]
        if not unknown:
            return
        kinds = self._told(node, opset)
        for name in unknown:
            kind = kinds[node.outputs.index(name)]
            if kind is None and is_likely:
                kind = _tensor_of(STRING.onnx)
            if kind is not None:
                self._note(name, kind)

    def _told(self, node: Listed, opset: int | None) -> Sequence[onnx.TypeProto | None]:
        """What ONNX infers of the outputs of a node, once for nodes that differ in names; nothing for graphs."""
        if opset is None or node.holds_graphs:
            return [None] * len(node.outputs)
        proto, given = node.proto, [self._type(name) for name in node.inputs]
        kinds = tuple([None if kind is None else kind.SerializeToString() for kind in given])
        attributes = tuple([attribute.SerializeToString() for attribute in node.attributes])
        places = tuple([name and node.inputs.index(name) for name in node.inputs])
        form = proto.op_type, proto.domain, opset, attributes, kinds, places, tuple(map(bool, node.outputs))
        if form not in self._told_before:
            known = {name: kind for name, kind in zip(node.inputs, given, strict=True) if kind is not None}
            told = _inferred(proto, opset, known)
            self._told_before[form] = [told.get(name) for name in node.outputs]
        return self._told_before[form]

    def _type(self, name: str) -> onnx.TypeProto | None:
        known = self._known.meta_of(name)
        return _tensor_of(known.onnx) if known else self._asked.get(name)


@functools.cache
def _tensor_of(number: int) -> onnx.TypeProto:
    return onnx.helper.make_tensor_type_proto(number, None)


def _on_host(operator: Node) -> DeviceOption:
    option = DeviceOption()
    if operator.device_option is not None:
        option.CopyFrom(operator.device_option)
    option.MergeFrom(CPU.to_option())
    return option


def _is_of_strings(kind: onnx.TypeProto) -> bool:
    for part in ("sequence_type", "optional_type"):
        if kind.HasField(part):
            return _is_of_strings(getattr(kind, part).elem_type)
    return bool(kind.tensor_type.elem_type == STRING.onnx)


def _inferred(proto: onnx.NodeProto, opset: int, inputs: dict[str, onnx.TypeProto]) -> Mapping[str, onnx.TypeProto]:
    """What ONNX infers of the outputs of a node from these types of inputs."""
    domain = domain_of(proto.op_type, proto.domain)
    if not onnx.defs.has(proto.op_type, opset, domain):
        return {}
    schema = onnx.defs.get_schema(proto.op_type, opset, domain)
    try:
        return onnx.shape_inference.infer_node_outputs(schema, proto, inputs)
    except Exception:  # of several types; other checks report what is wrong with the node
        return {}
