"""DynamicQuantLSTM by oneDNN: its products of 8-bit integers, with scale and zero point that each run computes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, INT8, UINT8
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.engines.onednn.descriptors import (
    ATTR_SCALES,
    ATTR_ZERO_POINTS,
    BIAS,
    DST,
    SRC,
    WEIGHTS,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.packing import form_of, packed_form
from dagexec.ops.engines.onednn.primitive import WEIGHTS_MD
from dagexec.ops.engines.onednn.quantized import Arguments, QuantizedProduct
from dagexec.ops.families.quantized.by_range import ByRange
from dagexec.ops.families.recurrent import dynamic_lstm
from dagexec.ops.families.recurrent.dynamic_lstm import DynamicProduct


@operator(dynamic_lstm.DYNAMIC_QUANT_LSTM, engine="ONEDNN")
class DynamicQuantLSTM(QuantizedProduct, dynamic_lstm.DynamicQuantLSTM):
    """The layer with a primitive for the sums of X and one a direction for those of the state; gates by NumPy."""

    metas = (FLOAT32,)

    def drops_nan(self) -> bool:
        """Quantization, which makes integers of NaN, is NumPy's."""
        return False

    def prepare_primitive(self) -> Step:
        """The layer with oneDNN's products."""
        if not all(self.x(index).size for index in range(3)):
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to multiply")
        return self.layer(self.primitive)

    def primitive(self, what: DynamicProduct) -> Step:
        """X as integers, and the product with its scales, zero point and bias."""
        self.require_exact(what.x.shape[1], UINT8)
        found = ByRange.of(self, what.x)
        values, integers = self.scratch(what.x.shape, np.float32), self.scratch(what.x.shape, np.uint8)
        attributes = self.attributes()
        attributes.scales(SRC, 0)
        attributes.scales(WEIGHTS, 2)
        attributes.zero_points(SRC, 0)
        arguments: Arguments = {
            ATTR_SCALES | SRC: self.vector(found.scale.reshape(1)),
            ATTR_SCALES | WEIGHTS: self.vector(what.factors),
            ATTR_ZERO_POINTS | SRC: self.vector(found.point),
        }
        bias = self.onednn.ffi.NULL
        if what.bias is not None:
            row = what.bias.reshape(1, -1)
            arguments[BIAS] = (self.packed(row), row)
            bias = arguments[BIAS][0].handle
        source, result = Descriptor.of(self.onednn, integers, UINT8), self.packed(what.y)
        wanted = Descriptor.any_layout(self.onednn, (what.x.shape[1], what.y.shape[1]), INT8)
        primitive = self.describe_fast(
            "matmul", self.onednn.engine, source.handle, wanted.handle, bias, result.handle, attributes.handle
        )
        layout = primitive.descriptor(WEIGHTS_MD)
        arguments |= {
            SRC: (source, integers),
            WEIGHTS: (layout, self._packed_weights(what, layout)),
            DST: (result, what.y),
        }
        narrow = partial(np.copyto, integers, values, casting="unsafe")
        return in_sequence([found.measure, *found.passes(values), narrow, self.bound(primitive, arguments).step])

    def _packed_weights(self, what: DynamicProduct, layout: Descriptor) -> Array:
        """The weights of a product in the primitive's layout."""
        constant = self.input(what.index).constant
        if constant is None:
            raise UnsupportedFeatureError(f"{self.label}: the weights are not constant")
        weights = what.of_part(self.x(what.index)).T
        source = self.packed(weights)
        making = self.reordered(source, layout, weights)
        return packed_form(constant, form_of(source, layout), replace(making, what=f"direction {what.part}"))
