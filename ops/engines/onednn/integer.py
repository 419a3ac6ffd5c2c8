"""ConvInteger and MatMulInteger by oneDNN, where its sums are exact.

Its kernels sum products of 8 bits in 32 (VNNI), but some convert the sums to float32 on their way out, which holds
integers up to 2^24. So weights must be constants whose magnitudes, with the widest range of X, add up to no more; for
others NumPy computes. Weights less their zero point that need a bit more than int8 has are two filters, whose sums are
added.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from dagexec.core.dtypes import INT8
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW, NHWC
from dagexec.ops.engines.onednn.convolution_computation import geometry, grouped, padding_of, require_window
from dagexec.ops.engines.onednn.descriptors import (
    ATTR_ZERO_POINTS,
    DST,
    FORWARD_INFERENCE,
    SRC,
    WEIGHTS,
    Array,
    Attributes,
    Descriptor,
)
from dagexec.ops.engines.onednn.integer_product import EXACT, byte_products
from dagexec.ops.engines.onednn.packing import Making, form_of, packed_form
from dagexec.ops.engines.onednn.primitive import WEIGHTS_MD
from dagexec.ops.engines.onednn.quantized import Arguments, QuantizedProduct
from dagexec.ops.families.quantized import integer
from dagexec.ops.families.quantized.accumulation import Operand
from dagexec.ops.families.quantized.convolution import quant_window

_CONVOLUTION_DIRECT = 1


class _IntegerProduct(QuantizedProduct):
    """What both share: weights of 8 bits, and X's zero point, which a run may compute."""

    def drops_nan(self) -> bool:
        """Integers have none."""
        return False

    def parts(self, weights: Operand, taps: tuple[int, ...]) -> int:
        """Of how many int8 filters the weights less their zero point are the sum: one or two.

        `taps` are the axes that are summed over. Raises UnsupportedFeatureError unless all sums are exact.
        """
        if not self.onednn.isa.int8:
            raise UnsupportedFeatureError(f"{self.label}: the processor has no exact 8-bit products (VNNI)")
        constant = weights.constant
        if constant is None:
            raise UnsupportedFeatureError(f"{self.label}: the weights or their zero point are not constant")
        count, largest = constant.derived(weights.key("parts"), lambda: _parts_and_largest(weights, taps))
        if 255 * largest > EXACT:
            raise UnsupportedFeatureError(f"{self.label}: sums up to {255 * largest} are not exact in float32")
        return count

    def packed_part(
        self, weights: Operand, number: int, logical: Callable[[Array], Array], source: Descriptor, target: Descriptor
    ) -> Array:
        """Part `number` of the weights, of the layout `source` as `logical` gives it, as a primitive wants it."""
        constant = weights.constant
        assert constant is not None, "parts are of constants"

        def fill(packed: Array) -> None:
            self.reordered(source, target, logical(_in_bytes(weights)[number])).fill(packed)

        making = Making(" ".join(weights.key(f"part {number}")), target.nbytes, fill)
        return packed_form(constant, form_of(source, target), making)

    def as_bytes(self, weights: Array) -> Descriptor:
        """The layout of parts of the weights."""
        return self.packed(weights.view(np.int8))

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


def _in_bytes(weights: Operand) -> tuple[Array, ...]:
    """int8 arrays whose sum is the weights less their zero point: one or two."""
    given, zero = weights.owner.x(weights.index), weights.zero
    if given.dtype == np.int8 and (zero is None or not zero.any()):
        return (given,)
    wide = weights.wide(np.dtype(np.int16))
    first = np.clip(wide, -128, 127).astype(np.int8)
    rest = (wide - first).astype(np.int8)
    return (first, rest) if rest.any() else (first,)


def _parts_and_largest(weights: Operand, taps: tuple[int, ...]) -> tuple[int, int]:
    """The number of parts, and the largest sum of magnitudes over the axes `taps`; two parts have one sign."""
    parts = _in_bytes(weights)
    magnitudes = [np.abs(part).view(np.uint8).sum(axis=taps, dtype=np.int64) for part in parts]  # of -128, too
    return len(parts), int(sum(magnitudes).max(initial=0))


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
        logical = partial(grouped, group=self.arguments.int("group", 1), channels_last=window.channels_last)
        attributes = self.attributes()
        zero, steps = self.zero_point(image, attributes)
        x, load = self.last(self.x(0))
        y, _ = self.last(self.y(0), load=False)
        steps += load
        targets, add_up = self.totals(y, parts)
        source, result, given = self.image(x, NHWC), self.image(y, NHWC), self.as_bytes(logical(self.x(1)))
        wanted = Descriptor.any_layout(self.onednn, given.shape, INT8)
        asked = (source, wanted, self.onednn.ffi.NULL, result, *geometry(axes), attributes)
        kind = FORWARD_INFERENCE, _CONVOLUTION_DIRECT
        found = self.fast(
            self.describe("convolution_forward", self.onednn.engine, *kind, *asked),
            padding_of("convolution_forward", axes[-1]),
        )
        layout = found.descriptor(WEIGHTS_MD)
        for number, target in enumerate(targets):
            packed = self.packed_part(filters, number, logical, given, layout)
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
        inner, columns = self.x(1).shape
        x, y = self.x(0).reshape(-1, inner), self.y(0).reshape(-1, columns)
        if not self.sums_bytes:
            own = byte_products(self, x, b, 0 if a.zero_point is None else self.x(a.zero_point), is_turned=True)
            if own is not None:
                self.answer(lambda: True)
                return in_sequence([*own[1], partial(np.copyto, y, own[0], casting="unsafe")])
        parts, attributes = self.parts(b, (0,)), self.attributes()
        zero, steps = self.zero_point(a, attributes)
        targets, add_up = self.totals(y, parts)
        source, result, given = self.packed(x), self.packed(y), self.as_bytes(self.x(1))
        wanted = Descriptor.any_layout(self.onednn, given.shape, INT8)
        null = self.onednn.ffi.NULL
        found = self.describe_fast("matmul", self.onednn.engine, source, wanted, null, result, attributes)
        layout = found.descriptor(WEIGHTS_MD)
        for number, target in enumerate(targets):
            packed = self.packed_part(b, number, np.asarray, given, layout)
            arguments = zero | {SRC: (source, x), WEIGHTS: (layout, packed), DST: (result, target)}
            steps.append(self.bound(found, arguments).step)
        return in_sequence([*steps, *add_up])
