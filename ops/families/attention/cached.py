"""CachedAttention: attention over a session's cache, to which its keys and values are added where it lies.

What passes make of a Concat of past and new keys, one of values, and the FusedAttention that reads both. How many
positions the cache holds is an input, a number that a run reads: the sizes of all tensors are the same at every length.
Rows of a batch may belong to several sessions, each with a cache and a length of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from dagexec.core.caches import Held, found_caches
from dagexec.core.dtypes import BOOL, FLOAT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.node import Node
from dagexec.core.operator import Operator, Step
from dagexec.core.registry import new_operator
from dagexec.core.rows_call import RowsCall
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.core.traits import Rows
from dagexec.errors import ArgumentError
from dagexec.ops.base.blocks import Array
from dagexec.ops.families.attention.attention import cap
from dagexec.platform.records import dataclass

CACHED_ATTENTION = "CachedAttention"
OPERANDS = ("q_axes", "k_axes", "v_axes")
CACHE, LENGTH, MASK = 3, 4, 5  # inputs
RANK = 4

Opened = tuple[Array, Array, int]
"""Of a session: keys [rows, heads, elements, positions], values [rows, heads, positions, elements], and how many
positions there are with the new ones, which are yet to be written."""


@dataclass(frozen=True)
class CachedSizes:
    """Sizes that the inputs agree on, and how their axes are ordered.

    Attributes:
        batch, heads, key_heads, queries, width, value_width: of Q, K and V, which have as many positions.
        sessions: how many share the batch.
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
    sessions: int
    axes: tuple[tuple[int, ...], ...]
    y_axes: tuple[int, ...]
    mask: int | None
    bias: int | None

    def by_head(self, array: Array, operand: int) -> Array:
        """Q, K or V (0, 1, 2) as batch, heads, positions, elements: a view."""
        return array.transpose(self.axes[operand])

    @property
    def rows(self) -> int:
        """Of the batch, those of each session."""
        return self.batch // max(1, self.sessions)

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
    sessions = math.prod(call.inputs[CACHE].shape)
    if batch % max(1, sessions) or (batch and not sessions):
        raise call.fail(f"{sessions} sessions cannot share a batch of {batch}")
    mask, bias = MASK if with_mask else None, MASK + with_mask if with_bias else None
    return CachedSizes(
        batch, heads, key_heads, queries, width, value_width, sessions, axes, _axes(call, "y_axes"), mask, bias
    )  # fmt: skip


def infer_cached_attention(call: OperatorCall) -> list[TensorType]:
    """Y, of the type of Q."""
    sizes = read_cached_attention(call)
    for index in range(3):
        call.require_types(index, FLOAT32)
    for index in (CACHE, LENGTH):
        call.require_types(index, INT64)
        call.require_shape(index, (sizes.sessions,), "a number for each session")
    for place, meta in ((sizes.mask, BOOL), (sizes.bias, FLOAT32)):
        if place is None:
            continue
        call.require_types(place, meta)
        shape = call.inputs[place].shape
        full = (sizes.queries, sizes.heads, sizes.batch)
        if not shape or len(shape) > 4 or any(a not in (1, b) for a, b in zip(shape[-2::-1], full, strict=False)):
            raise call.fail(f"input {call.definition.input[place]!r} must broadcast to {full[::-1]} x capacity")
    if call.arguments.float("softcap", 0.0) < 0 or not math.isfinite(call.arguments.float("scale", 1.0)):
        raise ArgumentError(f"{call.label}: 'softcap' must not be negative, and 'scale' finite")
    y = (sizes.batch, sizes.heads, sizes.queries, sizes.value_width)
    return [TensorType(tuple(y[axis] for axis in sizes.y_axes), FLOAT32)]


def _rows(asked: RowsCall) -> list[Rows | None]:
    """Each row is of a session of its own."""
    sizes = read_cached_attention(asked.call)
    asked.require_uncounted()
    axes = {index: order[0] for index, order in enumerate(sizes.axes)} | {CACHE: 0, LENGTH: 0}
    for index in (sizes.mask, sizes.bias):
        if index is not None and asked.rows[index] is not None:
            axes[index] = asked.rank(index) - RANK
    for index, axis in axes.items():
        if asked.rows[index] != Rows(axis):
            raise asked.refuse(f"input {asked.call.definition.input[index]!r} has no rows along axis {axis}")
    return asked.all_outputs(Rows(sizes.y_axes.index(0)))


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    sizes = read_cached_attention(call)
    keys = next((call.inputs[index].shape[-1] for index in (sizes.mask, sizes.bias) if index is not None), 256)
    flops = sizes.batch * sizes.heads * sizes.queries * keys * 2 * (sizes.width + sizes.value_width)
    return Cost(flops, sum(one.nbytes for one in call.inputs), sum(one.nbytes for one in outputs))


def _kept(node: Node) -> list[str]:
    arguments = node.arguments(node.type)
    return [f"cache {arguments.string(name, name)!r}" for name in ("keys", "values")]


@new_operator(
    CACHED_ATTENTION,
    inputs=(5, 7),
    outputs=(1, 1),
    infer=infer_cached_attention,
    keeps=_kept,
    doc="K and V are put behind the positions of a session's cache; Y = softmax(scale Q K^T, masked, + bias) V "
    "for each head and all positions that it has then. (dagexec's own, for sessions.)",
    input_names=(
        "Q",
        "K of the positions of Q, with as many heads or a divisor of them",
        "V",
        "cache: the number of the session's caches, or that of each of several, with as many rows of the batch; 0 for "
        "rows of none, which become zeros",
        "length: how many positions each holds",
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
        "softcap": "c: scores become c tanh(scores / c) before mask and bias (default 0: they stay)",
        "mask": "1: input 5 is the mask",
        "shown": "what the mask says of a key that is seen: 1 (default) or 0",
        "hidden": "the score in place of that of other keys (default minus infinity)",
        "bias": "1: the last input is the bias",
        "nan_to_zero": "1: weights that are no numbers become 0 (default 0)",
    },
    required_args=("keys", "values"),
    cost=_cost,
    rows=_rows,
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
        softcap = arguments.float("softcap", 0.0)
        hidden, nan_to_zero = np.float32(arguments.float("hidden", -math.inf)), arguments.bool("nan_to_zero")
        groups = sizes.batch, sizes.key_heads, sizes.heads // sizes.key_heads
        q = sizes.by_head(self.x(0), 0).reshape(*groups, sizes.queries, sizes.width)
        mask, bias = (None if index is None else self.x(index) for index in (sizes.mask, sizes.bias))
        k, v = sizes.by_head(self.x(1), 1), sizes.by_head(self.x(2), 2)
        numbers, lengths, label = self.x(CACHE), self.x(LENGTH), self.label
        opened, rows = self.opening(sizes), sizes.rows

        def step() -> None:
            for place, caches in enumerate(opened(found_caches(numbers, lengths, label).held)):
                own = slice(place * rows, (place + 1) * rows)
                if caches is None:
                    y[own] = 0
                    continue
                keys, values, length = caches
                new = slice(length - sizes.queries, length)
                keys[..., new], values[:, :, new] = k[own].swapaxes(2, 3), v[own]
                scores = (q[own] * scale) @ keys[:, :, None, :, :length]
                flat = scores.reshape(rows, sizes.heads, sizes.queries, length)
                cap(flat, softcap)
                if mask is not None:
                    flat[np.broadcast_to(_until(mask, own, length) != shown, flat.shape)] = hidden
                if bias is not None:
                    flat += _until(bias, own, length)
                flat -= flat.max(-1, keepdims=True)
                np.exp(flat, out=flat)
                flat /= flat.sum(-1, keepdims=True)
                if nan_to_zero:
                    flat[np.isnan(flat)] = 0
                y[own] = (scores @ values[:, :, None, :length]).reshape(y[own].shape)

        return step

    def opening(self, sizes: CachedSizes) -> Callable[[Sequence[Held | None]], list[Opened | None]]:
        """A function that gives what each session has in this layer, with room for K and V; None for rows of none."""
        layer = self.arguments.string("keys", ""), self.arguments.string("values", "")
        label, queries, own = self.label, sizes.queries, (sizes.rows, sizes.key_heads, sizes.queries)
        new = (*own, sizes.width), (*own, sizes.value_width)

        def find(sessions: Sequence[Held | None]) -> list[Opened | None]:
            return [held and (*held.layer(layer, new, label), held.length + queries) for held in sessions]

        return find


def _until(array: Array, rows: slice, length: int) -> Array:
    """Of some rows, the first columns: all of what may have one for all."""
    own = array[rows] if array.ndim == RANK and array.shape[0] > 1 else array
    return own if own.shape[-1] == 1 else own[..., :length]


not_differentiable("train without a session", CACHED_ATTENTION)
