"""Draft: a net that a pass edits, with the questions every pass has to ask before it may.

Operators have numbers that stay while others come and go. A blob is *single* when it has one value in a run: it is
written once, before it is read, and is neither fed nor a parameter then; or it is never written. A pass may move, merge
or drop operators that are *free*: on the host, without control inputs, and on single blobs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import Arguments, ArgumentValue, make_argument
from dagexec.core.device import CPU, Device
from dagexec.core.model import Model
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef
from dagexec.core.schema import operator_label
from dagexec.passes.rewriting import Rewritten

Array = npt.NDArray[Any]

_PLAIN_ENGINES = frozenset({"", "DEFAULT", "ONEDNN", "CUDNN"})


class Draft:
    """The operators of a model's net, under edit. `model` is as it was before.

    Attributes:
        parameters: the model's, with those that the pass adds.
        outputs: blobs that must keep their names and values.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.parameters: dict[str, Array] = dict(model.parameters)
        self.outputs = frozenset(model.outputs)
        self._operators: dict[int, OperatorDef] = {}
        self._order: list[int] = []
        self._writers: dict[str, list[int]] = {}
        self._readers: dict[str, list[int]] = {}
        self._changes: list[str] = []
        made = () if model.init_net is None else (name for op in model.init_net.op for name in op.output)
        self._given = frozenset(model.inputs) | frozenset(model.parameters) | frozenset(made)
        self._controls: set[str] = set()
        self._read_early: set[str] = set()
        for number, definition in enumerate(model.net.op):
            self._read_early.update(name for name in definition.input if name not in self._writers)
            self._controls.update(definition.control_input)
            self._operators[number] = definition
            self._order.append(number)
            self._enter(number, definition)
        self._taken = {*self._given, *self._writers, *self._readers, *self._controls, *model.net.external_input}
        self._host_net = _on_host(model.net.device_option) if model.net.HasField("device_option") else True

    # --- asking

    def numbers(self) -> list[int]:
        """The numbers of the operators, in list order."""
        return list(self._order)

    def __contains__(self, number: int) -> bool:
        return number in self._operators

    def __getitem__(self, number: int) -> OperatorDef:
        return self._operators[number]

    def operators(self) -> Iterator[tuple[int, OperatorDef]]:
        """Number and def of each operator, in list order; the draft may be edited meanwhile."""
        for number in self.numbers():
            if number in self._operators:
                yield number, self._operators[number]

    def label(self, number: int) -> str:
        """How a change names operator `number`: type, and name or first output."""
        return operator_label(self._operators[number], -1)

    def arguments(self, number: int) -> Arguments:
        """The arguments of operator `number`."""
        return Arguments(self._operators[number], self.label(number))

    def readers(self, name: str) -> Sequence[int]:
        """The operators that read blob `name`, each once."""
        return self._readers.get(name, [])

    def writers(self, name: str) -> Sequence[int]:
        """The operators that write blob `name`."""
        return self._writers.get(name, [])

    def is_given(self, name: str) -> bool:
        """True when a blob of that name is there before the net runs."""
        return name in self._given or name in self.parameters

    def is_single(self, name: str) -> bool:
        """True when the blob has one value in a run, and no control input goes by its name."""
        if name in self._controls:
            return False
        writers = self._writers.get(name, ())
        return not writers or (len(writers) == 1 and not self.is_given(name) and name not in self._read_early)

    def is_controlled(self, name: str) -> bool:
        """True when some operator has `name` as a control input."""
        return name in self._controls

    def is_read_early(self, name: str) -> bool:
        """True when an operator reads `name` before any writes it: it sees what was there before the run."""
        return name in self._read_early

    def is_on_host(self, number: int) -> bool:
        """True when operator `number` runs on the host."""
        definition = self._operators[number]
        return _on_host(definition.device_option) if definition.HasField("device_option") else self._host_net

    def is_free(self, number: int) -> bool:
        """True when a pass may move, merge or drop operator `number`."""
        definition = self._operators[number]
        return (
            not definition.control_input
            and self.is_on_host(number)
            and definition.engine in _PLAIN_ENGINES
            and all(map(self.is_single, definition.input))
            and all(map(self.is_single, definition.output))
        )

    def is_inner(self, name: str) -> bool:
        """True when `name` is a single blob that an operator writes and nobody outside the net sees."""
        return len(self.writers(name)) == 1 and name not in self.outputs and self.is_single(name)

    def only_reader(self, name: str) -> int | None:
        """The free operator that alone reads inner blob `name`, once; None when there is none such."""
        readers = self.readers(name)
        if len(readers) != 1 or not self.is_inner(name):
            return None
        [reader] = readers
        if not self.is_free(reader) or list(self._operators[reader].input).count(name) != 1:
            return None
        return reader

    def producer(self, name: str) -> int | None:
        """The free operator that writes single blob `name`; None when there is none such."""
        writers = self.writers(name)
        return writers[0] if len(writers) == 1 and self.is_single(name) and self.is_free(writers[0]) else None

    def constant(self, name: str) -> Array | None:
        """The value of `name` when it is a parameter that is never fed nor written; else None."""
        if name in self.model.inputs or self._writers.get(name) or name in self._controls:
            return None
        return self.parameters.get(name)

    def constants(self) -> Mapping[str, Array]:
        """All parameters that are never fed nor written."""
        return {name: array for name, array in self.parameters.items() if self.constant(name) is not None}

    # --- editing

    def replace(self, number: int, definition: OperatorDef, *more: OperatorDef) -> None:
        """Put `definition` in the place of operator `number`; `more` follow it."""
        self._leave(number)
        self._operators[number] = definition
        self._enter(number, definition)
        place = self._order.index(number) if more else 0
        for offset, another in enumerate(more, start=1):
            fresh = max(self._order) + 1
            self._order.insert(place + offset, fresh)
            self._operators[fresh] = another
            self._enter(fresh, another)

    def remove(self, number: int) -> None:
        """Take operator `number` out."""
        self._leave(number)
        del self._operators[number]
        self._order.remove(number)

    def rename(self, old: str, new: str) -> None:
        """Let every operator that reads or writes blob `old` use `new` instead."""
        for number in {*self.readers(old), *self.writers(old)}:
            self.replace(number, renamed(self._operators[number], {old: new}))

    def redirect(self, old: str, new: str) -> None:
        """Let every operator that reads blob `old` read `new` instead."""
        for number in list(self.readers(old)):
            definition = copied(self._operators[number])
            definition.input[:] = [new if name == old else name for name in definition.input]
            self.replace(number, definition)

    def fresh(self, hint: str) -> str:
        """A blob name that nobody has, like `hint`; it is taken from then on."""
        name, count = hint, 1
        while name in self._taken:
            name, count = f"{hint}/{count}", count + 1
        self._taken.add(name)
        return name

    def add_parameter(self, hint: str, array: Array) -> str:
        """A new parameter that holds `array`; its name is like `hint`."""
        name = self.fresh(hint)
        self.add_parameter_named(name, array)
        return name

    def add_parameter_named(self, name: str, array: Array) -> None:
        """A parameter `name`, a blob that no operator writes any more, that holds `array`."""
        packed = np.array(array, order="C", copy=not array.flags.c_contiguous)
        packed.flags.writeable = False
        self.parameters[name] = packed

    def changed(self, sentence: str) -> None:
        """Note a change."""
        self._changes.append(sentence)

    def finish(self) -> Rewritten:
        """The edited model with the changes noted; the model itself, when there were none."""
        if not self._changes:
            return Rewritten(self.model)
        net = NetDef()
        net.CopyFrom(_without_operators(self.model.net))
        net.op.extend(self._operators[number] for number in self._order)
        if net.external_input:
            seen = {*net.external_input, *self.model.inputs}
            added = [name for name in self.parameters if name not in seen and self._readers.get(name)]
            gone = {name for name in net.external_input if name not in self.model.inputs} - self._in_use()
            external = [name for name in net.external_input if name not in gone]
            net.external_input[:] = [*external, *added]
        return Rewritten(replace(self.model, net=net, parameters=self.parameters), tuple(self._changes))

    def _in_use(self) -> set[str]:
        return {name for name, readers in self._readers.items() if readers} | self.outputs | self._controls

    def _enter(self, number: int, definition: OperatorDef) -> None:
        for name in dict.fromkeys(definition.input):
            self._readers.setdefault(name, []).append(number)
        for name in dict.fromkeys(definition.output):
            self._writers.setdefault(name, []).append(number)

    def _leave(self, number: int) -> None:
        definition = self._operators[number]
        for name in dict.fromkeys(definition.input):
            self._readers[name].remove(number)
        for name in dict.fromkeys(definition.output):
            self._writers[name].remove(number)


def _on_host(option: DeviceOption) -> bool:
    return Device.from_option(option) == CPU


def _without_operators(net: NetDef) -> NetDef:
    """The fields of `net` but its operators."""
    bare = NetDef()
    for field, value in net.ListFields():
        if field.name == "op":
            continue
        if field.is_repeated:
            getattr(bare, field.name).extend(value)
        elif field.message_type is not None:
            getattr(bare, field.name).CopyFrom(value)
        else:
            setattr(bare, field.name, value)
    return bare


def copied(definition: OperatorDef) -> OperatorDef:
    """A copy of `definition`, to be changed; defs in a draft are shared with the model."""
    copy = OperatorDef()
    copy.CopyFrom(definition)
    return copy


def renamed(definition: OperatorDef, names: Mapping[str, str]) -> OperatorDef:
    """A copy of `definition` with blobs renamed."""
    copy = copied(definition)
    copy.input[:] = [names.get(name, name) for name in copy.input]
    copy.output[:] = [names.get(name, name) for name in copy.output]
    return copy


def operator(
    op_type: str, inputs: Iterable[str], outputs: Iterable[str], name: str = "", **arguments: ArgumentValue
) -> OperatorDef:
    """An OperatorDef from Python values."""
    definition = OperatorDef(type=op_type, input=inputs, output=outputs, name=name)
    definition.arg.extend(make_argument(key, value) for key, value in arguments.items())
    return definition
