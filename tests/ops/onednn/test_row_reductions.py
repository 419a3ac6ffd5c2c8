"""Rows reduced by our own kernels, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dagexec.ops.engines.onednn import reduction
from dagexec.ops.engines.onednn.binding import library
from tests.ops.pieces import cut_into
from tests.ops.running import run_operator

pytestmark = pytest.mark.skipif(
    (found := library()) is None or not found.machine.can_run,
    reason="no oneDNN, no AVX2, or memory may not be executed",
)

KINDS: dict[str, Any] = {
    "ReduceSum": np.sum,
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceL1": lambda x, **axes: np.abs(x).sum(**axes),
    "ReduceL2": lambda x, **axes: np.sqrt(np.square(x).sum(**axes)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(50, 4, 16), (7, 1), (9, 5), (3, 33), (11, 128), (20,), (5, 3000)])
def test_rows_are_reduced_in_any_pieces(shape: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    kernel = reduction.row_step
    monkeypatch.setattr(reduction, "row_step", lambda *given: asked.append(kernel(*given)) or asked[-1])
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    expected = KINDS[kind](x.astype(np.float64), axis=-1, keepdims=True)
    for pieces in (0, 3):
        with cut_into(pieces):
            [y] = run_operator(kind, [x], axes=[-1], keepdims=1, engine="ONEDNN")
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-6 * np.abs(x).sum(-1).max())
    assert None not in asked
    assert asked


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("ReduceSum", [21, np.nan, np.inf, -np.inf]),
        ("ReduceMax", [1, np.nan, np.inf, -np.inf]),
        ("ReduceMin", [1, np.nan, 1, -np.inf]),
        ("ReduceL2", [np.sqrt(np.float32(21)), np.nan, np.inf, np.inf]),
    ],
)
def test_what_is_no_number_reaches_the_result_of_its_row_alone(kind: str, expected: list[float]) -> None:
    x = np.ones((4, 21), np.float32)
    x[1, 20], x[2, 3], x[3] = np.nan, np.inf, -np.inf
    for rows, axis in ((x, 1), (x.T.copy(), 0)):
        [y] = run_operator(kind, [rows], axes=[axis], keepdims=0, engine="ONEDNN")
        np.testing.assert_allclose(y, expected, rtol=1e-6)
