"""ConvInteger and MatMulInteger by oneDNN, where its sums are exact.

Its kernels sum products of 8 bits in 32 (VNNI), but some convert the sums to float32 on their way out, which holds
integers up to 2^24. So weights must be constants whose magnitudes, with the widest range of X, add up to no more; for
others NumPy computes. Weights less their zero point that need a bit more than int8 has are two filters, whose sums are
added.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dagexec.core.dtypes import INT8
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW, NHWC
from dagexec.ops.onednn.convolution_family import grouped, padding_of, require_window, tail_of
from dagexec.ops.onednn.descriptors import (
    ATTR_ZERO_POINTS,
    DST,
    FORWARD_INFERENCE,
    SRC,
    WEIGHTS,
    Array,
    Attributes,
    Descriptor,
)
from dagexec.ops.onednn.packing import form_of, packed_form
from dagexec.ops.onednn.primitive import WEIGHTS_MD
from dagexec.ops.onednn.quantized import Arguments, QuantizedProduct
from dagexec.ops.quantized import integer
from dagexec.ops.quantized.accumulation import Operand
from dagexec.ops.quantized.convolution import quant_window

_CONVOLUTION_DIRECT = 1
_EXACT = 1 << 24


class _IntegerProduct(QuantizedProduct):
    """What both share: weights of 8 bits, and X's zero point, which a run may compute."""

    def drops_nan(self) -> bool:
        """Integers have none."""
        return False

    def parts(self, weights: Operand, taps: tuple[int, ...]) -> tuple[Array, ...]:
        """int8 weights whose sum is the weights less their zero point: one array or two.

        `taps` are the axes that are summed over. Raises UnsupportedFeatureError unless all sums are exact.
        """
        if not self.onednn.isa.int8:
            raise UnsupportedFeatureError(f"{self.label}: the processor has no exact 8-bit products (VNNI)")
        constant = weights.constant
        if constant is None:
            raise UnsupportedFeatureError(f"{self.label}: the weights or their zero point are not constant")
        wide, _ = weights.differences(np.dtype(np.int16))
        found: tuple[Array, ...] = constant.derived(weights.key("parts"), lambda: _in_bytes(wide))
        largest = max(int(np.abs(part.astype(np.int64)).sum(axis=taps).max(initial=0)) for part in (wide, found[0]))
        if 255 * largest > _EXACT:
            raise UnsupportedFeatureError(f"{self.label}: sums up to {255 * largest} are not exact in float32")
        return found

    def packed_part(self, weights: Operand, number: int, logical: Array, target: Descriptor) -> Array:
        """Part `number` of the weights, seen as `logical`, in the layout that a primitive wants."""
        constant = weights.constant
        assert constant is not None, "parts are of constants"
        source = self.packed(logical)
        making = replace(self.reordered(source, target, logical), what=" ".join(weights.key(f"part {number}")))
        return packed_form(constant, form_of(source, target), making)

    def zero_point(self, x: Operand, attributes: Attributes) -> tuple[Arguments, list[Step]]:
        """X's zero point as an argument, and the steps that fetch it."""
        if x.zero_point is None:
            return {}, []
        value = self.scratch((1,), np.int32)
        attributes.zero_points(SRC, 0)
        fetch = partial(np.copyto, value, self.x(x.zero_point).reshape(-1), casting="unsafe")
        return {ATTR_ZERO_POINTS | SRC: self.vector(value)}, [fetch]

    def totals(self, y: Array, count: int) -> tuple[list[Array], list[Step]]:
        """Where the sums of each part go, and the step that adds them up in `y`."""
        if count == 1:
            return [y], []
        other = self.scratch(y.shape, np.int32)
        return [y, other], [partial(np.add, y, other, out=y)]


def _in_bytes(wide: Array) -> tuple[Array, ...]:
    first = np.clip(wide, -128, 127).astype(np.int8)
    rest = (wide - first).astype(np.int8)
    return (first, rest) if rest.any() else (first,)


@operator(integer.ConvInteger.schema, engine="ONEDNN")
class ConvInteger(_IntegerProduct, integer.ConvInteger):
    """One convolution on NHWC images for each part of the weights; images in NCHW are copied before and after it."""

    def prepare_primitive(self) -> Step:
        """The primitives, and what adds their sums."""
        window, axes = quant_window(self.call())
        require_window(axes, self.label)
        image, filters = integer.conv_operands(self)
        if not self.x(1).size or not self.x(0).size:
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")
        parts = self.parts(filters, tuple(range(1, self.x(1).ndim)))
        group, dims = self.arguments.int("group", 1), self.onednn.dims
        attributes = self.attributes()
        zero, steps = self.zero_point(image, attributes)
        x, load = self.last(self.x(0))
        y, _ = self.last(self.y(0), load=False)
        steps += load
        targets, add_up = self.totals(y, len(parts))
        source, result = self.image(x, NHWC), self.image(y, NHWC)
        for number, (part, target) in enumerate(zip(parts, targets, strict=True)):
            logical = grouped(part, group, window.channels_last)
            wanted = Descriptor.any_layout(self.onednn, logical.shape, INT8)
            found = self.fast(
                self.describe(
                    "convolution_forward", self.onednn.engine, FORWARD_INFERENCE, _CONVOLUTION_DIRECT,
                    source.handle, wanted.handle, self.onednn.ffi.NULL, result.handle,
                    dims([axis.stride for axis in axes]), dims([axis.dilation - 1 for axis in axes]),
                    dims([axis.head for axis in axes]), dims([tail_of(axis) for axis in axes]), attributes.handle,
                ),
                padding_of("convolution_forward", axes[-1]),
            )  # fmt: skip
            layout = found.descriptor(WEIGHTS_MD)
            packed = self.packed_part(filters, number, logical, layout)
            arguments = zero | {SRC: (source, x), WEIGHTS: (layout, packed), DST: (result, target)}
            steps.append(self.bound(found, arguments).step)
        store = [] if y is self.y(0) else [self.reorder(result, self.image(self.y(0), NCHW), y, self.y(0)).step]
        return in_sequence([*steps, *add_up, *store])


@operator(integer.MatMulInteger.schema, engine="ONEDNN")
class MatMulInteger(_IntegerProduct, integer.MatMulInteger):
    """One matrix product for each part of B, a matrix that all of A's are multiplied with."""

    def prepare_primitive(self) -> Step:
        """The primitives, and what adds their sums."""
        a, b = integer.product_operands(self)
        if self.x(1).ndim != 2 or self.x(0).ndim < 2 or not self.x(1).size or not self.x(0).size:
            raise UnsupportedFeatureError(f"{self.label}: B is not one matrix, or there is nothing to sum")
        if a.zero_point is not None and self.x(a.zero_point).size > 1:
            raise UnsupportedFeatureError(f"{self.label}: A has more than one zero point")
        parts, (inner, columns) = self.parts(b, (0,)), self.x(1).shape
        attributes = self.attributes()
        zero, steps = self.zero_point(a, attributes)
        x, y = self.x(0).reshape(-1, inner), self.y(0).reshape(-1, columns)
        targets, add_up = self.totals(y, len(parts))
        source, result = self.packed(x), self.packed(y)
        for number, (part, target) in enumerate(zip(parts, targets, strict=True)):
            wanted: Any = Descriptor.any_layout(self.onednn, part.shape, INT8)
            null = self.onednn.ffi.NULL
            found = self.describe_fast(
                "matmul", self.onednn.engine, source.handle, wanted.handle, null, result.handle, attributes.handle
            )
            layout = found.descriptor(WEIGHTS_MD)
            packed = self.packed_part(b, number, part, layout)
            arguments = zero | {SRC: (source, x), WEIGHTS: (layout, packed), DST: (result, target)}
            steps.append(self.bound(found, arguments).step)
        return in_sequence([*steps, *add_up])
