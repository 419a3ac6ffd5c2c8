"""Draws by weights and draws without repetition: WeightedSample, WeightedMultiSampling, UniqueUniformFill."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT32, INT64, TypeMeta
from dagexec.core.gradient import no_gradient
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.elementwise.cast import type_argument
from dagexec.ops.families.fill.draws import RandomFunction
from dagexec.ops.families.fill.fillers import SHAPE_ARGS, fill_shape


def infer_weighted_sample(call: OperatorCall) -> list[TensorType]:
    """A column with a draw for each row; of no weights none."""
    call.require_types(0, FLOAT32)
    batch, choices = call.require_rank(0, 2)
    if len(call.definition.output) > len(call.inputs):
        raise call.fail("values are drawn from a second input, which is missing")
    if len(call.inputs) > 1:
        call.require_types(1, FLOAT32)
        call.require_shape(1, (batch, choices), "a value for each weight")
    shape = (batch, 1) if batch and choices else (0,)
    return [TensorType(shape, INT32), TensorType(shape, FLOAT32)][: len(call.definition.output)]


@new_operator(
    "WeightedSample",
    inputs=(1, 2),
    outputs=(1, 2),
    infer=infer_weighted_sample,
    doc="A place for each row of weights, drawn with probability in proportion to the weight; and the value there.",
    input_names=("weights", "values"),
    output_names=("indices", "values"),
    reproducible=False,
)
class WeightedSample(RandomFunction):
    """The inverse of the cumulative weights at a uniform place."""

    @staticmethod
    def draw(call: OperatorCall, random: np.random.Generator, *inputs: Array) -> Sequence[Array]:
        """A draw a row."""
        weights = inputs[0]
        if not weights.size:
            return [np.empty(0, np.int32), np.empty(0, np.float32)][: len(call.definition.output)]
        places = _by_sums(np.cumsum(weights, axis=1, dtype=np.float64), random.random(len(weights)))
        chosen = [places[:, None]]
        if len(call.definition.output) > 1:
            chosen.append(np.take_along_axis(inputs[1], places[:, None], axis=1))
        return chosen


def _by_sums(sums: Array, uniform: Array) -> Array:
    """For each row of cumulative sums, the first that is above its share of the last."""
    found: Array = (sums <= (uniform * sums[:, -1])[:, None]).sum(axis=1)
    return found.clip(0, sums.shape[1] - 1)


def infer_weighted_multi_sampling(call: OperatorCall) -> list[TensorType]:
    """A vector of draws, or as the second input. Raises ArgumentError for a negative number."""
    call.require_types(0, FLOAT32)
    (choices,) = call.require_rank(0, 1)
    count = call.arguments.int("num_samples", 0)
    if count < 0:
        raise ArgumentError(f"{call.label}: argument 'num_samples' must be at least 0, found {count}")
    shape = call.inputs[1].shape if len(call.inputs) > 1 else (count,)
    return [TensorType(shape if choices else (0,), INT32)]


@new_operator(
    "WeightedMultiSampling",
    inputs=(1, 2),
    infer=infer_weighted_multi_sampling,
    doc="Draws of places by cumulative weights: `num_samples` of them, or as many as the second input has elements.",
    input_names=("sums", "shape_like"),
    output_names=("indices",),
    args={"num_samples": "how many draws, where there is no second input"},
    reproducible=False,
)
class WeightedMultiSampling(RandomFunction):
    """The inverse of the cumulative weights at uniform places."""

    @staticmethod
    def draw(call: OperatorCall, random: np.random.Generator, *inputs: Array) -> Sequence[Array]:
        """Draws of one distribution."""
        (kind,) = infer_weighted_multi_sampling(call)
        uniform = random.random(kind.elements)
        sums = inputs[0].astype(np.float64)
        rows = np.broadcast_to(sums, (uniform.size, sums.size))
        return [_by_sums(rows, uniform).reshape(kind.shape)] if sums.size else [np.empty(kind.shape, np.int32)]


def _range(call: OperatorCall) -> tuple[int, int]:
    """The smallest number, and how many there are from it on. Raises ArgumentError where they do not fit the type."""
    low, high = call.arguments.int("min", 0), call.arguments.int("max", 0)
    limits = np.iinfo(_drawn_type(call).numpy)
    if not limits.min <= low <= high <= limits.max:
        raise ArgumentError(
            f"{call.label}: expected 'min' up to 'max' in the range of the type, found {low} and {high}"
        )
    return low, high - low + 1


def _drawn_type(call: OperatorCall) -> TypeMeta:
    meta = type_argument(call, "dtype") if "dtype" in call.arguments else INT64
    if meta not in (INT32, INT64):
        raise ArgumentError(f"{call.label}: expected 'dtype' int32 or int64, found {meta}")
    return meta


def infer_unique_uniform(call: OperatorCall) -> list[TensorType]:
    """The shape that arguments or input 0 say."""
    kind = TensorType(fill_shape(call), _drawn_type(call))
    if len(call.inputs) > 1:
        call.require_types(1, kind.meta)
    _range(call)
    return [kind]


@new_operator(
    "UniqueUniformFill",
    inputs=(0, 2),
    infer=infer_unique_uniform,
    doc="Different integers drawn from `min` to `max`, both included, but for those of the second input.",
    input_names=("input", "avoid"),
    output_names=("Y",),
    args=SHAPE_ARGS
    | {
        "min": "the smallest number (default 0)",
        "max": "the largest number (default 0)",
        "dtype": "int32 or int64 (default int64)",
    },
    value_inputs=(0,),
    values_read_if="input_as_shape",
    reproducible=False,
)
class UniqueUniformFill(RandomFunction):
    """Draws without repetition among the numbers that are left."""

    @staticmethod
    def draw(call: OperatorCall, random: np.random.Generator, *inputs: Array) -> Sequence[Array]:
        """Places among what is left, then numbers. Raises ShapeError where too few are left."""
        (kind,), (low, count) = infer_unique_uniform(call), _range(call)
        avoided = np.unique(inputs[1].astype(np.int64)) if len(inputs) > 1 else np.empty(0, np.int64)
        avoided = avoided[(avoided >= low) & (avoided - low < count)] - low
        if kind.elements > count - avoided.size:
            raise ShapeError(f"{call.label}: cannot draw {kind.elements} different numbers of {count - avoided.size}")
        places = random.choice(count - avoided.size, kind.elements, replace=False)
        return [low + places + np.searchsorted(avoided - np.arange(avoided.size), places, side="right")]


no_gradient("WeightedSample", "WeightedMultiSampling", "UniqueUniformFill")
