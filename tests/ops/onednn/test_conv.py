"""Conv and FusedConv with engine ONEDNN, in all orders, against sums over taps in float64."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.operator import Prepared
from dagexec.core.registry import create_operator
from dagexec.errors import UnsupportedFeatureError, UnsupportedOperatorError
from dagexec.ops.base.layout import BLOCKS, ORDERS
from dagexec.ops.engines.onednn.accuracy import require_accurate
from dagexec.ops.engines.onednn.availability import widest_blocks
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.families.activation.post_ops import parse_post_op
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.activation.test_post_ops import FORMULAS, POSITIVE
from tests.ops.onednn.engine import run_fallback
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import Array, Geometry, convolve, to_channels_first, to_channels_last

pytestmark = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

SQUARE = Geometry((9, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
ASYMMETRIC = Geometry((9, 10), (3, 2), (2, 1), (1, 2), (1, 0, 2, 1))
LINE = Geometry((9,), (3,), (2,), (1,), (1, 0))
CUBE = Geometry((5, 4, 6), (2, 3, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1, 1, 0, 1))
ONE_BY_ONE = Geometry((6, 7), (1, 1), (1, 1), (1, 1), (0, 0, 0, 0))
SHORT_TAIL = Geometry((12, 11), (2, 2), (3, 4), (1, 1), (0, 0, 0, 0))
GEOMETRIES = {
    "square": SQUARE, "asymmetric": ASYMMETRIC, "line": LINE, "cube": CUBE, "one by one": ONE_BY_ONE,
    "windows that do not reach the end": SHORT_TAIL,
}  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-3}


def image_blocks(x: Array, order: str) -> tuple[int, ...]:
    """N, blocks, block, spatial."""
    return (len(x), x.shape[1] // BLOCKS[order], BLOCKS[order], *x.shape[2:])


def to_order(x: Array, order: str) -> Array:
    """N, C, spatial as `order` stores it."""
    if order == "NHWC":
        return to_channels_last(x)
    if order in BLOCKS:
        return np.ascontiguousarray(np.moveaxis(x.reshape(image_blocks(x, order)), 2, -1))
    return x


def from_order(x: Array, order: str) -> Array:
    """What `to_order` undoes."""
    if order == "NHWC":
        return to_channels_first(x)
    if order in BLOCKS:
        moved = np.moveaxis(x, -1, 2)
        return moved.reshape(len(moved), moved.shape[1] * moved.shape[2], *moved.shape[3:])
    return x


@dataclass(frozen=True)
class Layer:
    """A convolution of random numbers."""

    geometry: Geometry
    channels: int = 16
    filters: int = 32
    group: int = 1
    batch: int = 2
    dtype: str = "float32"

    def arrays(self) -> tuple[Array, Array, Array]:
        """X, the filter and the bias."""
        rng = np.random.default_rng(0)
        depth = self.channels // self.group
        weights = rng.standard_normal((self.filters, depth, *self.geometry.kernel))
        weights /= np.sqrt(weights[0].size)
        bias = rng.standard_normal(self.filters)
        x = rng.standard_normal((self.batch, self.channels, *self.geometry.size))
        return x.astype(self.dtype), weights.astype(self.dtype), bias.astype(self.dtype)

    def exact(self) -> Array:
        """Y in float64."""
        x, weights, bias = (array.astype(np.float64) for array in self.arrays())
        return convolve(x, weights, bias, self.geometry, self.group)

    def fed(self, order: str) -> list[Array]:
        """The arrays in `order`."""
        x, weights, bias = self.arrays()
        return [to_order(x, order), to_channels_last(weights) if order == "NHWC" else weights, bias]

    def arguments(self, order: str) -> dict[str, ArgumentValue]:
        return {**self.geometry.arguments(), "group": self.group, "order": order}


def assert_close(found: Array, exact: Array, dtype: str = "float32") -> None:
    assert found.dtype == np.dtype(dtype)
    assert found.shape == exact.shape
    error = np.abs(found.astype(np.float64) - exact).max(initial=0)
    assert error <= TOLERANCE[dtype] * np.abs(exact).max(initial=1)


@pytest.fixture
def by_onednn(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Fails the test unless oneDNN computed: a fallback is logged."""
    caplog.set_level(logging.INFO, "dagexec")
    yield caplog
    assert not [line for line in caplog.messages if "the default engine computes it" in line or " skipped: " in line]


def computed_in(order: str, layer: Layer) -> Array:
    """Y by oneDNN, in that order."""
    (y,) = run_operator("Conv", list(layer.fed(order)), engine="ONEDNN", **layer.arguments(order))
    return y


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("channels", "filters", "group"), [(16, 32, 1), (32, 32, 2), (32, 32, 32), (16, 32, 16)])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_every_geometry_order_and_type(
    by_onednn: pytest.LogCaptureFixture,
    geometry: Geometry, channels: int, filters: int, group: int, order: str, dtype: str,
) -> None:  # fmt: skip
    layer = Layer(geometry, channels, filters, group, dtype=dtype)
    by_onednn.clear()
    y = computed_in(order, layer)
    if dtype == "bfloat16" or order in BLOCKS:  # where the library has only its reference implementation, others serve
        by_onednn.clear()
    assert_close(from_order(y, order), layer.exact(), dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("order", "output_order"), [(a, b) for a in ORDERS for b in ORDERS])
def test_a_result_in_another_order(by_onednn: pytest.LogCaptureFixture, order: str, output_order: str) -> None:
    layer = Layer(SQUARE)
    arguments = {**layer.arguments(order), "bias": 1, "output_order": output_order, "post_ops": ["relu"]}
    (y,) = run_operator("FusedConv", list(layer.fed(order)), engine="ONEDNN", **arguments)
    assert_close(from_order(y, output_order), np.maximum(layer.exact(), 0))


@pytest.mark.slow
def test_a_first_layer_of_three_channels_goes_into_blocks(by_onednn: pytest.LogCaptureFixture) -> None:
    layer = Layer(Geometry((31, 33), (7, 7), (2, 2), (1, 1), (3, 3, 3, 3)), channels=3)
    arguments = {**layer.arguments("NCHW"), "bias": 1, "output_order": "NCHW16c"}
    (y,) = run_operator("FusedConv", list(layer.fed("NCHW")), engine="ONEDNN", **arguments)
    assert_close(from_order(y, "NCHW16c"), layer.exact())


@pytest.mark.slow
@pytest.mark.parametrize("order", ["NHWC", "NCHW16c"])
@pytest.mark.parametrize("text", [*FORMULAS, *POSITIVE])
def test_every_function_as_a_post_op(by_onednn: pytest.LogCaptureFixture, text: str, order: str) -> None:
    layer = Layer(SQUARE)
    found = library()
    assert found is not None
    try:
        require_accurate(found, [parse_post_op(text, "x")], "x")
    except UnsupportedFeatureError as reason:
        pytest.skip(f"this version does not serve: {reason}")
    formula = FORMULAS.get(text) or (lambda y: POSITIVE[text](np.abs(y) + 0.1))
    before = [] if text in FORMULAS else ["abs", "linear:1.0:0.1"]
    arguments = {**layer.arguments(order), "bias": 1, "post_ops": [*before, text]}
    (y,) = run_operator("FusedConv", list(layer.fed(order)), engine="ONEDNN", **arguments)
    assert_close(from_order(y, order), formula(layer.exact()))


OPERANDS = {"a channel each": (1, 32, 1, 1), "one": (1, 1, 1, 1), "all": (2, 32, 9, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["add", "mul", "sub", "div", "max", "min"])
@pytest.mark.parametrize("shape", OPERANDS.values(), ids=OPERANDS)
def test_operands_of_post_ops(
    by_onednn: pytest.LogCaptureFixture, shape: tuple[int, ...], kind: str, order: str
) -> None:
    layer = Layer(SQUARE)
    operand = np.random.default_rng(1).uniform(1, 2, shape).astype(np.float32)
    fed = operand if shape[1] == 1 and order != "NHWC" else to_order(operand, order)
    if order in BLOCKS and shape[1] == 1:
        fed = operand[..., None]
    arguments = {**layer.arguments(order), "bias": 1, "post_ops": ["relu", f"{kind}:3"]}
    (y,) = run_operator("FusedConv", [*layer.fed(order), fed], engine="ONEDNN", **arguments)
    ufunc = {"add": np.add, "mul": np.multiply, "sub": np.subtract, "div": np.divide, "max": np.maximum,
             "min": np.minimum}[kind]  # fmt: skip
    assert_close(from_order(y, order), ufunc(np.maximum(layer.exact(), 0), operand.astype(np.float64)))


def net_of(layer: Layer, order: str, *, constant: bool, post_ops: tuple[str, ...] = (), operand: Array | None = None,
           **arguments: ArgumentValue) -> tuple[Workspace, NetDef]:  # fmt: skip
    """A workspace with the layer's tensors, and a net of one FusedConv on them; `operand` is the output, in place."""
    workspace = Workspace()
    for name, array in zip("xwb", layer.fed(order), strict=True):
        workspace.feed_blob(name, array)
        if constant and name != "x":
            workspace.get_blob(name).tensor().freeze()
    names = ["x", "w", "b"]
    if operand is not None:
        workspace.feed_blob("y", operand)
        names.append("y")
    definition = operator_def(
        "FusedConv",
        names,
        ["y"],
        bias=1,
        post_ops=list(post_ops),
        **layer.arguments(order),
        **arguments,
        engine="ONEDNN",
    )
    return workspace, NetDef(name="test", op=[definition])


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("constant", [False, True])
def test_sum_is_added_in_place_in_every_run(by_onednn: pytest.LogCaptureFixture, order: str, constant: bool) -> None:
    layer = Layer(SQUARE)
    held = np.random.default_rng(2).standard_normal((2, 32, 9, 8)).astype(np.float32)
    workspace, net = net_of(layer, order, constant=constant, post_ops=("sum:3", "relu"), operand=to_order(held, order))
    exact = held.astype(np.float64)
    with SimpleNet(net, workspace) as running:
        for _ in range(3):
            running.run()
            exact = np.maximum(exact + layer.exact(), 0)
            assert_close(from_order(workspace.fetch_blob("y"), order), exact)


@pytest.mark.parametrize("order", ORDERS)
def test_fed_weights_are_read_in_every_run_and_constant_ones_are_packed_once(
    by_onednn: pytest.LogCaptureFixture, order: str
) -> None:
    layer = Layer(SQUARE)
    workspace, net = net_of(layer, order, constant=False)
    with SimpleNet(net, workspace) as running:
        running.run()
        assert_close(from_order(workspace.fetch_blob("y"), order), layer.exact())
        for name in "wb":
            workspace.get_blob(name).tensor().array[...] *= 2
        running.run()
        assert_close(from_order(workspace.fetch_blob("y"), order), 2 * layer.exact())
    workspace, net = net_of(layer, order, constant=True)
    workspace.feed_blob("z", layer.fed(order)[0])
    second = net.op.add()
    second.CopyFrom(net.op[0])
    second.input[0], second.output[0] = "z", "u"
    with SimpleNet(net, workspace) as running:
        running.run()
        forms = workspace.get_blob("w").tensor().constant.forms()
        assert len(forms) <= 1, "an implementation may read the weights as they are, too"
    assert workspace.fetch_blob("u").tobytes() == workspace.fetch_blob("y").tobytes()


def prepared(workspace: Workspace, net: NetDef) -> Prepared:
    made = create_operator(net.op[0], workspace)
    return made.bind(made.infer())


def test_a_caller_may_move_the_image_and_the_result(by_onednn: pytest.LogCaptureFixture) -> None:
    layer, order = Layer(SQUARE), widest_blocks() or "NHWC"
    workspace, net = net_of(layer, order, constant=True)
    made = prepared(workspace, net)
    made.step()
    first = workspace.fetch_blob("y")
    x, y = layer.fed(order)[0] * 2, np.zeros_like(first)
    assert set(made.input_rebinds) == {0}
    made.input_rebinds[0](x)
    made.output_rebinds[0](y)
    made.step()
    assert workspace.fetch_blob("y").tobytes() == first.tobytes()
    bias = to_order(layer.arrays()[2].reshape(1, -1, 1, 1), order)
    np.testing.assert_allclose(y - bias, 2 * (first - bias), rtol=1e-5, atol=1e-5)


def test_in_place_nothing_is_moved() -> None:
    held = np.zeros((2, 2, 9, 8, 16), np.float32)
    made = prepared(*net_of(Layer(SQUARE), "NCHW16c", constant=True, post_ops=("sum:3",), operand=held))
    assert not made.input_rebinds
    assert not made.output_rebinds


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_a_run_allocates_nothing_of_the_size_of_a_tensor(order: str) -> None:
    layer = Layer(Geometry((64, 64), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1)), batch=1)
    workspace, net = net_of(layer, order, constant=False, post_ops=("relu",))
    with SimpleNet(net, workspace) as running:
        running.run()
        peak = peak_memory(running.run)
    assert peak < 10_000 < 64 * 64 * 32 * 4


# What oneDNN does not do.


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_float64_is_left_to_numpy_with_one_line(caplog: pytest.LogCaptureFixture, order: str) -> None:
    layer = Layer(SQUARE, dtype="float64")
    workspace, net = net_of(layer, order, constant=False)
    with caplog.at_level(logging.INFO, "dagexec"), SimpleNet(net, workspace) as running:
        running.run()
        running.run()
    lines = [line for line in caplog.messages if "the default engine computes it" in line]
    assert len(lines) == 1
    assert "FusedConv 'y'" in lines[0]
    assert "oneDNN does not compute it in float64" in lines[0]
    np.testing.assert_allclose(from_order(workspace.fetch_blob("y"), order), layer.exact(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("order", BLOCKS)
def test_float64_in_blocks_is_computed_in_nchw_between_copies(caplog: pytest.LogCaptureFixture, order: str) -> None:
    caplog.set_level(logging.INFO, "dagexec")
    layer = Layer(SQUARE, dtype="float64")
    np.testing.assert_allclose(from_order(computed_in(order, layer), order), layer.exact(), 1e-12, 1e-12)
    assert any("computed in NCHW, between copies" in line for line in caplog.messages)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("post_ops", [("sum:3",), ("relu", "sum:3")])
@pytest.mark.parametrize("order", BLOCKS)
def test_a_group_that_is_three_quarters_of_a_block_is_computed_in_nchw_in_every_run(
    caplog: pytest.LogCaptureFixture, order: str, post_ops: tuple[str, ...], constant: bool
) -> None:
    caplog.set_level(logging.INFO, "dagexec")
    width = BLOCKS[order] * 3 // 4
    layer = Layer(SQUARE, 4 * width, 4 * width, 4)
    held = np.random.default_rng(1).uniform(1, 2, layer.exact().shape).astype(np.float32)
    workspace, net = net_of(layer, order, constant=constant, post_ops=post_ops, operand=to_order(held, order))
    exact = layer.exact() if "relu" not in post_ops else np.maximum(layer.exact(), 0)
    with SimpleNet(net, workspace) as simple:
        for _ in range(2):
            workspace.feed_blob("y", to_order(held, order))
            simple.run()
            assert_close(from_order(workspace.fetch_blob("y"), order), exact + held)
    assert any("computed in NCHW, between copies" in line for line in caplog.messages)


def test_float16_is_right_by_whichever_engine() -> None:
    layer = Layer(SQUARE, dtype="float16")
    (y,) = run_operator("Conv", list(layer.fed("NHWC")), engine="ONEDNN", **layer.arguments("NHWC"))
    assert_close(from_order(y, "NHWC"), layer.exact(), "float16")


def test_a_window_that_starts_behind_the_first_pixel_falls_back() -> None:
    x, weights, _ = Layer(Geometry((11, 11), (1, 1), (4, 4), (1, 1), (0, 0, 0, 0))).arrays()
    arguments: dict[str, ArgumentValue] = {"kernel": 1, "stride": 4, "legacy_pad": 2}
    (y,), why = run_fallback("Conv", [x, weights], **arguments)
    assert y.tobytes() == run_operator("Conv", [x, weights], **arguments)[0].tobytes()
    assert "padding -1" in why


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
def test_no_images_no_channels_and_no_pixels(order: str) -> None:
    empty = [((0, 16, 5, 5), (32, 16, 3, 3)), ((2, 0, 5, 5), (32, 0, 3, 3))]
    for shape, filters in empty:
        x, weights = to_order(np.ones(shape, np.float32), order), np.ones(filters, np.float32)
        weights = to_channels_last(weights) if order == "NHWC" else weights
        bias = np.arange(32, dtype=np.float32)
        (y,) = run_operator("Conv", [x, weights, bias], engine="ONEDNN", kernel=3, order=order)
        expected = np.broadcast_to(bias[:, None, None], (shape[0], 32, 3, 3))
        np.testing.assert_array_equal(from_order(y, order), expected)


def test_no_images_in_blocks() -> None:
    x, weights = np.ones((0, 1, 5, 5, 16), np.float32), np.ones((32, 16, 3, 3), np.float32)
    (y,) = run_operator("Conv", [x, weights], engine="ONEDNN", kernel=3, order="NCHW16c")
    assert y.shape == (0, 2, 3, 3, 16)


def test_another_batch_is_prepared_anew(by_onednn: pytest.LogCaptureFixture) -> None:
    workspace, net = net_of(Layer(SQUARE), "NCHW16c", constant=True)
    with SimpleNet(net, workspace) as running:
        for batch in (2, 5, 1, 2):
            layer = Layer(SQUARE, batch=batch)
            workspace.feed_blob("x", layer.fed("NCHW16c")[0])
            running.run()
            assert_close(from_order(workspace.fetch_blob("y"), "NCHW16c"), layer.exact())


def test_without_the_library_numpy_computes(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("dagexec.ops.engines.onednn.binding._found", [None])
    monkeypatch.setattr("dagexec.ops.engines.onednn.binding.own_kernels", lambda: None)
    layer = Layer(SQUARE)
    with caplog.at_level(logging.INFO, "dagexec"):
        (y,) = run_operator("Conv", list(layer.fed("NHWC")), engine="ONEDNN", **layer.arguments("NHWC"))
    (expected,) = run_operator("Conv", list(layer.fed("NHWC")), **layer.arguments("NHWC"))
    assert y.tobytes() == expected.tobytes()
    assert any("engine ONEDNN skipped" in line and "onednn-cpu-gomp" in line for line in caplog.messages)
    with pytest.raises(UnsupportedOperatorError, match="NumPy does not support order NCHW16c"):
        run_operator("Conv", list(layer.fed("NCHW16c")), engine="ONEDNN", **layer.arguments("NCHW16c"))


def test_values_that_are_no_numbers_stay_so(by_onednn: pytest.LogCaptureFixture) -> None:
    layer = Layer(ONE_BY_ONE)
    x, weights, bias = layer.fed("NCHW16c")
    x[0, 0, 2, 3, 1] = np.nan
    (y,) = run_operator("Conv", [x, weights, bias], engine="ONEDNN", **layer.arguments("NCHW16c"))
    expected = np.zeros(y.shape, bool)
    expected[0, :, 2, 3, :] = True
    np.testing.assert_array_equal(np.isnan(y), expected)
