"""UpsampleBilinear: images enlarged, corners on corners, and its gradient.

Both are products with a matrix of weights for rows and one for columns: Y = R X C^T, and dX = R^T dY C.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of
from dagexec.core.rows import along_axis, first_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array

_ARGS = {"height_scale": "rows of Y for each of X (default 1)", "width_scale": "columns, likewise"}


def _sizes(call: OperatorCall, height: int, width: int, scales: int) -> tuple[int, int]:
    """Rows and columns of Y, by the input number `scales` or the arguments. Raises ArgumentError for scales of 0."""
    if len(call.inputs) > scales:
        call.require_shape(scales, (2,), "scales of height and width")
        up, along = map(float, call.known_value(scales))
    else:
        up, along = (call.arguments.float(name, 1.0) for name in ("height_scale", "width_scale"))
    if not (0 < up < 1 << 31 and 0 < along < 1 << 31):
        raise ArgumentError(f"{call.label}: scales must be above 0, found {up:g} and {along:g}")
    return int(height * up), int(width * along)


def weights(size: int, source: int) -> npt.NDArray[np.float64]:
    """How much of each of `source` pixels is in each of `size`, with first on first and last on last."""
    found = np.zeros((size, source))
    at = np.arange(size) * ((source - 1) / (size - 1) if size > 1 else 0.0)
    first = np.minimum(at.astype(np.int64), max(source - 1, 0))
    second = np.minimum(first + 1, max(source - 1, 0))
    rows = np.arange(size)
    np.add.at(found, (rows, first), 1 - (at - first))
    np.add.at(found, (rows, second), at - first)
    return found


def infer_upsample(call: OperatorCall) -> list[TensorType]:
    """The images with other sizes."""
    meta = call.require_types(0, FLOAT32, FLOAT64)
    batch, channels, height, width = call.require_rank(0, 4)
    if not height or not width:
        raise call.fail("an image must have at least one pixel")
    return [TensorType((batch, channels, *_sizes(call, height, width, 1)), meta)]


@array_function(
    "UpsampleBilinear",
    inputs=(1, 2),
    infer=infer_upsample,
    doc="Images (N, C, H, W) enlarged by linear interpolation along rows and columns, corners on corners.",
    input_names=("X", "scales"),
    output_names=("Y",),
    args=_ARGS,
    value_inputs=(1,),
    rows=first_axis,
)
def upsample(call: OperatorCall, x: Array, *_scales: Array) -> Sequence[Array]:
    """Two products."""
    height, width = _sizes(call, x.shape[2], x.shape[3], 1)
    return [weights(height, x.shape[2]) @ x @ weights(width, x.shape[3]).T]


def infer_upsample_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X."""
    call.require_types(1, FLOAT32, FLOAT64)
    call.require_same_type(0, 1)
    batch, channels, height, width = call.require_rank(1, 4)
    if not height or not width:
        raise call.fail("an image must have at least one pixel")
    call.require_shape(0, (batch, channels, *_sizes(call, height, width, 2)), "that of Y")
    return [call.inputs[1]]


@array_function(
    "UpsampleBilinearGradient",
    inputs=(2, 3),
    infer=infer_upsample_gradient,
    doc="Gradient of UpsampleBilinear: to each pixel of X what its weights are of dY.",
    input_names=("dY", "X", "scales"),
    output_names=("dX",),
    args=_ARGS,
    value_inputs=(2,),
    rows=along_axis(0, 0, 1),
)
def upsample_slope(_call: OperatorCall, dy: Array, x: Array, *_scales: Array) -> Sequence[Array]:
    """Two products with the matrices turned."""
    rows, columns = (weights(dy.shape[axis], x.shape[axis]) for axis in (2, 3))
    return [rows.T @ dy @ columns]


@gradient_of("UpsampleBilinear")
def upsample_gradient(request: GradientRequest) -> GradientOperators:
    """From dY, X and the scales."""
    scales = [request.x(1)] if request.has_x(1) else []
    return request.single("UpsampleBilinearGradient", [request.dy(0), request.x(0), *scales], [0])
