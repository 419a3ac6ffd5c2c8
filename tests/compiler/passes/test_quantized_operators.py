"""quantized-operators: what lies between DequantizeLinear and QuantizeLinear, on integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from dagexec.compiler.passes.quantized_operators import PASS
from dagexec.core.model import Model
from dagexec.core.node import arguments_of
from dagexec.core.proto import OperatorDef
from dagexec.errors import ArgumentError
from tests.compiler.passes.models import assert_close, feeds_for, listed, model_of, normal, op, other_order, outputs_of

Array = npt.NDArray[Any]


def q(x: str, y: str, name: str = "a") -> OperatorDef:
    return op("QuantizeLinear", [x, f"{name}_scale", f"{name}_zero"], [y])


def dq(x: str, y: str, name: str = "a") -> OperatorDef:
    return op("DequantizeLinear", [x, f"{name}_scale", f"{name}_zero"], [y])


def parameters(scale: float, zero: int, name: str = "a", dtype: Any = np.uint8) -> dict[str, Array]:
    return {f"{name}_scale": np.array(scale, np.float32), f"{name}_zero": np.array(zero, dtype)}


RANDOM = np.random.default_rng(3)
A, B, Y = parameters(0.04, 128), parameters(0.03, 100, "b"), parameters(0.06, 90, "y")
W = {
    "w": RANDOM.integers(-127, 128, (4, 4, 3, 3)).astype(np.int8),
    "w_scale": RANDOM.uniform(0.001, 0.004, 4).astype(np.float32),
}
DQ_W = op("DequantizeLinear", ["w", "w_scale"], ["wf"], axis=0)
CONV = op("Conv", ["xd", "wf"], ["c"], kernel=3, pad=1)
INPUT = [q("x", "xq"), dq("xq", "xd")]
OUTPUT = [q("c", "yq", "y"), dq("yq", "y", "y")]


def folded(model: Model, step: float = 0.0) -> list[str]:
    """What the pass leaves. Results are within one `step` of the output's quantization, and nearly all equal."""
    result = PASS.apply(model)
    feeds = feeds_for(model)
    wanted, found = outputs_of(model, feeds), outputs_of(result.model, feeds)
    reordered = outputs_of(result.model, feeds, other_order(result.model))
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype
        difference = np.abs(found[name].astype(np.float64) - array.astype(np.float64))
        assert difference.max() <= step * 1.001 + 1e-5 * float(np.abs(array).max())
        assert (difference > step / 2).mean() < 0.02 if step else True
        np.testing.assert_array_equal(reordered[name], found[name])
    return listed(result.model)


def test_a_convolution_between_them_computes_on_integers() -> None:
    model = model_of([*INPUT, DQ_W, CONV, *OUTPUT], **A, **W, **Y)
    assert folded(model, 0.06) == [
        "QuantizeLinear x a_scale a_zero -> xq",
        "QuantConv xq wf/int8 wf/scale -> yq",
        "DequantizeLinear yq y_scale y_zero -> y",
    ]


@pytest.mark.parametrize(
    ("activation", "post_op"),
    [
        (op("Relu", ["c"], ["r"]), "relu"),
        (op("LeakyRelu", ["c"], ["r"], alpha=0.25), "leaky_relu:0.25"),
        (op("Clip", ["c"], ["r"], min=0.0, max=1.5), "clip:0.0:1.5"),
        (op("Clip", ["c"], ["r"], min=0.0), f"clip:0.0:{float(np.finfo(np.float32).max)!r}"),
        (op("ReluN", ["c"], ["r"], n=2.0), "clip:0.0:2.0"),
    ],
)
def test_the_activation_and_the_bias_go_in(activation: OperatorDef, post_op: str) -> None:
    convolution = op("Conv", ["xd", "wf", "b"], ["c"], kernel=3, stride=2, group=1)
    model = model_of([*INPUT, DQ_W, convolution, activation, q("r", "y", "y")], **A, **W, **Y, b=normal(4))
    assert folded(model, 1.0)[1:] == ["QuantConv xq wf/int8 wf/scale c/bias -> y"]
    arguments = arguments_of(PASS.apply(model).model.net.op[-1], "")
    assert arguments.strings("post_ops") == [post_op]
    assert (arguments.int("bias", 0), arguments.int("stride", 0)) == (1, 2)
    assert (arguments.string("to", ""), arguments.int("y_zero_point", 0)) == ("uint8", 90)


def test_without_a_quantization_after_it_the_result_is_float32() -> None:
    model = model_of([*INPUT, DQ_W, CONV, op("Sigmoid", ["c"], ["y"])], **A, **W)
    assert folded(model) == [
        "QuantizeLinear x a_scale a_zero -> xq", "QuantConv xq wf/int8 wf/scale -> c", "Sigmoid c -> y",
    ]  # fmt: skip


@pytest.mark.parametrize("quantized", [True, False])
def test_the_sum_with_another_tensor_goes_in(quantized: bool) -> None:
    other = [q("z", "zq", "b"), dq("zq", "zd", "b")] if quantized else [op("Sigmoid", ["z"], ["zd"])]
    operators = [*INPUT, DQ_W, CONV, *other, op("Add", ["zd", "c"], ["s"]), op("Relu", ["s"], ["r"]), q("r", "y", "y")]
    inputs = {"x": (2, 4, 6, 6), "z": (2, 4, 6, 6)}
    model = model_of(operators, inputs=inputs, **A, **B, **W, **Y)
    assert folded(model, 1.0)[-1] == f"QuantConv xq wf/int8 wf/scale {'zq' if quantized else 'zd'} -> y"
    arguments = arguments_of(PASS.apply(model).model.net.op[-1], "")
    assert arguments.strings("post_ops") == ["add:3", "relu"]
    assert arguments.int("add_zero_point", 0) == (100 if quantized else 0)


def test_two_quantized_tensors_are_added_as_integers() -> None:
    operators = [*INPUT, q("z", "zq", "b"), dq("zq", "zd", "b"), op("Add", ["xd", "zd"], ["s"]), q("s", "y", "y")]
    model = model_of(operators, inputs={"x": (3, 5), "z": (3, 5)}, **A, **B, **Y)
    assert folded(model, 1.0)[-1] == "QuantAdd xq zq -> y"


def test_maxima_and_moves_are_done_on_integers_and_what_undoes_itself_goes() -> None:
    operators = [
        *INPUT, op("MaxPool", ["xd"], ["p"], kernel=2, stride=2), op("Flatten", ["p"], ["f"]), q("f", "fq"),
        dq("fq", "y"),
    ]  # fmt: skip
    assert folded(model_of(operators, **A)) == [
        "QuantizeLinear x a_scale a_zero -> xq", "MaxPool xq -> p/integers", "Flatten p/integers -> f/integers",
        "DequantizeLinear f/integers a_scale a_zero -> y",
    ]  # fmt: skip


@pytest.mark.parametrize("zero", [0, 128])
def test_a_relu_of_integers_cuts_them_at_the_zero_point(zero: int) -> None:
    operators = [*INPUT, op("Relu", ["xd"], ["r"]), q("r", "rq"), dq("rq", "y")]
    assert folded(model_of(operators, **parameters(0.04, zero))) == [
        "QuantizeLinear x a_scale a_zero -> xq",
        "Clip xq -> r/integers",
        "DequantizeLinear r/integers a_scale a_zero -> y",
    ]


def test_the_quantization_of_a_concatenation_is_one_of_each_part_that_needs_it() -> None:
    operators = [
        *INPUT, q("z", "zq", "y"), dq("zq", "zd", "y"), op("Concat", ["xd", "zd"], ["c"], axis=1), *OUTPUT,
    ]  # fmt: skip
    model = model_of(operators, inputs={"x": (2, 3), "z": (2, 5)}, **A, **Y)
    assert folded(model) == [
        "QuantizeLinear x a_scale a_zero -> xq", "DequantizeLinear xq a_scale a_zero -> xd",
        "QuantizeLinear z y_scale y_zero -> zq", "QuantizeLinear xd y_scale y_zero -> xd/as_yq",
        "Concat xd/as_yq zq -> yq", "DequantizeLinear yq y_scale y_zero -> y",
    ]  # fmt: skip


def test_another_scale_is_another_value() -> None:
    operators = [*INPUT, q("xd", "zq", "y"), dq("zq", "y", "y")]
    model = model_of(operators, **A, **Y)
    assert folded(model) == listed(model)
    joined = [op("Concat", ["xd", "zd"], ["c"]), op("Abs", ["c"], ["y"])]
    operators = [*INPUT, q("z", "zq", "b"), dq("zq", "zd", "b"), *joined]
    model = model_of(operators, inputs={"x": (2, 3), "z": (2, 5)}, **A, **B)
    assert folded(model) == listed(model)


PRODUCTS = {
    "FC": (op("FC", ["xd", "wf", "b"], ["c"]), True),
    "Gemm": (op("Gemm", ["xd", "wf", "b"], ["c"], trans_b=1), True),
    "Gemm, columns": (op("Gemm", ["xd", "wf", "b"], ["c"]), False),
    "BatchMatMul": (op("BatchMatMul", ["xd", "wf"], ["c"], broadcast=1), False),
    "MatMul": (op("MatMul", ["xd", "wf"], ["c"], trans_b=1), True),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_constant_matrices(name: str) -> None:
    product, rows = PRODUCTS[name]
    weights = np.random.default_rng(4).integers(-127, 128, (5, 8)).astype(np.int8)
    given = {
        "w": weights if rows else np.ascontiguousarray(weights.T),
        "w_scale": np.random.default_rng(5).uniform(0.001, 0.004, 5).astype(np.float32),
        "b": normal(5),
    }
    added = [] if len(product.input) == 3 else [op("Add", ["c", "b"], ["d"])]
    last = q("d" if added else "c", "y", "y")
    dequantized = op("DequantizeLinear", ["w", "w_scale"], ["wf"], axis=0 if rows else 1)
    model = model_of([*INPUT, dequantized, product, *added, last], inputs={"x": (3, 8)}, **A, **given, **Y)
    found = folded(model, 1.0)
    assert [text.split()[0] for text in found] == ["QuantizeLinear", "QuantFC"]
    constants = PASS.apply(model).model.parameters
    np.testing.assert_array_equal(constants["wf/int8"], weights)


def test_a_bias_of_integers_in_its_own_unit_stays_what_it_is() -> None:
    bias = np.array([123456789, -5, 7, 2**31 - 1], np.int32)
    given = {"b": bias, "b_scale": (np.float32(0.04) * W["w_scale"]).astype(np.float32)}
    operators = [
        *INPUT, DQ_W, op("DequantizeLinear", ["b", "b_scale"], ["bf"], axis=0),
        op("Conv", ["xd", "wf", "bf"], ["y"], kernel=3),
    ]  # fmt: skip
    model = model_of(operators, **A, **W, **given)
    np.testing.assert_array_equal(PASS.apply(model).model.parameters["y/bias"], bias)


def test_a_copy_of_a_bias_of_integers_is_one() -> None:
    given = {"b": np.array([1, -5, 7, 2000], np.int32), "b_scale": (np.float32(0.04) * W["w_scale"])}
    operators = [
        *INPUT, DQ_W, op("DequantizeLinear", ["b", "b_scale"], ["other"], axis=0), op("Copy", ["other"], ["bf"]),
        op("Conv", ["xd", "wf", "bf"], ["c"], kernel=3), *OUTPUT,
    ]  # fmt: skip
    model = model_of(operators, **A, **W, **Y, **given)
    folded(model, 0.06)
    np.testing.assert_array_equal(PASS.apply(model).model.parameters["c/bias"], given["b"])


def test_unsigned_weights_with_a_zero_point_in_the_middle_become_signed() -> None:
    given = {"w": W["w"].view(np.uint8) ^ np.uint8(128), "w_scale": W["w_scale"], "w_zero": np.full(4, 128, np.uint8)}
    dequantized = op("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wf"], axis=0)
    model = model_of([*INPUT, dequantized, CONV, *OUTPUT], **A, **given, **Y)
    folded(model, 0.06)
    np.testing.assert_array_equal(PASS.apply(model).model.parameters["wf/int8"], W["w"])


def left_alone() -> dict[str, Model]:
    """Nets whose convolution or sum stays as it is."""
    middle = {**W, "w_zero": np.array([0, 0, 0, 100], np.int8)}
    shifted = op("DequantizeLinear", ["w", "w_scale", "w_zero"], ["wf"], axis=0)
    along_input = op("DequantizeLinear", ["w", "w_scale"], ["wf"], axis=1)
    wide = parameters(0.01, 9, dtype=np.uint16)
    waits = OperatorDef()
    waits.CopyFrom(CONV)
    waits.control_input.append("x")
    return {
        "weights that int8 does not hold": model_of([*INPUT, shifted, CONV, *OUTPUT], **A, **middle, **Y),
        "scales along the input channels": model_of([*INPUT, along_input, CONV, *OUTPUT], **A, **W, **Y),
        "an input of 16 bits": model_of([*INPUT, DQ_W, CONV, *OUTPUT], **wide, **W, **Y),
        "a control input": model_of([*INPUT, DQ_W, waits, *OUTPUT], **A, **W, **Y),
        "weights of floats": model_of([*INPUT, op("Conv", ["xd", "w"], ["y"], kernel=3)], **A, w=normal(4, 4, 3, 3)),
    }


@pytest.mark.parametrize("name", left_alone())
def test_what_has_no_form_on_integers_stays(name: str) -> None:
    model = left_alone()[name]
    assert not any(text.startswith("Quant") and not text.startswith("QuantizeL") for text in folded(model))


def test_an_intermediate_value_that_is_an_output_is_still_written() -> None:
    model = model_of([*INPUT, DQ_W, CONV, *OUTPUT], ("c", "y"), **A, **W, **Y)
    result = PASS.apply(model)
    found, wanted = outputs_of(result.model, feeds_for(model)), outputs_of(model, feeds_for(model))
    assert_close({"c": found["c"]}, {"c": wanted["c"]})


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan])
def test_a_scale_that_is_none_is_named(scale: float) -> None:
    model = model_of([*INPUT, DQ_W, CONV, *OUTPUT], **parameters(scale, 0), **W, **Y)
    with pytest.raises(ArgumentError, match="scales 'a_scale' must be finite and above 0"):
        PASS.apply(model)


def test_a_net_without_them_is_left_alone() -> None:
    model = model_of([op("Relu", ["x"], ["y"])])
    assert PASS.apply(model).model is model
