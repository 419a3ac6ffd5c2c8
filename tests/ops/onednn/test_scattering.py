"""Values put to places by the kernel, against NumPy's functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.proto import NetDef
from dagexec.core.workspace import Workspace
from dagexec.errors import OperatorError
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.kernels import scatter_kernels
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.pieces import cut_into
from tests.ops.running import operator_def, run_operator

Array = npt.NDArray[Any]

pytestmark = pytest.mark.skipif(
    (found := library()) is None or not found.machine.can_run,
    reason="no oneDNN, no AVX2, or memory may not be executed",
)

RANDOM = np.random.default_rng(0)
JOINS = {"none": None, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


@pytest.fixture(autouse=True)
def kernels_made(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What kernels join values by, of those that were asked for."""
    made: list[str | None] = []
    for name in ("_kernel", "_row_kernel"):
        kernel = getattr(scatter_kernels, name)

        def noted(lanes: int, join: str | None, kernel: Any = kernel) -> int | None:
            made.append(join)
            found: int | None = kernel(lanes, join)
            return found

        monkeypatch.setattr(scatter_kernels, name, noted)
    return made


def put(data: Array, where: tuple[Array, ...], updates: Array, reduction: str) -> Array:
    """One value after another."""
    expected, join = data.copy(), JOINS[reduction]
    if join is None:
        for place in np.ndindex(*where[0].shape):
            expected[tuple(int(one[place]) for one in where)] = updates[place]
    else:
        join.at(expected, where, updates)
    return expected


@pytest.mark.parametrize("reduction", JOINS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("shape", [(20, 6, 33), (5, 4, 3), (30, 64, 1)])
def test_elements_meet_in_their_order_in_any_pieces(
    shape: tuple[int, ...], axis: int, reduction: str, kernels_made: list[str | None]
) -> None:
    data, updates = (RANDOM.standard_normal(shape).astype(np.float32) for _ in range(2))
    updates[RANDOM.random(shape) < 0.05] = np.nan
    indices = RANDOM.integers(-shape[axis], shape[axis], shape)
    where = [np.broadcast_to(one, shape) for one in np.ogrid[tuple(map(slice, shape))]]
    where[axis] = indices
    expected = put(data, tuple(where), updates, reduction)
    for pieces in (0, 3):
        with cut_into(pieces):
            [y] = run_operator(
                "ScatterElements", [data, indices, updates], axis=axis, reduction=reduction, engine="ONEDNN"
            )
        np.testing.assert_array_equal(y, expected)
    assert kernels_made


@pytest.mark.parametrize("reduction", JOINS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("shape", [(6, 5), (6, 83), (7, 3, 16)])
def test_slices_meet_in_their_order(
    shape: tuple[int, ...], count: int, reduction: str, kernels_made: list[str | None]
) -> None:
    data = RANDOM.standard_normal(shape).astype(np.float32)
    indices = np.stack([RANDOM.integers(-size, size, 40) for size in data.shape[:count]], -1)
    updates = RANDOM.standard_normal((40, *data.shape[count:])).astype(np.float32)
    updates[RANDOM.random(updates.shape) < 0.05] = np.nan
    expected, join = data.copy(), JOINS[reduction]
    for vector, update in zip(indices, updates, strict=True):
        place = tuple(vector.tolist())
        expected[place] = update if join is None else join(expected[place], update)
    for pieces in (0, 3):
        with cut_into(pieces):
            [y] = run_operator("ScatterND", [data, indices, updates], reduction=reduction, engine="ONEDNN")
        np.testing.assert_array_equal(y, expected)
    assert kernels_made


def test_integers_are_replaced_and_their_sums_left_to_numpy() -> None:
    data, updates = (RANDOM.integers(-9, 9, (7, 20)).astype(np.int32) for _ in range(2))
    indices = RANDOM.integers(0, 7, (7, 20))
    for reduction in ("none", "add"):
        [y] = run_operator("ScatterElements", [data, indices, updates], reduction=reduction, engine="ONEDNN")
        columns = np.broadcast_to(np.arange(20), (7, 20))
        np.testing.assert_array_equal(y, put(data, (indices, columns), updates, reduction))


def test_rows_of_any_number_are_put_by_one_step(kernels_made: list[str | None]) -> None:
    workspace, random = Workspace(), np.random.default_rng(5)
    data = random.standard_normal((9, 19)).astype(np.float32)
    workspace.feed_blob("x", data)
    workspace.feed_blob("d", data)
    made = [
        operator_def("NonZero", ["m"], ["places"]), operator_def("Transpose", ["places"], ["rows"]),
        operator_def("GatherND", ["x", "rows"], ["updates"]),
        operator_def("ScatterND", ["d", "rows", "updates"], ["y"], reduction="add", engine="ONEDNN"),
    ]  # fmt: skip
    workspace.feed_blob("m", np.ones(9, np.float32))
    with SimpleNet(NetDef(name="net", op=made), workspace) as net:
        for count in (9, 3, 0, 5, 9):
            mask = np.zeros(9, np.float32)
            mask[random.permutation(9)[:count]] = 1
            workspace.feed_blob("m", mask)
            net.run()
            np.testing.assert_array_equal(workspace.fetch_blob("y"), data * (1 + mask[:, None]))
        workspace.adopt_strided_blob("y", np.zeros((19, 9), np.float32).T, writable=True)
        net.run()
        np.testing.assert_array_equal(workspace.fetch_blob("y"), 2 * data)
        workspace.feed_blob("d", data[:8])
        with pytest.raises(OperatorError, match=r"ScatterND.*index 8 at place \d+ must be in \[-8, 8\)"):
            net.run()
    assert "add" in kernels_made
