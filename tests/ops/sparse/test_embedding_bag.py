"""EmbeddingBag against sums in float64, on each engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.errors import OperatorError, ShapeError
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.kernels import bag_kernel
from tests.ops.pieces import cut_into
from tests.ops.running import run_operator

Array = npt.NDArray[Any]

RNG = np.random.default_rng(3)
ENGINES = ["", pytest.param("ONEDNN", marks=pytest.mark.skipif(library() is None, reason="no oneDNN"))]
STARTS, ENDS = np.array([0, 2, 2, -3, 5, -40, 99]), np.array([2, 2, 7, -1, 4, 1000])


def bags(data: Array, indices: Array | None, reduction: str) -> Array:
    """Each range by NumPy's slices, in float64."""
    rows = data.astype(np.float64) if indices is None else data.astype(np.float64)[indices]
    parts = [rows[start:end] for start, end in zip(STARTS[: len(ENDS)], ENDS, strict=True)]
    sums = np.array([part.sum(axis=0) for part in parts])
    counts = np.array([max(1, len(part)) for part in parts]).reshape(-1, *(1,) * (data.ndim - 1))
    return sums / counts if reduction == "mean" else sums


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(9, 1), (9, 5), (12, 83), (7, 3, 16), (8,)])
@pytest.mark.parametrize("picked", [True, False])
def test_the_rows_of_each_range_are_added(picked: bool, shape: tuple[int, ...], reduction: str, engine: str) -> None:
    data = RNG.standard_normal(shape).astype(np.float32)
    indices = RNG.integers(-shape[0], shape[0], 30) if picked else None
    inputs = [data, STARTS, ENDS, *([] if indices is None else [indices])]
    found = []
    for pieces in (0, 3):
        with cut_into(pieces):
            found += run_operator("EmbeddingBag", inputs, reduction=reduction, wrap_indices=1, engine=engine)
    np.testing.assert_allclose(found[0], bags(data, indices, reduction), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[1], found[0])


@pytest.mark.skipif(
    (known := library()) is None or not known.machine.can_run, reason="no oneDNN, or kernels cannot run"
)
def test_a_kernel_adds_rows_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[object] = []
    monkeypatch.setattr(
        "dagexec.ops.engines.onednn.embedding_bag.bag_step",
        lambda *args, **named: steps.append(bag_kernel.bag_step(*args, **named)) or steps[-1],
    )
    data = RNG.standard_normal((4, 21)).astype(np.float32)
    indices = RNG.integers(0, 4, 50)
    [found] = run_operator("EmbeddingBag", [data, np.array([3]), np.array([50]), indices], engine="ONEDNN")
    expected = np.zeros(21, np.float32)
    for row in data[indices[3:]]:
        expected += row
    np.testing.assert_array_equal(found[0], expected)
    assert steps[-1] is not None


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("index", "wraps"), [(4, 1), (-5, 1), (-1, 0), (2**40, 0)])
def test_indices_out_of_range_are_named(index: int, wraps: int, engine: str) -> None:
    data, bounds = RNG.standard_normal((4, 9)).astype(np.float32), (np.array([0, 2]), np.array([2, 4]))
    with pytest.raises(OperatorError, match=rf"index {index} at place 3 must be in"):
        run_operator("EmbeddingBag", [data, *bounds, np.array([0, 1, 2, index])], wrap_indices=wraps, engine=engine)


def test_no_bags_and_odd_inputs() -> None:
    data, none = np.ones((4, 9), np.float32), np.empty(0, np.int64)
    assert run_operator("EmbeddingBag", [data, none, none])[0].shape == (0, 9)
    with pytest.raises(ShapeError, match="a start for each of 2 ends, found 1"):
        run_operator("EmbeddingBag", [data, np.array([0]), np.array([1, 2])])
    with pytest.raises(ShapeError, match="sum or mean, found 'max'"):
        run_operator("EmbeddingBag", [data, np.array([0]), np.array([1])], reduction="max")
