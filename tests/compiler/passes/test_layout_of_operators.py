"""Operators that go along with a layout of images: each computes in it what it computes in NCHW."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.compiler.passes.layout import PADDED
from dagexec.core.operator_def import op as operator_def
from dagexec.ops.base.layout import BLOCKS
from tests.compiler.passes.image_models import ORDERS, Drawing, check_same, reorders, towers


def test_an_operator_that_cannot_go_along_is_fed_nchw_by_one_reorder_for_all_its_readers() -> None:
    drawing = towers()
    drawing.add("Transpose", ["relu1"], "turned", engine="", axes=[0, 2, 1, 3])
    drawing.add("FlattenToVec", ["relu1"], "flat", engine="")
    changed = check_same(drawing.model("softmax", "turned", "flat"), "NHWC")
    assert reorders(changed).count(("relu1", "NHWC", "NCHW")) == 1
    plain = [one for one in changed.net.op if one.type in ("Transpose", "FlattenToVec")]
    assert [list(one.input) for one in plain] == [["relu1/NCHW"]] * 2


@pytest.mark.parametrize("name", ORDERS)
def test_constants_follow_the_order_of_the_images_they_meet(name: str) -> None:
    drawing = Drawing()
    x = drawing.conv("x", "conv1", 3, 16)
    x = drawing.add("Mul", [x, drawing.constant("by_channel", 16, 1, 1)], "scaled")
    x = drawing.add("Add", [x, drawing.constant("by_row", 12, 1)], "shifted")
    x = drawing.add("Sub", [x, drawing.constant("one", 1)], "lower")
    x = drawing.add("Add", [x, drawing.constant("run", 16)], "old", broadcast=1, axis=1)
    x = drawing.add("Mul", [drawing.constant("full", 1, 16, 12, 12), x], "turned_round")
    drawing.conv(x, "y", 16, 16)
    assert len(reorders(check_same(drawing.model("y"), name))) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("slope", [(16,), (16, 1, 1), (1, 16, 1, 1), (16, 1), (16, 16, 16), (1, 1)])
def test_slopes_that_broadcast_follow_the_order_of_the_image(name: str, slope: tuple[int, ...]) -> None:
    drawing = Drawing((2, 16, 16, 16))
    x = drawing.conv("x", "conv1", 16, 16)
    drawing.add("PRelu", [x, drawing.constant("slope", *slope)], "rectified")
    drawing.conv("rectified", "y", 16, 16)
    check_same(drawing.model("y"), name)


@pytest.mark.parametrize("name", ORDERS)
def test_a_split_along_the_channels_and_a_residual_go_along(name: str) -> None:
    drawing = Drawing()
    x = drawing.conv("x", "conv1", 3, 48)
    drawing.net.op.append(operator_def("Split", [x], ["one", "two"], arg={"axis": 1, "split": [16, 32]}))
    branch = drawing.conv("two", "branch", 32, 32)
    total = drawing.add("Sum", [branch, "two"], "total")
    drawing.add("Concat", ["one", total], "y", order="NCHW")
    changed = check_same(drawing.model("y"), name)
    assert len(reorders(changed)) <= 2


@pytest.mark.parametrize("name", ORDERS)
def test_an_image_that_no_image_operator_writes_is_added_in_the_order_of_the_convolution(name: str) -> None:
    drawing = Drawing()
    x = drawing.conv("x", "conv1", 3, 32)
    rows = drawing.add("Reshape", [x], "rows", shape=[1, 1, -1], engine="")
    residual = drawing.add("Reshape", [rows], "residual", shape=[1, 32, 12, 12], engine="")
    weights = [drawing.constant("w", 32, 32, 1, 1), drawing.constant("b", 32)]
    drawing.add("FusedConv", [x, *weights, residual], "y", bias=1, kernel=1, post_ops=["add:3"])
    changed = check_same(drawing.model("y"), name)
    assert ("residual", "NCHW", PADDED.get(name, name)) in reorders(changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize(
    ("channels", "arguments"),
    [
        (32, {"starts": [0, 0, 1, 1], "ends": [-1, -1, -1, -1]}),
        (16, {"starts": [0, 16, 2], "ends": [-1, -1, 9]}),
        (16, {"starts": [0, -33, 0], "ends": [-1, 16, -3]}),
        (16, {"starts": [3, 16], "ends": [7, 32], "axes": [3, 1], "steps": [2, 1]}),
        (16, {"starts": [-2, -32], "ends": [-9, 16], "axes": [-1, 1], "steps": [-3, 1], "onnx_style": 1}),
    ],
)
def test_a_slice_goes_along(name: str, channels: int, arguments: dict[str, object]) -> None:
    drawing = Drawing((2, 3, 12, 12))
    drawing.conv("x", "conv1", 3, 32)
    drawing.add("Slice", ["conv1"], "part", engine="", **arguments)
    drawing.conv("part", "y", channels, 16)
    assert len(reorders(check_same(drawing.model("y"), name))) <= 2


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("step", [1, 2])
def test_a_slice_that_cuts_blocks_of_channels_is_made_in_another_order(name: str, step: int) -> None:
    drawing = Drawing()
    drawing.conv("x", "conv1", 3, 32)
    drawing.add("Slice", ["conv1"], "part", engine="", starts=[3], ends=[31], axes=[1], steps=[step])
    drawing.conv("part", "y", 28 // step, 16)
    assert len(reorders(check_same(drawing.model("y"), name))) == (1 if name == "NHWC" else 3)


@pytest.mark.parametrize("name", ORDERS)
def test_a_slice_by_constant_bounds_goes_along(name: str) -> None:
    drawing = Drawing()
    drawing.conv("x", "conv1", 3, 16)
    drawing.parameters |= {"from": np.array([2, 1], np.int64), "to": np.array([12, 9], np.int64)}
    drawing.add("Slice", ["conv1", "from", "to"], "part", engine="", axes=[2, 3], onnx_style=1)
    drawing.conv("part", "y", 16, 16)
    assert len(reorders(check_same(drawing.model("y"), name))) <= 2


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("pads", [[0, 0, 1, 2, 0, 0, 3, 0], [0, 3, 0, 1, 0, 0, 1, 0], [1, 0, -1, 0, 0, 0, 0, -2]])
def test_padding_goes_along(name: str, pads: list[int]) -> None:
    drawing = Drawing()
    drawing.conv("x", "conv1", 3, 16)
    drawing.add("Pad", ["conv1"], "wide", engine="", pads=pads)
    drawing.conv("wide", "y", 16 + pads[1] + pads[5], 16)
    assert len(reorders(check_same(drawing.model("y"), name))) <= 2 + (pads[1] > 0 and name != "NHWC")


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("engine", ["", "ONEDNN"])
@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "linear", "sizes": [2, 16, 17, 30]},
        {"mode": "linear", "scales": [2.0, 0.5], "axes": [3, -2]},
        {"mode": "cubic", "sizes": [7, 20], "axes": [2, 3]},
        {"mode": "linear", "antialias": 1, "scales": [1.0, 1.0, 0.25, 0.5]},
        {"mode": "nearest", "scales": [1.0, 1.0, 1.5, 2.0]},
        {"mode": "nearest", "coordinates": "asymmetric", "rounding": "floor", "sizes": [2, 16, 24, 36]},
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_resizing_goes_along(name: str, engine: str, arguments: dict[str, object]) -> None:
    drawing = Drawing()
    drawing.conv("x", "conv1", 3, 16)
    drawing.net.op.append(operator_def("Resize", ["conv1"], ["wide"], arg=arguments))
    drawing.net.op[-1].engine = engine
    drawing.conv("wide", "y", 16, 16)
    assert len(reorders(check_same(drawing.model("y"), name))) == (3 if name in BLOCKS or name in PADDED else 1)


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("axis", [2, -1])
def test_a_split_along_another_axis_goes_along(name: str, axis: int) -> None:
    drawing = Drawing()
    drawing.conv("x", "conv1", 3, 16)
    drawing.net.op.append(operator_def("Split", ["conv1"], ["one", "two"], arg={"axis": axis, "split": [5, 7]}))
    drawing.conv("one", "y", 16, 16)
    drawing.conv("two", "z", 16, 16)
    assert len(reorders(check_same(drawing.model("y", "z"), name))) <= 3


@pytest.mark.parametrize("name", ORDERS)
def test_a_mean_over_the_image_and_operators_with_an_order_go_along(name: str) -> None:
    drawing = Drawing()
    x = drawing.conv("x", "conv1", 3, 32, stride=2)
    x = drawing.add("LRN", [x], "lrn", engine="", size=3, alpha=1e-4, beta=0.75)
    scales = [drawing.constant(name, 32) for name in ("scale", "bias", "mean", "variance")]
    drawing.parameters["variance"] = np.abs(drawing.parameters["variance"]) + 0.5
    x = drawing.add("SpatialBN", [x, *scales], "normal", engine="", is_test=1)
    x = drawing.add("PRelu", [x, drawing.constant("slope", 32)], "prelu", engine="")
    gate = drawing.conv(drawing.add("ReduceMean", [x], "mean_of", axes=[2, 3], keepdims=1), "gate", 32, 32, kernel=1)
    drawing.add("Mul", [x, drawing.add("Sigmoid", [gate], "open")], "y")
    changed = check_same(drawing.model("y"), name)
    if name == "NHWC":
        assert len(reorders(changed)) == 1
