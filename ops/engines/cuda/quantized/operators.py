"""Operators on 8-bit integers on CUDA: the bytes of the host's, by exact integer sums and the same float32 operations.

Products and sums that follow each other are kept apart (`rounded_product`), since a GPU would fuse them and round once.
Scales that are constant are checked when an operator is prepared, others by a kernel in every run.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, TypeMeta
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import operator
from dagexec.errors import ArgumentError, UnsupportedFeatureError
from dagexec.ops.base.geometry import Axis
from dagexec.ops.engines.cuda.base.expression import elementwise
from dagexec.ops.engines.cuda.base.faults import CheckedOperator
from dagexec.ops.engines.cuda.base.matrices import tiled_product
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator, c_type_of
from dagexec.ops.engines.cuda.conv.direct import DirectConvolution
from dagexec.ops.families.quantized.accumulation import Operand, fits_int32
from dagexec.ops.families.quantized.addition import QuantAdd, read_add
from dagexec.ops.families.quantized.convolution import BIAS, FILTER, FILTER_SCALE, QuantConv, quant_window, read_conv
from dagexec.ops.families.quantized.integer import (
    ConvInteger,
    DynamicQuantizeLinear,
    MatMulInteger,
    conv_operands,
    product_operands,
)
from dagexec.ops.families.quantized.linear import DequantizeLinear, QuantizeLinear, block_size
from dagexec.ops.families.quantized.product import QuantFC, read_fc
from dagexec.ops.families.quantized.requantization import Requantization
from dagexec.ops.families.quantized.scales import along, check_scales, integer_range, scale_argument

_ROUNDING = r"""
#ifdef __CUDA_ARCH__
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
#else
inline float rounded_product(float a, float b) { return a * b; }
#endif
__device__ inline float saturated(float v, float zero, float least, float most) {
    v = rintf(v) + zero;
    v = v > least ? v : least;
    return v < most ? v : most;
}
"""

_RANGE = r"""
extern "C" __global__ void partial_range(const float* x, float* found, i64 n) {
    __shared__ float low[256];
    __shared__ float high[256];
    float least = x[0], most = x[0];
    FOR_EACH(i, n) {
        least = nan_min(least, x[i]);
        most = nan_max(most, x[i]);
    }
    low[threadIdx.x] = least;
    high[threadIdx.x] = most;
    __syncthreads();
    for (int half = 128; half; half >>= 1) {
        if (threadIdx.x < half) {
            low[threadIdx.x] = nan_min(low[threadIdx.x], low[threadIdx.x + half]);
            high[threadIdx.x] = nan_max(high[threadIdx.x], high[threadIdx.x + half]);
        }
        __syncthreads();
    }
    if (!threadIdx.x) {
        found[2 * blockIdx.x] = low[0];
        found[2 * blockIdx.x + 1] = high[0];
    }
}
extern "C" __global__ void range_parameters(
    const float* found, i64 parts, float* scale, unsigned char* zero_point, float* zero) {
    if (blockIdx.x || threadIdx.x) return;
    float least = found[0], most = found[1];
    for (i64 i = 1; i < parts; ++i) {
        least = nan_min(least, found[2 * i]);
        most = nan_max(most, found[2 * i + 1]);
    }
    float low = least < 0.0f ? least : 0.0f, high = most > 0.0f ? most : 0.0f;
    float step = (high - low) / 255.0f;
    scale[0] = step > 0.0f ? step : 1.0f;
    zero[0] = rintf(nan_min(nan_max(-low / scale[0], 0.0f), 255.0f));
    zero_point[0] = (unsigned char)zero[0];
}
"""

_RANGE_PARTS = 256


class CudaQuantized(CheckedOperator):
    """What the operators share."""

    def checked_scales(self, index: int) -> Step:
        """Check the scales in input `index`: now when they are constant, else by the step.

        Raises ArgumentError for a constant that is no scale.
        """
        tensor, scales, blob = self.input(index), self.x(index), self.definition.input[index]
        if tensor.constant is not None:
            check_scales(tensor.fetch(), self.label, blob)
            return nothing_to_do
        wrong = ArgumentError(f"{self.label}: scales {blob!r} must be finite and above 0")
        fault = self.fault_word(partial(self._check_scales, scales, blob), wrong)
        return self.values_check(scales, np.nextafter(0, 1), np.inf, fault)

    def _check_scales(self, scales: Array, blob: str) -> None:
        check_scales(self.fetched(scales), self.label, blob)

    def requantized(
        self, what: Requantization, first: str, inputs: dict[str, Array], scalars: dict[str, np.generic], y: Array
    ) -> Step:
        """The step from v, which the C++ `first` computes in float from `inputs` and `scalars`, to Y."""
        lines = [first]
        for number, op in enumerate(what.post_ops):
            a, b = f"a{number}", f"b{number}"
            if op.kind == "add":
                inputs["addend"] = self.x(op.input)
                scalars |= {a: np.float32(what.add_zero_point), b: np.float32(what.add_scale / what.y_scale)}
                lines.append(f"v = v + rounded_product((float)addend - {a}, {b});")
            elif op.kind == "relu":
                lines.append("v = nan_max(v, 0.0f);")
            elif op.kind == "clip":
                scalars |= {name: np.float32(np.float32(x) / what.y_scale) for name, x in ((a, op.a), (b, op.b))}
                lines.append(f"v = nan_min(nan_max(v, {a}), {b});")
            else:
                scalars[a] = np.float32(op.a)
                lines.append(f"v = nan_max(v, 0.0f) + rounded_product(nan_min(v, 0.0f), {a});")
        if what.y is FLOAT32:
            lines.append("y = v;")
        else:
            scalars |= _limits(what.y) | {"zero_of_y": np.float32(what.y_zero_point)}
            lines.append("y = (decltype(y))saturated(v, zero_of_y, least, most);")
        return elementwise(self, "requantized", inputs, {"y": y}, "\n        ".join(lines), scalars, _ROUNDING)

    def from_sums(self, what: Requantization, sums: Array, scale: Array, bias: Array | None, y: Array) -> Step:
        """The step from integer sums to Y; the weights' scale, and the bias, broadcast to them."""
        inputs = {"sum": sums, "scale": scale}
        total = "(i64)sum"
        if bias is not None:
            inputs["bias"] = bias
            total += " + (i64)bias"
        scalars: dict[str, np.generic] = {"x_scale": scale_argument(self.call(), "x_scale"), "y_scale": what.y_scale}
        first = f"float v = rounded_product((float)({total}), rounded_product(scale, x_scale) / y_scale);"
        return self.requantized(what, first, inputs, scalars, y)

    def sums_like(self, shape: tuple[int, ...], terms: int, weights: int) -> Array:
        """Memory for exact sums of so many terms, with the weights in input `weights`."""
        narrow = fits_int32(terms, self.input(0).meta, self.input(weights).meta)
        return self.scratch(shape, np.int32 if narrow else np.int64)


def _limits(meta: TypeMeta) -> dict[str, np.float32]:
    least, most = integer_range(meta)
    return {"least": np.float32(least), "most": np.float32(most)}


def _convolved(
    owner: CudaOperator, weights: Array, y: Array, axes: tuple[Axis, ...], channels_last: bool, zero_point: int
) -> Step:
    """The exact sums of a convolution of integers."""
    group = owner.arguments.int("group", 1)
    return DirectConvolution(owner, owner.x(0), weights, y, axes, group, channels_last, zero_point).forward()


class CudaQuantConv(CudaQuantized, QuantConv):
    """Convolution of 8-bit integers; bit for bit what a 32-bit accumulator gives."""

    inputs_checked = (FILTER_SCALE,)

    def prepare(self) -> Step:
        call, y = self.call(), self.y(0)
        _, what = read_conv(call)
        window, axes = quant_window(call)
        if not y.size:
            return nothing_to_do
        check = self.checked_scales(FILTER_SCALE)
        weights, last = self.x(FILTER), window.channels_last
        terms = weights.size // max(1, weights.shape[0])
        sums = self.sums_like(y.shape, terms, FILTER)
        channels = along(y.ndim - 1 if last else 1, y.ndim)
        bias = channels(self.x(BIAS)) if self.arguments.bool("bias") else None
        add_up = _convolved(self, weights, sums, axes, last, call.arguments.int("x_zero_point", 0))
        return in_sequence([check, add_up, self.from_sums(what, sums, channels(self.x(FILTER_SCALE)), bias, y)])


class CudaQuantFC(CudaQuantized, QuantFC):
    """Product of 8-bit integers; bit for bit what a 32-bit accumulator gives."""

    inputs_checked = (2,)

    def prepare(self) -> Step:
        call, y = self.call(), self.y(0)
        _, what = read_fc(call)
        if not y.size:
            return nothing_to_do
        check = self.checked_scales(2)
        w = self.x(1)
        units, inner = w.shape
        rows = y.size // units
        sums = self.sums_like((rows, units), inner, 1)
        x, zero_point = self.x(0).reshape(rows, inner), call.arguments.int("x_zero_point", 0)
        multiply = tiled_product(self, x, w.swapaxes(0, 1), sums, a_zero=zero_point)
        scale = along(y.ndim - 1, y.ndim)
        bias = scale(self.x(3)) if self.arguments.bool("bias") else None
        return in_sequence([check, multiply, self.from_sums(what, sums.reshape(y.shape), scale(self.x(2)), bias, y)])


class CudaQuantAdd(CudaQuantized, QuantAdd):
    """Sum of two tensors of 8-bit integers."""

    def prepare(self) -> Step:
        call = self.call()
        _, what = read_add(call)
        scalars: dict[str, np.generic] = {
            "zero_of_x": np.float32(call.arguments.int("x_zero_point", 0)),
            "factor": np.float32(scale_argument(call, "x_scale") / what.y_scale),
        }
        first = "float v = rounded_product((float)x - zero_of_x, factor);"
        return self.requantized(what, first, {"x": self.x(0)}, scalars, self.y(0))


def _difference(owner: CudaOperator, operand: Operand) -> tuple[Array, Step]:
    """The integers of an operand less their zero point, and the step that computes them."""
    x, zero = owner.x(operand.index), operand.zero
    if zero is None:
        return x, nothing_to_do
    wide = owner.scratch(x.shape, np.int16)
    return wide, elementwise(owner, "difference", {"x": x, "zero": zero}, {"y": wide}, "y = (short)(x - zero);")


class CudaConvInteger(CudaOperator, ConvInteger):
    """Convolution of 8-bit integers into 32-bit ones."""

    def prepare(self) -> Step:
        y = self.y(0)
        window, axes = quant_window(self.call())
        if not y.size:
            return nothing_to_do
        (x, center_x), (filters, center_filters) = (_difference(self, operand) for operand in conv_operands(self))
        group = self.arguments.int("group", 1)
        convolution = DirectConvolution(self, x, filters, y, axes, group, window.channels_last)
        return in_sequence([center_x, center_filters, convolution.forward()])


class CudaMatMulInteger(CudaOperator, MatMulInteger):
    """Product of 8-bit integers into 32-bit ones."""

    def prepare(self) -> Step:
        (a, center_a), (b, center_b) = (_difference(self, operand) for operand in product_operands(self))
        a = a.reshape(1, -1) if a.ndim == 1 else a
        b = b.reshape(-1, 1) if b.ndim == 1 else b
        y = self.y(0).reshape(*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        return in_sequence([center_a, center_b, tiled_product(self, a, b, y)])


class _CudaLinear(CudaQuantized):
    """What both directions share."""

    inputs_checked = (1,)

    def operands(self) -> tuple[Array, Array, dict[str, Array]]:
        """X and Y, and scale and zero point as they broadcast to X; of blocks, these have an axis of their own.

        Raises DeviceError for types that CUDA has not, UnsupportedFeatureError where the last block is a shorter one.
        """
        call, x, y = self.call(), self.x(0), self.y(0)
        for array in (x, y):
            c_type_of(array)
        axis = call.axis("axis", 1, x.ndim) if x.ndim and self.x(1).size > 1 else 0
        shape = x.shape
        if size := block_size(call):
            if x.shape[axis] % size:
                raise UnsupportedFeatureError(f"{self.label}: {x.shape[axis]} elements are no blocks of {size}")
            shape = (*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
            single = (*shape[: axis + 1], 1, *shape[axis + 2 :])
        else:
            single = along(axis, x.ndim)(self.x(1)).shape
        found = {"scale": self.x(1).reshape(single)}
        if len(self.input_blobs) == 3:
            found["zero"] = self.x(2).reshape(single)
        x, y = x.reshape(shape), y.reshape(shape)
        return x, y, found


class CudaQuantizeLinear(_CudaLinear, QuantizeLinear):
    """Floats to integers."""

    def prepare(self) -> Step:
        x, y, parameters = self.operands()
        zero = "(float)zero" if "zero" in parameters else "0.0f"
        formula = f"y = (decltype(y))saturated((float)x / (float)scale, {zero}, least, most);"
        inputs, scalars = {"x": x, **parameters}, _limits(self.output(0).meta)
        step = elementwise(self, "quantized", inputs, {"y": y}, formula, scalars, _ROUNDING)
        return in_sequence([self.checked_scales(1), step])


class CudaDequantizeLinear(_CudaLinear, DequantizeLinear):
    """Integers to floats."""

    def prepare(self) -> Step:
        """One kernel: the difference is exact, and rounded to float once."""
        x, y, parameters = self.operands()
        zero = "(i64)zero" if "zero" in parameters else "0"
        formula = f"y = (float)((i64)x - {zero}) * (float)scale;"
        step = elementwise(self, "dequantized", {"x": x, **parameters}, {"y": y}, formula)
        return in_sequence([self.checked_scales(1), step])


class CudaDynamicQuantizeLinear(CudaQuantized, DynamicQuantizeLinear):
    """Floats to integers, by the range that they have."""

    def prepare(self) -> Step:
        """The range in two kernels, with the parameters it gives, and the integers."""
        x, y, scale, zero_point = (self.x(0), self.y(0), self.y(1), self.y(2))
        parts = min(_RANGE_PARTS, -(-x.size // 256))
        found, zero = self.scratch((parts, 2), np.float32), self.scratch((), np.float32)
        ranges = self.launch("partial_range", _RANGE, [x, found, np.int64(x.size)], blocks=parts)
        arguments = [found, np.int64(parts), scale, zero_point, zero]
        decide = self.launch("range_parameters", _RANGE, arguments, blocks=1)
        formula = "y = (decltype(y))saturated(x / scale, zero, least, most);"
        inputs, limits = {"x": x, "scale": scale, "zero": zero}, _limits(self.output(0).meta)
        integers = elementwise(self, "quantized", inputs, {"y": y}, formula, limits, _ROUNDING)
        return in_sequence([ranges, decide, integers])


_CLASSES: dict[type[Operator], type[CudaOperator]] = {
    QuantConv: CudaQuantConv,
    QuantFC: CudaQuantFC,
    QuantAdd: CudaQuantAdd,
    ConvInteger: CudaConvInteger,
    MatMulInteger: CudaMatMulInteger,
    QuantizeLinear: CudaQuantizeLinear,
    DequantizeLinear: CudaDequantizeLinear,
    DynamicQuantizeLinear: CudaDynamicQuantizeLinear,
}
for _kind, _class in _CLASSES.items():
    operator(_kind.schema, device="cuda")(_class)
