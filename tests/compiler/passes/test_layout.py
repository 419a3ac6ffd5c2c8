"""Where a layout of images begins and ends: which operators are in it, who reorders, what becomes of constants."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dagexec
from dagexec.compiler.passes.assignment import PASS as SINGLE_ASSIGNMENT
from dagexec.compiler.passes.layout import LAYOUTS, assign_layout, laid_out, layout_pass
from dagexec.compiler.passes.single_assignment import Values
from dagexec.core.dtypes import FLOAT32
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef
from dagexec.ops.engines.onednn.binding import library
from tests.compiler.passes.image_models import (
    ORDERS,
    Drawing,
    check_same,
    needs_onednn,
    orders,
    reorders,
    results,
    towers,
)
from tests.compiler.passes.models import model_of, normal, op


@pytest.mark.parametrize("name", ORDERS)
def test_a_net_of_branches_has_a_reorder_at_its_end_only_as_the_first_convolution_reads_nchw(name: str) -> None:
    changed = check_same(towers().model("softmax"), name)
    assert reorders(changed) == [("pooled", name.split()[0], "NCHW")]


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
