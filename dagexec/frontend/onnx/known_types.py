"""Types of tensors during conversion, as far as they follow from the model, for several sizes of open axes.

An operator that does not compute with the elements that it would get is found here, when its node can still become
another one. The model's declarations are compared with the same types (`declared_types`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress

from dagexec.core.dtypes import FLOAT32, STRING, TypeMeta, from_numpy
from dagexec.core.inference import Probed, probed_outputs
from dagexec.core.inferred_types import output_types, typing_form
from dagexec.core.model import InputInfo
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import ElementTypeError, OperatorCall, OpSchema, TensorType
from dagexec.core.shape_values import MAX_ELEMENTS, results_of
from dagexec.errors import DagexecError
from dagexec.frontend.onnx.initializers import Array

_FIRST, _OTHERS = ((1, 1), (2, 256)), ((1, 1), (1, 224), (2, 256))
"""Probes, as sizes of an open first axis and of other open axes: of models with open first axes alone, and of others.

Nearly everything can be computed with ones, the rest with images as large as that.
"""

Types = tuple[TensorType | None, ...]
"""The types of a tensor in each probe; None where it is unknown."""

Contents = tuple[Array | None, ...]


_KEPT = 1 << 12  # answers, and types


class _Answers:
    """Types of outputs by operator and types of inputs, for a number of probes; models have layers in common.

    Attributes:
        unknown: the types of an unknown tensor.
        one_of_each: types, so that equal ones are one object.
        made: answers, by form of the operator and identity of the types.
    """

    def __init__(self, probes: int) -> None:
        self.unknown: Types = (None,) * probes
        self.one_of_each: dict[Types, Types] = {self.unknown: self.unknown}
        self.made: dict[Hashable, Sequence[Types]] = {}


_answers: dict[int, _Answers] = {}


def _answers_in(probes: int) -> _Answers:
    answers = _answers.get(probes)
    if answers is None or max(len(answers.made), len(answers.one_of_each)) > _KEPT:
        answers = _answers[probes] = _Answers(probes)
    return answers


class KnownTypes:
    """Types by name, of inputs, constants, and results of operators.

    Attributes:
        texts: tensors that hold strings.
        untyped: tensors whose types were not known when they came into being.
    """

    def __init__(self, values: Mapping[str, Array], inputs: Mapping[str, InputInfo]) -> None:
        """`values` are constants, to which more may be added, and `inputs` the model's statements of its own."""
        probes = _probes(inputs.values())
        self._values = values
        self._probes = len(probes)
        answers = _answers_in(len(probes))
        self._unknown, self._one_of_each, self._made = answers.unknown, answers.one_of_each, answers.made
        self._types: dict[str, Types] = {}
        self._writers: dict[str, tuple[int, Node]] = {}  # with their number
        self._contents: dict[str, Contents] = {}  # of what operators compute
        self.texts: set[str] = set()
        self.untyped: set[str] = set()
        self.add_constants(values)
        for name, info in inputs.items():
            types: Types = self._unknown
            if info.shape is not None and not (info.is_sequence or info.is_optional):
                types = tuple([TensorType(_filled(info.shape, *sizes), info.dtype or FLOAT32) for sizes in probes])
            self._note(name, self._one_of_each.setdefault(types, types))

    def add_constants(self, values: Mapping[str, Array]) -> None:
        """Note which of these constants hold strings."""
        self.texts.update([name for name, array in values.items() if array.dtype.hasobject])

    def of(self, names: Iterable[str]) -> list[TensorType] | None:
        """The types of tensors where open sizes are 1, None unless all are known."""
        kinds = [self.in_probes(name)[0] for name in names]
        return [kind for kind in kinds if kind is not None] if None not in kinds else None

    def meta_of(self, name: str) -> TypeMeta | None:
        """The element type of a tensor, None unless it is known."""
        kind = _first(self.in_probes(name))
        return None if kind is None else kind.meta

    def in_probes(self, name: str) -> Types:
        """The types of a tensor: for open sizes of 1, and at the end for two sizes that differ, if there are any."""
        types = self._types.get(name)
        if types is None and (array := self._values.get(name)) is not None:
            types = (TensorType(tuple(array.shape), from_numpy(array.dtype)),) * self._probes
            types = self._one_of_each.setdefault(types, types)
            self._note(name, types)
        return types or self._unknown

    def follow(self, operators: Sequence[Node]) -> None:
        """Note the results of operators. Raises ElementTypeError for one that refuses the elements it would get."""
        for operator in operators:
            place = len(self._writers), operator
            for name, types in zip(operator.output, self.outputs(operator), strict=True):
                self._writers[name] = place
                self._note(name, types)

    def outputs(self, operator: Node) -> Sequence[Types]:
        """The types of its outputs, as far as they follow from those of its inputs. Raises as `follow`."""
        schema, types = schema_of(operator.type), self._types
        given = [types.get(name) or self.in_probes(name) for name in operator.input]
        read: dict[int, Contents] = {}
        values: Sequence[Array | None] = ()
        if schema.value_inputs:
            read = {index: self._contents_of(operator.input[index]) for index in schema.values_read(operator)}
            values = [read[index][0] if index in read else None for index in range(len(given))]
        is_even = not read or all(one is contents[0] for contents in read.values() for one in contents)
        form = typing_form(operator, schema, values) if is_even else None
        if form is None:
            return self._inferred(operator, schema, given, read)
        key = form, schema.infer, *map(id, given)
        answer = self._made.get(key)
        if answer is None:
            answer = self._made[key] = self._inferred(operator, schema, given, read)
        return answer

    def _note(self, name: str, types: Types) -> None:
        kind = types[0] or _first(types)
        if kind is None:
            self.untyped.add(name)
            return
        self._types[name] = types
        if kind.meta is STRING:
            self.texts.add(name)

    def _inferred(
        self, operator: Node, schema: OpSchema, given: Sequence[Types], read: Mapping[int, Contents]
    ) -> Sequence[Types]:
        nothing: Contents = (None,) * self._probes
        contents = [read.get(index) or self._constant(name) or nothing for index, name in enumerate(operator.input)]
        if schema.infer_bodies is not None:
            inputs = list(map(Probed, given, contents))
            outputs = probed_outputs(operator, inputs, self._probes, self._probes, is_asked=False)
            columns = [blob.types for blob in outputs]
        elif schema.infer is not None:
            columns = list(zip(*self._rows(operator, schema, given, contents), strict=True))
        else:
            columns = [self._unknown] * len(operator.output)
        return [self._one_of_each.setdefault(types, types) for types in columns]

    def _rows(
        self, operator: Node, schema: OpSchema, given: Sequence[Types], contents: Sequence[Contents]
    ) -> Iterable[Types]:
        """The types of outputs, probe by probe; all unknown where the operator refuses its inputs."""
        missing: Types = (None,) * len(operator.output)
        before = row = None
        for probe in range(self._probes):
            kinds = [types[probe] for types in given]
            values = [content[probe] for content in contents]
            seen = kinds, list(map(id, values))
            if row is None or seen != before:
                row = missing
                try:
                    if None not in kinds:
                        call = _call(operator, kinds, values)
                        row = (*output_types(call, schema), *missing)[: len(missing)]
                except ElementTypeError:
                    raise
                except DagexecError:
                    pass
            before = seen
            yield row

    def _constant(self, name: str) -> Contents | None:
        value = self._values.get(name)
        return None if value is None else (value,) * self._probes

    def _contents_of(self, name: str) -> Contents:
        """A tensor's content in each probe, as far as it is small and follows from shapes and constants."""
        contents = self._constant(name) or self._contents.get(name)
        if contents is None:
            for operator in self._sources(name):
                self._compute(operator)
            contents = self._contents.setdefault(name, (None,) * self._probes)
        return contents

    def _sources(self, name: str) -> Iterable[Node]:
        """The operators that a tensor's content follows from, in order, except those of known content."""
        operators: dict[int, Node] = {}
        waiting = [name]
        while waiting:
            name = waiting.pop()
            if name in self._contents or name in self._values or name not in self._writers:
                continue
            number, operator = self._writers[name]
            types = [kind for output in operator.output for kind in self.in_probes(output)]
            if number not in operators and any(kind is not None and kind.elements <= MAX_ELEMENTS for kind in types):
                operators[number] = operator
                if schema_of(operator.type).from_types is None:
                    waiting.extend(operator.input)
        return [operators[number] for number in sorted(operators)]

    def _compute(self, operator: Node) -> None:
        """Note the content of an operator's outputs; that of its inputs is known, if it can be."""
        nothing: Contents = (None,) * self._probes
        given = [self.in_probes(name) for name in operator.input]
        read = [self._constant(name) or self._contents.get(name, nothing) for name in operator.input]
        rows: list[Sequence[Array | None]] = []
        for probe in range(self._probes):
            row: Sequence[Array | None] = (None,) * len(operator.output)
            kinds = [types[probe] for types in given]
            types = [self.in_probes(name)[probe] for name in operator.output]
            if None not in (*kinds, *types):
                with suppress(DagexecError):
                    call = _call(operator, kinds, [contents[probe] for contents in read])
                    known = [kind for kind in types if kind is not None]
                    row = results_of(call, schema_of(operator.type), known) or row
            rows.append(row)
        self._contents.update(zip(operator.output, zip(*rows, strict=True), strict=False))


def _call(operator: Node, kinds: Sequence[TensorType | None], values: Sequence[Array | None]) -> OperatorCall:
    types = tuple([kind for kind in kinds if kind is not None])
    return OperatorCall(operator, operator.arguments(), types, tuple(values), operator.type)


def _first(types: Types) -> TensorType | None:
    return next(filter(None, types), None)


def _probes(inputs: Iterable[InputInfo]) -> Sequence[tuple[int, int]]:
    shapes = [info.shape for info in inputs if info.shape is not None]
    if any(None in shape[1:] for shape in shapes):
        return _OTHERS
    return _FIRST if any(None in shape for shape in shapes) else _FIRST[:1]


def _filled(shape: Sequence[int | None], first: int, other: int) -> tuple[int, ...]:
    return tuple([(other if axis else first) if size is None else size for axis, size in enumerate(shape)])
