"""One number for several categories of a row, and rows over the root of how many they are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64, INT32, INT64
from dagexec.core.gradient import gradient_by, no_gradient
from dagexec.core.schema import OperatorCall, TensorType, first_to_first
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array


def infer_square_root_divide(call: OperatorCall) -> list[TensorType]:
    """As the data, with a number for each row."""
    call.require_types(0, FLOAT32, FLOAT64)
    call.require_types(1, FLOAT32, INT32, INT64)
    call.require_shape(1, call.inputs[0].shape[:1], "a number for each row")
    return [call.inputs[0]]


@array_function(
    "SquareRootDivide",
    infer=infer_square_root_divide,
    doc="Each row divided by the root of its number; rows whose number is not above 0 as they are.",
    input_names=("data", "scale"),
    output_names=("Y",),
    inplace=first_to_first,
)
def square_root_divide(_call: OperatorCall, data: Array, scale: Array) -> Sequence[Array]:
    """One division a row."""
    roots = np.sqrt(np.where(scale > 0, scale, 1).astype(data.dtype))
    return [data / roots.reshape(-1, *(1,) * (data.ndim - 1))]


def _ngram_tables(call: OperatorCall) -> list[tuple[int, dict[int, int]]]:
    """What the values of each column that counts add to the number. Raises ArgumentError for lists that do not fit."""
    columns, limits, values = (call.arguments.ints(name) for name in ("col_ids", "categorical_limits", "vals"))
    if len(columns) != len(limits) or not columns or min(limits) < 1 or sum(limits) != len(values):
        found = f"{len(columns)} columns, limits {list(limits)} and {len(values)} values"
        raise ArgumentError(f"{call.label}: expected a limit for each column and as many values; found {found}")
    tables, base, first = [], 1, 0
    for column, limit in zip(columns, limits, strict=True):
        tables.append((column, {value: place * base for place, value in enumerate(values[first : first + limit])}))
        base, first = base * limit, first + limit
    if base > np.iinfo(np.int32).max:
        raise ArgumentError(f"{call.label}: {base} combinations do not fit int32")
    return tables


def infer_ngram(call: OperatorCall) -> list[TensorType]:
    """A number for each row."""
    call.require_types(0, FLOAT32, FLOAT64, INT32, INT64)
    rows, width = call.require_rank(0, 2)
    for column, _ in _ngram_tables(call):
        if not 0 <= column < width:
            raise call.fail(f"'col_ids' must be in [0, {width}), found {column}")
    return [TensorType((rows,), INT32)]


@array_function(
    "NGramFromCategorical",
    infer=infer_ngram,
    doc="One number for the categories in several columns of a row: places of the values in their columns' lists, the "
    "first column's counting least. A value that is in no list counts as the first.",
    input_names=("floats",),
    output_names=("ngrams",),
    args={
        "col_ids": "the columns",
        "categorical_limits": "how many values each column may have",
        "vals": "these values, column by column",
    },
    required_args=("col_ids", "categorical_limits", "vals"),
)
def ngram_from_categorical(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Tables looked up."""
    found = np.zeros(len(x), np.int32)
    for column, table in _ngram_tables(call):
        found += np.array([table.get(int(value), 0) for value in x[:, column].tolist()], np.int32)
    return [found]


gradient_by("SquareRootDivide", "SquareRootDivide", ("dY", "X1"))
no_gradient("NGramFromCategorical")
