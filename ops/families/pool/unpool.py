"""MaxUnpool: the maxima of a pooling back at the places that they came from."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import INT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.onnx_name import OnnxName
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array

_LIMIT = 1 << 31


def _pooled_shape(call: OperatorCall) -> tuple[int, ...]:
    """The shape that was pooled, as the windows say. Raises ArgumentError for windows that do not fit."""
    shape = call.inputs[0].shape
    kernel, rank = call.arguments.ints("kernel_shape"), len(shape) - 2
    strides, pads = call.arguments.ints("strides", [1] * rank), call.arguments.ints("pads", [0] * max(0, 2 * rank))
    if rank < 1 or len(kernel) != rank or len(strides) != rank or len(pads) != 2 * rank:
        raise ArgumentError(f"{call.label}: windows {kernel}, {strides} and {pads} do not fit {len(shape)} axes")
    if not 1 <= min([*kernel, *strides]) <= max([*kernel, *strides, *pads]) < _LIMIT or min(pads) < 0:
        raise ArgumentError(f"{call.label}: numbers of windows are out of range: {kernel}, {strides} and {pads}")
    sizes = tuple(
        (size - 1) * stride - low - high + tap
        for size, stride, low, high, tap in zip(shape[2:], strides, pads[:rank], pads[rank:], kernel, strict=True)
    )
    if min(sizes) < 1:
        raise ArgumentError(f"{call.label}: windows {kernel}, {strides} and {pads} leave nothing of {shape[2:]}")
    return (*shape[:2], *sizes)


def infer_max_unpool(call: OperatorCall) -> list[TensorType]:
    """What was pooled, or the shape asked for, which must hold it."""
    kind = call.inputs[0]
    call.require_types(1, INT32, INT64)
    call.require_shape(1, kind.shape, "a place for each maximum")
    shape = _pooled_shape(call)
    if len(call.inputs) > 2:
        call.require_types(2, INT32, INT64)
        wanted = tuple(int(size) for size in call.known_value(2).reshape(-1))
        if len(wanted) != len(shape) or any(a < b for a, b in zip(wanted, shape, strict=True)):
            raise ArgumentError(f"{call.label}: the output must be at least {shape}, found {wanted}")
        shape = wanted
    return [TensorType(shape, kind.meta)]


@array_function(
    "MaxUnpool",
    inputs=(2, 3),
    infer=infer_max_unpool,
    doc="X, the maxima of a pooling, at their places in a tensor of zeros; of two at one place the last. "
    "(dagexec's own, for ONNX.)",
    input_names=("X", "places, numbers of elements of what was pooled", "shape of Y, at least that"),
    output_names=("Y",),
    args={
        "kernel_shape": "windows of the pooling",
        "strides": "from one window to the next (default 1)",
        "pads": "before, then behind (default 0)",
    },
    required_args=("kernel_shape",),
    value_inputs=(2,),
    onnx=(OnnxName("MaxUnpool", 22, {name: name for name in ("kernel_shape", "strides", "pads")}),),
)
def max_unpool(call: OperatorCall, x: Array, places: Array, *shapes: Array) -> Sequence[Array]:
    """One scatter. Raises ShapeError for a place that is not there."""
    pooled = _pooled_shape(call)
    count = math.prod(pooled)
    if places.size and not (places.min() >= 0 and places.max() < count):
        raise ShapeError(f"{call.label}: a place must be in [0, {count - 1}], found {places.min()} to {places.max()}")
    y = np.zeros(count, x.dtype)
    y[places.reshape(-1)] = x.reshape(-1)
    found = y.reshape(pooled)
    if not shapes:
        return [found]
    whole = np.zeros([int(size) for size in shapes[0].reshape(-1)], x.dtype)
    whole[tuple(slice(size) for size in pooled)] = found
    return [whole]


not_differentiable("dagexec has it for inference alone", "MaxUnpool")
