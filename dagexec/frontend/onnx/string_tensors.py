"""Which tensors hold strings: they are on the host alone, and so is what computes with them, whatever device it is for.

The element type of a tensor follows by ONNX's rules from those of others, also where its shape depends on a run.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from dagexec.frontend.onnx.scoping import Listed, subgraphs


class StringTensors:
    """The tensors that hold strings, while nodes are converted; sequences and optionals of strings are among them."""

    def __init__(self, types: KnownTypes) -> None:
        """`types` are those of what operators compute; for what they do not tell, ONNX is asked."""
        self._known = types
        self._asked: dict[str, onnx.TypeProto] = {}

    def add_inputs(self, graph: onnx.GraphProto) -> None:
        """Note what the model says of its inputs."""
        for value in graph.input:
            kind = self._asked[value.name] = onnx.TypeProto()
            kind.CopyFrom(value.type)
            if kind.HasField("tensor_type"):
                kind.tensor_type.ClearField("shape")

    def kept_on_host(self, node: Listed, opset: int | None, operators: list[Node]) -> list[Node]:
        """The `operators`, which compute a node of set `opset`: on the host if it reads or writes strings."""
        for name in node.outputs:
            self._known.of_one(name)  # it may be a constant now
        unusual = self._known.unusual
        if unusual.isdisjoint(node.needs) and unusual.isdisjoint(node.outputs):
            return operators
        has_read = any(map(self._holds, node.needs))
        self._ask(node, opset, is_likely=has_read)
        if has_read or any(map(self._holds, node.outputs)):
            return [operator.changed(device_option=_on_host(operator)) for operator in operators]
        return operators

    def _holds(self, name: str) -> bool:
        known = self._known.of_one(name)
        return known.meta is STRING if known else name in self._asked and _is_of_strings(self._asked[name])

    def _ask(self, node: Listed, opset: int | None, *, is_likely: bool) -> None:
        """Find the types of outputs that are not known; where ONNX cannot tell, they are strings if `is_likely`."""
        unknown = [name for name in node.outputs if name and self._known.of_one(name) is None]
        if not unknown:
            return
        given = {name: kind for name in node.inputs if (kind := self._type(name)) is not None}
        told = _inferred(node.proto, opset, given)
        for name in unknown:
            found = told.get(name)
            if found is None and is_likely:
                found = onnx.helper.make_tensor_type_proto(STRING.onnx, None)
            if found is not None:
                self._asked[name] = found

    def _type(self, name: str) -> onnx.TypeProto | None:
        known = self._known.of_one(name)
        return onnx.helper.make_tensor_type_proto(known.meta.onnx, None) if known else self._asked.get(name)


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


def _inferred(
    proto: onnx.NodeProto, opset: int | None, inputs: Mapping[str, onnx.TypeProto]
) -> Mapping[str, onnx.TypeProto]:
    """What ONNX tells of the outputs of a node by these types of inputs; nothing of one that holds graphs."""
    domain = domain_of(proto)
    if opset is None or next(subgraphs(proto), None) is not None or not onnx.defs.has(proto.op_type, opset, domain):
        return {}
    schema = onnx.defs.get_schema(proto.op_type, opset, domain)
    try:
        return onnx.shape_inference.infer_node_outputs(schema, proto, dict(inputs))
    except Exception:  # of several types; what is wrong with the node, others say
        return {}
