"""SpatialBN: batch normalization, with given statistics in inference and with those of the batch in training."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.operator import Step, in_sequence
from dagexec.core.registry import new_operator
from dagexec.core.rows import first_axis
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import Cost, OperatorCall, TensorType, memory_cost
from dagexec.core.traits import ImageRole, Rows
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array, Index, Scratch, blockwise, compute_dtype, convert, is_narrow
from dagexec.ops.base.channel_statistics import ChannelBlock, ChannelPieces, MomentMemory, channel_view, moment_steps
from dagexec.ops.base.layout import ORDER_HELP, ImageOperator, channel_axis, channel_count, check_blocks, image_order
from dagexec.ops.families.normalization.local_response import epsilon_of, require_channel_parameters
from dagexec.platform.records import dataclass


def num_batches_of(call: OperatorCall) -> int:
    """Argument `num_batches`, by default 1. Raises ArgumentError when it is below."""
    found = call.arguments.int("num_batches", 1)
    if found < 1:
        raise ArgumentError(f"{call.label}: argument 'num_batches' must be at least 1, found {found}")
    return found


def require_normalized(call: OperatorCall) -> int:
    """The channels of X. Raises ShapeError for a type or a number of axes that cannot be normalized."""
    call.require_types(0, *FLOAT_TYPES)
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(shape)}")
    check_blocks(call, 0)
    return channel_count(image_order(call), shape)


def infer_spatial_bn(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; in training there are four vectors, of the type of the parameters."""
    channels = require_normalized(call)
    inputs, outputs = len(call.inputs), len(call.definition.output)
    test = call.arguments.bool("is_test")
    if inputs not in (5, 7) or outputs != (1 if test else 5):
        expected = "1 output" if test else "5 outputs"
        raise call.fail(
            f"with is_test={int(test)} expected 5 inputs (or 7, with sums and sumsq) and {expected}, found {inputs} "
            f"and {outputs}"
        )
    epsilon_of(call)
    require_channel_parameters(call, range(1, 5), channels)
    if test:
        return [call.inputs[0]]
    momentum = call.arguments.float("momentum", 0.9)
    if not 0 <= momentum <= 1:
        raise ArgumentError(f"{call.label}: argument 'momentum' must be in [0, 1], found {momentum:g}")
    num_batches_of(call)
    for index in range(5, inputs):
        call.require_shape(index, (channels,), "one element for each channel of X")
        call.require_types(index, *FLOAT_TYPES)
    return [call.inputs[0], *(TensorType((channels,), call.inputs[1].meta) for _ in range(4))]


def _spatial_bn_inplace(input_index: int, output_index: int) -> bool:
    return (input_index, output_index) in ((0, 0), (3, 1), (4, 2))


def _spatial_bn_cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    return memory_cost(call, outputs, 2 if call.arguments.bool("is_test") else 8)


def _rows(asked: RowsCall) -> Sequence[Rows | None]:
    """Of images on axis 0, where statistics are given and not those of the batch."""
    if not asked.call.arguments.bool("is_test"):
        raise asked.refuse("normalizes by the statistics of the batch")
    return first_axis(asked)


@new_operator(
    "SpatialBN",
    inputs=(5, 7),
    outputs=(1, 5),
    infer=infer_spatial_bn,
    doc="Y = (X - mean) / sqrt(var + epsilon) * scale + bias, a channel each. Ioffe and Szegedy, 2015, "
    "arXiv:1502.03167. With is_test=1 mean and var are inputs 3 and 4. In training they are those of the batch, "
    "var that of the population; or they follow from `sums` and `sumsq`, what ChannelStats gives, summed over "
    "`num_batches` batches of this size. Inputs 3 and 4 become, in place, their values * momentum + those of the "
    "batch * (1 - momentum). A batch without elements changes nothing, and its saved statistics are 0.",
    input_names=("X", "scale", "bias", "mean", "var", "sums", "sumsq"),
    output_names=("Y", "mean", "var", "saved_mean", "saved_inv_std"),
    args={
        "is_test": "1: inference",
        "epsilon": "added to the variance (default 1e-5)",
        "order": ORDER_HELP,
        "momentum": "of the running statistics, in training (default 0.9)",
        "num_batches": "batches that sums and sumsq are over, in training (default 1)",
    },
    required_args=("is_test",),
    inplace=_spatial_bn_inplace,
    enforced_inplace=((3, 1), (4, 2)),
    cost=_spatial_bn_cost,
    results=1,
    image_role=ImageRole.PER_CHANNEL,
    rows=_rows,
)
class SpatialBN(ImageOperator):
    """Batch normalization."""

    def prepare(self) -> Step:
        """With given statistics or with those of the batch."""
        return self._inference() if self.arguments.bool("is_test") else self._training()

    def _inference(self) -> Step:
        """Y = X * factor + shift, with a factor and shift a channel that each run computes anew."""
        x, call = self.x(0), self.call()
        factor, shift, constants = self.affine()
        channels = channel_axis(call)
        view = (factor.size, *(1,) * (x.ndim - channels - 1))
        factors, shifts = factor.reshape(view), shift.reshape(view)
        if not is_narrow(x.dtype):
            y = self.y(0)
            return in_sequence([*constants, partial(np.multiply, x, factors, out=y), partial(np.add, y, shifts, out=y)])
        return in_sequence([*constants, self._narrow_step(factors, shifts)])

    def affine(self) -> tuple[Array, Array, list[Step]]:
        """The factor and shift of each channel in inference, and the steps that compute them."""
        scale, bias, mean, variance = (self.x(index) for index in range(1, 5))
        work = compute_dtype(self.x(0).dtype)
        factor, shift = self.scratch(scale.shape, work), self.scratch(scale.shape, work)
        steps: list[Step] = [
            partial(np.add, variance, np.asarray(epsilon_of(self.call()), work), out=factor),
            partial(np.sqrt, factor, out=factor),
            partial(np.divide, scale, factor, out=factor),
            partial(np.multiply, mean, factor, out=shift),
            partial(np.subtract, bias, shift, out=shift),
        ]
        return factor, shift, steps

    def _narrow_step(self, factors: Array, shifts: Array) -> Step:
        """The affine map of 16-bit floats, piece by piece in float32."""
        x = self.x(0)
        factors, shifts = np.broadcast_to(factors, x.shape), np.broadcast_to(shifts, x.shape)

        def passes(index: Index, source: Array, target: Array, _scratch: Scratch) -> list[Step]:
            return [
                partial(np.multiply, source, factors[index], out=target),
                partial(np.add, target, shifts[index], out=target),
            ]

        return blockwise(self, x, self.y(0), passes)

    def _training(self) -> Step:
        """Block by block of channels: moments, running and saved statistics, then the map."""
        view, x = channel_view(self.call()), self.x(0)
        if x.size == 0:
            return in_sequence([partial(self.y(index).fill, 0) for index in (3, 4)])
        pieces = ChannelPieces(self, view, x.dtype)
        memory = MomentMemory(pieces)
        mean, variance = pieces.vector(), pieces.vector()
        factor, shift = pieces.vector(wide=False), pieces.vector(wide=False)
        momentum, epsilon = self.arguments.float("momentum", 0.9), epsilon_of(self.call())
        scale, bias = self.x(1), self.x(2)
        statistics = tuple(self.y(index) for index in range(1, 5))
        steps: list[Step] = []
        for block in pieces.blocks:
            width = block.width
            means, variances = mean[:width], variance[:width]
            if len(self.input_blobs) == 7:
                steps.append(self._given_moments(block, pieces.count, means, variances, memory.center[:width]))
            else:
                steps += moment_steps(pieces, x, block, means, variances, memory)
                if len(block.outer) > 1:
                    steps.append(partial(np.copyto, memory.center[:width], means, casting="same_kind"))
            kept = tuple(vector[block.channels] for vector in statistics)
            affine = Affine(
                scale[block.channels], bias[block.channels], memory.center[:width], factor[:width], shift[:width]
            )
            steps.append(partial(finish_statistics, means, variances, momentum, epsilon, kept, affine))
            steps += self._map_steps(pieces, block, memory, factor[:width], shift[:width])
        return in_sequence(steps)

    def _given_moments(self, block: ChannelBlock, count: int, mean: Array, variance: Array, center: Array) -> Step:
        """Mean and variance from sums over several batches."""
        sums, squares = (self.x(index)[block.channels] for index in (5, 6))
        elements = num_batches_of(self.call()) * count

        def step() -> None:
            np.divide(sums, elements, out=mean)
            np.divide(squares, elements, out=variance)
            np.subtract(variance, mean * mean, out=variance)
            np.maximum(variance, 0, out=variance)
            np.copyto(center, mean, casting="same_kind")

        return step

    def _map_steps(
        self, pieces: ChannelPieces, block: ChannelBlock, memory: MomentMemory, factor: Array, shift: Array
    ) -> list[Step]:
        """Y = (X - center) * factor + shift on the pieces of a block; a lone piece is centered already."""
        center, centering = pieces.spread(memory.center[: block.width])
        factors, spreads = pieces.spread(factor)
        shifts, more = pieces.spread(shift)
        lone = len(block.outer) == 1 and len(self.input_blobs) == 5
        steps: list[Step] = [*([] if lone else centering), *spreads, *more]
        for outer in block.outer:
            target = pieces.piece(self.y(0), block, outer)
            centered = pieces.cut(memory.centered, block, outer)
            if not lone:
                source, reads = pieces.read(self.x(0), block, outer, memory.spare)
                steps += [*reads, partial(np.subtract, source, center, out=centered)]
            narrow = memory.spare is not None
            steps.append(partial(np.multiply, centered, factors, out=centered))
            steps.append(partial(np.add, centered, shifts, out=centered if narrow else target))
            if narrow:
                steps.append(convert(centered, target))
        return steps


@dataclass(frozen=True, slots=True)
class Affine:
    """Vectors with an element a channel: Y = (X - center) * factor + shift, where Y has that scale and bias."""

    scale: Array
    bias: Array
    center: Array
    factor: Array
    shift: Array


def finish_statistics(
    mean: Array,
    variance: Array,
    momentum: float,
    epsilon: float,
    statistics: tuple[Array, ...],
    affine: Affine | None,
) -> None:
    """From the moments (float64) of some channels, what training keeps of them, and the map of their elements.

    `statistics` are running mean and variance, saved mean and inverse deviation. `mean` and `variance` are overwritten.
    """
    running_mean, running_variance, saved_mean, saved_inverse = statistics
    np.copyto(saved_mean, mean, casting="same_kind")
    running_mean[...] = running_mean * np.float64(momentum) + mean * (1 - momentum)
    running_variance[...] = running_variance * np.float64(momentum) + variance * (1 - momentum)
    variance += epsilon
    np.sqrt(variance, out=variance)
    np.reciprocal(variance, out=variance)
    np.copyto(saved_inverse, variance, casting="same_kind")
    if affine is None:
        return
    variance *= affine.scale
    np.copyto(affine.factor, variance, casting="same_kind")
    mean -= affine.center
    mean *= variance
    np.subtract(affine.bias, mean, out=affine.shift, casting="same_kind")
