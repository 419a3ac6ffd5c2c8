"""convolution-sums: branches of one image that are added become one convolution; whatever is not linear in it stays."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec.compiler.passes.convolution_sums import PASS
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import model_of, normal, op, rewritten, unchanged

CHANNELS = 6


def branches(*operators: OperatorDef, outputs: str | list[str] = "y", rank: int = 4) -> Model:
    """A net on two images of six channels."""
    shape = (2, CHANNELS, *(7, 8, 5)[: rank - 2])
    per_channel = {name: normal(CHANNELS) for name in ("b", "c", "scale", "shift", "mean")}
    filters = {
        f"w{'x'.join(map(str, kernel))}g{group}": normal(CHANNELS, CHANNELS // group, *kernel)
        for kernel in ((1, 1), (3, 3), (1, 3), (3, 1), (2, 2), (5, 5), (1,), (3,), (1, 1, 1), (3, 3, 3))
        for group in (1, 2, 3, CHANNELS)
    }
    others = {"variance": np.abs(normal(CHANNELS)), "channel": normal(CHANNELS, *(1,) * (rank - 2))}
    return model_of(operators, outputs, {"x": shape, "z": shape}, **per_channel, **filters, **others)


def conv(kernel: int, y: str, *bias: str, x: str = "x", group: int = 1, rank: int = 4, **arguments: int) -> OperatorDef:
    filters = f"w{'x'.join([str(kernel)] * (rank - 2))}g{group}"
    pads = {"pad": kernel // 2 * arguments.get("dilation", 1)} | arguments
    return op("Conv", [x, filters, *bias], [y], kernel=kernel, group=group, **pads)


def norm(x: str, y: str) -> OperatorDef:
    return op("SpatialBN", [x, "scale", "shift", "mean", "variance"], [y], is_test=1)


def added(*names: str, y: str = "y") -> OperatorDef:
    return op("Add" if len(names) == 2 else "Sum", list(names), [y])


ONE_CONVOLUTION = {
    "two convolutions": [conv(3, "p", "b"), conv(1, "q", "c"), added("p", "q")],
    "the narrow one first": [conv(1, "p"), conv(3, "q"), added("p", "q")],
    "the image itself": [conv(3, "p", "b"), added("p", "x")],
    "a normalized image": [conv(3, "p", "b"), norm("x", "q"), conv(1, "r"), added("p", "q", "r")],
    "a difference": [conv(3, "p"), conv(1, "q", "c"), op("Sub", ["q", "p"], ["y"])],
    "factors behind a sum": [
        conv(3, "p", "b", group=CHANNELS), norm("x", "q"), op("Sub", ["p", "q"], ["r"]),
        op("Mul", ["r", "channel"], ["s"]), added("x", "s"),
    ],
    "groups": [conv(5, "p", group=2), conv(3, "q", "b", group=2), added("p", "q")],
    "groups and the image": [conv(3, "p", group=3), added("x", "p")],
    "strides": [conv(3, "p", "b", stride=2), conv(1, "q", stride=2), added("p", "q")],
    "dilated": [conv(3, "p", dilation=2), conv(5, "q"), conv(3, "r", dilation=1), added("p", "q", "r")],
    "one axis": [conv(3, "p", rank=3), conv(1, "q", rank=3), added("x", "p", "q")],
    "three axes": [conv(3, "p", rank=5), conv(1, "q", rank=5), added("q", "p")],
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_CONVOLUTION)
def test_branches_that_are_added_are_one_convolution(name: str) -> None:
    operators = ONE_CONVOLUTION[name]
    rank = {"one axis": 3, "three axes": 5}.get(name, 4)
    [only] = rewritten(PASS, branches(*operators, rank=rank))
    assert only.startswith("Conv x w")
    assert only.endswith(" -> y")


def test_what_somebody_else_reads_stays_and_the_rest_is_summed() -> None:
    operators = [conv(3, "p"), conv(1, "q"), added("p", "q", y="s"), conv(3, "r", x="s"), added("r", "s")]
    left = rewritten(PASS, branches(*operators))
    assert [line.split()[0] for line in left] == ["Conv", "Conv"]
    left = rewritten(PASS, branches(*operators, outputs=["y", "p"]))
    assert [line.split()[0] for line in left] == ["Conv", "Conv", "Add", "Conv"]


APART = {
    "other images": [conv(3, "p"), conv(1, "q", x="z"), added("p", "q")],
    "a result that is an output": [conv(3, "p"), conv(1, "q"), added("p", "q")],
    "other groups": [conv(3, "p"), conv(1, "q", group=2), added("p", "q")],
    "taps that the other has not": [
        op("Conv", ["x", "w1x3g1"], ["p"], kernels=[1, 3], pads=[0, 1, 0, 1]),
        op("Conv", ["x", "w3x1g1"], ["q"], kernels=[3, 1], pads=[1, 0, 1, 0]), added("p", "q"),
    ],
    "gaps where the other has taps": [conv(3, "p", dilation=2), conv(3, "q"), added("p", "q")],
    "pixels further on": [
        op("Conv", ["x", "w2x2g1"], ["p"], kernel=2, pads=[1, 1, 0, 0]),
        op("Conv", ["x", "w2x2g1"], ["q"], kernel=2, pads=[0, 0, 1, 1]), added("p", "q"),
    ],
    "a function in between": [conv(3, "p"), op("Relu", ["p"], ["q"]), conv(1, "r"), added("q", "r")],
    "a product": [conv(3, "p"), conv(1, "q"), op("Mul", ["p", "q"], ["y"])],
    "padding that is computed": [
        op("Conv", ["x", "w3x3g1"], ["p"], kernel=3, legacy_pad=4), conv(1, "q"), added("p", "q"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_is_no_sum_of_filters_stays(name: str) -> None:
    outputs = ["y", "p", "q"] if name == "a result that is an output" else "y"
    assert unchanged(PASS, branches(*APART[name], outputs=outputs))


def test_a_filter_that_overflows_stays() -> None:
    huge = np.full((CHANNELS, CHANNELS, 1, 1), 3e38, np.float32)
    operators = [op("Conv", ["x", name], [name.upper()], kernel=1) for name in ("u", "v")]
    assert unchanged(PASS, model_of([*operators, added("U", "V")], "y", {"x": (1, CHANNELS, 2, 2)}, u=huge, v=huge))


def test_a_block_of_an_onnx_file_gives_what_onnxruntime_gives() -> None:
    node, tensor = onnx.helper.make_node, onnx.numpy_helper.from_array
    filters = {"w3": normal(CHANNELS, CHANNELS, 3, 3), "w1": normal(CHANNELS, CHANNELS, 1, 1)}
    statistics = {name: normal(CHANNELS) for name in ("scale", "shift", "mean")} | {"variance": np.ones(CHANNELS, "f")}
    nodes = [
        node("Conv", ["x", "w3"], ["p"], pads=[1, 1, 1, 1]),
        node("Conv", ["x", "w1"], ["q"]),
        node("BatchNormalization", ["x", *statistics], ["r"]),
        node("Add", ["p", "q"], ["s"]),
        node("Add", ["s", "r"], ["t"]),
        node("Relu", ["t"], ["y"]),
    ]
    types = [onnx.helper.make_tensor_value_info(name, 1, ["n", CHANNELS, "h", "w"]) for name in ("x", "y")]
    parameters = [tensor(array, name) for name, array in (filters | statistics).items()]
    graph = onnx.helper.make_graph(nodes, "block", types[:1], types[1:], parameters)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9)
    x = normal(2, CHANNELS, 9, 7)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})
    with dagexec.compile(model) as executor:
        np.testing.assert_allclose(executor.run({"x": x})["y"], expected, rtol=1e-5, atol=1e-5)
        assert [one.type for one in executor.net().graph.operators if "Conv" in one.type or one.type == "Add"] == [
            "FusedConv"
        ]
