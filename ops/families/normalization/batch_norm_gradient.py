"""The gradient of SpatialBN, and the sums that batch normalization over several devices adds up between them.

ChannelStats before SpatialBN, and ChannelBackpropStats before SpatialBNGradient, give sums of one batch; summed over
the devices they make statistics and gradients those of all batches together.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT32, FLOAT_TYPES, TypeMeta
from dagexec.core.gradient import GradientOperators, GradientRequest, gradient_of, no_gradient
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.schema import OperatorCall, TensorType, memory_cost
from dagexec.ops.base.blocks import Array, convert
from dagexec.ops.base.channel_statistics import ChannelBlock, ChannelPieces, channel_view
from dagexec.ops.base.layout import ORDER_HELP, ImageOperator
from dagexec.ops.families.normalization.batch_norm import num_batches_of, require_normalized
from dagexec.ops.families.normalization.local_response import epsilon_of, require_channel_parameters

no_gradient("ChannelStats", "ChannelBackpropStats")


def sum_type(meta: TypeMeta) -> TypeMeta:
    """The type of sums over a tensor of type `meta`: its own, float32 for 16-bit floats."""
    return FLOAT32 if meta.itemsize == 2 else meta


def infer_channel_stats(call: OperatorCall) -> list[TensorType]:
    """Two vectors with an element a channel."""
    channels = require_normalized(call)
    return [TensorType((channels,), sum_type(call.inputs[0].meta))] * 2


@new_operator(
    "ChannelStats",
    infer=infer_channel_stats,
    doc="The sum of all elements of each channel, and of their squares, for the statistics of several batches: "
    "inputs 5 and 6 of SpatialBN, once they are summed over the devices. float32 for 16-bit floats.",
    input_names=("X",),
    output_names=("sum", "sumsq"),
    args={"order": ORDER_HELP},
    cost=lambda call, outputs: memory_cost(call, outputs, 3),
)
class ChannelStats(ImageOperator):
    """Sums over each channel."""

    def prepare(self) -> Step:
        """Piece by piece, added up in float64."""
        x = self.x(0)
        results = self.y(0), self.y(1)
        if x.size == 0:
            return in_sequence([partial(result.fill, 0) for result in results])
        pieces = ChannelPieces(self, channel_view(self.call()), x.dtype)
        part, sums = pieces.vector(), (pieces.vector(), pieces.vector())
        spare = pieces.spare()
        steps: list[Step] = []
        for block in pieces.blocks:
            width = block.width
            steps += [partial(total[:width].fill, 0) for total in sums]
            for outer in block.outer:
                source, reads = pieces.read(x, block, outer, spare)
                steps += reads
                for total, terms in (
                    (sums[0], pieces.total(source, part[:width])),
                    (sums[1], pieces.product(source, source, part[:width])),
                ):
                    steps += [*terms, partial(np.add, total[:width], part[:width], out=total[:width])]
            steps += [
                convert(total[:width], result[block.channels]) for total, result in zip(sums, results, strict=True)
            ]
        return in_sequence(steps)


def _require_gradient(call: OperatorCall, index: int) -> None:
    """Raise ShapeError unless input `index` has the shape and the type of X."""
    call.require_shape(index, call.inputs[0].shape, "the shape of X")
    call.require_same_type(0, index)


def infer_channel_backprop_stats(call: OperatorCall) -> list[TensorType]:
    """Two vectors with an element a channel."""
    channels = require_normalized(call)
    require_channel_parameters(call, (1, 2), channels)
    _require_gradient(call, 3)
    return [TensorType((channels,), sum_type(call.inputs[0].meta))] * 2


class _ChannelGradient(ImageOperator):
    """What the operators of this module share: the sums of a gradient over each channel."""

    def sum_steps(
        self,
        pieces: ChannelPieces,
        block: ChannelBlock,
        tensors: tuple[Array, Array],
        mean: Array,
        memory: GradientMemory,
    ) -> list[Step]:
        """The steps that write to `memory` the sums over each channel of a block of dY, and of dY * (X - mean).

        `tensors` are X and dY, `mean` the means of the block. When the block has one piece, `memory.centered` is
        X - mean afterwards, and `memory.gradient` dY where that had to be converted.
        """
        width = block.width
        part, bias, scale = (vector[:width] for vector in (memory.part, memory.bias, memory.scale))
        center, spread = pieces.spread(memory.center[:width])
        steps: list[Step] = [convert(mean, memory.center[:width]), *spread]
        steps += [partial(bias.fill, 0), partial(scale.fill, 0)]
        for outer in block.outer:
            centered, gradient, reads = self.centered_piece(pieces, block, outer, tensors, center, memory)
            steps += [
                *reads,
                *pieces.total(gradient, part),
                partial(np.add, bias, part, out=bias),
                *pieces.product(gradient, centered, part),
                partial(np.add, scale, part, out=scale),
            ]
        return steps

    @staticmethod
    def centered_piece(
        pieces: ChannelPieces,
        block: ChannelBlock,
        outer: slice,
        tensors: tuple[Array, Array],
        center: Array,
        memory: GradientMemory,
    ) -> tuple[Array, Array, list[Step]]:
        """A piece of X - center and of dY, with the steps that make them."""
        x, dy = tensors
        centered = pieces.cut(memory.centered, block, outer)
        source, reads = pieces.read(x, block, outer, None if memory.gradient is None else memory.centered)
        gradient, more = pieces.read(dy, block, outer, memory.gradient)
        return centered, gradient, [*reads, partial(np.subtract, source, center, out=centered), *more]


class GradientMemory:
    """Working memory of a gradient, for the blocks of one operator in turn.

    Attributes:
        centered: for X - mean.
        gradient: for dY in float32, where it is of 16 bits.
        part, bias, scale: sums of a piece, of dY, and of dY * (X - mean).
        center: the mean.
    """

    def __init__(self, pieces: ChannelPieces) -> None:
        self.centered = pieces.scratch()
        self.gradient = pieces.spare()
        self.part, self.bias, self.scale = (pieces.vector() for _ in range(3))
        self.center = pieces.vector(wide=False)


@new_operator(
    "ChannelBackpropStats",
    infer=infer_channel_backprop_stats,
    doc="The gradients of SpatialBN's scale and bias for one batch: for each channel the sum of "
    "dY * (X - mean) * inv_std, and of dY. Summed over the devices, they are inputs 5 and 6 of SpatialBNGradient.",
    input_names=("X", "mean", "inv_std", "dY"),
    output_names=("dscale", "dbias"),
    args={"order": ORDER_HELP},
    cost=lambda call, outputs: memory_cost(call, outputs, 4),
)
class ChannelBackpropStats(_ChannelGradient):
    """The gradients of scale and bias of one batch."""

    def prepare(self) -> Step:
        """Block by block of channels."""
        x, mean, inverse, dy = (self.x(index) for index in range(4))
        scale_sum, bias_sum = self.y(0), self.y(1)
        if x.size == 0:
            return in_sequence([partial(scale_sum.fill, 0), partial(bias_sum.fill, 0)])
        pieces = ChannelPieces(self, channel_view(self.call()), x.dtype)
        memory = GradientMemory(pieces)
        steps: list[Step] = []
        for block in pieces.blocks:
            channels, width = block.channels, block.width
            steps += self.sum_steps(pieces, block, (x, dy), mean[channels], memory)
            steps += [
                partial(np.multiply, memory.scale[:width], inverse[channels], out=memory.scale[:width]),
                convert(memory.scale[:width], scale_sum[channels]),
                convert(memory.bias[:width], bias_sum[channels]),
            ]
        return in_sequence(steps)


def infer_spatial_bn_gradient(call: OperatorCall) -> list[TensorType]:
    """dX has the type of X, dscale and dbias that of the scale."""
    channels = require_normalized(call)
    if len(call.inputs) not in (5, 7):
        raise call.fail(f"expected 5 inputs, or 7 with the sums over several devices; found {len(call.inputs)}")
    call.arguments.bool("is_test")
    epsilon_of(call)
    num_batches_of(call)
    require_channel_parameters(call, (1, 3, 4), channels)
    _require_gradient(call, 2)
    for index in range(5, len(call.inputs)):
        call.require_shape(index, (channels,), "one element for each channel of X")
        call.require_types(index, *FLOAT_TYPES)
    vector = TensorType((channels,), call.inputs[1].meta)
    return [call.inputs[0], vector, vector]


@new_operator(
    "SpatialBNGradient",
    inputs=(5, 7),
    infer=infer_spatial_bn_gradient,
    doc="The gradients of SpatialBN. In training inputs 3 and 4 are the saved mean and inverse deviation; with "
    "is_test=1 they are the mean and variance that were given, and dX = dY * scale / sqrt(var + epsilon). With "
    "inputs 5 and 6, those of ChannelBackpropStats summed over `num_batches` batches of this size, dscale and "
    "dbias are these divided by num_batches, so that summing them over the devices gives the whole.",
    input_names=("X", "scale", "dY", "mean", "inv_std (var with is_test=1)", "dscale_sum", "dbias_sum"),
    output_names=("dX", "dscale", "dbias"),
    args={
        "is_test": "1: of inference (default 0)",
        "epsilon": "added to the variance (default 1e-5)",
        "order": ORDER_HELP,
        "num_batches": "batches that dscale_sum and dbias_sum are over (default 1)",
    },
    inplace=lambda source, target: (source, target) == (2, 0),
    cost=lambda call, outputs: memory_cost(call, outputs, 8),
)
class SpatialBNGradient(_ChannelGradient):
    """The gradient of batch normalization."""

    def prepare(self) -> Step:
        """Block by block of channels: the sums, then dX = (dY + (X - mean) * slope) * factor + shift."""
        x, scale, dy, mean, spread = (self.x(index) for index in range(5))
        if x.size == 0:
            return in_sequence([partial(self.y(index).fill, 0) for index in (1, 2)])
        pieces = ChannelPieces(self, channel_view(self.call()), x.dtype)
        memory = GradientMemory(pieces)
        test, epsilon = self.arguments.bool("is_test"), epsilon_of(self.call())
        batches = num_batches_of(self.call())
        inverse = pieces.vector()
        slope, factor, shift = (pieces.vector(wide=False) for _ in range(3))
        steps: list[Step] = []
        for block in pieces.blocks:
            channels, width = block.channels, block.width
            given = tuple(self.x(index)[channels] for index in range(5, len(self.input_blobs)))
            if not given or test:
                steps += self.sum_steps(pieces, block, (x, dy), mean[channels], memory)
            else:
                steps.append(convert(mean[channels], memory.center[:width]))
            terms = Terms(*(vector[:width] for vector in (memory.scale, memory.bias, inverse, slope, factor, shift)))
            outputs = self.y(1)[channels], self.y(2)[channels]
            vectors = scale[channels], spread[channels]
            elements = pieces.count * batches
            if test:
                steps.append(partial(terms.finish_inference, *vectors, epsilon, outputs))
            else:
                steps.append(partial(terms.finish_training, *vectors, elements, batches, given, outputs))
            steps += self._map_steps(pieces, block, memory, terms, lone=len(block.outer) == 1 and not (given or test))
        return in_sequence(steps)

    def _map_steps(
        self, pieces: ChannelPieces, block: ChannelBlock, memory: GradientMemory, terms: Terms, *, lone: bool
    ) -> list[Step]:
        """dX on the pieces of a block; of a lone piece X is centered already."""
        center, centering = pieces.spread(memory.center[: block.width])
        slope, one = pieces.spread(terms.slope)
        factor, two = pieces.spread(terms.factor)
        shift, three = pieces.spread(terms.shift)
        steps: list[Step] = [*centering, *one, *two, *three]
        for outer in block.outer:
            target = pieces.piece(self.y(0), block, outer)
            centered, gradient, reads = self.centered_piece(
                pieces, block, outer, (self.x(0), self.x(2)), center, memory
            )
            narrow = memory.gradient is not None
            steps += [
                *([] if lone else reads),
                partial(np.multiply, centered, slope, out=centered),
                partial(np.add, centered, gradient, out=centered),
                partial(np.multiply, centered, factor, out=centered),
                partial(np.add, centered, shift, out=centered if narrow else target),
            ]
            if narrow:
                steps.append(convert(centered, target))
        return steps


class Terms:
    """For the channels of a block, the sums of a gradient, and dX = (dY + (X - mean) * slope) * factor + shift.

    `scale` holds the sum of dY * (X - mean), `bias` that of dY; they are overwritten.
    """

    def __init__(self, scale: Array, bias: Array, inverse: Array, slope: Array, factor: Array, shift: Array) -> None:
        self.scale, self.bias, self.inverse = scale, bias, inverse
        self.slope, self.factor, self.shift = slope, factor, shift

    def finish_training(
        self,
        scale: Array,
        inverse: Array,
        elements: int,
        batches: int,
        given: tuple[Array, ...],
        outputs: tuple[Array, Array],
    ) -> None:
        """Of training, over `elements` elements a channel; `given` are the sums over all `batches` if there are any."""
        np.copyto(self.inverse, inverse)
        if given:
            np.copyto(self.scale, given[0])
            np.copyto(self.bias, given[1])
        else:
            self.scale *= self.inverse
        np.divide(self.scale, batches, out=outputs[0], casting="same_kind")
        np.divide(self.bias, batches, out=outputs[1], casting="same_kind")
        self.scale *= self.inverse
        np.divide(self.scale, -elements, out=self.slope, casting="same_kind")
        self.inverse *= scale
        np.copyto(self.factor, self.inverse, casting="same_kind")
        self.bias *= self.inverse
        np.divide(self.bias, -elements, out=self.shift, casting="same_kind")

    def finish_inference(self, scale: Array, variance: Array, epsilon: float, outputs: tuple[Array, Array]) -> None:
        """Of inference: the statistics do not depend on X."""
        np.add(variance, epsilon, out=self.inverse, dtype=np.float64)
        np.sqrt(self.inverse, out=self.inverse)
        np.divide(self.scale, self.inverse, out=outputs[0], casting="same_kind")
        np.copyto(outputs[1], self.bias, casting="same_kind")
        np.divide(scale, self.inverse, out=self.factor, casting="same_kind")
        self.slope.fill(0)
        self.shift.fill(0)


@gradient_of("SpatialBN")
def spatial_bn_gradient(request: GradientRequest) -> GradientOperators:
    """SpatialBNGradient(X, scale, dY, saved mean, saved inv_std) -> dX, dscale, dbias; running statistics have none.

    With statistics over several devices, ChannelBackpropStats gives `<scale>_grad_sum` and `<bias>_grad_sum` first,
    which have to be summed over the devices in between.
    """
    request.require_no_dy(3, 4)
    test = request.arguments.bool("is_test")
    statistics = [request.x(3), request.x(4)] if test else [request.y(3), request.y(4)]
    inputs = [request.x(0), request.x(1), request.dy(0), *statistics]
    if test or not request.has_x(5):
        return request.single("SpatialBNGradient", inputs, [0, 1, 2])
    sums = [f"{request.dx(1)}_sum", f"{request.dx(2)}_sum"]
    outputs = [request.dx(index) for index in range(3)]
    made = [
        request.operator("ChannelBackpropStats", [request.x(0), *statistics, request.dy(0)], sums),
        request.operator("SpatialBNGradient", [*inputs, *sums], outputs),
    ]
    return request.result(made, dict(enumerate(outputs)))
