"""ConvInteger and MatMulInteger by oneDNN: the sums of integers, whatever the zero points, or left to the default."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.core.registry import create_operator
from dagexec.ops.engines.onednn.binding import library
from tests.ops.integers import convolution_sums
from tests.ops.onednn.engine import fallbacks
from tests.ops.quantized.test_quantized_products import full_range
from tests.ops.running import computed, operator_def, workspace_of

Array = npt.NDArray[Any]
RNG = np.random.default_rng(37)

found_library = library()
pytestmark = pytest.mark.skipif(found_library is None or not found_library.isa.int8, reason="needs oneDNN, and VNNI")

ZEROS: dict[str, Any] = {
    "none": (),
    "of X": (np.uint8(77),),
    "fits int8": (np.uint8(77), np.uint8(128)),
    "needs two parts": (np.uint8(77), np.uint8(111)),
}


def last(image: Array) -> Array:
    return np.moveaxis(image, 1, -1).copy() if image.ndim == 4 else image


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("zeros", [*ZEROS, "a filter"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_convolutions_are_those_of_integers(group: int, zeros: str, order: str) -> None:
    given = ZEROS.get(zeros, (np.uint8(9), full_range(RNG, (16,), np.uint8)))
    x = full_range(RNG, (2, 8, 9, 8), np.uint8)
    weights = full_range(RNG, (16, 8 // group, 3, 3), np.uint8 if len(given) > 1 else np.int8)
    differences = weights.astype(np.int64)
    if len(given) > 1:
        differences = differences - given[1].astype(np.int64).reshape(-1, 1, 1, 1)
    expected = convolution_sums(x, differences, int(given[0]) if given else 0, stride=2, pad=1, group=group)
    arrays = [last(array) if order == "NHWC" else array for array in (x, weights, *given)]
    with fallbacks() as left:
        named = dict(zip("abcd", arrays, strict=False))
        frozen = "bd" if len(given) > 1 else "b"
        [found] = computed("ConvInteger", named, ["y"], frozen, group=group, kernel=3, pad=1, stride=2, order=order)
    assert left == []
    np.testing.assert_array_equal(np.moveaxis(found, -1, 1) if order == "NHWC" else found, expected)


@pytest.mark.parametrize("zeros", [*ZEROS, "a column"])
def test_products_are_those_of_integers(zeros: str) -> None:
    given = ZEROS.get(zeros, (np.uint8(9), full_range(RNG, (6,), np.uint8)))
    a, b = full_range(RNG, (2, 5, 70), np.uint8), full_range(RNG, (70, 6), np.uint8 if len(given) > 1 else np.int8)
    a_zero, b_zero = (*(zero.astype(np.int64) for zero in given), np.int64(0), np.int64(0))[:2]
    with fallbacks() as left:
        named = dict(zip("abcd", (a, b, *given), strict=False))
        [found] = computed("MatMulInteger", named, ["y"], "bd" if len(given) > 1 else "b")
    assert left == []
    np.testing.assert_array_equal(found, (a.astype(np.int64) - a_zero) @ (b.astype(np.int64) - b_zero))


def test_sums_that_float32_might_round_are_left_to_the_default_engine() -> None:
    a, b = np.full((1, 901), 255, np.uint8), np.full((901, 8), 127, np.int8)
    with fallbacks() as left:
        [found] = computed("MatMulInteger", {"a": a, "b": b}, ["y"], "b")
    assert "are not exact in float32" in left[0]
    assert found.tolist() == [[901 * 255 * 127] * 8]


def test_the_zero_point_is_that_of_the_run() -> None:
    a, b, zero = np.full((1, 16), 9, np.uint8), np.ones((16, 16), np.int8), np.array(2, np.uint8)
    workspace = workspace_of((("a", a), ("b", b), ("zero", zero)))
    workspace.get_blob("b").tensor().freeze()
    definition = operator_def("MatMulInteger", ["a", "b", "zero"], ["y"], engine="ONEDNN")
    operator = create_operator(definition, workspace)
    step = operator.bind(operator.infer()).step
    for value in (2, 5):
        workspace.get_blob("zero").tensor().array[...] = value
        step()
        assert workspace.fetch_blob("y").tolist() == [[16 * (9 - value)] * 16]
