"""Affine maps of channels: y = factor * x + shift, with a factor and a shift a channel, and which operators are one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dagexec.compiler.passes.draft import Array, Draft
from dagexec.core.dtypes import from_numpy
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import DagexecError
from dagexec.ops.base.broadcasting import operand_views
from dagexec.ops.families.activation.post_ops import as_post_ops
from dagexec.platform.records import dataclass

Vector = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Affine:
    """y = factor * x + shift; both have an element a channel."""

    factor: Vector
    shift: Vector

    def then(self, other: Affine) -> Affine:
        """This map, and `other` after it."""
        return Affine(self.factor * other.factor, self.shift * other.factor + other.shift)

    @property
    def is_finite(self) -> bool:
        """True when no number is infinite or NaN."""
        return bool(np.isfinite(self.factor).all() and np.isfinite(self.shift).all())


def identity(channels: int) -> Affine:
    """The map that changes nothing."""
    return Affine(np.ones(channels), np.zeros(channels))


@dataclass(frozen=True)
class Channels:
    """The tensors an affine map may be on: `count` channels on axis `axis` of `rank` axes, of one element type."""

    count: int
    axis: int
    rank: int
    dtype: np.dtype[np.generic]


def affine_of(draft: Draft, number: int, source: str, channels: Channels) -> Affine | None:
    """The map that free operator `number` is on input `source`; None when it is none, or not the same everywhere.

    Batch normalization in inference, and sums, differences, products and quotients with constants.
    """
    definition = draft[number]
    if list(definition.input).count(source) != 1:
        return None
    found: Affine | None = None
    if definition.type == "SpatialBN":
        found = _normalization(draft, number, source, channels)
    elif (post_ops := as_post_ops(definition)) and len(post_ops) == 1:
        [post_op] = post_ops
        if post_op.kind == "linear":
            found = Affine(np.full(channels.count, post_op.a), np.full(channels.count, post_op.b))
        elif len(definition.input) == 2:
            position = list(definition.input).index(source)
            other = constant_vector(draft, definition, 1 - position, channels)
            found = None if other is None else _with_constant(post_op.kind, position, other)
    return found if found is not None and found.is_finite else None


def _with_constant(kind: str, position: int, other: Vector) -> Affine | None:
    """The binary post-op of x at `position` and a constant at the other place, where that is an affine map."""
    one, zero = np.ones_like(other), np.zeros_like(other)
    if kind == "add":
        return Affine(one, other)
    if kind == "sub":
        return Affine(one, -other) if position == 0 else Affine(-one, other)
    if kind == "mul":
        return Affine(other, zero)
    return Affine(one / other, zero) if kind == "div" and position == 0 and other.all() else None


def normalization(draft: Draft, number: int) -> Affine | None:
    """The map of a SpatialBN in inference with constant parameters: factor = scale / sqrt(var + epsilon).

    Ioffe and Szegedy 2015, arXiv:1502.03167, algorithm 2.
    """
    definition, arguments = draft[number], draft.arguments(number)
    given = [draft.constant(name) for name in definition.input[1:5]]
    known = [array for array in given if array is not None and from_numpy(array.dtype).is_float]
    vectors = [array.astype(np.float64) for array in known]
    same = len(vectors) == 4 and all(vector.ndim == 1 and vector.shape == vectors[0].shape for vector in vectors)
    if not same or not arguments.int("is_test", 0) or len(definition.output) != 1:
        return None
    scale, bias, mean, variance = vectors
    with np.errstate(all="ignore"):
        factor = scale / np.sqrt(variance + arguments.float("epsilon", 1e-5))
        return Affine(factor, bias - mean * factor)


def _normalization(draft: Draft, number: int, source: str, channels: Channels) -> Affine | None:
    if draft[number].input[0] != source or channels.rank < 2:
        return None
    last = draft.arguments(number).string("order", "NCHW").upper() == "NHWC"
    found = normalization(draft, number) if channels.axis == (channels.rank - 1 if last else 1) else None
    return found if found is not None and found.factor.size == channels.count else None


def constant_vector(draft: Draft, definition: Node, position: int, channels: Channels) -> Vector | None:
    """Constant input `position` of a binary operator as a number a channel of the other; None when it is not that."""
    array = draft.constant(definition.input[position])
    if array is None or array.dtype != channels.dtype:
        return None
    view = _broadcast_view(definition, position, array, channels)
    if view is None or len(view) > channels.rank:
        return None
    padded = (*(1,) * (channels.rank - len(view)), *view)
    if any(size != 1 for axis, size in enumerate(padded) if axis != channels.axis):
        return None
    if padded[channels.axis] not in (1, channels.count):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (channels.count,))


def _broadcast_view(definition: Node, position: int, array: Array, channels: Channels) -> Sequence[int] | None:
    """The shape under which the constant broadcasts by NumPy's rule; None when it does not, or decides the result's."""
    arguments = definition.arguments()
    if schema_of(definition.type).inputs[1] > 2 or not arguments.int("broadcast", 0):
        return array.shape
    if position == 0:
        return None
    sizes = [1 + max(channels.count, *array.shape, 0)] * channels.rank  # which no axis of the constant has
    sizes[channels.axis] = channels.count
    meta = from_numpy(array.dtype)
    try:
        kinds = (TensorType(tuple(sizes), meta), TensorType(array.shape, meta))
        return operand_views(OperatorCall(definition, arguments, kinds, (None, None), definition.type))[1]
    except DagexecError:
        return None
