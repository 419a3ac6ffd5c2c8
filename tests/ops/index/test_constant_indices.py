"""Indices that never change: their places are found once, and those that are evenly spaced are copied as parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import dagexec
from dagexec import InputInfo, Model, NetDef, op
from dagexec.core.dtypes import from_numpy
from dagexec.core.native import can_run, phases_of
from dagexec.core.operator import nothing_to_do, parts_of

Array = npt.NDArray[Any]

DATA, MORE = (np.random.default_rng(seed).standard_normal((6, 8, 5)).astype(np.float32) for seed in (0, 1))


def run(kind: str, inputs: Sequence[Array], fed: Sequence[int], **arguments: Any) -> tuple[Array, list[bool]]:
    """What an operator gives, the inputs in `fed` from a caller and the others constant; and which steps are native."""
    names = [f"x{index}" for index in range(len(inputs))]
    net = NetDef(name="test", op=[op(kind, names, ["y"], **arguments)], external_input=names)
    model = Model(
        "test",
        net,
        parameters={names[index]: one for index, one in enumerate(inputs) if index not in fed},
        inputs={names[index]: InputInfo(from_numpy(inputs[index].dtype), inputs[index].shape) for index in fed},
        outputs=("y",),
    )
    with dagexec.compile(model, optimize=False) as executor:
        found = executor.run({names[index]: inputs[index] for index in fed})["y"]
        steps = [part for step in executor.net().prepared().steps for part in parts_of(step)]
        return np.array(found), [phases_of(part) is not None for part in steps if part is not nothing_to_do]


def grid(*axes: Sequence[int]) -> Array:
    """Vectors of indices, one for each combination."""
    return np.stack(np.meshgrid(*axes, indexing="ij"), -1).astype(np.int64)


GRIDS = {
    "all": grid(range(6), range(8)),
    "a part": grid(range(1, 6), range(2, 8)),
    "every other": grid(range(0, 6, 2), range(0, 8, 3)),
    "from the end": grid([-2, -1], [-3, -2]),
    "one": grid([3], [4]),
    "backwards": grid(range(5, -1, -1), range(8)),
    "some twice": grid([0, 0, 2], [1, 3, 5]),
    "in no order": grid([4, 0, 2], [1, 7, 5]),
}


@pytest.mark.parametrize("indices", GRIDS.values(), ids=GRIDS.keys())
def test_slices_are_picked_and_put_as_numpy_does_it(indices: Array) -> None:
    where = tuple(np.moveaxis(indices, -1, 0))
    picked, _ = run("GatherND", [DATA, indices], [0])
    np.testing.assert_array_equal(picked, DATA[where])
    updates = MORE[: indices.shape[0], : indices.shape[1]]
    expected = DATA.copy()
    expected[where] = updates
    found, _ = run("ScatterND", [DATA, indices, updates], [0, 2])
    np.testing.assert_array_equal(found, expected)
    expected = DATA.copy()
    np.add.at(expected, where, updates)
    found, _ = run("ScatterND", [DATA, indices, updates], [0, 2], reduction="add")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_are_picked_as_numpy_does_it(axis: int) -> None:
    for indices in (np.arange(5), np.array([4, -1, 0, 0, 2]), np.array([3])):
        along = np.broadcast_to(np.expand_dims(indices, [one for one in range(3) if one != axis]), (
            *DATA.shape[:axis], len(indices), *DATA.shape[axis + 1 :])).astype(np.int64)  # fmt: skip
        for fed in ([0], [0, 1]):
            found, _ = run("GatherElements", [DATA, along], fed, axis=axis)
            np.testing.assert_array_equal(found, np.take_along_axis(DATA, along, axis))


@pytest.mark.skipif(not can_run(), reason="no machine code runs here")
def test_evenly_spaced_places_are_copied_without_python() -> None:
    for name in ("all", "a part", "every other", "from the end", "one"):
        assert run("ScatterND", [DATA, GRIDS[name], DATA[: GRIDS[name].shape[0], : GRIDS[name].shape[1]]], [0, 2])[
            1
        ] == [True]
        assert run("GatherND", [DATA, GRIDS[name]], [0])[1] == [True]
    assert run("GatherND", [DATA, GRIDS["in no order"]], [0])[1] == [True]
    assert run("GatherND", [DATA, GRIDS["in no order"]], [0, 1])[1] == [True]


@pytest.mark.parametrize("kind", ["GatherND", "GatherElements"])
@pytest.mark.parametrize("fed", [[0], [0, 1]])
def test_a_run_tells_of_an_index_out_of_range(kind: str, fed: list[int]) -> None:
    indices = np.full((6, 8, 5) if kind == "GatherElements" else (2, 1), 7, np.int64)
    with pytest.raises(dagexec.DagexecError, match=rf"{kind} 'y'.*index 7 at place 0 must be in"):
        run(kind, [DATA, indices], fed)
