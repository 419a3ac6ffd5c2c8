"""Windows on CUDA - poolings, their gradients, im2col and col2im - beyond what the tests of the host's show there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.device import Device
from dagexec.devices.cuda import kernels
from dagexec.ops.base.layout import BLOCKS
from tests.cuda.emulated import cuda_devices
from tests.ops.running import on_device, operator_def, run_operator
from tests.ops.windows import geometries

Array = npt.NDArray[Any]

FORWARD = ["MaxPool", "AveragePool", "LpPool", "MaxPoolWithIndex"]
FLOATS: list[Any] = [np.float16, ml_dtypes.bfloat16, np.float32, np.float64]


@pytest.fixture(autouse=True, scope="module")
def _devices() -> Iterator[None]:
    with cuda_devices():
        yield


def run(op_type: str, inputs: list[Array], outputs: int = 1, **arguments: Any) -> list[Array]:
    """The outputs of an operator on CUDA."""
    names = [f"x{index}" for index in range(len(inputs))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    return on_device(Device("cuda", 0), definition, dict(zip(names, inputs, strict=True)))


def pixels(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Array:
    """Whole numbers from -50 to 50, so that sums are exact and maxima have ties."""
    return np.random.default_rng(seed).integers(-50, 51, shape).astype(dtype)


def outputs_of(op_type: str) -> int:
    return 2 if "Index" in op_type else 1


def gradient_of(op_type: str, x: Array, found: list[Array], dy: Array, **arguments: Any) -> Array:
    """dX, on CUDA."""
    inputs = [x, dy, found[1]] if "Index" in op_type else [x, found[0], dy]
    return run(f"{op_type}Gradient", inputs, **arguments)[0]


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("op_type", FORWARD)
def test_more_windows_than_a_grid_has_threads(op_type: str, order: str) -> None:
    x = pixels((2, 3, 60, 61) if order == "NCHW" else (2, 60, 61, 3))
    arguments: dict[str, Any] = {"kernel": 3, "stride": 1, "pad": 1, "order": order}
    found = run(op_type, [x], outputs_of(op_type), **arguments)
    expected = run_operator(op_type, [x], outputs_of(op_type), **arguments)
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    if len(found) == 2:
        np.testing.assert_array_equal(found[1], expected[1])
    dy = pixels(found[0].shape, seed=1)
    dx = gradient_of(op_type, x, found, dy, **arguments)
    inputs: list[npt.ArrayLike] = [x, dy, expected[1]] if "Index" in op_type else [x, expected[0], dy]
    (wanted,) = run_operator(f"{op_type}Gradient", inputs, **arguments)
    np.testing.assert_allclose(dx, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("op_type", FORWARD)
@pytest.mark.parametrize("arguments", [{"kernel": 3, "stride": 2, "pad": 1}, {"global_pooling": 1}])
def test_bytes_do_not_depend_on_the_grid(
    monkeypatch: pytest.MonkeyPatch, op_type: str, arguments: dict[str, Any]
) -> None:
    x = np.random.default_rng(0).standard_normal((2, 5, 31, 30)).astype(np.float32)

    def everything() -> list[bytes]:
        found = run(op_type, [x], outputs_of(op_type), **arguments)
        dy = np.random.default_rng(1).standard_normal(found[0].shape).astype(np.float32)
        return [array.tobytes() for array in (*found, gradient_of(op_type, x, found, dy, **arguments))]

    once = everything()
    monkeypatch.setattr(kernels, "block_count", lambda *_args, **_kwargs: 1)
    assert everything() == once
    monkeypatch.setattr(kernels, "block_count", lambda *_args, **_kwargs: 7)
    assert everything() == once


@pytest.mark.parametrize("op_type", FORWARD)
@pytest.mark.parametrize("arguments", [{"kernel": 3, "stride": 2, "pad": 1}, {"global_pooling": 1}])
@pytest.mark.parametrize(("order", "block"), BLOCKS.items())
def test_blocks_of_channels_give_what_plain_images_give(
    op_type: str, arguments: dict[str, Any], order: str, block: int
) -> None:
    x = pixels((2, 32, 7, 6))

    def blocked(array: Array) -> Array:
        split = array.reshape(array.shape[0], -1, block, *array.shape[2:])
        return np.ascontiguousarray(np.moveaxis(split, 2, -1))

    count = outputs_of(op_type)
    flat = {"flat_indices": 1} if count == 2 else {}
    plain = run(op_type, [x], count, **arguments, **flat)
    found = run(op_type, [blocked(x)], count, order=order, **arguments, **flat)
    for one, other in zip(found, plain, strict=True):
        np.testing.assert_array_equal(one, blocked(other))
    dy = pixels(plain[0].shape, seed=1)
    wanted = gradient_of(op_type, x, plain, dy, **arguments, **flat)
    dx = gradient_of(op_type, blocked(x), found, blocked(dy), order=order, **arguments, **flat)
    np.testing.assert_array_equal(dx, blocked(wanted))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.int64])
def test_integers_have_maxima_and_columns(dtype: Any) -> None:
    limits = np.iinfo(dtype)
    x = np.array([[[limits.min, limits.max, 3, limits.min]]], dtype)
    assert run("MaxPool", [x], kernel=2, stride=2)[0].tolist() == [[[limits.max, 3]]]
    assert run("MaxPool", [x], global_pooling=1)[0].tolist() == [[[limits.max]]]
    (columns,) = run("Im2Col", [x], kernel=3, pad=1)
    (back,) = run("Col2Im", [columns, x], kernel=3, pad=1)
    readers = np.array([2, 3, 3, 2])
    with np.errstate(over="ignore"):
        expected = sum(np.where(readers > tap, x, 0).astype(dtype) for tap in range(3))
    np.testing.assert_array_equal(back, np.asarray(expected, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_not_a_number_wins_and_empty_windows_have_none(dtype: Any) -> None:
    x = np.array([[[1, np.nan, 3, 4, -np.inf, -np.inf]]], dtype)
    y, mask = run("MaxPoolWithIndex", [x], 2, kernel=2, stride=2)
    np.testing.assert_array_equal(y.astype(np.float64), [[[np.nan, 4, -np.inf]]])
    assert mask.tolist() == [[[1, 3, 4]]]
    (whole,) = run("MaxPool", [x], global_pooling=1)
    assert np.isnan(whole.astype(np.float64)).all()
    narrow = np.array([[[5]]], dtype)
    y, mask = run("MaxPoolWithIndex", [narrow], 2, kernel=2, dilation=2, pads=[1, 1])
    assert mask.tolist() == [[[-1]]]
    assert np.isneginf(y.astype(np.float64)).all()


@pytest.mark.slow
@pytest.mark.exact
@settings(max_examples=40, deadline=None)
@given(
    geometry=geometries(),
    order=st.sampled_from(["NCHW", "NHWC"]),
    dtype=st.sampled_from([np.float32, np.float16, np.int8]),
)
def test_columns_and_back_over_any_window(geometry: Any, order: str, dtype: Any) -> None:
    shape = (2, 3, *geometry.size) if order == "NCHW" else (2, *geometry.size, 3)
    x = pixels(shape, dtype) // dtype(8)
    arguments = {**geometry.arguments(), "order": order}
    (expected,) = run_operator("Im2Col", [x], **arguments)
    (columns,) = run("Im2Col", [x], **arguments)
    assert columns.tobytes() == expected.tobytes()
    (image,) = run("Col2Im", [columns, x], **arguments)
    assert image.tobytes() == run_operator("Col2Im", [columns, x], **arguments)[0].tobytes()


def test_indices_of_pixels_outside_their_windows_search_all_windows() -> None:
    x = np.zeros((2, 2, 3, 4), np.float32)
    mask = np.random.default_rng(3).integers(-1, 12, (2, 2, 2, 3)).astype(np.int32)
    dy = pixels(mask.shape)
    (dx,) = run("MaxPoolWithIndexGradient", [x, dy, mask], kernel=2)
    expected = np.zeros((4, 12), np.float32)
    for plane, (places, values) in enumerate(zip(mask.reshape(4, -1), dy.reshape(4, -1), strict=True)):
        np.add.at(expected[plane], places[places >= 0], values[places >= 0])
    np.testing.assert_array_equal(dx.reshape(4, 12), expected)
    flat = np.random.default_rng(4).integers(-1, 48, (2, 2, 2, 3))
    (dx,) = run("MaxPoolWithIndexGradient", [x, dy, flat], kernel=2, flat_indices=1)
    totals = np.zeros(48, np.float32)
    np.add.at(totals, flat[flat >= 0], dy[flat >= 0])
    np.testing.assert_array_equal(dx.reshape(-1), totals)


def test_no_images_have_no_windows() -> None:
    x = np.zeros((0, 3, 5, 5), np.float32)
    for op_type in FORWARD:
        found = run(op_type, [x], outputs_of(op_type), kernel=2)
        assert found[0].shape == (0, 3, 4, 4)
        assert gradient_of(op_type, x, found, found[0], kernel=2).shape == x.shape
    assert run("Im2Col", [x], kernel=2)[0].shape == (0, 12, 4, 4)
