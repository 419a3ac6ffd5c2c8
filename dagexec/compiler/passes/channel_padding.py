"""Channels padded with zeros to a multiple of a block, so that images between convolutions can be in blocks.

A convolution gets further filters of zeros, and those that read its result ignore what these make: their filters have
zeros there, too. That is more arithmetic, so it is an alternative to be measured, not a gain by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field

import numpy as np

from dagexec.compiler.passes.fusion import post_ops_of
from dagexec.compiler.passes.image_operators import Array
from dagexec.compiler.passes.single_assignment import Value, Values
from dagexec.core.arguments import Arguments
from dagexec.core.model import Model
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.traits import ImageRole
from dagexec.ops.base.layout import NCHW
from dagexec.ops.families.activation.post_ops import PostOp, as_post_ops
from dagexec.platform.records import dataclass


def pad_channels(model: Model, block: int) -> Model:
    """`model` with channels padded to multiples of `block` wherever every operator that sees them allows it.

    The same object if none does.
    """
    values = Values(model)
    groups = _Groups()
    for index, definition in enumerate(model.program.op):
        _join(groups, index, definition, values, model)
    for value in values.all:
        if value.is_output or value.writer is None:
            groups.forbid(value.number)
    padded = {number: channels for number in groups.channels if (channels := groups.padding(number, block))}
    return _Padding(model, values, padded, block).result() if padded else model


class _Groups:
    """Tensors that have the same channels, as disjoint sets (Galler and Fischer 1964)."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._forbidden: set[int] = set()
        self._sets: dict[int, list[int]] = {}  # by root, once all are joined
        self.channels: dict[int, int] = {}

    def _root(self, number: int) -> int:
        while (parent := self._parent.setdefault(number, number)) != number:
            self._parent[number] = self._parent[parent]
            number = parent
        return number

    def forbid(self, number: int) -> None:
        """Tensor `number` must not be padded."""
        self._forbidden.add(number)

    def has(self, number: int, channels: int) -> None:
        """A convolution writes or reads tensor `number` with so many channels."""
        if self.channels.get(number, 0) not in (0, channels):
            self.forbid(number)
        self.channels[number] = channels

    def join(self, numbers: Iterable[int]) -> None:
        """These tensors are padded together or not at all."""
        first, *others = numbers
        for number in others:
            self._parent[self._root(number)] = self._root(first)
            self.channels.setdefault(number, 0)
        self.channels.setdefault(first, 0)

    def _members(self, number: int) -> list[int]:
        """The tensors that are padded together with tensor `number`."""
        if not self._sets:
            for other in self.channels:
                self._sets.setdefault(self._root(other), []).append(other)
        return self._sets[self._root(number)]

    def padding(self, number: int, block: int) -> int:
        """The channels of tensor `number` if it is to be padded to blocks, else 0."""
        members = self._members(number)
        sizes = {self.channels[other] for other in members if self.channels[other]}
        if len(sizes) != 1 or any(other in self._forbidden for other in members):
            return 0
        (channels,) = sizes
        return channels if channels % block and channels >= block // 2 else 0


def _join(groups: _Groups, index: int, definition: Node, values: Values, model: Model) -> None:
    """What operator `index` asks of the tensors that it touches."""
    read = [value for value in values.read[index] if value is not None]
    written = values.written_by[index]
    arguments = definition.arguments()
    plain = arguments.string("order", NCHW).upper() == NCHW and "output_order" not in arguments
    role = schema_of(definition.type).image_role
    if plain and role is ImageRole.CONVOLUTION and _is_convolution(definition, arguments, values, model, index):
        filters = model.parameters[definition.input[1]]
        source, extra, group = read[0], read[1:], arguments.int("group", 1)
        result = written[0]
        groups.has(result.number, filters.shape[0])
        groups.has(source.number, filters.shape[1] * group)
        groups.join([result.number, *(value.number for value in extra)])
        if group > 1:
            groups.join([source.number, result.number])
        return
    same = plain and role is ImageRole.POOLING
    if role is ImageRole.ELEMENTWISE:
        same = _finite(post_ops_of(definition) or as_post_ops(definition))
    if same and read and all(value is not None for value in values.read[index]) and len(written) == 1:
        groups.join([value.number for value in (*read, *written)])
        return
    for value in (*read, *written):
        groups.forbid(value.number)


def _is_convolution(definition: Node, arguments: Arguments, values: Values, model: Model, index: int) -> bool:
    """True for a convolution whose constants can be padded: ungrouped, or a filter a channel."""
    constant = [position for position, value in enumerate(values.read[index]) if value is None]
    filters = model.parameters.get(definition.input[1])
    if filters is None or filters.ndim != 4 or values.read[index][0] is None or 1 not in constant:
        return False
    group = arguments.int("group", 1)
    if group > 1 and not (group == filters.shape[0] and filters.shape[1] == 1):
        return False
    first_extra = 2 + arguments.int("bias", 0) if definition.type == "FusedConv" else 3
    if any(position not in constant for position in range(2, min(first_extra, len(definition.input)))):
        return False
    per_channel = ((), (1,), (filters.shape[0],), (filters.shape[0], 1, 1), (1, filters.shape[0], 1, 1), (1, 1, 1, 1))
    shapes = [model.parameters[definition.input[position]].shape for position in constant[1:]]
    return all(shape in per_channel for shape in shapes) and _finite(post_ops_of(definition))


def _finite(post_ops: Sequence[PostOp] | None) -> bool:
    """True for post-ops that make something finite of zeros: what they make is multiplied with zero."""
    return post_ops is not None and all(post_op.is_finite_at_zero for post_op in post_ops)


@dataclass
class _Padding:
    """The padded model. `padded` gives the channels of the tensors to pad to multiples of `block`, by number."""

    model: Model
    values: Values
    padded: Mapping[int, int]
    block: int
    parameters: dict[str, Array] = field(default_factory=dict)

    def result(self) -> Model:
        """The model with wider constants."""
        self.parameters = dict(self.model.parameters)
        program = self.model.program
        operators = [
            self._padded(index, definition)
            if schema_of(definition.type).image_role is ImageRole.CONVOLUTION
            else definition
            for index, definition in enumerate(program.op)
        ]
        read = {name for definition in operators for name in definition.input} | set(self.model.outputs)
        before = {name for definition in program.op for name in definition.input}
        kept = {name: array for name, array in self.parameters.items() if name in read or name not in before}
        return self.model.changed(net=program.with_operators(operators), parameters=kept)

    def _padded(self, index: int, definition: Node) -> Node:
        source, result = self.values.read[index][0], self.values.written_by[index][0]
        outer, inner = self._missing(result), self._missing(source)
        if not outer and not inner:
            return definition
        channels = self.model.parameters[definition.input[1]].shape[0]
        group = definition.arguments().int("group", 1)
        if group > 1:
            definition = definition.changed(arguments={"group": group + outer})
            inner = 0
        inputs = list(definition.input)
        for position, value in enumerate(self.values.read[index]):
            if value is not None:
                continue
            array = self.model.parameters[definition.input[position]]
            if position == 1:
                widths = [(0, outer), (0, inner), (0, 0), (0, 0)]
            else:
                widths = [(0, outer if size == channels and channels > 1 else 0) for size in array.shape]
            if any(after for _, after in widths):
                inputs[position] = self._constant(inputs[position], np.pad(array, widths))
        return definition.changed(inputs=inputs)

    def _missing(self, value: Value | None) -> int:
        return 0 if value is None else -self.padded.get(value.number, 0) % self.block

    def _constant(self, name: str, array: Array) -> str:
        """A parameter of that shape made of parameter `name`."""
        place = f"{name}/padded{'x'.join(map(str, array.shape))}"
        array.flags.writeable = False
        self.parameters[place] = array
        return place
