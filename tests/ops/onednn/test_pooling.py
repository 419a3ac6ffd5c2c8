"""Pooling by oneDNN in every geometry and order, against loops over windows in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec import NetDef, Workspace
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import BLOCKS, ORDERS
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.drawing import drawn
from tests.ops.onednn.engine import fallbacks, from_order, in_order, needs_onednn, normal, run_fallback, run_onednn
from tests.ops.pooling import starts_inside
from tests.ops.running import Array, operator_def, run_operator
from tests.ops.windows import Geometry, geometries, pool

pytestmark = needs_onednn


def is_plain(geometry: Geometry) -> bool:
    """True for windows that oneDNN must have: each with a pixel, none over scattered pixels.

    Nor may the first start behind the first pixel.
    """
    axes = list(zip(geometry.windows(), geometry.size, strict=True))
    scattered = any(k > 1 and d > 1 for k, d in zip(geometry.kernel, geometry.dilation, strict=True))
    if scattered:
        return False
    filled = all(any(0 <= p < size for p in row) for axis, size in axes for row in axis.taps)
    return filled and all(axis.taps[0][0] <= 0 for axis, _ in axes)


@pytest.mark.slow
@drawn(250)
@given(
    geometry=geometries(pooling=True).filter(starts_inside),
    op_type=st.sampled_from(["MaxPool", "AveragePool"]),
    order=st.sampled_from(ORDERS),
    batch=st.sampled_from([0, 1, 1, 3]),
    blocks=st.integers(1, 2),
    padding=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_window_is_pooled(
    geometry: Geometry, op_type: str, order: str, batch: int, blocks: int, padding: bool, seed: int
) -> None:
    channels = BLOCKS.get(order, 5) * blocks
    image = np.random.default_rng(seed).integers(-100, 100, (batch, channels, *geometry.size)).astype(np.float32)
    count = {"count_include_pad": 1} if op_type == "AveragePool" and padding else {}
    try:
        with fallbacks() as reasons:
            arguments = geometry.arguments() | count | {"order": order}
            (found,) = run_operator(op_type, [in_order(image, order)], engine="ONEDNN", **arguments)
    except UnsupportedFeatureError:
        assert order in BLOCKS
        assert not is_plain(geometry)
        return
    assert not (reasons and is_plain(geometry)), reasons
    expected = pool(image, geometry, op_type, bool(count))
    np.testing.assert_allclose(from_order(found, order), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_the_whole_image_is_one_window(op_type: str, order: str, pieces: int) -> None:
    image = normal(1, 2, 48, 7, 9)
    (found,) = run_onednn(op_type, [in_order(image, order)], order=order, global_pooling=1, pieces=pieces)
    wide = image.astype(np.float64)
    expected = wide.max((2, 3), keepdims=True) if op_type == "MaxPool" else wide.mean((2, 3), keepdims=True)
    np.testing.assert_allclose(from_order(found, order), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("channels", "pieces"), [(40, 1), (40, 3), (3, 1), (3, 2)])
def test_large_images_are_pooled_some_channels_after_others(op_type: str, channels: int, pieces: int) -> None:
    """Of 41 x 37 pixels 16 channels are turned together; the last ones are fewer."""
    geometry = Geometry((41, 37), (3, 5), (1, 2), (1, 1), (1, 2, 1, 2))
    image = normal(3, 2, channels, 41, 37)
    arguments = geometry.arguments()
    (found,) = run_onednn(op_type, [image], pieces=pieces, **arguments)
    np.testing.assert_allclose(found, pool(image, geometry, op_type), rtol=1e-5, atol=1e-6)
    (alone,) = run_onednn(op_type, [image[1:, :16]], **arguments)
    np.testing.assert_array_equal(found[1:, :16], alone)


@pytest.mark.slow
@drawn(150)
@given(
    geometry=geometries(pooling=True).filter(starts_inside),
    op_type=st.sampled_from(["MaxPool", "AveragePool"]),
    order=st.sampled_from(["NCHW", "NHWC"]),
    batch=st.sampled_from([0, 1, 3]),
    count=st.integers(0, 1),
    special=st.sampled_from([0.0, np.nan, np.inf]),
)
def test_gradients_are_the_default_engines(
    geometry: Geometry, op_type: str, order: str, batch: int, count: int, special: float
) -> None:
    counted = {"count_include_pad": 1} if count and op_type == "AveragePool" else {}
    arguments = geometry.arguments() | {"order": order} | counted
    image = in_order(np.maximum(normal(1, batch, 16, *geometry.size), 0), order)
    (pooled,) = run_operator(op_type, [image], **arguments)
    dy = normal(2, *pooled.shape)
    if op_type == "MaxPool" and dy.size and special:
        dy.reshape(-1)[0] = special
    expected, found = (
        run_operator(f"{op_type}Gradient", [image, pooled, dy], engine=engine, **arguments)[0]
        for engine in ("", "ONEDNN")
    )
    exact = op_type == "MaxPool"
    np.testing.assert_allclose(found, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(3, 2, 0), (3, 1, 1), (2, 2, 0)])
def test_gradients_of_common_poolings_go_to_onednn(
    op_type: str, order: str, kernel: int, stride: int, pad: int
) -> None:
    arguments: dict[str, int | str] = {"kernel": kernel, "stride": stride, "pad": pad, "order": order}
    image = in_order(normal(1, 40, 16, 14, 14), order)
    (pooled,) = run_operator(op_type, [image], **arguments)
    dy = normal(2, *pooled.shape)
    (found,) = run_onednn(f"{op_type}Gradient", [image, pooled, dy], **arguments)
    (expected,) = run_operator(f"{op_type}Gradient", [image, pooled, dy], **arguments)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_every_pixel_that_equals_the_maximum_gets_the_gradient() -> None:
    image = np.zeros((1, 1, 2, 2), np.float32)
    top, dy = np.zeros((1, 1, 1, 1), np.float32), np.full((1, 1, 1, 1), 5, np.float32)
    wide = np.zeros((1, 1, 2, 4), np.float32)
    (found,) = run_onednn("MaxPoolGradient", [image, top, dy], kernel=2)
    np.testing.assert_array_equal(found, np.full((1, 1, 2, 2), 5))
    (found,) = run_onednn("MaxPoolGradient", [wide, wide[..., :1, :3], np.ones((1, 1, 1, 3), np.float32)], kernel=2)
    np.testing.assert_array_equal(found[0, 0], [[1, 2, 2, 1], [1, 2, 2, 1]])


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.int8, np.uint8, np.int32])
def test_other_types_have_their_maximum(dtype: type) -> None:
    image = np.random.default_rng(3).integers(0, 100, (1, 16, 6, 6)).astype(dtype)
    (found,) = run_operator("MaxPool", [image], engine="ONEDNN", kernel=3, stride=2)
    assert found.dtype == dtype
    expected = pool(image, Geometry((6, 6), (3, 3), (2, 2), (1, 1), (0,) * 4), "MaxPool")
    np.testing.assert_array_equal(found.astype(np.float64), expected)


def test_float64_is_pooled_by_numpy() -> None:
    image = normal(4, 1, 4, 6, 6).astype(np.float64)
    (found,), reason = run_fallback("AveragePool", [image], kernel=2, stride=2)
    assert "float64" in reason
    np.testing.assert_allclose(found, image.reshape(1, 4, 3, 2, 3, 2).mean((3, 5)), rtol=1e-12)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
def test_float64_gradients_of_pooling_are_numpys(op_type: str) -> None:
    image = normal(4, 2, 4, 6, 6).astype(np.float64)
    (pooled,) = run_operator(op_type, [image], kernel=3, stride=2)
    inputs = [image, pooled, normal(5, *pooled.shape).astype(np.float64)]
    (found,), reason = run_fallback(f"{op_type}Gradient", inputs, kernel=3, stride=2)
    assert "float64" in reason
    (expected,) = run_operator(f"{op_type}Gradient", inputs, kernel=3, stride=2)
    np.testing.assert_array_equal(found, expected)


def test_a_gradient_of_pooling_may_change_its_type_from_run_to_run() -> None:
    image = normal(6, 2, 4, 6, 6)
    (pooled,) = run_operator("MaxPool", [image], kernel=3, stride=2)
    arrays = {"x": image, "y": pooled, "dy": normal(7, *pooled.shape)}
    definition = operator_def("MaxPoolGradient", list(arrays), ["dx"], kernel=3, stride=2, engine="ONEDNN")
    workspace = Workspace()
    results = []
    for name, array in arrays.items():
        workspace.feed_blob(name, array)
    with SimpleNet(NetDef(name="n", op=[definition]), workspace) as net:
        for dtype in (np.float32, np.float64, np.float32):
            for name, array in arrays.items():
                workspace.feed_blob(name, array.astype(dtype))
            net.run()
            results.append(workspace.fetch_blob("dx").copy())
    assert [result.dtype for result in results] == [np.float32, np.float64, np.float32]
    np.testing.assert_array_equal(results[0], results[2])
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_a_window_without_a_pixel_is_pooled_by_numpy() -> None:
    image: Array = normal(5, 1, 4, 2)
    arguments = {"kernels": [2], "pads": [1, 2], "dilations": [3], "strides": [1]}
    run_fallback("AveragePool1D", [image], **arguments)


@pytest.mark.parametrize("order", BLOCKS)
def test_a_blocked_tensor_in_float64_is_pooled_in_nchw(order: str) -> None:
    image = normal(6, 1, 32, 4, 4).astype(np.float64)
    (found,) = run_operator("MaxPool", [in_order(image, order)], engine="ONEDNN", kernel=2, order=order)
    np.testing.assert_array_equal(from_order(found, order), run_operator("MaxPool", [image], kernel=2)[0])


def test_without_onednn_a_blocked_tensor_is_refused() -> None:
    with pytest.raises(Exception, match="oneDNN is needed"):
        run_operator("MaxPool", [normal(7, 1, 2, 4, 4, 16)], kernel=2, order="NCHW16c")
