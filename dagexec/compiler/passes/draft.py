"""Draft: the graph that all passes edit, one after another, with the questions each has to ask before it may.

Operators have numbers that stay while others come and go. A blob is *single* when it has one value in a run: it is
written once, before it is read, and is neither fed nor a parameter then; or it is never written. A pass may move, merge
or drop operators that are *free*: on the host, without control inputs, and on single blobs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.compiler.passes.owned_parameters import owned, successors
from dagexec.compiler.passes.types import BlobType, KnownTypes
from dagexec.core.arguments import Arguments
from dagexec.core.device import CPU
from dagexec.core.model import Model
from dagexec.core.node import Node, operator_label
from dagexec.core.packed_copy import packed_copy
from dagexec.core.program import Program
from dagexec.core.registry import schema_of
from dagexec.core.schema import OpSchema
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

Trait = Callable[[OpSchema], bool]
"""What an operator type is, or can: a function with a name, whose answers are kept."""

_MANY = 16  # operators, that are not forgotten one by one

_KEPT = 1 << 8  # sets of operator types

_PLAIN_ENGINES = frozenset({"", "DEFAULT", "ONEDNN", "CUDNN"})


@dataclass(frozen=True)
class Rewritten:
    """What a pass made of a model, and one sentence for each thing it changed (none: the model is as before)."""

    model: Model
    changes: tuple[str, ...] = ()


class Draft:
    """The operators of a model's net, under edit: who uses which blob, and what is known of types.

    Attributes:
        model: as it was when the present pass began.
        known: what is known of its types, None until a pass asks.
        parameters: the model's, with those that the pass adds.
        outputs: blobs that must keep their names and values.
    """

    def __init__(self, model: Model, known: KnownTypes | None = None) -> None:
        """`known` are types of the blobs of a model that this one is."""
        self.known = known
        self._begin(model)

    def _begin(self, model: Model) -> None:
        self.model = model
        self.parameters: dict[str, Array] = dict(model.parameters)
        self.outputs = frozenset(model.outputs)
        self._program = model.program
        self._operators = dict(enumerate(self._program.op))
        self._count = len(self._operators)  # numbers that were given, those of operators that are gone included
        self._kinds = {definition.type for definition in self._program.op}  # of operators, some of which may be gone
        self._traits = _traits(frozenset(map(schema_of, self._kinds)))
        self._places: dict[int, tuple[int, ...]] = {}  # in the list, of the operators put in behind others
        self._readers, self._writers, self._read_early = _users(self._program)
        self._controls = {name for definition in self._program.op for name in definition.control_input}
        self._given = {*model.inputs, *(name for made in model.init_program.op for name in made.output)}
        several = [name for name, row in self._writers.items() if len(row) > 1]
        before = self._given | self.parameters.keys() | self._read_early
        self._irregular = {*self._controls, *several, *(before & self._writers.keys())}
        """Blobs that are not single."""
        self._touched: set[str] = set()  # blobs whose readers have changed since, or who writes or gives them
        self._changes: list[str] = []
        self._left: set[str] = set()  # blobs that an operator no longer reads
        self._taken: set[str] = set()  # every name there is, once a new one has been requested
        self._host_net = self._program.device in (None, CPU)
        self._free: dict[int, bool] = {}  # the answers of `is_free` that no edit has changed
        self._edited = False
        self._made: Model | None = None  # what the pass made of it, if that was no edit

    # --- asking

    def nodes(self) -> Iterable[Node]:
        """The operators, in list order."""
        return (
            [self._operators[number] for number in self.numbers()] if self._places else list(self._operators.values())
        )

    def __len__(self) -> int:
        return len(self._operators)

    def has(self, trait: Trait) -> bool:
        """False when no operator has a type of that `trait`; looks at types, however many operators there are."""
        found = self._traits.get(trait)
        if found is None:
            found = self._traits[trait] = any(schema_of(kind).once(trait) for kind in self._kinds)
        return found

    def having(self, trait: Trait) -> list[int]:
        """The numbers of the operators whose types have the `trait`, in list order."""
        if not self.has(trait):
            return []
        kinds = {kind for kind in self._kinds if schema_of(kind).once(trait)}
        operators = self._operators
        return [number for number in self.numbers() if operators[number].type in kinds]

    def types(self) -> Mapping[str, BlobType]:
        """Types of the blobs as they were when the pass began."""
        if self.known is None:
            self.known = KnownTypes(self.model)
        return self.known.types(self.model)

    def numbers(self) -> list[int]:
        """The numbers of the operators, in list order."""
        return sorted(self._operators, key=self._place) if self._places else list(self._operators)

    def __contains__(self, number: int) -> bool:
        return number in self._operators

    def __getitem__(self, number: int) -> Node:
        return self._operators[number]

    def operators(self) -> Iterator[tuple[int, Node]]:
        """Number and def of each operator, in list order; the draft may be edited meanwhile."""
        for number in self.numbers():
            if number in self._operators:
                yield number, self._operators[number]

    def is_listed_before(self, one: int, other: int) -> bool:
        """True when operator `one` stands before operator `other` in the list."""
        return self._place(one) < self._place(other)

    def _place(self, number: int) -> tuple[int, ...]:
        """What operators are listed by: behind a place come those that begin with it."""
        return self._places.get(number) or (number,)

    def label(self, number: int) -> str:
        """How a change names operator `number`: type, and name or first output."""
        return operator_label(self._operators[number], -1)

    def arguments(self, number: int) -> Arguments:
        """The arguments of operator `number`."""
        return self._operators[number].arguments(self.label(number))

    def is_read(self, name: str) -> bool:
        """True when an operator reads blob `name`."""
        return name in self._readers

    def unread(self) -> set[str]:
        """Blobs that operators write and that neither an operator reads nor somebody outside."""
        return self._writers.keys() - self._readers.keys() - self.outputs

    def unused_parameters(self) -> list[str]:
        """Parameters that nothing reads or writes, feeds or gets."""
        init = self.model.init_program.op
        used = {*self.outputs, *self._controls, *self.model.inputs, *(name for one in init for name in one.input)}
        unread = self.parameters.keys() - self._readers.keys() - self._writers.keys() - used
        return [name for name in self.parameters if name in unread] if unread else []

    def last_named_reader(self, name: str) -> int | None:
        """The reader of blob `name` that came to it last: the last one in list order where nothing was edited."""
        return next(reversed(self._readers.get(name, _NOBODY)), None)

    def written_often(self) -> list[str]:
        """The blobs that several operators write, in the order of their first writers."""
        return [name for name, row in self._writers.items() if len(row) > 1]

    def readers(self, name: str) -> Sequence[int]:
        """The operators that read blob `name`, each once."""
        return list(self._readers.get(name, _NOBODY))

    def writers(self, name: str) -> Sequence[int]:
        """The operators that write blob `name`."""
        return list(self._writers.get(name, _NOBODY))

    def is_given(self, name: str) -> bool:
        """True when a blob of that name is there before the net runs."""
        return name in self._given or name in self.parameters

    def is_single(self, name: str) -> bool:
        """True when the blob has one value in a run, and no control input goes by its name."""
        if name not in self._touched:
            return name not in self._irregular
        if name in self._controls:
            return False
        writers = self._writers.get(name, _NOBODY)
        return not writers or (len(writers) == 1 and not self.is_given(name) and name not in self._read_early)

    def _are_single(self, names: Sequence[str]) -> bool:
        if self._touched.isdisjoint(names):
            return self._irregular.isdisjoint(names)
        return all(map(self.is_single, names))

    def is_controlled(self, name: str) -> bool:
        """True when some operator has `name` as a control input."""
        return name in self._controls

    def is_read_early(self, name: str) -> bool:
        """True when an operator reads `name` before any writes it: it sees what was there before the run."""
        return name in self._read_early

    def is_on_host(self, number: int) -> bool:
        """True when operator `number` runs on the host."""
        definition = self._operators[number]
        return self._host_net if definition.device_option is None else definition.device == CPU

    def is_free(self, number: int) -> bool:
        """True when a pass may move, merge or drop operator `number`."""
        free = self._free.get(number)
        if free is None:
            free = self._free[number] = self._is_free(number)
        return free

    def _is_free(self, number: int) -> bool:
        definition = self._operators[number]
        return (
            not definition.control_input
            and self.is_on_host(number)
            and definition.engine in _PLAIN_ENGINES
            and self._are_single(definition.input)
            and self._are_single(definition.output)
        )

    def is_inner(self, name: str) -> bool:
        """True when `name` is a single blob that an operator writes and nobody outside the net sees."""
        return name in self._writers and name not in self.outputs and self.is_single(name)

    def only_reader(self, name: str) -> int | None:
        """The free operator that alone reads inner blob `name`, once; None when there is none such."""
        readers = self._readers.get(name, _NOBODY)
        if len(readers) != 1 or not self.is_inner(name):
            return None
        [(reader, times)] = readers.items()
        return reader if times == 1 and self.is_free(reader) else None

    def producer(self, name: str) -> int | None:
        """The free operator that writes single blob `name`; None when there is none such."""
        writers = self._writers.get(name)
        if writers is None or not self.is_single(name):
            return None
        [writer] = writers
        return writer if self.is_free(writer) else None

    def constant(self, name: str) -> Array | None:
        """The value of `name` when it is a parameter that is never fed nor written; else None."""
        array = self.parameters.get(name)
        if array is None or name in self.model.inputs or name in self._writers or name in self._controls:
            return None
        return array

    def reads_constants(self, definition: Node) -> bool:
        """True for an operator that reads nothing but constants."""
        for name in definition.input:  # noqa: SIM110 - asked of every operator
            if self.constant(name) is None:
                return False
        return True

    def constants(self) -> Mapping[str, Array]:
        """All parameters that are never fed nor written."""
        return {name: array for name, array in self.parameters.items() if self.constant(name) is not None}

    # --- editing

    def replace(self, number: int, definition: Node, *more: Node) -> None:
        """Put `definition` in the place of operator `number`; `more` follow it."""
        self._leave(number)
        self._operators[number] = definition
        self._enter(number, definition)
        if not more:
            return
        place = self._place(number)
        for fresh, another in enumerate(more, start=self._count):
            self._places[fresh] = (*place, -self._count, fresh)  # before what was put there earlier
            self._operators[fresh] = another
            self._enter(fresh, another)
        self._count += len(more)

    def remove(self, number: int) -> None:
        """Take operator `number` out."""
        self._leave(number)
        del self._operators[number]

    def rename(self, old: str, new: str) -> None:
        """Let every operator that reads or writes blob `old` use `new` instead."""
        for number in {*self.readers(old), *self.writers(old)}:
            self.replace(number, self._operators[number].renamed({old: new}))

    def redirect(self, old: str, new: str) -> None:
        """Let every operator that reads blob `old` read `new` instead."""
        for number in list(self.readers(old)):
            definition = self._operators[number]
            definition = definition.changed(inputs=[new if name == old else name for name in definition.input])
            self.replace(number, definition)

    def fresh(self, hint: str) -> str:
        """A blob name that nobody has, like `hint`; it is taken from then on."""
        if not self._taken:
            self._taken = {*self._given, *self.model.parameters, *self._controls, *self._program.external_input}
            for definition in self._program.op:
                self._taken.update(definition.input, definition.output)
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
        """A parameter `name`, a blob that no operator writes any more, that holds `array`.

        Owned parameters that nobody reads any more are let go of.
        """
        self._let_go_of_unread()
        packed = np.asarray(array).view() if array.flags.c_contiguous else _packed(array, name)
        packed.flags.writeable = False
        self.parameters[name] = packed
        self._touched.add(name)  # that it is given from now on may matter

    def changed(self, sentence: str) -> None:
        """Note a change."""
        self._changes.append(sentence)

    def exchange(self, number: int, definition: Node) -> None:
        """Put `definition` in the place of an operator that reads and writes the same blobs."""
        self._operators[number] = definition
        self._add_kind(definition.type)
        self._edited = True
        self._free.pop(number, None)

    def become(self, model: Model, changes: Iterable[str]) -> None:
        """Go on as another model, which somebody made of this draft's."""
        self._made = model
        self._changes += changes

    def settle(self, *, retyped: bool = False, same_types: bool = False) -> tuple[str, ...]:
        """End a pass: what it noted. Edits of a pass that noted no change are taken back.

        With `retyped` a blob may have another type than that of its name before; with `same_types` all have theirs.
        """
        changes = tuple(self._changes)
        if changes:
            self._go_on()
            if self.known is not None and not same_types:
                self.known.edited(() if retyped else self._writers.keys())
        elif self._edited or self._taken or self._made is not None:
            self._begin(self.model)
        return changes

    def _go_on(self) -> None:
        """Begin another pass with what the last one has made."""
        model = self._made or self._edited_model()
        for name in self._touched:
            if not self.is_single(name):
                self._irregular.add(name)
        if self._made is not None or self._places or self._irregular:
            self._begin(model)
            return
        self.model, self._program = model, model.program
        for name in self._touched:  # readers are in list order again
            row = self._readers.get(name, _NOBODY)
            if len(row) > 1:
                self._readers[name] = dict(sorted(row.items()))
        self._touched, self._left, self._taken, self._changes = set(), set(), set(), []
        self._edited = False

    def _edited_model(self) -> Model:
        self._let_go_of_unread()
        program = self._program.with_operators(self._operators[number] for number in self.numbers())
        if program.external_input:
            seen = {*program.external_input, *self.model.inputs}
            added = [name for name in self.parameters if name not in seen and name in self._readers]
            gone = {name for name in program.external_input if name not in self.model.inputs} - self._in_use()
            external = [name for name in program.external_input if name not in gone]
            if added or gone:
                program = program.with_external_input([*external, *added])
        parameters = successors(self.model.parameters, dict(self.parameters))
        return self.model.changed(net=program, parameters=parameters)

    def _let_go_of_unread(self) -> None:
        """Owned parameters whose readers have been replaced are gone."""
        before = owned(self.model.parameters)
        if before is None or not self._left:
            return
        init = self.model.init_program.op
        needed = {*self.outputs, *self._controls, *(name for definition in init for name in definition.input)}
        for name in self._left - needed:
            if name in self.parameters and not (name in self._readers or name in self._writers):
                before.let_go(name)
                del self.parameters[name]
        self._left.clear()

    def _in_use(self) -> set[str]:
        return self._readers.keys() | self.outputs | self._controls

    def _enter(self, number: int, definition: Node) -> None:
        self._add_kind(definition.type)
        _enter(self._readers, number, definition.input)
        _enter(self._writers, number, definition.output)
        self._forget(number, definition)

    def _add_kind(self, kind: str) -> None:
        if kind not in self._kinds:
            self._kinds.add(kind)
            self._traits = _traits(frozenset(map(schema_of, self._kinds)))

    def _leave(self, number: int) -> None:
        definition = self._operators[number]
        _leave(self._readers, number, definition.input)
        _leave(self._writers, number, definition.output)
        self._left.update(definition.input)
        self._forget(number, definition)

    def _forget(self, number: int, definition: Node) -> None:
        """Operator `number` has changed, and so has who writes its outputs: ask anew what is free."""
        self._edited = True
        self._touched.update(definition.input, definition.output)
        self._free.pop(number, None)
        for name in definition.output if self._free else ():
            readers, writers = self._readers.get(name, _NOBODY), self._writers.get(name, _NOBODY)
            if len(readers) + len(writers) > _MANY:
                self._free = {}
            for other in (*readers, *writers):
                self._free.pop(other, None)


@lru_cache(_KEPT)
def _traits(_schemas: frozenset[OpSchema]) -> dict[Trait, bool]:
    """Whether one of these has a trait, as far as somebody has asked: many nets are made of the same operator types."""
    return {}


Users = dict[str, dict[int, int]]
"""By blob that somebody uses, the operators that do, in the order they came, and how often each names it."""


def _enter(users: Users, number: int, names: Sequence[str]) -> None:
    for name in names:
        row = users.get(name)
        if row is None:
            users[name] = {number: 1}
        else:
            row[number] = row.get(number, 0) + 1


def _leave(users: Users, number: int, names: Sequence[str]) -> None:
    for name in names:
        row = users.get(name)
        if row is not None:
            row.pop(number, None)
            if not row:
                del users[name]


def _users(program: Program) -> tuple[Users, Users, set[str]]:
    """Who reads and who writes each blob, and the blobs that an operator reads before any writes them."""
    readers: Users = {}
    writers: Users = {}
    read_early: set[str] = set()
    for number, definition in enumerate(program.op):
        for name in definition.input:
            if name not in writers:
                read_early.add(name)
            row = readers.get(name)
            if row is None:
                readers[name] = {number: 1}
            else:
                row[number] = row.get(number, 0) + 1
        _enter(writers, number, definition.output)
    return readers, writers, read_early


_NOBODY: Mapping[int, int] = MappingProxyType({})


def _packed(array: Array, name: str) -> Array:
    return array.copy() if array.dtype.hasobject else packed_copy(array, f"parameter {name!r}")
