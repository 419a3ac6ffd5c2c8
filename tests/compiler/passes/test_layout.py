from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dagexec
from dagexec.compiler.passes.assignment import PASS as SINGLE_ASSIGNMENT
from dagexec.compiler.passes.channel_padding import pad_channels
from dagexec.compiler.passes.layout import LAYOUTS, PADDED, assign_layout, laid_out, layout_pass, layouts
from dagexec.compiler.passes.single_assignment import Values
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator_def import op as operator_def
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.ops.base.layout import BLOCKS
from dagexec.ops.engines.onednn.binding import library
from tests.compiler.passes.models import model_of, normal, op

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")

ORDERS = [name for name in layouts() if name != "NCHW"]
"""Those with kernels here."""


class Drawing:
    """A model that is put together operator by operator; every conv has engine ONEDNN, as pass `engine` leaves it."""

    def __init__(self, shape: tuple[int | None, ...] = (1, 3, 12, 12), seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.net = NetDef(name="drawn")
        self.parameters: dict[str, np.ndarray] = {}
        self.shape = shape

    def add(self, kind: str, inputs: list[str], output: str, /, engine: str = "ONEDNN", **arguments: object) -> str:
        self.net.op.append(operator_def(kind, inputs, [output], engine=engine, arg=arguments))  # type: ignore[arg-type]
        return output

    def constant(self, name: str, *shape: int) -> str:
        self.parameters[name] = self.random.standard_normal(shape).astype(np.float32)
        return name

    def conv(
        self, x: str, output: str, inner: int, outer: int, kernel: int = 3, group: int = 1, stride: int = 1
    ) -> str:
        weights = self.constant(f"{output}_w", outer, inner // group, kernel, kernel)
        self.parameters[weights] /= np.sqrt(kernel * kernel * inner / group)
        inputs = [x, weights, self.constant(f"{output}_b", outer)]
        return self.add("Conv", inputs, output, kernel=kernel, pad=kernel // 2, group=group, stride=stride)

    def model(self, *outputs: str) -> Model:
        return Model("drawn", self.net, None, self.parameters, {"x": InputInfo(shape=self.shape)}, outputs)


def results(model: Model, x: np.ndarray) -> Mapping[str, np.ndarray]:
    with dagexec.compile(model, optimize=False, net_type="simple") as executor:
        return executor.run({"x": x})


def check_same(model: Model, name: str, x: np.ndarray | None = None) -> Model:
    """The model in another layout, which gives what NumPy gives for the model as it is."""
    changed = laid_out(model, name).model
    if x is None:
        x = np.random.default_rng(1).standard_normal([size or 2 for size in model.inputs["x"].shape or ()], np.float32)
    plain = NetDef()
    plain.CopyFrom(model.net)
    for definition in plain.op:
        definition.engine = ""
    expected = results(Model("plain", plain, None, model.parameters, model.inputs, model.outputs), x)
    found = results(changed, x)
    assert list(found) == list(expected)
    for blob, array in expected.items():
        assert found[blob].shape == array.shape
        np.testing.assert_allclose(found[blob], array, rtol=1e-4, atol=1e-5 * np.abs(array).max())
    return changed


def reorders(model: Model) -> list[tuple[str, str, str]]:
    """(blob, from, to) of every Reorder."""
    rows = []
    for definition in model.net.op:
        if definition.type == "Reorder":
            arguments = {argument.name: argument.s.decode() for argument in definition.arg}
            rows.append((definition.input[0], arguments["from_order"], arguments["to_order"]))
    return rows


def orders(model: Model) -> dict[str, str]:
    """By first output, the argument `order` of the operators that have it."""
    return {
        one.output[0]: argument.s.decode() for one in model.net.op for argument in one.arg if argument.name == "order"
    }


def towers() -> Drawing:
    """conv1 - relu - two convolutions - joined - pool - softmax over the channels."""
    drawing = Drawing()
    x = drawing.conv("x", "conv1", 3, 16)
    x = drawing.add("Relu", [x], "relu1")
    left = drawing.conv(x, "left", 16, 32, kernel=1)
    right = drawing.conv(x, "right", 16, 16)
    joined = drawing.add("Concat", [left, right], "joined", axis=1)
    pooled = drawing.add("MaxPool", [joined], "pooled", kernel=2, stride=2)
    drawing.add("Softmax", [pooled], "softmax", engine="", axis=1, single_axis=1)
    return drawing


@pytest.mark.parametrize("name", ORDERS)
def test_a_net_of_branches_has_a_reorder_at_its_end_only_as_the_first_convolution_reads_nchw(name: str) -> None:
    changed = check_same(towers().model("softmax"), name)
    assert reorders(changed) == [("pooled", name.split()[0], "NCHW")]


def test_an_operator_that_cannot_go_along_is_fed_nchw_by_one_reorder_for_all_its_readers() -> None:
    drawing = towers()
    drawing.add("Transpose", ["relu1"], "turned", engine="", axes=[0, 2, 1, 3])
    drawing.add("FlattenToVec", ["relu1"], "flat", engine="")
    changed = check_same(drawing.model("softmax", "turned", "flat"), "NHWC")
    assert reorders(changed).count(("relu1", "NHWC", "NCHW")) == 1
    plain = [one for one in changed.net.op if one.type in ("Transpose", "FlattenToVec")]
    assert [list(one.input) for one in plain] == [["relu1/NCHW"]] * 2


def test_outputs_keep_their_names_and_orders() -> None:
    changed = check_same(towers().model("conv1", "joined", "softmax"), "NHWC")
    assert changed.outputs == ("conv1", "joined", "softmax")
    assert ("conv1/NHWC", "NHWC", "NCHW") in reorders(changed)


def test_a_net_without_convolutions_by_onednn_stays_as_it_is() -> None:
    drawing = Drawing()
    drawing.add("Relu", ["x"], "relu")
    drawing.add("MaxPool", ["relu"], "y", kernel=2)
    assert laid_out(drawing.model("y"), "NHWC").model.net == drawing.net
    numpy_only = towers()
    for definition in numpy_only.net.op:
        definition.engine = ""
    assert not laid_out(numpy_only.model("softmax"), "NHWC").changes


def test_elementwise_operators_far_from_convolutions_are_left_in_nchw() -> None:
    drawing = Drawing()
    before = drawing.add("Sigmoid", [drawing.add("Tanh", ["x"], "a")], "b")
    turned = drawing.add("Transpose", [before], "turned", engine="", axes=[0, 1, 3, 2])
    drawing.conv(turned, "y", 3, 16)
    changed = check_same(drawing.model("y"), "NHWC")
    assert reorders(changed) == [("y/NHWC", "NHWC", "NCHW")]
    assert orders(changed).get("b", "NCHW") == "NCHW"


def test_a_reorder_is_put_where_the_tensor_is_smallest() -> None:
    drawing = Drawing()
    x = drawing.conv("x", "conv", 3, 16)
    drawing.add("Sigmoid", [drawing.add("Concat", [x, x], "twice", axis=1)], "y")
    changed = check_same(drawing.model("y"), "NHWC")
    assert reorders(changed) == [("conv", "NHWC", "NCHW")]


def test_a_convolution_of_few_channels_reads_the_order_in_which_they_come() -> None:
    drawing = Drawing()
    x = drawing.conv("x", "conv1", 3, 16)
    x = drawing.conv(x, "conv2", 16, 4)
    drawing.conv(x, "y", 4, 16)
    changed = check_same(drawing.model("y"), "NHWC")
    assert reorders(changed) == [("y/NHWC", "NHWC", "NCHW")]
    assert orders(changed) == {"conv1": "NCHW", "conv2": "NHWC", "y/NHWC": "NHWC"}


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


@needs_onednn
def test_odd_channels_become_nhwc_where_the_others_are_in_blocks() -> None:
    drawing, blocked = Drawing(), layouts()[1]
    x = drawing.conv("x", "conv1", 3, 16)
    x = drawing.conv(x, "conv2", 16, 16)
    x = drawing.conv(x, "odd", 16, 10, kernel=1)
    drawing.add("AveragePool", [x], "y", global_pooling=1)
    changed = check_same(drawing.model("y"), blocked)
    assert orders(changed)["conv2"] == blocked
    assert orders(changed)["odd"] == "NHWC"
    assert reorders(changed) == [("conv2", blocked, "NHWC"), ("y/NHWC", "NHWC", "NCHW")]


@pytest.mark.parametrize("name", ORDERS)
def test_free_sizes_are_no_obstacle(name: str) -> None:
    model = towers().model("pooled")
    inputs = {"x": InputInfo(shape=(None, 3, None, None))}
    free = Model("free", model.net, None, model.parameters, inputs, model.outputs)
    for shape in ((1, 3, 12, 12), (3, 3, 8, 10)):
        check_same(free, name, np.random.default_rng(2).standard_normal(shape, np.float32))


@pytest.mark.parametrize("name", ORDERS)
def test_blobs_that_are_overwritten_are_followed_value_by_value(name: str) -> None:
    drawing = Drawing()
    x = drawing.conv("x", "blob", 3, 16)
    drawing.add("Relu", [x], x)
    drawing.conv(x, "other", 16, 16)
    drawing.add("Sum", [x, "other"], x)
    drawing.add("Relu", [x], x)
    check_same(drawing.model("blob"), name)
    assert laid_out(drawing.model("blob"), name).changes


def test_a_filter_used_twice_is_turned_once_and_the_original_is_dropped() -> None:
    drawing = Drawing((1, 16, 8, 8))
    drawing.conv("x", "one", 16, 16)
    drawing.add("Conv", ["one", "one_w", "one_b"], "y", kernel=3, pad=1)
    changed = check_same(drawing.model("y"), "NHWC")
    assert sorted(changed.parameters) == ["one_b", "one_w/NHWC"]
    assert changed.parameters["one_w/NHWC"].shape == (16, 3, 3, 16)


def test_a_filter_that_a_run_computes_keeps_its_convolution_in_nchw() -> None:
    drawing = Drawing((1, 16, 8, 8))
    drawing.add("Sum", [drawing.constant("w", 16, 16, 3, 3)], "computed")
    drawing.add("Conv", ["x", "computed"], "y", kernel=3)
    assert not laid_out(drawing.model("y"), "NHWC").changes


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("fed", ["w", "scale"])
def test_a_parameter_that_runs_are_fed_with_is_no_constant(name: str, fed: str) -> None:
    drawing = Drawing((1, 16, 8, 8))
    drawing.constant("w", 16, 16, 3, 3)
    x = drawing.conv("x", "first", 16, 16)
    x = drawing.add("Mul", [x, drawing.constant("scale", 1, 16, 1, 1)], "scaled")
    drawing.add("Conv", [x, "w"], "y", kernel=3)
    model = drawing.model("y")
    value = drawing.random.standard_normal(drawing.parameters[fed].shape, np.float32)
    inputs = {**model.inputs, fed: InputInfo(shape=value.shape)}
    changed = laid_out(replace(model, inputs=inputs), name).model
    image = drawing.random.standard_normal((1, 16, 8, 8), np.float32)
    with dagexec.compile(changed, optimize=False) as executor:
        found = executor.run({"x": image, fed: value})["y"]
    expected = results(replace(model, parameters={**model.parameters, fed: value}), image)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("name", ORDERS)
def test_a_constant_of_more_channels_than_the_image_decides_how_many_there_are(name: str) -> None:
    drawing = Drawing((1, 4, 5, 5))
    x = drawing.conv("x", "single", 4, 1)
    x = drawing.add("Add", [x, drawing.constant("many", 1, 32, 1, 1)], "wide")
    drawing.net.op.append(OperatorDef(type="Split", input=[x], output=["one", "two"]))
    drawing.conv("one", "y", 16, 16)
    drawing.conv("two", "z", 16, 16)
    check_same(drawing.model("y", "z"), name)


def test_what_a_dropout_in_training_leaves_out_depends_on_places_so_it_stays_in_nchw() -> None:
    drawing = Drawing((1, 16, 8, 8))
    x = drawing.conv("x", "first", 16, 16)
    x = drawing.add("Dropout", [x], "dropped", is_test=0)
    drawing.conv(x, "y", 16, 16)
    assert ("first", "NHWC", "NCHW") in reorders(laid_out(drawing.model("y"), "NHWC").model)


def test_outputs_that_nobody_reads_are_left_out() -> None:
    drawing = Drawing((1, 16, 8, 8))
    x = drawing.conv("x", "conv", 16, 16)
    drawing.add("Dropout", [x], "kept", is_test=1)
    drawing.net.op[-1].output.append("mask")
    drawing.add("Concat", ["kept", x], "y", axis=1)
    drawing.net.op[-1].output.append("sizes")
    changed = check_same(drawing.model("y"), "NHWC")
    assert [len(one.output) for one in changed.net.op] == [1] * len(changed.net.op)


@needs_onednn
@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("sizes", [{}, {"split": [16, 16]}])
def test_a_split_whose_last_pieces_nobody_reads_still_cuts_them_off(name: str, sizes: dict[str, object]) -> None:
    drawing = Drawing((1, 4, 6, 6))
    x = drawing.conv("x", "wide", 4, 32)
    drawing.net.op.append(operator_def("Split", [x], ["one", "two"], arg={"axis": 1, **sizes}))  # type: ignore[dict-item]
    drawing.add("Abs", ["one"], "y")
    check_same(drawing.model("y"), name)


@needs_onednn
@pytest.mark.parametrize("activation", ["Relu", "ReluN", "Clip", "Softplus"])
def test_padding_makes_blocks_of_channels_that_only_convolutions_see(activation: str) -> None:
    drawing, blocked = Drawing(), layouts()[1]
    x = drawing.conv("x", "conv1", 3, 28)
    x = drawing.add(activation, [x], "relu1")
    x = drawing.conv(x, "depthwise", 28, 28, group=28)
    x = drawing.add("MaxPool", [x], "pooled", kernel=2, stride=2)
    drawing.conv(x, "y", 28, 16)
    model = drawing.model("y")
    padded = pad_channels(model, BLOCKS[blocked])
    assert padded.parameters["depthwise_w/padded32x1x3x3"].shape == (32, 1, 3, 3)
    changed = check_same(model, f"{blocked} padded")
    assert {order for order in orders(changed).values() if order != "NCHW"} == {blocked}


@needs_onednn
@pytest.mark.parametrize("kind", ["FusedElementwise", "FusedConv"])
@pytest.mark.parametrize("padded", PADDED)
def test_channels_are_not_padded_where_a_zero_becomes_infinite(kind: str, padded: str) -> None:
    drawing = Drawing()
    x = drawing.conv("x", "first", 3, 20)
    if kind == "FusedConv":
        constants = [drawing.constant("second_w", 20, 20, 1, 1)]
        drawing.add(kind, [x, *constants], "second", kernel=1, post_ops=["square", "log"])
    else:
        drawing.add(kind, [x], "second", post_ops=["square", "log"])
    drawing.conv("second", "y", 20, 16)
    found = results(laid_out(drawing.model("y"), padded).model, np.ones((1, 3, 12, 12), np.float32))["y"]
    assert np.isfinite(found).all()


def test_channels_that_others_see_are_not_padded() -> None:
    for last in ("Concat", "Log", "Softmax", "output"):
        drawing = Drawing()
        x = drawing.conv("x", "conv1", 3, 24)
        if last == "Concat":
            x = drawing.add("Concat", [x, x], "seen", axis=1)
        elif last != "output":
            x = drawing.add(last, [x], "seen", engine="")
        drawing.conv(x, "y", 48 if last == "Concat" else 24, 16)
        model = drawing.model(*(("conv1", "y") if last == "output" else ("y",)))
        assert pad_channels(model, 16) is model, last


def test_the_pass_says_what_it_did() -> None:
    outcome = layout_pass("NHWC").apply(towers().model("softmax"))
    assert outcome.changes == ("operators: 6 in NHWC; reorders: 1",)
    assert not layout_pass("NCHW").apply(towers().model("softmax")).changes
    assert assign_layout(towers().model("softmax"), "NHWC").reorders == 1


@pytest.mark.parametrize("name", ORDERS)
@pytest.mark.parametrize("shape", [(2, 3, 12, 12), (2, 3, None, None)])
def test_permutations_to_channels_last_and_back_change_nothing_in_nhwc(
    name: str, shape: tuple[int | None, ...]
) -> None:
    drawing = Drawing(shape)
    x = drawing.conv("x", "conv1", 3, 16)
    x = drawing.add("Transpose", [x], "last", engine="", axes=[0, 2, 3, 1])
    x = drawing.add("Softmax", [x], "softmax", engine="", axis=3, single_axis=1)
    x = drawing.add("Transpose", [x], "back", engine="", axes=[0, 3, 1, 2])
    x = drawing.conv(x, "conv2", 16, 16, group=16)
    drawing.add("Sum", [x, "conv1"], "y")
    changed = check_same(drawing.model("y"), name, np.random.default_rng(2).standard_normal((2, 3, 12, 12), np.float32))
    axes = [list(one.arg[0].ints) for one in changed.net.op if one.type == "Transpose"]
    if name == "NHWC":
        assert axes == [[0, 1, 2, 3]] * 2
        assert [blob for blob, _, _ in reorders(changed)] == ["y/NHWC"]


def test_a_permutation_of_what_has_an_order_already_stays() -> None:
    drawing = Drawing()
    last = drawing.add("Transpose", ["x"], "last", engine="", axes=[0, 2, 3, 1])
    drawing.add("Relu", [last], "y")
    changed = check_same(drawing.model("y"), "NHWC")
    assert list(changed.net.op[0].arg[0].ints) == [0, 2, 3, 1]


def test_values_of_a_blob_are_told_apart() -> None:
    drawing = Drawing()
    drawing.add("Relu", ["x"], "a")
    drawing.add("Relu", ["a"], "a")
    values = Values(drawing.model("a"))
    assert [(value.name, value.writer, value.readers, value.is_output) for value in values.all] == [
        ("x", None, [(0, 0)], False),
        ("a", 0, [(1, 0)], False),
        ("a", 1, [], True),
    ]


@st.composite
def drawings(draw: st.DrawFn) -> Model:
    """Convolutions, pools, sums and joins in any order, on images of few channels."""
    drawing = Drawing((draw(st.sampled_from((1, 2))), 3, 9, 9), seed=draw(st.integers(0, 99)))
    images = {"x": (3, 9)}
    count = draw(st.integers(2, 7))
    for number in range(count):
        name = f"b{number}"
        source = draw(st.sampled_from(list(images)))
        channels, size = images[source]
        kind = draw(
            st.sampled_from(("conv", "conv", "conv", "depthwise", "pool", "relu", "sum", "concat", "turn", "last"))
        )
        partners = [other for other, known in images.items() if known[1] == size]
        if kind == "conv":
            outer = draw(st.sampled_from((8, 16, 24, 32)))
            drawing.conv(source, name, channels, outer, kernel=draw(st.sampled_from((1, 3))))
            images[name] = (outer, size)
        elif kind == "depthwise":
            drawing.conv(source, name, channels, channels, group=channels)
            images[name] = (channels, size)
        elif kind == "pool":
            drawing.add(draw(st.sampled_from(("MaxPool", "AveragePool"))), [source], name, kernel=3, stride=1, pad=1)
            images[name] = (channels, size)
        elif kind == "relu":
            drawing.add("Relu", [source], name)
            images[name] = (channels, size)
        elif kind == "sum":
            other = draw(st.sampled_from([one for one in partners if images[one] == images[source]]))
            drawing.add("Sum", [source, other], name)
            images[name] = (channels, size)
        elif kind == "concat":
            other = draw(st.sampled_from(partners))
            drawing.add("Concat", [source, other], name, axis=1)
            images[name] = (channels + images[other][0], size)
        elif kind == "last":
            drawing.add("Transpose", [source], f"{name} last", engine="", axes=[0, 2, 3, 1])
            drawing.add("Transpose", [f"{name} last"], name, engine="", axes=[0, 3, 1, 2])
            images[name] = (channels, size)
        else:
            drawing.add("Transpose", [source], name, engine="", axes=[0, 1, 3, 2])
            images[name] = (channels, size)
    kept = draw(st.lists(st.sampled_from(sorted(images.keys() - {"x"})), min_size=1, max_size=2, unique=True))
    return drawing.model(*kept)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(drawings(), st.sampled_from([name for name in LAYOUTS if name == "NHWC" or library() is not None]))
def test_any_net_gives_the_same_results_in_any_layout(model: Model, name: str) -> None:
    check_same(SINGLE_ASSIGNMENT.apply(model).model, name)


def test_an_image_that_is_a_constant_is_read_in_the_order_it_has() -> None:
    """Also where it is the filter, too, which is turned."""
    transposed = op("ConvTranspose", ["w", "w", "b"], ["y"], kernel=2, stride=2)
    model = model_of([transposed], inputs={"x": (1,)}, w=normal(2, 2, 2, 2), b=normal(2))
    with dagexec.compile(model, optimize=False) as plain, dagexec.compile(model, layout="NHWC") as turned:
        feeds = {"x": np.ones(1, np.float32)}
        np.testing.assert_allclose(turned.run(feeds)["y"], plain.run(feeds)["y"], rtol=1e-5, atol=1e-6)


@needs_onednn
def test_dynamically_quantized_convolutions_work_in_nhwc_with_what_scales_their_sums() -> None:
    drawing = Drawing((2, 3, 9, 8))
    image = "x"
    for name, channels in (("a", 3), ("b", 6)):
        weights = drawing.random.integers(-99, 99, (6, channels, 3, 3)).astype(np.int8)
        drawing.parameters |= {f"{name}_w": weights, f"{name}_scale": np.float32([0.01])}
        quantized = [f"{name}_q", f"{name}_s", f"{name}_z"]
        drawing.net.op.append(op("DynamicQuantizeLinear", [image], quantized))
        sums = drawing.add("ConvInteger", [quantized[0], f"{name}_w", quantized[2]], f"{name}_sums", kernel=3, pad=1)
        scale = drawing.add("Mul", [quantized[1], f"{name}_scale"], f"{name}_factor")
        real = drawing.add("Cast", [sums], f"{name}_real", engine="", to="float32")
        scaled = drawing.add("Mul", [real, scale], f"{name}_scaled")
        image = drawing.add("Add", [scaled, drawing.constant(f"{name}_bias", 1, 6, 1, 1)], f"{name}_y")
    changed = check_same(drawing.model(image), "NHWC")
    assert [definition.type for definition in changed.net.op].count("Reorder") == 2


def test_an_output_that_is_written_in_place_of_what_others_read_has_its_name() -> None:
    """`image` is fed, kept, and overwritten where a Reorder has put its values for one that knows NCHW alone."""
    generator = np.random.default_rng(0)
    net = NetDef(name="in place")
    net.op.extend(
        [
            op("Conv", ["image", "filter", "bias"], ["y"], kernel=3, pad=1),
            op("Conv", ["y", "filter", "bias"], ["image"], kernel=3, pad=1),
            op("Softmax", ["image"], ["s"], axis=1),
            op("Negative", ["s"], ["z"]),
            op("Sub", ["z", "image"], ["image"]),
            op("MaxPool", ["image"], ["pooled"], kernel=3, pad=1, stride=1),
        ]
    )
    parameters = {
        "filter": generator.standard_normal((2, 2, 3, 3), np.float32),
        "bias": generator.standard_normal(2, np.float32),
    }
    feeds = {"image": generator.standard_normal((3, 2, 5, 5), np.float32)}
    inputs = {"image": InputInfo(FLOAT32, (3, 2, 5, 5))}
    model = Model("in place", net, parameters=parameters, inputs=inputs, outputs=("pooled", "image"))
    with dagexec.compile(model, optimize=False, net_type="simple") as executor:
        expected = executor.run(feeds)
    with dagexec.compile(replace(model, outputs=("pooled",)), layout="NHWC", keep=frozenset(["image"])) as executor:
        found = executor.run(feeds, outputs=["pooled", "image"])
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4)
