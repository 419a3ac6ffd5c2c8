"""FusedConv with NumPy's engines, against sums over taps in float64 and the post-ops' formulas."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import FLOAT32
from dagexec.core.node import arguments_of
from dagexec.core.registry import schema_of
from dagexec.core.schema import OperatorCall, TensorType
from dagexec.errors import ArgumentError, DagexecError, ShapeError
from dagexec.scheduler.nets.simple import SimpleNet
from tests.memory_limits import peak_memory
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import Geometry, convolve, to_channels_first, to_channels_last

SQUARE = Geometry((9, 8), (3, 3), (1, 1), (1, 1), (1, 1, 1, 1))
STRIDED = Geometry((9, 10), (3, 2), (2, 1), (1, 2), (1, 0, 2, 1))
LINE = Geometry((9,), (3,), (2,), (1,), (1, 0))
CUBE = Geometry((5, 4, 6), (2, 3, 2), (1, 2, 1), (2, 1, 1), (0, 1, 1, 1, 0, 1))


def arrays(geometry: Geometry, group: int = 1) -> list[np.ndarray]:
    """Small integers: X, the filter and the bias."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (2, 4, *geometry.size))
    weights = rng.integers(-3, 4, (6, 4 // group, *geometry.kernel))
    return [array.astype(np.float32) for array in (x, weights, rng.integers(-3, 4, 6))]


@pytest.mark.parametrize("output_order", ["NCHW", "NHWC", None])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("geometry", [SQUARE, STRIDED, LINE, CUBE])
def test_every_geometry_and_pair_of_orders(
    geometry: Geometry, group: int, order: str, output_order: str | None
) -> None:
    x, weights, bias = arrays(geometry, group)
    expected = np.maximum(convolve(x, weights, bias, geometry, group), 0) * 2 - 1
    given = [to_channels_last(x), to_channels_last(weights)] if order == "NHWC" else [x, weights]
    arguments: dict[str, ArgumentValue] = {**geometry.arguments(), "group": group, "order": order, "bias": 1}
    if output_order is not None:
        arguments["output_order"] = output_order
    (y,) = run_operator("FusedConv", [*given, bias], post_ops=["relu", "linear:2:-1"], **arguments)
    found = to_channels_first(y) if (output_order or order) == "NHWC" else y
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("engine", ["", "WINOGRAD", "FFT", "DIRECT"])
def test_every_engine_of_conv_serves(engine: str) -> None:
    x, weights, bias = arrays(SQUARE)
    residual = np.random.default_rng(1).standard_normal((2, 6, 9, 8)).astype(np.float32)
    slope = np.arange(6, dtype=np.float32).reshape(6, 1, 1)
    expected = np.maximum((convolve(x, weights, bias, SQUARE, 1) + residual) * slope, 0)
    (y,) = run_operator(
        "FusedConv",
        [x, weights, bias, residual, slope],
        engine=engine,
        bias=1,
        post_ops=["add:3", "mul:4", "relu"],
        **SQUARE.arguments(),
    )
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-3)


def test_without_post_ops_it_is_conv() -> None:
    x, weights, _ = arrays(STRIDED)
    (y,) = run_operator("FusedConv", [x, weights], **STRIDED.arguments())
    (expected,) = run_operator("Conv", [x, weights], **STRIDED.arguments())
    assert y.tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(0, 3, 5, 5), (2, 0, 5, 5)])
def test_no_images_and_no_channels(shape: tuple[int, ...]) -> None:
    weights, bias = np.ones((2, shape[1], 3, 3), np.float32), np.array([1, -2], np.float32)
    (y,) = run_operator("FusedConv", [np.ones(shape, np.float32), weights, bias], kernel=3, bias=1, post_ops=["relu"])
    np.testing.assert_array_equal(y, np.broadcast_to(np.array([1, 0])[:, None, None], (shape[0], 2, 3, 3)))


def test_a_run_allocates_nothing_of_the_size_of_the_result() -> None:
    rng = np.random.default_rng(0)
    workspace = Workspace()
    for name, shape in {"x": (1, 16, 64, 64), "w": (32, 16, 3, 3), "b": (32,), "y": (1, 32, 62, 62)}.items():
        workspace.feed_blob(name, rng.standard_normal(shape).astype(np.float32))
    post_ops = ["sum:3", "gelu_erf", "linear:0.5:0.1"]
    definition = operator_def("FusedConv", ["x", "w", "b", "y"], ["y"], kernel=3, bias=1, post_ops=post_ops)
    with SimpleNet(NetDef(name="test", op=[definition]), workspace) as net:
        net.run()
        peak = peak_memory(net.run)
    assert peak < 100_000 < 32 * 62 * 62 * 4


def test_the_cost_counts_bias_and_post_ops() -> None:
    y = TensorType((1, 6, 7, 7), FLOAT32)
    types = (TensorType((1, 4, 9, 9), FLOAT32), TensorType((6, 4, 3, 3), FLOAT32), TensorType((6,), FLOAT32), y)
    definition = operator_def(
        "FusedConv", ["x", "w", "b", "z"], ["y"], kernel=3, bias=1, post_ops=["add:3", "relu", "sigmoid"]
    )
    call = OperatorCall(definition, arguments_of(definition, "fused"), types, (None,) * 4, "fused")
    cost = schema_of("FusedConv").cost(call, [y])
    assert cost.flops == y.elements * (2 * 36 + 1 + 1 + 1 + 10)
    assert cost.bytes_read == sum(kind.nbytes for kind in types)


REFUSED: list[tuple[dict[str, ArgumentValue], type[DagexecError], str]] = [
    ({"post_ops": []}, ArgumentError, r"input 'x2' \(number 2\) is not named in post_ops"),
    ({"bias": 1}, ShapeError, r"input 'x2' must have shape \(6,\) \(one entry for each filter\)"),
    (
        {"post_ops": ["add:2"], "output_order": "CHWN"},
        ArgumentError,
        "'output_order' must be NCHW, NHWC, NCHW8c or",
    ),
    ({"post_ops": ["add:2"], "output_order": "NHWC"}, ShapeError, r"must broadcast to the result \(2, 7, 6, 6\)"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    arguments: dict[str, ArgumentValue], error: type[DagexecError], message: str
) -> None:
    inputs = [np.ones((2, 4, 9, 8)), np.ones((6, 4, 3, 3)), np.ones((2, 6, 7, 6))]
    with pytest.raises(error, match=f"(?s)FusedConv 'y0'.*{message}"):
        run_operator("FusedConv", [array.astype(np.float32) for array in inputs], kernel=3, **arguments)
