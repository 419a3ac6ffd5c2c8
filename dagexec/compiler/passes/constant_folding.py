"""constant-folding: operators on parameters alone are computed once, and their results become parameters.

Shapes that are known before a run are constants as well: `Shape` and `Size` of a blob without free axes. Conditional
on nothing but the values, as in Wegman and Zadeck 1991, "Constant propagation with conditional branches", without the
branches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from dagexec.compiler.passes.draft import Array, Draft
from dagexec.compiler.passes.rewriting import Pass
from dagexec.compiler.passes.types import BlobType
from dagexec.core.dtypes import from_numpy
from dagexec.core.evaluation import evaluated
from dagexec.core.purity import is_pure
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, OpSchema, TensorType
from dagexec.errors import DagexecError

GROWTH_BYTES = 1 << 20
"""A result may take so many bytes more than what it is computed from: repeating a constant in each run is cheaper."""

_SHAPED = frozenset({"Reshape", "Shape", "Size"})

MAX_SECONDS = 0.3
"""Nominal time (`Cost.seconds`) of all that is computed; what would take longer is left to the runs."""


def edit(draft: Draft) -> None:
    """Compute what depends on parameters alone, in list order, and give `Reshape` its shape as an argument."""
    types = draft.types() if draft.has(_asks_for_shapes) else {}
    seconds = 0.0
    for number, definition in draft.operators():
        kind = definition.type
        constant = draft.reads_constants(definition)
        if not (constant or kind in _SHAPED) or not draft.is_free(number):
            continue
        if kind == "Reshape" and len(definition.input) == 2:
            _shape_as_argument(draft, number)
        if draft.outputs.intersection(definition.output):
            continue
        if kind in ("Shape", "Size"):
            _fold_shape(draft, number, types)
        elif constant and is_pure(definition):
            needed = _seconds(draft, number)
            if seconds + needed <= MAX_SECONDS:
                seconds += needed
                _fold(draft, number)


def _asks_for_shapes(schema: OpSchema) -> bool:
    return schema.type in ("Shape", "Size")


def _fold(draft: Draft, number: int) -> None:
    definition = draft[number]
    try:
        results = evaluated(definition, draft.parameters)
    except Exception:  # whatever a step raises: a run says whose it is
        return
    _become_parameters(draft, number, results)


def _seconds(draft: Draft, number: int) -> float:
    """The nominal time to compute an operator; infinite when its results are unknown or too large to be kept."""
    definition, label = draft[number], draft.label(number)
    schema = schema_of(definition.type)
    arrays = {name: draft.parameters[name] for name in definition.input}
    values = tuple(arrays[name] for name in definition.input)
    if schema.infer is None or not schema.can_infer(definition):
        return math.inf
    try:
        kinds = tuple(TensorType(array.shape, from_numpy(array.dtype)) for array in values)
        call = OperatorCall(definition, draft.arguments(number), kinds, values, label)
        results = schema.infer(call)
        if sum(kind.nbytes for kind in results) > sum(array.nbytes for array in arrays.values()) + GROWTH_BYTES:
            return math.inf
        return schema.cost(call, results).seconds
    except (DagexecError, ArithmeticError):
        return math.inf


def _fold_shape(draft: Draft, number: int, types: Mapping[str, BlobType]) -> None:
    definition = draft[number]
    kind = types.get(definition.input[0])
    if kind is None or None in kind.shape:
        return
    sizes = [size for size in kind.shape if size is not None]
    if definition.type == "Size":
        _become_parameters(draft, number, [np.array(int(np.prod(sizes, dtype=np.int64)), np.int64)])
        return
    arguments = draft.arguments(number)
    axes = arguments.ints("axes") if "axes" in arguments else list(range(len(sizes)))
    _become_parameters(draft, number, [np.array([sizes[axis] for axis in axes], np.int64)])


def _become_parameters(draft: Draft, number: int, results: list[Array]) -> None:
    definition = draft[number]
    draft.changed(f"{draft.label(number)} is computed once")
    draft.remove(number)
    for name, array in zip(definition.output, results, strict=True):
        draft.add_parameter_named(name, array)


def _shape_as_argument(draft: Draft, number: int) -> None:
    definition = draft[number]
    shape = draft.constant(definition.input[1])
    if shape is None or shape.dtype.kind != "i" or shape.ndim > 1:
        return
    source, _, *others = definition.input
    changed = definition.changed(inputs=[source, *others], arguments={"shape": shape.reshape(-1).tolist()})
    draft.changed(f"{draft.label(number)} has its shape as an argument")
    draft.replace(number, changed)


PASS = Pass("constant-folding", "What depends on parameters alone is computed once.", edit)
