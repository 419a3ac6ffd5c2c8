"""A converter's view of one ONNX node, and the converters of all types.

A converter turns a `OnnxNode` into the Nodes that compute its outputs. It raises `CannotConvertError` with the reason
when dagexec has nothing that computes the same; the loader gathers these into one error for the whole model. Where an
operator's schema says that it is an ONNX operator (`OpSchema.onnx`), the converter follows from that; a function is
registered with `converts` where one operator becomes several, or inputs become arguments.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, Protocol, TypeVar

import numpy.typing as npt
import onnx
import onnx.defs

from dagexec.core.arguments import ArgumentValue
from dagexec.core.node import Node, new_node
from dagexec.core.onnx_name import OnnxName
from dagexec.core.program import Program
from dagexec.core.registry import load_onnx_operator, onnx_operator
from dagexec.core.schema import OpSchema
from dagexec.errors import ArgumentError, ModelFormatError
from dagexec.frontend.onnx.initializers import tensor_argument
from dagexec.platform.records import dataclass

DEFAULT_DOMAINS = ("", "ai.onnx")

Array = npt.NDArray[Any]
Dims = tuple[int | None, ...]
T = TypeVar("T")


class CannotConvertError(Exception):
    """A node that dagexec cannot run; the text says why. The loader reports all of a model's together."""


class UnknownSizeError(CannotConvertError):
    """The node would become an operator if more was known of sizes, which may follow from those of inputs."""


class KnownShapes(Protocol):
    """Sizes of tensors by name."""

    def get(self, name: str, /) -> Dims | None:
        """The sizes of a tensor as far as known, None when even their number is not."""


@dataclass
class Scope:
    """Known facts about the model's tensors while its nodes are converted, in order.

    Attributes:
        values: tensors whose content is known: initializers, constants, and copies of them.
        shapes: sizes the model states; None for a size it leaves open.
        read: every tensor that a node reads or a graph returns.
        names: every tensor name of the model, so that new ones differ.
        variants: names that may stand for sequences or optionals, not tensors.
        infer_shapes: finds the sizes that follow from those of the model's inputs.
    """

    values: dict[str, Array]
    shapes: dict[str, Dims]
    read: set[str]
    names: set[str] = field(default_factory=set)
    variants: set[str] = field(default_factory=set)
    infer_shapes: Callable[[], KnownShapes] = dict
    _inferred: KnownShapes | None = None
    _numbers: dict[str, int] = field(default_factory=dict, repr=False)

    def new_name(self, stem: str) -> str:
        """A tensor name that the model does not use."""
        name, number = stem, self._numbers.get(stem, 1)
        while name in self.names:
            number += 1
            name = f"{stem}_{number}"
        self._numbers[stem] = number
        self.names.add(name)
        return name

    def inferred(self) -> KnownShapes:
        """Sizes that follow from those of the model's inputs, inferred when they are asked for."""
        if self._inferred is None:
            self._inferred = self.infer_shapes()
        return self._inferred

    def shape(self, name: str) -> Dims | None:
        """The sizes of a tensor as far as known, None when even their number is not."""
        value = self.values.get(name)
        if value is not None:
            return tuple(value.shape)
        stated = self.shapes.get(name)
        if stated is not None and None not in stated:
            return stated
        inferred = self.inferred().get(name)
        if stated is None or inferred is None or len(stated) != len(inferred):
            return inferred if stated is None else stated
        return tuple(a if b is None else b for a, b in zip(stated, inferred, strict=True))

    def certain_shape(self, name: str) -> tuple[int, ...] | None:
        """All sizes of a tensor, if the same in every run; what files state of tensors between nodes does not count."""
        value = self.values.get(name)
        dims = self.inferred().get(name) if value is None else tuple(value.shape)
        sizes = tuple(size for size in dims or () if size is not None)
        return None if dims is None or len(sizes) < len(dims) else sizes


@dataclass(frozen=True)
class Subgraph:
    """A graph that a node holds, converted.

    Attributes:
        net: its operators. Its tensors have names that no other of the model has.
        inputs, outputs: the names of the graph's inputs and outputs in `net`. An output may be an input, or captured.
        captured: tensors from outside that `net` reads or returns, constants among them: inputs of the operator that
            runs it, beside the node's own.
    """

    net: Program
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captured: tuple[str, ...]


ConvertSubgraph = Callable[[onnx.GraphProto, str, int], Subgraph]


def _no_subgraphs(_graph: onnx.GraphProto, label: str, _fed: int) -> Subgraph:
    raise CannotConvertError(f"graphs inside of {label} are not supported here")


@dataclass(slots=True)
class Seen:
    """The answers that a converter got about tensors, and its new names: with the same answers it does the same.

    Attributes:
        values, shapes, variants: the answers, by name.
        new_names: the tensors that it named, with the name and the suffix that each was made from.
        repeats: False where it looked at, or changed, more than that.
    """

    values: dict[str, Array | None] = field(default_factory=dict)
    shapes: dict[str, Dims | None] = field(default_factory=dict)
    variants: dict[str, bool] = field(default_factory=dict)
    new_names: dict[str, tuple[str, str]] = field(default_factory=dict)
    repeats: bool = True


class OnnxNode:
    """One ONNX node: typed attributes, inputs by position, and making operators under its name.

    Attributes:
        op_type: its ONNX operator.
        opset: the version of the operator set it belongs to.
        inputs, outputs: tensor names; an absent optional one is ''.
        definition: of its operator, in its operator set.
        seen: the answers that its converter got about tensors.
    """

    def __init__(
        self, proto: onnx.NodeProto, opset: int, scope: Scope, subgraphs: ConvertSubgraph = _no_subgraphs
    ) -> None:
        """Raises CannotConvertError for an attribute of an unknown kind, or that refers to another."""
        self.op_type = proto.op_type
        self.opset = opset
        self.inputs = tuple(proto.input)
        self.outputs = tuple(proto.output)
        self.seen = Seen()
        self._scope = scope
        self._name = proto.name
        self._convert_subgraph = subgraphs
        self.label = node_label(proto)
        self.definition = definition_of(proto.op_type, opset, domain_of(proto.op_type, proto.domain))
        self._attributes = {attribute.name: _value(attribute) for attribute in proto.attribute}
        self.asked = set(_HINTS)

    @property
    def scope(self) -> Scope:
        """All known facts. A converter that looks here converts every node anew, even of the same form."""
        self.seen.repeats = False
        return self._scope

    def has_input(self, index: int) -> bool:
        """True when optional input `index` is present."""
        return index < len(self.inputs) and self.inputs[index] != ""

    def is_read(self, index: int) -> bool:
        """True when output `index` is used."""
        return index < len(self.outputs) and self.outputs[index] in self._scope.read

    def only_output(self) -> list[str]:
        """The first output. Raises CannotConvertError when another one is used as well."""
        extra = [name for index, name in enumerate(self.outputs) if index and self.is_read(index)]
        if extra:
            raise CannotConvertError(f"only its first output is supported, but {extra} is used too")
        return [self.outputs[0]]

    def value(self, index: int) -> Array | None:
        """The content of input `index` when it is a constant, else None (also when it is absent)."""
        return self.value_of(self.inputs[index]) if self.has_input(index) else None

    def value_of(self, name: str) -> Array | None:
        """The content of a tensor that is a constant, else None."""
        value = self.seen.values[name] = self._scope.values.get(name)
        return value

    def constant(self, index: int, what: str) -> Array:
        """The content of input `index`. Raises CannotConvertError unless it is a constant of the model."""
        value = self.value(index)
        if value is None:
            raise UnknownSizeError(f"its {what} must be a constant, but {self.inputs[index]!r} is computed")
        return value

    def constant_ints(self, index: int, what: str) -> list[int]:
        """The content of integer input `index` as a list. Raises CannotConvertError unless it is a constant."""
        value = self.constant(index, what)
        if value.dtype.kind not in "iu":
            raise ModelFormatError(f"{self.label}: its {what} must be integers, found {value.dtype}")
        return [int(item) for item in value.reshape(-1)]

    def constant_scalar(self, index: int, what: str) -> float | int | bool:
        """The content of input `index`, which must have one element. Raises CannotConvertError or ModelFormatError."""
        value = self.constant(index, what)
        if value.size != 1 or value.dtype.kind == "O":
            raise ModelFormatError(f"{self.label}: its {what} must be one number, found shape {value.shape}")
        scalar: float | int | bool = value.reshape(-1).tolist()[0]
        return scalar

    def shape(self, index: int) -> Dims | None:
        """The sizes of input `index` as far as known."""
        return self.shape_of(self.inputs[index]) if self.has_input(index) else None

    def shape_of(self, name: str) -> Dims | None:
        """The sizes of a tensor as far as known."""
        shape = self.seen.shapes[name] = self._scope.shape(name)
        return shape

    def is_variant(self, name: str) -> bool:
        """True when a tensor may be a sequence or an optional."""
        is_variant = self.seen.variants[name] = name in self._scope.variants
        return is_variant

    def full_shape(self, index: int, why: str) -> tuple[int, ...]:
        """The sizes of input `index`. Raises CannotConvertError, saying `why` they are needed, when one is open."""
        shape = self.shape(index)
        if shape is None or None in shape:
            raise UnknownSizeError(f"{why}, and the model does not state the shape of {self.inputs[index]!r}")
        return tuple(size for size in shape if size is not None)

    def rank(self, index: int, why: str) -> int:
        """The number of axes of input `index`. Raises CannotConvertError, saying `why` it is needed, if open."""
        shape = self.shape(index)
        if shape is None:
            raise UnknownSizeError(f"{why}, and the model does not state the shape of {self.inputs[index]!r}")
        return len(shape)

    def __contains__(self, attribute: str) -> bool:
        self.asked.add(attribute)
        return attribute in self._attributes

    def ignore(self, *names: str) -> None:
        """Declare that these attributes change nothing of the result."""
        self.asked.update(names)

    def check_all_read(self) -> None:
        """Raise CannotConvertError for an attribute that the converter did not ask for, unless it has its default."""
        for name, value in self._attributes.items():
            if name not in self.asked and self.definition.defaults.get(name) != value:
                raise CannotConvertError(f"its attribute {name} = {value!r:.80} is not supported")

    def argument(self, attribute: str) -> ArgumentValue | None:
        """A number, a text, a list of these or a tensor: the attribute, or its default; else None."""
        kind = self.definition.kinds.get(attribute)
        if kind is None and self.definition.kinds:
            return None
        value: object
        if kind is None or kind == onnx.AttributeProto.TENSOR:
            value = self._typed(attribute, object if kind is None else onnx.TensorProto, "a tensor")
        else:
            read: Callable[[str, type, str], object] = self._list if kind in _LISTS else self._typed
            value = read(attribute, *_PYTHON[kind])
            value = self.definition.defaults.get(attribute) if value is None else value
        if isinstance(value, onnx.TensorProto):
            return tensor_argument(value, f"{self.label}, attribute {attribute!r}")
        if isinstance(value, bytes):
            return value.decode(errors="replace")
        if value is not None and not isinstance(value, int | float | list):
            raise ModelFormatError(f"{self.label}: attribute {attribute!r} must be numbers, text or a tensor")
        return value

    def integer(self, name: str, default: int) -> int:
        """An integer attribute."""
        value = self._typed(name, int, "an integer")
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A float attribute."""
        value = self._typed(name, float, "a float")
        return default if value is None else value

    def text(self, name: str, default: str) -> str:
        """A string attribute."""
        value = self._typed(name, bytes, "a string")
        return default if value is None else value.decode(errors="replace")

    def integers(self, name: str) -> list[int] | None:
        """A list of integers, None when absent."""
        return self._list(name, int, "integers")

    def numbers(self, name: str) -> list[float] | None:
        """A list of floats, None when absent."""
        return self._list(name, float, "floats")

    def texts(self, name: str) -> list[bytes] | None:
        """A list of strings, None when absent."""
        return self._list(name, bytes, "strings")

    def tensor(self, name: str) -> onnx.TensorProto | None:
        """A tensor attribute, None when absent."""
        return self._typed(name, onnx.TensorProto, "a tensor")

    def graph(self, name: str) -> onnx.GraphProto:
        """A graph attribute. Raises ModelFormatError when it is absent or no graph."""
        graph = self._typed(name, onnx.GraphProto, "a graph")
        if graph is None:
            raise ModelFormatError(f"{self.label}: attribute {name!r} is missing")
        return graph

    def subgraph(self, name: str, fed: int) -> Subgraph:
        """A graph attribute, converted, of which the node feeds `fed` inputs; others have defaults.

        Raises ModelFormatError when it is absent or no graph that can be read.
        """
        self.seen.repeats = False
        return self._convert_subgraph(self.graph(name), self.label, fed)

    def integers_given(self, name: str, index: int, since: int) -> list[int] | None:
        """Integers: attribute `name` before opset `since`, constant input `index` from then on; None if absent."""
        if self.opset < since:
            return self.integers(name)
        return self.constant_ints(index, name) if self.has_input(index) else None

    def integers_or_input(self, name: str, index: int, since: int) -> tuple[list[int] | None, list[str]]:
        """As `integers_given`, but where input `index` is computed, no integers and the name of that input."""
        if self.opset >= since and self.has_input(index) and self.value(index) is None:
            return None, [self.inputs[index]]
        return self.integers_given(name, index, since), []

    def operator(
        self, op_type: str, inputs: Sequence[str], outputs: Sequence[str], **arguments: ArgumentValue | None
    ) -> Node:
        """An operator under this node's name; arguments that are None are left out. Raises ArgumentError."""
        values = {name: value for name, value in arguments.items() if value is not None}
        try:
            return new_node(op_type, inputs, outputs, name=self._name, arg=values)
        except ArgumentError as error:
            raise ArgumentError(f"{op_type}: {error}") from None

    def standard(self, op_type: str, inputs: Sequence[str], outputs: Sequence[str]) -> list[Node]:
        """The conversion of a node of the default domain with these attributes, in the newest version known here."""
        entry = converter_of(op_type)
        assert entry is not None, f"ONNX operator {op_type} has no converter"
        converter, version = entry
        node = copy.copy(self)  # with the same set of attributes that were asked for
        node.op_type, node.inputs, node.outputs = op_type, tuple(inputs), tuple(outputs)
        node.opset = min(version, onnx.defs.onnx_opset_version())
        node.definition = definition_of(op_type, node.opset)
        return converter(node)

    def unary(self, op_type: str, **arguments: ArgumentValue | None) -> list[Node]:
        """The one operator that computes the first output from the first input."""
        return [self.operator(op_type, [self.inputs[0]], self.only_output(), **arguments)]

    def new_name(self, suffix: str) -> str:
        """A name for a tensor between the operators of this node."""
        name = self._scope.new_name(f"{self.outputs[0]}/{suffix}")
        self.seen.new_names[name] = self.outputs[0], suffix
        return name

    def _typed(self, name: str, kind: type[T], expected: str) -> T | None:
        self.asked.add(name)
        value = self._attributes.get(name)
        if value is not None and not isinstance(value, kind):
            raise ModelFormatError(f"{self.label}: attribute {name!r} must be {expected}, found {value!r:.80}")
        return value

    def _list(self, name: str, kind: type[T], expected: str) -> list[T] | None:
        self.asked.add(name)
        value = self._attributes.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(issubclass(found, kind) for found in set(map(type, value))):
            found = f"{value!r:.80}"
            raise ModelFormatError(f"{self.label}: attribute {name!r} must be a list of {expected}, found {found}")
        return value


def _value(attribute: onnx.AttributeProto) -> object:
    """The value of an attribute. Raises CannotConvertError for kinds that converters do not see."""
    if attribute.ref_attr_name:
        raise CannotConvertError(f"attribute {attribute.name!r} refers to an attribute of a function")
    field_name = _FIELDS.get(attribute.type)
    if field_name is None:
        present = {descriptor.name for descriptor, _ in attribute.ListFields()}
        found = [name for name in _FIELDS.values() if name in present]
        if attribute.type != onnx.AttributeProto.UNDEFINED or len(found) != 1:
            raise CannotConvertError(f"attribute {attribute.name!r} is of a kind that is not supported")
        field_name = found[0]
    value = getattr(attribute, field_name)
    return value if isinstance(value, int | float | bytes | _MESSAGES) else list(value)


_MESSAGES = onnx.TensorProto | onnx.GraphProto | onnx.TypeProto

_FIELDS: Mapping[int, str] = {
    onnx.AttributeProto.FLOAT: "f",
    onnx.AttributeProto.INT: "i",
    onnx.AttributeProto.STRING: "s",
    onnx.AttributeProto.TENSOR: "t",
    onnx.AttributeProto.GRAPH: "g",
    onnx.AttributeProto.TYPE_PROTO: "tp",
    onnx.AttributeProto.FLOATS: "floats",
    onnx.AttributeProto.INTS: "ints",
    onnx.AttributeProto.STRINGS: "strings",
}

_PYTHON: Mapping[int, tuple[type, str]] = {
    onnx.AttributeProto.FLOAT: (float, "a float"),
    onnx.AttributeProto.INT: (int, "an integer"),
    onnx.AttributeProto.STRING: (bytes, "a string"),
    onnx.AttributeProto.FLOATS: (float, "floats"),
    onnx.AttributeProto.INTS: (int, "integers"),
    onnx.AttributeProto.STRINGS: (bytes, "strings"),
}
_LISTS = (onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS, onnx.AttributeProto.STRINGS)

_HINTS = ("consumed_inputs",)  # before opset 6: what may be overwritten


@dataclass(frozen=True)
class Definition:
    """The definition of an operator in an operator set.

    Attributes:
        version: the first operator set with this definition.
        kinds: the types of its attributes, as numbers of AttributeProto.
        defaults: of the attributes that have one.
    """

    version: int
    kinds: Mapping[str, int]
    defaults: Mapping[str, object]


MICROSOFT = "com.microsoft"
"""The domain of onnxruntime's operators. It has one version, and the onnx package knows none of them."""


@functools.cache
def definition_of(op_type: str, opset: int, domain: str = "") -> Definition:
    """The definition of an operator in an operator set; its converter knows those that onnx does not know.

    In a domain that onnx does not know, each operator set may have changed it.
    """
    if domain and not onnx.defs.has(op_type, opset, domain):
        return Definition(1 if domain == MICROSOFT else opset, {}, {})
    schema = onnx.defs.get_schema(op_type, opset, domain)
    attributes = schema.attributes
    defaults = {
        name: _value(attribute.default_value) for name, attribute in attributes.items() if attribute.default_value.name
    }
    kinds: dict[str, Any] = {name: attribute.type for name, attribute in attributes.items()}
    return Definition(schema.since_version, {name: kind.value for name, kind in kinds.items()}, defaults)


def domain_of(op_type: str, domain: str) -> str:
    """A node's domain, the default one as ''. onnxruntime's own SimplifiedLayerNormalization is found in that."""
    if domain not in DEFAULT_DOMAINS:
        return domain
    is_microsoft = (MICROSOFT, op_type) in _converters and not onnx.defs.has(op_type)
    return MICROSOFT if is_microsoft else ""


Converter = Callable[[OnnxNode], list[Node]]
_converters: dict[tuple[str, str], tuple[Converter, int]] = {}


def converts(domain: str = "", /, **newest: int) -> Callable[[Converter], Converter]:
    """Decorator: the function converts nodes of these types of a domain, the default ONNX one as ''.

    Each type comes with the newest version of the operator that the function was written for; later versions are
    unknown here. A version of an operator is the first operator set that has it; in a domain that the onnx package does
    not know, each operator set is a version. Raises ValueError for a type that has a converter.
    """

    def register(function: Converter) -> Converter:
        for op_type, version in newest.items():
            if (domain, op_type) in _converters:
                raise ValueError(f"ONNX operator {op_type} already has a converter")
            _converters[domain, op_type] = function, version
        return function

    return register


def converts_microsoft(*op_types: str, inputs: str, outputs: int = 1) -> Callable[[Converter], Converter]:
    """Decorator: the function converts nodes of these types of onnxruntime's domain, which the onnx package knows not.

    `inputs` are the names of the inputs, optional ones followed by ?, and a repeated last one by *; `outputs` is the
    largest number of outputs. Nodes that have others are refused, as invalid models.
    """
    names = inputs.split()

    def register(function: Converter) -> Converter:
        @functools.wraps(function)
        def checked(node: OnnxNode) -> list[Node]:
            _check_arity(node, names, outputs)
            return function(node)

        converts(MICROSOFT, **dict.fromkeys(op_types, 1))(checked)
        return function

    return register


def _check_arity(node: OnnxNode, names: Sequence[str], outputs: int) -> None:
    """Raise ModelFormatError unless a node has the inputs of these names, and at most `outputs` outputs."""
    for index, name in enumerate(names):
        if name[-1] != "?" and not node.has_input(index):
            raise ModelFormatError(f"{node.label}: its input {name.rstrip('*')} is missing")
    if len(node.inputs) > len(names) and names[-1][-1] != "*":
        raise ModelFormatError(f"{node.label}: it has {len(node.inputs)} inputs; expected at most {len(names)}")
    if not 1 <= len(node.outputs) <= outputs:
        raise ModelFormatError(f"{node.label}: it has outputs {list(node.outputs)}; expected 1 to {outputs}")


def converter_of(op_type: str, domain: str = "") -> tuple[Converter, int] | None:
    """The converter of an ONNX operator type, and the newest version it reads; None when there is none."""
    if (domain, op_type) not in _converters:
        load_onnx_operator(domain, op_type)
    if (domain, op_type) in _converters:
        return _converters[domain, op_type]
    declared = onnx_operator(domain, op_type)
    return None if declared is None else (functools.partial(_declared, *declared), declared[1].version)


def _declared(schema: OpSchema, name: OnnxName, node: OnnxNode) -> list[Node]:
    """The operator whose schema says that it is the node's. Raises CannotConvertError for inputs that it lacks."""
    node.ignore(*name.ignored)
    inputs = list(node.inputs)
    while inputs and not inputs[-1]:
        inputs.pop()
    if "" in inputs or len(inputs) > schema.inputs[1]:
        raise CannotConvertError(f"its optional inputs are not supported as they are given, {inputs}")
    count = schema.outputs[1]
    if extra := [output for index, output in enumerate(node.outputs) if index >= count and node.is_read(index)]:
        raise CannotConvertError(f"{schema.type} has {count} output(s), and {extra} is used too")
    outputs = [output or node.new_name("unread") for output in node.outputs[:count]]
    arguments = {argument: _argument(node, name, attribute) for attribute, argument in name.attributes.items()}
    if "broadcast" in schema.args:
        arguments |= _old_broadcast(node)
    return [node.operator(schema.type, inputs, outputs, **arguments, **name.fixed)]


def _old_broadcast(node: OnnxNode) -> dict[str, ArgumentValue | None]:
    """Before opset 7 operands broadcast only with `broadcast`, then from `axis` on, and without it as NumPy's."""
    stretches, axis = node.integer("broadcast", 0), node.integer("axis", 0) if "axis" in node else None
    return {"broadcast": 1, "axis": axis} if stretches and axis is not None else {}


def _argument(node: OnnxNode, name: OnnxName, attribute: str) -> ArgumentValue | None:
    value = node.argument(attribute)
    meanings = name.values.get(attribute)
    if meanings is None or value is None:
        return value
    if value not in meanings:
        raise CannotConvertError(f"its attribute {attribute} = {value!r:.80} is not supported")
    return meanings[value]


def node_label(proto: onnx.NodeProto) -> str:
    """A node's name in messages: its type, and its name or its first output."""
    return f"{proto.op_type} {proto.name or next(iter(proto.output), '')!r}"
