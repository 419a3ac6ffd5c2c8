"""NaN stays NaN: by every operator, layout, number of pieces and implementation of oneDNN where it does by NumPy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

import dagexec
from dagexec.core.choices import choices
from dagexec.core.operator import Step
from dagexec.errors import SettingError
from dagexec.ops.base.layout import NCHW, NHWC
from dagexec.ops.engines.onednn import convolution_family, keeping_nan
from dagexec.ops.engines.onednn import operator as operator_module
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.activation.post_ops import BINARY, FUNCTIONS
from tests.ops.onednn.engine import in_order, needs_onednn
from tests.ops.running import computed, run_operator

pytestmark = needs_onednn
Array = npt.NDArray[Any]


def image(seed: int, *shape: int) -> Array:
    """Normal numbers with two NaNs and a negative zero."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(shape).astype(np.float32)
    for value in (np.nan, np.nan, -0.0):
        x.flat[random.integers(x.size)] = value
    return x


def agree(found: Array, expected: Array) -> None:
    """The same NaNs, and elsewhere the same numbers within rounding, which a sum has of its terms."""
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    largest = np.abs(expected[np.isfinite(expected)]).max(initial=0)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=max(1e-5, 1e-6 * float(largest)))


def links() -> Iterator[str]:
    for kind, function in FUNCTIONS.items():
        yield ":".join([kind, *["-0.5", "1.5"][: function.numbers]] if kind != "leaky_relu" else [kind, "0.1"])
    yield from (f"{kind}:1" for kind in BINARY)


@pytest.mark.parametrize("link", list(links()))
@pytest.mark.parametrize("behind", [[], ["relu"], ["linear:2.0:1.0"]])
def test_chains(link: str, behind: list[str]) -> None:
    inputs = [image(5, 2, 33), image(6, 2, 33)][: 2 if link.endswith(":1") else 1]
    post_ops = [*behind, link]
    (expected,) = run_operator("FusedElementwise", inputs, post_ops=post_ops)
    (found,) = run_operator("FusedElementwise", inputs, post_ops=post_ops, engine="ONEDNN")
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    names = [f"x{number}" for number in range(len(inputs))]
    (in_place,) = computed("FusedElementwise", dict(zip(names, inputs, strict=True)), ["x0"], post_ops=post_ops)
    np.testing.assert_array_equal(np.isnan(in_place), np.isnan(expected))


def layer(
    x: Array, w: Array, held: Array | None, order: str, post_ops: list[str], pieces: int, engine: str = "ONEDNN"
) -> Array:
    """FusedConv of one padded window, with a `sum` of what Y `held`."""
    arrays = {"x": in_order(x, order), "w": np.moveaxis(w, 1, -1).copy() if order == NHWC else w}
    if held is not None:
        arrays["y"] = in_order(held, order)
    kernel, group = w.shape[-1], x.shape[1] // w.shape[1]
    return computed(
        "FusedConv", arrays, ["y"], "w", engine, order=order, kernel=kernel, pad=kernel // 2, group=group,
        post_ops=post_ops, pieces=pieces,
    )[0]  # fmt: skip


ORDERS = [NCHW, NHWC, "NCHW16c", "NCHW8c"]
WINDOWS = [(16, 16, 3, 1), (32, 32, 1, 1), (32, 32, 3, 32), (3, 16, 5, 1), (32, 16, 3, 2)]
"""Channels, filters, kernel, groups."""


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("added", [False, True], ids=["", "sum"])
def test_convolutions(window: tuple[int, int, int, int], order: str, pieces: int, added: bool) -> None:
    channels, filters, kernel, groups = window
    if order not in (NCHW, NHWC) and channels % 16:
        pytest.skip("no whole blocks")
    random = np.random.default_rng(3)
    x = random.standard_normal((2, channels, 8, 9)).astype(np.float32)
    w = random.standard_normal((filters, channels // groups, kernel, kernel)).astype(np.float32)
    held = random.standard_normal((2, filters, 8, 9)).astype(np.float32) if added else None
    for post_ops in (["relu"], ["clip:0:6"], ["elu:1", "hardsigmoid:0.2:0.5"]):
        chain = ["sum:2", *post_ops] if added else post_ops
        for nan_in_x, nan_held in ((False, False), (True, False), (False, True), (True, True)):
            x[0, 1, 1, 2] = np.nan if nan_in_x else 1
            if held is not None:
                held[1, 3, 4, 5] = np.nan if nan_held else 1
            elif nan_held:
                continue
            found = layer(x, w, held, order, chain, pieces)
            expected = in_order(layer(x, w, held, NCHW, chain, 1, ""), order)
            if added and kernel == 3:  # Winograd's algorithm in place: more pixels of a tile may be NaN
                np.copyto(expected, np.nan, where=np.isnan(found))
            agree(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 2])
@pytest.mark.parametrize("order", ORDERS)
def test_every_implementation_of_a_convolution(order: str, pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    x = random.standard_normal((1, 32, 16, 16)).astype(np.float32)
    x[0, 1, 1, 2] = np.nan
    choose, names = convolution_family.choose_implementation, list[str]()

    def first(problem: Any, **options: Any) -> Any:
        names[:] = [one.name for one in problem.candidates() if not one.is_reference]
        return choose(problem, **options)

    for kernel in (1, 3):
        w = random.standard_normal((32, 32, kernel, kernel)).astype(np.float32)
        expected = in_order(layer(x, w, None, NCHW, ["relu"], 1, ""), order)
        monkeypatch.setattr(convolution_family, "choose_implementation", first)
        agree(layer(x, w, None, order, ["relu"], pieces), expected)
        for name in list(names):
            monkeypatch.setattr(
                convolution_family,
                "choose_implementation",
                lambda p, name=name, **_: p.named(name) or choose(p),
            )
            agree(layer(x, w, None, order, ["relu"], pieces), expected)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("constant", [False, True])
def test_fully_connected_layers(rows: int, constant: bool) -> None:
    x, w, b = image(1, rows, 20), np.ones((9, 20), np.float32), np.ones(9, np.float32)
    for post_ops in (["relu"], ["clip:0:6"], ["max:3"]):
        inputs = [x, w, b, *([image(2, 1, 9)] if post_ops == ["max:3"] else [])]
        given = {"post_ops": post_ops}
        (expected,) = run_operator("FusedFC", list(inputs), **given)
        arrays = dict(zip("xwbo", inputs, strict=False))
        agree(computed("FusedFC", arrays, ["y"], frozen="wb" if constant else "", **given)[0], expected)
        arrays["w"] = w.copy()
        arrays["w"][3, 4] = np.nan
        (found,) = computed("FusedFC", arrays, ["y"], frozen="wb" if constant else "", **given)
        agree(found, computed("FusedFC", arrays, ["y"], engine="", **given)[0])


def test_what_is_added_to_sums_of_integers() -> None:
    random = np.random.default_rng(2)
    x, w = random.integers(0, 255, (2, 4, 5, 5), np.uint8), random.integers(-127, 127, (8, 4, 3, 3), np.int8)
    arrays = {"x": x, "w": w, "s": np.ones(1, np.float32), "a": image(3, 2, 8, 5, 5)}
    given = {"kernel": 3, "pad": 1, "post_ops": ["add:3", "relu"], "x_scale": 0.01}
    (expected,) = computed("QuantConv", arrays, ["y"], "ws", "", **given)
    assert np.isnan(expected).sum() == 2
    agree(computed("QuantConv", arrays, ["y"], "ws", **given)[0], expected)


def test_rows_beside_a_nan_keep_their_bytes() -> None:
    random = np.random.default_rng(8)
    x = random.standard_normal((3, 32, 12, 12)).astype(np.float32)
    w = random.standard_normal((32, 32, 3, 3)).astype(np.float32)
    before = layer(x, w, None, NHWC, ["relu"], 1)
    x[1, 2, 3, 4] = np.nan
    after = layer(x, w, None, NHWC, ["relu"], 1)
    assert np.isnan(after[1]).sum() == 9 * 32
    assert before[[0, 2]].tobytes() == after[[0, 2]].tobytes()


def test_numbers_are_never_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object) -> None:
        pytest.fail("it is computed again")

    monkeypatch.setattr(keeping_nan.Recomputation, "run", fail)
    with dagexec.compile("zoo:squeezenet", intra_op_threads=1, num_workers=1) as executor:
        for scale in (0, 1, 1e-40, 1e30):
            executor.run({"data": np.full((1, 3, 224, 224), scale, np.float32)})


def model(*nodes: onnx.NodeProto, **constants: Array) -> onnx.ModelProto:
    infos = [onnx.helper.make_tensor_value_info("x", 1, (2, 3, 12, 12)), onnx.helper.make_empty_tensor_value_info("y")]
    initial = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = onnx.helper.make_graph(nodes, "g", infos[:1], infos[1:], initial)
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.parametrize("net_type", ["simple", "dag"])
def test_a_pixel_that_is_nan_reaches_as_many_as_in_onnxruntime(optimize: bool, net_type: Any) -> None:
    node, random = onnx.helper.make_node, np.random.default_rng(0)
    filters = random.standard_normal((16, 3, 3, 3)).astype(np.float32)
    proto = model(
        node("Conv", ["x", "w"], ["a"], pads=[1] * 4), node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "v"], ["c"]), node("Add", ["b", "c"], ["d"]), node("Clip", ["d", "low", "high"], ["y"]),
        w=filters, v=random.standard_normal((16, 16, 1, 1)).astype(np.float32), low=np.float32(0), high=np.float32(6),
    )  # fmt: skip
    x = random.standard_normal((2, 3, 12, 12)).astype(np.float32)
    x[0, 1, 5, 5] = np.nan
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    (expected,) = session.run(None, {"x": x})
    assert np.isnan(expected).sum() == 144
    with dagexec.compile(proto, optimize=optimize, net_type=net_type) as executor:
        place = np.empty_like(expected)
        for _ in range(2):
            agree(executor.run({"x": x})["y"], expected)
            agree(executor.run({"x": x}, out={"y": place})["y"], expected)


@pytest.mark.parametrize("pieces", [1, 2])
def test_who_asks_for_any_pays_for_no_look_and_gets_the_same_numbers(
    pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def counted(operator: OneDNNOperator, step: Step, *more: Any) -> Step:
        looks.append(operator.definition.type)
        return step

    choices.forget()  # schedules that other tests measured are for one of the two only
    feeds = {"data": np.random.default_rng(3).standard_normal((1, 1, 28, 28)).astype(np.float32)}
    with dagexec.compile("zoo:lenet", intra_op_threads=pieces) as executor:
        expected = executor.run(feeds)
    monkeypatch.setattr(operator_module, "keeping_nan", counted)
    monkeypatch.setattr(operator_module, "scanning", counted)
    with dagexec.compile("zoo:lenet", intra_op_threads=pieces) as executor:
        executor.run(feeds)
    assert looks
    looks.clear()
    with dagexec.compile("zoo:lenet", intra_op_threads=pieces, nan="any") as executor:
        found = executor.run(feeds)
    assert not looks
    assert {name: array.tobytes() for name, array in found.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }


def test_nan_is_kept_or_any() -> None:
    with pytest.raises(SettingError, match="nan is one of kept, any, not 'lost'"):
        dagexec.compile("zoo:lenet", nan="lost")  # type: ignore[arg-type]
