"""CachedAttention: attention over a session's cache, to which its keys and values are added where it lies.

What passes make of a Concat of past and new keys, one of values, and the FusedAttention that reads both. How many
positions the cache holds is an input, a number that a run reads: the sizes of all tensors are the same at every length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from dagexec.core.caches import Caches, caches_of
from dagexec.core.dtypes import BOOL, FLOAT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.blocks import Array
from dagexec.platform.records import dataclass

CACHED_ATTENTION = "CachedAttention"
OPERANDS = ("q_axes", "k_axes", "v_axes")
CACHE, LENGTH, MASK = 3, 4, 5  # inputs


@dataclass(frozen=True)
class CachedSizes:
    """Sizes that the inputs agree on, and how their axes are ordered.

    Attributes:
        batch, heads, key_heads, queries, width, value_width: of Q, K and V, which have as many positions.
        axes: of Q, K and V: which axis is the batch, the heads, the positions, the elements.
        y_axes: which of batch, heads, queries and elements is each axis of Y.
        mask, bias: numbers of inputs; None where absent.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    width: int
    value_width: int
    axes: tuple[tuple[int, ...], ...]
    y_axes: tuple[int, ...]
    mask: int | None
    bias: int | None

    def by_head(self, array: Array, operand: int) -> Array:
        """Q, K or V (0, 1, 2) as batch, heads, positions, elements: a view."""
        return array.transpose(self.axes[operand])

    @property
    def y_by_head(self) -> tuple[int, ...]:
        """The axes of Y that are the batch, the heads, the queries and the elements."""
        return tuple(int(axis) for axis in np.argsort(self.y_axes))


def _axes(call: OperatorCall, name: str) -> tuple[int, ...]:
    axes = tuple(call.arguments.ints(name)) or (0, 1, 2, 3)
    if sorted(axes) != [0, 1, 2, 3]:
        raise ArgumentError(f"{call.label}: argument {name!r} must be a permutation of 0, 1, 2, 3, found {axes}")
    return axes


def read_cached_attention(call: OperatorCall) -> CachedSizes:
    """The sizes. Raises ArgumentError or ShapeError for what does not fit."""
    with_mask, with_bias = (call.arguments.bool(name) for name in ("mask", "bias"))
    if len(call.inputs) != MASK + with_mask + with_bias:
        raise call.fail(
            f"with mask={with_mask:d} and bias={with_bias:d} expected {MASK + with_mask + with_bias} inputs"
        )
    axes = tuple(_axes(call, name) for name in OPERANDS)
    shapes = [tuple(call.require_rank(index, 4)[axis] for axis in order) for index, order in enumerate(axes)]
    (batch, heads, queries, width), (_, key_heads, _, _), (*_, value_width) = shapes
    if shapes[1:] != [(batch, key_heads, queries, width), (batch, key_heads, queries, value_width)]:
        raise call.fail(f"queries, keys and values do not fit each other: {shapes}")
    if not key_heads or heads % key_heads:
        raise call.fail(f"{heads} heads of queries cannot share {key_heads} of keys")
    mask, bias = MASK if with_mask else None, MASK + with_mask if with_bias else None
    return CachedSizes(
        batch, heads, key_heads, queries, width, value_width, axes, _axes(call, "y_axes"), mask, bias
    )  # fmt: skip


def infer_cached_attention(call: OperatorCall) -> list[TensorType]:
    """Y, of the type of Q."""
    sizes = read_cached_attention(call)
    for index in range(3):
        call.require_types(index, FLOAT32)
    for index in (CACHE, LENGTH):
        call.require_types(index, INT64)
        call.require_shape(index, (1,), "one number")
    for place, meta in ((sizes.mask, BOOL), (sizes.bias, FLOAT32)):
        if place is None:
            continue
        call.require_types(place, meta)
        shape = call.inputs[place].shape
        full = (sizes.queries, sizes.heads, sizes.batch)
        if not shape or len(shape) > 4 or any(a not in (1, b) for a, b in zip(shape[-2::-1], full, strict=False)):
            raise call.fail(f"input {call.definition.input[place]!r} must broadcast to {full[::-1]} x capacity")
    if not math.isfinite(call.arguments.float("scale", 1.0)):
        raise ArgumentError(f"{call.label}: argument 'scale' must be finite")
    y = (sizes.batch, sizes.heads, sizes.queries, sizes.value_width)
    return [TensorType(tuple(y[axis] for axis in sizes.y_axes), FLOAT32)]


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    sizes = read_cached_attention(call)
    keys = next((call.inputs[index].shape[-1] for index in (sizes.mask, sizes.bias) if index is not None), 256)
    flops = sizes.batch * sizes.heads * sizes.queries * keys * 2 * (sizes.width + sizes.value_width)
    return Cost(flops, sum(one.nbytes for one in call.inputs), sum(one.nbytes for one in outputs))


@new_operator(
    CACHED_ATTENTION,
    inputs=(5, 7),
    outputs=(1, 1),
    infer=infer_cached_attention,
    doc="K and V are put behind the positions of a session's cache; Y = softmax(scale Q K^T, masked, + bias) V "
    "for each head and all positions that it has then. (dagexec's own, for sessions.)",
    input_names=(
        "Q",
        "K of the positions of Q, with as many heads or a divisor of them",
        "V",
        "cache: the number of the session's caches",
        "length: how many positions it holds",
        "mask, with mask=1: bool, broadcast to batch x heads x queries x capacity",
        "bias, with bias=1: likewise, added",
    ),
    output_names=("Y",),
    args={
        **{
            name: f"the axes of {name[0].upper()} that are batch, heads, positions and elements (default 0 1 2 3)"
            for name in OPERANDS
        },
        "y_axes": "which of batch, heads, queries and elements (0 to 3) is each axis of Y (default 0 1 2 3)",
        "keys": "the name of the cache's keys",
        "values": "the name of the cache's values",
        "scale": "of the products (default 1)",
        "mask": "1: input 5 is the mask",
        "shown": "what the mask says of a key that is seen: 1 (default) or 0",
        "hidden": "the score in place of that of other keys (default minus infinity)",
        "bias": "1: the last input is the bias",
        "nan_to_zero": "1: weights that are no numbers become 0 (default 0)",
    },
    required_args=("keys", "values"),
    cost=_cost,
    effects=True,
)
class CachedAttention(Operator):
    """NumPy's products over the positions that there are."""

    def prepare(self) -> Step:
        """A step that reads the length when it runs."""
        return self.computing(read_cached_attention(self.call()))

    def computing(self, sizes: CachedSizes) -> Step:
        """As NumPy computes it."""
        arguments, y = self.arguments, self.y(0).transpose(sizes.y_by_head)
        scale, shown = np.float32(arguments.float("scale", 1.0)), arguments.bool("shown", True)
        hidden, nan_to_zero = np.float32(arguments.float("hidden", -math.inf)), arguments.bool("nan_to_zero")
        q = sizes.by_head(self.x(0), 0).reshape(sizes.batch, sizes.key_heads, -1, sizes.queries, sizes.width)
        mask, bias = (None if index is None else self.x(index) for index in (sizes.mask, sizes.bias))
        appended = self.appending(sizes)

        def step() -> None:
            _, keys, values, length = appended()
            scores = (q * scale) @ keys[:, :, None, :, :length]
            flat = scores.reshape(sizes.batch, sizes.heads, sizes.queries, length)
            if mask is not None:
                flat[np.broadcast_to(_until(mask, length) != shown, flat.shape)] = hidden
            if bias is not None:
                flat += _until(bias, length)
            flat -= flat.max(-1, keepdims=True)
            np.exp(flat, out=flat)
            flat /= flat.sum(-1, keepdims=True)
            if nan_to_zero:
                flat[np.isnan(flat)] = 0
            y[...] = (scores @ values[:, :, None, :length]).reshape(y.shape)

        return step

    def appending(self, sizes: CachedSizes) -> Any:
        """A function that adds K and V; it gives the caches, keys and values, and how many positions there are now."""
        number, length = self.x(CACHE), self.x(LENGTH)
        new = sizes.by_head(self.x(1), 1), sizes.by_head(self.x(2), 2)
        keys_name, values_name = self.arguments.string("keys", ""), self.arguments.string("values", "")
        label, queries = self.label, sizes.queries

        def append() -> tuple[Caches, Array, Array, int]:
            caches, start = caches_of(int(number[0]), label), int(length[0])
            found = caches.appended(keys_name, values_name, new, start)
            if found is None:
                raise ShapeError(f"{label}: {queries} positions behind {start} do not fit into the cache")
            return caches, *found, start + queries

        return append


def _until(array: Array, length: int) -> Array:
    """The first columns of what may have one for all."""
    return array if array.shape[-1] == 1 else array[..., :length]


not_differentiable("train without a session", CACHED_ATTENTION)
