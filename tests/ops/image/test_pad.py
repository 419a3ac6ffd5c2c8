"""Padding and its gradient, against indices written out, onnxruntime and central differences."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.errors import ArgumentError, DagexecError, ResourceError, ShapeError
from dagexec.ops.families.pool import window
from tests.ops.drawing import drawn
from tests.ops.gradients import numerical_gradients
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import Array, run_onnx, to_channels_first, to_channels_last

Named = dict[str, ArgumentValue]
FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]
DTYPES = [*FLOATS, np.int32, np.uint8]


def numbered(shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    return (np.arange(int(np.prod(shape))) % 251).reshape(shape).astype(dtype)


def padded_index(position: int, size: int, mode: str) -> int | None:
    """The pixel that a padded position shows; None for the constant."""
    if 0 <= position < size:
        return position
    if mode == "constant":
        return None
    if mode == "edge":
        return min(max(position, 0), size - 1)
    return -position if position < 0 else 2 * (size - 1) - position


def pad(x: Array, heads: list[int], tails: list[int], mode: str, value: float) -> Array:
    """Element by element. An axis is cut by negative pads first."""
    cut = x[tuple(slice(max(0, -h), n - max(0, -t)) for n, h, t in zip(x.shape, heads, tails, strict=True))]
    shape = [n + h + t for n, h, t in zip(x.shape, heads, tails, strict=True)]
    y = np.full(shape, value).astype(x.dtype)
    for place in np.ndindex(*shape):
        index = [padded_index(p - max(0, h), n, mode) for p, h, n in zip(place, heads, cut.shape, strict=True)]
        if None not in index:
            y[place] = cut[tuple(index)]
    return y


@st.composite
def paddings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[int], list[int], str]:
    mode = draw(st.sampled_from(["constant", "reflect", "edge"]))
    sizes, heads, tails = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        size = draw(st.integers(0 if mode == "constant" else 1, 4))
        cut_head = draw(st.integers(0, max(0, size - 1)))
        cut_tail = draw(st.integers(0, max(0, size - 1 - cut_head)))
        most = size - 1 if mode == "reflect" else 3
        head = draw(st.sampled_from([-cut_head, *range(most + 1)]))
        tail = draw(st.sampled_from([-cut_tail, *range(most + 1)]))
        if mode == "reflect" and max(head, tail) >= size + min(0, head) + min(0, tail):
            head = tail = 0
        sizes.append(size)
        heads.append(head)
        tails.append(tail)
    return tuple(sizes), heads, tails, mode


@pytest.mark.slow
@given(paddings(), st.sampled_from(DTYPES), st.sampled_from([0.0, 3.0]))
@drawn(250)
def test_pad_shows_the_pixel_that_its_mode_says(
    case: tuple[tuple[int, ...], list[int], list[int], str], dtype: Any, value: float
) -> None:
    shape, heads, tails, mode = case
    x = numbered(shape, dtype)
    (y,) = run_operator("Pad", [x], pads=[*heads, *tails], mode=mode, value=value)
    np.testing.assert_array_equal(y, pad(x, heads, tails, mode, value), err_msg=f"{case}, {dtype}, {value}")
    if x.size and min(heads + tails) >= 0 and dtype is np.float32:
        pads = np.array([*heads, *tails])
        found = run_onnx("Pad", [x, pads, np.array(value, np.float32)], {"mode": mode})
        np.testing.assert_array_equal(y, found, err_msg=f"onnxruntime differs: {case}, {value}")


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_pad_image_extends_rows_and_columns(mode: str, order: str) -> None:
    x = numbered((2, 3, 4, 5))
    expected = pad(x, [0, 0, 1, 2], [0, 0, 3, 4], mode, 7.0)
    arguments: Named = {"mode": mode, "order": order, "value": 7.0}
    fed = to_channels_last(x) if order == "NHWC" else x
    for pads in ({"pads": [1, 2, 3, 4]}, {"pad_t": 1, "pad_l": 2, "pad_b": 3, "pad_r": 4}):
        (y,) = run_operator("PadImage", [fed], **pads, **arguments)  # type: ignore[arg-type]
        np.testing.assert_array_equal(to_channels_first(y) if order == "NHWC" else y, expected)


def test_pad_of_a_scalar_is_the_scalar() -> None:
    [y] = run_operator("Pad", [np.float32(2.5)], pads=[])
    assert y.shape == ()
    assert y == 2.5


def test_pad_image_takes_one_pad_for_all_sides() -> None:
    x = numbered((1, 1, 2, 2))
    (y,) = run_operator("PadImage", [x], pad=1)
    np.testing.assert_array_equal(y[0, 0], [[0, 0, 0, 0], [0, 0, 1, 0], [0, 2, 3, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_negative_pads_cut_off_rows_and_columns_whose_gradient_is_0(order: str) -> None:
    x = numbered((2, 3, 4, 5))
    arguments: Named = {"pads": [-1, 2, 0, -3], "order": order, "value": 7.0}
    (y,) = run_operator("PadImage", [ordered(x, order)], **arguments)
    expected = np.pad(x[:, :, 1:, :2], [(0, 0), (0, 0), (0, 0), (2, 0)], constant_values=7.0)
    np.testing.assert_array_equal(y, ordered(expected, order))
    for dtype in FLOATS:
        (dx,) = run_operator("PadImageGradient", [ordered(expected, order).astype(dtype)], **arguments)
        kept = np.zeros(x.shape)
        kept[:, :, 1:, :2] = x[:, :, 1:, :2]
        np.testing.assert_array_equal(dx.astype(np.float64), ordered(kept, order))


# The gradient.

ImageCase = tuple[tuple[int, int, int, int], list[int], str, str]


@st.composite
def image_cases(draw: st.DrawFn) -> ImageCase:
    """The shape of X as N, C, H, W; top, left, bottom, right; the mode; the order."""
    mode = draw(st.sampled_from(["constant", "reflect", "edge"]))
    least = 0 if mode == "constant" else 1
    height, width = draw(st.integers(least, 5)), draw(st.integers(least, 5))
    pads = [draw(st.integers(0, size - 1 if mode == "reflect" else 4)) for size in (height, width) * 2]
    shape = (draw(st.integers(0, 2)), draw(st.integers(0, 3)), height, width)
    return shape, pads, mode, draw(st.sampled_from(["NCHW", "NHWC"]))


def ordered(image: Array, order: str) -> Array:
    return to_channels_last(image) if order == "NHWC" else image


def sum_of_shown(dy: Array, shape: tuple[int, ...], pads: list[int], mode: str) -> Array:
    """Each place of dY, N, C, H, W, is added to the pixel that it shows, in float64."""
    dx = np.zeros(shape)
    for place in np.ndindex(*dy.shape):
        row, column = (padded_index(place[2 + i] - pads[i], shape[2 + i], mode) for i in range(2))
        if row is not None and column is not None:
            dx[(*place[:2], row, column)] += float(dy[place])
    return dx


def output_gradients(shape: tuple[int, ...], pads: list[int]) -> Array:
    top, left, bottom, right = pads
    batch, channels, height, width = shape
    return np.random.default_rng(0).normal(size=(batch, channels, top + height + bottom, left + width + right))


@pytest.mark.slow
@given(image_cases())
@drawn(80)
def test_the_gradient_is_what_central_differences_give(case: ImageCase) -> None:
    shape, pads, mode, order = case
    x, dy = ordered(numbered(shape, np.float64), order), ordered(output_gradients(shape, pads), order)
    arguments: Named = {"pads": pads, "mode": mode, "order": order, "value": 2.0}
    (expected,) = numerical_gradients(operator_def("PadImage", ["x"], ["y"], **arguments), [x], [dy], [0])
    (found,) = run_operator("PadImageGradient", [dy], **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7, err_msg=f"{case}")


@pytest.mark.slow
@given(image_cases(), st.sampled_from(FLOATS))
@drawn(150)
def test_a_pixel_gets_the_sum_over_the_places_that_show_it(case: ImageCase, dtype: Any) -> None:
    shape, pads, mode, order = case
    dy = output_gradients(shape, pads).astype(dtype)
    (dx,) = run_operator("PadImageGradient", [ordered(dy, order)], pads=pads, mode=mode, order=order)
    assert dx.dtype == dtype
    dx = to_channels_first(dx) if order == "NHWC" else dx
    expected = sum_of_shown(dy, shape, pads, mode)
    rounding = float(ml_dtypes.finfo(dtype).eps)
    np.testing.assert_allclose(
        dx.astype(np.float64), expected, rtol=rounding, atol=50 * min(rounding, 1.2e-7), err_msg=f"{case}, {dtype}"
    )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_16_bit_gradients_are_summed_in_float32_block_by_block(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, order: str
) -> None:
    monkeypatch.setattr(window, "BLOCK", 400)  # 2 planes, or 1 image: 3 blocks
    pads, shape = [5, 6, 7, 8], (3, 2, 12, 15)
    dy = (1 + numbered((3, 2, 24, 29)) % 7).astype(dtype)
    dy[..., 0, 0] = 2048  # where a 16-bit sum would stay
    for mode in ("edge", "reflect"):
        (dx,) = run_operator("PadImageGradient", [ordered(dy, order)], pads=pads, mode=mode, order=order)
        dx = to_channels_first(dx) if order == "NHWC" else dx
        np.testing.assert_array_equal(dx, sum_of_shown(dy, shape, pads, mode).astype(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_gradient_takes_pads_in_every_spelling(dtype: Any) -> None:
    dy = numbered((1, 2, 5, 6), dtype)
    expected = sum_of_shown(dy, (1, 2, 3, 4), [1] * 4, "edge")
    sides: Named = {"pad_t": 1, "pad_l": 1, "pad_b": 1, "pad_r": 1}
    for pads in (sides, {"pad": 1}, {"pads": [1] * 4}):
        (dx,) = run_operator("PadImageGradient", [dy], mode="edge", **pads)  # type: ignore[arg-type]
        np.testing.assert_array_equal(dx.astype(np.float64), expected)


def test_a_gradient_that_is_not_a_number_goes_to_the_pixel_shown_only() -> None:
    dy = np.ones((1, 1, 5, 5))
    dy[0, 0, 0, 2] = np.nan
    for mode, row in (("edge", 0), ("reflect", 1)):
        (dx,) = run_operator("PadImageGradient", [dy], pad=1, mode=mode)
        assert np.argwhere(np.isnan(dx)).tolist() == [[0, 0, row, 1]]
    (dx,) = run_operator("PadImageGradient", [dy], pad=1)
    assert np.isfinite(dx).all()


# What is refused.

SMALL = (1, 4, 3, 5)
REFUSED: list[tuple[str, Named, type[DagexecError], str]] = [
    ("Pad", {"pads": [0, 0, 1, 1]}, ArgumentError, r"pads needs 8 entries .*found \[0, 0, 1, 1\]"),
    (
        "Pad",
        {"pads": [0, 0, -2, 0, 0, 0, -2, 0]},
        ArgumentError,
        "pads -2 and -2 remove more than the 3 elements of the axis",
    ),
    ("Pad", {"pads": [0, 0, 3, 0, 0, 0, 0, 0], "mode": "reflect"}, ArgumentError, "less than the size 3, found 3"),
    ("Pad", {"pads": [0, 0, -1, 0, 0, 0, 2, 0], "mode": "reflect"}, ArgumentError, "less than the size 2, found 2"),
    ("Pad", {"pads": [0, 0, -3, 0, 0, 0, 2, 0], "mode": "edge"}, ArgumentError, "edge has no pixel"),
    ("Pad", {"pads": [0] * 8, "mode": "mirror"}, ArgumentError, "mode must be one of constant.*, wrap, found 'mirror'"),
    ("Pad", {"pads": [0, 0, -3, 0, 0, 0, 2, 0], "mode": "wrap"}, ArgumentError, "wrap has no pixel"),
    ("Pad", {"pads": [1, 1], "axes": [4]}, ArgumentError, r"distinct axes in \[-4, 3\], found \[4\]"),
    ("Pad", {"pads": [1] * 4, "axes": [1, -3]}, ArgumentError, r"distinct axes in \[-4, 3\], found \[1, -3\]"),
    ("Pad", {"pads": [0] * 7 + [1 << 31]}, ArgumentError, r"out of range: \[.*2147483648\]"),
    ("Pad", {"pads": [(1 << 31) - 1] * 8}, ResourceError, "overflows"),
    ("Pad", {"pads": [0] * 8, "value": float("nan")}, ArgumentError, "'value' is not a number"),
    ("PadImage", {"pad": 3, "mode": "reflect"}, ArgumentError, "reflect needs pads less than the size 3, found 3"),
    ("PadImage", {"pads": [1, 1]}, ArgumentError, r"pads needs 4 entries .*found \[1, 1\]"),
    ("PadImage", {"pad": -2}, ArgumentError, "pads -2 and -2 remove more than the 3 elements of the axis"),
    ("PadImage", {"pad": 1, "pads": [1] * 4}, ArgumentError, "'pads', 'pad'.* mean the same"),
    ("PadImage", {"pad": 1, "order": "HWC"}, ArgumentError, "NCHW or NHWC, found 'HWC'"),
    ("PadImageGradient", {"pads": [2, 0, 2, 0]}, ShapeError, "pads 2 and 2 exceed the size 3 of axis 2 of dY"),
    ("PadImageGradient", {"pad": 2, "order": "NHWC"}, ShapeError, "pads 2 and 2 exceed the size 3 of axis 2 of dY"),
    ("PadImageGradient", {"pad": 1, "mode": "reflect"}, ArgumentError, "reflect .* less than the size 1, found 1"),
    ("PadImageGradient", {"pads": [2, 0, 1, 0], "mode": "edge"}, ArgumentError, "edge has no pixel"),
    ("PadImageGradient", {"pad": 1, "mode": "wrap"}, ArgumentError, "padding that wraps has no gradient"),
    ("PadImageGradient", {"pads": [1, 1]}, ArgumentError, r"pads needs 4 entries .*found \[1, 1\]"),
    ("PadImageGradient", {"pad": -(1 << 31)}, ArgumentError, r"must be at least -2147483647"),
    ("PadImageGradient", {"pad": 1, "order": "HWC"}, ArgumentError, "NCHW or NHWC, found 'HWC'"),
]


@pytest.mark.parametrize(("op_type", "arguments", "error", "message"), REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    op_type: str, arguments: Named, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"):
        run_operator(op_type, [np.zeros(SMALL, np.float32)], **arguments)


@pytest.mark.parametrize("op_type", ["PadImage", "PadImageGradient"])
def test_images_need_4_axes(op_type: str) -> None:
    with pytest.raises(ShapeError, match=f"{op_type} 'y0'.*must have 4 axes, found 3"):
        run_operator(op_type, [np.zeros((1, 2, 3), np.float32)])


def test_the_gradient_is_of_floats_only() -> None:
    with pytest.raises(ShapeError, match=r"PadImageGradient 'y0'.*'x0' must be one of .*float32.*found int32"):
        run_operator("PadImageGradient", [np.zeros(SMALL, np.int32)], pad=1)


@pytest.mark.parametrize(("dtype", "value"), [(np.uint8, 256.0), (np.uint8, -1.0), (np.int32, 1e10), (np.int8, 0.5)])
def test_a_constant_that_an_integer_type_cannot_hold_is_refused(dtype: Any, value: float) -> None:
    with pytest.raises(ArgumentError, match=r"Pad 'y0'.*value .*does not fit"):
        run_operator("Pad", [np.zeros(3, dtype)], pads=[1, 1], value=value)


def test_strings_are_padded_by_their_own_only() -> None:
    words = np.array([b"a", b"b"], object)
    (y,) = run_operator("Pad", [words], pads=[1, 1], mode="edge")
    assert y.tolist() == [b"a", b"a", b"b", b"b"]
    with pytest.raises(ArgumentError, match=r"Pad 'y0'.*value .*does not fit string"):
        run_operator("Pad", [words], pads=[1, 1])
