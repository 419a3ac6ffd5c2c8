"""before-resize: convolutions of one tap on enlarged images."""

from __future__ import annotations

from typing import Any

import pytest

from dagexec.compiler.passes import run_passes
from dagexec.compiler.passes.before_resize import PASS
from dagexec.compiler.passes.catalog import GRAPH_PASSES
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import (
    assert_close,
    feeds_for,
    model_of,
    normal,
    op,
    outputs_of,
    rewritten,
    unchanged,
)

INPUTS: dict[str, tuple[int | None, ...]] = {"x": (2, 16, 3, 4), "z": (2, 8, 6, 8)}


def drawn(*operators: OperatorDef, outputs: tuple[str, ...] = ("y",), free: bool = False) -> Model:
    """A net on two images, of which the second has twice the pixels each way."""
    inputs = {name: (shape[0], shape[1], None, None) for name, shape in INPUTS.items()} if free else INPUTS
    filters = {f"w{channels}": normal(8, channels, 1, 1) for channels in (8, 16, 24, 32, 40)}
    return model_of(
        operators, outputs, inputs, b=normal(8), wide=normal(64, 16, 3, 3), many=normal(512, 16, 1, 1), **filters
    )


def enlarged(target: str = "r", **arguments: Any) -> OperatorDef:
    return op("Resize", ["x"], [target], **({"mode": "linear", "sizes": [2, 16, 6, 8]} | arguments))


def convolved(source: str, *parameters: str, target: str = "y", **arguments: Any) -> OperatorDef:
    return op("Conv", [source, *parameters], [target], **({"kernel": 1} | arguments))


RESIZINGS = {
    "sizes": enlarged(),
    "cubic": enlarged(mode="cubic"),
    "corners": enlarged(coordinates="align_corners"),
    "axes": enlarged(sizes=[8, 6], axes=[3, -2]),
    "scales": op("Resize", ["x"], ["r"], mode="linear", scales=[1.0, 1.0, 2.0, 2.0]),
    "nearest": op("ResizeNearest", ["x"], ["r"], width_scale=2.0, height_scale=2.0),
    "bilinear": op("UpsampleBilinear", ["x"], ["r"], width_scale=2.0, height_scale=2.0),
}


@pytest.mark.parametrize("name", RESIZINGS)
def test_a_convolution_goes_before_the_resizing(name: str) -> None:
    resizing = RESIZINGS[name]
    model = drawn(resizing, convolved("r", "w16", "b"))
    assert rewritten(PASS, model) == ["Conv x w16/1 b -> x/mixed", f"{resizing.type} x/mixed -> y"]


@pytest.mark.parametrize("name", RESIZINGS)
def test_of_joined_images_each_has_its_part_of_the_filter(name: str) -> None:
    resizing = RESIZINGS[name]
    model = drawn(resizing, op("Concat", ["z", "r"], ["j"], axis=1), convolved("j", "w24", "b"))
    assert rewritten(PASS, model) == [
        "Conv z w24/1 b -> y/rest",
        "Conv x w24/2 -> x/mixed",
        f"{resizing.type} x/mixed -> r/mixed",
        "Sum y/rest r/mixed -> y",
    ]


def test_what_is_not_resized_stays_joined_and_sizes_may_be_free() -> None:
    resizing = RESIZINGS["scales"]
    operators = [
        op("Tanh", ["z"], ["t"]),
        resizing,
        op("Concat", ["z", "r", "t"], ["j"], axis=1),
        convolved("j", "w32"),
    ]
    model = drawn(*operators, free=True)
    assert [line.split(" ")[0] for line in rewritten(PASS, drawn(*operators))] == [
        "Tanh", "Concat", "Conv", "Conv", "Resize", "Sum",
    ]  # fmt: skip
    assert PASS.apply(model).changes == PASS.apply(drawn(*operators)).changes


def test_all_passes_come_to_an_end() -> None:
    model = drawn(
        enlarged("r"),
        enlarged("s", mode="cubic"),
        op("Concat", ["r", "z", "s"], ["j"], axis=1),
        convolved("j", "w40", "b", target="c"),
        op("Relu", ["c"], ["y"]),
    )
    result = run_passes(model, GRAPH_PASSES).model
    assert run_passes(result, GRAPH_PASSES).model.net.op == result.net.op
    feeds = feeds_for(model)
    assert_close(outputs_of(result, feeds), outputs_of(model, feeds))


CONVOLUTION = convolved("r", "w16")
CROP = {
    "coordinates": "tf_crop_and_resize",
    "roi": [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.2, 1.2],
    "extrapolation_value": 3.0,
}


OTHERS: dict[str, list[OperatorDef]] = {
    "crop": [enlarged(**CROP), CONVOLUTION],
    "smaller": [enlarged(sizes=[2, 16, 3, 3]), CONVOLUTION],
    "channels": [enlarged(sizes=[2, 8, 6, 8]), convolved("r", "w8")],
    "ratio": [enlarged(keep_aspect_ratio_policy="not_larger"), CONVOLUTION],
    "strides": [enlarged(), convolved("r", "w16", stride=2)],
    "padding": [enlarged(), convolved("r", "w16", pads=[1, 1, 1, 1])],
    "groups": [enlarged(), convolved("r", "w8", group=2)],
    "taps": [enlarged(), convolved("r", "wide", kernel=3)],
    "many filters": [enlarged(), convolved("r", "many")],
    "another reader": [enlarged(), CONVOLUTION, op("Relu", ["r"], ["other"])],
    "an operator between": [enlarged(), op("Tanh", ["r"], ["t"]), convolved("t", "w16")],
    "joined rows": [enlarged(), enlarged("s"), op("Concat", ["r", "s"], ["j"], axis=2), convolved("j", "w16")],
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay(name: str) -> None:
    outputs = [one.output[0] for one in OTHERS[name] if one.output[0] in ("y", "other")]
    assert unchanged(PASS, drawn(*OTHERS[name], outputs=tuple(outputs)))
