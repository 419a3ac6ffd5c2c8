"""Node: an operator of a net as a plain record, which compiler, inference and nets share.

It is made once from an OperatorDef, or by a frontend or pass, and turned into one only to be saved. Its fields have
the names of that message, except the arguments. A node never changes: an edit makes another, which shares the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from dagexec.core.arguments import NOTHING, Arguments, ArgumentValue, Values, shared, value_of, values_of
from dagexec.core.device import CPU, Device
from dagexec.core.form import Form, form_of
from dagexec.core.proto import DeviceOption, OperatorDef


class Node:
    """An operator of a net.

    Attributes:
        type: of the operator.
        input, output: blobs, in order.
        values: the arguments.
        name: for messages and traces.
        engine: the implementations to try, separated by commas.
        control_input: blobs that must be computed before it runs, but that it does not read.
        device_option: its device and seed, read-only; None if it runs where its net does.
        is_gradient_op: it may have the arguments of the operator that it is the gradient of.
        unread: a message with the fields that dagexec ignores (`debug_info`), or None.
        verified: the schema of its type allows it (`core.registry.verify`).
    """

    __slots__ = (
        "__weakref__", "_form", "control_input", "device_option", "engine", "input", "is_gradient_op", "name", "output",
        "type", "unread", "values",
    )  # fmt: skip

    def __init__(
        self,
        op_type: str,
        inputs: Iterable[str] = (),
        outputs: Iterable[str] = (),
        values: Values = NOTHING,
        *,
        name: str = "",
        engine: str = "",
        control_input: Iterable[str] = (),
        device_option: DeviceOption | None = None,
        is_gradient_op: bool = False,
    ) -> None:
        self.type = op_type
        self.input = tuple(inputs)
        self.output = tuple(outputs)
        self.values = values
        self.name = name
        self.engine = engine
        self.control_input = tuple(control_input)
        self.device_option = device_option
        self.is_gradient_op = is_gradient_op
        self.unread: OperatorDef | None = None
        self._form: Form | None = None

    def __repr__(self) -> str:
        return f"Node({self.type!r}, {list(self.input)}, {list(self.output)}, {dict(self.values)})"

    def __reduce__(self) -> tuple[Callable[[bytes], Node], tuple[bytes]]:
        return _of_bytes, (self.message().SerializePartialToString(),)

    @property
    def form(self) -> Form:
        """Shared by operators of equal type, arguments, and pattern of equal or unnamed blobs."""
        form = self._form
        if form is None:
            first = {"": -1}
            places = [first.setdefault(name, len(first)) for name in (*self.input, *self.output)]
            key = self.type, self.is_gradient_op, self.values.key, len(self.input), tuple(places)
            form = self._form = form_of(key)
        return form

    @property
    def device(self) -> Device:
        """Where it runs, unless its net says otherwise. Raises DeviceError for a device that dagexec does not have."""
        return CPU if self.device_option is None else Device.from_option(self.device_option)

    @property
    def seed(self) -> int | None:
        """The seed of its random numbers, if it names one."""
        option = self.device_option
        return option.random_seed if option is not None and option.HasField("random_seed") else None

    def arguments(self, owner: str = "") -> Arguments:
        """Typed reading of the arguments; messages call it `owner`, by default its type."""
        return Arguments(self.values, owner or self.type)

    def changed(
        self,
        *,
        op_type: str | None = None,
        inputs: Iterable[str] | None = None,
        outputs: Iterable[str] | None = None,
        engine: str | None = None,
        values: Values | None = None,
        device_option: DeviceOption | None = None,
        name: str | None = None,
        control_input: Iterable[str] | None = None,
        arguments: Mapping[str, ArgumentValue | None] | None = None,
    ) -> Node:
        """A node with these changes. `arguments` are added; None removes one."""
        node = Node.__new__(Node)
        node.type = self.type if op_type is None else op_type
        node.input = self.input if inputs is None else tuple(inputs)
        node.output = self.output if outputs is None else tuple(outputs)
        node.engine = self.engine if engine is None else engine
        node.values = self.values if values is None else values
        node.name = self.name if name is None else name
        node.device_option = self.device_option if device_option is None else device_option
        node.control_input = self.control_input if control_input is None else tuple(control_input)
        node.is_gradient_op, node.unread = self.is_gradient_op, self.unread
        if arguments:
            added = {key: None if argument is None else value_of(key, argument) for key, argument in arguments.items()}
            node.values = node.values.changed(added)
        is_alike = op_type is None and inputs is None and outputs is None and node.values is self.values
        node._form = self._form if is_alike else None
        return node

    def on(self, inputs: Iterable[str], outputs: Iterable[str], name: str) -> Node:
        """The same on other blobs, with the same pattern of equal ones, under another name."""
        node = self.changed(inputs=inputs, outputs=outputs, name=name)
        node._form = self._form
        return node

    def renamed(self, names: Mapping[str, str]) -> Node:
        """The same with blobs renamed."""
        return self.changed(
            inputs=[names.get(name, name) for name in self.input],
            outputs=[names.get(name, name) for name in self.output],
        )

    def message(self) -> OperatorDef:
        """The message that stores it."""
        message = OperatorDef(type=self.type, input=self.input, output=self.output, arg=self.values.messages())
        if self.unread is not None:
            message.MergeFrom(self.unread)
        if self.name:
            message.name = self.name
        if self.engine:
            message.engine = self.engine
        if self.control_input:
            message.control_input.extend(self.control_input)
        if self.device_option is not None:
            message.device_option.CopyFrom(self.device_option)
        if self.is_gradient_op:
            message.is_gradient_op = True
        return message


_UNREAD = ("debug_info", "domain", "op_version")


def node_of(definition: OperatorDef | Node, owner: str = "") -> Node:
    """The record of an operator in a message.

    Raises ArgumentError, naming the `owner`, for two arguments of one name that differ.
    """
    if isinstance(definition, Node):
        return definition
    option = None
    if definition.HasField("device_option"):
        option = DeviceOption()
        option.CopyFrom(definition.device_option)
    node = Node(
        definition.type,
        definition.input,
        definition.output,
        values_of(definition.arg, owner or definition.type) if definition.arg else NOTHING,
        name=definition.name,
        engine=definition.engine,
        control_input=definition.control_input,
        device_option=option,
        is_gradient_op=definition.is_gradient_op,
    )
    unread = {field: getattr(definition, field) for field in _UNREAD if definition.HasField(field)}
    if unread:
        node.unread = OperatorDef(**unread)
    return node


def new_node(
    op_type: str,
    inputs: Iterable[str] = (),
    outputs: Iterable[str] = (),
    *,
    name: str = "",
    engine: str = "",
    arg: Mapping[str, ArgumentValue] = MappingProxyType({}),
    **arguments: ArgumentValue,
) -> Node:
    """An operator with these arguments, some of them in `arg`.

    Raises ArgumentError for a value that no argument can hold.
    """
    values = shared({key: value_of(key, value) for key, value in {**arg, **arguments}.items()})
    return Node(op_type, inputs, outputs, values, name=name, engine=engine)


def arguments_of(definition: OperatorDef, owner: str = "") -> Arguments:
    """Typed reading of the arguments in a message; messages call it `owner`, by default its type."""
    return node_of(definition, owner).arguments(owner)


def operator_label(definition: Node | OperatorDef, index: int, net: str = "") -> str:
    """The operator in messages: type, name or first output, index, net."""
    name = definition.name or (definition.output[0] if definition.output else "")
    position = f" (operator {index})" if index >= 0 else ""
    return f"{definition.type} {name!r}{position}" + (f" of net {net!r}" if net else "")


def _of_bytes(data: bytes) -> Node:
    return node_of(OperatorDef.FromString(data))
