"""Gradients of normalizations by oneDNN: SpatialBN and LRN.

LRN's needs what oneDNN's forward primitive leaves in a workspace, so that one runs again before it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import operator
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.channel_statistics import ChannelPieces, channel_view
from dagexec.ops.base.layout import NCHW, image_order
from dagexec.ops.engines.onednn.descriptors import (
    DIFF_DST,
    DIFF_SRC,
    DST,
    FORWARD_TRAINING,
    MEAN,
    POST_OP,
    SCALE,
    SRC,
    SRC_1,
    VARIANCE,
    WORKSPACE,
    Array,
    Descriptor,
)
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.engines.onednn.post_ops import BINARY
from dagexec.ops.engines.onednn.primitive import WORKSPACE_MD
from dagexec.ops.families.normalization import batch_norm_gradient
from dagexec.ops.families.normalization import local_response_gradient as normalization_gradient
from dagexec.ops.families.normalization.batch_norm import num_batches_of
from dagexec.ops.families.normalization.batch_norm_gradient import GradientMemory
from dagexec.ops.families.normalization.local_response import epsilon_of

_BACKWARD = 128  # dnnl_prop_kind_t
_DIFF_SCALE, _DIFF_SHIFT = 255, 256
_GIVEN_STATISTICS, _WITH_SCALE, _WITH_SHIFT = 1, 2, 4
_ACROSS_CHANNELS = 0xAFF


@operator(batch_norm_gradient.SpatialBNGradient.schema, engine="ONEDNN")
class SpatialBNGradient(OneDNNOperator, batch_norm_gradient.SpatialBNGradient):
    """The gradient of batch normalization."""

    metas: ClassVar = (FLOAT32,)

    def prefers_default(self) -> bool:
        return self.arguments.bool("is_test") and image_order(self.call()) == NCHW

    def prepare_primitive(self) -> Step:
        """In NHWC one backward batch normalization, once the variance is found from the inverse deviation."""
        x, scale, dy, mean, spread = (self.x(index) for index in range(5))
        if x.ndim == 2:
            raise UnsupportedFeatureError(f"{self.label}: oneDNN only normalizes images, found 2 axes")
        if len(self.input_blobs) == 7 or num_batches_of(self.call()) > 1 or x.size == 0:
            raise UnsupportedFeatureError(
                f"{self.label}: oneDNN only normalizes a single batch with at least one element per channel"
            )
        test, epsilon = self.arguments.bool("is_test"), epsilon_of(self.call())
        order = image_order(self.call())
        if order == NCHW:
            return self._in_two_products()
        layout, attributes = self.image(x, order), self.attributes()
        flags = _WITH_SCALE | _WITH_SHIFT | (_GIVEN_STATISTICS if test else 0)
        both, numbers = (layout.handle, layout.handle), (epsilon, flags)
        forward = self.describe_fast(
            "batch_normalization_forward", self.onednn.engine, FORWARD_TRAINING, *both, *numbers, attributes.handle
        )
        found = self.describe_fast(
            "batch_normalization_backward",
            self.onednn.engine,
            _BACKWARD,
            *both,
            layout.handle,
            *numbers,
            forward.handle,
            attributes.handle,
        )
        vector = Descriptor.of_order(self.onednn, mean.shape, FLOAT32, "NCHW")
        variance = spread if test else self.scratch(spread.shape, np.float32)
        arguments = {
            SRC: (layout, x),
            DIFF_DST: (layout, dy),
            MEAN: (vector, mean),
            VARIANCE: (vector, variance),
            SCALE: (vector, scale),
            DIFF_SRC: (layout, self.y(0)),
            _DIFF_SCALE: (vector, self.y(1)),
            _DIFF_SHIFT: (vector, self.y(2)),
        }
        bound = self.bound(found, arguments)
        if test:
            return bound.step
        return in_sequence([partial(_variance_of, spread, epsilon, variance), bound.step])

    def _in_two_products(self) -> Step:
        """In NCHW: sums by NumPy, then dX = dY * factor + shift, to which X * slope is added.

        Of 8 x 64 x 56 x 56 that takes 1.5 ms on one core, oneDNN's batch normalization 8, NumPy alone 2.5. The mean is
        not subtracted from X but from the result, which costs accuracy where it is many times the deviation.
        """
        x, scale, dy, mean, inverse = (self.x(index) for index in range(5))
        if math.prod(x.shape[2:]) == 1:  # the binary primitive takes factors of other channels then
            raise UnsupportedFeatureError(f"{self.label}: oneDNN only scales images of several pixels")
        pieces = ChannelPieces(self, channel_view(self.call()), x.dtype)
        memory = GradientMemory(pieces)
        scale_sum, bias_sum = (self.scratch(scale.shape, np.float64) for _ in range(2))
        steps: list[Step] = []
        for block in pieces.blocks:
            steps += self.sum_steps(pieces, block, (x, dy), mean[block.channels], memory)
            for found, total in ((memory.scale, scale_sum), (memory.bias, bias_sum)):
                steps.append(partial(np.copyto, total[block.channels], found[: block.width]))
        results = self.y(1), self.y(2)
        factor, shift, slope = (self.scratch(scale.shape, np.float32) for _ in range(3))

        def finish_statistics() -> None:
            spread = inverse.astype(np.float64)
            np.multiply(scale_sum, spread, out=results[0], casting="same_kind")
            np.copyto(results[1], bias_sum, casting="same_kind")
            factors = spread * scale
            slopes = factors * spread * spread * scale_sum / -pieces.count
            np.copyto(factor, factors, casting="same_kind")
            np.copyto(slope, slopes, casting="same_kind")
            np.copyto(shift, factors * bias_sum / -pieces.count - slopes * mean, casting="same_kind")

        channels = (1, scale.size, *(1,) * (x.ndim - 2))
        image, vector = self.image(x, NCHW), Descriptor.of_order(self.onednn, channels, FLOAT32, NCHW)
        handles = (self.onednn.engine, BINARY["mul"], image.handle, vector.handle, image.handle)
        adding, accumulating = self.attributes(), self.attributes()
        adding.binary(BINARY["add"], vector)
        accumulating.add_to_destination()
        result = (image, self.y(0))
        first = self.bound(
            self.describe_fast("binary", *handles, adding.handle),
            {SRC: (image, dy), SRC_1: (vector, factor), DST: result, POST_OP | SRC_1: (vector, shift)},
        )
        second = self.bound(
            self.describe_fast("binary", *handles, accumulating.handle),
            {SRC: (image, x), SRC_1: (vector, slope), DST: result},
        )
        return in_sequence([*steps, finish_statistics, first.step, second.step])


def _variance_of(inverse: Array, epsilon: float, variance: Array) -> None:
    """From 1 / sqrt(variance + epsilon), the variance."""
    found = inverse.astype(np.float64)
    np.subtract(1 / (found * found), epsilon, out=found)
    np.maximum(found, 0, out=variance, casting="same_kind")


@operator(normalization_gradient.LRNGradient.schema, engine="ONEDNN")
class LRNGradient(OneDNNOperator, normalization_gradient.LRNGradient):
    """The gradient of local response normalization."""

    metas: ClassVar = (FLOAT32,)

    def prepare_primitive(self) -> Step:
        """A forward LRN for its workspace, and the backward one."""
        x, dy, dx, order = self.x(0), self.x(2), self.y(0), image_order(self.call())
        layout, attributes = self.image(x, order), self.attributes()
        defaults = (("alpha", 0.0), ("beta", 0.0), ("bias", 1.0))
        numbers = [self.arguments.float(name, default) for name, default in defaults]
        size, engine = self.arguments.int("size", 1), self.onednn.engine
        both = (layout.handle, layout.handle)
        forward = self.describe_fast(
            "lrn_forward", engine, FORWARD_TRAINING, _ACROSS_CHANNELS, *both, size, *numbers, attributes.handle
        )
        backward = self.describe_fast(
            "lrn_backward",
            engine,
            _ACROSS_CHANNELS,
            *both,
            layout.handle,
            size,
            *numbers,
            forward.handle,
            attributes.handle,
        )
        workspace = forward.descriptor(WORKSPACE_MD)
        arguments = {SRC: (layout, x), DIFF_DST: (layout, dy), DIFF_SRC: (layout, dx)}
        if not workspace.nbytes:
            return self.bound(backward, arguments).step
        memory = (workspace, self.working_memory(workspace.nbytes))
        first = self.bound(forward, {SRC: (layout, x), DST: (layout, dx), WORKSPACE: memory})
        return in_sequence([first.step, self.bound(backward, {**arguments, WORKSPACE: memory}).step])
