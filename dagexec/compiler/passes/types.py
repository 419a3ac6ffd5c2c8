"""What is known of blobs before a run: element types, ranks, and which sizes agree for every input a model takes.

A free axis of an input is one of any size. Shapes are inferred once with free axes at a small size and once more with
each of them changed, so a blob has a shape for each of these *probes*: a size that changes is unknown, and two blobs
have the same shape when they have it in all probes. Where several inputs have free axes, some are also larger than the
others in probes of their own, as operators that broadcast take that (one at a time; of more than 16 half of them, so
that of any two each is the larger in some probe); what others refuse there says nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from dagexec.compiler.passes.draft import Array
from dagexec.core.arguments import Arguments
from dagexec.core.dtypes import FLOAT32, TypeMeta, from_numpy
from dagexec.core.inference import infer_operators
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import OperatorDef
from dagexec.core.registry import schema_of
from dagexec.core.schema import TensorType
from dagexec.core.traits import LayerKind

_SPATIAL_SIZES = (224, 256)
_BATCH_SIZES = (1, 2)
_MAX_PROBED_ALONE = 16  # inputs


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


_last: tuple[weakref.ref[Model], Mapping[str, BlobType]] | None = None  # the passes after one that changed nothing ask


def _forget_last(gone: weakref.ref[Model]) -> None:
    """Let go of what is known of a model with the model."""
    global _last
    if _last is not None and _last[0] is gone:
        _last = None


def infer_types(model: Model) -> Mapping[str, BlobType]:
    """Types of the blobs that have one in every probe.

    A blob that is written several times has the type of its last value.
    """
    global _last
    known = _last
    if known is not None and known[0]() is model:
        return known[1]
    types = MappingProxyType(_infer(model))
    _last = weakref.ref(model, _forget_last), types
    return types


def keep_types(model: Model, changed: Model) -> None:
    """What is known of `model` is true of `changed`, which differs in engines and what types do not need."""
    global _last
    known = _last
    if known is not None and known[0]() is model:
        _last = weakref.ref(changed, _forget_last), known[1]


def _infer(model: Model) -> dict[str, BlobType]:
    fixed = {name: TensorType(tuple(a.shape), from_numpy(a.dtype)) for name, a in model.parameters.items()}
    first_readers = _first_readers(model)
    stated = {
        name: info for name in model.inputs if (info := _stated(model, name, first_readers.get(name))) is not None
    }
    calls = [(one, schema_of(one.type), Arguments(one, one.type)) for one in model.net.op]
    constants = {name: array for name, array in model.parameters.items() if name not in model.inputs}
    found = [infer_operators(calls, {**fixed, **probe}, constants) for probe in _probes(stated)]
    found += [infer_operators(calls, {**fixed, **probe}, constants, found[0]) for probe in _uneven_probes(stated)]
    types = {}
    for name, first in found[0].items():
        seen = [blobs.get(name) for blobs in found]
        shapes = tuple(kind.shape for kind in seen if kind is not None)
        same_rank = len(shapes) == len(seen) and len(set(map(len, shapes))) == 1
        if first is not None and same_rank:
            types[name] = BlobType(first.meta, shapes)
    return types


def _first_readers(model: Model) -> dict[str, OperatorDef]:
    """The first operator that reads each input of unknown shape."""
    found: dict[str, OperatorDef] = {}
    unknown = {name for name, info in model.inputs.items() if info.shape is None}
    if unknown:
        for definition in model.net.op:
            for name in unknown.intersection(definition.input):
                found.setdefault(name, definition)
    return found


def _stated(model: Model, name: str, reader: OperatorDef | None) -> InputInfo | None:
    """What the model says of an input, or what the filter or weights that `reader`, its first, applies to it tell."""
    info = model.inputs[name]
    if info.shape is not None:
        return InputInfo(info.dtype or FLOAT32, info.shape)
    if reader is None or reader.input[0] != name or schema_of(reader.type).layer is not LayerKind.CONVOLUTION:
        return None
    filters = model.parameters.get(reader.input[1])
    return None if filters is None else _convolved(filters, {argument.name: argument for argument in reader.arg})


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
