"""The operators whose schemas have a formula in float64, with arguments and inputs to try them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import dagexec.ops  # registers the operators  # noqa: F401
from dagexec.core.gradient import has_maker
from dagexec.core.node import arguments_of
from dagexec.core.registry import operator_module, registered_operators, schema_of
from dagexec.core.schema import UNBOUNDED, OpSchema
from dagexec.errors import ShapeError
from tests.ops.running import Array, operator_def, run_operator

Values = dict[str, Any]
MORE: dict[str, list[Values]] = {
    "LeakyRelu": [{"alpha": -0.5}, {"alpha": 0.0}, {"alpha": 3.0}],
    "Elu": [{"alpha": 0.0}],
    "Scale": [{"scale": -2.5}],
    "Clip": [{"min": 0.25}, {"max": 0.25}],
}
"""Arguments that matter, beside those that `_arguments` finds."""


def with_formulas() -> list[str]:
    """The types of the package's operators that have a formula."""
    return [
        name
        for name in registered_operators()
        if schema_of(name).formula is not None and operator_module(name).startswith("dagexec.ops.")
    ]


def _arguments(schema: OpSchema) -> list[Values]:
    """The defaults, and other numbers, each greater than the one before it."""
    defaults = schema.formula_defaults()
    others = {
        name: 1 - default if isinstance(default, int) else 0.5 + 0.75 * number
        for number, (name, default) in enumerate(defaults.items())
    }
    return [{}, others] if others else [{}]


def cases(types: Sequence[str]) -> list[Any]:
    """Parameters (op_type, arguments)."""
    return [
        pytest.param(name, values, id=f"{name} {values}" if values else name)
        for name in types
        for values in [*_arguments(schema_of(name)), *MORE.get(name, [])]
    ]


@cache
def takes(op_type: str, dtype: Any) -> bool:
    """True when an operator takes tensors of a type."""
    try:
        run_operator(op_type, [np.ones(2, dtype)] * arity(op_type))
    except ShapeError:
        return False
    return True


def arity(op_type: str) -> int:
    """With how many inputs an operator is tried: as many as it has, or three."""
    most = schema_of(op_type).inputs[1]
    return 3 if most == UNBOUNDED else most


def inputs(op_type: str, shape: int | tuple[int, ...], dtype: Any, seed: int = 0) -> list[Array]:
    """Numbers of a normal distribution for each input, and some in between that decide: 0, 1, NaN."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(arity(op_type)):
        x = rng.normal(0, 3, shape)
        if x.size > 100:
            x.flat[:6] = 0.0, -0.0, 1.0, -1.0, np.nan, 3.0
        found.append(x.astype(dtype))
    return found


def function(op_type: str, arguments: Values) -> Callable[..., Array]:
    """The formula with these arguments."""
    found = schema_of(op_type).function(arguments_of(operator_def(op_type, [], [], **arguments), op_type))
    assert found is not None
    return found


def expected(op_type: str, arguments: Values, arrays: Sequence[Array], dtype: Any = None) -> Array:
    """What the formula gives, rounded to the type of the inputs or to `dtype`."""
    kind = arrays[0].dtype if dtype is None else np.dtype(dtype)
    with np.errstate(all="ignore"):
        wide = [array.astype(np.float64) if array.dtype.kind in "fV" else array for array in arrays]
        found = np.asarray(function(op_type, arguments)(*wide))
        return found if found.dtype == bool else found.astype(kind)


def differentiable() -> list[str]:
    """Those that have a gradient."""
    return [name for name in with_formulas() if has_maker(name)]


def slopes(op_type: str, arguments: Values, arrays: Sequence[Array], position: int, step: float) -> list[Array]:
    """The difference quotients of the formula by one input: from below, from above, and between both sides."""
    formula = function(op_type, arguments)
    moved = [[array + side * step if i == position else array for i, array in enumerate(arrays)] for side in (-1, 0, 1)]
    with np.errstate(all="ignore"):
        low, middle, high = (np.asarray(formula(*values), np.float64) for values in moved)
        return [(middle - low) / step, (high - middle) / step, (high - low) / (2 * step)]


def smooth_inputs(op_type: str, arguments: Values, count: int, dtype: Any = np.float64) -> list[Array]:
    """Inputs of `count` elements in [-4, 4] where the formula has a derivative by each that a difference finds."""
    rng = np.random.default_rng(1)
    arrays = [rng.uniform(-4, 4, 20 * count).astype(dtype).astype(np.float64) for _ in range(arity(op_type))]
    kept = np.ones(20 * count, bool)
    for position in range(len(arrays)):
        below, above, _ = slopes(op_type, arguments, arrays, position, 1e-3)
        with np.errstate(invalid="ignore"):
            kept &= np.abs(above - below) < 0.05 * (1 + np.abs(above))
    assert kept.sum() >= count, f"{op_type} is smooth at {kept.sum()} of {kept.size} places"
    return [array[kept][:count].astype(dtype) for array in arrays]
