"""Attention: values weighted by the softmax of dot products of queries and keys, for groups of heads.

Vaswani et al., 2017, arXiv:1706.03762; several queries to a key: Ainslie et al., 2023, arXiv:2305.13245. The products
are computed for a few heads at a time, so that working memory is a part of queries x keys x heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from dagexec.core.dtypes import BOOL, FLOAT_TYPES, INT32, INT64
from dagexec.core.gradient import not_differentiable
from dagexec.core.operator import Step, nothing_to_do
from dagexec.core.registry import new_operator
from dagexec.core.rows import along_axis
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError, ShapeError
from dagexec.ops.base.array_function import ArrayOperator
from dagexec.ops.base.blocks import Array, compute_dtype, row_pieces
from dagexec.platform.host_memory import check_fits
from dagexec.platform.records import dataclass

ATTENTION = "Attention"
_PIECE = 1 << 19  # logits computed at a time: 2 MiB of float32
RAW, CAPPED, BIASED, WEIGHTS = range(4)


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes that the inputs agree on, and where the optional ones are.

    Attributes:
        batch, heads, key_heads: of Q; of K and V.
        queries, keys, past: positions; `keys` with those of the cache, which are `past`.
        width, value_width: elements of a query or key; of a value.
        joined: heads are side by side in the last axis: batch, positions, heads * width.
        mask, cache, lengths: the numbers of the inputs; None where absent.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    past: int
    width: int
    value_width: int
    joined: bool
    mask: int | None
    cache: int | None
    lengths: int | None

    def by_head(self, array: Array, heads: int) -> Array:
        """A view of Q, K or V as batch, heads, positions, elements."""
        if not self.joined:
            return array
        batch, positions, width = array.shape
        return array.reshape(batch, positions, heads, width // heads if heads else 0).swapaxes(1, 2)


def _heads(call: OperatorCall, index: int, heads: int) -> tuple[int, int, int, int]:
    """Batch, heads, positions and elements of input `index`. Raises ShapeError."""
    shape = call.require_rank(index, *((3,) if heads else (4,)))
    if len(shape) == 4:
        batch, found, positions, width = shape
        return batch, found, positions, width
    batch, positions, width = shape
    if width % heads:
        raise call.fail(f"{width} elements of input {call.definition.input[index]!r} are not {heads} heads")
    return batch, heads, positions, width // heads


def read_attention(call: OperatorCall) -> AttentionSizes:
    """The sizes. Raises ArgumentError or ShapeError for what does not fit."""
    arguments = call.arguments
    with_mask, with_cache, with_lengths = (arguments.bool(name) for name in ("mask", "cache", "lengths"))
    count = 3 + with_mask + 2 * with_cache + with_lengths
    if len(call.inputs) != count or (with_cache and with_lengths):
        chosen = f"mask={with_mask:d}, cache={with_cache:d} and lengths={with_lengths:d}"
        raise call.fail(f"with {chosen} expected {count} inputs, and no lengths with a cache; found {len(call.inputs)}")
    joined = len(call.inputs[0].shape) == 3
    heads, key_heads = (arguments.int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
    if joined and not (heads > 0 and key_heads > 0):
        raise ArgumentError(f"{call.label}: q_num_heads and kv_num_heads are needed for inputs of 3 axes")
    batch, heads, queries, width = _heads(call, 0, heads if joined else 0)
    key_batch, key_heads, new, key_width = _heads(call, 1, key_heads if joined else 0)
    value_batch, value_heads, values, value_width = _heads(call, 2, key_heads if joined else 0)
    if (key_batch, key_width) != (batch, width) or (value_batch, value_heads, values) != (batch, key_heads, new):
        raise call.fail("queries, keys and values do not fit each other")
    if heads and (not key_heads or heads % key_heads):
        raise call.fail(f"{heads} heads of queries cannot share {key_heads} of keys")
    past = 0
    if with_cache:
        index = 3 + with_mask
        past = call.require_rank(index, 4)[2]
        call.require_shape(index, (batch, key_heads, past, width), "batch, heads, past positions, elements of keys")
        call.require_shape(index + 1, (batch, key_heads, past, value_width), "likewise of values")
    if with_lengths:
        call.require_types(3 + with_mask, INT32, INT64)
        call.require_shape(3 + with_mask, (batch,), "a number of positions for each of the batch")
    return AttentionSizes(
        batch,
        heads,
        key_heads,
        queries,
        past + new,
        past,
        width,
        value_width,
        joined,
        mask=3 if with_mask else None,
        cache=3 + with_mask if with_cache else None,
        lengths=3 + with_mask if with_lengths else None,
    )


def infer_attention(call: OperatorCall) -> list[TensorType]:
    """Y, the caches with the new keys and values, and the products or weights."""
    sizes = read_attention(call)
    meta, value_meta = call.require_types(0, *FLOAT_TYPES), call.require_types(2, *FLOAT_TYPES)
    call.require_same_type(0, 1)
    if sizes.mask is not None:
        _check_mask(call, sizes)
    if not RAW <= call.arguments.int("products", RAW) <= WEIGHTS:
        raise ArgumentError(f"{call.label}: argument 'products' must be 0 to 3")
    for name in ("left_window", "right_window"):
        if call.arguments.int(name, -1) < -1:
            raise ArgumentError(f"{call.label}: argument {name!r} must be at least -1")
    call.arguments.bool("is_causal")
    if call.arguments.float("softcap", 0.0) < 0 or not math.isfinite(call.arguments.float("scale", 1.0)):
        raise ArgumentError(f"{call.label}: 'softcap' must not be negative, and 'scale' finite")
    y = (sizes.batch, sizes.heads, sizes.queries, sizes.value_width)
    if sizes.joined:
        y = (sizes.batch, sizes.queries, sizes.heads * sizes.value_width)  # type: ignore[assignment]
    return [
        TensorType(y, meta),
        TensorType((sizes.batch, sizes.key_heads, sizes.keys, sizes.width), meta),
        TensorType((sizes.batch, sizes.key_heads, sizes.keys, sizes.value_width), value_meta),
        TensorType((sizes.batch, sizes.heads, sizes.queries, sizes.keys), meta),
    ][: len(call.definition.output)]


def _check_mask(call: OperatorCall, sizes: AttentionSizes) -> None:
    assert sizes.mask is not None
    call.require_types(sizes.mask, BOOL, *FLOAT_TYPES)
    shape = call.inputs[sizes.mask].shape
    wanted = (sizes.batch, sizes.heads, sizes.queries)
    outer = shape[-2::-1]
    if not 1 <= len(shape) <= 4 or any(a not in (1, b) for a, b in zip(outer, wanted[::-1], strict=False)):
        raise call.fail(f"the mask must broadcast to {wanted}, before the keys")
    if shape[-1] > sizes.keys:
        raise call.fail(f"the mask is for {shape[-1]} keys, there are {sizes.keys}")


def _cost(call: OperatorCall, outputs: Sequence[TensorType]) -> Cost:
    sizes = read_attention(call)
    products = sizes.batch * sizes.heads * sizes.queries * sizes.keys
    flops = products * (2 * sizes.width + 2 * sizes.value_width + 20)
    return Cost(flops, sum(one.nbytes for one in call.inputs), sum(one.nbytes for one in outputs))


@new_operator(
    ATTENTION,
    inputs=(3, 7),
    outputs=(1, 4),
    infer=infer_attention,
    doc="Y = softmax(scale Q K^T + mask) V for each head. Q, K and V are batch x heads x positions x elements, or "
    "batch x positions x (heads side by side). A query that may see no key gives 0. (dagexec's own, for ONNX.)",
    input_names=(
        "Q",
        "K",
        "V",
        "mask, with mask=1: bool, or added; keys behind its end are not seen",
        "past_key, with cache=1",
        "past_value",
        "lengths, with lengths=1: how many keys of each of the batch there are",
    ),
    output_names=("Y", "present_key", "present_value", "products"),
    args={
        "q_num_heads": "heads of Q, where they are side by side",
        "kv_num_heads": "heads of K and V, likewise; they divide those of Q",
        "scale": "of the products (default 1 / sqrt(elements))",
        "softcap": "c: products become c tanh(products / c) (default 0: they stay)",
        "is_causal": "1: a query sees keys up to its own position (default 0)",
        "left_window": "keys that a query sees before its position (default -1: all)",
        "right_window": "keys that it sees behind it (default -1: all)",
        "products": "what output 3 is: 0 products, 1 behind softcap, 2 with the mask, 3 the softmax (default 0)",
        "mask": "1: input 3 is the mask",
        "cache": "1: the next inputs are keys and values of earlier positions",
        "lengths": "1: the last input is the lengths",
    },
    cost=_cost,
    rows=along_axis(0, *range(7)),
)
class Attention(ArrayOperator):
    """Two products a head, some heads at a time; in float32 where inputs are of 16 bits."""

    def computing(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Step:
        """The caches, then the heads."""
        call = self.call()
        sizes, work = read_attention(call), compute_dtype(inputs[0].dtype)
        if not any(output.size for output in outputs):
            return nothing_to_do
        scale = call.arguments.float("scale", 1 / math.sqrt(sizes.width or 1))
        group = sizes.heads // max(1, sizes.key_heads)
        grouped = (sizes.batch, sizes.key_heads, group)
        pieces = row_pieces(sizes.key_heads, max(1, _PIECE // max(1, group * sizes.queries * sizes.keys)))
        most = pieces[0].stop if pieces else 0
        logits = self._memory((most, group, sizes.queries, sizes.keys), work)
        found = self._memory((most, group, sizes.queries, sizes.value_width), work)
        y = sizes.by_head(outputs[0], sizes.heads)
        present = [self._joined(sizes, inputs, outputs, place, work) for place in (0, 1)]
        bias_of = biases_of(call, sizes, work)
        softmax = _Softmax(call.arguments.float("softcap", 0.0), call.arguments.int("products", RAW))
        shape = (sizes.batch, sizes.heads, sizes.queries)

        def step() -> None:
            q = np.multiply(sizes.by_head(inputs[0], sizes.heads), work.type(scale), dtype=work)
            q = q.reshape(*grouped, *q.shape[2:])
            keys, values = (give() for give in present)
            bias = bias_of(inputs)
            blind = None if bias is None else np.broadcast_to(sees_nothing(bias), (*shape, 1))
            bias = None if bias is None else np.broadcast_to(bias, (*shape, sizes.keys))
            for image in range(sizes.batch):
                for piece in pieces:
                    part = slice(piece.start * group, piece.stop * group)
                    weights = logits[: piece.stop - piece.start]
                    np.matmul(q[image, piece], keys[image, piece, None].swapaxes(-1, -2), out=weights)
                    flat = weights.reshape(-1, sizes.queries, sizes.keys)
                    hidden = None if bias is None or blind is None else (bias[image, part], blind[image, part])
                    softmax(flat, hidden, outputs[3][image, part] if len(outputs) > 3 else None)
                    out = found[: len(weights)]
                    np.matmul(weights, values[image, piece, None], out=out)
                    np.copyto(y[image, part], out.reshape(-1, *out.shape[2:]), casting="unsafe")

        return step

    def _memory(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        check_fits(math.prod(shape) * dtype.itemsize, f"{self.label}: working memory of shape {shape}")
        return np.empty(shape, dtype)

    @staticmethod
    def _joined(
        sizes: AttentionSizes, inputs: Sequence[Array], outputs: Sequence[Array], place: int, work: np.dtype[Any]
    ) -> Callable[[], Array]:
        """What gives keys (place 0) or values (1) with those of the cache, by head, and puts them into the output."""
        new = sizes.by_head(inputs[1 + place], sizes.key_heads)
        past = None if sizes.cache is None else inputs[sizes.cache + place]

        def give() -> Array:
            whole = new if past is None else np.concatenate((past, new), axis=2)
            if len(outputs) > 1 + place:
                np.copyto(outputs[1 + place], whole)
            return whole.astype(work, copy=False)

        return give


def biases_of(
    call: OperatorCall, sizes: AttentionSizes, work: np.dtype[Any]
) -> Callable[[Sequence[Array]], Array | None]:
    """What gives, of the inputs, the sum of all that hides keys: -inf where one is not seen; None where all are.

    It broadcasts to batch, heads, queries, keys, and has all keys. With neither mask nor lengths it is always the same.
    """
    causal, left, right = read_windows(call)
    windowed = causal or left >= 0 or right >= 0

    def hidden(offset: Array) -> Array:
        """Where a key is not seen from its place, for queries that begin at `offset`: batch or 1, 1, queries, keys."""
        behind = np.arange(sizes.queries)[:, None] + offset.reshape(-1, 1, 1, 1) - np.arange(sizes.keys)
        found = behind < 0 if causal else np.zeros(behind.shape, np.bool_)
        if left >= 0:
            found |= behind > left
        if right >= 0:
            found |= -behind > right
        return found

    fixed = hidden(np.array(sizes.past)) if windowed and sizes.lengths is None else None

    def biases(inputs: Sequence[Array]) -> Array | None:
        masked = fixed
        if sizes.lengths is not None:
            lengths = _checked_lengths(inputs[sizes.lengths], sizes, call.label)
            masked = np.arange(sizes.keys) >= lengths.reshape(-1, 1, 1, 1)
            if windowed:
                masked = masked | hidden(lengths - sizes.queries)
        bias = None if sizes.mask is None else _mask_bias(inputs[sizes.mask], sizes.keys, work)
        if masked is None:
            return bias
        unseen = np.where(masked, work.type(-np.inf), work.type(0))
        return unseen if bias is None else np.where(masked, unseen, bias)

    return biases


def bias_shape(call: OperatorCall, sizes: AttentionSizes) -> tuple[int, ...]:
    """The shape of what `biases_of` gives."""
    causal, left, right = read_windows(call)
    shapes: list[tuple[int, ...]] = [(sizes.keys,)]
    if causal or left >= 0 or right >= 0:
        shapes.append((1, 1, sizes.queries, sizes.keys))
    if sizes.lengths is not None:
        shapes.append((sizes.batch, 1, 1, sizes.keys))
    if sizes.mask is not None:
        shapes.append((*call.inputs[sizes.mask].shape[:-1], sizes.keys))
    return np.broadcast_shapes(*shapes)


def read_windows(call: OperatorCall) -> tuple[bool, int, int]:
    """`is_causal`, `left_window` and `right_window`."""
    arguments = call.arguments
    return arguments.bool("is_causal"), arguments.int("left_window", -1), arguments.int("right_window", -1)


def _checked_lengths(lengths: Array, sizes: AttentionSizes, label: str) -> Array:
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= sizes.keys):
        raise ShapeError(f"{label}: a length must be in [0, {sizes.keys}], found {lengths.min()} to {lengths.max()}")
    wide: Array = lengths.astype(np.int64)
    return wide


def _mask_bias(mask: Array, keys: int, work: np.dtype[Any]) -> Array:
    """The mask as a bias, with -inf for keys behind its end."""
    if mask.dtype == np.bool_:
        mask = np.where(mask, work.type(0), work.type(-np.inf))
    bias = mask.astype(work, copy=False)
    missing = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
    return np.pad(bias, missing, constant_values=-np.inf) if missing[-1][1] else bias


def sees_nothing(bias: Array) -> Array:
    """Which queries see no key, by what is added to their scores [..., queries, keys]: [..., queries, 1]."""
    if not bias.shape[-1]:
        return np.zeros((*bias.shape[:-1], 1), np.bool_)
    found: Array = np.isneginf(bias.max(-1, keepdims=True))
    return found


@dataclass(frozen=True)
class _Softmax:
    """From products to their softmax over the keys, in place; `kept` says which stage is an output, too."""

    softcap: float
    kept: int

    def __call__(self, x: Array, hidden: tuple[Array, Array] | None, output: Array | None) -> None:
        """`hidden`: the bias, and which queries see no key. Their weights are 0."""
        self._keep(RAW, x, output)
        cap(x, self.softcap)
        self._keep(CAPPED, x, output)
        if hidden is not None:
            np.add(x, hidden[0], out=x)
        self._keep(BIASED, x, output)
        if x.shape[-1]:
            _normalize(x)
        if hidden is not None and hidden[1].any():
            np.copyto(x, 0, where=hidden[1])
        self._keep(WEIGHTS, x, output)

    def _keep(self, stage: int, x: Array, output: Array | None) -> None:
        if output is not None and stage == self.kept:
            np.copyto(output, x, casting="unsafe")


def cap(x: Array, softcap: float) -> None:
    """Put c tanh(x / c) in the place of products, for c = `softcap`; 0 for none."""
    if softcap:
        np.divide(x, x.dtype.type(softcap), out=x)
        np.tanh(x, out=x)
        np.multiply(x, x.dtype.type(softcap), out=x)


def _normalize(x: Array) -> None:
    """The softmax of rows; of a row of minus infinities zeros."""
    most = x.max(-1, keepdims=True)
    np.copyto(most, 0, where=np.isneginf(most))
    np.subtract(x, most, out=x)
    np.exp(x, out=x)
    total = x.sum(-1, keepdims=True)
    np.copyto(total, 1, where=total == 0)
    np.divide(x, total, out=x)


not_differentiable("train with MatMul and Softmax", ATTENTION)
