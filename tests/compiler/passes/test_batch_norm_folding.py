"""batch-norm-folding: affine maps of channels before and after layers."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from dagexec.compiler.passes.affine import Affine, Channels
from dagexec.compiler.passes.batch_norm_folding import PASS
from dagexec.compiler.passes.linear_layer import LinearLayer
from dagexec.core.model import Model
from dagexec.core.proto import OperatorDef
from tests.compiler.passes.models import Array, model_of, normal, op, rewritten, unchanged

CONVOLUTION = op("Conv", ["x", "w"], ["c"], kernel=3, pad=1)


def parameters(filters: int = 8, channels: int = 4, kernel: tuple[int, ...] = (3, 3)) -> dict[str, Array]:
    """A filter `w`, its bias `b`, batch normalization `s`, `o`, `m`, `v`; by channel `k` (M,) and `k1` (M, 1, 1)."""
    return {
        "w": normal(filters, channels, *kernel),
        "b": normal(filters),
        **{name: normal(filters) for name in "som"},
        "v": np.abs(normal(filters)) + np.float32(0.1),
        "k": normal(filters),
        "k1": normal(filters, *(1 for _ in kernel)),
        "n1": normal(channels, *(1 for _ in kernel)),
        "scalar": np.array(1.5, np.float32),
    }


def bn(source: str, target: str, **arguments: int | float | str) -> OperatorDef:
    return op("SpatialBN", [source, "s", "o", "m", "v"], [target], is_test=1, **arguments)


AFTER = [
    bn("c", "y", epsilon=1e-3),
    op("Mul", ["c", "k1"], ["y"]),
    op("Mul", ["k1", "c"], ["y"]),
    op("Add", ["c", "k"], ["y"], broadcast=1, axis=1),
    op("Sub", ["c", "k1"], ["y"]),
    op("Sub", ["k1", "c"], ["y"]),
    op("Div", ["c", "k1"], ["y"]),
    op("Add", ["c", "scalar"], ["y"]),
    op("Sum", ["k1", "c"], ["y"]),
    op("Negative", ["c"], ["y"]),
]


@pytest.mark.parametrize("after", AFTER, ids=lambda one: f"{one.type} {one.input[0]}")
@pytest.mark.parametrize("bias", [False, True])
def test_what_follows_a_convolution_goes_into_its_weights_and_bias(after: OperatorDef, bias: bool) -> None:
    convolution = op("Conv", ["x", "w", "b"] if bias else ["x", "w"], ["c"], kernel=3, pad=1)
    (left,) = rewritten(PASS, model_of([convolution, after], **parameters()))
    assert left.startswith("Conv x w/1")
    assert left.endswith("-> y")


def test_what_is_broadcast_along_channels_is_folded_into_a_convolution_of_volumes() -> None:
    """Whatever the number of axes: the sizes that are not known do not add up to a tensor that no machine holds."""
    volumes = {"x": (2, 4, 5, 5, 5)}
    convolution, after = (
        op("Conv", ["x", "w"], ["c"], kernels=[3, 3, 3]),
        op("Add", ["c", "k"], ["y"], broadcast=1, axis=1),
    )
    model = model_of([convolution, after], inputs=volumes, w=normal(8, 4, 3, 3, 3), k=normal(8))
    assert rewritten(PASS, model) == ["Conv x w/1 c/bias -> y"]


def test_a_chain_is_folded_at_once() -> None:
    operators = [CONVOLUTION, bn("c", "d"), op("Mul", ["d", "k1"], ["e"]), op("Add", ["e", "k1"], ["y"])]
    model = model_of(operators, **parameters())
    assert rewritten(PASS, model) == ["Conv x w/1 c/bias -> y"]
    assert PASS.apply(model).changes == ("Conv 'c' takes in SpatialBN 'd', Mul 'e', Add 'y'",)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_groups_and_orders(op_type: str, order: str, group: int) -> None:
    given = parameters()
    shape = [8, 4 // group, 3, 3] if op_type == "Conv" else [4, 8 // group, 3, 3]
    given["w"] = normal(*shape) if order == "NCHW" else np.moveaxis(normal(*shape), 1, -1).copy()
    layer = op(op_type, ["x", "w", "b"], ["c"], kernel=3, stride=2, group=group, order=order)
    size = (2, 4, 7, 7) if order == "NCHW" else (2, 7, 7, 4)
    model = model_of([layer, bn("c", "y", order=order)], inputs={"x": size}, **given)
    assert len(rewritten(PASS, model)) == 1
    scale = op("Mul", ["x", "n1" if order == "NCHW" else "n"], ["a"])
    layer = op(op_type, ["a", "w", "b"], ["y"], kernel=3, stride=2, group=group, order=order)
    model = model_of([scale, layer], inputs={"x": size}, n=normal(4), **given)
    assert len(rewritten(PASS, model)) == 1


@pytest.mark.parametrize("group", [1, 2])
def test_what_comes_before_a_window_without_padding_is_folded_too(group: int) -> None:
    given = parameters(channels=4 // group)
    given["n1"] = normal(4, 1, 1)
    operators = [
        op("Sub", ["x", "n1"], ["a"]),
        op("Mul", ["a", "n1"], ["d"]),
        op("Conv", ["d", "w"], ["y"], kernel=3, group=group),
    ]
    assert rewritten(PASS, model_of(operators, **given)) == ["Conv x w/1 y/bias -> y"]


def test_of_what_comes_before_padding_only_a_factor_is_folded() -> None:
    operators = [
        op("Sub", ["x", "n1"], ["a"]),
        op("Mul", ["a", "n1"], ["d"]),
        op("Conv", ["d", "w"], ["y"], kernel=3, pad=1),
    ]
    assert rewritten(PASS, model_of(operators, **parameters())) == ["Sub x n1 -> a", "Conv a w/1 -> y"]


def test_one_and_three_spatial_axes() -> None:
    for kernel, size in (((3,), (2, 4, 9)), ((2, 2, 2), (2, 4, 3, 4, 5))):
        layer = op("Conv", ["x", "w"], ["c"], kernels=list(kernel))
        model = model_of([layer, bn("c", "y")], inputs={"x": size}, **parameters(kernel=kernel))
        assert len(rewritten(PASS, model)) == 1


@pytest.mark.parametrize("axis", [1, 2])
def test_a_fully_connected_layer(axis: int) -> None:
    shape = (3, 5) if axis == 1 else (3, 2, 5)
    operators = [
        op("Mul", ["x", "f"], ["a"]),
        op("Sub", ["a", "f"], ["e"]),
        op("FC", ["e", "w", "b"], ["c"], axis=axis),
        op("Mul", ["c", "k"], ["d"]),
        op("Add", ["d", "k"], ["y"]),
    ]
    given = {"w": normal(8, 5), "b": normal(8), "k": normal(8), "f": normal(5)}
    assert rewritten(PASS, model_of(operators, inputs={"x": shape}, **given)) == ["FC x w/1 c/bias -> y"]


def test_float64_stays_float64() -> None:
    given = {name: array.astype(np.float64) for name, array in parameters().items()}
    result = PASS.apply(model_of([CONVOLUTION, bn("c", "y")], **given))
    assert result.model.parameters["w/1"].dtype == np.float64
    assert result.changes


def test_what_follows_a_normalization_that_stays_joins_its_scale_and_bias() -> None:
    given = parameters(filters=4)
    operators = [bn("x", "a"), op("Mul", ["a", "k1"], ["d"]), op("Add", ["d", "k1"], ["e"]), op("Relu", ["e"], ["y"])]
    assert rewritten(PASS, model_of(operators, **given)) == ["SpatialBN x s/1 o/1 m v -> e", "Relu e -> y"]


def not_folded() -> dict[str, Model]:
    given = parameters()
    normalization = bn("c", "y")
    waits = OperatorDef()
    waits.CopyFrom(normalization)
    waits.control_input.append("x")
    remote = OperatorDef()
    remote.CopyFrom(normalization)
    remote.device_option.device_type = 1
    chosen = OperatorDef()
    chosen.CopyFrom(CONVOLUTION)
    chosen.engine = "WINOGRAD"
    half = {name: array.astype(np.float16) for name, array in given.items()}
    squared = parameters(filters=6)
    zero = {**given, "k1": np.zeros((8, 1, 1), np.float32)}
    huge = {**given, "w": given["w"] * np.float32(1e30), "k1": np.full((8, 1, 1), 1e30, np.float32)}
    before = {**parameters(4, 4), "w": normal(8, 4, 3, 3)}
    same = op("Conv", ["d", "w"], ["y"], kernel=3, legacy_pad=4)
    return {
        "another reader": model_of([CONVOLUTION, normalization, op("Relu", ["c"], ["z"])], ["y", "z"], **given),
        "an output": model_of([CONVOLUTION, normalization], ["y", "c"], **given),
        "control input": model_of([CONVOLUTION, waits], **given),
        "another device": model_of([CONVOLUTION, remote], **given),
        "an engine asked for": model_of([chosen, normalization], **given),
        "fed weights": model_of([CONVOLUTION, normalization], inputs={"x": (2, 4, 6, 6), "w": (8, 4, 3, 3)}, **given),
        "fed scale": model_of([CONVOLUTION, normalization], inputs={"x": (2, 4, 6, 6), "s": (8,)}, **given),
        "overwritten": model_of(
            [CONVOLUTION, bn("c", "d"), op("Relu", ["d"], ["d"]), op("Abs", ["d"], ["y"])], **given
        ),
        "a number for each pixel": model_of([CONVOLUTION, op("Mul", ["c", "p"], ["y"])], p=normal(6, 6), **given),
        "a number for each image": model_of([CONVOLUTION, op("Mul", ["c", "p"], ["y"])], p=normal(2, 1, 1, 1), **given),
        "more axes": model_of([CONVOLUTION, op("Mul", ["c", "p"], ["y"])], p=normal(1, 1, 8, 1, 1), **given),
        "channels elsewhere": model_of([CONVOLUTION, bn("c", "y", order="NHWC")], **squared),
        "float16": model_of([CONVOLUTION, normalization], **half),
        "a quotient by zero": model_of([CONVOLUTION, op("Div", ["c", "k1"], ["y"])], **zero),
        "a number over it": model_of([CONVOLUTION, op("Div", ["k1", "c"], ["y"])], **given),
        "weights beyond all numbers": model_of([CONVOLUTION, op("Mul", ["c", "k1"], ["y"])], **huge),
        "padding that is computed": model_of([bn("x", "d"), same], **before),
        "a constant of another type": model_of(
            [CONVOLUTION, op("Mul", ["c", "k1"], ["y"])], **{**given, "k1": given["k1"].astype(np.float64)}
        ),
        "itself twice": model_of([CONVOLUTION, op("Add", ["c", "c"], ["y"])], **given),
    }


@pytest.mark.parametrize("why", not_folded())
def test_it_is_not_folded_for(why: str) -> None:
    assert unchanged(PASS, not_folded()[why])


def test_weights_that_others_use_too_are_not_changed() -> None:
    operators = [CONVOLUTION, bn("c", "y"), op("Conv", ["x", "w"], ["z"], kernel=3)]
    model = model_of(operators, ["y", "z"], **parameters())
    assert rewritten(PASS, model) == ["Conv x w/1 c/bias -> y", "Conv x w -> z"]


def test_scaling_the_inputs_of_a_large_layer_takes_no_more_than_its_new_weights() -> None:
    weights, factor = normal(2000, 300), normal(300).astype(np.float64)
    source, result = (Channels(count, 1, 2, weights.dtype) for count in (300, 2000))
    layer = LinearLayer(0, weights, None, 1, 1, False, False, source, result)
    tracemalloc.start()
    try:
        scaled = layer.with_input_map(Affine(factor, np.zeros(300)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(scaled.weights, weights * factor.astype(np.float32))
    assert peak < 1.2 * weights.nbytes
