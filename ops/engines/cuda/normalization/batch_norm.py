"""SpatialBN on CUDA, ChannelStats and ChannelBackpropStats, and the gradient.

A channel is a group: in the order NCHW its rows are read by neighboring threads, in NHWC neighboring channels are.
Sums are in double. A variance is the sum of squared differences from an element of the channel, so that neither a large
mean nor a long channel costs digits: Chan, Golub and LeVeque, 1983, "Algorithms for computing the sample variance".
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from dagexec.core.operator import Step, in_sequence
from dagexec.ops.base.channel_statistics import channel_view
from dagexec.ops.base.layout import BLOCKS, ORDERS, image_order
from dagexec.ops.engines.cuda.base.constants import zero_step
from dagexec.ops.engines.cuda.base.kinds import on_cuda
from dagexec.ops.engines.cuda.base.operator import Array, CudaOperator
from dagexec.ops.engines.cuda.base.row_reduction import Groups, Phase, by_groups
from dagexec.ops.families.normalization.batch_norm import SpatialBN, num_batches_of
from dagexec.ops.families.normalization.batch_norm_gradient import ChannelBackpropStats, ChannelStats, SpatialBNGradient
from dagexec.ops.families.normalization.local_response import epsilon_of

_MOMENTS = r"""
struct moments {
    double count, shift, one, square;
    __device__ void begin() { count = 0.0; shift = 0.0; one = 0.0; square = 0.0; }
    __device__ void add(double x) {
        if (count == 0.0) shift = x;
        const double d = x - shift;
        count += 1.0; one += d; square += d * d;
    }
    __device__ void join(const moments& other) {
        if (other.count == 0.0) return;
        if (count == 0.0) { *this = other; return; }
        const double d = other.shift - shift;
        square += other.square + d * (2.0 * other.one + other.count * d);
        one += other.one + other.count * d;
        count += other.count;
    }
    __device__ double mean() const {
        return one - one == 0.0 ? shift + one / count : (double)float_of(0x7fc00000u);
    }
    __device__ double variance() const { return nan_max(square / count - (one / count) * (one / count), 0.0); }
};
"""
"""Of the elements of a channel: how many, and the sums of their differences from the first, and of the squares."""


class _ChannelOperator(CudaOperator):
    """An operator on channels, in any order."""

    orders: ClassVar[tuple[str, ...]] = ORDERS

    def by_channels(
        self, name: str, groups: Groups, inputs: dict[str, Array], outputs: dict[str, Array], **scalars: float
    ) -> Step:
        """A step that computes `groups`, a channel each; tensors become views, vectors broadcast."""
        call = self.call()
        outer, channels, inner = channel_view(call)
        block = BLOCKS.get(image_order(call))
        view = (outer, channels, inner) if block is None else (outer, channels, inner // block, block)
        vector = (1, channels, 1) if block is None else (1, channels, 1, block)

        def seen(arrays: dict[str, Array]) -> dict[str, Array]:
            return {
                key: array.reshape(view if key in ("x", "y", "dx", "dy") else vector) for key, array in arrays.items()
            }

        numbers = {key: np.float64(value) for key, value in scalars.items()}
        return by_groups(self, name, view, (0, 2), groups, seen(inputs), seen(outputs), numbers)


@on_cuda(SpatialBN)
class _CudaSpatialBN(_ChannelOperator):
    """Batch normalization."""

    def prepare(self) -> Step:
        """Inference is one kernel; training too, unless channels are few and long."""
        inputs = dict(zip(("x", "scale", "bias", "mean", "var"), map(self.x, range(5)), strict=True))
        epsilon = epsilon_of(self.call())
        if self.arguments.bool("is_test"):
            groups = Groups(
                before="const A factor = A(scale) / sqrt(A(A(var) + A(epsilon))), shift = A(bias) - A(mean) * factor;",
                each="y = x * factor + shift;",
            )
            return self.by_channels("bn_inference", groups, inputs, {"y": self.y(0)}, epsilon=epsilon)
        if inputs["x"].size == 0:
            return in_sequence([zero_step(self.y(3)), zero_step(self.y(4))])
        inputs |= {"old_mean": inputs.pop("mean"), "old_var": inputs.pop("var")}
        names = ("y", "new_mean", "new_var", "saved_mean", "saved_inverse")
        outputs = dict(zip(names, map(self.y, range(5)), strict=True))
        settled = (
            "const double inverse = 1.0 / sqrt(variance + epsilon), wide_factor = inverse * (double)scale; "
            "const A center = (A)average, factor = (A)wide_factor, "
            "shift = (A)((double)bias - (average - (double)center) * wide_factor);"
        )
        if len(self.input_blobs) == 7:
            inputs |= {"sums": self.x(5), "squares": self.x(6)}
            name, phases = "bn_given", []
            before = (
                "const double elements = (double)w.length * batches, average = (double)sums / elements, "
                f"variance = nan_max((double)squares / elements - average * average, 0.0); {settled}"
            )
        else:
            name, before = "bn_training", ""
            after = f"const double average = total0.mean(), variance = total0.variance(); {settled}"
            phases = [Phase("moments", "s.add((double)x);", after, size=32)]
        groups = Groups(
            phases,
            before=before,
            each="y = A(x - center) * factor + shift;",
            last="new_mean = (double)old_mean * momentum + average * (1.0 - momentum); "
            "new_var = (double)old_var * momentum + variance * (1.0 - momentum); "
            "saved_mean = average; saved_inverse = inverse;",
            helpers=_MOMENTS,
        )
        return self.by_channels(
            name,
            groups,
            inputs,
            outputs,
            epsilon=epsilon,
            momentum=self.arguments.float("momentum", 0.9),
            batches=num_batches_of(self.call()),
        )


@on_cuda(ChannelStats)
class _CudaChannelStats(_ChannelOperator):
    """Sums over each channel."""

    def prepare(self) -> Step:
        groups = Groups(
            [Phase("two_sums<double>", "s.add((double)x, (double)x * (double)x);")],
            last="total = total0.one; square = total0.other;",
        )
        return self.by_channels("channel_sums", groups, {"x": self.x(0)}, {"total": self.y(0), "square": self.y(1)})


_GRADIENT_SUMS = Phase("two_sums<double>", "s.add((double)dy, (double)dy * (double)A(x - A(mean)));")


@on_cuda(ChannelBackpropStats)
class _CudaChannelBackpropStats(_ChannelOperator):
    """The gradients of scale and bias of one batch."""

    def prepare(self) -> Step:
        groups = Groups([_GRADIENT_SUMS], last="dscale = total0.other * (double)inverse; dbias = total0.one;")
        inputs = dict(zip(("x", "mean", "inverse", "dy"), map(self.x, range(4)), strict=True))
        return self.by_channels("channel_gradients", groups, inputs, {"dscale": self.y(0), "dbias": self.y(1)})


@on_cuda(SpatialBNGradient)
class _CudaSpatialBNGradient(_ChannelOperator):
    """The gradients of SpatialBN."""

    def prepare(self) -> Step:
        """One kernel, unless channels are few and long: dX = (dY + (X - mean) * slope) * factor + shift."""
        inputs = dict(zip(("x", "scale", "dy", "mean", "deviation"), map(self.x, range(5)), strict=True))
        outputs = dict(zip(("dx", "dscale", "dbias"), map(self.y, range(3)), strict=True))
        test = self.arguments.bool("is_test")
        phases, before, after = [_GRADIENT_SUMS], "", ""
        if inputs["x"].size == 0:
            return in_sequence([zero_step(outputs["dscale"]), zero_step(outputs["dbias"])])
        if test:
            name = "bn_inference_gradient"
            after = (
                "const double root = sqrt((double)deviation + epsilon); "
                "const double scale_sum = total0.other / root, bias_sum = total0.one; "
                "const A slope = A(0), factor = (A)((double)scale / root), shift = A(0);"
            )
        else:
            settled = (
                "const double elements = (double)w.length * batches, inverse = (double)deviation; "
                "const A slope = (A)(scale_sum * inverse / -elements), factor = (A)(inverse * (double)scale), "
                "shift = (A)(bias_sum * inverse * (double)scale / -elements);"
            )
            if len(self.input_blobs) == 7:
                name, phases = "bn_given_gradient", []
                inputs |= {"scale_total": self.x(5), "bias_total": self.x(6)}
                before = f"const double scale_sum = (double)scale_total, bias_sum = (double)bias_total; {settled}"
            else:
                name = "bn_gradient"
                sums = "const double scale_sum = total0.other * (double)deviation, bias_sum = total0.one;"
                after = f"{sums} {settled}"
        groups = Groups(
            [Phase(phase.state, phase.absorb, after) for phase in phases],
            before=before,
            each="dx = A(A(x - A(mean)) * slope + dy) * factor + shift;",
            last="dscale = scale_sum / batches; dbias = bias_sum / batches;",
        )
        batches = 1 if test else num_batches_of(self.call())
        return self.by_channels(name, groups, inputs, outputs, epsilon=epsilon_of(self.call()), batches=batches)
