"""InstanceNorm, GroupNorm, RootMeanSquareNorm by kernels: NumPy's values; what is left to NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import normal, run_fallback, run_onednn
from tests.ops.running import run_operator

pytestmark = needs_kernels

CASES: dict[str, tuple[str, tuple[int, ...], dict[str, ArgumentValue]]] = {
    "channels": ("InstanceNorm", (2, 6, 5, 7), {}),
    "channels of one axis": ("InstanceNorm", (1, 6, 1100), {"epsilon": 0.1}),
    "groups": ("GroupNorm", (3, 6, 5, 7), {"group": 2}),
    "one group": ("GroupNorm", (2, 6, 40), {"group": 1}),
}


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_it_is_that_of_numpy(name: str, pieces: int) -> None:
    op_type, shape, arguments = CASES[name]
    inputs = [normal(0, *shape), normal(1, 6), normal(2, 6)]
    (found,) = run_onednn(op_type, list(inputs), pieces=pieces, **arguments)
    (expected,) = run_operator(op_type, list(inputs), **arguments)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    (alone,) = run_onednn(op_type, [inputs[0][:1], *inputs[1:]], **arguments)
    assert alone.tobytes() == found[:1].tobytes(), "a row of a batch"


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("axis", [-1, 1])
def test_a_root_mean_square_normalization_is_that_of_numpy(axis: int, pieces: int) -> None:
    inputs = [normal(0, 5, 6, 70), normal(1, *(5, 6, 70)[axis:])]
    (found,) = run_onednn("RootMeanSquareNorm", list(inputs), pieces=pieces, axis=axis, epsilon=0.1)
    (expected,) = run_operator("RootMeanSquareNorm", list(inputs), axis=axis, epsilon=0.1)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-6)
    (alone,) = run_onednn("RootMeanSquareNorm", [inputs[0][:1], inputs[1]], axis=axis, epsilon=0.1)
    assert alone.tobytes() == found[:1].tobytes(), "a row of a batch"


def test_a_scale_of_other_axes_than_those_of_a_mean_is_left_to_numpy() -> None:
    _, reason = run_fallback("RootMeanSquareNorm", [normal(0, 5, 6, 70), normal(1, 6, 70)])
    assert "scale of shape" in reason


def test_what_it_does_not_serve_is_left_to_numpy() -> None:
    x, scale, bias = normal(0, 2, 6, 5, 7), normal(1, 6), normal(2, 6)
    results, reason = run_fallback("InstanceNorm", [x, scale, bias], 3)
    assert len(results) == 3
    assert "channels in NCHW" in reason
    _, reason = run_fallback("GroupNorm", [x.transpose(0, 2, 3, 1).copy(), scale, bias], order="NHWC", group=2)
    assert "channels in NCHW" in reason
