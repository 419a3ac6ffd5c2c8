"""LinearAttention, which keeps a matrix a head instead of keys and values, and CausalConv with a state.

Katharopoulos et al., 2020, arXiv:2006.16236; gates and the delta rule: Yang et al., 2024, arXiv:2412.06464.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dagexec.core.dtypes import FLOAT_TYPES
from dagexec.core.gradient import not_differentiable
from dagexec.core.rows import along_axis
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, compute_dtype

_RULES = {"linear": (0, 0), "gated": (1, 0), "delta": (0, 1), "gated_delta": (1, 1)}


def _sizes(call: OperatorCall) -> tuple[int, int, int, int]:
    """Heads of queries and of keys, elements of a key and of a value. Raises ArgumentError or ShapeError."""
    heads, key_heads = (call.arguments.int(name, 0) for name in ("q_num_heads", "kv_num_heads"))
    widths = [call.require_rank(index, 3)[2] for index in range(3)]
    if heads < 1 or key_heads < 1 or heads % key_heads:
        raise ArgumentError(f"{call.label}: {heads} heads of queries cannot share {key_heads} of keys")
    if widths[0] % heads or widths[1] * heads != widths[0] * key_heads or widths[2] % key_heads:
        raise call.fail(f"the elements are not those of {heads} and {key_heads} heads")
    return heads, key_heads, widths[0] // heads, widths[2] // key_heads


def infer_linear_attention(call: OperatorCall) -> list[TensorType]:
    """The output and the state."""
    rule = call.arguments.string("update_rule", "gated_delta")
    if rule not in _RULES:
        raise ArgumentError(f"{call.label}: 'update_rule' must be one of {', '.join(_RULES)}, found {rule!r}")
    call.arguments.float("scale", 0.0)
    with_decay, with_beta = _RULES[rule]
    with_state = call.arguments.bool("state")
    count = 3 + with_state + with_decay + with_beta
    if len(call.inputs) != count:
        raise call.fail(f"with state={with_state:d} and update_rule={rule!r} expected {count} inputs")
    meta = call.require_types(0, *FLOAT_TYPES)
    call.require_same_type(*(index for index in range(count) if not (with_state and index == 3)))
    heads, key_heads, width, value_width = _sizes(call)
    batch, steps, _ = call.inputs[0].shape
    for index in (1, 2):
        if call.inputs[index].shape[:2] != (batch, steps):
            raise call.fail("queries, keys and values must have one batch and as many steps")
    state = TensorType((batch, key_heads, width, value_width), meta)
    if with_state:
        call.require_shape(3, state.shape, "batch, heads of keys, elements of a key, elements of a value")
        state = TensorType(state.shape, call.require_types(3, *FLOAT_TYPES))
    if with_decay:
        _require_steps(call, 3 + with_state, (batch, steps), (key_heads, key_heads * width))
    if with_beta:
        _require_steps(call, count - 1, (batch, steps), (key_heads, 1))
    return [TensorType((batch, steps, heads * value_width), meta), state][: len(call.definition.output)]


def _require_steps(call: OperatorCall, index: int, outer: tuple[int, int], widths: tuple[int, int]) -> None:
    shape = call.require_rank(index, 3)
    if shape[:2] != outer or shape[2] not in widths:
        raise call.fail(
            f"input {call.definition.input[index]!r} must have shape {outer} and {widths[0]} or {widths[1]}"
        )


@array_function(
    "LinearAttention",
    inputs=(3, 6),
    outputs=(1, 2),
    infer=infer_linear_attention,
    doc="For each step and head: S = exp(decay) S + k v^T, and Y = scale S^T q; by the delta rule, v is "
    "beta (v - S^T k). Queries, keys and values are batch x steps x (heads side by side). (dagexec's own.)",
    input_names=("Q", "K", "V", "S, with state=1", "decay, for rules with a gate", "beta, for the delta rules"),
    output_names=("Y", "S behind the last step"),
    args={
        "q_num_heads": "heads of Q",
        "kv_num_heads": "heads of K and V, which divide those of Q",
        "scale": "of Y (default 0: 1 / sqrt(elements of a key))",
        "update_rule": f"one of {', '.join(_RULES)} (default gated_delta)",
        "state": "1: input 3 is the state before the first step (default 0: zeros)",
    },
    rows=along_axis(0, *range(6)),
)
def linear_attention(call: OperatorCall, q: Array, k: Array, v: Array, *others: Array) -> Sequence[Array]:
    """Step after step, all heads at once."""
    heads, key_heads, width, value_width = _sizes(call)
    batch, steps, _ = q.shape
    work = compute_dtype(q.dtype)
    given = list(others)
    with_decay, with_beta = _RULES[call.arguments.string("update_rule", "gated_delta")]
    state = np.zeros((batch, key_heads, width, value_width), work)
    if call.arguments.bool("state"):
        state = given.pop(0).astype(work)
    queries = q.astype(work).reshape(batch, steps, key_heads, heads // key_heads, width)
    keys, values = _of_heads(k.astype(work), key_heads), _of_heads(v.astype(work), key_heads)
    decays = np.exp(_of_heads(given.pop(0).astype(work), key_heads)) if with_decay else None
    betas = given.pop(0).astype(work)[..., None] if with_beta else None
    scale = call.arguments.float("scale", 0.0) or 1 / math.sqrt(width or 1)
    y = np.empty((batch, steps, key_heads, heads // key_heads, value_width), work)
    for step in range(steps):
        key, value = keys[:, step], values[:, step]
        if decays is not None:
            state = state * decays[:, step][..., None]
        if betas is not None:
            value = betas[:, step] * (value - (key[..., None, :] @ state)[..., 0, :])
        state = state + key[..., None] * value[..., None, :]
        y[:, step] = queries[:, step] @ state
    y *= work.type(scale)
    return [y, state][: len(call.definition.output)]


def _of_heads(array: Array, heads: int) -> Array:
    """Batch x steps x heads x what each has."""
    return array.reshape(*array.shape[:2], heads, array.shape[2] // heads)


def infer_causal_conv(call: OperatorCall) -> list[TensorType]:
    """Y has the type of X; the state the taps but one."""
    meta = call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    batch, channels, _ = call.require_rank(0, 3)
    taps = call.require_rank(1, 3)[2]
    call.require_shape(1, (channels, 1, taps), "channels, 1, taps")
    if call.arguments.string("activation", "none") not in ("none", "silu", "swish"):
        raise ArgumentError(f"{call.label}: 'activation' must be none, silu or swish")
    bias, state = (call.arguments.bool(name) for name in ("bias", "state"))
    if len(call.inputs) != 2 + bias + state or taps < 1:
        raise call.fail(f"with bias={bias:d} and state={state:d} expected {2 + bias + state} inputs, and a tap")
    if bias:
        call.require_shape(2, (channels,), "an element a channel")
    kept = (batch, channels, taps - 1)
    if state:
        call.require_shape(2 + bias, kept, "batch, channels, taps - 1")
    return [call.inputs[0], TensorType(kept, meta)][: len(call.definition.output)]


@array_function(
    "CausalConv",
    inputs=(2, 4),
    outputs=(1, 2),
    infer=infer_causal_conv,
    doc="Each channel of X, batch x channels x steps, convolved with its taps; a step sees itself and those before "
    "it, the first ones the state. (dagexec's own, for ONNX.)",
    input_names=("X", "filter", "bias, with bias=1", "state, with state=1: the steps before X"),
    output_names=("Y", "state for the steps behind X"),
    args={
        "activation": "none, or silu, also called swish: Y times its sigmoid (default none)",
        "bias": "1: input 2 is the bias",
        "state": "1: the last input is the state (default 0: zeros)",
    },
    rows=along_axis(0, *range(4)),
)
def causal_conv(call: OperatorCall, x: Array, taps: Array, *others: Array) -> Sequence[Array]:
    """A sum over the taps."""
    work = compute_dtype(x.dtype)
    count, steps = taps.shape[2], x.shape[2]
    given = list(others)
    bias = given.pop(0) if call.arguments.bool("bias") else np.zeros(x.shape[1], work)
    before = given.pop(0) if given else np.zeros((*x.shape[:2], count - 1), x.dtype)
    padded = np.concatenate((before, x), axis=2)
    y = np.zeros(x.shape, work) + bias.astype(work)[:, None]
    for tap in range(count):
        y += padded[:, :, tap : tap + steps].astype(work) * taps[:, :, tap].astype(work)
    if call.arguments.string("activation", "none") != "none":
        y *= 0.5 * (1 + np.tanh(0.5 * y))
    return [y, padded[:, :, steps:]][: len(call.definition.output)]


not_differentiable("dagexec has their layers for inference alone", "LinearAttention", "CausalConv")
