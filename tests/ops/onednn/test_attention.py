"""Attention by kernels: values, masks, numbers that are none, bytes of a row in any batch in any pieces."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.core.operator import Operator
from dagexec.errors import DagexecError
from dagexec.ops.engines.onednn import attention
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.kernels import attention_kernels as kernels
from dagexec.testing import run_operator
from tests.ops.onednn.engine import normal
from tests.ops.pieces import cut_into
from tests.ops.running import Array

pytestmark = pytest.mark.skipif(
    (found := library()) is None or not found.machine.can_run,
    reason="no oneDNN, no AVX2, or memory may not be executed",
)

IN_ORDER = [0, 2, 1, 3]
LYING = dict.fromkeys(("q_axes", "k_axes", "v_axes", "y_axes"), IN_ORDER)

SIZES = [
    (2, 3, 3, 70, 50, 36, 36),
    (1, 2, 2, 40, 33, 60, 44),
    (2, 2, 1, 9, 20, 13, 11),
    (2, 4, 4, 5, 8, 8, 8),
    (1, 4, 2, 1, 33, 32, 16),
    (3, 2, 1, 13, 17, 16, 24),
    (1, 3, 3, 70, 64, 64, 64),
    (2, 2, 2, 9, 200, 80, 40),
    (1, 1, 1, 300, 256, 24, 48),
    (1, 2, 2, 8, 1040, 8, 32),
    (3, 4, 2, 9, 20, 6, 6),
    (2, 2, 2, 9, 20, 1, 16),
    (2, 2, 2, 9, 20, 16, 3),
]
"""Batch, heads, heads of keys, queries, keys, elements of a key, of a value: keys and rows left over, narrow heads."""


@pytest.fixture(autouse=True)
def _kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried here the default engine would compute, too."""

    def refuse(self: Operator) -> None:
        raise AssertionError("the default engine computes it")

    monkeypatch.setattr("dagexec.ops.families.attention.fused.FusedAttention.prepare", refuse)


def expected(q: Array, k: Array, v: Array, scores: Any = lambda s: s) -> Array:
    """In float64, by heads; `scores` makes of products what goes into the softmax."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(array.astype(np.float64), group, 1) for array in (k, v))
    with np.errstate(all="ignore"):
        s = scores(q.astype(np.float64) @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1]))
        s = np.exp(s - s.max(-1, keepdims=True))
        return s / s.sum(-1, keepdims=True) @ v  # type: ignore[no-any-return]


def computed(q: Array, k: Array, v: Array, *more: Array, pieces: int = 0, **arguments: ArgumentValue) -> Array:
    """By the kernels, from tensors whose heads lie within positions, as layers write them."""
    lying = [np.ascontiguousarray(array.transpose(IN_ORDER)) for array in (q, k, v)]
    arguments = {"scale": 1 / math.sqrt(q.shape[-1]), **LYING, **arguments}
    with cut_into(pieces):
        [y] = run_operator("FusedAttention", [*lying, *more], engine="ONEDNN", **arguments)
    return y.transpose(IN_ORDER)


def drawn(batch: int, heads: int, key_heads: int, queries: int, keys: int, width: int, values: int) -> list[Array]:
    return [normal(1, batch, heads, queries, width), normal(2, batch, key_heads, keys, width),
            normal(3, batch, key_heads, keys, values)]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_values_are_right_and_the_same_in_any_pieces_and_for_a_row_alone(sizes: tuple[int, ...]) -> None:
    q, k, v = drawn(*sizes)
    y = computed(q, k, v)
    np.testing.assert_allclose(y, expected(q, k, v), rtol=2e-5, atol=2e-6)
    for pieces in (2, 5):
        assert computed(q, k, v, pieces=pieces).tobytes() == y.tobytes()
    assert computed(q[-1:], k[-1:], v[-1:]).tobytes() == y[-1:].tobytes()


def test_axes_in_their_order_and_heads_in_any() -> None:
    """Tensors by head, and keys whose positions come first."""
    q, k, v = drawn(2, 4, 2, 9, 20, 16, 8)
    axes = {"q_axes": [0, 1, 2, 3], "k_axes": [1, 2, 0, 3], "y_axes": [2, 1, 0, 3]}
    inputs = [q, np.ascontiguousarray(k.transpose(2, 0, 1, 3)), v]
    [y] = run_operator("FusedAttention", inputs, engine="ONEDNN", scale=0.25, **axes)
    np.testing.assert_allclose(y.transpose(2, 1, 0, 3), expected(q, k, v), rtol=2e-5, atol=2e-6)


BIASES = [(3, 4, 5, 33), (3, 1, 1, 33), (1, 4, 5, 33), (5, 33), (33,), (5, 1), (1,), ()]


def test_elements_of_a_head_that_are_no_neighbors_are_laid_out() -> None:
    q, k, v = drawn(2, 4, 2, 9, 20, 16, 8)
    axes = {"q_axes": [0, 1, 3, 2], "v_axes": [0, 3, 2, 1], "y_axes": [0, 1, 3, 2]}
    inputs = [np.ascontiguousarray(q.swapaxes(2, 3)), k, np.ascontiguousarray(v.transpose(0, 3, 2, 1))]
    [y] = run_operator("FusedAttention", inputs, engine="ONEDNN", scale=0.25, **axes)
    np.testing.assert_allclose(y.swapaxes(2, 3), expected(q, k, v), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shape", BIASES)
def test_a_bias_of_any_shape_that_broadcasts(shape: tuple[int, ...]) -> None:
    q, k, v = drawn(3, 4, 2, 5, 33, 16, 16)
    bias = normal(4, *shape) if shape else np.array(0.5, np.float32)
    wanted = expected(q, k, v, lambda s: s + bias)
    np.testing.assert_allclose(computed(q, k, v, bias, bias=1), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("shown", [0, 1])
@pytest.mark.parametrize("hidden", [-math.inf, -1e4, float(np.finfo(np.float32).min)])
def test_a_mask_chooses_scores_and_a_bias_is_added_to_those(shown: int, hidden: float) -> None:
    """The last query sees no key, the first sees all but one that is no number."""
    q, k, v = drawn(2, 2, 2, 6, 27, 32, 16)
    k[0, 0, 3, 5] = np.nan
    mask = np.random.default_rng(1).random((2, 1, 6, 27)) < 0.5
    mask[:, :, -1] = False
    mask[:, :, 0], mask[..., 3] = True, False
    bias = normal(4, 6, 27)
    arguments = {} if math.isinf(hidden) else {"hidden": hidden}
    y = computed(q, k, v, mask == bool(shown), bias, mask=1, bias=1, shown=shown, **arguments)
    wanted = expected(q, k, v, lambda s: np.where(mask, s, hidden).astype(np.float32) + bias)
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-6)
    assert np.isnan(y[:, :, -1]).all() == math.isinf(hidden)
    assert np.isfinite(y[:, :, 0]).all()


@pytest.mark.parametrize("keys", [8, 27, 64, 71])
@pytest.mark.parametrize("softcap", [0.5, 50.0])
def test_scores_are_capped_before_mask_and_bias(keys: int, softcap: float) -> None:
    """Small scores and large ones, one that is no number, and two that are infinite."""
    q, k, v = drawn(2, 4, 2, 6, keys, 16, 16)
    q[:, 0] *= 1e-3
    q[:, 1] *= 1e3
    k[0, 0, 3, 5], q[1, 0, 1, 3], q[1, 0, 2, 3] = np.nan, np.inf, -np.inf
    mask, bias = np.random.default_rng(1).random((2, 1, 6, keys)) < 0.7, normal(4, 6, keys)
    mask[..., 0], mask[..., 3] = True, False
    y = computed(q, k, v, mask, bias, mask=1, bias=1, softcap=softcap)
    wanted = expected(q, k, v, lambda s: np.where(mask, softcap * np.tanh(s / softcap), -np.inf) + bias)
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-6)


def test_the_cap_is_right_to_the_last_bits() -> None:
    """Two scores of which one is capped to c tanh(x / c): their weights tell it."""
    x = np.concatenate([np.geomspace(1e-6, 60, 1000), -np.geomspace(1e-6, 60, 1000)]).astype(np.float32)
    q, k = np.zeros((1, 1, len(x), 8), np.float32), np.zeros((1, 1, 8, 8), np.float32)
    q[..., 0], k[0, 0, 1, 0] = x, 1
    v = np.zeros((1, 1, 8, 8), np.float32)
    v[0, 0, 0, 0] = v[0, 0, 1, 1] = 1
    y = computed(q, k, v, scale=1.0, softcap=3.0)[0, 0]
    capped = np.log(y[:, 1].astype(float) / y[:, 0])
    np.testing.assert_allclose(capped, 3 * np.tanh(x.astype(float) / 3), rtol=3e-7, atol=4e-7)


@pytest.mark.parametrize("keys", [8, 27, 64, 71])
def test_what_is_no_number_stays_none_or_becomes_zero(keys: int) -> None:
    """A query of NaN, one with an infinite score, one whose every score is minus infinity."""
    q, k, v = drawn(1, 2, 2, 5, keys, 16, 16)
    q[0, 0, 0], q[0, 1, 1, 3] = np.nan, np.inf
    bias = np.zeros((5, keys), np.float32)
    bias[2] = -np.inf
    wanted = expected(q, k, v, lambda s: s + bias)
    y = computed(q, k, v, bias, bias=1)
    np.testing.assert_allclose(y, wanted, rtol=2e-5, atol=2e-6)
    assert np.isnan(y[0, 0, 0]).all()
    assert np.isnan(y[0, 1, 1]).all()
    assert np.isnan(y[0, :, 2]).all()
    cleared = computed(q, k, v, bias, bias=1, nan_to_zero=1)
    np.testing.assert_array_equal(cleared, np.where(np.isnan(y), 0, y))


def test_weights_of_hidden_keys_are_zero_and_no_small_number() -> None:
    """So a value that is infinite, of a key that is 1e4 below the others, is 0 times infinity; -80 is not hidden."""
    q, k, v = drawn(1, 1, 1, 1, 16, 8, 8)
    bias = np.zeros(16, np.float32)
    bias[3], bias[5] = -1e4, -80
    v[0, 0, 3, 0], v[0, 0, 5, 1] = np.inf, np.inf
    y = computed(q, k, v, bias, bias=1)
    assert np.isnan(y[0, 0, 0, 0])
    assert y[0, 0, 0, 1] == np.inf
    assert np.isfinite(y[..., 2:]).all()


def test_heads_without_elements_are_for_the_default_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key counts as much as the others."""
    monkeypatch.undo()
    v = normal(3, 1, 2, 9, 8)
    [y] = run_operator("FusedAttention", [normal(1, 1, 2, 3, 0), normal(2, 1, 2, 9, 0), v], engine="ONEDNN")
    np.testing.assert_allclose(y, np.broadcast_to(v.mean(2, keepdims=True), y.shape), rtol=1e-6, atol=1e-7)


def test_queries_in_several_blocks() -> None:
    """Whose scores are more than are computed at once; keys are no whole vectors."""
    q, k, v = drawn(1, 1, 1, 2000, 25, 8, 8)
    np.testing.assert_allclose(computed(q, k, v), expected(q, k, v), rtol=2e-5, atol=2e-6)


def test_the_exponential_is_right_to_the_last_bits() -> None:
    """The softmax of rows of one number each and 0: exp(-x) / (1 + exp(-x))."""
    x = np.linspace(0, 100, 4000, dtype=np.float32)
    scores = np.zeros((4000, 8), np.float32)
    scores[:, 1:] = -np.inf
    scores[:, 2] = -x
    kernel = kernels.softmax_kernel(False, 1, False, False, False, False, False)
    numbers = kernels.tail_numbers(8, 1.0, -math.inf)
    fields = np.array([4000, 32, 0, 0, 0, numbers.ctypes.data], np.int64)
    assert kernel is not None
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(kernel)
    call(scores.ctypes.data, 0, 0, fields.ctypes.data)
    exact = np.exp(-x.astype(np.float64))
    np.testing.assert_allclose(scores[:, 2], exact / (1 + exact), rtol=6e-6, atol=2e-38)
    near = x < 10
    np.testing.assert_allclose(scores[near, 2], (exact / (1 + exact))[near], rtol=1e-6)
    assert (scores[:, 1] == 0).all()
    assert (scores[x > 89, 2] == 0).all()


@pytest.mark.parametrize(
    ("shapes", "arguments"),
    [
        ([(2, 3, 4, 8), (2, 2, 4, 8), (2, 2, 4, 8)], {}),
        ([(2, 2, 4, 8), (3, 2, 4, 8), (2, 2, 4, 8)], {}),
        ([(2, 2, 4, 8), (2, 2, 4, 16), (2, 2, 4, 8)], {}),
        ([(2, 2, 4, 8), (2, 2, 4, 8), (2, 2, 5, 8)], {}),
        ([(2, 2, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8)], {}),
        ([(2, 2, 4), (2, 2, 4), (2, 2, 4)], {}),
        ([(2, 2, 4, 8)] * 3 + [(3, 4)], {"bias": 1}),
        ([(2, 2, 4, 8)] * 3 + [(2, 2, 4, 4, 1)], {"bias": 1}),
        ([(2, 2, 4, 8)] * 3, {"bias": 1}),
        ([(2, 2, 4, 8)] * 3 + [(4, 4)], {"mask": 1}),
        ([(2, 2, 4, 8)] * 3, {"q_axes": [0, 1, 2, 2]}),
        ([(2, 2, 4, 8)] * 3, {"y_axes": [0, 1, 2]}),
        ([(2, 2, 4, 8)] * 3, {"scale": math.inf}),
    ],
)
def test_what_does_not_fit_is_refused(shapes: list[tuple[int, ...]], arguments: dict[str, ArgumentValue]) -> None:
    """A float mask, too."""
    with pytest.raises(DagexecError, match="FusedAttention"):
        run_operator("FusedAttention", [normal(1, *shape) for shape in shapes], engine="ONEDNN", **arguments)


def test_calls_are_written_once_for_all_attentions_of_a_size() -> None:
    attention.calls_for.cache_clear()
    for seed in range(3):
        q, k, v = (array + seed for array in drawn(2, 3, 3, 70, 50, 36, 36))
        bias = normal(seed, 1, 3, 70, 50)
        y = computed(q, k, v, bias, bias=1)
        np.testing.assert_allclose(y, expected(q, k, v, lambda s, bias=bias: s + bias), rtol=2e-5, atol=2e-6)
    assert attention.calls_for.cache_info().misses == 1
