"""Numbers of channels that fill no whole blocks: padded where nobody sees it, in NHWC, or as they are."""

from __future__ import annotations

import numpy as np
import pytest

from dagexec.compiler.passes.channel_padding import pad_channels
from dagexec.compiler.passes.layout import PADDED, laid_out, layouts
from dagexec.core.operator_def import op as operator_def
from dagexec.core.proto import OperatorDef
from dagexec.ops.base.layout import BLOCKS
from tests.compiler.passes.image_models import ORDERS, Drawing, check_same, needs_onednn, orders, reorders, results


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
def test_a_constant_of_more_channels_than_the_image_decides_how_many_there_are(name: str) -> None:
    drawing = Drawing((1, 4, 5, 5))
    x = drawing.conv("x", "single", 4, 1)
    x = drawing.add("Add", [x, drawing.constant("many", 1, 32, 1, 1)], "wide")
    drawing.net.op.append(OperatorDef(type="Split", input=[x], output=["one", "two"]))
    drawing.conv("one", "y", 16, 16)
    drawing.conv("two", "z", 16, 16)
    check_same(drawing.model("y", "z"), name)


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
