"""Operators of Caffe2's int8 nets, whose results are scaled by integers alone, as gemmlowp and QNNPACK do on phones.

A real factor is q * 2^(e - 31) with q of 31 bits. A number times it is rounded twice: to the upper half of twice the
product with q, ties upward, and by the division by a power of two, ties away from 0 (gemmlowp's doc/quantization.md).
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from dagexec.core.dtypes import INT32, UINT8
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows import elementwise
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.ops.base.geometry import POOL_ARGS, Axis, read_window
from dagexec.ops.base.layout import NHWC, ImageOperator
from dagexec.ops.families.quantized.scales import Array, scale_argument, zero_point_argument

_Y_ARGS = {
    "y_zero_point": "Y's zero point (default 0)",
    "low": "the least of Y: its zero point, for a Relu (default 0)",
}
_LEAST, _MOST = -(1 << 31), (1 << 31) - 1


def fixed_point(factor: float) -> tuple[int, int]:
    """q and e of a factor above 0."""
    fraction, exponent = math.frexp(factor)
    q = round(fraction * (1 << 31))
    return (q >> 1, exponent + 1) if q == 1 << 31 else (q, exponent)


def scaled(values: Array, factor: tuple[int, int]) -> Array:
    """Integers of 32 bits times a factor, rounded as gemmlowp rounds, as int64."""
    q, exponent = factor
    product = np.clip(values.astype(np.int64) << max(exponent, 0), _LEAST, _MOST) * q
    product += np.where(product >= 0, 1 << 30, 1 - (1 << 30))
    high = np.sign(product) * (np.abs(product) >> 31)
    shift = min(max(-exponent, 0), 31)
    mask = (1 << shift) - 1
    result: Array = (high >> shift) + ((high & mask) > (mask >> 1) + (high < 0))
    return result


def _store(y: Array, values: Array, low: int, zero_point: int) -> None:
    np.copyto(y, np.clip(values + zero_point, low, 255), casting="unsafe")


def _output(call: OperatorCall) -> tuple[int, int]:
    """The least value of Y and its zero point."""
    return call.arguments.int("low", 0), zero_point_argument(call, "y_zero_point", UINT8)


def _bytes_like(call: OperatorCall) -> list[TensorType]:
    for index in range(len(call.inputs)):
        call.require_types(index, UINT8)
        call.require_shape(index, call.inputs[0].shape, "X's shape")
    _output(call)
    return [call.inputs[0]]


def _requantized(call: OperatorCall) -> list[TensorType]:
    call.require_types(0, INT32)
    shape = call.inputs[0].shape
    if len(call.inputs) > 1:
        call.require_types(1, INT32)
        call.require_shape(1, shape[-1:], "one entry for each of the last axis")
    scale_argument(call, "multiplier")
    _output(call)
    return [TensorType(shape, UINT8)]


@new_operator(
    "RequantizeFixedPoint",
    inputs=(1, 2),
    infer=_requantized,
    doc="Y = saturate((X + bias) * multiplier + y_zero_point) as uint8, rounded as gemmlowp does. X is int32, the bias "
    "int32, one for each of X's last axis.",
    input_names=("X", "bias"),
    output_names=("Y",),
    args={"multiplier": "a scale, in float32"} | _Y_ARGS,
    required_args=("multiplier",),
)
class RequantizeFixedPoint(Operator):
    """Sums of 32 bits to 8."""

    def prepare(self) -> Step:
        """All in one call."""
        call, x, y = self.call(), self.x(0), self.y(0)
        factor = fixed_point(float(scale_argument(call, "multiplier")))
        low, zero_point = _output(call)
        bias = self.x(1) if len(self.input_blobs) > 1 else np.int32(0)

        def step() -> None:
            _store(y, scaled(x + bias, factor), low, zero_point)

        return step


@new_operator(
    "AddFixedPoint",
    inputs=(2, 2),
    infer=_bytes_like,
    doc="The sum of two tensors of uint8 with scales and zero points of their own, in fixed point with 20 bits behind "
    "the point, as TensorFlow Lite adds.",
    input_names=("A", "B"),
    output_names=("Y",),
    args={f"{name}_scale": f"{name.upper()}'s scale" for name in "aby"}
    | {f"{name}_zero_point": f"{name.upper()}'s zero point (default 0)" for name in "ab"}
    | _Y_ARGS,
    rows=elementwise,
)
class AddFixedPoint(Operator):
    """A sum of bytes."""

    def prepare(self) -> Step:
        """Both in units of a 2^-20th of twice the larger scale."""
        call, a, b, y = self.call(), self.x(0), self.x(1), self.y(0)
        scales = [float(scale_argument(call, f"{name}_scale")) for name in "ab"]
        zeros = [zero_point_argument(call, f"{name}_zero_point", UINT8) for name in "ab"]
        unit = 2 * max(scales)
        factors = [fixed_point(scale / unit) for scale in scales]
        back = fixed_point(unit / ((1 << 20) * float(scale_argument(call, "y_scale"))))
        low, zero_point = _output(call)

        def step() -> None:
            parts = [
                scaled((x.astype(np.int64) - zero) << 20, factor)
                for x, zero, factor in zip((a, b), zeros, factors, strict=True)
            ]
            _store(y, scaled(parts[0] + parts[1], back), low, zero_point)

        return step


def _windows(call: OperatorCall) -> tuple[Axis, ...]:
    shape = call.require_rank(0, 4)
    window = read_window(call, 2)
    if window.order != NHWC:
        raise call.fail("X must be N, height, width, channels (order NHWC)")
    return window.over(window.spatial(shape))


def _pooled(call: OperatorCall) -> list[TensorType]:
    [kind] = _bytes_like(call)
    rows, columns = _windows(call)
    return [TensorType((kind.shape[0], rows.out, columns.out, kind.shape[3]), UINT8)]


@new_operator(
    "AveragePoolFixedPoint",
    infer=_pooled,
    doc="Means of windows of uint8, N, height, width, channels, with another scale: the sum of X - x_zero_point times "
    "x_scale / (pixels of a window * y_scale). Padding counts as 0.",
    input_names=("X",),
    output_names=("Y",),
    args=POOL_ARGS
    | {"x_scale": "X's scale", "x_zero_point": "X's zero point (default 0)", "y_scale": "Y's scale"}
    | _Y_ARGS,
)
class AveragePoolFixedPoint(ImageOperator):
    """Average pooling of bytes."""

    def prepare(self) -> Step:
        """The sums tap by tap, then the scale."""
        call, x, y = self.call(), self.x(0), self.y(0)
        axes = _windows(call)
        taps = [
            tuple(zip(*pair, strict=True))
            for pair in itertools.product(*([axis.tap(tap) for tap in range(axis.kernel)] for axis in axes))
        ]
        count = math.prod(axis.kernel for axis in axes)
        ratio = scale_argument(call, "x_scale") / (np.float32(count) * scale_argument(call, "y_scale"))
        factor, zero = fixed_point(float(ratio)), zero_point_argument(call, "x_zero_point", UINT8)
        low, zero_point = _output(call)
        sums = self.scratch(y.shape, np.int32)

        def step() -> None:
            sums.fill(0)
            for windows, pixels in taps:
                sums[:, *windows] += x[:, *pixels].astype(np.int32) - zero
            _store(y, scaled(sums, factor), low, zero_point)

        return step


@new_operator(
    "SoftmaxOfBytes",
    infer=_bytes_like,
    doc="Softmax of uint8 over the axes from `axis` on, by a table of exponentials and integers alone, as QNNPACK "
    "computes it; Y has the scale 1/256 and the zero point 0.",
    input_names=("X",),
    output_names=("Y",),
    args={"axis": "the first axis of a row (default 1)", "x_scale": "X's scale"},
)
class SoftmaxOfBytes(Operator):
    """Softmax by a table."""

    def prepare(self) -> Step:
        """Each row less its largest, looked up, over the sum."""
        call, x = self.call(), self.x(0)
        outer = math.prod(x.shape[: call.axis("axis", 1, x.ndim)])
        rows, results = x.reshape(outer, -1), self.y(0).reshape(outer, -1)
        most = min(np.float64(0xFFFFFFFF) / max(1, rows.shape[1]), 8388607.0)
        exponents = (np.arange(256) - 255) * float(scale_argument(call, "x_scale"))
        table = np.rint(most * np.exp(exponents)).astype(np.int64)

        def step() -> None:
            values = table[rows + (255 - rows.max(axis=1, keepdims=True, initial=0)).astype(np.int64)]
            sums = values.sum(axis=1, keepdims=True)
            np.copyto(results, np.minimum((values * 256 + (sums >> 1)) // sums, 255), casting="unsafe")

        return step
