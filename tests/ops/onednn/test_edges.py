"""Convolutions with columns of padding beside images, where a primitive of oneDNN 3.1 multiplied pixels for padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.arguments import ArgumentValue
from tests.ops.onednn.engine import needs_onednn, normal
from tests.ops.running import Array, computed, run_operator

pytestmark = needs_onednn

Geometry = tuple[int, int, tuple[int, int], dict[str, ArgumentValue]]

MISREAD: list[Geometry] = [
    (16, 48, (7, 29), {"kernels": [1, 7], "strides": [1, 2], "dilations": [1, 2], "pads": [3, 7, 4, 2]}),
    (16, 64, (4, 15), {"kernels": [4, 7], "strides": [1, 2], "pads": [4, 4, 1, 0]}),
    (32, 32, (7, 10), {"kernels": [1, 9], "pads": [2, 4, 0, 1]}),
    (24, 32, (9, 7), {"kernels": [5, 5], "dilations": [2, 2], "pads": [4, 4, 4, 4]}),
    (24, 48, (3, 29), {"kernels": [5, 9], "dilations": [1, 3], "pads": [0, 6, 3, 0], "group": 2}),
]
"""Channels, filters, image, window: with AVX-512 or AVX2 some results were of what lies before the image."""


def assert_right(geometry: Geometry, *, constant: bool = True, post_ops: bool = False, pieces: int = 2) -> None:
    """oneDNN gives what NumPy computes in float64."""
    channels, filters, image, window = geometry
    x, w = normal(1, 2, *image, channels), normal(2, filters, *window["kernels"], channels // window.get("group", 1))  # type: ignore[misc, operator]
    more: dict[str, Any] = {"bias": 1, "post_ops": ["relu"]} if post_ops else {}
    arguments: dict[str, Any] = {**window, **more, "order": "NHWC"}
    arrays = {"x": x, "w": w, "b": normal(3, filters)}
    kind = "FusedConv" if post_ops else "Conv"
    [found] = computed(kind, arrays, ["y"], "w" if constant else "", pieces=pieces, **arguments)
    [exact] = run_operator(kind, [array.astype(np.float64) for array in arrays.values()], **arguments)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "fed"])
@pytest.mark.parametrize("geometry", MISREAD, ids=str)
def test_padding_is_zeros_whatever_lies_before_an_image(geometry: Geometry, constant: bool) -> None:
    assert_right(geometry, constant=constant)
    assert_right(geometry, constant=constant, post_ops=True, pieces=1)


LONG: list[Geometry] = [
    (16, 16, (1100,), {"kernels": [7], "dilations": [3], "pads": [9, 9]}),
    (16, 48, (1303,), {"kernels": [5], "strides": [2], "pads": [4, 1]}),
    (32, 32, (1087,), {"kernels": [11], "dilations": [5], "pads": [30, 40]}),
    (24, 32, (600,), {"kernels": [3], "pads": [1, 1]}),
    (16, 32, (1030,), {"kernels": [2]}),
    (48, 16, (40,), {"kernels": [7], "dilations": [9], "pads": [27, 27]}),
    (32, 32, (600,), {"kernels": [2], "pads": [1100, 1200]}),
]
"""Windows along one axis, which read much padding or none."""


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "fed"])
@pytest.mark.parametrize("geometry", LONG, ids=str)
def test_long_rows_are_right(geometry: Geometry, constant: bool) -> None:
    assert_right(geometry, constant=constant)
    assert_right(geometry, constant=constant, post_ops=True, pieces=1)


@pytest.mark.parametrize("shape", [(2, 1100, 16), (1, 1100, 16), (1, 1, 16), (2, 1, 16), (1, 1100, 1), (16,)])
def test_what_is_added_to_long_rows_may_broadcast(shape: tuple[int, ...]) -> None:
    arrays = {"x": normal(1, 2, 1100, 16), "w": normal(2, 16, 7, 16), "b": normal(3, 16), "z": normal(4, *shape)}
    arguments: dict[str, Any] = {"kernels": [7], "pads": [3, 3], "bias": 1, "post_ops": ["add:3"], "order": "NHWC"}
    [found] = computed("FusedConv", arrays, ["y"], "w", **arguments)
    [exact] = run_operator("FusedConv", [array.astype(np.float64) for array in arrays.values()], **arguments)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_long_rows_of_any_size_are_right(data: st.DataObject) -> None:
    channels, filters = (data.draw(st.sampled_from([8, 16, 24, 64])) for _ in range(2))
    kernel, dilation, stride = (data.draw(st.integers(1, most)) for most in (9, 4, 3))
    window: dict[str, ArgumentValue] = {
        "kernels": [kernel], "dilations": [dilation], "strides": [stride],
        "pads": [data.draw(st.integers(0, 40)), data.draw(st.integers(0, 40))],
    }  # fmt: skip
    columns = data.draw(st.one_of(st.integers(33, 200), st.integers(1000, 2200)))
    assert_right((channels, filters, (columns,), window), constant=data.draw(st.booleans()))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_padding_of_any_size_is_zeros(data: st.DataObject) -> None:
    channels, filters = (
        data.draw(st.sampled_from([8, 16, 24, 32])),
        data.draw(st.sampled_from([8, 16, 24, 48, 64, 128])),
    )
    kernel, dilation = data.draw(st.sampled_from([2, 3, 5, 7, 9])), data.draw(st.integers(1, 3))
    before, behind = (data.draw(st.integers(0, 8)) for _ in range(2))
    least = max(1, (kernel - 1) * dilation + 1 - before - behind)
    window: dict[str, ArgumentValue] = {
        "kernels": [data.draw(st.integers(1, 3)), kernel], "strides": [1, data.draw(st.integers(1, 2))],
        "dilations": [1, dilation], "pads": [data.draw(st.integers(0, 2)), before, 1, behind],
    }  # fmt: skip
    assert_right((channels, filters, (data.draw(st.integers(3, 6)), least + data.draw(st.integers(0, 30))), window))


def test_integers_are_exact_with_wide_padding() -> None:
    """For them another implementation is taken."""
    random = np.random.default_rng(4)
    for channels, filters, image, window in MISREAD:
        group = int(window.get("group", 1))  # type: ignore[call-overload]
        kernels: Any = window["kernels"]
        x: Array = random.integers(0, 255, (2, channels, *image)).astype(np.uint8)
        w: Array = random.integers(-127, 127, (filters, channels // group, *kernels)).astype(np.int8)
        arrays = {"x": x, "w": w}
        [found] = computed("ConvInteger", arrays, ["y"], "w", **window)
        [exact] = run_operator("Conv", [x.astype(np.float64), w.astype(np.float64)], **window)
        np.testing.assert_array_equal(found, exact)
