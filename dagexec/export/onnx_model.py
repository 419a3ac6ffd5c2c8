"""A Model as an ONNX model: every blob gets one name each time it is written, and operators become nodes."""

from __future__ import annotations

import itertools
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import onnx
import onnx.checker
import onnx.defs
import onnx.external_data_helper
import onnx.helper
import onnx.numpy_helper
import onnx.shape_inference

from dagexec.binding.parameters import initialized
from dagexec.core import dtypes
from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, from_numpy
from dagexec.core.inference import infer_listed
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import DagexecError, ModelFormatError, UnsupportedOperatorError
from dagexec.export import onnx_images, onnx_operators, onnx_shapes  # noqa: F401 - registers their exporters
from dagexec.export.onnx_node import CannotExportError, Dims, Nodes, Operation, exporter_of
from dagexec.export.onnx_shapes import element_type
from dagexec.platform.disk import remove
from dagexec.platform.files import being_written, written_atomically

_OPERATOR_SET = 21
"""Used unless an operator is newer: it is what onnxruntime 1.18 and newer read."""

_IR_VERSION = 10
_MOST_IN_ONE_FILE = 1 << 30  # bytes of parameters; a protobuf message ends at 2 GiB
_MOVED = 1024  # bytes of a tensor's data, from which on they may lie in another file
_ALIGNMENT = 64
_PROBES = ((1, 224), (2, 256))
"""Sizes that open axes are given in turn: the first axis, and others."""

Shapes = Mapping[str, Sequence[int | None]]


def save_onnx(model: Model, path: str | os.PathLike[str], *, shapes: Shapes | None = None) -> None:
    """Write a model as an ONNX file; more than 1 GiB of parameters lie beside it, in a file of its name and `.data`.

    A model that has such a file and is replaced keeps it until the new one is in place, whose data is then in a file
    with a number before `.data`.

    Raises what `to_onnx` raises, and OutputError, when what was there before has stayed.
    """
    proto = to_onnx(model, shapes=shapes)
    target = Path(path)
    if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) > _MOST_IN_ONE_FILE:
        _save_in_two(proto, target)
        return
    _save_in_one(proto, target)


def _save_in_two(proto: onnx.ModelProto, target: Path) -> None:
    """Write `target` after its data, for which it takes a name that a model which is there now does not read from."""
    target = Path(os.path.realpath(target))
    is_data = re.compile(re.escape(target.name) + r"(\.\d+)?\.data").fullmatch
    with being_written(target):
        old = {path for path in target.parent.iterdir() if is_data(path.name)}
        names = itertools.chain(["data"], (f"{number}.data" for number in itertools.count(1)))
        data = next(path for name in names if (path := target.with_name(f"{target.name}.{name}")) not in old)
        before = _identity(target)
        try:
            with written_atomically(data) as file:
                _move_data(proto, data.name, file)
            _save_in_one(proto, target)
        except BaseException:
            if _identity(target) == before:
                with suppress(OSError):
                    remove(data)
            raise
        for path in old:
            with suppress(OSError):
                remove(path)


def _identity(path: Path) -> int:
    return path.stat().st_ino if path.exists() else -1


def _save_in_one(proto: onnx.ModelProto, target: Path) -> None:
    with written_atomically(target) as file:
        onnx.save_model(proto, file, onnx.serialization.registry.get_format_from_file_extension(target.suffix))


def _move_data(proto: onnx.ModelProto, location: str, file: BinaryIO) -> None:
    """Write the data of large tensors to a file, from which the model is to read them."""
    for tensor in proto.graph.initializer:
        if len(tensor.raw_data) >= _MOVED:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            onnx.external_data_helper.set_external_data(tensor, location, file.tell(), len(tensor.raw_data))
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")


def to_onnx(model: Model, *, shapes: Shapes | None = None) -> onnx.ModelProto:
    """A model as an ONNX message that the onnx package's checker accepts; tensors keep their names where ONNX can.

    A blob that is written more than once gets a number behind its name, but for its last value. Parameters that an
    init net computes are computed. `shapes` gives sizes of inputs that the model does not have, None for open ones.
    Raises UnsupportedOperatorError, listing every operator that ONNX has no counterpart for; ModelFormatError for the
    shape of something else than an input.
    """
    given = initialized(model)
    for name in shapes or {}:
        if name not in given.inputs:
            raise ModelFormatError(f"{model.name}: shapes: {name!r} is no input; expected one of {list(given.inputs)}")
    inputs = {name: _with_shape(info, (shapes or {}).get(name)) for name, info in given.inputs.items()}
    return _Export(given, inputs).proto()


def operators_without_counterpart(model: Model) -> dict[int, str]:
    """By their places in the net, the operators of a model without init net that ONNX cannot say, and why."""
    export = _Export(model, {name: _with_shape(info, info.shape) for name, info in model.inputs.items()})
    reasons = {index: export.add(definition) for index, definition in enumerate(model.program.op)}
    return {index: reason for index, reason in reasons.items() if reason is not None}


def _with_shape(info: InputInfo, shape: Sequence[int | None] | None) -> InputInfo:
    return InputInfo(info.dtype or FLOAT32, info.shape if shape is None else tuple(shape))


class _Export:
    """One model on its way: the current name of every blob, and the types at each probe."""

    def __init__(self, model: Model, inputs: Mapping[str, InputInfo]) -> None:
        self.model = model
        self.inputs = {name: info for name, info in inputs.items() if name in model.needed_inputs()}
        self.names = {name: name for name in (*inputs, *model.parameters)}
        self.writes = Counter(name for operator in model.program.op for name in set(operator.output))
        self.nodes = Nodes({*inputs, *model.parameters, *self.writes})
        self.read = {name for operator in model.program.op for name in operator.input} | set(model.outputs)
        self.probes = [self._types(*sizes) for sizes in _PROBES]
        self.unsupported: dict[str, list[str]] = {}
        self._inferred = [self._outputs(types) for types in self.probes]
        self._count = 0  # of operators that were added

    def _outputs(self, types: Mapping[str, TensorType | None]) -> Sequence[Sequence[TensorType | None]]:
        """Types of the outputs of each operator; none where sizes that are made up do not fit together."""
        known = {name: kind for name, kind in types.items() if kind is not None}
        try:
            return infer_listed(self.model.name, self.model.program.op, known, self.model.parameters).outputs
        except DagexecError:
            return ()

    def _types(self, first: int, other: int) -> dict[str, TensorType | None]:
        """Types of inputs whose open axes have these sizes, and of parameters."""
        known: dict[str, TensorType | None] = {
            name: TensorType(tuple(array.shape), from_numpy(array.dtype))
            for name, array in self.model.parameters.items()
        }
        for name, info in self.inputs.items():
            known[name] = None
            if info.shape is not None:
                sizes = ((other if axis else first) if size is None else size for axis, size in enumerate(info.shape))
                known[name] = TensorType(tuple(sizes), info.dtype or FLOAT32)
        return known

    def proto(self) -> onnx.ModelProto:
        """The message. Raises UnsupportedOperatorError."""
        for definition in self.model.program.op:
            reason = self.add(definition)
            if reason is not None:
                name = definition.name or self.names[definition.output[0]]
                self.unsupported.setdefault(f"{definition.type}: {reason}", []).append(name)
        if self.unsupported:
            raise UnsupportedOperatorError(_refusal(self.model.name, self.unsupported))
        proto = self._assembled()
        if any(not value.HasField("type") for value in proto.graph.output):
            _state_outputs(proto)
        try:
            onnx.checker.check_model(proto, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise UnsupportedOperatorError(f"model {self.model.name!r} cannot be written as ONNX: {error}") from None
        return proto

    def add(self, definition: Node) -> str | None:
        """Add the nodes of the next operator; gives the reason where there are none."""
        refused = None
        schema = schema_of(definition.type)
        arguments = definition.arguments()
        calls = [self._call(definition, arguments, types) for types in self.probes]
        inputs = [self.names[name] for name in definition.input]
        outputs = [self._written(name) for name in definition.output]
        blobs = dict(zip(outputs, definition.output, strict=True))
        operation = Operation(
            definition, schema, inputs, outputs, self.nodes, calls, lambda name: blobs[name] in self.read
        )
        try:
            exporter_of(schema)(operation)
            operation.check_all_read()
        except CannotExportError as reason:
            refused = str(reason)
        index, self._count = self._count, self._count + 1
        for types, call, inferred in zip(self.probes, calls, self._inferred, strict=True):
            found: Sequence[TensorType | None] = inferred[index] if inferred else [None] * len(outputs)
            if not inferred and call is not None and schema.infer is not None and schema.can_infer(definition):
                with suppress(DagexecError):  # of sizes that are made up, or values that only a run computes
                    found = schema.infer(call)
            types.update(zip(definition.output, found, strict=False))
        return refused

    def _call(
        self, definition: Node, arguments: Arguments, types: Mapping[str, TensorType | None]
    ) -> OperatorCall | None:
        known = [kind for name in definition.input if (kind := types.get(name)) is not None]
        if len(known) < len(definition.input):
            return None
        values = tuple(self._constant(name) for name in definition.input)
        return OperatorCall(definition, arguments, tuple(known), values, definition.name or definition.type)

    def _constant(self, name: str) -> npt.NDArray[Any] | None:
        """The value of a parameter that nothing has written."""
        return self.model.parameters.get(name) if self.names[name] == name else None

    def _written(self, blob: str) -> str:
        """The name of a blob's next value: its own for the last, unless an input or a parameter has it."""
        self.writes[blob] -= 1
        taken = blob in self.inputs or blob in self.model.parameters
        self.names[blob] = self.nodes.new_name(f"{blob}_1") if self.writes[blob] or taken else blob
        return self.names[blob]

    def _assembled(self) -> onnx.ModelProto:
        read = {name for node in self.nodes.nodes for name in node.input}
        returned = [self.names[name] for name in self.model.outputs]
        arrays = {**self.model.parameters, **self.nodes.constants}
        tensors = [_tensor(array, name) for name, array in arrays.items() if name in read or name in returned]
        inputs = [_value(name, info.dtype or FLOAT32, info.shape) for name, info in self.inputs.items()]
        outputs = [self._output(blob) for blob in self.model.outputs]
        graph = onnx.helper.make_graph(self.nodes.nodes, self.model.name or "net", inputs, outputs, tensors)
        opset = onnx.helper.make_opsetid("", _operator_set(self.nodes.nodes))
        return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION, producer_name="dagexec")

    def _output(self, blob: str) -> onnx.ValueInfoProto:
        kinds = [types.get(blob) for types in self.probes]
        first, second = kinds
        if first is None or second is None:
            return onnx.ValueInfoProto(name=self.names[blob])
        sizes: Dims = tuple(
            size if size == other else None for size, other in zip(first.shape, second.shape, strict=True)
        )
        return _value(self.names[blob], first.meta, sizes)


def _state_outputs(proto: onnx.ModelProto) -> None:
    """Give outputs that have no type the one that the onnx package infers. Raises UnsupportedOperatorError without."""
    inferred = onnx.shape_inference.infer_shapes(proto).graph.output
    for value, found in zip(proto.graph.output, inferred, strict=True):
        if not value.HasField("type"):
            value.type.CopyFrom(found.type)
        if not value.type.tensor_type.HasField("shape"):
            raise UnsupportedOperatorError(
                f"model {proto.graph.name!r} cannot be written as ONNX, which requires how many axes an output has: "
                f"that of {value.name!r} is not known; give shapes= for the inputs"
            )


def _value(name: str, meta: dtypes.TypeMeta, shape: Dims | None) -> onnx.ValueInfoProto:
    return onnx.helper.make_tensor_value_info(name, element_type(meta), shape)


def _tensor(array: npt.NDArray[Any], name: str) -> onnx.TensorProto:
    if array.dtype == np.object_:
        return onnx.helper.make_tensor(name, onnx.TensorProto.STRING, array.shape, array.reshape(-1).tolist())
    return onnx.numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)


def _operator_set(nodes: Sequence[onnx.NodeProto]) -> int:
    """The least operator set, from the usual one on, that has all of these operators."""
    known = {schema.name: schema for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    firsts = [_first_version(name) for name in {node.op_type for node in nodes} if name in known]
    return max([_OPERATOR_SET, *firsts])


def _first_version(op_type: str) -> int:
    versions = [
        int(schema.since_version)
        for schema in onnx.defs.get_all_schemas_with_history()
        if schema.domain == "" and schema.name == op_type
    ]
    return min(versions)


_MAX_NAMED = 4


def _refusal(name: str, unsupported: Mapping[str, Sequence[str]]) -> str:
    lines = [f"model {name!r} cannot be written as ONNX, {sum(map(len, unsupported.values()))} operator(s):"]
    for what, operators in sorted(unsupported.items(), key=lambda row: -len(row[1])):
        more = f" and {len(operators) - _MAX_NAMED} more" if len(operators) > _MAX_NAMED else ""
        lines.append(f"  {', '.join(map(repr, operators[:_MAX_NAMED]))}{more}: {what}")
    return "\n".join(lines)
