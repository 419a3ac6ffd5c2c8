"""channel-multiplier: depthwise convolutions with several filters a channel."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec.compiler.passes.channel_multiplier import PASS
from dagexec.core.model import Model
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged

CHANNELS = 8


def depthwise(
    filters: int, *bias: str, channels: int = CHANNELS, inner: int = 1, kernel: int = 3, pad: int = 1, **arguments: int
) -> Model:
    """A convolution from so many channels, each group of which has so many filters."""
    groups = channels // inner
    convolution = op("Conv", ["x", "w", *bias], ["y"], group=groups, kernel=kernel, pad=pad, **arguments)
    shape = (filters * groups, inner, kernel, kernel)
    parameters = {"w": normal(*shape)} | {name: normal(filters * groups) for name in bias}
    return model_of([convolution], "y", {"x": (2, channels, 7, 6)}, **parameters)


@pytest.mark.parametrize("filters", [2, 3, 4])
@pytest.mark.parametrize("bias", [(), ("b",)])
@pytest.mark.parametrize("arguments", [{}, {"stride": 2}, {"dilation": 2, "pad": 2}, {"kernel": 1, "pad": 0}])
def test_each_filter_of_a_channel_has_a_convolution(
    filters: int, bias: tuple[str, ...], arguments: dict[str, int]
) -> None:
    left = rewritten(PASS, depthwise(filters, *bias, **arguments))
    assert [line.split()[0] for line in left] == ["Conv"] * filters + ["Concat", "ChannelShuffle"]


@pytest.mark.parametrize(
    "model",
    [depthwise(1), depthwise(5), depthwise(2, channels=4), depthwise(2, channels=16, inner=2)],
    ids=["one filter", "many filters", "few channels", "wider groups"],
)
def test_others_stay(model: Model) -> None:
    assert unchanged(PASS, model)


def test_a_convolution_of_an_onnx_file_gives_what_onnxruntime_gives() -> None:
    weights, bias = normal(3 * CHANNELS, 1, 5, 5), normal(3 * CHANNELS)
    attributes = {"group": CHANNELS, "strides": [2, 2], "pads": [2, 2, 2, 2]}
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w", "b"], ["c"], **attributes),
        onnx.helper.make_node("Relu", ["c"], ["y"]),
    ]
    types = [
        onnx.helper.make_tensor_value_info(name, 1, ["n", channels, None, None])
        for name, channels in (("x", CHANNELS), ("y", 3 * CHANNELS))
    ]
    parameters = [onnx.numpy_helper.from_array(array, name) for array, name in ((weights, "w"), (bias, "b"))]
    graph = onnx.helper.make_graph(nodes, "depthwise", types[:1], types[1:], parameters)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    x = normal(2, CHANNELS, 11, 8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-5)
        assert "ChannelShuffle" in [one.type for one in executor.net().graph.operators]
