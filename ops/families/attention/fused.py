"""FusedAttention: what pass `attention` makes of the products, masks and softmax that a model spells out.

Unlike `Attention`, ONNX's operator, it computes what these operators compute to the last infinity: a query that sees
no key has no number in it, unless the model replaces what is no number by zero, as PyTorch's exporters do. Queries,
keys and values are read where they lie: their axes may be in any order, and that of the result is given, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import ArrayOperator
from dagexec.ops.base.blocks import Array, compute_dtype, row_pieces
from dagexec.ops.families.attention.attention import cap
from dagexec.platform.host_memory import check_fits
from dagexec.platform.records import dataclass

FUSED_ATTENTION = "FusedAttention"
_PIECE = 1 << 19  # scores computed at a time: 2 MiB of float32
_OPERANDS = ("q_axes", "k_axes", "v_axes")


@dataclass(frozen=True)
class FusedSizes:
    """Sizes that the inputs agree on, and how their axes are ordered.

    Attributes:
        batch, heads, key_heads, queries, keys, width, value_width: as `AttentionSizes` has them.
        axes: of Q, K and V: which axis is the batch, the heads, the positions, the elements.
        y_axes: which of batch, heads, queries and elements is each axis of Y.
        mask, bias: numbers of inputs; None where absent.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    value_width: int
    axes: tuple[tuple[int, ...], ...]
    y_axes: tuple[int, ...]
    mask: int | None
    bias: int | None

    @property
    def scores(self) -> tuple[int, int, int, int]:
        """The shape of the scores: what mask and bias broadcast to."""
        return self.batch, self.heads, self.queries, self.keys

    def by_head(self, array: Array, operand: int) -> Array:
        """Q, K or V (0, 1, 2) as batch, heads, positions, elements: a view."""
        found = array.transpose(self.axes[operand])
        return np.broadcast_to(found, (self.batch, *found.shape[1:]))

    @property
    def y_by_head(self) -> tuple[int, ...]:
        """The axes of Y that are the batch, the heads, the queries and the elements."""
        return tuple(int(axis) for axis in np.argsort(self.y_axes))


def _axes(call: OperatorCall, name: str) -> tuple[int, ...]:
    found = tuple(call.arguments.ints(name)) or (0, 1, 2, 3)
    if sorted(found) != [0, 1, 2, 3]:
        raise ArgumentError(f"{call.label}: argument {name!r} must be a permutation of 0, 1, 2, 3, found {found}")
    return found


def read_fused_attention(call: OperatorCall) -> FusedSizes:
    """The sizes. Raises ArgumentError or ShapeError for what does not fit."""
    with_mask, with_bias = (call.arguments.bool(name) for name in ("mask", "bias"))
    if len(call.inputs) != 3 + with_mask + with_bias:
        raise call.fail(f"with mask={with_mask:d} and bias={with_bias:d} expected {3 + with_mask + with_bias} inputs")
    axes = tuple(_axes(call, name) for name in _OPERANDS)
    shapes = [tuple(call.require_rank(index, 4)[axis] for axis in order) for index, order in enumerate(axes)]
    (_, heads, queries, width), (_, key_heads, keys, _), (*_, value_width) = shapes
    mask, bias = 3 if with_mask else None, 3 + with_mask if with_bias else None
    batches = [shape[0] for shape in shapes]
    batches += [
        call.inputs[index].shape[0]
        for index in (mask, bias)
        if index is not None and len(call.inputs[index].shape) == 4
    ]
    batch = max(batches, key=lambda size: (size != 1, size))
    fits = shapes[1][1:] == (key_heads, keys, width) and shapes[2][1:] == (key_heads, keys, value_width)
    if not fits or not {1, batch}.issuperset(batches):
        raise call.fail(f"queries, keys and values do not fit each other: {shapes}")
    if heads and (not key_heads or heads % key_heads):
        raise call.fail(f"{heads} heads of queries cannot share {key_heads} of keys")
    y_axes = _axes(call, "y_axes")
    return FusedSizes(batch, heads, key_heads, queries, keys, width, value_width, axes, y_axes, mask, bias)


def infer_fused_attention(call: OperatorCall) -> list[TensorType]:
    """Y, of the type of Q."""
    sizes = read_fused_attention(call)
    for index in (1, 2):
        call.require_same_type(0, index)
    for own, metas in ((sizes.mask, (BOOL,)), (sizes.bias, FLOAT_TYPES)):
        if own is not None:
            call.require_types(own, *metas)
            shape = call.inputs[own].shape
            if len(shape) > 4 or any(a not in (1, b) for a, b in zip(shape[::-1], sizes.scores[::-1], strict=False)):
                raise call.fail(f"input {call.definition.input[own]!r} must broadcast to {sizes.scores}")
    if call.arguments.float("softcap", 0.0) < 0 or not math.isfinite(call.arguments.float("scale", 1.0)):
        raise ArgumentError(f"{call.label}: 'softcap' must not be negative, and 'scale' finite")
    y = (sizes.batch, sizes.heads, sizes.queries, sizes.value_width)
    return [TensorType(tuple(y[axis] for axis in sizes.y_axes), call.require_types(0, *FLOAT_TYPES))]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    sizes = read_fused_attention(call)
    flops = math.prod(sizes.scores) * (2 * sizes.width + 2 * sizes.value_width + 20)
    return Cost(flops, sum(one.nbytes for one in call.inputs), sum(one.nbytes for one in outputs))


def _rows(asked: RowsCall) -> list[Rows | None]:
    """Rows are on the axis of the batch; or of the heads, where each has keys of its own."""
    asked.require_uncounted()
    sizes, found = read_fused_attention(asked.call), {}
    for index, rows in enumerate(asked.rows):
        if rows is not None:
            place = sizes.axes[index].index(rows.axis) if index < 3 else rows.axis + 4 - asked.rank(index)
            if place > (sizes.heads == sizes.key_heads):
                raise asked.mixes(rows.axis)
            found[index] = rows.at(place)
    common = asked.common(found)
    return asked.all_outputs(common.at(sizes.y_axes.index(common.axis)))


@new_operator(
    FUSED_ATTENTION,
    inputs=(3, 5),
    outputs=(1, 1),
    infer=infer_fused_attention,
    doc="Y = softmax(scale Q K^T, masked, + bias) V for each head, as MatMul, Mul, Where, Add, Softmax and MatMul "
    "compute it. (dagexec's own, for passes.)",
    input_names=(
        "Q",
        "K, with as many heads or a divisor of them",
        "V",
        "mask, with mask=1: bool, broadcast to batch x heads x queries x keys",
        "bias, with bias=1: likewise, added",
    ),
    output_names=("Y",),
    args={
        **{
            name: f"the axes of {name[0].upper()} that are batch, heads, positions and elements (default 0 1 2 3)"
            for name in _OPERANDS
        },
        "y_axes": "which of batch, heads, queries and elements (0 to 3) is each axis of Y (default 0 1 2 3)",
        "scale": "of the products (default 1)",
        "softcap": "c: scores become c tanh(scores / c) before mask and bias (default 0: they stay)",
        "mask": "1: input 3 is the mask",
        "shown": "what the mask says of a key that is seen: 1 (default) or 0",
        "hidden": "the score in place of that of other keys (default minus infinity)",
        "bias": "1: the last input is the bias",
        "nan_to_zero": "1: weights that are no numbers become 0 (default 0)",
    },
    cost=_cost,
    rows=_rows,
)
class FusedAttention(ArrayOperator):
    """Two products a head, some heads at a time; in float32 where inputs are of 16 bits."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """Of each of the batch, some heads at a time."""
        call = self.call()
        return attending(call, read_fused_attention(call), inputs, outputs[0])


def attending(call: OperatorCall, sizes: FusedSizes, inputs: Sequence[Array], y: Array) -> Step:
    """The step that computes `y` of arrays of these sizes. Raises ResourceError where its memory does not fit."""
    if not y.size:
        return nothing_to_do
    work, group = compute_dtype(inputs[0].dtype), sizes.heads // sizes.key_heads
    pieces = row_pieces(sizes.key_heads, max(1, _PIECE // max(1, group * sizes.queries * sizes.keys)))
    scores = _memory(call, (pieces[0].stop, group, sizes.queries, sizes.keys), work)
    found = _memory(call, (pieces[0].stop, group, sizes.queries, sizes.value_width), work)
    scale = work.type(call.arguments.float("scale", 1.0))
    softmax = _Weights(sizes, call)
    by_head = y.transpose(sizes.y_by_head).reshape(sizes.batch, sizes.key_heads, group, *found.shape[2:])

    def step() -> None:
        q, k, v = (sizes.by_head(array, index) for index, array in enumerate(inputs[:3]))
        q = np.multiply(q, scale, dtype=work).reshape(sizes.batch, sizes.key_heads, group, *q.shape[2:])
        k, v = (array.astype(work, copy=False)[:, :, None] for array in (k, v))
        for image in range(sizes.batch):
            for piece in pieces:
                part = scores[: piece.stop - piece.start]
                np.matmul(q[image, piece], k[image, piece].swapaxes(-1, -2), out=part)
                softmax(part, inputs, image, slice(piece.start * group, piece.stop * group))
                out = found[: len(part)]
                np.matmul(part, v[image, piece], out=out)
                np.copyto(by_head[image, piece], out, casting="unsafe")

    return step


def _memory(call: OperatorCall, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    check_fits(math.prod(shape) * dtype.itemsize, f"{call.label}: working memory of shape {shape}")
    return np.empty(shape, dtype)


class _Weights:
    """From scores to weights, in place."""

    def __init__(self, sizes: FusedSizes, call: OperatorCall) -> None:
        self._sizes = sizes
        self._shown = call.arguments.bool("shown", True)
        self._hidden = call.arguments.float("hidden", -math.inf)
        self._softcap = call.arguments.float("softcap", 0.0)
        self._nan_to_zero = call.arguments.bool("nan_to_zero")

    def __call__(self, scores: Array, inputs: Sequence[Array], image: int, heads: slice) -> None:
        """`scores` are those of some heads, in groups, of one of the batch."""
        flat = scores.reshape(-1, *self._sizes.scores[2:])
        cap(flat, self._softcap)
        if self._sizes.mask is not None:
            mask = self._of(inputs[self._sizes.mask], image, heads)
            np.copyto(flat, flat.dtype.type(self._hidden), where=mask != self._shown)
        if self._sizes.bias is not None:
            np.add(flat, self._of(inputs[self._sizes.bias], image, heads), out=flat, casting="unsafe")
        if flat.shape[-1]:
            np.subtract(flat, flat.max(-1, keepdims=True), out=flat)
            np.exp(flat, out=flat)
            np.divide(flat, flat.sum(-1, keepdims=True), out=flat)
        if self._nan_to_zero:
            np.copyto(flat, 0, where=np.isnan(flat))

    def _of(self, array: Array, image: int, heads: slice) -> Array:
        return np.broadcast_to(array, self._sizes.scores)[image, heads]


not_differentiable("train with MatMul and Softmax", FUSED_ATTENTION)
