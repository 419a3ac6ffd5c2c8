"""Normalize and NormalizeL1: vectors along an axis divided by their length, and the gradient of the first."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from functools import partial

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import gradient_by, no_gradient
from dagexec.core.operator import Operator, Step, in_sequence
from dagexec.core.registry import declares
from dagexec.core.rows import apart_from, summing
from dagexec.core.schema import OperatorCall, OpSchema, TensorType, memory_cost
from dagexec.ops.base.blocks import BLOCK, Array, Scratch, block_indices, compute_dtype, convert, is_narrow
from dagexec.ops.base.passes import scalar_pass

MIN_LENGTH = 1e-12
"""A shorter vector is divided by this, as in Caffe2."""

ARGUMENTS = {"axis": "the axis of the vectors (default -1)"}

no_gradient("NormalizeL1")


def vectors_view(call: OperatorCall) -> tuple[int, int, int]:
    """The shape of input 0 as outer x members x inner, members along `axis`. Raises ShapeError for a bad axis."""
    shape = call.inputs[0].shape
    axis = call.axis("axis", -1, len(shape))
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def infer_same(call: OperatorCall) -> list[TensorType]:
    """The type of X, which all inputs have."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    vectors_view(call)
    for index in range(1, len(call.inputs)):
        call.require_shape(index, call.inputs[0].shape, "the shape of X")
    return [call.inputs[0]]


class _Vectors(Operator):
    """Base: pieces of whole vectors, members on axis 1, in float32 where they are of 16 bits."""

    def prepare(self) -> Step:
        view = vectors_view(self.call())
        tensors = [self.x(index).reshape(view) for index in range(len(self.input_blobs))]
        result = self.y(0).reshape(view)
        if result.size == 0:
            return in_sequence([])
        work = compute_dtype(result.dtype)
        count = min(view[0], max(1, BLOCK // (view[1] * view[2])))
        scratch, wide = (Scratch(self, count * view[1] * view[2], work) for _ in range(2))
        steps: list[Step] = []
        for (piece,) in block_indices(view[:1], count):
            sources, target = [tensor[piece] for tensor in tensors], result[piece]
            if not is_narrow(target.dtype):
                steps += self.passes(sources, target, scratch)
                continue
            copies = [wide(number, source.shape) for number, source in enumerate(sources)]
            out = wide(len(copies), target.shape)
            steps += [convert(source, copy) for source, copy in zip(sources, copies, strict=True)]
            steps += [*self.passes(copies, out, scratch), convert(out, target)]
        return in_sequence(steps)

    @abstractmethod
    def passes(self, sources: Sequence[Array], y: Array, scratch: Scratch) -> list[Step]:
        """The NumPy calls for a piece."""


def _normalized(call: OperatorCall) -> list[int]:
    return [call.axis("axis", -1, len(call.inputs[0].shape))]


@declares
def _operator(name: str, inputs: tuple[str, ...], output: str, doc: str) -> OpSchema:
    return OpSchema(
        name,
        infer=infer_same,
        doc=doc,
        input_names=inputs,
        output_names=(output,),
        args=ARGUMENTS,
        cost=lambda call, outputs: memory_cost(call, outputs, 4),
        rows=summing(apart_from(_normalized, *range(len(inputs))), _normalized),
    )


def _length_passes(x: Array, squares: Array, length: Array) -> list[Step]:
    """The passes that write the length of each vector, at least MIN_LENGTH."""
    return [
        partial(np.square, x, out=squares),
        partial(np.add.reduce, squares, axis=1, keepdims=True, out=length),
        partial(np.sqrt, length, out=length),
        scalar_pass(np.maximum, length, MIN_LENGTH, length),
    ]


def _length_memory(x: Array, scratch: Scratch, index: int) -> Array:
    return scratch(index, (x.shape[0], 1, x.shape[2]))


@_operator("Normalize", ("X",), "Y", "Y = X / max(Euclidean length of the vector along `axis`, 1e-12).")
class Normalize(_Vectors):
    """Vectors of Euclidean length 1."""

    def passes(self, sources: Sequence[Array], y: Array, scratch: Scratch) -> list[Step]:
        [x] = sources
        length = _length_memory(x, scratch, 0)
        return [*_length_passes(x, y, length), partial(np.divide, x, length, out=y)]


@_operator(
    "NormalizeGradient",
    ("X", "dY"),
    "dX",
    "dX = (dY - Y * (sum of dY * Y along `axis`)) / max(length, 1e-12), with Y = X / max(length, 1e-12).",
)
class NormalizeGradient(_Vectors):
    """The gradient of Normalize."""

    def passes(self, sources: Sequence[Array], y: Array, scratch: Scratch) -> list[Step]:
        """The formula; `y` is dX."""
        x, dy = sources
        length, along = _length_memory(x, scratch, 0), _length_memory(x, scratch, 1)
        unit = scratch(2, x.shape)
        return [
            *_length_passes(x, unit, length),
            partial(np.divide, x, length, out=unit),
            partial(np.multiply, dy, unit, out=y),
            partial(np.add.reduce, y, axis=1, keepdims=True, out=along),
            partial(np.multiply, unit, along, out=unit),
            partial(np.subtract, dy, unit, out=y),
            partial(np.divide, y, length, out=y),
        ]


@_operator(
    "NormalizeL1", ("X",), "Y", "Y = X / (sum of |X| along `axis`); a vector of zeros stays. It has no gradient."
)
class NormalizeL1(_Vectors):
    """Vectors whose absolute values sum to 1."""

    def passes(self, sources: Sequence[Array], y: Array, scratch: Scratch) -> list[Step]:
        [x] = sources
        length = _length_memory(x, scratch, 0)
        return [
            partial(np.absolute, x, out=y),
            partial(np.add.reduce, y, axis=1, keepdims=True, out=length),
            partial(_replace_zeros, length),
            partial(np.divide, x, length, out=y),
        ]


def _replace_zeros(lengths: Array) -> None:
    lengths[lengths == 0] = 1


gradient_by("Normalize", "NormalizeGradient", ("X", "dY"))
