"""Operators whose output is as large as the values say: NonZero, Compress and UniqueSlices."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.device import CPU
from dagexec.core.dtypes import BOOL, INT64
from dagexec.core.gradient import no_gradient, not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.array_function import ArrayOperator, array_function
from dagexec.ops.base.blocks import Array


def infer_non_zero(call: OperatorCall) -> list[TensorType]:
    """A row for each axis of X, and a column for each element that is not zero."""
    return [TensorType((len(call.inputs[0].shape), int(np.count_nonzero(call.known_value(0)))), INT64)]


@new_operator(
    "NonZero",
    infer=infer_non_zero,
    doc="The indices of the elements that are not zero, in their order: a row for each axis of X, a column for "
    "each element (int64). Of a scalar there are no rows. (dagexec's own, for ONNX.)",
    input_names=("X",),
    output_names=("indices",),
    value_inputs=(0,),
    counted=lambda call, count: [TensorType((len(call.inputs[0].shape), count), INT64)],
    onnx=(OnnxName("NonZero", 13),),
)
class NonZero(ArrayOperator):
    """One search."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """What is found must fit."""
        return lambda: np.copyto(outputs[0], _places(inputs[0]))

    def for_any_sizes(self) -> Step | None:
        """What is found decides."""
        return self._find if self.runtime.device == CPU else None

    def _find(self) -> None:
        found = _places(self.x(0))
        np.copyto(self.output(0).resize(found.shape, INT64), found)


def _places(x: Array) -> Array:
    return np.stack(np.nonzero(x)) if x.ndim else np.empty((0, np.count_nonzero(x)), np.int64)


def _kept(call: OperatorCall) -> tuple[int | None, npt.NDArray[np.int64]]:
    """The axis, None for all elements in a row, and the places along it that are kept. Raises ShapeError."""
    kind = call.inputs[0]
    call.require_types(1, BOOL)
    call.require_rank(1, 1)
    axis = call.axis("axis", 0, len(kind.shape)) if "axis" in call.arguments else None
    kept = np.flatnonzero(call.known_value(1))
    size = kind.elements if axis is None else kind.shape[axis]
    if kept.size and kept[-1] >= size:
        raise call.fail(f"the condition is true at place {kept[-1]}, and there are {size}")
    return axis, kept


def infer_compress(call: OperatorCall) -> list[TensorType]:
    """X with the slices along `axis` where the condition is true; without an axis a vector of elements."""
    shape = call.inputs[0].shape
    axis, kept = _kept(call)
    if axis is None:
        return [TensorType((kept.size,), call.inputs[0].meta)]
    return [TensorType((*shape[:axis], kept.size, *shape[axis + 1 :]), call.inputs[0].meta)]


@array_function(
    "Compress",
    infer=infer_compress,
    doc="The slices of X along an axis where the condition is true; without an axis, such elements of X as a "
    "vector. What is behind the end of the condition is left out. (dagexec's own, for ONNX.)",
    input_names=("X", "condition"),
    output_names=("Y",),
    args={"axis": "the axis; negative counts from the end (default: X is taken as a vector)"},
    value_inputs=(1,),
    onnx=(OnnxName("Compress", 28, {"axis": "axis"}),),
)
def compress(call: OperatorCall, x: Array, _condition: Array) -> Sequence[Array]:
    """A selection."""
    axis, kept = _kept(call)
    return [np.take(x, kept, axis=axis)]


def _different(call: OperatorCall) -> tuple[Array, Array, Array]:
    """Where each different slice of X occurs first, which of them each slice is, and how often they occur.

    Elements are compared by their ranks among all, so that slices of any type are compared as rows of integers, and
    NaN is equal to NaN.
    """
    x = call.known_value(0)
    axis = call.axis("axis", 0, x.ndim) if "axis" in call.arguments else None
    rows = x.reshape(-1, 1) if axis is None else np.moveaxis(x, axis, 0).reshape(x.shape[axis], -1)
    comparable = rows.astype(np.float32) if rows.dtype.kind == "V" else rows
    ranks = np.unique(comparable, return_inverse=True)[1].reshape(rows.shape)
    keys = ranks[:, 0] if axis is None else ranks
    which = None if axis is None else 0
    _, first, inverse, counts = np.unique(keys, True, True, True, axis=which)
    return first, inverse.reshape(-1), counts


def infer_unique_slices(call: OperatorCall) -> list[TensorType]:
    """As many slices as differ, or as a vector elements; vectors of places and counts."""
    x = call.inputs[0]
    axis = call.axis("axis", 0, len(x.shape)) if "axis" in call.arguments else None
    call.arguments.bool("sorted", True)
    first, inverse, _ = _different(call)
    count = first.size
    shape = (count,) if axis is None else (*x.shape[:axis], count, *x.shape[axis + 1 :])
    vectors = [TensorType((size,), INT64) for size in (count, inverse.size, count)]
    return [TensorType(shape, x.meta), *vectors][: len(call.definition.output)]


@array_function(
    "UniqueSlices",
    outputs=(1, 4),
    infer=infer_unique_slices,
    doc="The different slices of X along an axis, or its different elements as a vector; where each occurs first, "
    "which of them each slice of X is, and how often each occurs (int64). They are in ascending order, or in that "
    "of their first occurrence. (dagexec's own, for ONNX's Unique.)",
    input_names=("X",),
    output_names=("Y", "indices", "inverse_indices", "counts"),
    args={
        "axis": "the axis; negative counts from the end (default: X is taken as a vector)",
        "sorted": "0: in the order of their first occurrence (default 1)",
    },
    value_inputs=(0,),
    onnx=(OnnxName("Unique", 28, {"axis": "axis", "sorted": "sorted"}),),
)
def unique_slices(call: OperatorCall, x: Array) -> Sequence[Array]:
    """Sorts of ranks."""
    first, inverse, counts = _different(call)
    if not call.arguments.bool("sorted", True):
        order = np.argsort(first, kind="stable")
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        first, inverse, counts = first[order], rank[inverse], counts[order]
    axis = call.axis("axis", 0, x.ndim) if "axis" in call.arguments else None
    return [np.take(x, first, axis=axis), first, inverse, counts][: len(call.definition.output)]


no_gradient("NonZero", "UniqueSlices")
not_differentiable("nothing in dagexec trains through it: use BooleanMask", "Compress")
