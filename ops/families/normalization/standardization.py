"""Normalization by the tensor's own mean and variance: InstanceNorm, LayerNorm, GroupNorm.

All three subtract the mean of a group of elements, divide by its standard deviation, and apply a scale and bias. They
differ in what a group is, which a `Grouping` says.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.expressions import Expression, element, row_mean, sqrt, square
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import new_operator, operator
from dagexec.core.rows import before_axis, first_axis
from dagexec.core.schema import OperatorCall, TensorType, first_to_first, memory_cost, no_inplace
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, block_indices, compute_dtype, convert, is_narrow
from dagexec.ops.base.layout import ORDER_HELP, channel_axis, channels_last
from dagexec.ops.base.passes import scalar_pass
from dagexec.ops.families.normalization.local_response import epsilon_of, require_channel_parameters
from dagexec.platform.records import dataclass


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which elements are normalized together.

    Attributes:
        view: the shape X is seen under; its first axis is the batch.
        axes: the axes of the view that a mean is over.
        affine: the shape under which scale and bias broadcast to the view.
        statistics: the shape of the outputs that hold a mean and a deviation a group.
    """

    view: tuple[int, ...]
    axes: tuple[int, ...]
    affine: tuple[int, ...]
    statistics: tuple[int, ...]

    @property
    def members(self) -> int:
        """Elements of a group."""
        return math.prod(self.view[axis] for axis in self.axes)

    @property
    def reduced(self) -> tuple[int, ...]:
        """The view with the axes that a mean is over of size 1."""
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.view))


def instance_grouping(call: OperatorCall) -> Grouping:
    """A group is one channel of one image. Raises ShapeError."""
    shape = call.inputs[0].shape
    if len(shape) < 3:
        raise call.fail(f"X must have at least 3 axes, found {len(shape)}")
    axis = channel_axis(call)
    batch, channels, pixels = shape[0], shape[axis], math.prod(shape[1:axis]) * math.prod(shape[axis + 1 :])
    if channels_last(call):
        return Grouping((batch, pixels, channels), (1,), (channels,), (batch, channels))
    return Grouping((batch, channels, pixels), (2,), (channels, 1), (batch, channels))


def group_grouping(call: OperatorCall) -> Grouping:
    """A group is `channels / group` neighboring channels of one image. Raises ShapeError or ArgumentError."""
    shape = call.inputs[0].shape
    if len(shape) < 2:
        raise call.fail(f"X must have at least 2 axes, found {len(shape)}")
    axis = channel_axis(call)
    groups = call.arguments.int("group", 32)
    if groups < 1 or shape[axis] % groups:
        raise ArgumentError(f"{call.label}: 'group' must divide the {shape[axis]} channels, found {groups}")
    batch, width, pixels = shape[0], shape[axis] // groups, math.prod(shape[1:axis]) * math.prod(shape[axis + 1 :])
    if channels_last(call):
        return Grouping((batch, pixels, groups, width), (1, 3), (groups, width), (batch, groups))
    return Grouping((batch, groups, width, pixels), (2, 3), (groups, width, 1), (batch, groups))


def first_normalized(call: OperatorCall) -> int:
    """The first axis of those that LayerNorm normalizes."""
    return call.axis("axis", 1, len(call.inputs[0].shape))


def layer_grouping(call: OperatorCall) -> Grouping:
    """A group is all elements that share their indices before `axis`. Raises ShapeError."""
    shape = call.inputs[0].shape
    axis = call.axis("axis", 1, len(shape))
    members = math.prod(shape[axis:])
    return Grouping((math.prod(shape[:axis]), members), (1,), (members,), (*shape[:axis], 1))


def infer_channel_affine(grouping: Callable[[OperatorCall], Grouping]) -> Callable[[OperatorCall], list[TensorType]]:
    """Inference for an operator with a scale and bias a channel."""

    def infer(call: OperatorCall) -> list[TensorType]:
        meta = call.require_types(0, *FLOAT_TYPES)
        epsilon_of(call)
        groups = grouping(call)
        require_channel_parameters(call, (1, 2), math.prod(groups.affine))
        statistics = TensorType(groups.statistics, meta)
        return [call.inputs[0], statistics, statistics][: len(call.definition.output)]

    return infer


def infer_layer_norm(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; mean and std one element a group."""
    meta = call.require_types(0, *FLOAT_TYPES)
    epsilon_of(call)
    groups = layer_grouping(call)
    affine = call.arguments.bool("elementwise_affine", len(call.inputs) == 3)
    if len(call.inputs) != (3 if affine else 1):
        raise call.fail(f"elementwise_affine={int(affine)} requires {3 if affine else 1} input(s)")
    normalized = call.inputs[0].shape[len(groups.statistics) - 1 :]
    for index in range(1, len(call.inputs)):
        call.require_shape(index, normalized, "X's axes from 'axis' on")
    if affine:
        call.require_same_type()
    statistics = TensorType(groups.statistics, meta)
    return [call.inputs[0], statistics, statistics][: len(call.definition.output)]


def _layer_expression(call: OperatorCall) -> Expression | None:
    if first_normalized(call) < len(call.inputs[0].shape) - 1:
        return None
    below = element(0) - row_mean(element(0))
    inverse = 1 / sqrt(row_mean(square(below)) + epsilon_of(call))
    return below * inverse * element(1) + element(2) if len(call.inputs) == 3 else below * inverse


EPSILON_HELP = "added to the variance (default 1e-5)"


class _Standardize(Operator):
    """Base: Y = (X - mean) / sqrt(variance + epsilon) * scale + bias, a mean and variance a group.

    Attributes:
        inverse: output 2 holds 1 / sqrt(variance + epsilon) instead of the root itself.
    """

    inverse = True

    @abstractmethod
    def grouping(self) -> Grouping:
        """What a group is."""

    def prepare(self) -> Step:
        """Piece by piece of the batch."""
        x, groups = self.x(0), self.grouping()
        if x.size == 0:
            return in_sequence([partial(self.y(index).fill, np.nan) for index in range(1, len(self.output_blobs))])
        work = compute_dtype(x.dtype)
        batch = groups.view[0]
        count = min(batch, max(1, BLOCK // math.prod(groups.view[1:])))
        scratch = Scratch(self, count * math.prod(groups.view[1:]), work)
        small = Scratch(self, count * math.prod(groups.reduced[1:]), work)
        source, target = x.reshape(groups.view), self.y(0).reshape(groups.view)
        steps: list[Step] = []
        for (piece,) in block_indices((batch,), count):
            part, out = source[piece], target[piece]
            statistics = tuple(small(index, (len(part), *groups.reduced[1:])) for index in range(3))
            if is_narrow(x.dtype):
                wide = scratch(1, part.shape)
                steps.append(convert(part, wide))
                steps += self._passes(groups, wide, wide, scratch(0, part.shape), statistics)
                steps.append(convert(wide, out))
            else:
                steps += self._passes(groups, part, out, scratch(0, part.shape), statistics)
            for index, found in ((1, statistics[0]), (2, statistics[2 if self.inverse else 1])):
                if index < len(self.output_blobs):
                    steps.append(convert(found, self.y(index).reshape(groups.reduced)[piece]))
        return in_sequence(steps)

    def _passes(
        self, groups: Grouping, x: Array, y: Array, squares: Array, statistics: tuple[Array, ...]
    ) -> list[Step]:
        """The passes for a piece; `statistics` are arrays for its means, deviations, and their inverses."""
        mean, deviation, inverse = statistics
        epsilon = self.arguments.float("epsilon", 1e-5)
        steps: list[Step] = [
            partial(np.add.reduce, x, axis=groups.axes, keepdims=True, out=mean),
            scalar_pass(np.divide, mean, groups.members, mean),
            partial(np.subtract, x, mean, out=y),
            partial(np.square, y, out=squares),
            partial(np.add.reduce, squares, axis=groups.axes, keepdims=True, out=deviation),
            scalar_pass(np.divide, deviation, groups.members, deviation),
            scalar_pass(np.add, deviation, epsilon, deviation),
            partial(np.sqrt, deviation, out=deviation),
            partial(np.divide, np.ones((), x.dtype), deviation, out=inverse),
            partial(np.multiply, y, inverse, out=y),
        ]
        if len(self.input_blobs) == 3:
            scale, bias = self.x(1).reshape(groups.affine), self.x(2).reshape(groups.affine)
            steps += [partial(np.multiply, y, scale, out=y), partial(np.add, y, bias, out=y)]
        return steps


@new_operator(
    "InstanceNorm",
    outputs=(1, 3),
    infer=infer_channel_affine(instance_grouping),
    doc="Normalizes each channel of each image by its own mean and variance over the pixels. Ulyanov et al., 2016, "
    "arXiv:1607.08022.",
    input_names=("X", "scale", "bias"),
    output_names=("Y", "mean", "inv_std"),
    args={"epsilon": EPSILON_HELP, "order": ORDER_HELP},
    inplace=first_to_first,
    cost=lambda call, outputs: memory_cost(call, outputs, 8),
    onnx=(OnnxName("InstanceNormalization", 22, {"epsilon": "epsilon"}),),
    results=1,
    rows=first_axis,
)
class InstanceNorm(_Standardize):
    """Instance normalization."""

    def grouping(self) -> Grouping:
        return instance_grouping(self.call())


@new_operator(
    "GroupNorm",
    outputs=(1, 3),
    infer=infer_channel_affine(group_grouping),
    doc="Normalizes groups of neighboring channels of each image. Wu and He, 2018, arXiv:1803.08494.",
    input_names=("X", "scale", "bias"),
    output_names=("Y", "mean", "inv_std"),
    args={"group": "groups of channels (default 32)", "epsilon": EPSILON_HELP, "order": ORDER_HELP},
    inplace=no_inplace,
    cost=lambda call, outputs: memory_cost(call, outputs, 8),
    onnx=(OnnxName("GroupNormalization", 21, {"num_groups": "group", "epsilon": "epsilon"}),),
    results=1,
    rows=first_axis,
)
class GroupNorm(_Standardize):
    """Group normalization."""

    def grouping(self) -> Grouping:
        return group_grouping(self.call())


@new_operator(
    "LayerNorm",
    inputs=(1, 3),
    outputs=(1, 3),
    infer=infer_layer_norm,
    doc="Normalizes over the axes from `axis` on, with an optional scale and bias an element. Ba et al., 2016, "
    "arXiv:1607.06450.",
    input_names=("X", "gamma", "beta"),
    output_names=("Y", "mean", "std"),
    args={
        "axis": "first axis that is normalized over (default 1)",
        "epsilon": EPSILON_HELP,
        "elementwise_affine": "1: with gamma and beta (default: 1 when they are given)",
    },
    cost=lambda call, outputs: memory_cost(call, outputs, 8),
    results=1,
    expression=_layer_expression,
    rows=before_axis(first_normalized),
)
class LayerNorm(_Standardize):
    """Layer normalization."""

    inverse = False

    def grouping(self) -> Grouping:
        return layer_grouping(self.call())


operator(replace(LayerNorm.schema, type="C10LayerNorm_DontUseThisOpYet"))(
    type("C10LayerNorm", (LayerNorm,), {"__doc__": "LayerNorm under a name that exporters had for a while."})
)
