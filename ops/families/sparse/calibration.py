"""Features mapped by pieces: BisectPercentile, PiecewiseLinearTransform, BatchBucketOneHot; and Quantile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import no_gradient
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array

_TABLES = ("percentile_raw", "percentile_mapping", "percentile_lower", "percentile_upper")


def infer_bisect_percentile(call: OperatorCall) -> list[TensorType]:
    """As X. Raises ArgumentError for tables that do not fit."""
    call.require_types(0, FLOAT32)
    columns = call.require_rank(0, 2)[1]
    lengths = call.arguments.ints("lengths")
    if len(lengths) != columns or any(length < 1 for length in lengths):
        raise ArgumentError(f"{call.label}: 'lengths' must be how many values each of {columns} columns has")
    for name in _TABLES:
        if len(call.arguments.floats(name)) != sum(lengths):
            raise ArgumentError(f"{call.label}: {name!r} must have {sum(lengths)} numbers, as 'lengths' says")
    return [call.inputs[0]]


def _parts(values: Sequence[float], lengths: Sequence[int]) -> Iterator[Array]:
    numbers = iter(values)
    for length in lengths:
        yield np.asarray(list(itertools.islice(numbers, length)))


@array_function(
    "BisectPercentile",
    infer=infer_bisect_percentile,
    doc="Percentiles of each column's values by a table: of values in the table those of the mapping, between two of "
    "them a line from upper to lower, 0 below the first and 1 above the last.",
    input_names=("X",),
    output_names=("percentiles",),
    args={
        "percentile_raw": "values in rising order, those of each column after another",
        "percentile_mapping": "the percentile of each",
        "percentile_lower": "to which the line from the value before leads",
        "percentile_upper": "from which the line to the next value comes",
        "lengths": "how many values each column has",
    },
    required_args=(*_TABLES, "lengths"),
)
def bisect_percentile(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Column by column, in float64."""
    found = np.empty(x.shape)
    lengths = call.arguments.ints("lengths")
    tables = zip(*(_parts(call.arguments.floats(name), lengths) for name in _TABLES), strict=True)
    for column, (raw, mapping, lower, upper) in enumerate(tables):
        values = x[:, column].astype(np.float64)
        place = (np.searchsorted(raw, values, "right") - 1).clip(0)
        behind = (place + 1).clip(None, len(raw) - 1)
        span = np.where(behind > place, raw[behind] - raw[place], 1)
        line = upper[place] + (values - raw[place]) / span * (lower[behind] - upper[place])
        result = np.where(values == raw[place], mapping[place], line)
        found[:, column] = np.where(values < raw[0], 0, np.where(values > raw[-1], 1, result))
    return [found]


def infer_piecewise_linear(call: OperatorCall) -> list[TensorType]:
    """As X. Raises ArgumentError for pieces that do not fit."""
    call.require_types(0, FLOAT32)
    shape = call.inputs[0].shape
    if len(shape) not in (1, 2):
        raise call.fail(f"expected rows of predictions, found shape {shape}")
    columns = shape[1] if len(shape) == 2 else 1
    binary = call.arguments.bool("binary")
    if binary and columns > 2:
        raise call.fail(f"with binary=1 a row has one prediction or two, found {columns}")
    groups = 1 if binary else columns
    if len(call.inputs) not in (1, 4):
        raise call.fail("bounds, slopes and intercepts are three inputs, or arguments")
    given = [kind.elements for kind in call.inputs[1:]]
    bounds, slopes, intercepts = given or [len(call.arguments.floats(name)) for name in _LINES]
    if slopes < 1 or (intercepts, bounds - slopes) != (slopes, groups) or slopes % groups:
        found = f"{bounds} bounds, {slopes} slopes, {intercepts} intercepts"
        raise ArgumentError(f"{call.label}: expected as many slopes as intercepts, {groups} bounds more; found {found}")
    return [call.inputs[0]]


_LINES = ("bounds", "slopes", "intercepts")


@array_function(
    "PiecewiseLinearTransform",
    inputs=(1, 4),
    infer=infer_piecewise_linear,
    doc="Each column mapped by lines between bounds, beyond which it is what it is there. With binary=1 the second "
    "column is mapped, and the first is 1 less that.",
    input_names=("predictions", *_LINES),
    output_names=("transforms",),
    args={
        "bounds": "in rising order, one more than slopes, those of each column after another",
        "slopes": "of each piece; all columns have as many",
        "intercepts": "of each piece",
        "binary": "1: the two columns are of one prediction (default 0)",
    },
    unread_args=("pieces",),
)
def piecewise_linear(call: OperatorCall, x: Array, *lines: Array) -> Sequence[Array]:
    """Column by column, in float64."""
    given = lines or [np.asarray(call.arguments.floats(name)) for name in _LINES]
    groups = len(given[0].reshape(-1)) - len(given[1].reshape(-1))
    tables = zip(*(one.astype(np.float64).reshape(groups, -1) for one in given), strict=True)
    rows = x.reshape(len(x), -1) if x.ndim == 2 else x[:, None]
    found = np.empty(rows.shape)
    for column, (bounds, slopes, intercepts) in enumerate(tables):
        place = column - 1 if call.arguments.bool("binary") else column  # the last one of a binary prediction
        values = rows[:, place].astype(np.float64).clip(bounds[0], bounds[-1])
        piece = (np.searchsorted(bounds, values, "left") - 1).clip(0)
        found[:, place] = slopes[piece] * values + intercepts[piece]
    if call.arguments.bool("binary") and rows.shape[1] == 2:
        found[:, 0] = 1 - found[:, 1]
    return [found]


def infer_bucket_one_hot(call: OperatorCall) -> list[TensorType]:
    """A column for each bucket of each column."""
    call.require_types(0, FLOAT32)
    call.require_same_type(0, 2)
    rows, columns = call.require_rank(0, 2)
    call.require_shape(1, (columns,), "how many boundaries each column has")
    lengths = call.known_value(1)
    if (lengths < 0).any():
        raise call.fail(f"lengths must not be negative, found {lengths.tolist()}")
    call.require_shape(2, (int(lengths.sum()),), "the boundaries of all columns")
    return [TensorType((rows, int(lengths.sum()) + columns), FLOAT32)]


@array_function(
    "BatchBucketOneHot",
    infer=infer_bucket_one_hot,
    doc="For each column as many places as it has buckets, 1 at that of its value: a bucket ends at its boundary.",
    input_names=("X", "lengths", "boundaries"),
    output_names=("Y",),
    value_inputs=(1,),
)
def bucket_one_hot(_call: OperatorCall, x: Array, lengths: Array, boundaries: Array) -> Sequence[Array]:
    """Column by column."""
    parts = []
    for column, own in zip(x.T, np.split(boundaries, np.cumsum(lengths)[:-1]), strict=True):
        parts.append(np.searchsorted(own, column, "left")[:, None] == np.arange(len(own) + 1))
    return [np.concatenate(parts, 1) if parts else np.zeros((len(x), 0))]


def infer_quantile(call: OperatorCall) -> list[TensorType]:
    """One number. Raises ArgumentError for a quantile outside of [0, 1]."""
    meta = call.require_same_type()
    call.require_types(0, FLOAT32, FLOAT64)
    call.arguments.bool("abs", True)
    quantile, tolerance = call.arguments.float("quantile", -1.0), call.arguments.float("tol", 1e-3)
    if not 0 <= quantile <= 1 or not tolerance > 0:
        raise ArgumentError(
            f"{call.label}: 'quantile' must be in [0, 1] and 'tol' above 0, found {quantile:g} and {tolerance:g}"
        )
    if not any(kind.elements for kind in call.inputs):
        raise call.fail("there must be at least one element")
    return [TensorType((1,), meta)]


@array_function(
    "Quantile",
    inputs=(1, UNBOUNDED),
    infer=infer_quantile,
    doc="A value that a share `quantile` of the elements of all inputs does not exceed, found by halving their range "
    "until that many do not, or until its length is `tol` of its bounds' sum.",
    input_names=("X", "..."),
    output_names=("value",),
    args={
        "quantile": "the share, in [0, 1]",
        "abs": "0: of the elements, not of their absolute values (default 1)",
        "tol": "how far off the value may be, as a share of it (default 1e-3)",
    },
    required_args=("quantile",),
)
def quantile(call: OperatorCall, *inputs: Array) -> Sequence[Array]:
    """A search by halves (bisection); halves of elements that are next to each other have none between them."""
    values = np.concatenate([x.reshape(-1) for x in inputs])
    if call.arguments.bool("abs", True):
        values = np.abs(values)
    target = math.ceil(np.float32(len(values)) * np.float32(call.arguments.float("quantile", -1.0)))
    low, high = values.min(), values.max()
    if target >= len(values):
        return [high]
    if np.count_nonzero(values <= low) >= target:
        return [low]
    while high - low > call.arguments.float("tol", 1e-3) * (abs(low) + abs(high)):
        middle = low + (high - low) / 2
        count = np.count_nonzero(values <= middle)
        if count == target or middle in (low, high):
            return [middle if count == target else high]
        low, high = (middle, high) if count < target else (low, middle)
    return [high]


no_gradient("BisectPercentile", "PiecewiseLinearTransform", "BatchBucketOneHot", "Quantile")
