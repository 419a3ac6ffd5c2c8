"""Window geometry against positions found by walking, and against the sizes that Caffe2 gives."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import arguments_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError
from dagexec.ops.base.geometry import Axis, Window, output_sizes, read_window, tap_count
from tests.ops.drawing import drawn
from tests.ops.running import operator_def
from tests.ops.windows import Geometry, geometries


def window_of(rank: int, **arguments: ArgumentValue) -> Window:
    definition = operator_def("MaxPool", ["x"], ["y"], **arguments)
    label, image = "MaxPool 'y'", TensorType((1,) * (rank + 2), FLOAT32)
    call = OperatorCall(definition, arguments_of(definition, label), (image,), (None,), label)
    return read_window(call, rank)


def axes_of(geometry: Geometry) -> tuple[Axis, ...]:
    return window_of(geometry.rank, **geometry.arguments()).over(geometry.size)


@pytest.mark.slow
@given(st.one_of(geometries(), geometries(pooling=True)))
@drawn(400)
def test_axes_have_the_windows_found_by_walking(geometry: Geometry) -> None:
    axes = axes_of(geometry)
    assert output_sizes(axes) == tuple(len(axis.taps) for axis in geometry.windows()), geometry
    for axis, walked in zip(axes, geometry.windows(), strict=True):
        found = [
            [i * axis.stride - axis.head + tap * axis.dilation for tap in range(axis.kernel)] for i in range(axis.out)
        ]
        assert found == walked.taps, geometry
        assert (-axis.head, axis.size + axis.tail) == (walked.low, walked.high), geometry
        assert axis.extent == walked.taps[0][-1] - walked.taps[0][0] + 1
        assert axis.covered == walked.taps[-1][-1] - walked.taps[0][0] + 1
        outside = any(not 0 <= pixel < axis.size for taps in walked.taps for pixel in taps)
        assert axis.reads_padding or not outside, geometry
        assert axis.reads_padding == (outside or axis.head != 0 or axis.covered > axis.size)


@pytest.mark.slow
@given(st.one_of(geometries(), geometries(pooling=True)))
@drawn(300)
def test_a_tap_reads_the_pixels_that_lie_inside_the_image(geometry: Geometry) -> None:
    for axis, walked in zip(axes_of(geometry), geometry.windows(), strict=True):
        for tap in range(axis.kernel):
            windows, pixels = axis.tap(tap)
            found = list(zip(range(axis.out)[windows], range(axis.size)[pixels], strict=True))
            expected = [(i, taps[tap]) for i, taps in enumerate(walked.taps) if 0 <= taps[tap] < axis.size]
            assert found == expected, f"tap {tap} of {geometry}"


@pytest.mark.slow
@given(st.one_of(geometries(), geometries(pooling=True)), st.booleans())
@drawn(300)
def test_window_sizes_count_the_taps_inside(geometry: Geometry, with_padding: bool) -> None:
    for axis, walked in zip(axes_of(geometry), geometry.windows(), strict=True):
        low, high = (walked.low, walked.high) if with_padding else (0, axis.size)
        expected = [sum(low <= pixel < high for pixel in taps) for taps in walked.taps]
        assert axis.window_sizes(with_padding=with_padding) == expected, geometry


@pytest.mark.parametrize(("size", "pad", "out"), [(6, 0, 3), (7, 0, 3), (8, 0, 4), (6, 1, 4), (7, 1, 4), (8, 1, 5)])
def test_caffe_legacy_pooling_rounds_up_and_drops_a_window_in_the_padding(size: int, pad: int, out: int) -> None:
    (axis,) = window_of(1, kernels=[3], strides=[2], pads=[pad, 0], legacy_pad=3).over([size])
    assert axis.out == out


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "mode", "head", "tail"),
    [
        *((5, 2, 1, 2, 0, 1), (5, 2, 1, 4, 0, 1), (5, 2, 1, 5, 1, 0), (6, 3, 2, 2, 0, 1), (6, 3, 2, 5, 1, 0)),
        *((7, 3, 2, 2, 1, 1), (7, 3, 2, 5, 1, 1)),
        *((8, 1, 3, 2, 0, -1), (8, 1, 3, 4, 0, 0), (8, 1, 3, 5, 0, 0)),
    ],
)
def test_same_divides_rounding_up_and_puts_an_odd_pixel_where_it_is_asked(
    size: int, kernel: int, stride: int, mode: int, head: int, tail: int
) -> None:
    (axis,) = window_of(1, kernels=[kernel], strides=[stride], legacy_pad=mode).over([size])
    assert (axis.out, axis.head, axis.tail) == (-(-size // stride), head, tail)


def test_a_dilated_kernel_of_3_on_9_pixels_has_5_windows() -> None:
    assert output_sizes(window_of(2, kernel=3, dilation=2).over([9, 9])) == (5, 5)


def test_sizes_and_channels_are_where_the_order_says() -> None:
    first, last = window_of(2, kernel=1), window_of(2, kernel=1, order="NHWC")
    assert (first.spatial((1, 2, 3, 4)), first.channels((1, 2, 3, 4))) == ((3, 4), 2)
    assert (last.spatial((1, 2, 3, 4)), last.channels((1, 2, 3, 4))) == ((2, 3), 4)
    assert (first.image_shape(5, 6, [7, 8]), last.image_shape(5, 6, [7, 8])) == ((5, 6, 7, 8), (5, 7, 8, 6))


def test_a_global_window_is_the_image() -> None:
    axes = window_of(3, global_pooling=1).over([4, 5, 6])
    assert output_sizes(axes) == (1, 1, 1)
    assert tap_count(axes) == 120


@pytest.mark.slow
@given(st.one_of(geometries(), geometries(pooling=True)))
@drawn(300)
def test_trimmed_windows_read_the_same_pixels_with_no_tap_to_spare_at_the_ends(geometry: Geometry) -> None:
    for axis in axes_of(geometry):

        def reads(axis: Axis) -> list[list[int]]:
            starts = [window * axis.stride - axis.head for window in range(axis.out)]
            taps = [[start + tap * axis.dilation for tap in range(axis.kernel)] for start in starts]
            return [[pixel for pixel in row if 0 <= pixel < axis.size] for row in taps]

        trimmed = axis.trimmed()
        assert reads(trimmed) == reads(axis), geometry
        assert (trimmed.size, trimmed.stride, trimmed.dilation, trimmed.out) == (
            axis.size, axis.stride, axis.dilation, axis.out,
        )  # fmt: skip
        assert trimmed.tail - axis.tail == trimmed.extent - axis.extent - (trimmed.head - axis.head)
        first = [window * axis.stride - trimmed.head for window in range(axis.out)]
        last = [start + trimmed.extent - 1 for start in first]
        assert trimmed.kernel == 1 or (max(first) >= 0 and min(last) < axis.size), geometry


SPELLINGS: list[dict[str, Any]] = [
    {"kernels": [3, 3], "strides": [2, 2], "dilations": [2, 2], "pads": [1, 1, 1, 1]},
    {"kernel": 3, "stride": 2, "dilation": 2, "pad": 1},
    {
        "kernel_h": 3,
        "kernel_w": 3,
        "stride_h": 2,
        "stride_w": 2,
        "dilation_h": 2,
        "dilation_w": 2,
        "pad_t": 1,
        "pad_l": 1,
        "pad_b": 1,
        "pad_r": 1,
    },
]


@pytest.mark.parametrize("arguments", SPELLINGS)
def test_the_spellings_are_one_window(arguments: dict[str, Any]) -> None:
    window = window_of(2, **arguments)
    assert (window.kernel, window.stride, window.dilation) == ((3, 3), (2, 2), (2, 2))
    assert (window.head, window.tail) == ((1, 1), (1, 1))


def test_an_empty_list_is_an_argument_that_is_not_given() -> None:
    empty: dict[str, Any] = {f"{name}s": [] for name in ("stride", "dilation", "pad")}
    assert window_of(2, kernel=3, **empty) == window_of(2, kernel=3)
    assert window_of(2, kernel_h=3, kernel_w=3, kernels=[], stride=2, pad=1, **empty) == window_of(
        2, kernel=3, stride=2, pad=1
    )
    assert window_of(2, global_pooling=1, kernels=[], **empty) == window_of(2, global_pooling=1)


def test_a_window_that_does_not_fit_names_its_own_operator() -> None:
    """Not the first one of these arguments, which operators share what is read from."""
    calls = []
    for output in ("first", "second"):
        definition, label = operator_def("MaxPool", ["x"], [output], kernel=5, stride=4), f"MaxPool {output!r}"
        image = TensorType((1, 1, 2, 2), FLOAT32)
        calls.append(OperatorCall(definition, arguments_of(definition, label), (image,), (None,), label))
        with pytest.raises(ArgumentError, match=f"^{label}"):
            read_window(calls[-1], 2).over((2, 2))


REFUSED: list[tuple[int, dict[str, Any], str]] = [
    (2, {"kernels": [3, 3], "kernel_h": 3, "kernel_w": 3}, "'kernels', 'kernel_h', 'kernel_w'.* mean the same"),
    (2, {"kernel": 3, "dilation": 1, "dilations": [1, 1]}, "'dilations', 'dilation'.* mean the same"),
    (2, {"kernel": 3, "pad": 0, "pad_t": 0, "pad_l": 0, "pad_b": 0, "pad_r": 0}, "'pad', 'pad_t'.* mean the same"),
    (3, {"kernel_h": 3, "kernel_w": 3}, "for 2 spatial axes; found"),
    (1, {"kernel": 3, "pad_t": 0, "pad_l": 0, "pad_b": 0, "pad_r": 0}, "for 2 spatial axes; found"),
    (2, {"kernels": []}, "'kernel' .* is required"),
    (2, {"kernels": 3}, "'kernels' must be a list of integers; found an integer"),
    (3, {"kernels": [1, 2]}, r"kernels needs 3 entries for this input, found \[1, 2\]"),
    (2, {"kernel": 3, "strides": [1]}, r"strides needs 2 entries for this input, found \[1\]"),
    (1, {"kernel": 3, "pads": [0]}, r"pads needs 2 entries for this input, found \[0\]"),
    (1, {"kernel": 1 << 31}, "less than 2147483648, found"),
    (1, {"kernel": -1}, r"at least 1 .*found \[-1\]"),
    (1, {"kernel": 2.5}, "'kernel' must be an integer; found a float"),
    (1, {"kernel": 3, "order": 1}, "'order' must be a string; found an integer"),
    (1, {"kernel": 3, "legacy_pad": -1}, "'legacy_pad' must be 0 to 5, found -1"),
    (1, {"kernel": 3, "legacy_pad": 1, "pad": 1}, "VALID computes the pads; found pads"),
    (1, {"kernel": 3, "legacy_pad": 2, "pad": 1}, "SAME computes the pads; found pads"),
    (1, {"global_pooling": 1, "dilation": 2}, "cannot be combined with pad, stride or dilation"),
]


@pytest.mark.parametrize(("rank", "arguments", "message"), REFUSED)
def test_windows_that_make_no_sense_are_refused(rank: int, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=f"MaxPool 'y'.*{message}"):
        window_of(rank, **arguments)
