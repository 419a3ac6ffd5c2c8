"""What an exporter sees of one operator, and the exporters of all types.

An exporter adds the ONNX nodes that compute what an operator does. It raises `CannotExportError` with the reason where
there are none; the caller gathers these into one error for the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx.helper

from dagexec.core.common_arguments import READ_BY_NETS, UNREAD
from dagexec.core.node import Node
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.errors import DagexecError

Array = npt.NDArray[Any]
Dims = tuple[int | None, ...]


class CannotExportError(DagexecError):
    """ONNX has nothing that computes the same; the text says why."""


class Nodes:
    """The nodes and constants of a graph that is being made, and the names that are taken."""

    def __init__(self, names: set[str]) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, Array] = {}
        self._names = names
        self._node_names: set[str] = set()

    def new_name(self, stem: str) -> str:
        """A name that no other tensor has."""
        return _unused(stem, self._names)

    def new_node_name(self, stem: str) -> str:
        """A name that no other node has."""
        return _unused(stem, self._node_names)


def _unused(stem: str, taken: set[str]) -> str:
    name, number = stem, 1
    while name in taken:
        name, number = f"{stem}_{number}", number + 1
    taken.add(name)
    return name


class Operation:
    """One operator of a net: its arguments, the names of its tensors in the graph, and their types.

    Attributes:
        definition: the operator.
        schema: its schema.
        inputs, outputs: the names of its tensors in the graph.
        label: how messages name it.
    """

    def __init__(
        self,
        definition: Node,
        schema: OpSchema,
        inputs: Sequence[str],
        outputs: Sequence[str],
        nodes: Nodes,
        probes: Sequence[OperatorCall | None],
        is_read: Callable[[str], bool],
    ) -> None:
        """What it needs to know.

        `is_read` says of an output whether something uses it; `probes` are calls with the types of the inputs at
        several sizes of open axes, or None where one is unknown.
        """
        self.definition = definition
        self.schema = schema
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.label = f"{definition.type} {definition.name or definition.output[0]!r}"
        self.arguments = definition.arguments(self.label)
        self.is_read = is_read
        self._nodes = nodes
        self._probes = tuple(probes)
        self._asked: set[str] = set()
        self._unread: set[int] = set()
        self._first_node = len(nodes.nodes)

    def known_type(self, index: int) -> TensorType | None:
        """The type of input `index` where open axes have a made-up size, if it is known."""
        call = self._probes[0]
        return None if call is None else call.inputs[index]

    def calls(self, why: str) -> list[OperatorCall]:
        """The operator with types of its inputs, at two sizes of open axes. Raises CannotExportError: `why` is needed.

        Asking for them counts as reading every argument.
        """
        known = [call for call in self._probes if call is not None]
        if len(known) < len(self._probes):
            raise CannotExportError(f"{why}, and the types of its inputs are not known; give shapes= for the inputs")
        self._asked |= set(self.schema.args)
        return known

    def type_of(self, index: int, why: str) -> TensorType:
        """The type of input `index` where open axes have a made-up size."""
        return self.calls_without_arguments(why)[0].inputs[index]

    def calls_without_arguments(self, why: str) -> list[OperatorCall]:
        """As `calls`, and arguments that are not read are still refused."""
        asked = set(self._asked)
        found = self.calls(why)
        self._asked = asked
        return found

    def shape(self, index: int, why: str) -> Dims:
        """The sizes of input `index`, None for open ones."""
        first, *others = (call.inputs[index].shape for call in self.calls_without_arguments(why))
        return tuple(size if all(other[axis] == size for other in others) else None for axis, size in enumerate(first))

    def rank(self, index: int, why: str) -> int:
        """The number of axes of input `index`."""
        return len(self.shape(index, why))

    def integer(self, name: str, default: int) -> int:
        """An integer argument."""
        self._asked.add(name)
        return self.arguments.int(name, default)

    def flag(self, name: str) -> bool:
        """A truth value, false where it is not given."""
        return bool(self.integer(name, 0))

    def number(self, name: str, default: float) -> float:
        """A float argument."""
        self._asked.add(name)
        return self.arguments.float(name, default)

    def text(self, name: str, default: str) -> str:
        """A string argument."""
        self._asked.add(name)
        return self.arguments.string(name, default)

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, None when absent."""
        self._asked.add(name)
        return self.arguments.ints(name) if name in self.arguments else None

    def ignore(self, *names: str) -> None:
        """These arguments change nothing of what is computed."""
        self._asked.update(names)

    def check_all_read(self) -> None:
        """Raise CannotExportError for an input that no node reads, or an argument that the exporter did not ask for."""
        made = {name for node in self._nodes.nodes[self._first_node :] for name in node.input}
        for index, name in enumerate(self.inputs):
            if name not in made and index not in self._unread:
                raise CannotExportError(f"its input {index} has no counterpart")
        unread = self.schema.unread_args
        for name in self.arguments.names():
            if name not in self._asked and name not in READ_BY_NETS and name not in UNREAD and name not in unread:
                raise CannotExportError(f"its argument {name!r} has no counterpart")

    def ignore_input(self, index: int) -> None:
        """What this input holds changes nothing of what is computed."""
        self._unread.add(index)

    def only_output(self) -> str:
        """The first output. Raises CannotExportError when another one is read as well."""
        extra = [name for name in self.outputs[1:] if self.is_read(name)]
        if extra:
            raise CannotExportError(f"only its first output has a counterpart, and {extra} is used too")
        return self.outputs[0]

    def node(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        """Add a node; attributes that are None are left out."""
        given = {name: value for name, value in attributes.items() if value is not None}
        name = self._nodes.new_node_name(self.definition.name or f"{op_type} {self.outputs[0]}")
        self._nodes.nodes.append(onnx.helper.make_node(op_type, inputs, outputs, name, **given))

    def through(self, op_type: str, inputs: Sequence[str], **attributes: Any) -> str:
        """Add a node, and return the name of its only output."""
        name = self._nodes.new_name(f"{self.outputs[0]}/{op_type.lower()}")
        self.node(op_type, inputs, [name], **attributes)
        return name

    def constant(self, values: npt.ArrayLike, dtype: npt.DTypeLike = np.int64) -> str:
        """The name of a constant with these values."""
        name = self._nodes.new_name(f"{self.outputs[0]}/constant")
        self._nodes.constants[name] = np.asarray(values, dtype)
        return name


Exporter = Callable[[Operation], None]
_exporters: dict[str, Exporter] = {}


def exports(*types: str) -> Callable[[Exporter], Exporter]:
    """Decorator: the function exports operators of these types."""

    def register(function: Exporter) -> Exporter:
        for op_type in types:
            if op_type in _exporters:
                raise ValueError(f"operator {op_type} already has an exporter")
            _exporters[op_type] = function
        return function

    return register


def exporter_of(schema: OpSchema) -> Exporter:
    """What exports operators of a type. Raises CannotExportError when there is nothing."""
    if schema.type in _exporters:
        return _exporters[schema.type]
    if not schema.onnx:
        raise CannotExportError("no ONNX operator, and no few of them, is known to compute the same")
    return _declared


def _declared(operation: Operation) -> None:
    """The ONNX operator that the schema says it is, if its arguments are those of that."""
    [name, *_] = operation.schema.onnx
    if name.domain:
        raise CannotExportError(f"it is {name.type} of the domain {name.domain}, and only ONNX's own is written")
    for argument, value in name.fixed.items():
        if operation.integer(argument, 0) != value:
            raise CannotExportError(f"ONNX's {name.type} is what it does with {argument}={value!r} only")
    attributes: dict[str, Any] = {}
    for attribute, argument in name.attributes.items():
        value = _plain(operation, argument)
        if value is not None and attribute in name.values:
            named = [theirs for theirs, ours in name.values[attribute].items() if ours == value]
            if not named:
                raise CannotExportError(f"its {argument} = {value!r} has no counterpart")
            value = named[0]
        attributes[attribute] = value
    outputs = [output if operation.is_read(output) else "" for output in operation.outputs]
    operation.node(name.type, operation.inputs, [operation.outputs[0], *outputs[1:]], **attributes)


def _plain(operation: Operation, argument: str) -> Any:
    """An argument of whatever kind as a Python value, None when absent."""
    operation.ignore(argument)
    value = operation.arguments.values.get(argument)
    if isinstance(value, bytes):
        return value.decode()
    return list(value) if isinstance(value, tuple) else value
