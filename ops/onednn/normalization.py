"""Normalisations by oneDNN: SpatialBN with given statistics, LRN across channels, LayerNorm."""

from __future__ import annotations

from dagexec.core.dtypes import BFLOAT16, FLOAT32
from dagexec.core.errors import UnsupportedFeatureError
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.ops import normalization, standardization
from dagexec.ops.layout import image_order
from dagexec.ops.onednn.operator import OneDNNOperator
from dagexec.ops.onednn.primitive import (
    DST,
    FORWARD_INFERENCE,
    MEAN,
    SCALE,
    SHIFT,
    SRC,
    VARIANCE,
    Descriptor,
)

_GIVEN_STATISTICS, _WITH_SCALE, _WITH_SHIFT = 1, 2, 4
_ACROSS_CHANNELS = 0xAFF


@operator(normalization.SpatialBN.schema, engine="ONEDNN")
class SpatialBN(OneDNNOperator, normalization.SpatialBN):
    """Batch normalisation in inference."""

    metas = (FLOAT32, BFLOAT16)

    def prepare_primitive(self) -> Step:
        """One batch normalisation with scale and shift, on float32 parameters."""
        x, y, order = self.x(0), self.y(0), image_order(self.call())
        if x.ndim == 2:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN normalises images, found 2 axes")
        layout, attributes = self.image(x, order), self.attributes()
        flags = _GIVEN_STATISTICS | _WITH_SCALE | _WITH_SHIFT
        tensors = (layout.handle, layout.handle, normalization.epsilon_of(self.call()), flags, attributes.handle)
        found = self.describe("batch_normalization_forward", self.onednn.engine, FORWARD_INFERENCE, *tensors)
        if found.name.startswith("ref"):
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has only its reference implementation")
        arguments = {SRC: (layout, x), DST: (layout, y)}
        steps = []
        for index, number in ((1, SCALE), (2, SHIFT), (3, MEAN), (4, VARIANCE)):
            given = self.x(index)
            source = self.packed(given)
            wanted = Descriptor.of_order(self.onednn, given.shape, FLOAT32, "NCHW")
            array, convert = self.parameter(index, given, source, wanted)
            arguments[number] = (wanted, array)
            steps.append(convert)
        bound = self.bound(found, arguments)
        self.offer_moves(bound, {0: SRC}, {0: DST})
        return in_sequence([*steps, bound.step])


@operator(normalization.LRN.schema, engine="ONEDNN")
class LRN(OneDNNOperator, normalization.LRN):
    """Local response normalisation across channels."""

    metas = (FLOAT32, BFLOAT16)

    def prepare_primitive(self) -> Step:
        """One LRN; output `scale` is NumPy's to compute."""
        if len(self.output_blobs) > 1:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has no output 'scale'")
        x, y, order = self.x(0), self.y(0), image_order(self.call())
        layout, attributes = self.image(x, order), self.attributes()
        defaults = (("alpha", 0.0), ("beta", 0.0), ("bias", 1.0))
        numbers = (self.arguments.float(name, default) for name, default in defaults)
        found = self.describe(
            "lrn_forward",
            self.onednn.engine,
            FORWARD_INFERENCE,
            _ACROSS_CHANNELS,
            layout.handle,
            layout.handle,
            self.arguments.int("size", 1),
            *numbers,
            attributes.handle,
        )
        bound = self.bound(found, {SRC: (layout, x), DST: (layout, y)})
        self.offer_moves(bound, {0: SRC}, {0: DST})
        return bound.step


@operator(standardization.LayerNorm.schema, engine="ONEDNN")
class LayerNorm(OneDNNOperator, standardization.LayerNorm):
    """Layer normalisation."""

    metas = (FLOAT32, BFLOAT16)

    def prepare_primitive(self) -> Step:
        """One layer normalisation of a matrix with a row a group; outputs mean and std are float32 alone."""
        groups = standardization.layer_grouping(self.call())
        x, y = self.x(0).reshape(groups.view), self.y(0).reshape(groups.view)
        if len(self.output_blobs) > 1:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN gives the variance, not the deviation")
        layout, attributes = self.packed(x), self.attributes()
        affine = len(self.input_blobs) == 3
        statistics = Descriptor.of_order(self.onednn, groups.view[:1], FLOAT32, "NCHW")
        flags = _WITH_SCALE | _WITH_SHIFT if affine else 0
        tensors = (layout.handle, layout.handle, statistics.handle)
        epsilon = self.arguments.float("epsilon", 1e-5)
        numbers = (epsilon, flags, attributes.handle)
        found = self.describe("layer_normalization_forward", self.onednn.engine, FORWARD_INFERENCE, *tensors, *numbers)
        if found.name.startswith("ref"):
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has only its reference implementation")
        arguments, steps = {SRC: (layout, x), DST: (layout, y)}, []
        for index, number in ((1, SCALE), (2, SHIFT)) if affine else ():
            given = self.x(index).reshape(-1)
            wanted = Descriptor.of_order(self.onednn, given.shape, FLOAT32, "NCHW")
            array, convert = self.parameter(index, given, self.packed(given), wanted)
            arguments[number] = (wanted, array)
            steps.append(convert)
        bound = self.bound(found, arguments)
        self.offer_moves(bound, {0: SRC}, {0: DST})
        return in_sequence([*steps, bound.step])
