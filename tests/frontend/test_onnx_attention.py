"""Attention, rotary embeddings, linear attention and causal convolutions, against onnx's reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.errors import DagexecError
from tests.frontend.one_node import Array, assert_same, by_reference, computed, one_node
from tests.ops.running import run_operator


def drawn_attention(seed: int) -> tuple[list[Array | None], dict[str, Any], int]:
    """Inputs of an Attention of opset 25, its attributes, and how many outputs it has."""
    rng = np.random.default_rng(seed)
    batch, key_heads, queries, new, past = (int(size) for size in rng.integers(1, 4, 5))
    heads, width, value_width = key_heads * int(rng.integers(1, 3)), 4, 6
    cached, padded = seed % 3 == 0, seed % 3 == 1
    keys = new + past * cached

    def draw(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    q, k, v = (
        draw(batch, heads, queries, width),
        draw(batch, key_heads, new, width),
        draw(batch, key_heads, new, value_width),
    )
    attributes: dict[str, Any] = {"is_causal": int(rng.integers(2)), "qk_matmul_output_mode": seed % 4}
    if seed % 2:
        q, k, v = (one.swapaxes(1, 2).reshape(batch, one.shape[2], -1) for one in (q, k, v))
        attributes |= {"q_num_heads": heads, "kv_num_heads": key_heads}
    if rng.random() < 0.4:
        attributes["softcap"] = 1.5
    if rng.random() < 0.4:
        attributes["scale"] = 0.3
    if rng.random() < 0.4:
        attributes |= {"left_window_size": 1, "right_window_size": int(rng.integers(-1, 2))}
    mask: Array | None = None
    if rng.random() < 0.7:
        shape = [(queries, keys), (heads, queries, keys), (batch, 1, queries, keys), (queries, max(1, keys - 1))][
            seed % 4
        ]
        mask = rng.random(shape) < 0.7 if rng.random() < 0.5 else draw(*shape)
    inputs = [q, k, v, mask]
    if cached:
        inputs += [draw(batch, key_heads, past, width), draw(batch, key_heads, past, value_width)]
    elif padded:
        inputs += [None, None, rng.integers(0, keys + 1, batch)]
    return inputs, attributes, 1 if padded else 4


@pytest.mark.parametrize("seed", range(36))
def test_attention_computes_what_onnx_says(seed: int) -> None:
    inputs, attributes, outputs = drawn_attention(seed)
    model = one_node("Attention", 25, inputs, outputs, **attributes)
    assert_same(computed(model, inputs), by_reference(model, inputs))


def test_attention_of_many_heads_is_computed_in_pieces() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((1, 12, 300, 4)).astype(np.float32) for _ in range(3))
    (found,) = run_operator("Attention", [q, k, v], is_causal=1)
    logits = (q.astype(np.float64) @ k.swapaxes(-1, -2)) / 2
    logits = np.where(np.tril(np.ones((300, 300))) > 0, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    np.testing.assert_allclose(found, weights / weights.sum(-1, keepdims=True) @ v, rtol=1e-4, atol=1e-5)


Q = np.zeros((2, 4, 3, 8), np.float32)
WRONG: list[tuple[list[Array], dict[str, Any], str]] = [
    ([Q, Q[:, :3], Q[:, :3]], {}, "4 heads of queries cannot share 3 of keys"),
    ([Q, Q[..., :4], Q], {}, "do not fit each other"),
    ([Q, Q, Q[:, :, :2]], {}, "do not fit each other"),
    ([Q[:, 0], Q[:, 0], Q[:, 0]], {}, "q_num_heads and kv_num_heads are needed"),
    ([Q[:, 0], Q[:, 0], Q[:, 0]], {"q_num_heads": 3, "kv_num_heads": 3}, "8 elements of input 'x0' are not 3 heads"),
    ([Q, Q, Q, np.zeros((3, 9), np.float32)], {"mask": 1}, "the mask is for 9 keys, there are 3"),
    ([Q, Q, Q, np.zeros((5, 3, 3), np.float32)], {"mask": 1}, "the mask must broadcast"),
    ([Q, Q, Q, np.array([1, 4])], {"lengths": 1}, r"a length must be in \[0, 3\], found 1 to 4"),
    ([Q, Q, Q], {"cache": 1}, "expected 5 inputs"),
    ([Q, Q, Q], {"products": 4}, "'products' must be 0 to 3"),
    ([Q, Q, Q], {"left_window": -2}, "'left_window' must be at least -1"),
    ([Q, Q, Q], {"softcap": -1.0}, "'softcap' must not be negative"),
]


@pytest.mark.parametrize(("inputs", "arguments", "message"), WRONG)
def test_attention_refuses_what_does_not_fit(inputs: list[Array], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagexecError, match=f"Attention 'y0'.*{message}"):
        run_operator("Attention", inputs, **arguments)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("joined", "part", "by_place"), [(True, 4, True), (False, 0, False), (False, 2, True)])
def test_rotary_embedding_computes_what_onnx_says(interleaved: int, joined: bool, part: int, by_place: bool) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((2, 3, 5, 6)).astype(np.float32)
    attributes: dict[str, Any] = {"interleaved": interleaved, "rotary_embedding_dim": part}
    if joined:
        x = x.swapaxes(1, 2).reshape(2, 5, 18)
        attributes["num_heads"] = 3
    pairs = (part or 6) // 2
    angles = [rng.standard_normal((9, pairs) if by_place else (2, 5, pairs)).astype(np.float32) for _ in range(2)]
    inputs = [x, *angles, *([rng.integers(0, 9, (2, 5))] if by_place else [])]
    model = one_node("RotaryEmbedding", 23, inputs, **attributes)
    assert_same(computed(model, inputs), by_reference(model, inputs))


def test_a_place_without_an_angle_is_an_error() -> None:
    angles = np.zeros((3, 4), np.float32)
    with pytest.raises(DagexecError, match=r"RotaryEmbedding 'y0'.*a place must be in \[0, 2\]"):
        run_operator("RotaryEmbedding", [Q, angles, angles, np.full((2, 3), -1)])


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("with_state", [False, True])
def test_linear_attention_computes_what_onnx_says(rule: str, with_state: bool) -> None:
    rng = np.random.default_rng(3)
    q, k, v, state = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 5, 16), (2, 5, 8), (2, 5, 6), (2, 2, 4, 3))
    )
    decay = rng.uniform(-1, 0, (2, 5, 2 if with_state else 8)).astype(np.float32) if "gated" in rule else None
    beta = rng.uniform(0, 1, (2, 5, 1 if with_state else 2)).astype(np.float32) if "delta" in rule else None
    inputs = [q, k, v, state if with_state else None, decay, beta]
    model = one_node("LinearAttention", 27, inputs, 2, q_num_heads=4, kv_num_heads=2, update_rule=rule)
    assert_same(computed(model, inputs), by_reference(model, inputs))


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("optional", [False, True])
def test_causal_convolution_computes_what_onnx_says(activation: str, optional: bool) -> None:
    rng = np.random.default_rng(4)
    shapes = ((2, 3, 5), (3, 1, 4), *([(3,), (2, 3, 3)] if optional else []))
    inputs: list[Array | None] = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    model = one_node("CausalConvWithState", 27, inputs, 2, activation=activation)
    assert_same(computed(model, inputs), by_reference(model, inputs))
