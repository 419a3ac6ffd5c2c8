"""Buckets: several tensors as one flat array, which is cheaper to send and to add than each of them.

PackBucket(x, y) -> flat, BucketSum(flat, other_flat) -> flat, UnpackBucket(flat, x, y) -> x, y.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.gradient import no_gradient
from dagexec.core.operator import Operator, Step, in_sequence, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.schema import UNBOUNDED, OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.families.communication.collectives import Array, divide


def infer_pack(call: OperatorCall) -> Sequence[TensorType]:
    """One axis, with all elements."""
    return [TensorType((sum(kind.elements for kind in call.inputs),), call.require_same_type())]


def infer_unpack(call: OperatorCall) -> Sequence[TensorType]:
    """The types of the tensors, which together have as many elements as the bucket. Raises ShapeError."""
    call.require_same_type()
    bucket, tensors = call.inputs[0], call.inputs[1:]
    if len(tensors) != len(call.definition.output):
        raise call.fail(f"expected an output for each of {len(tensors)} tensors, found {len(call.definition.output)}")
    elements = sum(kind.elements for kind in tensors)
    if bucket.elements != elements:
        raise call.fail(f"the bucket must have the {elements} elements of the tensors, found {bucket.elements}")
    return tensors


def infer_sum(call: OperatorCall) -> Sequence[TensorType]:
    """The type that all inputs share. Raises ShapeError, or ArgumentError for a bad divisor."""
    meta = call.require_same_type()
    for index in range(1, len(call.inputs)):
        call.require_shape(index, call.inputs[0].shape, "that of the first input")
    divisor = call.arguments.int("divisor", 1)
    if divisor < 1:
        raise ArgumentError(f"{call.label}: argument 'divisor' must be at least 1, found {divisor}")
    if divisor > 1 and meta.numpy.kind in "iub":
        raise call.fail("the mean of integers is not an integer: only sums are supported")
    return [call.inputs[0]]


def _segments(bucket: Array, tensors: Sequence[Array]) -> list[Array]:
    """The part of `bucket` that belongs to each of `tensors`, in its shape."""
    ends = list(itertools.accumulate((tensor.size for tensor in tensors), initial=0))
    return [
        bucket[start:end].reshape(tensor.shape)
        for tensor, (start, end) in zip(tensors, itertools.pairwise(ends), strict=True)
    ]


@new_operator(
    "PackBucket",
    inputs=(1, UNBOUNDED),
    infer=infer_pack,
    doc="All elements of the inputs, one tensor behind the other.",
    input_names=("X0, X1, ...",),
    output_names=("bucket (one axis)",),
)
class PackBucket(Operator):
    """One copy a tensor."""

    def prepare(self) -> Step:
        """Into its part of the bucket."""
        tensors = [self.x(index) for index in range(len(self.input_blobs))]
        parts = _segments(self.y(0), tensors)
        return in_sequence([partial(np.copyto, part, x) for part, x in zip(parts, tensors, strict=True) if x.size])


@new_operator(
    "UnpackBucket",
    inputs=(2, UNBOUNDED),
    outputs=(1, UNBOUNDED),
    infer=infer_unpack,
    doc="Writes the parts of a bucket to tensors of the shapes of X0, X1, ...: undoes PackBucket.",
    input_names=("bucket (one axis)", "X0, X1, ..."),
    output_names=("Y0, Y1, ... (each may overwrite its X)",),
    inplace=lambda input_index, output_index: input_index == output_index + 1,
)
class UnpackBucket(Operator):
    """One copy a tensor."""

    def prepare(self) -> Step:
        """Out of its part of the bucket."""
        tensors = [self.y(index) for index in range(len(self.output_blobs))]
        parts = _segments(self.x(0), tensors)
        return in_sequence([partial(np.copyto, y, part) for part, y in zip(parts, tensors, strict=True) if y.size])


@new_operator(
    "BucketSum",
    inputs=(1, UNBOUNDED),
    infer=infer_sum,
    doc="Y = (X0 + X1 + ...) / divisor, added from left to right, element by element.",
    input_names=("X0, X1, ...",),
    output_names=("Y",),
    args={"divisor": "the sum is divided by it (default 1)"},
    inplace=lambda input_index, output_index: input_index < 2 and output_index == 0,
)
class BucketSum(Operator):
    """A sum, or a mean."""

    def prepare(self) -> Step:
        """The first addition writes Y, so that Y may be one of the first two inputs."""
        y = self.y(0)
        first, *rest = (self.x(index) for index in range(len(self.input_blobs)))
        steps: list[Step] = []
        if rest:
            steps.append(partial(np.add, first, rest[0], out=y))
            steps += [partial(np.add, y, x, out=y) for x in rest[1:]]
        elif first is not y:
            steps.append(partial(np.copyto, y, first))
        divisor = self.arguments.int("divisor", 1)
        if divisor > 1:
            steps.append(partial(divide, y, divisor))
        return in_sequence(steps) if steps else nothing_to_do


no_gradient("PackBucket", "UnpackBucket", "BucketSum")
