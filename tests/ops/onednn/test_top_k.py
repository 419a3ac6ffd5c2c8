"""TopK by a kernel of our own: the default engine's bytes, whatever the numbers are, in any pieces."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dagexec.ops.engines.onednn import top_k
from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import normal, run_onednn
from tests.ops.running import Array, run_operator

pytestmark = needs_kernels

RANDOM = np.random.default_rng(0)
ROWS: dict[str, Array] = {
    "normal": normal(1, 5, 100),
    "small": normal(1, 4, 3),
    "one vector": normal(1, 2, 2, 8),
    "long": normal(1, 3, 2500),
    "alike": RANDOM.integers(0, 4, (7, 61)).astype(np.float32),
    "infinite": RANDOM.choice([-math.inf, math.inf, 1.0], (6, 45)).astype(np.float32),
    "nothing but minus infinity": np.full((2, 19), -math.inf, np.float32),
    "zeros of both signs": RANDOM.choice([0.0, -0.0], (3, 33)).astype(np.float32),
    "NaN": np.where(RANDOM.random((5, 40)) < 0.1, math.nan, RANDOM.random((5, 40))).astype(np.float32),
    "the last is NaN": np.array([[3, 1, 2, 0, 1, 2, 3, 4, 5, math.nan], np.arange(10)], np.float32),
}


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize("name", ROWS)
def test_the_first_of_rows_are_those_of_the_default_engine(
    name: str, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    kernel = top_k.top_step
    monkeypatch.setattr(top_k, "top_step", lambda *given: asked.append(kernel(*given)) or asked[-1])
    x = ROWS[name]
    counts = [one for one in (1, 3, 8, 16) if one <= x.shape[-1]]
    for count in counts:
        expected = run_operator("TopK", [x], 2, k=count, largest=largest)
        for pieces in (1, 3):
            found = run_onednn("TopK", [x], 2, k=count, largest=largest, pieces=pieces)
            assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]
    assert len(asked) >= 2 * len(counts)
    assert None not in asked


@pytest.mark.parametrize("arguments", [{"axis": 0, "k": 2}, {"k": 0}, {"k": 17}])
def test_others_are_left_to_the_default_engine(arguments: dict[str, int]) -> None:
    x = normal(1, 6, 20)
    for outputs in (2, 3):
        found, expected = (run_operator("TopK", [x], outputs, engine=engine, **arguments) for engine in ("", "ONEDNN"))
        assert [one.tobytes() for one in found] == [one.tobytes() for one in expected]


def test_places_in_the_whole_tensor_are_given_by_the_default_engine() -> None:
    _, indices, flat = run_operator("TopK", [normal(1, 6, 20)], 3, engine="ONEDNN", k=1)
    np.testing.assert_array_equal(flat, indices[:, 0] + 20 * np.arange(6))
