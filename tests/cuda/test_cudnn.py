"""Engine CUDNN on emulated devices, with the stand-in for cuDNN: what its operators compute, and of which graphs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dagexec.core.device import Device
from dagexec.devices.cuda.cudnn_graph import FORWARD, ConvGraph, ConvParameters, TensorLayout
from tests.cuda.emulated.cudnn import Engine, emulated_cudnn
from tests.cuda.emulated.machine import Machine
from tests.ops.running import Array, on_device, operator_def, run_operator

CUDA = Device("cuda", 0)
LIMIT = 1 << 20
TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}


def executed(machine: Machine) -> list[Any]:
    """The calls of `execute`."""
    return [call for call in machine.calls if call.name == "cudnn.execute"]


def conv_graph(channels: int = 4, size: int = 6, **options: Any) -> ConvGraph:
    """A 3x3 convolution of float32."""
    x = TensorLayout.of(np.empty((2, channels, size, size), np.float32), channels_last=False)
    weights = TensorLayout.of(np.empty((4, channels, 3, 3), np.float32), channels_last=False)
    y = TensorLayout.of(np.empty((2, 4, size, size), np.float32), channels_last=False)
    return ConvGraph(FORWARD, "float32", x, weights, y, ConvParameters((1, 1), (1, 1), (1, 1), (1, 1)), **options)


def compare(op_type: str, arrays: list[Array], outputs: int, dtype: Any, executions: int, **arguments: Any) -> None:
    """Run on CUDA with engine CUDNN and on the host in float64; cuDNN must have been asked `executions` times."""
    kind = np.dtype(dtype)
    given = [array.astype(kind) for array in arrays]
    expected = run_operator(op_type, [array.astype(np.float64) for array in given], outputs, **arguments)
    names = [f"x{index}" for index in range(len(given))]
    definition = operator_def(op_type, names, [f"y{index}" for index in range(outputs)], **arguments)
    definition.engine = "CUDNN"
    with emulated_cudnn() as (machine, _):
        found = on_device(CUDA, definition, dict(zip(names, given, strict=True)))
        assert len(executed(machine)) == executions
    for one, other in zip(found, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, kind)
        limit = TOLERANCE[kind.name] * float(np.abs(other).max(initial=1.0))
        np.testing.assert_allclose(one.astype(np.float64), other, rtol=0, atol=limit)


GEOMETRIES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "1x1": ((2, 4, 5, 5), (6, 4, 1, 1), {"kernel": 1}),
    "3x3": ((2, 4, 7, 6), (6, 4, 3, 3), {"kernel": 3, "pad": 1}),
    "strides, and pads on one side": ((1, 3, 8, 9), (4, 3, 3, 3), {"kernel": 3, "stride": 2, "pads": [0, 0, 1, 1]}),
    "groups": ((2, 4, 5, 5), (6, 2, 3, 3), {"kernel": 3, "group": 2, "pads": [1, 0, 1, 2]}),
    "depthwise": ((2, 4, 5, 5), (4, 1, 3, 3), {"kernel": 3, "group": 4, "stride": 2, "pad": 1}),
    "dilation": ((1, 2, 9, 9), (3, 2, 3, 3), {"kernel": 3, "dilation": 2, "pad": 2}),
    "pixels that no window reads": ((1, 2, 8, 8), (3, 2, 3, 3), {"kernel": 3, "stride": 3}),
    "SAME_LOWER": ((1, 2, 7, 8), (3, 2, 4, 4), {"kernel": 4, "stride": 2, "legacy_pad": 5}),
    "one spatial axis": ((2, 3, 9), (4, 3, 3), {"kernels": [3], "strides": [2], "pads": [1, 0]}),
    "three spatial axes": ((1, 2, 4, 5, 6), (4, 1, 2, 3, 2), {"kernels": [2, 3, 2], "group": 2, "pads": [1] * 6}),
}


def image(shape: tuple[int, ...], order: str) -> Array:
    """Random numbers, in that order."""
    found = np.random.default_rng(sum(shape)).standard_normal(shape)
    return np.ascontiguousarray(np.moveaxis(found, 1, -1)) if order == "NHWC" else found


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", GEOMETRIES)
def test_convolutions_and_their_gradients_are_those_of_the_host(name: str, order: str) -> None:
    shape, weights, arguments = GEOMETRIES[name]
    x, filters, bias = image(shape, order), image(weights, order), np.arange(float(weights[0]))
    arguments = {**arguments, "order": order}
    compare("Conv", [x, filters, bias], 1, np.float32, 1, **arguments)
    compare("Conv", [x, filters], 1, np.float16, 1, **arguments)
    (y,) = run_operator("Conv", [x, filters], **arguments)
    gradient = np.random.default_rng(1).standard_normal(y.shape)
    compare("ConvGradient", [x, filters, gradient], 3, np.float32, 2, **arguments)
    compare("ConvGradient", [x, filters, gradient], 2, ml_dtypes.bfloat16, 2, no_bias=1, **arguments)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(
    ("shape", "weights", "arguments"),
    [
        ((2, 4, 4, 5), (4, 3, 3, 3), {"kernel": 3, "stride": 2, "pad": 1, "adj": 1}),
        ((1, 4, 5, 5), (4, 2, 2, 2), {"kernel": 2, "group": 2}),
        ((1, 2, 6), (2, 3, 4), {"kernels": [4], "strides": [3]}),
    ],
)
def test_transposed_convolutions_and_their_gradients_are_those_of_the_host(
    shape: tuple[int, ...], weights: tuple[int, ...], arguments: dict[str, Any], order: str
) -> None:
    x, filters = image(shape, order), image(weights, order)
    arguments = {**arguments, "order": order}
    bias = np.arange(float(weights[1] * arguments.get("group", 1)))
    compare("ConvTranspose", [x, filters, bias], 1, np.float32, 1, **arguments)
    (y,) = run_operator("ConvTranspose", [x, filters, bias], **arguments)
    gradient = np.random.default_rng(1).standard_normal(y.shape)
    compare("ConvTransposeGradient", [x, filters, gradient], 3, np.float32, 2, **arguments)


@pytest.mark.parametrize("fuses", [True, False])
@pytest.mark.parametrize(
    ("bias", "post_ops"),
    [
        (1, ["relu"]),
        (0, ["relu"]),
        (1, ["add:3", "relu"]),
        (0, ["add:2", "relu"]),
        (0, ["add:2"]),
        (1, []),
        (1, ["clip:-0.5:0.5"]),
        (1, ["add:3", "relu", "linear:2:1"]),
    ],
)
def test_bias_residual_and_relu_are_one_graph_or_one_kernel_behind_it(
    bias: int, post_ops: list[str], fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = (Engine("eng0", fuses=fuses), Engine("eng1", fuses=False))
    monkeypatch.setattr("tests.cuda.emulated.cudnn.ENGINES", engines)
    x, filters, more = image((2, 3, 5, 5), "NCHW"), image((4, 3, 3, 3), "NCHW"), image((2, 4, 5, 5), "NCHW")
    given = [x, filters, *([np.arange(4.0) - 2] if bias else []), *([more] if "add" in str(post_ops) else [])]
    compare("FusedConv", given, 1, np.float32, 1, kernel=3, pad=1, bias=bias, post_ops=post_ops, nan="any")


@pytest.mark.parametrize(("nan", "left"), [("kept", 27), ("any", 0)])
def test_nan_stays_nan_unless_anything_will_do(nan: str, left: int) -> None:
    x, filters = image((2, 3, 5, 5), "NCHW").astype(np.float32), image((3, 3, 3, 3), "NCHW").astype(np.float32)
    x[1, 2, 2, 2] = np.nan
    definition = operator_def("FusedConv", ["x", "w"], ["y"], kernel=3, pad=1, post_ops=["relu"], nan=nan)
    definition.engine = "CUDNN"
    with emulated_cudnn() as (machine, _):
        (found,) = on_device(CUDA, definition, {"x": x, "w": filters})
        assert len(executed(machine)) == 1
    assert np.isnan(found).sum() == left


@pytest.mark.parametrize("bias", [0, 1])
def test_what_is_summed_into_the_output_in_place_is_read_before_it_is_written(bias: int) -> None:
    x, filters, old = (image(shape, "NCHW").astype(np.float32) for shape in ((1, 2, 4, 4), (2, 2, 1, 1), (1, 2, 4, 4)))
    names, post_ops = ["x", "w", *["b"] * bias, "y"], [f"sum:{2 + bias}", "relu"]
    definition = operator_def("FusedConv", names, ["y"], kernel=1, bias=bias, post_ops=post_ops)
    definition.engine = "CUDNN"
    shift = np.array([0.5, -0.5], np.float32)
    with emulated_cudnn() as (machine, _):
        (found,) = on_device(CUDA, definition, {"x": x, "w": filters, "b": shift, "y": old})
        assert len(executed(machine)) == 1
    (product,) = run_operator("Conv", [x, filters, *[shift] * bias], kernel=1)
    np.testing.assert_allclose(found, np.maximum(product + old, 0), atol=1e-5)


def test_an_output_in_the_other_order_is_written_by_cudnn_or_behind_it() -> None:
    x, filters = image((2, 3, 5, 4), "NCHW"), image((4, 3, 3, 3), "NCHW")
    compare("FusedConv", [x, filters], 1, np.float32, 1, kernel=3, post_ops=["relu"], output_order="NHWC")


def test_float64_and_tensors_without_elements_are_for_the_default_engine() -> None:
    definition = operator_def("Conv", ["x", "w"], ["y"], kernel=1)
    definition.engine = "CUDNN"
    with emulated_cudnn() as (machine, _):
        (y,) = on_device(CUDA, definition, {"x": np.ones((1, 2, 2, 2)), "w": np.ones((1, 2, 1, 1))})
        assert (y == 2).all()
        none = {"x": np.ones((0, 2, 2, 2), np.float32), "w": np.ones((1, 2, 1, 1), np.float32)}
        assert on_device(CUDA, definition, none)[0].shape == (0, 1, 2, 2)
        assert not executed(machine)


# Library states
