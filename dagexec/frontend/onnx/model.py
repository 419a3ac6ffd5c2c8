"""Loading ONNX models: parse, check, convert every node, and divide the result into init net, net and parameters.

A node whose inputs are all parameters is put in the init net, so it is computed once and not in every run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt
import onnx
import onnx.checker
import onnx.defs

from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import registered_operators
from dagexec.errors import ArgumentError, ModelFormatError, UnsupportedOperatorError
from dagexec.frontend.onnx import (  # noqa: F401 - registers their converters
    convolution,
    elementwise,
    quantized,
    recurrent,
    reduction,
    shape,
)
from dagexec.frontend.onnx.declared_types import check_declared
from dagexec.frontend.onnx.external_data import ExternalData
from dagexec.frontend.onnx.initializers import element_type, tensor_array
from dagexec.frontend.onnx.node import (
    DEFAULT_DOMAINS,
    CannotConvertError,
    Dims,
    Node,
    Scope,
    converter_of,
    definition_of,
    domain_of,
    node_label,
)
from dagexec.storage.net_file import load_message

Array = npt.NDArray[Any]

_NEWEST_IR_VERSION = 14


def load_onnx(path: str | os.PathLike[str]) -> Model:
    """The model in an ONNX file. External data is read from the file's folder, and nowhere else.

    Raises ModelFormatError, naming the file, when it is no valid model; UnsupportedOperatorError, listing every node
    that dagexec cannot run.
    """
    file = Path(path)
    proto = load_message(file, onnx.ModelProto)
    try:
        return from_model_proto(proto, file.parent)
    except (ModelFormatError, UnsupportedOperatorError) as error:
        raise type(error)(f"{file}: {error}") from None


def from_model_proto(proto: onnx.ModelProto, base_dir: str | os.PathLike[str] | None = None) -> Model:
    """A Model from an ONNX message; tensors keep their names, nodes become operators of the same name.

    `base_dir` is the folder where external data may be; without it external data is an error.
    Raises ModelFormatError or UnsupportedOperatorError as `load_onnx` does, without a file's name.
    """
    try:
        return _Conversion(proto, None if base_dir is None else Path(base_dir)).model()
    except UnicodeDecodeError:
        raise ModelFormatError("a name in the model is not UTF-8 text") from None
    except ArgumentError as error:
        raise ModelFormatError(str(error)) from None


class _Conversion:
    """One model on its way through: everything known so far, and what the nodes became."""

    def __init__(self, proto: onnx.ModelProto, folder: Path | None) -> None:
        if not proto.HasField("graph") or not (proto.graph.node or proto.graph.output):
            raise ModelFormatError("not an ONNX model: there is no graph in it")
        if not 0 <= proto.ir_version <= _NEWEST_IR_VERSION:
            raise ModelFormatError(f"IR version {proto.ir_version}; expected at most {_NEWEST_IR_VERSION}")
        self.proto = proto
        self.graph = proto.graph
        self.opsets = _opsets(proto)
        if self.graph.sparse_initializer:
            raise ModelFormatError("sparse initializers are not supported")
        with ExternalData(folder) as external:
            values = _initializers(self.graph, external)
        _check_inputs(self.graph)
        self.inputs = {
            name: info for value in self.graph.input if (name := value.name) not in values
            for info in [_input_info(value)]
        }  # fmt: skip
        self.outputs = tuple(value.name for value in self.graph.output)
        self.functions = {(_domain(function.domain), function.name) for function in proto.functions}
        read = {name for node in self.graph.node for name in node.input} | set(self.outputs)
        written = [name for node in self.graph.node for name in node.output if name]
        self._check_names(values, written)
        names = {*values, *self.inputs, *read, *written}
        self.stated = _stated_shapes(self.graph)
        self.scope = Scope(values, dict(self.stated), frozenset(read), names)
        self.constant = set(values)
        self.init_operators: list[OperatorDef] = []
        self.operators: list[OperatorDef] = []
        self.unsupported: dict[str, list[str]] = {}

    def model(self) -> Model:
        """Convert all nodes. Raises UnsupportedOperatorError for all that cannot be."""
        known = frozenset(registered_operators())
        for proto in self.graph.node:
            operators = self._convert(proto)
            missing = sorted({operator.type for operator in operators} - known)
            if missing:
                self._refuse(proto, f"dagexec has no operator {', '.join(missing)}")
            self._place(proto, operators)
        if self.unsupported:
            raise UnsupportedOperatorError(_refusal(self.unsupported))
        model = self._assemble()
        check_declared(self.graph, self.stated, model)
        return model

    def _check_names(self, values: Mapping[str, Array], written: list[str]) -> None:
        """Every tensor has one origin (the IR's single assignment), and every tensor that is read has one."""
        seen = {*values, *self.inputs}
        for name in written:
            if name in seen:
                raise ModelFormatError(f"tensor {name!r} has two origins; expected one node, input or initializer")
            seen.add(name)
        for proto in self.graph.node:
            for name in proto.input:
                if name and name not in seen:
                    raise ModelFormatError(f"{node_label(proto)} reads {name!r}, which nothing in the model provides")
        for name in self.outputs:
            if name not in seen:
                raise ModelFormatError(f"the model returns {name!r}, which nothing in it provides")

    def _convert(self, proto: onnx.NodeProto) -> list[OperatorDef]:
        opset = self.opsets.get(_domain(proto.domain))
        if (_domain(proto.domain), proto.op_type) in self.functions:
            self._refuse(proto, "it is a function of the model; functions are not supported")
            return []
        if opset is None:
            self._refuse(proto, "the model imports no operator set of that domain")
            return []
        domain = domain_of(proto)
        found = converter_of(proto.op_type, domain)
        if found is None:
            self._refuse(proto, "there is no converter for it")
            return []
        converter, newest = found
        if not domain:
            self._check_node(proto)
        version = definition_of(proto.op_type, opset, domain).version
        if version > newest:
            self._refuse(proto, f"version {version} of the operator is newer than {newest}, the newest that is read")
            return []
        try:
            node = Node(proto, opset, self.scope)
            operators = converter(node)
            node.check_all_read()
            return operators
        except CannotConvertError as reason:
            self._refuse(proto, str(reason))
            return []

    def _check_node(self, proto: onnx.NodeProto) -> None:
        """The onnx package's own check: arity, attribute names and types, for the operator set in force."""
        context = onnx.checker.C.CheckerContext()
        context.ir_version = self.proto.ir_version or onnx.IR_VERSION
        context.opset_imports = self.opsets
        try:
            onnx.checker.check_node(proto, context)
        except (onnx.checker.ValidationError, RuntimeError, ValueError) as error:
            raise ModelFormatError(f"{node_label(proto)}: {str(error).strip()}") from None

    def _refuse(self, proto: onnx.NodeProto, reason: str) -> None:
        domain = proto.domain or "ai.onnx"
        opset = self.opsets.get(_domain(proto.domain), "none")
        name = proto.name or next((output for output in proto.output if output), "")
        what = f"{proto.op_type} (domain {domain}, opset {opset}): {reason}"
        self.unsupported.setdefault(what, []).append(repr(name))

    def _place(self, proto: onnx.NodeProto, operators: list[OperatorDef]) -> None:
        """Into the init net when every input is a parameter and no output is the model's; else into the net.

        What dequantizes a parameter is put into the net, where a pass can see the integers.
        """
        produced = {name for operator in operators for name in operator.output}
        once = all(name in self.constant for name in proto.input if name) and not produced & set(self.outputs)
        once = once and proto.op_type != "DequantizeLinear"
        (self.init_operators if once else self.operators).extend(operators)
        if once:
            self.constant |= produced | {name for name in proto.output if name in self.scope.values}

    def _assemble(self) -> Model:
        name = self.graph.name or "onnx"
        read_by_net = _read(self.operators)
        returned = set(self.outputs)
        init_operators = _needed(self.init_operators, read_by_net | returned)
        read = read_by_net | _read(init_operators) | returned
        parameters = {key: value for key, value in self.scope.values.items() if key in read}
        filled = [blob for operator in init_operators for blob in operator.output if blob in read_by_net | returned]
        external = [*self.inputs, *(key for key in parameters if key in read_by_net), *filled]
        net = NetDef(name=name, op=self.operators, external_input=external, external_output=self.outputs)
        init_net = None
        if init_operators:
            given = [key for key in parameters if key in _read(init_operators)]
            init_net = NetDef(name=f"{name}_init", op=init_operators, external_input=given, external_output=filled)
        return Model(name, net, init_net, parameters, self.inputs, self.outputs)


def _domain(name: str) -> str:
    return "" if name in DEFAULT_DOMAINS else name


def _check_inputs(graph: onnx.GraphProto) -> None:
    """Raise ModelFormatError when two inputs have one name."""
    seen: set[str] = set()
    for value in graph.input:
        if value.name in seen:
            raise ModelFormatError(f"input {value.name!r} is given twice")
        seen.add(value.name)


_MAX_NAMED = 4


def _refusal(unsupported: Mapping[str, Sequence[str]]) -> str:
    """One line for all nodes refused for one reason, the most frequent first; `unsupported` has their names."""
    lines = []
    for what, nodes in sorted(unsupported.items(), key=lambda row: -len(row[1])):
        more = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
        kind = "node" if len(nodes) == 1 else f"{len(nodes)} nodes"
        lines.append(f"{kind} {', '.join(nodes[:_MAX_NAMED])}{more}: {what}")
    return f"{sum(map(len, unsupported.values()))} node(s) cannot be run:\n  " + "\n  ".join(lines)


def _opsets(proto: onnx.ModelProto) -> dict[str, int]:
    """Operator set versions by domain, the default domain as ''. Files older than IR version 3 mean version 1."""
    opsets: dict[str, int] = {}
    for entry in proto.opset_import:
        if opsets.setdefault(_domain(entry.domain), entry.version) != entry.version:
            raise ModelFormatError(f"operator set {_domain(entry.domain) or 'ai.onnx'!r} is imported in two versions")
    if not opsets and proto.ir_version < 3:
        opsets = {"": 1}
    newest = onnx.defs.onnx_opset_version()
    version = opsets.get("")
    if version is not None and version < 1:
        raise ModelFormatError(f"operator set version {version} does not exist")
    if version is not None and version > newest:
        raise UnsupportedOperatorError(
            f"operator set {version} is newer than {newest}, the newest that onnx {onnx.__version__} knows"
        )
    return opsets


def _initializers(graph: onnx.GraphProto, external: ExternalData) -> dict[str, Array]:
    values: dict[str, Array] = {}
    for tensor in graph.initializer:
        if not tensor.name:
            raise ModelFormatError("an initializer has no name")
        if tensor.name in values:
            raise ModelFormatError(f"initializer {tensor.name!r} is given twice")
        values[tensor.name] = tensor_array(tensor, external, f"initializer {tensor.name!r}")
    return values


def _input_info(value: onnx.ValueInfoProto) -> InputInfo:
    if value.type.WhichOneof("value") != "tensor_type":
        raise UnsupportedOperatorError(f"input {value.name!r} is not a tensor; sequences and maps are not supported")
    dtype = element_type(value.type.tensor_type.elem_type, f"input {value.name!r}")
    return InputInfo(dtype, _dims(value))


def _dims(value: onnx.ValueInfoProto) -> Dims | None:
    tensor_type = value.type.tensor_type
    if not tensor_type.HasField("shape"):
        return None
    dims = tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in tensor_type.shape.dim)
    if any(size is not None and size < 0 for size in dims):
        raise ModelFormatError(f"tensor {value.name!r}: a size is negative: {list(dims)}")
    return dims


def _stated_shapes(graph: onnx.GraphProto) -> dict[str, Dims]:
    stated: Iterable[onnx.ValueInfoProto] = (*graph.value_info, *graph.input, *graph.output)
    tensors = [value for value in stated if value.type.WhichOneof("value") == "tensor_type"]
    return {value.name: dims for value in tensors if (dims := _dims(value)) is not None}


def _read(operators: Iterable[OperatorDef]) -> set[str]:
    return {name for operator in operators for name in operator.input}


def _needed(operators: list[OperatorDef], wanted: set[str]) -> list[OperatorDef]:
    """Those of `operators` that `wanted` blobs depend on, in the same order."""
    wanted = set(wanted)
    kept = []
    for operator in reversed(operators):
        if wanted.intersection(operator.output):
            kept.append(operator)
            wanted.update(operator.input)
    return kept[::-1]
