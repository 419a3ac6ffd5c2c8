"""Normalizations by oneDNN: SpatialBN with given statistics, LRN across channels, LayerNorm. InstanceNorm, GroupNorm,
RootMeanSquareNorm, and LayerNorm of rows of many elements are kernels of our own.

Of 64 x 56 x 56 in NCHW oneDNN's batch normalization takes 370 us on one core, NumPy's 150, and a product whose post-op
adds 22; in NHWC batch normalization is faster than that, 31 us against 70.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from dagexec.core.dtypes import BFLOAT16, FLOAT32
from dagexec.core.operator import Prepared, Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.blocks import convert
from dagexec.ops.base.layout import NCHW, NHWC, channel_axis, image_order, logical_shape
from dagexec.ops.engines.onednn.bound import BoundPrimitive
from dagexec.ops.engines.onednn.channels_last import channels_last_step
from dagexec.ops.engines.onednn.cutting import Parts, image_axes
from dagexec.ops.engines.onednn.descriptors import (
    DST,
    FORWARD_INFERENCE,
    FORWARD_TRAINING,
    MEAN,
    POST_OP,
    SCALE,
    SHIFT,
    SRC,
    SRC_1,
    VARIANCE,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.keeping_nan import scanning
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.post_ops import BINARY
from dagexec.ops.families.normalization import batch_norm, rms_norm, standardization
from dagexec.ops.families.normalization import local_response as normalization
from dagexec.ops.kernels.chains import chain_step
from dagexec.ops.kernels.neighbor_kernels import Neighbors, neighbors_step
from dagexec.ops.kernels.standardizing import LONG_ROW, root_mean_square_step, standardizing_step

_GIVEN_STATISTICS, _WITH_SCALE, _WITH_SHIFT = 1, 2, 4
_ACROSS_CHANNELS = 0xAFF


@operator(batch_norm.SpatialBN.schema, engine="ONEDNN")
class SpatialBN(OneDNNOperator, batch_norm.SpatialBN):
    """Batch normalization."""

    metas = (FLOAT32, BFLOAT16)

    def prefers_default(self) -> bool:
        """In training and in NCHW: of 8 x 64 x 56 x 56, oneDNN takes 8 ms on one core, NumPy 2; in NHWC 0.4 and 3."""
        return not self.arguments.bool("is_test") and image_order(self.call()) == NCHW

    def prepare_primitive(self) -> Step:
        """A product and a sum in one where that is the faster, or a batch normalization."""
        if not self.onednn.has_primitives and self.arguments.bool("is_test"):
            return self._by_kernel()
        if self.x(0).ndim == 2:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN only normalizes images, found 2 axes")
        if not self.arguments.bool("is_test"):
            return self._train()
        if image_order(self.call()) == NHWC or self.input(0).meta is not FLOAT32:
            return self._normalize()
        return self._scale_and_shift()

    def _by_kernel(self) -> Step:
        """As `_scale_and_shift`, by a chain. Raises UnsupportedFeatureError where there is no kernel."""
        x, (factor, shift, steps) = self.x(0), self._factors()
        view = factor.size, *(1,) * (x.ndim - channel_axis(self.call()) - 1)
        chain, operands = [("mul", 0.0, 0.0, 0), ("add", 0.0, 0.0, 1)], [factor.reshape(view), shift.reshape(view)]
        step = chain_step(self.onednn.machine, chain, x, self.y(0), operands, self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for these tensors")
        return in_sequence([*steps, step])

    def _factors(self) -> tuple[Array, Array, list[Step]]:
        """As `affine`, without steps where parameters are constant."""
        factor, shift, steps = self.affine()
        if all(self.input(index).constant is not None for index in range(1, 5)):
            in_sequence(steps)()
            steps = []
        return factor, shift, steps

    def _scale_and_shift(self) -> Step:
        """Y = X * factor + shift, which are computed in every run unless the parameters are constant."""
        x, y, order = self.x(0), self.y(0), image_order(self.call())
        if math.prod(logical_shape(order, x.shape)[2:]) == 1:  # its binary primitive takes factors of other channels
            return self._normalize()
        factor, shift, steps = self._factors()
        channels = (1, factor.size, *(1,) * (len(logical_shape(order, x.shape)) - 2))
        layout, attributes = self.image(x, order), self.attributes()
        operand = Descriptor.of_order(self.onednn, channels, FLOAT32, order)
        attributes.binary(BINARY["add"], operand)
        handles = (layout, operand, layout, attributes)
        found = self.describe("binary", self.onednn.engine, BINARY["mul"], *handles)
        if found.is_reference:
            return self._normalize()
        arguments = {SRC: (layout, x), SRC_1: (operand, factor), DST: (layout, y), POST_OP | SRC_1: (operand, shift)}
        bound = self.in_parts(found, arguments, *image_axes(order))
        return self.rebindable(in_sequence([*steps, bound.step]), bound, {0: SRC}, {0: DST})

    def _train(self) -> Step:
        """One batch normalization that gives the statistics of the batch, and what training keeps of them."""
        if len(self.input_blobs) == 7:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN does not accept sums over several batches")
        if self.x(0).size == 0:
            raise UnsupportedFeatureError(f"{self.label}: there is nothing to sum")
        bound, steps, statistics = self._normalization(FORWARD_TRAINING, 0)
        mean, variance = (self.scratch(array.shape, np.float64) for array in statistics)
        kept = tuple(self.y(index) for index in range(1, 5))
        momentum, epsilon = self.arguments.float("momentum", 0.9), normalization.epsilon_of(self.call())
        finish_statistics = partial(batch_norm.finish_statistics, mean, variance, momentum, epsilon, kept, None)
        moved: list[Step] = [convert(statistics[0], mean), convert(statistics[1], variance)]
        return in_sequence([*steps, bound.step, *moved, finish_statistics])

    def _normalize(self) -> Step:
        """One batch normalization with given statistics."""
        bound, steps, _ = self._normalization(FORWARD_INFERENCE, _GIVEN_STATISTICS)
        return self.rebindable(in_sequence([*steps, bound.step]), bound, {0: SRC}, {0: DST})

    def _normalization(self, kind: int, flags: int) -> tuple[BoundPrimitive | Parts, list[Step], tuple[Array, Array]]:
        """The primitive with scale and shift, on float32 parameters, the steps before it, and its mean and variance."""
        order = image_order(self.call())
        is_given = bool(flags & _GIVEN_STATISTICS)
        x, y = (_rows_apart(array, order) if is_given else array for array in (self.x(0), self.y(0)))
        layout, attributes = self.image(x, order), self.attributes()
        flags |= _WITH_SCALE | _WITH_SHIFT
        tensors = (layout, layout, normalization.epsilon_of(self.call()), flags, attributes)
        found = self.describe_fast("batch_normalization_forward", self.onednn.engine, kind, *tensors)
        arguments = {SRC: (layout, x), DST: (layout, y)}
        steps: list[Step] = []
        given_too = ((3, MEAN), (4, VARIANCE)) if is_given else ()
        for index, number in ((1, SCALE), (2, SHIFT), *given_too):
            given = self.x(index)
            source = self.packed(given)
            wanted = Descriptor.of_order(self.onednn, given.shape, FLOAT32, "NCHW")
            array, conversion = self.parameter(index, given, source, wanted)
            arguments[number] = (wanted, array)
            steps.append(conversion)
        if not given_too:
            vector = Descriptor.of_order(self.onednn, self.x(1).shape, FLOAT32, "NCHW")
            for number in (MEAN, VARIANCE):
                arguments[number] = (vector, self.scratch(self.x(1).shape, np.float32))
        bound = self.in_parts(found, arguments) if is_given else self.bound(found, arguments)
        return bound, steps, (arguments[MEAN][1], arguments[VARIANCE][1])


def _rows_apart(image: Array, order: str) -> Array:
    """Images in NHWC as more of them, of one row each, for what treats pixels alike; others as they are."""
    return image.reshape(-1, 1, *image.shape[2:]) if order == NHWC else image


@operator(normalization.LRN.schema, engine="ONEDNN")
class LRN(OneDNNOperator, normalization.LRN):
    """Local response normalization across channels."""

    metas = (FLOAT32, BFLOAT16)

    def drops_nan(self) -> bool:
        """It has NaN where it should not: its sums go along the channels, and what has gone by leaves NaN behind."""
        return self.onednn.has_primitives

    def kept(self, prepared: Prepared) -> Prepared:
        """No flag tells of sums."""
        return scanning(self, prepared, self.onednn.machine)

    def prepare_primitive(self) -> Step:
        """One LRN; output `scale` is NumPy's to compute."""
        if len(self.output_blobs) > 1:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN has no output 'scale'")
        order = image_order(self.call())
        defaults = (("alpha", 0.0), ("beta", 0.0), ("bias", 1.0))
        numbers = [self.arguments.float(name, default) for name, default in defaults]
        if not self.onednn.has_primitives:
            how = Neighbors(self.arguments.int("size", 1), *numbers)
            make = partial(neighbors_step, self.onednn.machine, how)
            return channels_last_step(self, order, lambda x, y: make(x, y, self.label))
        x, y = (_rows_apart(array, order) for array in (self.x(0), self.y(0)))
        layout, attributes = self.image(x, order), self.attributes()
        found = self.describe_fast(
            "lrn_forward",
            self.onednn.engine,
            FORWARD_INFERENCE,
            _ACROSS_CHANNELS,
            layout,
            layout,
            self.arguments.int("size", 1),
            *numbers,
            attributes,
        )
        bound = self.in_parts(found, {SRC: (layout, x), DST: (layout, y)})
        return self.rebindable(bound.step, bound, {0: SRC}, {0: DST})


@operator(standardization.LayerNorm.schema, engine="ONEDNN")
class LayerNorm(OneDNNOperator, standardization.LayerNorm):
    """Layer normalization."""

    repeats = True

    metas = (FLOAT32, BFLOAT16)

    def prepare_primitive(self) -> Step:
        """One layer normalization of a matrix with a row a group; outputs mean and std are float32 alone."""
        groups = standardization.layer_grouping(self.call())
        x, y = self.x(0).reshape(groups.view), self.y(0).reshape(groups.view)
        if len(self.output_blobs) > 1:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN computes the variance, not the standard deviation")
        is_ours = groups.members >= LONG_ROW or not self.onednn.has_primitives
        if is_ours and (step := self._long_rows(groups)) is not None:
            return step
        layout, attributes = self.packed(x), self.attributes()
        affine = len(self.input_blobs) == 3
        statistics = Descriptor.of_order(self.onednn, groups.view[:1], FLOAT32, "NCHW")
        flags = _WITH_SCALE | _WITH_SHIFT if affine else 0
        tensors = (layout, layout, statistics)
        epsilon = self.arguments.float("epsilon", 1e-5)
        kind, numbers = FORWARD_INFERENCE, (epsilon, flags, attributes)
        found = self.describe_fast("layer_normalization_forward", self.onednn.engine, kind, *tensors, *numbers)
        arguments, steps = {SRC: (layout, x), DST: (layout, y)}, []
        for index, number in ((1, SCALE), (2, SHIFT)) if affine else ():
            given = self.x(index).reshape(-1)
            wanted = Descriptor.of_order(self.onednn, given.shape, FLOAT32, "NCHW")
            array, conversion = self.parameter(index, given, self.packed(given), wanted)
            arguments[number] = (wanted, array)
            steps.append(conversion)
        bound = self.in_parts(found, arguments)
        return self.rebindable(in_sequence([*steps, bound.step]), bound, {0: SRC}, {0: DST})

    def _long_rows(self, groups: standardization.Grouping) -> Step | None:
        """A kernel of our own that cuts rows, too; None where it cannot run."""
        x, y = (array.reshape(*groups.view, 1) for array in (self.x(0), self.y(0)))
        if len(self.input_blobs) == 3:
            scale, bias = self.x(1), self.x(2)
        else:
            x, y = (array.reshape(-1, 1, groups.members) for array in (x, y))
            scale, bias = np.ones(1, np.float32), np.zeros(1, np.float32)
        epsilon = self.arguments.float("epsilon", 1e-5)
        step = standardizing_step(self.onednn.machine, x, y, scale, bias, epsilon, self.label)
        if step is not None:
            self.answer(lambda: True)
        return step


@operator(rms_norm.RootMeanSquareNorm.schema, engine="ONEDNN")
class RootMeanSquareNorm(OneDNNOperator, rms_norm.RootMeanSquareNorm):
    """Root mean square normalization."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """One kernel. Raises UnsupportedFeatureError for a scale that does not span the axes of a mean."""
        x, y, scale = self.x(0), self.y(0), self.x(1)
        axes = x.shape[self.call().axis("axis", -1, x.ndim) :]
        if scale.shape != axes:
            raise UnsupportedFeatureError(f"{self.label}: a scale of shape {scale.shape} for axes {axes}")
        self.answer(lambda: True)
        rows, target = (array.reshape(-1, scale.size) for array in (x, y))
        epsilon = self.arguments.float("epsilon", 1e-5)
        numbers = scale.reshape(-1), epsilon, self.label
        step = root_mean_square_step(self.onednn.machine, rows, target, *numbers)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: no kernels run here")
        return step


class _Grouped(OneDNNOperator):
    """Base of those whose groups are rows of an image in NCHW."""

    metas = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """One kernel for all groups. Raises UnsupportedFeatureError for statistics as outputs and for other orders."""
        assert isinstance(self, standardization.InstanceNorm | standardization.GroupNorm)
        groups = self.grouping()
        rank = len(groups.view)
        if len(self.output_blobs) > 1 or groups.axes != tuple(range(rank - len(groups.axes), rank)):
            raise UnsupportedFeatureError(f"{self.label}: the kernel normalizes channels in NCHW, and that alone")
        rows = math.prod(groups.reduced)
        width = groups.view[-1]
        x, y = (array.reshape(rows, -1, width) for array in (self.x(0), self.y(0)))
        numbers = self.x(1), self.x(2), self.arguments.float("epsilon", 1e-5)
        step = standardizing_step(self.onednn.machine, x, y, *numbers, self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: no kernels run here")
        return step


@operator(standardization.InstanceNorm.schema, engine="ONEDNN")
class InstanceNorm(_Grouped, standardization.InstanceNorm):
    """Instance normalization."""


@operator(standardization.GroupNorm.schema, engine="ONEDNN")
class GroupNorm(_Grouped, standardization.GroupNorm):
    """Group normalization."""
