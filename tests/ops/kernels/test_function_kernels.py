"""The exact GELU by machine code: its values, its edges, and bytes that depend on nothing but the number."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.ops.kernels.function_kernels import gelu_step
from tests.ops.onednn.engine import needs_onednn, normal, run_onednn
from tests.ops.pieces import cut_into
from tests.ops.running import Array, the_library


def computed(x: Array, pieces: int = 1, *, in_place: bool = False) -> Array:
    """By the kernels, which must leave what is behind the result as it was."""
    machine = the_library().machine
    if not machine.can_run:
        pytest.skip("no AVX2, or memory may not be executed")
    memory = np.full(x.size + 16, 7, np.float32)
    y = memory[: x.size]
    if in_place:
        y[:] = x
    with cut_into(pieces):
        step = gelu_step(machine, y if in_place else x, y, "gelu")
    assert step is not None
    step()
    assert (memory[x.size :] == 7).all()
    return y


def exact(x: Array) -> Array:
    return np.array([value / 2 * (1 + math.erf(value / math.sqrt(2))) for value in x.astype(np.float64)])


@needs_onednn
def test_it_is_exact_to_float32() -> None:
    x = np.concatenate([np.linspace(-12, 12, 4001), [0, 1e-30, -1e-30, 3e38, 1e10]]).astype(np.float32)
    np.testing.assert_allclose(computed(x), exact(x), rtol=3e-7, atol=2e-7)


@needs_onednn
def test_what_is_not_finite() -> None:
    found = computed(np.array([np.nan, np.inf, -np.inf, -np.nan], np.float32))
    np.testing.assert_array_equal(found, [np.nan, np.inf, np.nan, np.nan])


@needs_onednn
@pytest.mark.parametrize("in_place", [False, True])
def test_bytes_depend_on_the_number_alone(in_place: bool) -> None:
    x = normal(1, 103)
    whole = computed(x)
    for size in (1, 7, 8, 9, 24, 31, 32, 103):
        for pieces in (1, 2, 3):
            assert computed(x[:size], pieces, in_place=in_place).tobytes() == whole[:size].tobytes()
    assert computed(x[5:]).tobytes() == whole[5:].tobytes()


@needs_onednn
@pytest.mark.parametrize("post_ops", [["gelu_erf"], ["linear:2.0:0.5", "gelu_erf", "gelu_erf", "add:3", "tanh"]])
def test_a_layer_with_it_stays_with_the_library(post_ops: list[str]) -> None:
    x, w, b, other = normal(1, 5, 40), normal(2, 24, 40), normal(3, 24), normal(4, 5, 24)
    operands = [other] if "add:3" in post_ops else []
    (found,) = run_onednn("FusedFC", [x, w, b, *operands], post_ops=post_ops)
    expected = x.astype(np.float64) @ w.T + b
    if operands:
        expected = np.array([exact(exact(row)) for row in 2 * expected + 0.5])
        expected = np.tanh(expected + other)
    else:
        expected = np.array([exact(row) for row in expected])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
