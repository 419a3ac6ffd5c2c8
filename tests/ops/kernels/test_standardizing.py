"""Rows normalized by a kernel: against float64, offsets that hide the variance, bytes of a row."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.ops.kernels.machine import Machine
from dagexec.ops.kernels.standardizing import root_mean_square_step, standardizing_step
from tests.ops.kernels.running import Array, each_size, needs_kernels
from tests.ops.pieces import cut_into
from tests.ops.running import the_library


def computed(x: Array, scale: Array, bias: Array, lanes: int, pieces: int = 1) -> Array:
    y = np.full_like(x, 7)
    machine = Machine(lanes)
    with cut_into(pieces):
        step = standardizing_step(machine, x, y, scale, bias, 1e-3, "norm")
    assert step is not None
    step()
    return y


def parameters(size: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(9)
    return rng.standard_normal(size).astype(np.float32), rng.standard_normal(size).astype(np.float32)


@each_size
@pytest.mark.parametrize("shape", [(1, 1, 1), (4, 3, 7), (6, 1, 1030), (2, 5, 700), (4, 2, 2048)])
def test_a_row_has_the_mean_and_the_variance_of_its_scale_and_bias(shape: tuple[int, int, int], lanes: int) -> None:
    groups = 2 if shape[0] % 2 == 0 else 1
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) + np.float32(30)
    scale, bias = parameters(groups * shape[1])
    wide = x.astype(np.float64)
    mean, variance = wide.mean((1, 2), keepdims=True), wide.var((1, 2), keepdims=True)
    factor, shift = (np.resize(one, (shape[0], shape[1]))[:, :, None] for one in (scale, bias))
    expected = (wide - mean) / np.sqrt(variance + 1e-3) * factor + shift
    whole = computed(x, scale, bias, lanes)
    np.testing.assert_allclose(whole, expected, rtol=2e-5, atol=2e-5)
    for pieces in (2, 3):
        assert computed(x, scale, bias, lanes, pieces).tobytes() == whole.tobytes()
    assert computed(x[:groups], scale, bias, lanes).tobytes() == whole[:groups].tobytes()


@each_size
@pytest.mark.parametrize("shape", [(1, 1, 40_000), (2, 5, 9_001), (3, 700, 49), (2, 36_864, 1), (1, 3, 200_000)])
def test_a_long_row_has_the_same_bytes_in_any_pieces_and_beside_any_others(
    shape: tuple[int, int, int], lanes: int
) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32) + np.float32(30)
    scale, bias = parameters(shape[1])
    wide = x.astype(np.float64)
    mean, variance = wide.mean((1, 2), keepdims=True), wide.var((1, 2), keepdims=True)
    expected = (wide - mean) / np.sqrt(variance + 1e-3) * scale[:, None] + bias[:, None]
    whole = computed(x, scale, bias, lanes, 1)
    np.testing.assert_allclose(whole, expected, rtol=2e-5, atol=2e-5)
    for pieces in (2, 3, 7):
        assert computed(x, scale, bias, lanes, pieces).tobytes() == whole.tobytes()
    assert computed(x[:1], scale, bias, lanes, 7).tobytes() == whole[:1].tobytes()


@needs_kernels
def test_what_is_not_a_number_stays_in_its_row_and_other_types_are_left_to_others() -> None:
    x = np.ones((3, 1, 40), np.float32)
    x[1, 0, 3], x[2, 0, 4] = np.nan, np.inf
    found = computed(x, np.ones(1, np.float32), np.ones(1, np.float32), 8)
    assert np.isfinite(found[0]).all()
    assert np.isnan(found[1:]).all()
    ones = np.ones(1, np.float32)
    machine = the_library().machine
    assert standardizing_step(machine, x.astype(float), x.astype(float), ones, ones, 1e-3, "norm") is None
    assert standardizing_step(machine, x[:, :, ::2], x[:, :, ::2], ones, ones, 1e-3, "norm") is None
    assert standardizing_step(Machine(4), x, x, ones, ones, 1e-3, "norm") is None


@each_size
@pytest.mark.parametrize("shape", [(1, 1), (4, 7), (3, 64), (5, 1030), (2, 4096)])
def test_a_row_is_divided_by_its_root_mean_square(shape: tuple[int, int], lanes: int) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    scale, _ = parameters(shape[1])
    machine = Machine(lanes)

    def normalized(rows: Array, pieces: int = 1) -> Array:
        memory = np.full(rows.size + 32, 7, np.float32)
        y = memory[16:-16].reshape(rows.shape)
        with cut_into(pieces):
            step = root_mean_square_step(machine, rows, y, scale, 1e-2, "norm")
        assert step is not None
        step()
        assert (memory[:16] == 7).all()
        assert (memory[-16:] == 7).all()
        return y

    wide = x.astype(np.float64)
    expected = wide / np.sqrt(np.square(wide).mean(1, keepdims=True) + 1e-2) * scale
    whole = normalized(x)
    np.testing.assert_allclose(whole, expected, rtol=1e-6, atol=1e-6)
    for pieces in (2, 3):
        assert normalized(x, pieces).tobytes() == whole.tobytes()
    assert normalized(x[:1]).tobytes() == whole[:1].tobytes()
    x[0, 0] = np.nan
    assert np.isnan(normalized(x)[0]).all()
    assert normalized(x)[1:].tobytes() == whole[1:].tobytes()
