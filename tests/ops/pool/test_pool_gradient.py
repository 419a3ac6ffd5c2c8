"""Gradients of the poolings, against central differences and against loops over windows in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dagexec.core.dtypes import FLOAT32, INT32
from dagexec.core.node import arguments_of
from dagexec.core.registry import schema_of
from dagexec.core.schema import Cost, OperatorCall, TensorType
from dagexec.errors import ArgumentError, DagexecError, OperatorError, ShapeError
from dagexec.ops.families.pool import window as blocks_module
from tests.ops.drawing import drawn
from tests.ops.gradients import numerical_gradients
from tests.ops.pooling import FLOATS, PoolCase, pool_cases, spread_gradients, windows
from tests.ops.running import operator_def, run_operator
from tests.ops.windows import LEGACY, SAME, SAME_LOWER, Array, Geometry, to_channels_first

POOLS = ["MaxPool", "MaxPoolWithIndex", "AveragePool", "LpPool"]
EXPONENTS = (1.0, 2.0, 3.0, 0.5, 2.5)
TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
SMALL = Geometry((7, 6), (3, 2), (2, 1), (1, 1), (1, 0, 1, 1))


def forward(case: PoolCase, x: Array) -> tuple[Array, Array | None]:
    """Y, and the mask where there is one."""
    if case.op_type.startswith("MaxPoolWithIndex"):
        y, mask = case.run(case.op_type, x, outputs=2)
        return y, mask
    return case.run(case.op_type, x)[0], None


def has_differences(case: PoolCase) -> bool:
    """False for large images, which take long, and where a window of nothing but padding has the maximum -inf."""
    return np.prod(case.geometry.size) <= 150 and all(pixels for _, pixels in windows(case.geometry))


def check_differences(case: PoolCase) -> None:
    """Compare with central differences of the forward operator. No maximum has a rival closer than 0.25."""
    x, dy = case.distinct(), case.output_gradients()
    y, mask = forward(case, x)
    outputs = ["y", "mask"] if mask is not None else ["y"]
    definition = operator_def(case.op_type, ["x"], outputs, **case.arguments())
    (expected,) = numerical_gradients(definition, [case.fed(x)], [case.fed(dy)], [0])
    expected = to_channels_first(expected) if case.order == "NHWC" else expected
    found = case.gradient(x, y, dy, mask)
    message = f"reproduce with: check_differences({case})"
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7, err_msg=message)


def check_definition(case: PoolCase, x: Array | None = None) -> None:
    """Compare with loops over the windows; X has ties and zeros."""
    x, dy = case.integers() if x is None else x, case.output_gradients()
    y, mask = forward(case, x)
    found = case.gradient(x, y, dy, mask)
    tolerance = TOLERANCE[case.dtype]
    np.testing.assert_allclose(
        found.astype(np.float64),
        spread_gradients(x, y, dy, case),
        rtol=tolerance,
        atol=1e-11 if case.dtype == "float64" else 3e-6,
        err_msg=f"reproduce with: check_definition({case})",
    )


def any_pooling(dtypes: list[str]) -> st.SearchStrategy[PoolCase]:
    return st.one_of(*(pool_cases(op_type, dtypes, EXPONENTS) for op_type in POOLS))


@pytest.mark.slow
@pytest.mark.parametrize("op_type", POOLS)
def test_gradients_are_what_central_differences_give(op_type: str) -> None:
    exponents = EXPONENTS if op_type == "LpPool" else (2.0,)

    @given(pool_cases(op_type, ["float64"], exponents).filter(has_differences))
    @drawn(60)
    def check(case: PoolCase) -> None:
        check_differences(case)

    check()


@pytest.mark.slow
@given(any_pooling(FLOATS))
@drawn(250)
def test_gradients_of_every_type_are_those_of_the_definition(case: PoolCase) -> None:
    check_definition(case)


@pytest.mark.parametrize("op_type", POOLS)
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("geometry", [
    Geometry((1, 2), (1, 2), (1, 1), (1, 3), (0,) * 4, SAME),
    Geometry((3, 4), (2, 2), (1, 2), (5, 6), (0,) * 4, SAME),
    Geometry((3, 4), (2, 2), (1, 1), (7, 5), (0,) * 4, SAME_LOWER),
])  # fmt: skip
def test_windows_whose_taps_all_miss_the_image_get_nothing(op_type: str, order: str, geometry: Geometry) -> None:
    check_definition(PoolCase(op_type, geometry, 2, 3, order))


@pytest.mark.parametrize("op_type", POOLS)
@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("legacy", [LEGACY, SAME, SAME_LOWER])
def test_computed_padding_is_that_of_the_forward_operator(op_type: str, order: str, legacy: int) -> None:
    check_definition(PoolCase(op_type, Geometry((8, 7), (3, 2), (2, 3), (1, 1), (0,) * 4, legacy), order=order))


# The rules for ties, as measured in Caffe2 for MaxPool.


def test_every_pixel_that_equals_the_maximum_gets_the_gradient() -> None:
    x = np.array([[[[1, 1, 0], [1, 0, 0], [0, 0, 0]]]], np.float32)
    dy = np.array([[[[10, 20], [30, 40]]]], np.float32)
    (y,) = run_operator("MaxPool", [x], kernel=2)
    (dx,) = run_operator("MaxPoolGradient", [x, y, dy], kernel=2)
    assert dx.tolist() == [[[[10, 30, 0], [40, 40, 40], [0, 40, 40]]]]


def test_with_an_index_only_the_first_of_them_does() -> None:
    x = np.array([[[[1, 1, 0], [1, 0, 0], [0, 0, 0]]]], np.float32)
    dy = np.array([[[[10, 20], [30, 40]]]], np.float32)
    _, mask = run_operator("MaxPoolWithIndex", [x], 2, kernel=2)
    (dx,) = run_operator("MaxPoolWithIndexGradient", [x, dy, mask], kernel=2)
    assert dx.tolist() == [[[[10, 20, 0], [30, 40, 0], [0, 0, 0]]]]


def test_the_index_decides_and_not_the_pixels() -> None:
    x = np.zeros((1, 1, 2, 3), np.float32)
    mask = np.array([[[[5, 5]]]], np.int32)
    (dx,) = run_operator("MaxPoolWithIndexGradient", [x, np.array([[[[1, 2]]]], np.float32), mask], kernel=2)
    assert dx.tolist() == [[[[0, 0, 0], [0, 0, 3]]]]


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("flat", [0, 1])
def test_index_minus_one_is_nowhere(flat: int, order: str) -> None:
    x = np.zeros((2, 3, 3), np.float32)
    mask = np.full((2, 2, 3) if order == "NHWC" else (2, 3, 2), -1, np.int64 if flat else np.int32)
    dy = np.ones(mask.shape, np.float32)
    (dx,) = run_operator("MaxPoolWithIndexGradient", [x, dy, mask], kernel=2, order=order, flat_indices=flat)
    np.testing.assert_array_equal(dx, np.zeros_like(x))


@pytest.mark.parametrize("kernel", [2, 4])
def test_pixels_that_are_not_the_maximum_get_nothing_of_an_infinite_gradient(kernel: int) -> None:
    x = np.array([[[1, 2, 3, 4]]], np.float32)
    dy = np.array([[[np.inf, 1, np.nan]]] if kernel == 2 else [[[np.nan]]], np.float32)
    (y,) = run_operator("MaxPool", [x], kernel=kernel)
    (dx,) = run_operator("MaxPoolGradient", [x, y, dy], kernel=kernel)
    np.testing.assert_array_equal(dx, [[[0, np.inf, 1, np.nan] if kernel == 2 else [0, 0, 0, np.nan]]])


def test_no_pixel_equals_a_maximum_that_is_not_a_number() -> None:
    x = np.array([[[1, np.nan, 3, 4]]], np.float32)
    (y,) = run_operator("MaxPool", [x], kernel=2)
    dy = np.ones((1, 1, 3), np.float32)
    np.testing.assert_array_equal(run_operator("MaxPoolGradient", [x, y, dy], kernel=2)[0], [[[0, 0, 0, 1]]])
    _, mask = run_operator("MaxPoolWithIndex", [x], 2, kernel=2)
    (dx,) = run_operator("MaxPoolWithIndexGradient", [x, dy, mask], kernel=2)
    np.testing.assert_array_equal(dx, [[[0, 2, 0, 1]]])


@pytest.mark.parametrize("p", EXPONENTS)
@pytest.mark.parametrize("kernel", [2, 4])
def test_the_norm_of_a_window_of_zeros_has_gradient_zero(p: float, kernel: int) -> None:
    x = np.array([[[0, 0, 0, 0], [0, 0, 0, 2]]], np.float32)
    (y,) = run_operator("LpPool", [x], kernel=kernel, p=p)
    (dx,) = run_operator("LpPoolGradient", [x, y, np.ones_like(y)], kernel=kernel, p=p)
    np.testing.assert_allclose(dx, [[[0, 0, 0, 0], [0, 0, 0, 1]]], rtol=1e-6)


def test_halves_are_summed_in_single_precision() -> None:
    """2048 + 1 is 2048 in float16."""
    dy = np.array([[[1, 2048, 1, 1]]], np.float16)
    x = np.array([[[0, 0, 0, 9, 0, 0, 0]]], np.float16)
    expected = [1, 2049, 2050, 2051, 2050, 2, 1]
    (dx,) = run_operator("AveragePoolGradient", [x, dy, dy * np.float16(4)], kernel=4)
    np.testing.assert_array_equal(dx.reshape(-1), np.array(expected, np.float16))
    y, mask = run_operator("MaxPoolWithIndex", [x], 2, kernel=4)
    for op_type, inputs in (("MaxPoolGradient", [x, y, dy]), ("MaxPoolWithIndexGradient", [x, dy, mask])):
        (dx,) = run_operator(op_type, inputs, kernel=4)
        np.testing.assert_array_equal(dx.reshape(-1), np.array([0, 0, 0, 2051, 0, 0, 0], np.float16))


@pytest.mark.parametrize("order", ["NCHW", "NHWC"])
@pytest.mark.parametrize("op_type", POOLS)
def test_images_in_blocks_give_the_bytes_of_one_piece(
    monkeypatch: pytest.MonkeyPatch, op_type: str, order: str
) -> None:
    whole = Geometry((5, 4), (5, 4), (1, 1), (1, 1), (0,) * 4)
    cases = [PoolCase(op_type, SMALL, 3, 5, order), PoolCase(op_type, whole, 3, 5, order, whole=True)]
    for case in cases:
        x, dy = case.integers(), case.output_gradients()
        y, mask = forward(case, x)
        monkeypatch.setattr(blocks_module, "BLOCK", 1 << 16)
        at_once = case.gradient(x, y, dy, mask)
        monkeypatch.setattr(blocks_module, "BLOCK", 250)
        assert case.gradient(x, y, dy, mask).tobytes() == at_once.tobytes()
        check_definition(case)


# Runs after the first.

# What is refused.

X = np.zeros((2, 4, 6, 5), np.float32)
Y = np.zeros((2, 4, 5, 4), np.float32)
MASK = np.zeros((2, 4, 5, 4), np.int32)
HALF = Y.astype(np.float16)
REFUSED: dict[str, tuple[str, list[Array], dict[str, Any], type[DagexecError], str]] = {
    "shape of Y": ("MaxPoolGradient", [X, X, Y], {}, ShapeError, r"'x1' .*\(2, 4, 5, 4\) \(Y: .*found \(2, 4, 6, 5\)"),
    "shape of dY": ("LpPoolGradient", [X, Y, X], {}, ShapeError, r"'x2' .*\(2, 4, 5, 4\) \(dY: .*found \(2, 4, 6, 5\)"),
    "type of Y": ("AveragePoolGradient", [X, HALF, Y], {}, ShapeError, "'x1' must be one of float32, found float16"),
    "type of dY": ("MaxPoolGradient", [X, Y, HALF], {}, ShapeError, "'x2' must be one of float32, found float16"),
    "type of X": ("MaxPoolGradient", [MASK] * 3, {}, ShapeError, "'x0' must be one of float32.*found int32"),
    "shape of mask": (
        *("MaxPoolWithIndexGradient", [X, Y, MASK[:1]], {}, ShapeError),
        r"'x2' .*\(2, 4, 5, 4\) \(mask: .*found \(1, 4, 5, 4\)",
    ),
    "type of mask": ("MaxPoolWithIndexGradient", [X, Y, Y], {}, ShapeError, "'x2' must be one of int32, found float32"),
    "type of flat mask": (
        *("MaxPoolWithIndexGradient", [X, Y, MASK], {"flat_indices": 1}, ShapeError),
        "'x2' must be one of int64, found int32",
    ),
    "kernel": ("MaxPoolGradient", [X, Y, Y], {"kernel": 7}, ArgumentError, r"axis 0: kernel 7 .* 6 \+ 0 \+ 0"),
    "pad": ("LpPoolGradient", [X, Y, Y], {"pad": 2}, ArgumentError, "less than the kernel 2, found 2 and 2"),
    "stride": ("MaxPoolGradient", [X, Y, Y], {"stride": 0}, ArgumentError, r"strides must be at least 1.*\[0, 0\]"),
    "dilation": ("AveragePoolGradient", [X, Y, Y], {"dilation": 0}, ArgumentError, r"dilations must be at least 1.*0"),
}


@pytest.mark.parametrize(("op_type", "inputs", "arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_with_the_numbers(
    op_type: str, inputs: list[Array], arguments: Any, error: type[DagexecError], message: str
) -> None:
    with pytest.raises(error, match=f"(?s){op_type} 'y0'.*({message})"):
        run_operator(op_type, list(inputs), **({"kernel": 2} | arguments))


@pytest.mark.parametrize(("flat", "value", "limit"), [(0, 30, 30), (0, -2, 30), (1, 240, 240), (1, -2, 240)])
def test_an_index_outside_the_image_is_an_error_of_the_run(flat: int, value: int, limit: int) -> None:
    mask = MASK.astype(np.int64 if flat else np.int32)
    mask[1, 0, 0, 2] = value
    message = rf"MaxPoolWithIndexGradient 'y0'.*index {value} at place 82 must be in \[-1, {limit}\)"
    with pytest.raises(OperatorError, match=message):
        run_operator("MaxPoolWithIndexGradient", [X, Y, mask], kernel=2, flat_indices=flat)


@pytest.mark.parametrize(
    ("op_type", "flops"),
    [("MaxPool", 2), ("LpPool", 2), ("AveragePool", 1), ("MaxPoolWithIndex", 1)],
)
def test_cost_counts_the_taps(op_type: str, flops: int) -> None:
    definition = operator_def(f"{op_type}Gradient", ["x", "a", "b"], ["dx"], kernels=[3, 2], strides=[1, 3])
    pooled = TensorType((2, 4, 4, 2), FLOAT32)
    last = TensorType(pooled.shape, INT32) if op_type.endswith("Index") else pooled
    inputs = (TensorType((2, 4, 6, 5), FLOAT32), pooled, last)
    call = OperatorCall(definition, arguments_of(definition, "g"), inputs, (None,) * 3, "g")
    schema = schema_of(f"{op_type}Gradient")
    assert schema.infer is not None
    assert schema.infer(call) == [inputs[0]]
    assert schema.cost(call, schema.infer(call)) == Cost(64 * 6 * flops, 4 * (240 + 64 + 64), 4 * 240)
