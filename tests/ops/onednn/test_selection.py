"""Where by kernels: elements of four bytes, moved as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.operator import Operator
from dagexec.ops.engines.onednn.binding import library
from tests.ops.pieces import cut_into
from tests.ops.running import run_operator

pytestmark = pytest.mark.skipif(
    (found := library()) is None or not found.machine.can_run,
    reason="no oneDNN, no AVX2, or memory may not be executed",
)


def bits(shape: tuple[int, ...], dtype: Any, seed: int) -> npt.NDArray[Any]:
    """Any bits: numbers, and NaN of many kinds."""
    return np.random.default_rng(seed).integers(0, 1 << 32, shape, np.uint32).view(dtype)


@pytest.fixture
def _kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Operator) -> None:
        raise AssertionError("the default engine computes it")

    monkeypatch.setattr("dagexec.ops.families.elementwise.arithmetic.Where.prepare", refuse)


@pytest.mark.usefixtures("_kernels_compute")
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize(
    ("condition", "x", "y"),
    [
        ((3, 5, 33), (3, 5, 33), (3, 5, 33)),
        ((3, 1, 33), (1, 5, 33), (3, 5, 1)),
        ((1, 1, 64), (), (2, 4, 64)),
        ((70, 1), (3,), ()),
        ((90000,), (90000,), (1,)),
    ],
)
def test_elements_are_moved_as_they_are(
    dtype: Any, condition: tuple[int, ...], x: tuple[int, ...], y: tuple[int, ...]
) -> None:
    chosen = np.random.default_rng(0).random(condition) < 0.5
    inputs = [chosen, bits(x, dtype, 1), bits(y, dtype, 2)]
    for pieces in (0, 3):
        with cut_into(pieces):
            [z] = run_operator("Where", inputs, engine="ONEDNN")
        assert z.tobytes() == np.where(*inputs).tobytes()


def test_other_elements_and_few_conditions_are_for_the_default_engine() -> None:
    for dtype, shape in ((np.float64, (3, 50)), (np.float32, (3,)), (np.bool_, (3, 50))):
        chosen = np.random.default_rng(0).random(shape) < 0.5
        x, y = np.ones(shape, dtype), np.zeros(shape, dtype)
        [z] = run_operator("Where", [chosen, x, y], engine="ONEDNN")
        np.testing.assert_array_equal(z, chosen.astype(dtype))
