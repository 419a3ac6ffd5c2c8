"""Operators that move elements, by kernels: NumPy's bytes, for every type, and nothing from what NumPy serves."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.arguments import ArgumentValue
from tests.ops.kernels.running import needs_kernels
from tests.ops.onednn.engine import fallbacks, run_fallback, run_onednn
from tests.ops.running import Array, computed, run_operator

pytestmark = needs_kernels

CASES: dict[str, tuple[str, tuple[int, ...], int, dict[str, ArgumentValue]]] = {
    "heads": ("Transpose", (2, 9, 3, 32), 1, {"axes": [0, 2, 1, 3]}),
    "keys": ("Transpose", (2, 9, 3, 32), 1, {"axes": [0, 2, 3, 1]}),
    "channels last": ("NCHW2NHWC", (2, 5, 4, 6), 1, {}),
    "channels first": ("NHWC2NCHW", (2, 4, 6, 5), 1, {}),
    "slice": ("Slice", (4, 6, 8), 1, {"starts": [1, 0, 4], "ends": [3, -1, -1]}),
    "backwards": ("Slice", (4, 8), 1, {"starts": [3, 7], "ends": [-9, 2], "steps": [-1, -2], "onnx_style": 1}),
    "split": ("Split", (3, 12, 4), 3, {"axis": 1}),
    "split of columns": ("Split", (3, 12), 3, {"axis": 1}),
    "expand": ("Expand", (3, 1, 4), 1, {"shape": [2, 3, 5, 4]}),
    "expanded rows": ("Expand", (3, 1), 1, {"shape": [3, 20]}),
    "tile": ("Tile", (3, 4), 1, {"tiles": 3, "axis": 1}),
    "tile of all axes": ("TileAxes", (3, 4), 1, {"repeats": [2, 3]}),
    "pixels of blocks": ("DepthToSpace", (2, 12, 5, 9), 1, {"block_size": 2, "mode": "CRD"}),
    "blocks of channels": ("DepthToSpace", (2, 27, 2, 5), 1, {"block_size": 3}),
    "edges": ("Pad", (2, 5, 6, 3), 1, {"pads": [0, 1, 2, 0, 0, 0, 1, 0], "value": 7.0}),
    "mirrored edges": ("Pad", (2, 5, 6), 1, {"pads": [0, 1, 2, 0, 2, 3], "mode": "reflect"}),
    "repeated edges": ("Pad", (2, 5, 6), 1, {"pads": [0, 1, 2, 0, -2, 3], "mode": "edge"}),
    "images with edges": ("PadImage", (2, 5, 6, 7), 1, {"pad": 1, "order": "NHWC"}),
    "blocks of pixels": ("SpaceToDepth", (2, 3, 6, 10), 1, {"block_size": 2}),
}


def values(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    return np.random.default_rng(0).integers(-99, 99, shape).astype(dtype)


@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("name", CASES)
def test_elements_are_moved_as_by_numpy(name: str, dtype: npt.DTypeLike, pieces: int) -> None:
    op_type, shape, outputs, arguments = CASES[name]
    x = values(shape, dtype)
    found = run_onednn(op_type, [x], outputs, pieces=pieces, **arguments)
    for one, expected in zip(found, run_operator(op_type, [x], outputs, **arguments), strict=True):
        assert one.dtype == expected.dtype
        np.testing.assert_array_equal(one, expected)


GRIDS: dict[str, Any] = {
    "one": 2,
    "from the end": [-1],
    "every other": [0, 2, 4],
    "backwards": [[4, 3], [-4, 0]],
    "windows": np.add.outer([0, 1, 2], [0, 2]),
    "twice": [3, 3],
    "all": np.arange(5),
}


@pytest.mark.parametrize("name", GRIDS)
@pytest.mark.parametrize("axis", [0, 1, 3])
def test_what_constant_indices_pick_regularly_is_copied(name: str, axis: int) -> None:
    x, indices = values((5, 5, 3, 5), np.float32), np.asarray(GRIDS[name])
    for pieces in (1, 3):
        arrays = {"x": x, "i": indices}
        with fallbacks() as reasons:
            [y] = computed("Gather", arrays, ["y"], "i", pieces=pieces, axis=axis, wrap_indices=1)
        np.testing.assert_array_equal(y, np.take(x, indices, axis))
        assert not reasons


def test_indices_that_pick_irregularly_or_nothing_that_is_there_or_change_are_looked_up() -> None:
    x = values((5, 4), np.float32)
    for indices, frozen in (([0, 1, 3], "i"), ([[0, 1], [1, 3]], "i"), ([1, 2], "")):
        [y] = computed("Gather", {"x": x, "i": np.array(indices)}, ["y"], frozen)
        np.testing.assert_array_equal(y, x[indices])
    for wrong in (5, -6):
        with pytest.raises(IndexError, match=rf"index {wrong} at place 1 must be in \[-5, 5\)"):
            computed("Gather", {"x": x, "i": np.array([0, wrong])}, ["y"], "i")
    with pytest.raises(IndexError, match=r"index -1 at place 0 must be in \[0, 4\)"):
        computed("Gather", {"x": x, "i": np.array([-1])}, ["y"], "i", axis=1)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_concat_copies_its_parts(axis: int) -> None:
    parts = [values((2, 3, 4), np.float32), values((2, 3, 4), np.float32) + 1]
    found, sizes = run_onednn("Concat", list(parts), 2, axis=axis)
    np.testing.assert_array_equal(found, np.concatenate(parts, axis))
    assert sizes.tolist() == [part.shape[axis] for part in parts]


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.float16, ml_dtypes.bfloat16])
def test_narrow_elements_are_copied_in_rows_of_words(dtype: npt.DTypeLike) -> None:
    x = values((3, 5, 8), dtype)
    (found,) = run_onednn("Transpose", [x], axes=[1, 0, 2])
    np.testing.assert_array_equal(found, x.transpose(1, 0, 2))
    (found,), reason = run_fallback("Transpose", [x], axes=[2, 1, 0])
    np.testing.assert_array_equal(found, x.transpose(2, 1, 0))
    assert "no kernel for these copies" in reason


def test_strings_and_nothing_are_left_to_numpy() -> None:
    (found,), _ = run_fallback("Transpose", [np.array([[b"one", b"two"], [b"three", b"four"]], object)])
    assert found.tolist() == [[b"one", b"three"], [b"two", b"four"]]
    (found,) = run_onednn("Transpose", [np.zeros((3, 0), np.float32)])
    assert found.shape == (0, 3)
