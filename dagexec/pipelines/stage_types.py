"""Types where stages are connected: do they fit, and what follows from them for the outputs of a model.

Sizes that are open when a pipeline is built are tried: a model's types are inferred for two choices of them. A size of
an output that is the same both times counts as fixed, and one that is an open size both times as that one.
"""

from __future__ import annotations

from collections.abc import Mapping

from dagexec.core.dtypes import from_numpy
from dagexec.core.inference import infer_listed
from dagexec.core.model import Model
from dagexec.core.schema import TensorType
from dagexec.core.tensor_spec import Size, TensorSpec
from dagexec.errors import DagexecError

_MAX_ELEMENTS = 1 << 10
"""Of a parameter whose values shapes may depend on."""

_PROBES = ((64, 32), (288, 64))
"""The first and the step of sizes to try for open ones, in turn: multiples of 32, as nets halve images."""


def met(expected: TensorSpec, found: TensorSpec) -> TensorSpec | None:
    """What is known of a tensor that is as both say; None where both cannot be."""
    if expected.dtype is not None and found.dtype is not None and expected.dtype is not found.dtype:
        return None
    dtype = expected.dtype or found.dtype
    if expected.shape is None or found.shape is None:
        return TensorSpec(dtype, found.shape if expected.shape is None else expected.shape)
    if len(expected.shape) != len(found.shape):
        return None
    sizes = list(zip(expected.shape, found.shape, strict=True))
    if any(isinstance(one, int) and isinstance(other, int) and one != other for one, other in sizes):
        return None
    return TensorSpec(dtype, tuple(_more_precise(one, other) for one, other in sizes))


def _more_precise(expected: Size, found: Size) -> Size:
    if isinstance(expected, int) or found is None:
        return expected
    return found


def output_specs(model: Model, given: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """The types of a model's outputs where its inputs are as `given`; what does not follow is left open.

    Raises what inference raises for inputs that the model cannot take; only where all sizes are fixed, as others may
    do for some sizes.
    """
    unknown = {name: TensorSpec() for name in model.outputs}
    if any(spec.dtype is None or spec.shape is None for spec in given.values()):
        return unknown
    fixed, places = _numbered(given)
    if not places:
        return {name: _spec([kind], {}) for name, kind in _inferred(model, fixed, {}).items()}
    tried: list[tuple[dict[str, TensorType | None], dict[Size, int]]] = []
    for first, step in _PROBES:
        sizes: dict[Size, int] = {size: first + step * place for size, place in places.items()}
        try:
            tried.append((_inferred(model, fixed, sizes), sizes))
        except DagexecError:
            return unknown
    named = {tuple(sizes[size] for _, sizes in tried): size for size in places}
    return {name: _spec([found[name] for found, _ in tried], named) for name in model.outputs}


def _numbered(given: Mapping[str, TensorSpec]) -> tuple[dict[str, TensorSpec], dict[Size, int]]:
    """The types with a name for every open size, and these numbered; "?..." stand for nameless ones."""
    places: dict[Size, int] = {}
    shapes: dict[str, TensorSpec] = {}
    for name, spec in given.items():
        sizes: list[Size] = []
        for axis, size in enumerate(spec.shape or ()):
            label = f"_open_{len(places)}_{axis}" if size is None else size
            if isinstance(label, str):
                places.setdefault(label, len(places))
            sizes.append(label)
        shapes[name] = TensorSpec(spec.dtype, tuple(sizes))
    return shapes, places


def _inferred(model: Model, given: Mapping[str, TensorSpec], sizes: Mapping[Size, int]) -> dict[str, TensorType | None]:
    types: dict[str, TensorType] = {}
    contents = {}
    for name, array in model.parameters.items():
        types[name] = TensorType(tuple(array.shape), from_numpy(array.dtype))
        if array.size <= _MAX_ELEMENTS:
            contents[name] = array
    named = {size: number for size, number in sizes.items() if isinstance(size, str)}
    for name, spec in given.items():
        shape = spec.sizes_with(named)
        assert shape is not None
        assert spec.dtype is not None
        types[name] = TensorType(shape, spec.dtype)
    found = infer_listed(model.name, model.program.op, types, contents).blobs
    return {name: found.get(name) for name in model.outputs}


def _spec(kinds: list[TensorType | None], named: Mapping[tuple[int, ...], Size]) -> TensorSpec:
    known = [kind for kind in kinds if kind is not None]
    if len(known) < len(kinds) or len({(kind.meta, len(kind.shape)) for kind in known}) != 1:
        return TensorSpec()
    sizes: list[Size] = []
    for column in zip(*(kind.shape for kind in known), strict=True):
        name = named.get(column)
        open_size = None if isinstance(name, str) and name.startswith("_open_") else name
        sizes.append(column[0] if len(set(column)) == 1 else open_size)
    return TensorSpec(known[0].meta, tuple(sizes))
