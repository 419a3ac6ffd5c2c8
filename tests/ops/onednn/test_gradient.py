"""Gradients of convolutions, and transposed convolutions, with engine ONEDNN: against the default engine in float64.

The default engine is checked against central differences and scattered pixels elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from dagexec.core.arguments import ArgumentValue
from dagexec.ops.engines.onednn.binding import library
from tests.ops.onednn.test_conv import (
    ASYMMETRIC,
    CUBE,
    GEOMETRIES,
    LINE,
    ORDERS,
    SQUARE,
    Layer,
    assert_close,
    from_order,
    to_order,
)
from tests.ops.running import run_operator
from tests.ops.windows import Array, Geometry, to_channels_last

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

GROUPS = [(16, 32, 1), (32, 32, 2), (32, 32, 32)]


@pytest.fixture
def by_onednn(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Fails the test unless oneDNN computed: a fallback is logged."""
    caplog.set_level(logging.INFO, "dagexec")
    yield caplog
    assert not [line for line in caplog.messages if "the default engine computes it" in line or "skipped" in line]


def filter_in(weights: Array, order: str) -> Array:
    return to_channels_last(weights) if order == "NHWC" else weights


def random_like(array: Array) -> Array:
    return np.random.default_rng(7).standard_normal(array.shape)


def image_of(layer: Layer) -> tuple[Array, Array]:
    """X and the filter in float64."""
    x, weights, _ = layer.arrays()
    return x.astype(np.float64), weights.astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("channels", "filters", "group"), GROUPS)
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_gradients_of_a_convolution(
    by_onednn: pytest.LogCaptureFixture, geometry: Geometry, channels: int, filters: int, group: int, order: str
) -> None:
    layer = Layer(geometry, channels, filters, group)
    x, weights = image_of(layer)
    gradient = random_like(layer.exact())
    arguments = layer.arguments("NCHW")
    exact = run_operator("ConvGradient", [x, weights, gradient], 3, **arguments)
    fed = [to_order(x, order), filter_in(weights, order), to_order(gradient, order)]
    found = run_operator(
        "ConvGradient", [array.astype(np.float32) for array in fed], 3, engine="ONEDNN", **arguments | {"order": order}
    )
    assert_close(found[0], filter_in(exact[0], order))
    assert_close(found[1], exact[1])
    assert_close(from_order(found[2], order), exact[2])


TRANSPOSED: dict[str, dict[str, ArgumentValue]] = {
    "plain": {"kernel": 3},
    "padded": {"kernel": 3, "stride": 2, "pads": [1, 0, 1, 1]},
    "adjusted": {"kernel": 3, "stride": 2, "pad": 1, "adj": 1},
    "dilated": {"kernels": [2, 3], "dilations": [2, 1], "strides": [1, 2]},
    "one by one": {"kernel": 1},
    "no overlap": {"kernel": 2, "stride": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("arguments", TRANSPOSED.values(), ids=TRANSPOSED)
def test_transposed_convolutions_and_their_gradients(
    by_onednn: pytest.LogCaptureFixture, arguments: dict[str, ArgumentValue], group: int, order: str
) -> None:
    rng = np.random.default_rng(9)
    kernel = (2, 3) if "kernels" in arguments else (int(str(arguments["kernel"])),) * 2
    x = rng.standard_normal((2, 32, 5, 6))
    weights = rng.standard_normal((32, 32 // group, *kernel)) / np.sqrt(32 / group * np.prod(kernel))
    bias = rng.standard_normal(32)
    arguments = {**arguments, "group": group}
    (exact,) = run_operator("ConvTranspose", [x, weights, bias], **arguments)
    fed = [to_order(x, order), filter_in(weights, order), bias]
    (found,) = run_operator(
        "ConvTranspose", [array.astype(np.float32) for array in fed], engine="ONEDNN", **arguments, order=order
    )
    assert_close(from_order(found, order), exact)
    gradient = random_like(exact)
    gradients = run_operator("ConvTransposeGradient", [x, weights, gradient], 3, **arguments)
    fed = [*fed[:2], to_order(gradient, order)]
    computed = run_operator(
        "ConvTransposeGradient",
        [array.astype(np.float32) for array in fed],
        3,
        engine="ONEDNN",
        **arguments,
        order=order,
    )
    assert_close(computed[0], filter_in(gradients[0], order))
    assert_close(computed[1], gradients[1])
    assert_close(from_order(computed[2], order), gradients[2])


@pytest.mark.parametrize("geometry", [SQUARE, LINE, CUBE, ASYMMETRIC])
def test_bfloat16_gradients_are_near(geometry: Geometry) -> None:
    layer = Layer(geometry, dtype="bfloat16")
    x, weights = image_of(layer)
    gradient = random_like(layer.exact()).astype("bfloat16")
    exact = run_operator("ConvGradient", [x, weights, gradient.astype(np.float64)], 3, **layer.arguments("NCHW"))
    fed = [to_channels_last(array.astype("bfloat16")) for array in (x, weights, gradient)]
    found = run_operator("ConvGradient", fed, 3, engine="ONEDNN", **layer.arguments("NHWC"))
    assert_close(found[0], to_channels_last(exact[0]), "bfloat16")
    assert_close(found[1], exact[1], "bfloat16")
    assert_close(from_order(found[2], "NHWC"), exact[2], "bfloat16")


def test_float64_gradients_are_left_to_numpy(caplog: pytest.LogCaptureFixture) -> None:
    x, weights = np.ones((1, 16, 5, 5)), np.ones((16, 16, 3, 3))
    with caplog.at_level(logging.INFO, "dagexec"):
        run_operator("ConvGradient", [x, weights, x], 3, engine="ONEDNN", kernel=3, pad=1)
    assert any("oneDNN does not compute it in float64" in line for line in caplog.messages)
