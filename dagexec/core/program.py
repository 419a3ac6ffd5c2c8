"""Program: a net as plain records, made once from a NetDef, and turned into one only to be saved."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import field
from typing import TypeVar, cast

from dagexec.core.device import Device
from dagexec.core.node import Node, node_of, operator_label
from dagexec.core.proto import NetDef, missing_fields
from dagexec.core.subnets import has_subnets, in_own_scopes
from dagexec.errors import SchemaError
from dagexec.platform.records import dataclass

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """The operators of a net, in list order, and what else is known of it.

    Attributes:
        op: the operators.
        header: the message without its operators, not to be changed.
    """

    op: tuple[Node, ...]
    header: NetDef
    _found: dict[Hashable, object] = field(init=False, default_factory=dict, repr=False)

    def __reduce__(self) -> tuple[Callable[[NetDef], Program], tuple[NetDef]]:
        return program_of, (self.message(),)

    def once(self, key: Hashable, find: Callable[[], Found]) -> Found:
        """What `find` finds out about the net, kept under `key`."""
        if key not in self._found:
            self._found[key] = find()
        return cast(Found, self._found[key])

    @property
    def name(self) -> str:
        """The name in messages."""
        return self.header.name

    @property
    def external_input(self) -> Sequence[str]:
        """The blobs that are there before it runs, if it lists them."""
        return self.header.external_input

    @property
    def external_output(self) -> Sequence[str]:
        """The blobs that it is run for, if it lists them."""
        return self.header.external_output

    @property
    def device(self) -> Device | None:
        """The device of operators that name none, if it names one."""
        return Device.from_option(self.header.device_option) if self.header.HasField("device_option") else None

    def device_of(self, node: Node) -> Device:
        """Where one of its operators runs."""
        return node.device if node.device_option is not None else self.device or node.device

    def with_operators(self, operators: Iterable[Node]) -> Program:
        """The net with other operators."""
        return Program(tuple(operators), self.header)

    def with_device(self, device: Device) -> Program:
        """The net on a device, but for operators that name one."""
        header = NetDef()
        header.CopyFrom(self.header)
        header.device_option.CopyFrom(device.to_option())
        return Program(self.op, header)

    def with_name(self, name: str) -> Program:
        """The net under another name."""
        header = NetDef()
        header.CopyFrom(self.header)
        header.name = name
        return Program(self.op, header)

    def with_external_input(self, names: Iterable[str]) -> Program:
        """The net with other blobs that are there before it runs."""
        header = NetDef()
        header.CopyFrom(self.header)
        header.external_input[:] = names
        return Program(self.op, header)

    def message(self) -> NetDef:
        """As it is stored."""
        made = NetDef()
        made.CopyFrom(self.header)
        made.op.extend([node.message() for node in self.op])
        return made


def program_of(net: NetDef | Program) -> Program:
    """The records of a net, in which Caffe2's operators that run nets have bodies (`dagexec.core.subnets`).

    Raises SchemaError or ArgumentError, which name an operator, for a message that is none.
    """
    if isinstance(net, Program):
        return net
    if not net.IsInitialized():
        for index, definition in enumerate(net.op):
            if missing := missing_fields(definition):
                raise SchemaError(
                    f"{operator_label(definition, index, net.name)}: required fields are missing: {missing}"
                )
    nodes = [
        node_of(definition, operator_label(definition, index, net.name) if definition.arg else "")
        for index, definition in enumerate(net.op)
    ]
    return program_with(nodes, without_operators(net))


def program_with(nodes: Sequence[Node], header: NetDef) -> Program:
    """The net of operators that are as messages have them."""
    return Program(in_own_scopes(nodes, header) if any(map(has_subnets, nodes)) else tuple(nodes), header)


def header_of(net: NetDef | Program) -> NetDef:
    """A message with all that a net says beside its operators."""
    return net.header if isinstance(net, Program) else net


def without_operators(net: NetDef) -> NetDef:
    """The fields of a net but its operators."""
    bare = NetDef()
    for one, value in net.ListFields():
        if one.name == "op":
            continue
        if one.is_repeated:
            getattr(bare, one.name).extend(value)
        elif one.message_type is not None:
            getattr(bare, one.name).CopyFrom(value)
        else:
            setattr(bare, one.name, value)
    return bare
