"""ONNX's attention by kernels: masks of any kind, caches, heads side by side, queries that see no key."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import dagexec
from dagexec.core.arguments import ArgumentValue
from dagexec.core.operator import Operator
from dagexec.errors import DagexecError
from dagexec.ops.engines.onednn.binding import library
from dagexec.testing import run_operator
from tests.frontend.one_node import assert_same, by_onnxruntime, by_reference, feeds_of, one_node
from tests.ops.onednn.engine import normal
from tests.ops.pieces import cut_into
from tests.ops.running import Array

pytestmark = pytest.mark.skipif(
    (found := library()) is None or not found.machine.can_run,
    reason="no oneDNN, no AVX2, or memory may not be executed",
)

BATCH, HEADS, KEY_HEADS, QUERIES, NEW, WIDTH, VALUES = 2, 4, 2, 13, 19, 16, 24
RANDOM = np.random.default_rng(7)


@pytest.fixture
def _kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried here the default engine would compute, too."""

    def refuse(self: Operator) -> None:
        raise AssertionError("the default engine computes it")

    monkeypatch.setattr("dagexec.ops.families.attention.attention.Attention.prepare", refuse)


def expected(
    q: Array, k: Array, v: Array, bias: Array | float = 0.0, scale: float | None = None, hidden: Array | bool = False
) -> Array:
    """The formula in float64, by heads; `hidden` keys count nothing, and a query without a key gives 0."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(array.astype(np.float64), group, 1) for array in (k, v))
    s = q.astype(np.float64) @ k.swapaxes(-1, -2) * (scale or 1 / math.sqrt(q.shape[-1])) + bias
    s = np.where(hidden, -np.inf, s)
    most = s.max(-1, keepdims=True)
    weights = np.exp(s - np.where(np.isneginf(most), 0, most))
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) @ v  # type: ignore[no-any-return]


def computed(*inputs: Array, outputs: int = 1, pieces: int = 0, **arguments: ArgumentValue) -> list[Array]:
    with cut_into(pieces):
        return run_operator("Attention", inputs, outputs=outputs, engine="ONEDNN", **arguments)


def drawn(past: int = 0) -> list[Array]:
    """Q, K, V, and with `past` the cache."""
    found = [normal(1, BATCH, HEADS, QUERIES, WIDTH)]
    found += [normal(2 + place, BATCH, KEY_HEADS, NEW, width) for place, width in enumerate((WIDTH, VALUES))]
    if past:
        found += [normal(4 + place, BATCH, KEY_HEADS, past, width) for place, width in enumerate((WIDTH, VALUES))]
    return found


def behind(past: int, keys: int = NEW) -> Array:
    """How far each key is behind each query."""
    return np.arange(QUERIES)[:, None] + past - np.arange(keys)


def close(found: Array, wanted: Array) -> None:
    np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.usefixtures("_kernels_compute")
def test_bare_attention_gives_the_same_bytes_in_any_pieces_and_for_a_row_alone() -> None:
    q, k, v = drawn()
    [y] = computed(q, k, v, scale=0.3)
    close(y, expected(q, k, v, scale=0.3))
    close(computed(q, k, v)[0], expected(q, k, v))
    assert computed(q, k, v, scale=0.3, pieces=3)[0].tobytes() == y.tobytes()
    assert computed(q[1:], k[1:], v[1:], scale=0.3)[0].tobytes() == y[1:].tobytes()


@pytest.mark.usefixtures("_kernels_compute")
def test_heads_side_by_side() -> None:
    q, k, v = drawn()
    joined = [array.swapaxes(1, 2).reshape(BATCH, array.shape[2], -1) for array in (q, k, v)]
    y, keys, values = computed(*joined, outputs=3, q_num_heads=HEADS, kv_num_heads=KEY_HEADS, is_causal=1)
    wanted = expected(q, k, v, hidden=behind(0) < 0)
    close(y, wanted.swapaxes(1, 2).reshape(BATCH, QUERIES, -1))
    np.testing.assert_array_equal(keys, k)
    np.testing.assert_array_equal(values, v)


MASKS = [(QUERIES, NEW), (NEW,), (HEADS, QUERIES, NEW), (BATCH, 1, 1, NEW), (BATCH, HEADS, QUERIES, NEW)]


@pytest.mark.usefixtures("_kernels_compute")
@pytest.mark.parametrize("shape", MASKS)
def test_a_mask_chooses_or_is_added_and_a_query_without_a_key_gives_zero(shape: tuple[int, ...]) -> None:
    q, k, v = drawn()
    q[0, 0, 0, 0] = np.nan
    shown, bias = RANDOM.random(shape) < 0.5, normal(6, *shape)
    if QUERIES in shape:
        shown[..., -1, :] = False
        bias[..., -1, :] = -np.inf
    close(computed(q, k, v, shown, mask=1)[0], expected(q, k, v, hidden=~shown))
    [y] = computed(q, k, v, bias, mask=1)
    wanted = expected(q, k, v, bias, hidden=np.isneginf(bias))
    close(y, wanted)
    assert np.isnan(y[0, 0, 0]).all()


@pytest.mark.usefixtures("_kernels_compute")
@pytest.mark.parametrize("outputs", [1, 3])
def test_new_keys_go_behind_those_of_the_cache_and_causal_queries_see_these(outputs: int) -> None:
    q, k, v, past_k, past_v = drawn(past=5)
    mask = normal(8, QUERIES, NEW + 3)  # the last keys are not seen
    found = computed(q, k, v, mask, past_k, past_v, outputs=outputs, is_causal=1, cache=1, mask=1)
    k, v = np.concatenate((past_k, k), 2), np.concatenate((past_v, v), 2)
    hidden = (behind(5, NEW + 5) < 0) | (np.arange(NEW + 5) >= NEW + 3)
    close(found[0], expected(q, k, v, np.pad(mask, ((0, 0), (0, 2))), hidden=hidden))
    for present, whole in zip(found[1:], (k, v), strict=False):
        np.testing.assert_array_equal(present, whole)


@pytest.mark.usefixtures("_kernels_compute")
@pytest.mark.parametrize("with_mask", [False, True])
def test_lengths_and_windows(with_mask: bool) -> None:
    """A sequence of length 0 sees nothing."""
    q, k, v = drawn()
    lengths = np.array([16, 0])
    masks = [normal(9, HEADS, 1, NEW)] if with_mask else []
    [y] = computed(q, k, v, *masks, lengths, mask=int(with_mask), lengths=1, left_window=3, right_window=1)
    far = behind(0) + (lengths - QUERIES).reshape(-1, 1, 1, 1)
    hidden = (far > 3) | (far < -1) | (np.arange(NEW) >= lengths.reshape(-1, 1, 1, 1))
    close(y, expected(q, k, v, masks[0] if masks else 0.0, hidden=hidden))
    assert (y[1] == 0).all()
    close(computed(q, k, v, left_window=1)[0], expected(q, k, v, hidden=behind(0) > 1))
    with pytest.raises(DagexecError, match="a length must be in"):
        computed(q, k, v, lengths + NEW, lengths=1)


@pytest.mark.usefixtures("_kernels_compute")
def test_a_window_that_leaves_a_query_no_key() -> None:
    """With fewer keys than queries the last ones see none."""
    q, k, v = drawn()
    k, v = k[:, :, :9], v[:, :, :9]
    [y] = computed(q, k, v, left_window=1)
    close(y, expected(q, k, v, hidden=behind(0, 9) > 1))
    assert (y[:, :, 10:] == 0).all()


@pytest.mark.parametrize(
    ("outputs", "arguments"), [(4, {"softcap": 1.5}), (4, {}), (4, {"products": 3}), (1, {"keys": 7})]
)
def test_what_kernels_do_not_compute_the_default_engine_does(outputs: int, arguments: dict[str, Any]) -> None:
    q, k, v = drawn()
    keys = arguments.pop("keys", NEW)
    inputs = [q, k[:, :, :keys], v[:, :, :keys]]
    inputs = [np.ascontiguousarray(array) for array in inputs]
    plain = run_operator("Attention", inputs, outputs=outputs, **arguments)
    for found, wanted in zip(computed(*inputs, outputs=outputs, **arguments), plain, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.usefixtures("_kernels_compute")
@pytest.mark.parametrize("opset", [23, 24])
@pytest.mark.parametrize("cached", [False, True])
def test_a_compiled_node_computes_what_onnx_says(opset: int, cached: bool) -> None:
    """Both onnx's reference and onnxruntime."""
    drawing = drawn(past=6 if cached else 0)
    shown = RANDOM.random((QUERIES, NEW + 6 * cached)) < 0.7
    inputs = [*drawing[:3], shown, *drawing[3:]]
    model = one_node("Attention", opset, inputs, 3 if cached else 1, is_causal=1, scale=0.4)
    with dagexec.compile(model) as executor:
        assert [definition.engine for definition in executor.model.net.op] == ["ONEDNN"]
        given = executor.run(feeds_of(inputs))
    found = [given[value.name] for value in model.graph.output]
    assert_same(found, by_reference(model, inputs), rtol=2e-5, atol=2e-6)
    assert_same(found, by_onnxruntime(model, inputs), rtol=2e-5, atol=2e-6)
