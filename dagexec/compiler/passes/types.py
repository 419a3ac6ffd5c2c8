"""What is known of blobs before a run: element types, ranks, and which sizes agree for every input a model takes.

A free axis of an input is one of any size. Shapes are inferred once with free axes at a small size and once more with
each of them changed, so a blob has a shape for each of these *probes*: a size that changes is unknown, and two blobs
have the same shape when they have it in all probes. Where several inputs have free axes, some are also larger than the
others in probes of their own, as operators that broadcast take that (one at a time; of more than 16 half of them, so
that of any two each is the larger in some probe); what others refuse there says nothing.

Shapes may depend on values that follow from shapes, and such values are computed for each probe (`core.shape_values`).
They need not be sums and products of sizes: padding to a multiple of 8 adds nothing to 224 or 256. So nets that ask for
shapes are also probed at odd sizes, small and large ones.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32, TypeMeta, from_numpy
from dagexec.core.inference import Probed, probed_outputs
from dagexec.core.model import InputInfo, Model
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import TensorType
from dagexec.core.shape_values import asked_operators
from dagexec.core.traits import LayerKind
from dagexec.platform.records import dataclass

Array = npt.NDArray[Any]

_SPATIAL_SIZES = (224, 256)
_BATCH_SIZES = (1, 2)
_ODD_SIZES = ((3, 225), (5, 1031))
"""Of a first axis, and of others: no multiples of what others or windows are, below and above common limits."""

_MAX_PROBED_ALONE = 16  # inputs

_MIN_WEIGHT_BYTES = 1 << 14
"""Of so many bytes of floats only the type counts: no shape depends on weights, and nothing keeps them from going."""


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
        return all(_stretches(own, wide) for own, wide in zip(self.shapes, other.shapes, strict=True))


def _stretches(shape: tuple[int, ...], wide: tuple[int, ...]) -> bool:
    aligned = wide[len(wide) - len(shape) :] if len(shape) <= len(wide) else None
    return aligned is not None and all(own in (1, size) for own, size in zip(shape, aligned, strict=True))


class _Inference:
    """What was inferred for one set of probes, and is asked again after an operator or another was rewritten.

    An operator's outputs are known by the operator and the identity of what is known of its inputs, or by their names.
    """

    def __init__(self, probes: Sequence[Mapping[str, TensorType]], even: int) -> None:
        """`probes` are types of the inputs; behind the first `even` ones operators may refuse theirs."""
        self.probes = probes
        self._even = even
        self._unknown = Probed.of_types((None,) * len(probes))
        names = {name: None for probe in probes for name in probe}
        self._inputs = {name: Probed.of_types(probe.get(name) for probe in probes) for name in names}
        self._parameters: dict[str, Probed] = {}
        self._operators: dict[Node, _Inferred] = {}
        self._outputs: dict[str, Probed] = {}
        self._types: dict[Probed, BlobType | None] = {}

    def forget_outputs(self, written: Collection[str] = ()) -> None:
        """Outputs of operators no longer have the types that they had under their names, but for those `written`."""
        self._outputs = {name: known for name, known in self._outputs.items() if name in written}

    def types(self, model: Model) -> dict[str, BlobType]:
        """Types of the blobs of a model that have one in every probe."""
        before, self._operators = self._operators, {}
        parameters = {name: self._parameter(name, array) for name, array in model.parameters.items()}
        self._parameters = parameters
        fed = {name: Probed.of_types(parameters[name].types) for name in model.inputs if name in parameters}
        blobs = {**parameters, **fed, **self._inputs}
        outputs: dict[str, Probed] = {}
        operators = model.program.op
        asked = asked_operators(operators, [schema_of(definition.type) for definition in operators])
        for index, definition in enumerate(operators):
            known = self._operators[definition] = before.get(definition) or _Inferred()
            inputs = tuple([blobs.get(name, self._unknown) for name in definition.input])
            is_asked = index in asked
            if known.read != inputs or is_asked > known.is_asked:
                known.read, known.is_asked = inputs, is_asked
                known.made = self._told(definition.output, is_asked) or self._probed(definition, inputs, is_asked)
            made = dict(zip(definition.output, known.made, strict=True))
            blobs.update(made)
            outputs.update(made)
        self._outputs = outputs
        return {name: kind for name, known in blobs.items() if (kind := self._type(known)) is not None}

    def _told(self, names: Sequence[str], is_asked: bool) -> list[Probed] | None:
        """What is known of outputs by their names, if their types are, and their contents where those are asked for."""
        found = [known for name in names if (known := self._outputs.get(name)) is not None and None not in known.types]
        is_enough = not is_asked or all(content is not None for known in found for content in known.contents)
        return found if is_enough and len(found) == len(names) else None

    def _probed(self, definition: Node, inputs: Sequence[Probed], is_asked: bool) -> list[Probed]:
        return probed_outputs(definition, inputs, len(self.probes), self._even, is_asked=is_asked)

    def _parameter(self, name: str, array: Array) -> Probed:
        known = self._parameters.get(name)
        if array.dtype.kind == "f" and array.nbytes >= _MIN_WEIGHT_BYTES:
            kind = TensorType(tuple(array.shape), from_numpy(array.dtype))
            return (
                known if known is not None and known.types[0] == kind else Probed.of_types((kind,) * len(self.probes))
            )
        if known is not None and known.contents[0] is array:
            return known
        return Probed.of_constant(array, len(self.probes))

    def _type(self, known: Probed) -> BlobType | None:
        if known not in self._types:
            self._types[known] = blob_type(known.types)
        return self._types[known]


class _Inferred:
    """What an operator was found to make of what it `read`.

    Contents of outputs were looked for if it `is_asked` for them.
    """

    __slots__ = ("is_asked", "made", "read")

    def __init__(self) -> None:
        self.read: tuple[Probed, ...] | None = None
        self.is_asked = False
        self.made: Sequence[Probed] = ()


def blob_type(probed: Sequence[TensorType | None]) -> BlobType | None:
    """The type of a blob that has one, of one rank, in every probe."""
    shapes = tuple(kind.shape for kind in probed if kind is not None)
    first = probed[0]
    if first is None or len(shapes) < len(probed) or len(set(map(len, shapes))) > 1:
        return None
    return BlobType(first.meta, shapes)


@dataclass(frozen=True)
class _Known:
    """What is known of the model that was asked about last, and lets go of it with the model.

    Attributes:
        types: None where the model was rewritten since.
    """

    model: weakref.ref[Model]
    inference: _Inference
    types: Mapping[str, BlobType] | None


_last: _Known | None = None


def _forget_last(gone: weakref.ref[Model]) -> None:
    global _last
    if _last is not None and _last.model is gone:
        _last = None


def infer_types(model: Model) -> Mapping[str, BlobType]:
    """Types of the blobs that have one in every probe.

    A blob that is written several times has the type of its last value.
    """
    known = _known_of(model)
    if known is not None and known.types is not None:
        return known.types
    stated = _stated_inputs(model)
    even, uneven = _probes(stated), _uneven_probes(stated)
    odd = _odd_probes(stated) if any(schema_of(one.type).from_types for one in model.program.op) else []
    probes = [*even, *uneven, *odd]
    reuse = known is not None and known.inference.probes == probes
    inference = known.inference if known is not None and reuse else _Inference(probes, len(even))
    return _remember(model, inference, MappingProxyType(inference.types(model)))


def keep_types(model: Model, changed: Model) -> None:
    """What is known of `model` is true of `changed`, which differs in engines and what types do not need."""
    known = _known_of(model)
    if known is not None and known.types is not None:
        _remember(changed, known.inference, known.types)


def keep_inference(model: Model, changed: Model, retyped: bool) -> None:
    """What was inferred of operators of `model` is asked again for `changed`, which has most of them.

    `retyped`: a blob of `changed` may have another type than that of its name in `model`.
    """
    global _last
    known = _known_of(model)
    if known is None or changed is model:
        return
    written = () if retyped else {name for definition in changed.program.op for name in definition.output}
    known.inference.forget_outputs(written)
    _last = _Known(weakref.ref(changed, _forget_last), known.inference, None)


def forget_types() -> None:
    """Let go of what was inferred, and of the constants that it was inferred from."""
    global _last
    _last = None


@contextmanager
def other_models() -> Iterator[None]:
    """Within it, what is known of a model is kept while others are asked about: those of its bodies."""
    global _last
    kept = _last
    try:
        yield
    finally:
        _last = kept


def _known_of(model: Model) -> _Known | None:
    known = _last
    return known if known is not None and known.model() is model else None


def _remember(model: Model, inference: _Inference, types: Mapping[str, BlobType]) -> Mapping[str, BlobType]:
    global _last
    _last = _Known(weakref.ref(model, _forget_last), inference, types)
    return types


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
