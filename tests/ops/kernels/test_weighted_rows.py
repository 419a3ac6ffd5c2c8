"""Sums of weighted rows against float64, at each size of vector; that Resize uses them, and its bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.engines.onednn import resampling
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.ops.kernels.weighted_rows import MOST_TERMS, weighted_rows_step
from tests.ops.pieces import cut_into
from tests.ops.running import run_operator

_found = engine_library()
pytestmark = pytest.mark.skipif(
    _found is None or not _found.machine.can_run,
    reason="it needs oneDNN, AVX2 with FMA, and memory that may be executable",
)


@pytest.mark.parametrize("lanes", [8, 16])
@pytest.mark.parametrize("terms", range(1, MOST_TERMS + 1))
@pytest.mark.parametrize("count", [1, 7, 8, 33, 80])
@pytest.mark.parametrize(("blocks", "pieces"), [(1, 1), (1, 3), (5, 2)])
def test_rows_are_sums_of_rows(lanes: int, terms: int, count: int, blocks: int, pieces: int) -> None:
    assert _found is not None
    if lanes > _found.machine.lanes:
        pytest.skip("the processor has no such vectors")
    rng = np.random.default_rng(terms)
    x = rng.standard_normal((blocks, 6, count)).astype(np.float32)
    places, weights = rng.integers(0, 6, (terms, 9)), rng.standard_normal((terms, 9))
    room = np.full(blocks * 9 * count + 16, 7, np.float32)  # what is behind the result stays
    y = room[:-16].reshape(blocks, 9, count)
    with cut_into(pieces):
        step = weighted_rows_step(replace(_found.machine, lanes=lanes), x, y, places, weights, "test")
    assert step is not None
    step()
    expected = (weights[:, :, None] * x.astype(np.float64)[:, places]).sum(1)
    np.testing.assert_allclose(y, expected, rtol=1e-6, atol=4e-6)
    assert (room[-16:] == 7).all()


def test_more_terms_are_not_for_them() -> None:
    assert _found is not None
    places = np.zeros((MOST_TERMS + 1, 2), np.intp)
    x, y = np.zeros((1, 3, 4), np.float32), np.zeros((1, 2, 4), np.float32)
    assert weighted_rows_step(_found.machine, x, y, places, np.ones(places.shape), "test") is None


@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("sizes", [(20, 31), (3, 31), (20, 4), (9, 31), (20, 10)])
def test_resize_takes_them_and_its_bytes_depend_on_nothing_else(
    mode: str, sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def counted(*given: object) -> object:
        asked.append(1)
        return weighted_rows_step(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(resampling, "weighted_rows_step", counted)
    x = np.random.default_rng(1).standard_normal((2, 3, 9, 10)).astype(np.float32)
    arguments: dict[str, ArgumentValue] = {"mode": mode, "axes": [2, 3], "sizes": list(sizes)}
    (whole,) = run_operator("Resize", [x], engine="ONEDNN", **arguments)
    assert asked
    (expected,) = run_operator("Resize", [x.astype(np.float64)], **arguments)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-5)
    for pieces in (2, 3):
        (found,) = run_operator("Resize", [x], engine="ONEDNN", pieces=pieces, **arguments)
        assert found.tobytes() == whole.tobytes(), pieces
    for image in range(2):
        (found,) = run_operator("Resize", [x[image : image + 1]], engine="ONEDNN", **arguments)
        assert found.tobytes() == whole[image].tobytes(), image


def test_an_axis_whose_size_stays_may_still_be_resized() -> None:
    x = np.random.default_rng(2).standard_normal((1, 2, 9, 10)).astype(np.float32)
    arguments: dict[str, ArgumentValue] = {"mode": "linear", "axes": [2, 3], "scales": [1.05, 2.0]}
    (found,) = run_operator("Resize", [x], engine="ONEDNN", **arguments)
    (expected,) = run_operator("Resize", [x.astype(np.float64)], **arguments)
    assert found.shape == (1, 2, 9, 20)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
