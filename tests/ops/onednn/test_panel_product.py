"""Products on weights in panels: values, bytes of a row in any batch in any pieces, what is left to the library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from unittest.mock import Mock

import numpy as np
import pytest

from dagexec.core.native import phases_of
from dagexec.ops.engines.onednn import panel_product
from dagexec.ops.engines.onednn.binding import engine_library, own_kernels
from dagexec.ops.engines.onednn.panel_product import (
    is_for_panels,
    out_of_panels,
    pack_panels,
    panel_bytes,
    product_step,
)
from dagexec.ops.kernels.post_ops import PostOp
from tests.ops.onednn.engine import normal
from tests.ops.pieces import cut_into
from tests.ops.running import Array, the_library

pytestmark = pytest.mark.skipif(
    (found := engine_library()) is None or not found.machine.can_run,
    reason="no AVX2, or memory may not be executed",
)

SIZES = [
    (1, 128, 128),
    (3, 516, 32),
    (6, 384, 176),
    (29, 100, 240),
    (64, 384, 384),
    (131, 1024, 16),
    (300, 400, 48),
    (15, 2048, 96),
    (5, 1, 1),
    (11, 3, 23),
    (7, 18, 44),
    (6, 131, 61),
]
"""Rows, inner, units: blocks that are left over, panels that are not full, and vectors and passes that are not."""


def computed(
    x: Array, weights: Array, bias: Array, pieces: int = 1, addend: Array | None = None, post_ops: Sequence[PostOp] = ()
) -> Array:
    """By the kernels, which must leave what is around the result as it was; in place where `addend` is given."""
    onednn = the_library()
    size = len(x) * len(weights)
    memory = np.full(size + 64, 7, np.float32)
    y = memory[32 : 32 + size].reshape(len(x), len(weights))
    if addend is not None:
        y[:] = addend
    panels = np.empty(panel_bytes(*weights.shape, onednn.isa.lanes), np.uint8)
    pack_panels(weights, onednn.isa.lanes, panels)
    unpacked = np.empty_like(weights)
    out_of_panels(panels, onednn.isa.lanes, unpacked)
    np.testing.assert_array_equal(unpacked, weights)
    added = None if addend is None else y
    with cut_into(pieces):
        step = product_step(x, panels, bias, y, added, "product", onednn.isa.lanes, tuple(post_ops))
    assert step is not None
    step()
    assert (memory[:32] == 7).all()
    assert (memory[32 + size :] == 7).all()
    return y


@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_right_and_the_same_in_any_pieces(sizes: tuple[int, int, int]) -> None:
    rows, inner, units = sizes
    x, weights, bias, addend = normal(1, rows, inner), normal(2, units, inner), normal(3, units), normal(4, rows, units)
    expected = x.astype(np.float64) @ weights.T + bias
    one = computed(x, weights, bias)
    np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-6 * inner)
    np.testing.assert_allclose(computed(x, weights, bias, 2, addend), expected + addend, rtol=1e-5, atol=1e-6 * inner)
    for pieces in (2, 3, 16):
        assert computed(x, weights, bias, pieces).tobytes() == one.tobytes()


@pytest.mark.parametrize("units", [5, 16, 30])
def test_functions_of_results_and_sums_between_them_end_with_the_last_column(units: int) -> None:
    x, weights, bias, addend = normal(1, 9, 13), normal(2, units, 13), normal(3, units), normal(4, 9, units)
    sums = x.astype(np.float64) @ weights.T + bias
    found = computed(x, weights, bias, 1, None, [("swish", 1.0, 0.0), ("clip", -0.1, 0.5)])
    np.testing.assert_allclose(found, np.clip(sums / (1 + np.exp(-sums)), -0.1, 0.5), rtol=1e-5, atol=1e-5)
    step = partial(computed, x, weights, bias, 1, addend)
    np.testing.assert_allclose(step([("relu", 0.0, 0.0)]), np.maximum(sums + addend, 0), rtol=1e-5, atol=1e-5)


def test_few_rows_are_cut_by_the_weights_that_they_wait_for() -> None:
    onednn, weights = the_library(), normal(2, 512, 512)
    counts = []
    for rows in (1, 4, 64):
        x, y = normal(1, rows, 512), np.empty((rows, 512), np.float32)
        step = product_step(x, weights.reshape(-1), normal(3, 512), y, None, "product", onednn.isa.lanes)
        assert step is not None
        counts += [len(phase) for phase in phases_of(step) or ()]
    assert counts[0] == counts[1] == 2
    assert counts[2] > 2


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_row_has_the_same_bytes_in_every_batch(pieces: int) -> None:
    x, weights, bias = normal(1, 64, 384), normal(2, 48, 384), normal(3, 48)
    alone = [computed(row[None], weights, bias).tobytes() for row in x]
    for rows in (*range(2, 17), 33, 64):
        found = computed(x[:rows], weights, bias, pieces)
        assert [row.tobytes() for row in found] == alone[:rows]


def test_rows_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.ops.engines.onednn.panel_product.core_cache", lambda: 1)
    x, weights, bias = normal(1, 31, 384), normal(2, 48, 384), normal(3, 48)
    chunked = computed(x, weights, bias)
    monkeypatch.undo()
    assert chunked.tobytes() == computed(x, weights, bias).tobytes()


@pytest.mark.parametrize("ways", [8, 12])
def test_blocks_of_rows_that_contend_for_a_cache_change_no_bytes(monkeypatch: pytest.MonkeyPatch, ways: int) -> None:
    x, weights, bias = normal(1, 31, 1024), normal(2, 48, 1024), normal(3, 48)
    alone = [computed(row[None], weights, bias).tobytes() for row in x]
    monkeypatch.setattr("dagexec.ops.engines.onednn.panel_product.nearest_cache_ways", lambda: ways)
    assert [row.tobytes() for row in computed(x, weights, bias)] == alone


def test_what_is_not_finite_stays_in_its_row_and_column() -> None:
    x, weights, bias = normal(1, 20, 128), normal(2, 128, 128), normal(3, 128)
    x[3, 5], weights[7, 9] = np.nan, np.inf
    found = np.isfinite(computed(x, weights, bias))
    assert not found[3].any()
    assert not found[:, 7].any()
    assert np.delete(np.delete(found, 3, 0), 7, 1).all()


def test_weights_of_other_kinds_are_left_to_the_library() -> None:
    onednn, alone = replace(the_library(), lib=object()), own_kernels()
    assert alone is not None
    assert is_for_panels(onednn, normal(1, 128, 128))
    for weights in (normal(1, 129, 128), normal(1, 128, 126), normal(1, 16, 64)):
        assert not is_for_panels(onednn, weights)
        assert is_for_panels(alone, weights)
    assert not is_for_panels(alone, np.zeros((128, 128)))


def test_calls_are_written_once_for_all_products_of_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    panel_product._calls.cache_clear()
    written = Mock(wraps=panel_product._Writer)
    monkeypatch.setattr(panel_product, "_Writer", written)
    weights, bias, addend = normal(2, 48, 384), normal(3, 48), normal(4, 37, 48)
    first = computed(normal(1, 37, 384), weights, bias)
    assert written.call_count == 1
    others = [computed(normal(seed, 37, 384), weights + 1, bias + 1, addend=addend) for seed in (5, 6)]
    assert written.call_count == 2, "with an addend there are other kernels"
    again = computed(normal(1, 37, 384), weights, bias)
    assert again.tobytes() == first.tobytes()
    assert others[0].tobytes() != others[1].tobytes()
    assert written.call_count == 2
