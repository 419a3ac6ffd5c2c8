"""What is known of blobs before a run: element types, ranks, and which sizes agree for every input a model takes.

A free axis of an input is one of any size. Shapes are inferred once with free axes at a small size and once more with
each of them changed, so a blob has a shape for each of these *probes*: a size that changes is unknown, and two blobs
have the same shape when they have it in all probes. Where several inputs have free axes, some are also larger than the
others in probes of their own, as operators that broadcast take that (one at a time; of more than 16 half of them, so
that of any two each is the larger in some probe); what others refuse there says nothing.

Shapes may depend on values that follow from shapes, and such values are computed for each probe (`core.shape_values`).
They need not be sums and products of sizes: padding to a multiple of 8 adds nothing to 224 or 256. So nets that ask for
shapes are also probed at odd sizes, small and large ones.

A size that values decide, of which an operator says where it stands (`OpSchema.counted`), is a free one, too: 1 in the
first probe, and in the others a number that is no other operator's.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32, TypeMeta, from_numpy
from dagexec.core.inference import Probed, probed_outputs
from dagexec.core.inferred_types import MIN_WEIGHT_BYTES
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.core.shape_values import asked_operators
from dagexec.core.traits import LayerKind
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_SPATIAL_SIZES = (224, 256)
_BATCH_SIZES = (1, 2)
_ODD_SIZES = ((3, 225), (5, 1031))
"""Of a first axis, and of others: no multiples of what others or windows are, below and above common limits."""

_MAX_PROBED_ALONE = 16  # inputs

_FIRST_COUNT = 10007
"""Of the sizes that values decide, in probes but the first: larger than others, so that they are equal to none."""


@dataclass(frozen=True)
class BlobType:
    """The element type of a blob, and its shape in each probe, all of one rank."""

    meta: TypeMeta
    shapes: tuple[tuple[int, ...], ...]

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shapes[0])

    @property
    def shape(self) -> tuple[int | None, ...]:
        """The sizes, None for one that depends on the inputs' free axes."""
        return tuple(sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*self.shapes, strict=True))

    def broadcasts_to(self, other: BlobType) -> bool:
        """True when a tensor of this shape stretches to `other`'s by NumPy's rule, and `other`'s stays as it is."""
        return self.shapes == other.shapes or all(
            _stretches(own, wide) for own, wide in zip(self.shapes, other.shapes, strict=True)
        )


def _stretches(shape: tuple[int, ...], wide: tuple[int, ...]) -> bool:
    aligned = wide[len(wide) - len(shape) :] if len(shape) <= len(wide) else None
    return aligned is not None and all(own in (1, size) for own, size in zip(shape, aligned, strict=True))


class KnownTypes:
    """What is known of the blobs of a net under edit, found when it is first asked for and again after an edit.

    An operator's outputs follow from its form and what is known of its inputs, so that one is asked once for all that
    are alike; those of an operator that replaced others may be known by their names.
    """

    def __init__(self, model: Model) -> None:
        stated = _stated_inputs(model)
        even, uneven = _probes(stated), _uneven_probes(stated)
        if len(even) == 1 and any(schema_of(one.type).counted for one in model.program.op):
            even *= 2  # a size that values decide is not the same in all of them
        odd = _odd_probes(stated) if any(schema_of(one.type).from_types for one in model.program.op) else []
        probes = [*even, *uneven, *odd]
        self._probes = len(probes)
        self._even = len(even)  # behind these, operators may refuse their inputs
        self._unknown = Probed.of_types((None,) * len(probes))
        names = {name: None for probe in probes for name in probe}
        self._inputs = {name: Probed.of_types(probe.get(name) for probe in probes) for name in names}
        self._parameters: dict[str, Probed] = {}
        self._made: dict[Hashable, list[Probed]] = {}
        self._outputs: dict[str, Probed] = {}
        self._counted: dict[str, tuple[Sequence[Probed], list[Probed]]] = {}
        self._types: dict[Probed, BlobType | None] = {}
        self._kinds: dict[Probed, Probed] = {}  # for each the first that is of the same types
        self._firsts: dict[tuple[TensorType | None, ...], Probed] = {}
        self._blobs: Mapping[str, BlobType] | None = None

    def copy(self) -> KnownTypes:
        """The same for another net that is made of this one."""
        made = copy(self)
        made._outputs, made._parameters = dict(self._outputs), dict(self._parameters)
        return made

    def edited(self, written: Collection[str] = ()) -> None:
        """The net has changed. Outputs called as those `written` are of the types that they had before."""
        self._outputs = {name: known for name, known in self._outputs.items() if name in written}
        self._blobs = None

    def types(self, model: Model) -> Mapping[str, BlobType]:
        """Types of the blobs of the net that have one in every probe."""
        if self._blobs is None:
            self._blobs = MappingProxyType(self._inferred(model))
        return self._blobs

    def _inferred(self, model: Model) -> dict[str, BlobType]:
        self._parameters = parameters = {name: self._parameter(name, array) for name, array in model.parameters.items()}
        fed = {name: Probed.of_types(parameters[name].types) for name in model.inputs if name in parameters}
        blobs = {**parameters, **fed, **self._inputs}
        operators = model.program.op
        schemas = [schema_of(definition.type) for definition in operators]
        asked = asked_operators(operators, schemas) if any(one.value_inputs for one in set(schemas)) else ()
        names = [name for definition in operators for name in definition.output]
        written = set(names)
        before = self._outputs
        outputs: dict[str, Probed] = {}
        known_before: set[str] = set()
        if len(written) == len(names) and written.isdisjoint(blobs):  # a name is a blob of one type
            outputs = {name: before[name] for name in names if name in before}
            known_before = {name for name, known in outputs.items() if None not in known.types}
            blobs |= outputs
        for index, (definition, schema) in enumerate(zip(operators, schemas, strict=True)):
            is_asked = index in asked
            if not is_asked and known_before.issuperset(definition.output):
                continue
            inputs = [blobs.get(name, self._unknown) for name in definition.input]
            made = self._outputs_of(definition, schema, inputs, is_asked)
            for name, known in zip(definition.output, made, strict=True):
                blobs[name] = outputs[name] = known
        self._outputs = outputs
        found: dict[str, BlobType] = {}
        types = self._types
        for name, known in blobs.items():
            kind = types[known] if known in types else self._type(known)
            if kind is not None:
                found[name] = kind
        return found

    def _outputs_of(
        self, definition: Node, schema: OpSchema, inputs: Sequence[Probed], is_asked: bool
    ) -> Sequence[Probed]:
        exact = is_asked or schema.value_inputs or schema.sub_nets
        seen = tuple(inputs) if exact else tuple([self._kinds.get(one) or self._kind(one) for one in inputs])
        form = definition.form, is_asked, seen
        made = self._made.get(form)
        if made is None:
            told = self._told(definition.output, is_asked)
            if told is not None:
                return told
            made = probed_outputs(definition, inputs, self._probes, self._even, is_asked=is_asked)
            self._made[form] = made
        return self._with_counts(definition, schema, inputs, made)

    def _with_counts(
        self, definition: Node, schema: OpSchema, inputs: Sequence[Probed], made: Sequence[Probed]
    ) -> Sequence[Probed]:
        """What is known of outputs with a size that values decide; `made` where these are constants."""
        counted = schema.counted
        if counted is None:
            return made
        before, found = self._counted.get(definition.output[0], ((), []))
        if any(None in one.types for one in inputs) or all(None not in one.types for one in made):
            return made
        if list(before) != list(inputs):
            first = _FIRST_COUNT + self._probes * len(self._counted)
            columns = zip(*[one.types for one in inputs], strict=True)
            unread = (None,) * len(inputs)
            rows = [
                counted(
                    OperatorCall(definition, definition.arguments(), types, unread, definition.type),
                    first + probe if probe else 1,
                )
                for probe, types in enumerate(columns)
            ]
            found = [Probed.of_types(column) for column in zip(*rows, strict=True)]
            self._counted[definition.output[0]] = list(inputs), found
        return found

    def _told(self, names: Sequence[str], is_asked: bool) -> list[Probed] | None:
        """What is known of outputs by their names, if their types are, and their contents where those are asked for."""
        found = [known for name in names if (known := self._outputs.get(name)) is not None and None not in known.types]
        is_enough = not is_asked or all(content is not None for known in found for content in known.contents)
        return found if is_enough and len(found) == len(names) else None

    def _parameter(self, name: str, array: Array) -> Probed:
        known = self._parameters.get(name)
        if known is not None and known.contents[0] is array:
            return known
        if array.dtype.kind == "f" and array.nbytes >= MIN_WEIGHT_BYTES:
            meta, shape = from_numpy(array.dtype), array.shape
            kind = None if known is None else known.types[0]
            if known is not None and kind is not None and kind.meta is meta and kind.shape == shape:
                return known
            return Probed.of_types((TensorType(tuple(shape), meta),) * self._probes)
        return Probed.of_constant(array, self._probes)

    def _type(self, known: Probed) -> BlobType | None:
        first = self._kinds.get(known) or self._kind(known)
        if first not in self._types:
            self._types[first] = blob_type(first.types)
        kind = self._types[known] = self._types[first]
        return kind

    def _kind(self, known: Probed) -> Probed:
        first = self._kinds[known] = self._firsts.setdefault(known.types, known)
        return first


def blob_type(probed: Sequence[TensorType | None]) -> BlobType | None:
    """The type of a blob that has one, of one rank, in every probe."""
    shapes = tuple(kind.shape for kind in probed if kind is not None)
    first = probed[0]
    if first is None or len(shapes) < len(probed) or len(set(map(len, shapes))) > 1:
        return None
    return BlobType(first.meta, shapes)


def infer_types(model: Model) -> Mapping[str, BlobType]:
    """Types of the blobs that have one in every probe.

    A blob that is written several times has the type of its last value.
    """
    return KnownTypes(model).types(model)


def _stated_inputs(model: Model) -> dict[str, InputInfo]:
    readers = _first_readers(model)
    return {name: info for name in model.inputs if (info := _stated(model, name, readers.get(name))) is not None}


def _first_readers(model: Model) -> dict[str, Node]:
    """The first operator that reads each input of unknown shape."""
    found: dict[str, Node] = {}
    unknown = {name for name, info in model.inputs.items() if info.shape is None}
    if unknown:
        for definition in model.program.op:
            for name in unknown.intersection(definition.input):
                found.setdefault(name, definition)
    return found


def _stated(model: Model, name: str, reader: Node | None) -> InputInfo | None:
    """What the model says of an input, or what the filter or weights that `reader`, its first, applies to it tell."""
    info = model.inputs[name]
    if info.shape is not None:
        return InputInfo(info.dtype or FLOAT32, info.shape)
    if reader is None or reader.input[0] != name or schema_of(reader.type).layer is not LayerKind.CONVOLUTION:
        return None
    filters = model.parameters.get(reader.input[1])
    return None if filters is None else _convolved(filters, reader.values)


def _convolved(filters: Array, arguments: Mapping[str, object]) -> InputInfo | None:
    """An image of any size with as many channels as a filter M, C/1, kernel in NCHW reads."""
    if filters.ndim < 3 or "order" in arguments or "group" in arguments:
        return None
    return InputInfo(from_numpy(filters.dtype), (None, filters.shape[1], *(None,) * (filters.ndim - 2)))


def _probes(inputs: Mapping[str, InputInfo]) -> list[dict[str, TensorType]]:
    """Types of the inputs: free axes at a first size, then each axis at a second one, the same for all inputs."""
    axes = sorted({axis for info in inputs.values() for axis, size in enumerate(info.shape or ()) if size is None})
    return [
        {name: TensorType(_filled(info.shape or (), changed), info.dtype or FLOAT32) for name, info in inputs.items()}
        for changed in (None, *axes)
    ]


def _uneven_probes(inputs: Mapping[str, InputInfo]) -> list[dict[str, TensorType]]:
    """Types of the inputs: the free axes of some at the second size, and those of all others at 1."""
    free = [name for name, info in inputs.items() if None in (info.shape or ())]
    return [
        {
            name: TensorType(
                _filled(info.shape or (), *range(len(info.shape or ())))
                if name in large
                else tuple(1 if size is None else size for size in info.shape or ()),
                info.dtype or FLOAT32,
            )
            for name, info in inputs.items()
        }
        for large in _told_apart(free)
    ]


def _odd_probes(inputs: Mapping[str, InputInfo]) -> list[dict[str, TensorType]]:
    """Types of the inputs where free axes, if there are any, have odd sizes, the same for all inputs."""
    if all(None not in (info.shape or ()) for info in inputs.values()):
        return []
    return [
        {
            name: TensorType(
                tuple(sizes[axis > 0] if size is None else size for axis, size in enumerate(info.shape or ())),
                info.dtype or FLOAT32,
            )
            for name, info in inputs.items()
        }
        for sizes in _ODD_SIZES
    ]


def _told_apart(names: Sequence[str]) -> list[set[str]]:
    """Sets of names so that of any two there is one with the first alone: each of a few, by binary number of many."""
    if len(names) <= _MAX_PROBED_ALONE:
        return [{name} for name in names] if len(names) > 1 else []
    sets = []
    for digit in range((len(names) - 1).bit_length()):
        ones = {name for number, name in enumerate(names) if number >> digit & 1}
        sets += [ones, set(names) - ones]
    return sets


def _filled(shape: tuple[int | None, ...], *changed: int | None) -> tuple[int, ...]:
    return tuple(
        (_SPATIAL_SIZES if axis > 1 else _BATCH_SIZES)[axis in changed] if size is None else size
        for axis, size in enumerate(shape)
    )
