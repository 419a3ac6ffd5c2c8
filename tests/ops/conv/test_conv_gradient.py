"""The gradients of convolution and transposed convolution, against central differences in float64.

The loss is linear in each input, the values are small integers and the step is a power of two: so the differences are
exact, and results are compared bit by bit.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.errors import ArgumentError, DagexecError, ShapeError
from dagexec.ops.families.conv.choice import ENGINES
from tests.ops.conv.test_conv import CUBE, DILATED, LINE, SPARSE, SQUARE, STRIDED, Case, Named, cases, cost_of
from tests.ops.conv.test_conv_transposed import TransposedCase, transposed_cases
from tests.ops.drawing import drawn
from tests.ops.gradients import numerical_gradients
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import Array

STEP = 2.0**-4
AnyCase = Case | TransposedCase


def forward_type(case: AnyCase) -> str:
    return "Conv" if isinstance(case, Case) else "ConvTranspose"


def output_gradient(case: AnyCase) -> Array:
    """dY in the layout of the case, in float64."""
    (y,) = run_operator(forward_type(case), list(case.fed()), **case.arguments())
    return np.random.default_rng(case.seed + 1).integers(-3, 4, y.shape).astype(np.float64)


def expected_gradients(case: AnyCase, gradient: Array) -> list[Array]:
    """dfilter, dbias (with a bias) and dX, by central differences."""
    inputs = case.fed()
    names = [f"x{index}" for index in range(len(inputs))]
    forward = operator_def(forward_type(case), names, ["y"], **case.arguments())
    order = [1, 2, 0] if case.bias else [1, 0]
    return numerical_gradients(forward, inputs, [gradient], order, step=STEP)


def found_gradients(case: AnyCase, gradient: Array, outputs: int = 0, engine: str = "", **more: object) -> list[Array]:
    x, weights, *_ = case.fed()
    arguments: Named = {**case.arguments(), **({} if case.bias else {"no_bias": 1}), **more}  # type: ignore[dict-item]
    count = outputs or (3 if case.bias else 2)
    kind = f"{forward_type(case)}Gradient"
    return run_operator(kind, [x, weights, gradient.astype(x.dtype)], count, engine=engine, **arguments)


def check(case: AnyCase) -> None:
    reproduction = f"reproduce with: check({case})"
    gradient = output_gradient(case)
    found = found_gradients(case, gradient)
    for name, one, other in zip(["dfilter", "dbias", "dX"][:: 1 if case.bias else 2], found,
                                expected_gradients(replace(case, dtype="float64"), gradient), strict=True):  # fmt: skip
        assert one.dtype == np.dtype(case.dtype), reproduction
        np.testing.assert_array_equal(one, other.astype(case.dtype), err_msg=f"{name}; {reproduction}")


@pytest.mark.slow
@given(cases())
@drawn(150)
def test_the_gradients_of_every_convolution_are_its_differences(case: Case) -> None:
    check(case)


@pytest.mark.slow
@given(transposed_cases())
@drawn(150)
def test_the_gradients_of_every_transposed_convolution_are_its_differences(case: TransposedCase) -> None:
    check(case)


GEOMETRIES = {"line": LINE, "square": SQUARE, "dilated": DILATED, "strided": STRIDED, "sparse": SPARSE, "cube": CUBE}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize(("group", "per_group", "multiplier"), [(1, 3, 4), (2, 3, 2), (4, 1, 1), (4, 1, 2)])
@pytest.mark.parametrize("geometry", ["line", "square", "sparse"])
def test_every_type_order_and_group_has_gradients(
    geometry: str, group: int, per_group: int, multiplier: int, order: str, dtype: str
) -> None:
    check(Case(GEOMETRIES[geometry], 2, group, per_group, multiplier, order=order, dtype=dtype))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_blocks_of_a_few_pixels_give_the_same_gradients(geometry: object, order: str) -> None:
    case = Case(geometry, 3, 2, 2, 2, order=order)  # type: ignore[arg-type]
    gradient = output_gradient(case)
    depth = 4 * int(np.prod(case.geometry.kernel))
    for pixels in (1, 2, 7, 40):
        found = found_gradients(case, gradient, ws_nbytes_limit=pixels * (depth + 4 * 200) * 4)
        for one, other in zip(found, found_gradients(case, gradient), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_engine_computes_the_gradient_of_the_input_where_it_applies(engine: str, order: str) -> None:
    case = Case(SQUARE, 2, 2, 3, 2, order=order, dtype="float64")
    gradient = output_gradient(case) / 7
    expected = found_gradients(case, gradient)
    found = found_gradients(case, gradient, engine=engine)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
    assert found[0].tobytes() == expected[0].tobytes(), "the gradient of the filter has one algorithm"
    assert found[2].tobytes() != expected[2].tobytes()


PASSED_OVER = {
    "one tap": ({"kernel": 1}, "the columns of a 1x1 filter are the image itself"),
    "strides": ({"kernel": 3, "strides": [2, 1]}, "with strides [2, 1] the columns are summed back into the image"),
    "taps": ({"kernel": 2}, "it needs 3 taps along an axis, and 3 or 1 along the others, found kernel [2, 2]"),
}


@pytest.mark.parametrize(("arguments", "reason"), PASSED_OVER.values(), ids=PASSED_OVER)
def test_an_engine_that_does_not_compute_a_gradient_is_skipped_with_a_reason(
    arguments: Named, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    size = int(str(arguments["kernel"]))
    x, weights = np.ones((1, 2, 9, 9), np.float32), np.ones((2, 2, size, size), np.float32)
    (y,) = run_operator("Conv", [x, weights], **arguments)
    with caplog.at_level(logging.INFO, "dagexec"):
        run_operator("ConvGradient", [x, weights, y], 2, engine="WINOGRAD", no_bias=1, **arguments)
    assert f"engine WINOGRAD skipped: {reason}" in caplog.text
    assert "skipped: the gradient of a filter is the product of dY and the columns of X" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "dagexec"):
        run_operator("ConvTranspose", [x, weights], engine="WINOGRAD", **arguments)
        run_operator("ConvTranspose", [x, weights], **arguments)
    [line] = [line for line in caplog.messages if " skipped: " in line]
    assert line.startswith("ConvTranspose 'y0'")
    assert line.endswith(f"engine WINOGRAD skipped: {reason}")


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_an_engine_computes_a_transposed_convolution_where_it_applies(engine: str) -> None:
    rng = np.random.default_rng(6)
    x, weights = rng.standard_normal((2, 4, 9, 8)), rng.standard_normal((4, 3, 3, 3))
    (expected,) = run_operator("ConvTranspose", [x, weights], kernel=3, pad=1)
    (found,) = run_operator("ConvTranspose", [x, weights], kernel=3, pad=1, engine=engine)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert found.tobytes() != expected.tobytes()


def check_engine(case: AnyCase, engine: str) -> None:
    """The data gradient by an engine, against the default's; the operator's other inputs and outputs do not matter.

    With small integers every sum is exact in float64, and the engines that transform are off by the rounding of sums
    below 1e4: 1e-8 leaves room for the growth of Winograd's matrices, 14.3 along each of three axes.
    """
    case = replace(case, dtype="float64")
    if isinstance(case, Case):
        gradient = output_gradient(case)
        x, weights, *_ = case.fed()
        inputs, op_type = [x, weights, gradient], "ConvGradient"
        arguments: Named = {**case.arguments(), "wanted": ["input"]}
    else:
        inputs, op_type, arguments = case.fed(), "ConvTranspose", case.arguments()
    (expected,) = run_operator(op_type, inputs, **arguments)
    (found,) = run_operator(op_type, inputs, engine=engine, **arguments)
    atol = 0 if engine == "DIRECT" else 1e-8
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol, err_msg=f"check_engine({case}, {engine!r})")


def with_unit_strides(case: AnyCase) -> AnyCase:
    """The case with strides of 1, where a data gradient is a convolution; without pads, if these no longer fit."""
    if isinstance(case, Case):
        return replace(case, geometry=replace(case.geometry, stride=(1,) * case.geometry.rank))
    rank = len(case.size)
    found = replace(case, stride=(1,) * rank, adj=tuple(map(min, case.adj, (size - 1 for size in case.dilation))))
    left = (full - head - tail for full, head, tail in zip(found.full(), *found.cut(), strict=True))
    return found if min(left) > 0 else replace(found, pads=(0,) * 2 * rank)


ANY_CASE = st.one_of(cases(), transposed_cases())


@pytest.mark.slow
@given(st.one_of(ANY_CASE, ANY_CASE.map(with_unit_strides)), st.sampled_from(sorted(ENGINES)))
@drawn(200)
def test_every_data_gradient_by_an_engine_is_that_of_the_default(case: AnyCase, engine: str) -> None:
    check_engine(case, engine)


CASES = {
    "3x3": Case(SQUARE, 2),
    "strided": Case(SPARSE, 2, order="NHWC"),
    "1x1": Case(replace(SQUARE, kernel=(1, 1), pads=(0, 0, 0, 0)), 3),
    "no bias": Case(SQUARE, 2, bias=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_only_the_gradients_that_are_wanted_are_given(case: Case) -> None:
    gradient = output_gradient(case)
    names = ["filter", "bias", "input"] if case.bias else ["filter", "input"]
    every = dict(zip(names, found_gradients(case, gradient), strict=True))
    leaving_out = found_gradients(case, gradient, len(names) - 1)
    for name, array in zip(names, leaving_out, strict=False):
        np.testing.assert_array_equal(array, every[name])
    for wanted in (["input"], ["filter"], ["input", "filter"], names[1:], names[::-1]):
        found = found_gradients(case, gradient, len(wanted), wanted=wanted)
        for name, array in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(array, every[name])


@pytest.mark.parametrize("op_type", ["Conv", "ConvTranspose"])
def test_no_images_give_zero_gradients_of_the_parameters(op_type: str) -> None:
    x, weights = np.zeros((0, 2, 5, 5), np.float32), np.ones((2, 2, 3, 3), np.float32)
    y = np.zeros((0, 2, 3, 3) if op_type == "Conv" else (0, 2, 7, 7), np.float32)
    dfilter, dbias, dx = run_operator(f"{op_type}Gradient", [x, weights, y], 3, kernel=3)
    assert not dfilter.any()
    assert not dbias.any()
    assert dx.shape == x.shape


def rounded_products(a: Array, b: Array) -> Array:
    """a b with every product and every sum rounded to float16, in order."""
    out = np.zeros((len(a), b.shape[1]), np.float16)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            for k in range(a.shape[1]):
                out[i, j] = np.float16(out[i, j] + np.float16(a[i, k] * b[k, j]))
    return out


def test_float16_compute_rounds_every_product_and_sum() -> None:
    rng = np.random.default_rng(3)
    x, weights = rng.normal(size=(1, 3, 4, 4)).astype(np.float16), rng.normal(size=(2, 3, 2, 2)).astype(np.float16)
    columns = np.stack(
        [x[0, c, i : i + 3, j : j + 3].reshape(-1) for c in range(3) for i in range(2) for j in range(2)]
    )
    expected = rounded_products(weights.reshape(2, -1), columns)
    (half,) = run_operator("Conv", [x, weights], kernel=2, float16_compute=1)
    (full,) = run_operator("Conv", [x, weights], kernel=2)
    np.testing.assert_array_equal(half.reshape(2, -1), expected)
    assert (half != full).any()
    gradient = rng.normal(size=(1, 2, 3, 3)).astype(np.float16)
    arguments: Named = {"kernel": 2, "no_bias": 1, "float16_compute": 1}
    dfilter, dx = run_operator("ConvGradient", [x, weights, gradient], 2, **arguments)
    np.testing.assert_array_equal(dfilter.reshape(2, -1), rounded_products(gradient.reshape(2, -1), columns.T))
    assert dx.dtype == np.float16


def test_float16_compute_leaves_other_types_alone() -> None:
    case = Case(SQUARE)
    (plain,) = run_operator("Conv", list(case.fed()), **case.arguments())
    (found,) = run_operator("Conv", list(case.fed()), **case.arguments(), float16_compute=1)
    assert plain.tobytes() == found.tobytes()


def test_the_cost_counts_products_once_for_each_gradient_that_is_wanted() -> None:
    shapes = ((2, 4, 6, 5), (6, 2, 3, 3), (2, 6, 4, 3))
    products = 2 * (2 * 6 * 4 * 3) * (2 * 9)
    for wanted, flops in {("filter",): products, ("filter", "input"): 2 * products, ("bias",): 2 * 6 * 4 * 3}.items():
        cost = cost_of(shapes, "ConvGradient", len(wanted), kernel=3, group=2, wanted=list(wanted), no_bias=0)
        assert cost.flops == flops


IMAGE, FILTER, GRADIENT = (2, 4, 6, 5), (6, 4, 3, 3), (2, 6, 4, 3)
Refused = tuple[str, tuple[tuple[int, ...], ...], int, Named, type[DagexecError], str]
REFUSED: dict[str, Refused] = {
    "dY": ("ConvGradient", (IMAGE, FILTER, IMAGE), 3, {"kernel": 3}, ShapeError,
           r"'x2' must have shape \(2, 6, 4, 3\).*found \(2, 4, 6, 5\)"),
    "filter": ("ConvGradient", (IMAGE, (6, 4, 2, 3), GRADIENT), 3, {"kernel": 3}, ShapeError, r"\(6, 4, 3, 3\)"),
    "outputs": ("ConvGradient", (IMAGE, FILTER, GRADIENT), 1, {"kernel": 3}, ArgumentError, "found 1 output"),
    "stride": ("ConvGradient", (IMAGE, FILTER, GRADIENT), 3, {"kernel": 3, "stride": 0}, ArgumentError, r"\[0, 0\]"),
    "limit": ("ConvGradient", (IMAGE, FILTER, GRADIENT), 3, {"kernel": 3, "ws_nbytes_limit": 0}, ArgumentError,
              "'ws_nbytes_limit' must be at least 1 byte, found 0"),
    "transposed dY": ("ConvTransposeGradient", (IMAGE, (4, 6, 3, 3), (2, 6, 8, 8)), 3, {"kernel": 3}, ShapeError,
                      r"'x2' must have shape \(2, 6, 8, 7\).*found \(2, 6, 8, 8\)"),
}  # fmt: skip


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(refused: Refused) -> None:
    op_type, shapes, outputs, arguments, error, message = refused
    with pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"):
        run_operator(op_type, [np.ones(shape, np.float32) for shape in shapes], outputs, **arguments)
